#!/usr/bin/env bash
# The reader of torch.distributed.checkpoint for quantized folders returns other fp8 weights than DeepSeek's without their scales.
#
# Versions: torch 2.13.0, safetensors 0.8.0.
# Expected: `QuantizedHuggingFaceStorageReader` returns weight times scale, whatever form of fp8 the folder's config.json describes, or refuses.
# Seen: it looks for scales under one name, `weight_scale_inv`, which DeepSeek-V3 uses. Folders of compressed-tensors and of FBGEMM call
# them `weight_scale`: their weights are returned as the bare 8-bit numbers, with values up to 448.
# The size of a block is 128, or what the caller says; config.json is not read. With blocks of 64, the first scale is applied to
# the place of four, and the others are left over. Nothing is logged in either case.
# Cost: the load succeeds with the right names, shapes and dtype. A model of the first kind is noise; one of the second is
# off by the ratios of neighbouring scales, which trains on and looks like a bad checkpoint.
# MegaTrain reads fp8 and compressed-tensors by their own names, takes the size of a block from config.json, and refuses other methods.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 safetensors==0.8.0 numpy

cd "$work"
OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import json
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import QuantizedHuggingFaceStorageReader

warnings.simplefilter("ignore")
SIZE = 256


def read(folder, scale_name, scales, quantization):
    """The largest error of the reader, as a share of the largest weight, for a random weight that was quantized with `scales`."""
    torch.manual_seed(0)
    whole = scales.repeat_interleave(SIZE // scales.shape[0], 0).repeat_interleave(SIZE // scales.shape[1], 1)
    weight = ((torch.rand(SIZE, SIZE) * 2 - 1) * 448).to(torch.float8_e4m3fn)
    truth = weight.float() * whole
    tensors = {"layer.weight": weight, f"layer.{scale_name}": scales}
    Path(folder).mkdir()
    save_file(tensors, f"{folder}/model-00001-of-00001.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))
    Path(folder, "config.json").write_text(json.dumps({"quantization_config": quantization}))
    state = {"layer.weight": torch.zeros(SIZE, SIZE)}
    dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(folder), no_dist=True)
    error = (state["layer.weight"] - truth).abs().max().item() / truth.abs().max().item()
    is_bare = torch.equal(state["layer.weight"], weight.float())
    print(f"{folder}: largest error {error:.3g} of the largest weight; the bare 8-bit numbers: {is_bare}")
    return error, is_bare


torch.manual_seed(1)
deepseek = {"quant_method": "fp8", "weight_block_size": [128, 128]}
error, _ = read("deepseek", "weight_scale_inv", torch.rand(2, 2) / 1000 + 1e-4, deepseek)
assert error < 1e-6, "the form that it knows is read wrong"

channels = {"strategy": "channel", "type": "float", "num_bits": 8}
compressed = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {"weights": channels}}}
error, is_bare = read("compressed-tensors", "weight_scale", torch.rand(SIZE, 1) / 1000 + 1e-4, compressed)
assert is_bare and error > 100, "this has changed: the scale of each row is applied"
error, is_bare = read("fbgemm", "weight_scale", torch.rand(SIZE, 1) / 1000 + 1e-4, {"quant_method": "fbgemm_fp8"})
assert is_bare and error > 100, "this has changed: the scale of each row is applied"

small = {"quant_method": "fp8", "weight_block_size": [64, 64]}
error, is_bare = read("blocks of 64", "weight_scale_inv", torch.rand(4, 4) / 1000 + 1e-4, small)
assert not is_bare and error > 0.1, "this has changed: the size of a block is read from config.json"
PYTHON
