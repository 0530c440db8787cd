#!/usr/bin/env bash
# A model that was dequantized from fp8 is saved as fp8 again, with a config that does not say so.
#
# Versions: transformers 5.23.0, torch 2.13.0, accelerate 1.15.0.
# Expected: a model loaded with `FineGrainedFP8Config(dequantize=True)` is a plain bfloat16 model, and `save_pretrained` writes it as one.
# Seen: `save_pretrained` reverses the conversion of loading: the projections are written in float8 with their scales, and config.json has
# no `quantization_config`. Read back without it, the scales are no parameters of the model.
# Cost: training at full precision is rounded to 8 bits when it is saved, and whoever loads the folder gets unscaled weights.
# MegaTrain writes plain tensors after dequantizing.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig

BLOCK = 16
torch.manual_seed(0)
config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained("fp8")
tensors = load_file("fp8/model.safetensors")
for name in [name for name in tensors if "proj" in name]:
    height, width = tensors[name].shape
    scales = torch.rand(height // BLOCK, width // BLOCK) / 100 + 0.01
    whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    tensors[name], tensors[f"{name}_scale_inv"] = (tensors[name].float() / whole).to(torch.float8_e4m3fn), scales
save_file(tensors, "fp8/model.safetensors", {"format": "pt"})
file = Path("fp8/config.json")
quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))

ids = torch.arange(3, 15)[None]
how = FineGrainedFP8Config(dequantize=True)
model = AutoModelForCausalLM.from_pretrained("fp8", dtype=torch.bfloat16, quantization_config=how).eval()
print("dequantized:", {parameter.dtype for parameter in model.parameters()})
model.save_pretrained("saved")
dtypes = {str(tensor.dtype) for tensor in load_file("saved/model.safetensors").values()}
says = json.loads(Path("saved/config.json").read_text()).get("quantization_config")
print(f"saved: {sorted(dtypes)}, quantization_config {says}")
assert "torch.float8_e4m3fn" in dtypes and says is None, f"this has changed: {dtypes}, {says}"
with torch.no_grad():
    again = AutoModelForCausalLM.from_pretrained("saved", dtype=torch.bfloat16).eval()
    apart = (again(ids).logits - model(ids).logits).abs().max().item()
    print(f"logits differ by {apart:.2f}, where the largest is {model(ids).logits.abs().max().item():.2f}")
assert apart > 0.1, f"this has changed: the saved model is off by {apart}"
PYTHON
