#!/usr/bin/env bash
# PEFT's `low_cpu_mem_usage=True` rounds a float32 adapter to bfloat16 while it loads it, and calls it float32.
#
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0.
# Expected: the option leaves out the making of weights that are about to be read (its documentation: "useful to speed up the process").
# The adapter is the one that was saved, as it is without the option.
# Seen: over a bfloat16 base, PEFT trains and saves adapters in float32. With the option they are moved to the base's dtype after they
# are read, and then back to float32: each weight is float32 with the lower 16 bits zero. So it is for LoRA, DoRA, rows of the embedding,
# IA3 and LoHa. Over a float32 base, without the option, or swapped into another adapter (`hotswap_adapter`), they come back bit for bit.
# Cost: what is evaluated, merged or trained further is not what was trained, and `save_pretrained` writes the rounded weights as float32. The
# dtype, which one would look at, is right, and the option looks like one of speed.
# MegaTrain reads adapters bit for bit, and has no such option.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2

cd "$work"
cat > seen.py <<'PYTHON'
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TARGETS = ["q_proj", "v_proj"]
METHODS = {
    "LoRA": lambda: LoraConfig(r=4, target_modules=TARGETS),
    "DoRA": lambda: LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "rows of the embedding": lambda: LoraConfig(r=4, target_modules=TARGETS, trainable_token_indices=[4, 5]),
    "IA3": lambda: IA3Config(target_modules=TARGETS, feedforward_modules=[]),
    "LoHa": lambda: LoHaConfig(r=4, target_modules=TARGETS),
}


def base(dtype):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).to(dtype)


def trained(config, dtype):
    """A model whose adapter's weights have been changed as by a step."""
    model = get_peft_model(base(dtype), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    return model


def written(model, folder):
    model.save_pretrained(folder)
    return load_file(f"{folder}/adapter_model.safetensors")


for name, config in METHODS.items():
    for dtype in (torch.bfloat16, torch.float32):
        saved = written(trained(config(), dtype), "saved")
        assert {value.dtype for value in saved.values()} == {torch.float32}
        for is_low in (False, True):
            model = PeftModel.from_pretrained(base(dtype), "saved", low_cpu_mem_usage=is_low)
            again = written(model, "again")
            is_equal = all(torch.equal(again[key], value) for key, value in saved.items())
            is_rounded = all(torch.equal(again[key], value.bfloat16().float()) for key, value in saved.items())
            dtypes = {str(value.dtype) for value in again.values()}
            print(f"{name}, {dtype} base, low_cpu_mem_usage={is_low}: {dtypes}, equal {is_equal}, rounded {is_rounded}")
            wrong = is_low and dtype == torch.bfloat16
            assert dtypes == {"torch.float32"} and (is_equal, is_rounded) == (not wrong, wrong), "this has changed"

saved = written(trained(METHODS["LoRA"](), torch.bfloat16), "saved")
model = get_peft_model(base(torch.bfloat16), METHODS["LoRA"]())
hotswap_adapter(model, "saved", "default", torch_device="cpu")
is_equal = all(torch.equal(value, saved[key]) for key, value in written(model, "again").items())
print(f"swapped into another adapter: equal {is_equal}")
assert is_equal, "this has changed"
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python seen.py
