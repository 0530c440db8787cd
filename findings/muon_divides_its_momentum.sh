#!/usr/bin/env bash
# torch.optim.Muon without Nesterov divides the stored momentum of bfloat16 parameters at every step.
#
# Versions: torch 2.13.0.
# Expected: with a constant gradient of 1 and momentum 0.5, the buffer is 0.5, 0.75, 0.875, as it is for float32 parameters.
# Seen: so it is in float32, and in bfloat16 with nesterov=True (the default). With nesterov=False and bfloat16 parameters the
# orthogonalization works in place on the buffer itself, since a cast to bfloat16 copies nothing: what is kept is the momentum
# over its norm, 0.1768 after every step. Nothing is said, and the loss falls all the same.
# Cost: the history of gradients is lost, each step weighs the newest gradient by its size; a run in float32 and one in bfloat16 are
# two different optimizers under one name, and so are checkpoints of the two.
# MegaTrain keeps all optimizer state in float32.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy

cd "$work"
cat > seen.py <<'PYTHON'
import torch


def buffers(dtype, nesterov):
    parameter = torch.nn.Parameter(torch.ones(8, 4, dtype=dtype))
    optimizer = torch.optim.Muon([parameter], lr=1e-3, momentum=0.5, nesterov=nesterov, weight_decay=0)
    means = []
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        means.append(round(optimizer.state[parameter]["momentum_buffer"].float().mean().item(), 3))
    return means


expected = [0.5, 0.75, 0.875]
for dtype in (torch.float32, torch.bfloat16):
    for nesterov in (True, False):
        means = buffers(dtype, nesterov)
        print(f"{str(dtype):14} nesterov={nesterov!s:5}: momentum after three steps {means}")
        divided = dtype is torch.bfloat16 and not nesterov
        assert (means == expected) is not divided, "this has changed"
PYTHON
OMP_NUM_THREADS=1 venv/bin/python seen.py
