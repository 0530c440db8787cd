#!/usr/bin/env bash
# PEFT loads LoRA adapters that were trained with transformers 4 over mixtures of experts in part, or at another scale.
#
# Versions: adapters made by peft 0.17.1 with transformers 4.57.1, loaded by peft 0.21.2 with transformers 5.23.0; torch 2.13.0.
# Expected: transformers 5 stacks the experts of a layer, and PEFT moves an adapter of version 4 to the stacks; the base and the adapter then
# compute what they computed before, or loading fails. With Mixtral and w1, w2, w3 adapted they do.
# Seen, with bases that load exactly:
#   DeepSeek-V3, gate_proj, up_proj, down_proj: the adapters of shared experts and of dense layers are dropped; no warning names them;
#   Qwen3-MoE with a dense layer: the adapters of the dense layer are dropped, likewise;
#   Qwen2-MoE: the adapters of shared experts are loaded, those of all routed experts are dropped, likewise;
#   Mixtral, w1 and w3 without w2: no expert's adapter is loaded; a warning lists missing keys;
#   Mixtral with use_rslora: w1 and w3 become one adapter of twice the rank and twice alpha, whose scale is then larger by the root of two.
# Cost: a fine-tuned model answers as its base in these layers, and training goes on from there.
# MegaTrain compares the names of an adapter's file with the model's and refuses these adapters.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/old"
"$work/old/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==4.57.1 peft==0.17.1 numpy
python3 -m venv "$work/new"
"$work/new/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2 numpy

cd "$work"
cat > train.py <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
}
MLP = ["gate_proj", "up_proj", "down_proj"]
MIXTRAL = MixtralConfig(**SMALL, num_local_experts=4)
DEEPSEEK = DeepseekV3Config(
    **SMALL | {"num_key_value_heads": 4},
    moe_intermediate_size=24,
    n_routed_experts=4,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    v_head_dim=8,
    qk_nope_head_dim=8,
    first_k_dense_replace=1,
    bos_token_id=0,
    eos_token_id=1,
)
QWEN2 = Qwen2MoeConfig(**SMALL, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=4)
QWEN3 = Qwen3MoeConfig(**SMALL, moe_intermediate_size=24, num_experts=4, head_dim=8, mlp_only_layers=[0])
CASES = {
    "mixtral": (MIXTRAL, ["w1", "w2", "w3"], False),
    "mixtral without w2": (MIXTRAL, ["w1", "w3"], False),
    "mixtral with rslora": (MIXTRAL, ["w1", "w2", "w3"], True),
    "deepseek": (DEEPSEEK, MLP, False),
    "qwen2": (QWEN2, MLP, False),
    "qwen3": (QWEN3, MLP, False),
}

tokens = torch.arange(40).view(2, 20)
for name, (config, targets, rslora) in CASES.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(f"{name}/base")
    with torch.no_grad():
        base = model(input_ids=tokens).logits
        adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets, use_rslora=rslora)).eval()
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
        logits = adapted(input_ids=tokens).logits
    adapted.save_pretrained(f"{name}/adapter")
    torch.save((base, logits), f"{name}/logits.pt")
PYTHON
cat > load.py <<'PYTHON'
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM

SHARED_OR_DENSE = ("shared_expert", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
tokens = torch.arange(40).view(2, 20)
differs, said = {}, {}
for folder in sorted(path for path in Path().iterdir() if (path / "adapter").is_dir()):
    base, logits = torch.load(folder / "logits.pt")
    model = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    with torch.no_grad():
        assert torch.allclose(model(input_ids=tokens).logits, base, atol=1e-6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(model, folder / "adapter").eval()
    said[folder.name] = any("missing adapter keys" in str(warning.message) for warning in caught)
    with torch.no_grad():
        differs[folder.name] = float((adapted(input_ids=tokens).logits - logits).abs().max() / (logits - base).abs().max())
    loaded = [name for name, value in adapted.named_parameters() if "lora_B" in name and value.any()]
    with safe_open(folder / "adapter" / "adapter_model.safetensors", "pt") as file:
        saved = [name for name in file.keys() if "lora_B" in name]
    kinds = {"experts": ".experts.", "shared or dense": SHARED_OR_DENSE}
    rows = {
        kind: tuple(sum(any(p in name for p in ([parts] if isinstance(parts, str) else parts)) for name in names) for names in (saved, loaded))
        for kind, parts in kinds.items()
    }
    kept = ", ".join(f"{kind}: {old} saved, {new} loaded" for kind, (old, new) in rows.items())
    print(f"{folder.name}: logits differ by {differs[folder.name]:.2f} of the adapter's effect; {kept}; missing keys told: {said[folder.name]}")

assert differs.pop("mixtral") < 1e-4
assert all(value > 0.02 for value in differs.values()), differs
assert [name for name, told in said.items() if told] == ["mixtral without w2"], said
PYTHON
"$work/old/bin/python" -W ignore train.py 2> /dev/null
"$work/new/bin/python" -W ignore load.py 2> /dev/null
