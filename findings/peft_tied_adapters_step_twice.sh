#!/usr/bin/env bash
# A tied LoRA pair of PEFT is two parameters over one memory, which an optimizer updates twice a step.
#
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0.
# Expected: with `ensure_weight_tying=True` the adapters of embedding and head are one parameter with one gradient, as modules of
# `modules_to_save` are.
# Seen: the embedding's matrices are stored transposed, so PEFT ties them by making a second nn.Parameter over a transposed view.
# Autograd gives the two separate gradients, and the optimizer has two sets of moments for one memory: the first step of
# AdamW moves elements by up to twice the learning rate, and the norm for clipping counts halves instead of their sum.
# Cost: the pair trains with another optimizer than the one that was asked for, at up to twice its learning rate.
# MegaTrain refuses adapters that share memory when the engine is made, and names the option.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def tiny(tied):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                        num_attention_heads=2, tie_word_embeddings=tied))

config = peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True, init_lora_weights=False)
model = peft.get_peft_model(tiny(tied=True), config)
inner = model.get_base_model()
head, embedding = inner.lm_head.lora_A["default"].weight, inner.model.embed_tokens.lora_embedding_B["default"]
shared = head is not embedding and head.data_ptr() == embedding.data_ptr()
print("two parameters over one memory:", shared)

rate = 1e-3
before = embedding.detach().clone()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))
model(input_ids=ids, labels=ids).loss.backward()
print("gradients equal:", torch.equal(head.grad, embedding.grad.T))
optimizer.step()
moved = ((embedding - before).abs().max() / rate).item()
print(f"the first step of AdamW moved an element by {moved:.3f} times the learning rate; it should be at most 1")
assert shared and moved > 1.5, "this has changed: the pair is updated once"
PYTHON
