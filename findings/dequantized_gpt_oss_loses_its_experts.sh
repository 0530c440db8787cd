#!/usr/bin/env bash
# A gpt-oss that transformers has dequantized is saved with its experts under names that no model reads.
#
# Versions: transformers 5.23.0, peft 0.21.2, torch 2.13.0.
# Expected: a model loaded with Mxfp4Config(dequantize=True), as fine-tuning recipes do, and saved, is read back with the same logits.
# Seen: `save_pretrained` succeeds and writes plain bfloat16 experts as `..._blocks`, the names of the packed ones. Read back, the experts
# of every layer are missing and get random values; only the loading report tells. What peft's `merge_and_unload` returns is saved
# in the same way. `save_pretrained(folder, save_original_format=False)` writes the right names.
# Cost: a fine-tuned or merged model is published broken. Its weights are in the file and can be rescued by renaming.
# MegaTrain dequantizes while it loads, writes its own exports, and verifies them.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2

cd "$work"
cat > seen.py <<'PYTHON'
import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

SHAPE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
EXPERTS = {"head_dim": 16, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
IDS = torch.arange(3, 15)[None]


def publish(folder):
    """Write a tiny model as gpt-oss is published: experts in mxfp4, everything else in bfloat16."""
    torch.manual_seed(0)
    config = GptOssConfig(**SHAPE, **EXPERTS, layer_types=["full_attention"])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "experts" in name and tensors[name].dim() == 3]:
        count, inside, outside = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (count, outside, inside // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 122, (count, outside, inside // 32), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def tell(name, model, **options):
    folder = Path(name)
    model.save_pretrained(folder, **options)
    names = sorted(tensor.rsplit(".", 1)[1] for tensor in load_file(folder / "model.safetensors") if "gate_up_proj" in tensor)
    again, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    apart = (logits(again) - logits(model)).abs().max().item()
    print(f"{name}: saved as {names}; missing when read: {sorted(report['missing_keys'])}; logits apart: {apart:.3g}")
    return bool(report["missing_keys"]), apart > 0.01


publish(Path("published"))
options = {"dtype": torch.bfloat16, "quantization_config": Mxfp4Config(dequantize=True)}
dequantized = AutoModelForCausalLM.from_pretrained("published", **options)
assert tell("saved", dequantized) == (True, True), "this has changed"
assert tell("saved with save_original_format=False", dequantized, save_original_format=False) == (False, False)
adapted = get_peft_model(dequantized, LoraConfig(target_modules=["q_proj"]))
assert tell("merged", adapted.merge_and_unload()) == (True, True), "this has changed"
PYTHON
OMP_NUM_THREADS=1 venv/bin/python seen.py
