#!/usr/bin/env bash
# A name in `modules_to_save` that the model does not have trains nothing, without a word.
#
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0.
# Expected: `get_peft_model` raises, as it does where no name of `target_modules` is a module of the model.
# Seen: with `modules_to_save=["score"]` over a causal language model, or a head that another family calls otherwise (`embed_out`), the call
# succeeds, no warning is given, the module is in no list of trained parameters, and the saved config still names it.
# Cost: the head or embedding that was to be trained stays frozen; the run looks healthy, since the rest of the adapter learns.
# MegaTrain refuses a name of `modules_to_save` that matches no module.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import warnings

import peft
from transformers import LlamaConfig, LlamaForCausalLM

def adapted(**fields):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = peft.get_peft_model(model, peft.LoraConfig(**fields))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return trained, [str(warning.message) for warning in told if "is_gradient_checkpointing" not in str(warning.message)]

for head in ("lm_head", "embed_out"):
    trained, told = adapted(target_modules=["q_proj"], modules_to_save=[head])
    whole = [name for name in trained if "lora_" not in name]
    print(f"modules_to_save=[{head!r}]: trained beside LoRA {whole}, warnings {told}")
    assert bool(whole) == (head == "lm_head") and not told, f"this has changed: {whole}, {told}"
try:
    adapted(target_modules=["query_proj"])
except ValueError as error:
    print(f"target_modules=['query_proj']: ValueError: {str(error)[:80]}")
else:
    raise AssertionError("this has changed: target_modules without a match is accepted")
PYTHON
