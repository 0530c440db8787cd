#!/usr/bin/env bash
# The Trainer decides by a module's path whether its weights decay: one model's norms do, another's whole network does not.
#
# Versions: transformers 5.23.0, torch 2.13.0.
# Expected: `weight_decay` applies to matrices and to no norm and no bias, as its documentation says ("automatically excluded
# from bias and LayerNorm parameters").
# Seen: a parameter is left out if its class is torch's LayerNorm or if its path, the names of outer modules included, matches
# "bias", "layernorm", "rmsnorm" or a part called "norm" (transformers pull request 35927). The last norm of Mamba2
# is an RMSNorm called `norm_f`, and decays. The inner model of RobertaPreLayerNorm is called `roberta_prelayernorm`, so none of
# its matrices decays.
# Cost: with decay a gain of 1 is pulled to 0, or the regularisation that was asked for does not happen. Nothing is logged.
# MegaTrain's runs decay what has more than one dimension (`train.no_decay: [vectors]`); `streamed(Trainer)` does as the Trainer.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

def decaying(kind, **sizes):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=96, hidden_size=32, num_hidden_layers=1, **sizes))
    trainer = Trainer(model, TrainingArguments("out", use_cpu=True, report_to="none", weight_decay=0.1))
    groups = trainer.create_optimizer().param_groups
    chosen = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    return model, {name for name, p in model.named_parameters() if id(p) in chosen}

model, names = decaying("mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=1)
norm = model.backbone.norm_f
print("mamba2: backbone.norm_f is a", type(norm).__name__, "and decays:", "backbone.norm_f.weight" in names)
assert "backbone.norm_f.weight" in names, "this has changed: the last norm of Mamba2 does not decay"

model, names = decaying("roberta-prelayernorm", num_attention_heads=4, intermediate_size=48, is_decoder=True)
inner = [name for name, p in model.named_parameters() if name.startswith("roberta_prelayernorm.") and p.ndim == 2]
print("roberta-prelayernorm:", len(inner), "matrices in the inner model, of which decay:", len(names & set(inner)))
assert inner and not names & set(inner), "this has changed: matrices of RobertaPreLayerNorm decay"
PYTHON
