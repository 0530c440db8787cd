#!/usr/bin/env bash
# PEFT's option that keeps tied embeddings tied makes `merge_and_unload` add the adapter to them twice.
#
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0.
# Expected: the merged model computes what the adapted one computes. `LoraConfig(ensure_weight_tying=True)` is for bases whose head
# is their embedding: both ends get one adapter.
# Seen: merging visits both layers and adds the same delta to the one weight of both each time. Merging warns of
# "complications" with tied layers in general, and not that the result is wrong with the option that was made for them.
# Cost: a merged model that is another one than was trained and evaluated. The saved adapter is right.
# MegaTrain's `export --merge` adds the delta of such a pair once.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def tiny(tied):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                        num_attention_heads=2, tie_word_embeddings=tied))

ids = torch.arange(3, 15)[None]
config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)
model = peft.get_peft_model(tiny(tied=True), config).eval()
with torch.no_grad():
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    layer = model.get_base_model().lm_head
    weight, delta = layer.base_layer.weight.clone(), layer.get_delta_weight("default")
    adapted = model(ids).logits
    merged = model.merge_and_unload()
    times = ((merged.lm_head.weight - weight) * delta).sum() / (delta * delta).sum()
    apart = (merged(ids).logits - adapted).abs().max()
print(f"the delta was added {times:.4f} times; the largest difference of logits after merging is {apart:.3f}")
assert abs(times - 2) < 1e-3 and apart > 0.01, "this has changed: the delta of the pair is not added twice"
PYTHON
