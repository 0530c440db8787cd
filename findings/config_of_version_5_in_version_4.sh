#!/usr/bin/env bash
# transformers 4 reads a config.json of transformers 5 without a warning, as a model with other rotary embeddings.
#
# Versions: transformers 5.23.0 writes, 4.57.6 reads.
# Expected: version 4 refuses or warns, since the file says "transformers_version": "5.23.0" and has a key that it does not know.
# Seen: version 5 writes the base and the scaling of rotary embeddings under the one key `rope_parameters`. Version 4 keeps the key
# as an unknown attribute and takes its own defaults: a base of 10000 for 500000, and no scaling. Infinity is written as the object
# {"__float__": "Infinity"}, which version 4 leaves in the list of Mamba2's limits. (vLLM pull request 42624 tells of a case.)
# Cost: servers with version 4 run a model saved by version 5 with the wrong positions: fluent, and worse with each token.
# MegaTrain's exports carry the fields of both versions.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for version in 5.23.0 4.57.6; do
    python3 -m venv "$work/$version"
    "$work/$version/bin/pip" install --quiet --no-compile "transformers==$version"
done

cd "$work"
export HF_HUB_OFFLINE=1
5.23.0/bin/python - <<'PYTHON'
from transformers import AutoConfig

scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
long = dict(rope_theta=500000.0, rope_scaling=scaling, max_position_embeddings=131072)
AutoConfig.for_model("llama", **long).save_pretrained("llama")
AutoConfig.for_model("mamba2").save_pretrained("mamba2")
for name in ("llama", "mamba2"):
    read = AutoConfig.from_pretrained(name)
    print("version 5 reads", getattr(read, "rope_parameters", None) or read.time_step_limit)
PYTHON
4.57.6/bin/python - 2>told <<'PYTHON'
from transformers import AutoConfig

llama, mamba = (AutoConfig.from_pretrained(name) for name in ("llama", "mamba2"))
print("version 4 reads", llama.rope_theta, llama.rope_scaling, "and", mamba.time_step_limit)
assert (llama.rope_theta, llama.rope_scaling) == (10000.0, None), "this has changed: the rotary embeddings are read"
assert mamba.time_step_limit == [0.0, {"__float__": "Infinity"}], "this has changed: infinity is read"
PYTHON
cat told
if grep -i rope told; then
    echo "this has changed: version 4 warns" >&2
    exit 1
fi
