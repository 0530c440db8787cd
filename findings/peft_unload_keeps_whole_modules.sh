#!/usr/bin/env bash
# PEFT's unload gives back a base that has the adapter's trained head.
#
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0.
# Expected: `unload` is there to "return the base model by removing all the PEFT modules" (its documentation): the weights are those from
# before `get_peft_model`, bit for bit, and so are the logits, as they are inside `model.disable_adapter()`.
# Seen: so it is for adapted layers, for rows of the embedding (`trainable_token_indices`), and for an adapter that was deleted first. A
# module of `modules_to_save` comes back as it was trained: the model has the base's layers under the adapter's head. It is the head
# of the adapter that is active, among several. Nothing is said, and the same model with the adapter disabled is the base.
# Cost: the model that serves as the reference of a preference loss, as the base of the next adapter, or as the "before" of an
# evaluation is neither the base nor the trained model; an adapter trained over it fits no base that anybody has.
# MegaTrain keeps the base frozen beside the adapter, and saves the two apart.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2

cd "$work"
cat > seen.py <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(20)[None]
OPTIONS = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "rows of the embedding": {"trainable_token_indices": [4, 5]},
    "a whole head": {"modules_to_save": ["lm_head"]},
    "a whole norm": {"modules_to_save": ["model.norm"]},
}


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def trained(options):
    """A base, its weights, and the adapted model after some training."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**SHAPE))
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    plain = logits(base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    return plain, weights, model


for name, options in OPTIONS.items():
    plain, weights, model = trained(options)
    effect = (logits(model) - plain).norm()
    with model.disable_adapter():
        disabled = ((logits(model) - plain).norm() / effect).item()
    base = model.unload()
    changed = [key for key, value in base.state_dict().items() if not torch.equal(value, weights[key])]
    share = ((logits(base) - plain).norm() / effect).item()
    print(f"{name:22} disabled: off by {disabled:.2g} of the adapter's effect; unloaded: {share:.2g}, changed weights {changed}")
    assert disabled == 0 and set(base.state_dict()) == set(weights), "this has changed"
    assert (share > 0.1 and len(changed) == 1) if "whole" in name else (share == 0 and not changed), "this has changed"

plain, weights, model = trained({"modules_to_save": ["lm_head"]})
model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"]))
model.delete_adapter("default")
model.set_adapter("other")
base = model.unload()
is_same = all(torch.equal(value, weights[key]) for key, value in base.state_dict().items())
print(f"the adapter with the head deleted first: the base's weights {is_same}")
assert is_same, "this has changed"
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python seen.py
