#!/usr/bin/env bash
# accelerate leaves two optimizers that are wrapped as one at their peak learning rate, whatever the scheduler says.
#
# Versions: accelerate 1.15.0, torch 2.13.0.
# Expected: an optimizer with the groups of a Muon and an AdamW, whose step calls both, follows its scheduler, as it does in a plain
# loop: the rates that a step uses are those that `scheduler.get_last_lr()` tells.
# Seen: `Accelerator.prepare` reads the optimizer's state and loads it again, on a CPU too. Loading makes new groups, so that the
# scheduler changes those of the wrapper, and Muon and AdamW keep their old ones. After three steps that halve the rate,
# 0.0625 is told, and 0.5 is used.
# Cost: `torch.optim.Muon` takes matrices only, so whoever trains with it under a Trainer wraps it so. Warm-up and decay are missing
# without a word: the first steps are taken at the peak, and the loss at the end is that of a constant rate.
# MegaTrain's Muon is one optimizer with one rate of each step, under a Trainer too.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile accelerate==1.15.0 torch==2.13.0 numpy

cd "$work"
cat > seen.py <<'PYTHON'
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR


class Both(torch.optim.Optimizer):
    """Two optimizers as one, with their groups."""

    def __init__(self, *parts):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure=None):
        for part in self.parts:
            part.step()


def rates(prepares):
    model = torch.nn.Linear(4, 4)
    parts = torch.optim.Muon([model.weight], lr=0.5), torch.optim.AdamW([model.bias], lr=0.5)
    optimizer = Both(*parts)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    if prepares:
        model, optimizer, scheduler = Accelerator(cpu=True).prepare(model, optimizer, scheduler)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return scheduler.get_last_lr(), [part.param_groups[0]["lr"] for part in parts]


for prepares in (False, True):
    told, used = rates(prepares)
    print(f"{'prepared by accelerate' if prepares else 'in a plain loop':22}: told {told}, used {used}")
    assert told == [0.0625, 0.0625]
    assert used == ([0.5, 0.5] if prepares else told), "this has changed"
PYTHON
OMP_NUM_THREADS=1 venv/bin/python seen.py
