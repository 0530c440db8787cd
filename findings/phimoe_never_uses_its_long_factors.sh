#!/usr/bin/env bash
# Phi-3.5-MoE computes sequences beyond its original length with the short factors of LongRoPE.
#
# Versions: transformers 5.23.0 and 4.57.6, torch 2.13.0.
# Expected: beyond `original_max_position_embeddings` (4,096), positions turn at the frequencies of `long_factor`, as in 4.57.6 and as
# Phi-3 does in both versions.
# Seen: in 5.23.0 the frequencies are those of `short_factor`, whatever the length, while the magnitude is that of the long form. No warning.
# Cost: a published model of 128k positions reads long text with rotations that it was never trained with, and a model
# that is fine-tuned on long text with one version is another model in the other.
# MegaTrain runs the forward of the installed transformers, so it computes what that version computes.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for version in 5.23.0 4.57.6; do
    python3 -m venv "$work/$version"
    "$work/$version/bin/pip" install --quiet --no-compile torch==2.13.0 "transformers==$version"
done

cd "$work"
cat > seen.py <<'PYTHON'
import sys

import torch
import transformers
from transformers import PhimoeConfig
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

ORIGINAL, LENGTH, LONG = 16, 30, 4.0
rope = {"type": "longrope", "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [LONG] * 4, "short_mscale": 1.1,
        "long_mscale": 1.2, "original_max_position_embeddings": ORIGINAL, "rope_theta": 10000.0}
config = PhimoeConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1, max_position_embeddings=64,
                      rope_theta=10000.0, rope_scaling=rope, original_max_position_embeddings=ORIGINAL)
rotary = PhimoeRotaryEmbedding(config)
x, positions = torch.zeros(1, LENGTH, 32), torch.arange(LENGTH)[None]
version_4 = transformers.__version__.startswith("4")
cosine = rotary(x, seq_len=LENGTH)[0] if version_4 else rotary(x, positions)[0][0]
base = 1 / (10000.0 ** (torch.arange(0, 8, 2) / 8))
off = {}
for name, factor in (("short", 1.0), ("long", LONG)):
    angles = torch.outer(torch.arange(float(LENGTH)), base / factor)
    off[name] = (cosine - torch.cat([angles, angles], -1).cos() * 1.2).abs().max().item()
    print(f"transformers {transformers.__version__}: at {LENGTH} of {ORIGINAL} positions, {off[name]:.1e} from the {name} factors")
right, wrong = ("long", "short") if version_4 else ("short", "long")
assert off[right] < 1e-5 < 0.1 < off[wrong], f"this has changed: {off}"
PYTHON
for version in 5.23.0 4.57.6; do HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$version/bin/python" seen.py; done
