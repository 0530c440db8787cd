#!/usr/bin/env bash
# After a resize of the vocabulary, an adapter over one of embedding and head is saved without the other, whose new rows are lost.
#
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0.
# Expected: both embeddings are in the adapter's file when the vocabulary was resized, as they are if neither is adapted; PEFT detects
# it (`save_embedding_layers="auto"`).
# Seen: if `embed_tokens` is in `target_modules`, only layers with an adapter are saved. The new rows of an untied `lm_head` are in
# no file; loading the adapter over a base that was resized again gives them fresh values. The one warning says that
# embedding layers are saved.
# Cost: the logits of the added tokens are those of random rows, in each process others.
# MegaTrain saves both embeddings of a resized vocabulary with the adapter.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import peft
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

def tiny(tied):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                        num_attention_heads=2, tie_word_embeddings=tied))

tiny(tied=False).save_pretrained("base")
ids = torch.tensor([[1, 2, 97]])

def resized():
    model = AutoModelForCausalLM.from_pretrained("base")
    model.resize_token_embeddings(104, mean_resizing=False)
    return model

apart = {}
for targets in (("q_proj",), ("q_proj", "embed_tokens")):
    model = peft.get_peft_model(resized(), peft.LoraConfig(r=4, target_modules=list(targets), task_type="CAUSAL_LM"))
    model.save_pretrained("adapter")
    kept = [name for name in peft.load_peft_weights("adapter", device="cpu") if "lora" not in name]
    again = peft.PeftModel.from_pretrained(resized(), "adapter")
    with torch.no_grad():
        apart[targets] = (again(input_ids=ids).logits - model(input_ids=ids).logits).abs().max().item()
    print(f"{targets}: saved beside the adapter {kept}, logits differ by {apart[targets]:.2e} after loading")
assert apart[("q_proj",)] == 0, f"this has changed: {apart}"
assert apart[("q_proj", "embed_tokens")] > 1e-3, "this has changed: the head's new rows are saved"
PYTHON
