#!/usr/bin/env bash
# pytorch_optimizer and optimi count steps by group: a parameter whose first gradient comes late steps three times too far.
#
# Versions: torch 2.13.0, pytorch_optimizer 4.1.0, torch-optimi 0.3.3.
# Expected: Adam's correction of its moments, which start at zero, follows how often *this* parameter was updated, as torch.optim has
# it: the first step is as long as the learning rate, whenever it comes.
# Seen: they count steps for the whole group. For a parameter that comes late the correction is over, and its first step is as long
# as (1 - beta1) / sqrt(1 - beta2) learning rates: 3.16 with the betas (0.9, 0.999) that most use. RAdam is there to leave out the first
# steps, because one gradient is no estimate of a variance; to such a parameter pytorch_optimizer's gives 2.83 rates.
# Cost: an expert that got its first token late, a layer that is unfrozen in mid-run, the head of a second task: the first steps throw it
# about, at the peak of a rate whose warm-up was planned for others. A group for each such parameter avoids it.
# MegaTrain's own optimizers count the updates of each parameter.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 pytorch_optimizer==4.1.0 torch-optimi==0.3.3 packaging==26.4 numpy

cd "$work"
OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import warnings

import optimi
import pytorch_optimizer
import torch

warnings.simplefilter("ignore")
RATE, BETAS, LATE = 1e-3, (0.9, 0.999), 3000


def first_step(make):
    """How far a parameter moves at its first gradient, of 1, in units of the learning rate: at step 1, and after `LATE` steps."""
    lengths = []
    for wait in (0, LATE):
        early, late = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        optimizer = make([early, late], lr=RATE, betas=BETAS, weight_decay=0.0)
        early.grad = torch.ones(2)
        for _ in range(wait):
            optimizer.step()
        late.grad = torch.ones(2)
        optimizer.step()
        lengths.append((1 - late.detach()).abs().max().item() / RATE)
    return lengths


theory = (1 - BETAS[0]) / (1 - BETAS[1]) ** 0.5 * (1 - BETAS[1] ** (LATE + 1)) ** 0.5
print(f"with the corrections of step {LATE + 1}: {theory:.3f}")
at_start, later = first_step(torch.optim.AdamW)
print(f"torch.optim.AdamW: {at_start:.3f} at the start, {later:.3f} late")
assert abs(at_start - 1) < 1e-3 and abs(later - 1) < 1e-3

makers = {f"pytorch_optimizer.{name}": getattr(pytorch_optimizer, name) for name in ("AdamC", "AdamP", "GaLore")}
makers["optimi.AdamW"] = optimi.AdamW
for name, make in makers.items():
    at_start, later = first_step(make)
    print(f"{name}: {at_start:.3f} at the start, {later:.3f} late")
    assert abs(at_start - 1) < 1e-3, f"{name} has another first step"
    assert abs(later - theory) < 1e-2, f"this has changed: {name}"

at_start, later = first_step(torch.optim.RAdam)
print(f"torch.optim.RAdam: {at_start:.3f} at the start, {later:.3f} late")
assert abs(later - at_start) < 1e-3
at_start, later = first_step(pytorch_optimizer.RAdam)
print(f"pytorch_optimizer.RAdam: {at_start:.3f} at the start, {later:.3f} late")
assert at_start == 0 and later > 2, "this has changed: pytorch_optimizer.RAdam"
PYTHON
