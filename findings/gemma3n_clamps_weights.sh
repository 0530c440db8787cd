#!/usr/bin/env bash
# Gemma 3n's forward changes its weights: in training mode it clamps a parameter in place, without an optimizer step.
#
# Versions: transformers 5.23.0, torch 2.13.0.
# Expected: a forward reads parameters; only an optimizer changes them. A clip (`altup_coef_clip`, 120 by default) bounds what is computed.
# Seen: `altup.prediction_coefs.weight` holds clipped values after a forward in training mode, even under `torch.no_grad()`; in evaluation
# mode the same forward computes with the values as they are, and keeps them.
# Cost: a loss measured in training mode differs from the one that `eval()` measures, and measuring it changes the model. Where a weight
# is held twice (float32 masters, shards, an average of weights, offloaded copies), the copies part without a step.
# MegaTrain gives a forward a copy of the layer's weights, so its float32 masters keep their values.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0

cd "$work"
cat > seen.py <<'PYTHON'
import torch
from transformers import AutoModelForCausalLM, Gemma3nTextConfig

CLIP, LARGE = 0.5, 1.0
config = Gemma3nTextConfig(
    vocab_size=32, vocab_size_per_layer_input=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, hidden_size_per_layer_input=8, num_kv_shared_layers=0, laurel_rank=4,
    layer_types=["full_attention"] * 2, activation_sparsity_pattern=[0.0] * 2, altup_coef_clip=CLIP,
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config)
weight = model.model.layers[0].altup.prediction_coefs.weight
seen = {}
for mode in ("eval", "train"):
    with torch.no_grad():
        weight.fill_(LARGE)
        getattr(model, mode)()
        model(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=False)
    seen[mode] = weight.max().item()
    print(f"{mode}: the weight was {LARGE} and is {seen[mode]} after a forward without gradients")
assert seen == {"eval": LARGE, "train": CLIP}, "this has changed"
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python seen.py
