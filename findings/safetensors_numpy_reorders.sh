#!/usr/bin/env bash
# `safetensors.numpy.save_file` writes a transposed or strided array with its elements in another order.
#
# Versions: safetensors 0.8.0, numpy 2.4.6.
# Expected: what `load_file` returns equals what was saved, or the save is refused, as `safetensors.torch` refuses tensors that
# are not contiguous. Version 0.7 saved such arrays right.
# Seen: the bytes at the array's address are written as if it were in C order, without an error or a warning. This is known to
# the library (safetensors issue 825, open when this was written).
# Cost: a converter that transposes a weight before saving it (Linear layers of GPT-2, JAX checkpoints) writes a model of the
# right shapes and names that computes nonsense.
# MegaTrain writes such files with code of its own, which brings each tensor into C order first.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile safetensors==0.8.0 numpy==2.4.6

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import numpy
from safetensors.numpy import load_file, save_file

arrays = {
    "C order": numpy.arange(6.0).reshape(2, 3),
    "transposed": numpy.arange(6.0).reshape(2, 3).T,
    "every second": numpy.arange(6.0)[::2],
}
same = {}
for name, array in arrays.items():
    save_file({"x": array}, "x.safetensors")
    read = load_file("x.safetensors")["x"]
    same[name] = bool(numpy.array_equal(read, array))
    print(f"{name}: saved {array.tolist()}, loaded {read.tolist()}, equal: {same[name]}")
assert same == {"C order": True, "transposed": False, "every second": False}, f"this has changed: {same}"
PYTHON
