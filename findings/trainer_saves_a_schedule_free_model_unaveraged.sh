#!/usr/bin/env bash
# What the Trainer saves with a schedule-free optimizer depends on whether it has just evaluated.
#
# Versions: transformers 5.23.0, schedulefree 1.4.1, torch 2.13.0, accelerate 1.15.0.
# Expected: a checkpoint, and `save_model`, hold the averaged weights that `evaluate` measures, as the optimizer's authors ask for.
# Seen: only an evaluation puts the averaged weights into the model. A run that does not evaluate right before it saves writes the weights at which
# gradients are computed; the same run with an evaluation at that step writes the averaged ones. Neither says so.
# Cost: `eval_strategy: "no"`, or a `save_steps` that `eval_steps` does not divide, changes which model is published, and the loss that is
# reported is not the saved model's.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 schedulefree==1.4.1

cd "$work"
cat > seen.py <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

STEPS = 20
ROWS = [{"input_ids": row, "labels": row} for row in ((torch.arange(32) * (k % 7 + 1) + k) % 64 for k in range(8 * STEPS))]


def weights_of(folder):
    return torch.cat([weight.flatten() for weight in LlamaForCausalLM.from_pretrained(folder).state_dict().values()])


saved = {}
for strategy in ("no", "steps"):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=4, max_position_embeddings=64))
    args = TrainingArguments(strategy, optim="schedule_free_adamw", lr_scheduler_type="constant", learning_rate=1e-2, max_steps=STEPS,
                             per_device_train_batch_size=8, save_steps=STEPS, eval_strategy=strategy, eval_steps=STEPS,
                             report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model=model, args=args, train_dataset=ROWS, eval_dataset=ROWS[:32])
    trainer.train()
    saved[strategy] = weights_of(f"{strategy}/checkpoint-{STEPS}")
    trainer.save_model("final")
    assert torch.equal(weights_of("final"), saved[strategy]), "this has changed"
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model("evaluated")
    off = (weights_of("evaluated") - saved[strategy]).abs().max().item()
    print(f"eval_strategy {strategy}: loss {loss:.4f}; the weights it was measured with differ from the saved ones by up to {off:.1e}")
    assert (off > 1e-3) == (strategy == "no"), "this has changed"
PYTHON
TQDM_DISABLE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python seen.py
