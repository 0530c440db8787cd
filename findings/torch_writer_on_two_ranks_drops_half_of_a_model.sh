#!/usr/bin/env bash
# torch.distributed.checkpoint's writer of Hugging Face files, used by two ranks that hold the whole model, leaves half of the model out.
#
# Versions: torch 2.13.0, safetensors 0.8.0, numpy 2.4.6.
# Expected: `dcp.save` of a DistributedDataParallel model's state dict, which every rank calls and has whole, writes all tensors with
# `HuggingFaceStorageWriter(folder)`, as it does with the default writer (`checkpoint_id=folder`).
# Seen: the planner gives each tensor that several ranks hold to one of them, so as to share the work. With the default
# `save_distributed=False` all ranks write their share to one file of the same name, `model-00001-of-00001.safetensors`, over each other. What is
# left has the tensors of one rank, under an index that names all of them. `save` returns, and nothing is logged. (The docstring says
# that this default "assumes rank-0 checkpointing"; with `save_distributed=True` and consolidation all is written.)
# Cost: the half that is missing was on the disk for a moment and is gone. It shows when the folder is loaded, often after the run; transformers
# then fills the missing tensors with random values and lists them in its report.
# MegaTrain writes its own files: each rank writes ranges of files that are laid out for all.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 safetensors==0.8.0 numpy==2.4.6

cd "$work"
cat > seen.py <<'PYTHON'
import glob
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

WRITERS = {
    "rank 0 alone": None,
    "both ranks": {},
    "both, distributed": {"save_distributed": True, "enable_consolidation": True},
}


def rank(index):
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meeting", rank=index, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    model = torch.nn.parallel.DistributedDataParallel(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert len(state) == 8
    for folder, options in WRITERS.items():
        writer = HuggingFaceStorageWriter(folder, **(options or {}))
        if options is not None:
            dcp.save(state, storage_writer=writer)
        elif index == 0:
            dcp.save(state, storage_writer=writer, no_dist=True)
        dist.barrier()
    dcp.save(state, checkpoint_id="default")
    back = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(back, checkpoint_id="default")
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
    dist.barrier()
    if index == 0:
        for folder in WRITERS:
            with open(f"{folder}/model.safetensors.index.json") as file:
                index_of_folder = json.load(file)["weight_map"]
            (path,) = glob.glob(f"{folder}/*.safetensors")
            with safe_open(path, framework="pt") as file:
                right = [name for name in file.keys() if torch.equal(file.get_tensor(name), state[name])]
            print(f"{folder}: the index names {len(index_of_folder)} tensors, the file has {len(right)} of 8 {right if len(right) < 8 else ''}")
            assert len(index_of_folder) == 8 and (len(right) < 8) == (folder == "both ranks"), "this has changed"
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(rank, nprocs=2, start_method="fork")
PYTHON
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
venv/bin/python -W ignore seen.py
