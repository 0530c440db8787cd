#!/usr/bin/env bash
# Packed sequences attend to each other where `use_cache` is on, which is the default.
#
# Versions: transformers 5.23.0, torch 2.13.0.
# Expected: a batch of `DataCollatorWithFlattening` has the loss of its rows, each by itself: positions that start again part the rows in
# the attention masks of transformers. A cache that is empty before the call and dropped after it changes nothing.
# Seen: the borders are looked for only if there is no cache. `use_cache` is true in most configs, so `model(**batch)` makes one and all
# rows of the batch attend to those before them, in `train()` and in `eval()`; with `use_cache=False` the loss is as expected.
# (Pull request 46634 is about the same condition, for an attention mask of ones.)
# Cost: a loop of one's own trains each row on the others in front of it, and evaluates it so; gradient checkpointing, which turns
# the cache off, changes the loss. The loss falls all the same.
# MegaTrain never keeps a cache in a step, and compares packed rows with single ones, by a small twin, before it packs for a model.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

torch.manual_seed(0)
sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16, bos_token_id=1, eos_token_id=2, pad_token_id=0)
rows = [torch.randint(3, 96, (size,)) for size in (10, 12)]
batch = DataCollatorWithFlattening()([{"input_ids": row.tolist()} for row in rows])
print("positions:", batch["position_ids"].tolist())
for kind in ("llama", "qwen3", "gemma2"):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).train()
    with torch.no_grad():
        alone = sum(model(input_ids=row[None], labels=row[None]).loss.item() * (len(row) - 1) for row in rows) / 20
        packed = model(**batch).loss.item()
        uncached = model(**batch, use_cache=False).loss.item()
    print(f"{kind}: each row alone {alone:.5f}, packed {packed:.5f}, packed with use_cache=False {uncached:.5f}")
    assert abs(uncached - alone) < 1e-5, f"{kind}: rows are not kept apart at all"
    assert abs(packed - alone) > 1e-4, f"this has changed: {kind} keeps packed rows apart"
PYTHON
