#!/usr/bin/env bash
# The adapter that TRL makes for a chat template with new tokens cannot compute a step over tied embeddings.
#
# Versions: trl 1.16.0, peft 0.21.2, transformers 5.23.0, torch 2.13.0.
# Expected: the two settings that `SFTTrainer(chat_template_path=..., peft_config=LoraConfig(...))` writes into the adapter's config, rows of the
# embedding by `trainable_token_indices` and the head by `modules_to_save`, train any causal model, or are refused when made.
# Seen: over a model with untied embeddings they train. Over tied ones (the small models of Qwen3, Llama 3.2 and Gemma) `get_peft_model`
# succeeds and the first forward raises "TrainableTokensLayer wraps an unknown layer type".
# Cost: a script that works with the large model of a family fails with its small one, after the data has been prepared, with an error
# that names neither the template nor the tie.
# The script sets the two fields as TRL does, without TRL.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import warnings

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
seen = {}
for tied in (False, True):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                         num_attention_heads=2, tie_word_embeddings=tied))
    config = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 5]},
                             modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    try:
        seen[tied] = f"logits {list(model(input_ids=torch.tensor([[1, 3]])).logits.shape)}"
    except Exception as error:
        seen[tied] = f"{type(error).__name__}: {error}"
    print("tied:" if tied else "untied:", seen[tied])
assert seen[False].startswith("logits"), f"this has changed: {seen}"
assert "unknown layer type" in seen[True], f"this has changed: {seen}"
PYTHON
