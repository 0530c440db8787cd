#!/usr/bin/env bash
# torch.distributed.checkpoint's consolidation into Hugging Face files writes every tensor without dimensions as 0.
#
# Versions: torch 2.13.0, safetensors 0.8.0, numpy 2.4.6.
# Expected: `HuggingFaceStorageWriter(save_distributed=True, enable_consolidation=True)` writes one folder with the values that were saved, and
# so does `consolidate_safetensors_files`, with which the shards of an earlier save become such a folder.
# Seen: for a tensor of shape [] the header and four bytes are written, and the value, which is in the shard, is not copied into them. It reads as
# 0.0, by safetensors and by torch's own `HuggingFaceStorageReader`. A tensor of shape [1] and matrices are right. Nothing is said.
# Cost: the temperature of a contrastive model (`logit_scale` of CLIP, with `logit_bias` of SigLIP), a gate or a learned scale that is a
# single number is published as 0: CLIP's logits are then divided by up to a hundred, and what a gate of 0 multiplies is gone.
# Training goes on right, since it resumes from the shards.
# MegaTrain writes its exports itself, with tensors of any shape.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 safetensors==0.8.0 numpy==2.4.6

cd "$work"
OMP_NUM_THREADS=1 venv/bin/python -W ignore - <<'PYTHON'
import os

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files


class Contrastive(nn.Module):
    """Two towers and a learned temperature, in CLIP's form: a parameter of shape []."""

    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Linear(8, 4), nn.Linear(6, 4)
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))
        self.gate = nn.Parameter(torch.tensor([2.6592]))


model = Contrastive()
state = model.state_dict()
dcp.save(state, storage_writer=HuggingFaceStorageWriter("whole", save_distributed=True, enable_consolidation=True))
dcp.save(state, storage_writer=HuggingFaceStorageWriter("parts", save_distributed=True))
os.mkdir("later")
consolidate_safetensors_files("parts", "later", dict.fromkeys(state, 1))


def held(folder):
    (name,) = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
    return load_file(f"{folder}/{name}")


read = {name: torch.full_like(tensor, 7.0) for name, tensor in state.items()}
dcp.load(read, storage_reader=HuggingFaceStorageReader("whole"))
for name, tensors in {"shard": held("parts"), "whole/sharded": held("whole/sharded"), "whole": held("whole"), "later": held("later"), "read": read}.items():
    scale, gate = tensors["logit_scale"], tensors["gate"]
    rest = all(torch.equal(tensors[key], value) for key, value in state.items() if key != "logit_scale")
    print(f"{name}: logit_scale of shape {list(scale.shape)} is {scale.item():.4f}, gate of shape {list(gate.shape)} is {gate.item():.4f}", end="; ")
    print(f"all others are right: {rest}")
    wanted = state["logit_scale"].item() if "shard" in name else 0.0
    assert rest and scale.item() == wanted, "this has changed"
PYTHON
