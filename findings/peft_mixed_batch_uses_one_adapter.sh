#!/usr/bin/env bash
# PEFT takes an adapter's name for each row of a batch, whatever the adapters' type, and for most types computes all rows with the active one.
#
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0.
# Expected: `model(..., adapter_names=["__base__", "first", "second"])` gives each row the logits that its adapter gives it alone, or raises,
# as it does for DoRA ("Cannot pass `adapter_names` when DoRA is enabled").
# Seen: LoRA and RoAd do it. OFT, IA3, LoHa, LoKr, VeRA, HRA, MiSS, DeLoRA and layer-norm tuning drop the argument:
# every row, those of "__base__" included, is computed with the active adapter. Names are not looked at: one that no adapter has passes, too.
# Nothing is said.
# Cost: an evaluation that puts base and adapters into one batch reports the active adapter's numbers for all of them, and a server
# answers everybody with one user's adapter.
# MegaTrain holds one adapter, and its `evaluate` takes none by name.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2

cd "$work"
cat > seen.py <<'PYTHON'
import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(20)[None]
TARGETS = {"target_modules": ["q_proj", "v_proj"]}
CONFIGS = {
    "LoRA": peft.LoraConfig(r=4, **TARGETS),
    "RoAd": peft.RoadConfig(group_size=8, **TARGETS),
    "OFT": peft.OFTConfig(oft_block_size=8, **TARGETS),
    "IA3": peft.IA3Config(feedforward_modules=[], **TARGETS),
    "LoHa": peft.LoHaConfig(r=4, **TARGETS),
    "LoKr": peft.LoKrConfig(r=4, **TARGETS),
    "VeRA": peft.VeraConfig(r=4, **TARGETS),
    "HRA": peft.HRAConfig(r=4, **TARGETS),
    "MiSS": peft.MissConfig(r=4, **TARGETS),
    "DeLoRA": peft.DeloraConfig(r=4, **TARGETS),
    "layer norms": peft.LNTuningConfig(target_modules=["input_layernorm"]),
}


@torch.no_grad()
def logits(model, rows=1, **names):
    return model(input_ids=IDS.expand(rows, -1), **names).logits


def changed(model):
    """The model, with the active adapter moved away from its first value."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


for method, config in CONFIGS.items():
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    alone = {"__base__": logits(base)}
    model = changed(peft.get_peft_model(base, config, adapter_name="first"))
    model.add_adapter("second", config)
    model.set_adapter("second")
    changed(model)
    for name in ("second", "first"):
        model.set_adapter(name)
        alone[name] = logits(model)
    together = logits(model, len(alone), adapter_names=[*alone])
    effect = (alone["first"] - alone["__base__"]).norm()
    apart = {name: ((row - alone[name][0]).norm() / effect).item() for name, row in zip(alone, together, strict=True)}
    print(f"{method:12}", ", ".join(f"{name} off by {share:.2g} of the first's effect" for name, share in apart.items()))
    if method in ("LoRA", "RoAd"):
        assert max(apart.values()) < 1e-3, "this has changed"
    else:
        assert torch.allclose(together, alone["first"].expand_as(together), atol=1e-5), "this has changed"
        assert min(apart["__base__"], apart["second"]) > 0.1, "this has changed"
        assert torch.equal(together, logits(model, len(alone), adapter_names=["nobody's"] * len(alone))), "this has changed"
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python seen.py
