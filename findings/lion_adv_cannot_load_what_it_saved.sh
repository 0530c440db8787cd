#!/usr/bin/env bash
# adv_optm's Lion cannot load a checkpoint that it saved itself.
#
# Versions: adv_optm 2.5.16, torch 2.13.0.
# Expected: `load_state_dict` takes what `state_dict` returned, as it does for AdamW_adv of the same package.
# Seen: "KeyError: 'actual_state_precision'", with all defaults. What was loaded is mended with a setting that the other
# optimizers of the package write into their groups, and that Lion_adv neither has nor asks for. The error comes after the state is in
# place: a program that catches it, so as to begin with new moments, goes on with the old ones.
# Cost: a run trains and saves for days, and it shows only when it is resumed. `torch.optim.Optimizer.load_state_dict(optimizer, state)`
# loads the file.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 adv_optm==2.5.16 numpy

cd "$work"
OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 venv/bin/python - <<'PYTHON'
import io

import adv_optm
import torch


def trained(name):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(8, 8))
    optimizer = getattr(adv_optm, name)([parameter], lr=1e-2)
    for _ in range(3):
        parameter.grad = torch.randn(8, 8)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return parameter, optimizer, torch.load(file, weights_only=False)


def empty(name, parameter):
    copy = torch.nn.Parameter(parameter.detach().clone())
    return copy, getattr(adv_optm, name)([copy], lr=1e-2)


parameter, optimizer, saved = trained("AdamW_adv")
_, other = empty("AdamW_adv", parameter)
other.load_state_dict(saved)
print("AdamW_adv: loaded")

parameter, optimizer, saved = trained("Lion_adv")
copy, other = empty("Lion_adv", parameter)
try:
    other.load_state_dict(saved)
except KeyError as error:
    print(f"Lion_adv: KeyError {error}; moments that it has now: {len(other.state)}")
    assert error.args == ("actual_state_precision",), f"this has changed: {error}"
    assert len(other.state) == 1, "this has changed: nothing is loaded before the error"
else:
    raise SystemExit("this has changed: Lion_adv loads its checkpoint")

copy, other = empty("Lion_adv", parameter)
torch.optim.Optimizer.load_state_dict(other, saved)
parameter.grad = copy.grad = torch.randn(8, 8)
optimizer.step()
other.step()
equal = torch.equal(parameter, copy)
print(f"Lion_adv by torch's own method: the next step is equal: {equal}")
assert equal
PYTHON
