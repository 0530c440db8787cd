#!/usr/bin/env bash
# With dynamic rope, the loss of a batch depends on the batch before it, in evaluation too.
#
# Versions: transformers 5.23.0, torch 2.13.0.
# Expected: a model in `eval()` is a function of its input.
# Seen: "dynamic" rope stretches its frequencies for sequences longer than the original length, and keeps the stretch of the longest
# sequence so far until one shorter than the original length comes (transformers issue 27226; pull request 46624
# mended the reset). A batch of 20 tokens, with an original length of 16, has another loss after one of 60.
# Cost: validation losses depend on the order of batches, and so do gradients; the same holds for text that is generated.
# MegaTrain computes the rotation of each micro-batch from its own length.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16,
    rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})).eval()
long, short = torch.randint(3, 96, (1, 60)), torch.randint(3, 96, (1, 20))
with torch.no_grad():
    before = model(short, labels=short).loss.item()
    again = model(short, labels=short).loss.item()
    model(long)
    after = model(short, labels=short).loss.item()
    model(short[:, :10])
    reset = model(short, labels=short).loss.item()
print(f"loss of one batch: {before:.7f}, at once again {again:.7f}, after a longer one {after:.7f}, after a short one {reset:.7f}")
assert before == again and before != after, "this has changed: the loss does not depend on the batch before"
PYTHON
