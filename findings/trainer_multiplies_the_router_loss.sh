#!/usr/bin/env bash
# The Trainer multiplies a mixture-of-experts model's router loss by the number of accumulated batches.
#
# Versions: transformers 5.23.0, torch 2.13.0.
# Expected: one batch of four equal rows and four accumulated batches of one such row have the same loss and gradients. They do
# for the tokens' loss, which is divided by the number of targets of the whole step (transformers 4.46 and later).
# Seen: a model that accepts that number adds `router_aux_loss_coef * aux_loss` to its loss undivided, and the Trainer no
# longer divides by the number of batches. So the router loss is added once for each batch, four times here.
# Cost: with 32 accumulated batches the balancing of experts is 32 times as strong as configured, the logged loss is wrong by as
# much, and a change of the batch size that should change nothing changes the model.
# MegaTrain's engine takes the mean of the micro-batches' router losses; its `streamed(Trainer)` does as the stock Trainer does.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
import torch

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.02)
KINDS = {"mixtral": dict(num_local_experts=4), "qwen3_moe": dict(num_experts=4, moe_intermediate_size=24)}

def arguments(size, accumulated):
    return TrainingArguments("out", per_device_train_batch_size=size, gradient_accumulation_steps=accumulated, max_steps=1,
                             logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no")

row = torch.randint(3, 96, (12,), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row.clone()} for _ in range(4)]
for kind, more in KINDS.items():
    config = AutoConfig.for_model(kind, **SIZES, **more)
    router = {}
    for size, accumulated in ((4, 1), (1, 4)):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            output = model(input_ids=row[None], labels=row[None])
        added = config.router_aux_loss_coef * output.aux_loss.item()
        trainer = Trainer(model, arguments(size, accumulated), train_dataset=rows)
        trainer.train()
        log = trainer.state.log_history[0]
        router[accumulated] = (log["loss"] - (output.loss.item() - added)) / added
        print(f"{kind}: {accumulated} x {size} rows: loss {log['loss']:.4f}, gradient norm {log['grad_norm']:.4f}, "
              f"router loss counted {router[accumulated]:.3f} times")
    assert abs(router[1] - 1) < 0.01, f"this has changed: one batch counts it {router[1]} times"
    assert abs(router[4] - 4) < 0.01, f"this has changed: four batches count it {router[4]} times"
PYTHON
