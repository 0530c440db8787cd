#!/usr/bin/env bash
# heavyball keeps the moments of bfloat16 parameters in float32 until a checkpoint is loaded; from then on they are bfloat16.
#
# Versions: heavyball 3.2.1, torch 2.13.0.
# Expected: `storage_dtype` is float32, the default, so the moments are. A checkpoint holds them so, and a run that loads it has them so.
# Seen: torch's `Optimizer.load_state_dict` casts each floating tensor of the state, but for one called `step`, to the dtype of its
# parameter, and heavyball calls it. Half of each moment's bits are dropped, and those of later steps are kept in bfloat16, too, while
# the group goes on to say `storage_dtype: float32`. No warning. Over float32 parameters the moments come back bit for bit.
# Cost: where parameters are bfloat16 and the moments were kept in float32 on purpose, a run that was resumed is another run than one
# that was not, from its first step on, and every step of it rounds the moments to 8 bits.
# MegaTrain's float32 moments stay float32 through a checkpoint.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 heavyball==3.2.1 numpy

cd "$work"
# Compilation changes no dtype and would take minutes.
TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import io
import warnings

import heavyball
import torch

warnings.simplefilter("ignore")
NAMES = ("AdamW", "ADOPT", "NAdam")


def step(optimizer, parameter, count):
    generator = torch.Generator().manual_seed(count)
    parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def moments(optimizer, parameter):
    """The matrices of the parameter's state by their names."""
    views = optimizer.state[parameter].values()
    return {name: value for view in views for name, value in view.items() if torch.is_tensor(value) and value.ndim == 2}


def resumed(name, dtype):
    """An optimizer's moments before and after a checkpoint goes through a file, and what the new one says of their dtype."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(8, 8).to(dtype))
    optimizer = getattr(heavyball, name)([parameter], lr=1e-2)
    for count in range(3):
        step(optimizer, parameter, count)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    copy = torch.nn.Parameter(parameter.detach().clone())
    other = getattr(heavyball, name)([copy], lr=1e-2)
    other.load_state_dict(torch.load(file, weights_only=False))
    before, loaded = moments(optimizer, parameter), moments(other, copy)
    equal = all(torch.equal(before[key], loaded[key]) for key in before)
    step(other, copy, 3)
    after = {str(value.dtype) for value in moments(other, copy).values()}
    return {str(value.dtype) for value in before.values()}, after, equal, other.param_groups[0]["storage_dtype"]


for name in NAMES:
    before, after, equal, says = resumed(name, torch.bfloat16)
    print(f"{name}, bfloat16 parameters: moments {before}, a step after loading {after}, equal when loaded: {equal}; the group says {says}")
    assert before == {"torch.float32"} and after == {"torch.bfloat16"}, "this has changed"
    assert not equal and says == "float32", "this has changed"
    before, after, equal, _ = resumed(name, torch.float32)
    assert before == after == {"torch.float32"} and equal, "float32 parameters: this has changed"
print("float32 parameters: float32, and equal when loaded")
PYTHON
