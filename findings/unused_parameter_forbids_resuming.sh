#!/usr/bin/env bash
# A checkpoint of torch.distributed.checkpoint cannot be loaded by its own recipe if one parameter never had a gradient.
#
# Versions: torch 2.13.0.
# Expected: `save` of what `get_state_dict` returns, and `load` into what `get_state_dict` returns in a new process of the same program.
# Seen: after a step the optimizer has state for the parameters that had a gradient, and that is saved. In the new process the optimizer
# is empty and `get_state_dict` makes state for *every* parameter, so `load` asks for an entry that was never written: "Missing key in
# checkpoint state_dict". The error is a CheckpointException, which is no Exception: a program that goes back to an older checkpoint
# by `except Exception` ends with it.
# With `DefaultLoadPlanner(allow_partial_load=True)` it loads, and the unused parameter has a count of 1 where it had none.
# Cost: an expert that got no token, a head or an encoder that took no part: the run saves without a word for days and cannot resume.
# MegaTrain saves how many updates each parameter has missed, and reads such checkpoints with zeros for what they lack.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy

cd "$work"
cat > seen.py <<'PYTHON'
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

warnings.simplefilter("ignore")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def parts():
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def state(model, optimizer):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def counts(optimizer):
    return [float(optimizer.state[p]["step"]) if p in optimizer.state else None for p in optimizer.param_groups[0]["params"]]


model, optimizer = parts()
for _ in range(3):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dcp.save(state(model, optimizer), checkpoint_id="checkpoint")
print("steps of each parameter when saved:", counts(optimizer))
assert counts(optimizer) == [3.0, 3.0, None, None]

model, optimizer = parts()
template = state(model, optimizer)
try:
    dcp.load(template, checkpoint_id="checkpoint")
except BaseException as error:
    message = str(error).strip().splitlines()[-1]
    print(f"load: {type(error).__name__}, an Exception: {isinstance(error, Exception)}: {message}")
    assert "Missing key" in message and "unused" in message, "this has changed"
    assert not isinstance(error, Exception), "this has changed"
else:
    raise SystemExit("this has changed: it loads")

partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
dcp.load(template, checkpoint_id="checkpoint", planner=partial)
set_state_dict(model, optimizer, model_state_dict=template["model"], optim_state_dict=template["optimizer"])
print("steps of each parameter after a partial load:", counts(optimizer))
assert counts(optimizer) == [3.0, 3.0, 1.0, 1.0], "this has changed"
PYTHON
OMP_NUM_THREADS=1 venv/bin/python seen.py
