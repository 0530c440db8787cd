#!/usr/bin/env bash
# torch.distributed.checkpoint.state_dict.get_optimizer_state_dict makes a new optimizer take a step, which changes all later ones.
#
# Versions: torch 2.13.0.
# Expected: to read the state dict of an optimizer changes neither the optimizer nor how training goes on.
# Seen: an optimizer without state is stepped once with gradients of zero and a rate of 0, so that it has state to return. The weights
# stay, the state does not: AdamW's count of steps is 1 before its first step, so its bias correction is that of the second step,
# and the first step moves each weight by 0.74 of what it should. Of eleven optimizers of torch.optim tried, three go on as if nothing had
# happened (RMSprop, Adagrad, and SGD with momentum but without dampening).
# Cost: a run that saves a checkpoint before its first step, or that builds the template for `load` and then finds no checkpoint,
# is another run from then on, and so is what resumes from a checkpoint of step 0. Nothing is said.
# MegaTrain counts updates itself; reading its state changes nothing.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy

cd "$work"
cat > seen.py <<'PYTHON'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

OPTIMIZERS = {
    "AdamW": {},
    "Adam": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
    "SGD": {"momentum": 0.9, "dampening": 0.9},
    "SGD without dampening": {"momentum": 0.9},
    "RMSprop": {},
    "Adagrad": {},
}
UNCHANGED = {"SGD without dampening", "RMSprop", "Adagrad"}


def trained(name, options, *, is_read, steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = getattr(torch.optim, name.split()[0])(model.parameters(), lr=1e-2, **options)
    before = model.weight.detach().clone()
    if is_read:
        get_optimizer_state_dict(model, optimizer)
        assert torch.equal(model.weight, before)
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach() - before, counts


for name, options in OPTIMIZERS.items():
    (plain, _), (read, counts) = (trained(name, options, is_read=is_read, steps=3) for is_read in (False, True))
    print(f"{name:22} read before its first step: counts {sorted(set(counts))}, weights differ by {(plain - read).abs().max():.2g}")
    assert torch.equal(plain, read) is (name in UNCHANGED), "this has changed"
(plain, _), (read, _) = (trained("AdamW", {"weight_decay": 0.0}, is_read=is_read, steps=1) for is_read in (False, True))
print(f"AdamW's first step is {(read / plain).mean():.3f} of what it is without the reading")
assert abs((read / plain).mean() - 0.744) < 1e-2, "this has changed"
PYTHON
OMP_NUM_THREADS=1 venv/bin/python seen.py
