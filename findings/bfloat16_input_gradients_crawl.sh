#!/usr/bin/env bash
# On a processor without AVX-512 a linear layer's input gradient in bfloat16 takes many times as long as its forward pass.
#
# Versions: torch 2.13.0.
# Expected: each of the two products of backward has as many operations as forward, so it takes about as long. bfloat16 has half of the
# bytes of float32, to which it is widened, and is at worst a little slower.
# Seen: without AVX-512 oneDNN computes no products in bfloat16, and PyTorch's own loop does. It reads an operand that is not transposed
# column by column; in the input gradient that is the weight. So this takes 50 times as long as forward, and nearly 400 times as
# long as in float32.
# Cost: a benchmark of forward passes, or of evaluation, promises a training speed that is wrong by a factor of 20.
# The variables below make any x86 processor compute as most desktops do (AMD before Zen 4, Intel's Core since the 12th generation).
# MegaTrain times all three products when it plans, and `plan` and `train` say that `precision: fp32` is quicker there.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy

cd "$work"
ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import time
import torch

def seconds(product):
    product()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        product()
        times.append(time.perf_counter() - begin)
    return min(times)

torch.manual_seed(0)
took = {}
for dtype in (torch.bfloat16, torch.float32):
    x, weight, gradient = torch.randn(16, 2048, dtype=dtype), torch.randn(4096, 2048, dtype=dtype), torch.randn(16, 4096, dtype=dtype)
    products = {"forward": lambda: x @ weight.T, "input gradient": lambda: gradient @ weight, "weight gradient": lambda: gradient.T @ x}
    took[dtype] = {name: seconds(product) for name, product in products.items()}
    print(dtype, {name: f"{1e3 * value:.1f} ms" for name, value in took[dtype].items()})

slow = took[torch.bfloat16]["input gradient"]
print(f"input gradient in bfloat16: {slow / took[torch.bfloat16]['forward']:.0f} times as long as forward,",
      f"{slow / took[torch.float32]['input gradient']:.0f} times as long as in float32")
assert slow > 10 * took[torch.bfloat16]["forward"] and slow > 10 * took[torch.float32]["input gradient"], "this has changed"
PYTHON
