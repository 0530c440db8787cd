#!/usr/bin/env bash
# FlopCounterMode counts no FLOPs of attention on a CPU, unless there is dropout.
#
# Versions: torch 2.13.0.
# Expected: scaled_dot_product_attention of 128 tokens in 4 heads of 32 counts 2 * 2 * 4 * 128 * 128 * 32 FLOPs on every device.
# Seen: 0 in float32 on a CPU: the kernel that runs there is not among the ops that the counter knows, and what it does not know counts
# as nothing, without a word. With dropout of 0.1 another kernel runs, and all of it is counted.
# Cost: a utilisation or a budget that is computed on a CPU before a GPU is rented lacks attention, most of a long context's work;
# switching dropout on seems to make a model dearer.
# MegaTrain counts with the counter's registry and two ops added to it.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy

cd "$work"
cat > seen.py <<'PYTHON'
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

HEADS, TOKENS, WIDTH = 4, 128, 32
query = torch.zeros(1, HEADS, TOKENS, WIDTH)
counted = {}
for dropout in (0.0, 0.1):
    with FlopCounterMode(display=False) as counter:
        scaled_dot_product_attention(query, query, query, dropout_p=dropout)
    counted[dropout] = counter.get_total_flops()
done = 2 * 2 * HEADS * TOKENS * TOKENS * WIDTH
print(f"attention takes {done:,} FLOPs; counted without dropout {counted[0.0]:,}, with dropout {counted[0.1]:,}")
assert counted == {0.0: 0, 0.1: done}, "this has changed"
PYTHON
OMP_NUM_THREADS=1 venv/bin/python seen.py
