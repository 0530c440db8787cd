"""A table of bits: the losses and the weights after a few steps, of models by policies on devices.

    python -m bench.bits --out before.json        # at one commit
    python -m bench.bits --compare before.json    # at another, on the same machine

Kernels differ among processors, so a table holds for the machine that it was made on. With a stand-in CUDA device
(`python -m tests.standin_cuda -m bench.bits`) that is among the devices.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain import AdamW, Engine, Policy
from megatrain.memory import Disk
from megatrain.plan import Choice
from megatrain.spec import Numerics, Placement
from tests.kinds import KINDS
from tests.tiny import unequal_batches

MODELS = ("llama", "gemma2", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3", "bamba")
DEVICES = ("cpu", "sim:0", "sim:7")
ON_DEVICE, ON_DISK = Placement("device", "device", "device"), Placement("disk", "disk", "disk", "disk")
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"activations": "keep", "weight_slots": 4, "grad_slots": 3},
    "one slot": {"weight_slots": 1, "grad_slots": 1, "activations": "recompute"},
    "mixed": {"activations_by_layer": (("offload", "graph"), ("input",), ("drop",)), "recompute_slots": 1},
    "by shard": {"wait_for": "shard", "weight_slots": 1},
    "read-ahead": {"wait_for": "shard", "read_ahead_nbytes": 8192, "activations": "recompute"},
    "pageable": {"transfer": "pageable"},
    "resident": {"placements": (ON_DEVICE,) * 5},
    "disk": {"placements": (ON_DISK,) * 5},
    "chunks": {"mlp_chunk_tokens": 3},
    "updates at once": {"update": "during_backward"},
    "fp32": {"precision": "fp32"},
}
SHARED = {"cpu": ("plain", "kept", "mixed", "disk", "chunks", "updates at once", "fp32")}
"""The policies of a device that has no memory of its own."""


def bits(kind: str, device: str, name: str) -> str:
    """A checksum of the losses of three steps and an evaluation, and of all weights after them."""
    how = {"precision": "bf16", "shard_nbytes": 2048, "loss_chunk_tokens": 8, **POLICIES[name]}
    if device == "cpu":
        how["shares_memory"] = True
    choice = Choice(Numerics(), Policy()).change(**how)
    policy = choice.policy
    clip = None if policy.update == "during_backward" else 0.5
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**KINDS[kind], "num_hidden_layers": 3}, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).train()
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        disk: dict[str, Any] = {"disk": Disk([Path(folder)])} if name == "disk" else {}
        with Engine.from_model(
            model, device, None, AdamW(lr=1e-2), clip, policy, seed=3, verify=False, numerics=choice.numerics, **disk
        ) as engine:
            losses = [engine.step(unequal_batches(count)).loss for count in (2, 3, 1)]
            losses.append(engine.evaluate(unequal_batches(2)))
            for key, weight in sorted(engine.master_weights().items()):
                digest.update(key.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
    return " ".join([*(loss.hex() for loss in losses), digest.hexdigest()[:16]])


def table() -> dict[str, str]:
    """ "model, device, policy" -> its bits, or the error with which it is refused."""
    found = {}
    for kind in MODELS:
        for device in (*DEVICES, *(["cuda:0"] if torch.cuda.is_available() else [])):
            for name in SHARED.get(device, POLICIES):
                try:
                    value = bits(kind, device, name)
                except Exception as error:
                    value = type(error).__name__
                found[f"{kind}, {device}, {name}"] = value
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="losses and weights of models by policies on devices, bit for bit")
    parser.add_argument("--out", type=Path, help="file to write the table to")
    parser.add_argument("--compare", type=Path, help="file of an earlier table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = table()
    print(f"{len(found)} runs, {len(set(found.values()))} different results")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    if not arguments.compare:
        return 0
    before = json.loads(arguments.compare.read_text())
    changed = [key for key in {**before, **found} if before.get(key) != found.get(key)]
    for key in changed:
        print(f"{key}: {before.get(key)} before, {found.get(key)} now")
    print(f"{len(changed)} of {len(found)} differ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
