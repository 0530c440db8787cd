#!/usr/bin/env bash
# torchdata's loaders, resumed from their own state, yield other epochs than those of a run that was not interrupted.
#
# Versions: torchdata 0.11.0, torch 2.13.0, numpy 2.4.6.
# Expected: `load_state_dict` in a new process of the same program, with the same seeds, goes on with the rows that were left, and the epochs after that
# have the orders of a run that was not interrupted. StatefulDataLoader without a `generator` does so.
# Seen: StatefulDataLoader(shuffle=True, generator=...), as reproducible runs have it, draws from the generator the order of an epoch and then a
# seed for its workers, if it has any or not. Loading sets the generator back to before the order and draws the order alone. The resumed epoch is
# right, and all later ones come in another order: whether and when a run was interrupted decides what it trains.
# torchdata.nodes over torch's RandomSampler, as its guides have it, saves how many rows were drawn and an epoch that RandomSampler does
# not know. Loading draws the order of the first epoch and skips as many rows. Interrupted in the second epoch, some rows come twice and
# others not at all. Neither says anything.
# Cost: a resumed run is another run, and one by nodes that is resumed often sees some rows several times an epoch and misses others.
# MegaTrain draws the order of an epoch from the seed and the epoch's number.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 torchdata==0.11.0 numpy==2.4.6

cd "$work"
cat > seen.py <<'PYTHON'
import torch
from torch.utils.data import RandomSampler
from torchdata.nodes import Loader, MapStyleWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

ROWS = list(range(24))


def generator():
    return torch.Generator().manual_seed(5)


def stateful(seeded):
    options = {"generator": generator()} if seeded else {}
    return StatefulDataLoader(ROWS, batch_size=None, shuffle=True, **options)


def nodes(seeded):
    return Loader(MapStyleWrapper(ROWS, RandomSampler(ROWS, generator=generator() if seeded else None)))


def orders(new, seeded, interrupted):
    """The rows of three epochs; `interrupted`: None, or in which epoch another process takes over after 10 rows."""
    torch.manual_seed(0)  # as every process of the program does when it starts
    loader = new(seeded)
    epochs = []
    for epoch in range(3):
        rows, rest = [], iter(loader)
        if epoch == interrupted:
            rows = [int(next(rest)) for _ in range(10)]
            state = loader.state_dict()
            torch.manual_seed(0)
            loader = new(seeded)
            loader.load_state_dict(state)
            rest = iter(loader)
        epochs.append(rows + [int(row) for row in rest])
    return epochs


CASES = [(stateful, False), (stateful, True), (nodes, False), (nodes, True)]
for new, seeded in CASES:
    whole = orders(new, seeded, interrupted=None)
    for interrupted in (0, 1):
        resumed = orders(new, seeded, interrupted)
        same = [a == b for a, b in zip(whole, resumed, strict=True)]
        missing = len(set(ROWS) - set(resumed[interrupted]))
        print(f"{new.__name__}{' with a generator' if seeded else ''}, interrupted in epoch {interrupted}: epochs as without {same},", end=" ")
        print(f"{missing} rows missing in it, {len(resumed[interrupted]) - len(set(resumed[interrupted]))} twice")
        if new is stateful:
            right = interrupted + 1 if seeded else 3
        else:
            right = 1 if interrupted == 1 else 3
        assert same == [True] * right + [False] * (3 - right), "this has changed"
        assert (missing > 0) == (new is nodes and interrupted == 1), "this has changed"
PYTHON
OMP_NUM_THREADS=1 venv/bin/python -W ignore seen.py
