#!/usr/bin/env bash
# A `rope_scaling` added to a config.json that transformers 5 saved makes the model load with the default rope theta, 10000.
#
# Versions: transformers 5.23.0.
# Expected: the scaling, with the theta of the file, as for files of transformers 4. Model cards ask for exactly this edit to extend
# a model's context (Qwen2.5 and others: "add the following to config.json").
# Seen: `rope_scaling` takes the place of `rope_parameters`, in which version 5 keeps the theta, and a theta that is missing
# is the class's default: 1000000 becomes 10000. An edited or added `rope_theta` is ignored in such a file. No warning for either.
# Cost: every layer sees other positions than it was trained with, at all lengths; a long-context run starts from a broken model and
# learns its way out of it, so the loss alone does not tell.
# MegaTrain refuses a config.json that states a theta which is not the one that is read.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile transformers==5.23.0

cd "$work"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import json
from pathlib import Path

from transformers import AutoConfig, Qwen2Config

Qwen2Config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}).save_pretrained("saved")
new = json.loads(Path("saved/config.json").read_text())
old = {name: value for name, value in new.items() if name != "rope_parameters"} | {"rope_theta": 1e6}
scaling = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
seen = {}
for case, fields in {
    "version 4": old,
    "version 4, rope_scaling added": old | scaling,
    "version 5": new,
    "version 5, rope_scaling added": new | scaling,
    "version 5, rope_theta set to 5e6": new | {"rope_theta": 5e6},
}.items():
    Path("edited").mkdir(exist_ok=True)
    Path("edited/config.json").write_text(json.dumps(fields))
    seen[case] = AutoConfig.from_pretrained("edited").rope_parameters
    print(f"{case:33}", seen[case])
thetas = [rope["rope_theta"] for rope in seen.values()]
assert thetas == [1e6, 1e6, 1e6, 1e4, 1e6], f"this has changed: {thetas}"
PYTHON
