#!/usr/bin/env bash
# The Trainer's loss and gradients of GPT-2 are smaller than the model's, by the share of the first token of each row.
#
# Versions: transformers 5.23.0, torch 2.13.0.
# Expected: the mean over predicted tokens, for GPT-2 as for Llama. The first label of a row is predicted by nothing.
# Seen: the Trainer leaves the first labels out of its count only for models whose `loss_type` stands for the causal loss (pull
# request 46204). GPT-2's is None, which means that same loss by default, so its sum is divided by all labels. With rows
# of 10 tokens the loss and all gradients are 0.9 of what they should be.
# Cost: rows of 2 to 10 tokens train with half to nine tenths of the weight, and a limit on the norm compares with another norm.
# MegaTrain counts the labels that are predicted, for all models, and `streamed(Trainer)` refuses to divide by another number.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

ids = torch.randint(3, 96, (2, 10), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row, "labels": row.clone()} for row in ids]
still = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)
kinds = {
    "gpt2": (dict(vocab_size=96, n_embd=32, n_layer=1, n_head=4, n_positions=64, **still), 0.9),
    "llama": (dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4), 1.0),
}
for kind, (sizes, expected) in kinds.items():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    loss = model(input_ids=ids, labels=ids).loss
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    arguments = TrainingArguments("out", per_device_train_batch_size=2, max_steps=1, logging_steps=1, report_to="none",
                                  use_cpu=True, disable_tqdm=True, save_strategy="no", max_grad_norm=1e9)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    log = trainer.state.log_history[0]
    print(f"{kind}, loss_type {model.loss_type!r}: the model's loss {loss:.5f} and gradient norm {norm:.5f}, "
          f"the Trainer's {log['loss']:.5f} and {log['grad_norm']:.5f}, ratios {log['loss'] / loss:.4f} and {log['grad_norm'] / norm:.4f}")
    for ratio in (log["loss"] / loss, log["grad_norm"] / norm):
        assert abs(ratio - expected) < 1e-3, f"this has changed: {kind} has the ratio {ratio}"
PYTHON
