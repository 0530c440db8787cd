#!/usr/bin/env bash
# A block-fp8 weight whose last block is cut is dequantized with other scales than it was published with, or cannot be loaded.
#
# Versions: transformers 5.23.0, torch 2.13.0, accelerate 1.15.0.
# Expected: with `weight_block_size: [32, 32]`, row 31 of a weight has the scale of the first block of rows, whatever the number of rows.
# Seen: `FineGrainedFP8Config(dequantize=True)` does not read the size of a block from the config but divides the weight by the number of
# scales. 48 rows with 2 rows of scales become blocks of 24, so rows 24 to 31 have the second block's scale: no error, no warning. 40 rows
# with 3 rows of scales (blocks of 16) cannot be divided and do not load.
# Cost: weights of a fine-tuned or continued model are off by the ratio of two scales from the first step on. A latent projection of 512 + 64
# rows in blocks of 128, as in DeepSeek V3's configuration, has a cut block.
# MegaTrain dequantizes by `weight_block_size`.

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

NAME = "model.layers.0.mlp.gate_proj.weight"

def published(folder, rows, block):
    """A folder with fp8 projections, one float32 scale for each block; returns gate_proj as its blocks define it."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=rows, num_hidden_layers=1, num_attention_heads=4)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = load_file(f"{folder}/model.safetensors")
    for name in [name for name in tensors if "proj" in name]:
        height, width = tensors[name].shape
        scales = torch.rand(-(-height // block), -(-width // block)) / 100 + 0.01
        whole = scales.repeat_interleave(block, 0)[:height].repeat_interleave(block, 1)[:, :width]
        tensors[name] = (tensors[name].float() / whole).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        if name == NAME:
            defined = tensors[name].float() * whole
    save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"})
    file = Path(folder, "config.json")
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))
    return defined

def loaded(folder):
    how = FineGrainedFP8Config(dequantize=True)
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=how).named_parameters())[NAME]

whole = published("whole", 64, 32)
assert torch.equal(loaded("whole"), whole), "this has changed: whole blocks differ"
cut = published("cut", 48, 32)
wrong = (loaded("cut") != cut).any(1).nonzero().flatten().tolist()
print(f"48 rows in blocks of 32: rows with another scale than published: {wrong}")
assert wrong == [*range(24, 32)], f"this has changed: {wrong}"
published("odd", 40, 16)
try:
    loaded("odd")
except Exception as error:
    print(f"40 rows in blocks of 16: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
else:
    raise AssertionError("this has changed: 40 rows in blocks of 16 are loaded")
PYTHON
