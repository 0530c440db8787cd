#!/usr/bin/env bash
# mergekit writes a merge of models with biases without the biases, beside a config.json that says there are some.
#
# Versions: mergekit 0.1.5, transformers 5.23.0, torch 2.13.0.
# Expected: a linear merge of one model, with the weight 1, is the model. For Qwen2, whose projections always have biases, it is.
# Seen: for Llama and Qwen3 mergekit writes the tensors of a list that it has for the family. The list has no
# biases, and `attention_bias` and `mlp_bias` of config.json are not looked at. The merge succeeds without a word about them. Whoever loads
# the folder gets biases of zeros; transformers lists them in its loading report as newly initialized.
# Cost: models of these families that were trained with biases (the two settings exist for them) lose a part of themselves in
# every merge. The model still speaks, so that the damage passes for that of the merge.
# MegaTrain merges no models; its exports hold all tensors that the model has.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile mergekit==0.1.5 transformers==5.23.0 torch==2.13.0

cd "$work"
cat > made.py <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "qwen2": Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2)),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, attention_bias=True)),
    "llama": LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
}
for name, model in MODELS.items():
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(name)
    with open(f"{name}.yaml", "w") as file:
        file.write(f"merge_method: linear\ndtype: float32\nmodels: [{{model: ./{name}, parameters: {{weight: 1}}}}]\n")
PYTHON
cat > seen.py <<'PYTHON'
import json

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

for name, wanted in {"qwen2": 0, "qwen3": 8, "llama": 14}.items():
    before, after = load_file(f"{name}/model.safetensors"), load_file(f"{name}-merged/model.safetensors")
    lost = sorted(before.keys() - after.keys())
    assert all(torch.equal(before[path], tensor) for path, tensor in after.items())
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (name, f"{name}-merged")]
    with torch.no_grad():
        logits, merged = (model(torch.arange(8)[None]).logits for model in models)
    off = float((merged - logits).norm() / logits.norm())
    said = json.load(open(f"{name}-merged/config.json")).get("attention_bias", "not stated")
    print(f"{name}: {len(lost)} of {len(before)} tensors are not in the merge {[path[13:] for path in lost[:4]]}", end="; ")
    print(f"its config.json has attention_bias {said}; logits off by {off:.2f} of their size")
    assert len(lost) == wanted and all(path.endswith("bias") for path in lost) and (off > 0.1) == (wanted > 0), "this has changed"
PYTHON
export OMP_NUM_THREADS=1 TRANSFORMERS_VERBOSITY=error
venv/bin/python made.py 2> log.txt
for name in qwen2 qwen3 llama; do
    venv/bin/mergekit-yaml $name.yaml $name-merged --no-copy-tokenizer > $name.txt 2>&1
    if grep -i bias $name.txt; then echo "mergekit says something of biases: this has changed"; exit 1; fi
done
venv/bin/python seen.py 2> log.txt
