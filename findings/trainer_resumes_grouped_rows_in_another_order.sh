#!/usr/bin/env bash
# A Trainer that groups rows by length trains, after it was resumed, some rows of the epoch twice and others not at all.
#
# Versions: transformers 5.23.0, torch 2.13.0, accelerate 1.15.0.
# Expected: a run that was interrupted in its second epoch and resumed trains the rows that were left, and ends with the weights of a run that
# was not interrupted, as it does with the default order.
# Seen: with `train_sampling_strategy="group_by_length"` the order comes from torch's global random state, which at the beginning of an epoch
# is another one in a resumed process. The right number of batches is skipped, of another order. The random state of the checkpoint is
# restored after that, so all later epochs have other orders, too. With 40 rows in batches of 4, and 3 batches before the interruption,
# 8 rows of the epoch are trained twice and 8 are left out. Nothing is said. In the first epoch all is well.
# Cost: an interrupted run is another run than one that was not interrupted, and its "epoch" does not see all data: the more often it is resumed, the less.
# MegaTrain's runs draw the order of grouped rows from the seed and the epoch; its `streamed(Trainer)` takes the stock trainer's order.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0

cd "$work"
cat > seen.py <<'PYTHON'
import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
LENGTHS = [4 + row % 7 for row in range(40)]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def trained(name, strategy, resume):
    """The rows of each batch, and the weights in the end."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **SIZES))
    rows = [{"input_ids": [row] + [1] * (length - 1)} for row, length in enumerate(LENGTHS)]
    batches = []

    def collate(rows):
        batches.append([row["input_ids"][0] for row in rows])
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
        return {"input_ids": ids, "labels": ids}

    settings = {"per_device_train_batch_size": 4, "num_train_epochs": 3, "save_steps": 13, "seed": 1}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    arguments = transformers.TrainingArguments(name, train_sampling_strategy=strategy, **settings, **quiet)
    transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collate).train(
        resume_from_checkpoint=f"{name}/checkpoint-13" if resume else None
    )
    return batches, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


for strategy in ("random", "group_by_length"):
    whole, wanted = trained(strategy, strategy, resume=False)
    resumed, got = trained(strategy, strategy, resume=True)
    epoch = sum(whole[10:13] + resumed[-17:-10], [])  # before the checkpoint of step 13, and after it
    twice, missing = len(epoch) - len(set(epoch)), len(rows := set(range(40)) - set(epoch))
    print(f"{strategy}: the second epoch trained {twice} rows twice and left out {missing} {sorted(rows)}", end="; ")
    print(f"same weights in the end: {torch.equal(wanted, got)}")
    assert (twice > 0, missing > 0, torch.equal(wanted, got)) == (
        (True, True, False) if strategy == "group_by_length" else (False, False, True)
    ), "this has changed"
PYTHON
OMP_NUM_THREADS=1 venv/bin/python -W ignore seen.py | grep -v train_runtime
