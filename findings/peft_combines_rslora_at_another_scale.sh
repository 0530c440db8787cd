#!/usr/bin/env bash
# PEFT's add_weighted_adapter gives an rsLoRA adapter another scale, and leaves out the magnitude of DoRA and the bias of LoRA.
#
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0.
# Expected: the combination of one adapter with the weight 1 does what the adapter does.
# Seen: so it is for plain LoRA, with patterns of ranks, too. For rsLoRA the combination's factors already hold the adapter's scale and its
# alpha is set to its rank, which plain LoRA divides by the rank, to 1, but rsLoRA by the root of the rank: the change of the weights is
# sqrt(rank) times too large, 4 times at rank 16. With use_dora the magnitudes, and with lora_bias the biases are those of a new
# adapter. All combination types do the same, "cat" and "svd" included, without a warning.
# Cost: a mixture of adapters that is evaluated, merged and published is far from what was trained, the more so the larger the rank.
# MegaTrain combines no adapters; it trains, saves and merges one, at its own scale.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2

cd "$work"
cat > seen.py <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(20)[None]
RANK = 16


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def effects(combination, **options):
    """The change of logits by an adapter and by its combination with nothing else, and the ratio of their weights' changes."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    without = logits(base)
    config = LoraConfig(r=RANK, lora_alpha=16, target_modules=["q_proj", "v_proj"], **options)
    model = get_peft_model(base, config, adapter_name="first")
    for name, parameter in model.named_parameters():
        if ".first" in name:
            parameter.data = 0.02 * torch.randn(parameter.shape)
    alone = logits(model) - without
    model.add_weighted_adapter(["first"], [1.0], "combined", combination_type=combination)
    model.set_adapter("combined")
    projection = model.base_model.model.model.layers[0].self_attn.q_proj
    change, combined = (projection.get_delta_weight(adapter).norm() for adapter in ("first", "combined"))
    return alone, logits(model) - without, (combined / change).item()


for combination in ("linear", "cat", "svd"):
    for name, options in {
        "LoRA": {},
        "LoRA, a rank pattern": {"rank_pattern": {"q_proj": 4}},
        "rsLoRA": {"use_rslora": True},
        "DoRA": {"use_dora": True},
        "a bias": {"lora_bias": True},
    }.items():
        alone, combined, factor = effects(combination, **options)
        apart = ((combined - alone).norm() / alone.norm()).item()
        print(f"{combination:6} {name:20} difference of effects {apart:.2g}, change of a weight {factor:.3f} times the adapter's")
        assert (apart < 1e-4) is name.startswith("LoRA") and (apart > 0.1) is not name.startswith("LoRA"), "this has changed"
        assert abs(factor - (RANK**0.5 if name == "rsLoRA" else 1)) < 1e-3, "this has changed"
PYTHON
OMP_NUM_THREADS=1 venv/bin/python seen.py
