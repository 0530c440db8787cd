#!/usr/bin/env bash
# An adapter over an embedding or a head that is saved while it is merged counts twice when it is loaded.
#
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0.
# Expected: `save_pretrained` writes the adapter, whether the model holds it merged (`merge_adapter`, for quicker generation and evaluation) or
# not; so it is for adapters of layers.
# Seen: where `embed_tokens` or `lm_head` is adapted, the file holds the base's weight, too ("Setting `save_embedding_layers` to `True`"), and
# merged it has the adapter in it. Loading puts this weight in the base's place and adds the adapter once more. Of two adapters, the
# other one's file has it, too: loaded alone, that one brings the merged one's effect with it.
# Cost: a checkpoint that was written between `merge_adapter` and `unmerge_adapter` is another model than the one that was evaluated just
# then. The shapes fit, and nothing is said of it.
# MegaTrain never merges into the base that it trains; `export --merge` writes another folder.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2

cd "$work"
cat > seen.py <<'PYTHON'
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(20)[None]
TARGETS = {
    "layers": ["q_proj", "v_proj"],
    "layers and the embedding": ["q_proj", "v_proj", "embed_tokens"],
    "layers and the head": ["q_proj", "v_proj", "lm_head"],
}


def base():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def change(model):
    """Change what trains, as by training."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.005 * torch.randn_like(parameter)


plain = logits(base())
for name, targets in TARGETS.items():
    config = LoraConfig(r=4, target_modules=targets)
    model = get_peft_model(base(), config)
    change(model)
    trained = logits(model)
    model.add_adapter("other", config)
    model.set_adapter("other")
    change(model)
    other = logits(model)
    model.set_adapter("default")
    for is_merged in (False, True):
        if is_merged:
            model.merge_adapter()
            assert (logits(model) - trained).norm() < 1e-4 * (trained - plain).norm()
        model.save_pretrained("saved")
        off = []
        for folder, wanted in (("saved", trained), ("saved/other", other)):
            loaded = logits(PeftModel.from_pretrained(base(), folder))
            off.append(((loaded - wanted).norm() / (wanted - plain).norm()).item())
        how = "merged" if is_merged else "not merged"
        print(f"{name}, saved {how}: off by {off[0]:.2g} of the adapter's effect when loaded, the other one by {off[1]:.2g}")
        wrong = is_merged and name != "layers"
        assert min(off) > 0.3 if wrong else max(off) < 1e-4, "this has changed"
    model.unmerge_adapter()
    assert (logits(model) - trained).norm() < 1e-4 * (trained - plain).norm()
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python seen.py
