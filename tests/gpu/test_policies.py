"""On a GPU: no policy changes what is trained, whichever model it is.

Attention is eager, since fused kernels sum their gradients in any order. One policy of each family runs beside the
plainest one; on the cpu and the simulated device they are compared by the hundred (`tests/system`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatrain import AdamW, Engine, Policy
from megatrain.memory import Disk
from megatrain.plan import Choice
from megatrain.spec import Numerics, Placement
from tests.tiny import equal, tiny_model, unequal_batches

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {"shard_nbytes": 2048, "loss_chunk_tokens": 8}
ON_DEVICE, CACHED, ON_DISK = (
    Placement("device", "device", "device"),
    Placement("device"),
    Placement("disk", "disk", "disk", "disk"),
)
MIXED = (("offload", "graph"), ("input",), ("drop",))
STORED = (("chosen", "attention"),)

POLICIES: dict[str, dict[str, Any]] = {
    "one slot": {"weight_slots": 1, "grad_slots": 1},
    "many slots, graphs kept": {"weight_slots": 4, "grad_slots": 3, "activations": "keep"},
    "offloaded, kept and dropped": {"activations_by_layer": MIXED, "recompute_slots": 1},
    "chosen outputs": {"activations_by_layer": STORED},
    "chosen outputs, offloaded": {"activations_by_layer": (("offload_chosen", "offload_attention"),)},
    "gates by shards": {"wait_for": "shard", "weight_slots": 1, "activations_by_layer": MIXED},
    "a read-ahead": {"wait_for": "shard", "read_ahead_nbytes": 8192, "activations": "recompute"},
    "pageable": {"transfer": "pageable"},
    "kept on the device": {"placements": (CACHED,) * 5},
    "resident": {"placements": (ON_DEVICE,) * 5},
    "resident, graphs kept": {"placements": (ON_DEVICE,) * 5, "activations": "keep"},
    "a layer resident, others on disk": {
        "placements": (Placement(), ON_DEVICE, ON_DISK, Placement(moments="disk"), Placement())
    },
    "on disk": {"placements": (ON_DISK,) * 5},
    "parts in chunks": {"mlp_chunk_tokens": 3},
    "updates streamed": {"streamed_updates": 1.0, "shard_nbytes": 30_000},
    "updates streamed, beside residents": {
        "streamed_updates": 0.7,
        "wait_for": "shard",
        "weight_slots": 3,
        "activations_by_layer": (("offload",),),
        "placements": (Placement(), CACHED, ON_DEVICE, Placement(), Placement()),
    },
    "in rounds": {"micro_batches_per_round": 1, "activations": "keep"},
    "in rounds, some of it resident": {
        "micro_batches_per_round": 2,
        "placements": (Placement(), ON_DEVICE, *[Placement()] * 3),
    },
    "in rounds, updates streamed": {"micro_batches_per_round": 1, "streamed_updates": 1.0, "weight_slots": 1},
}


def trained(family: str, precision: str, update: str, folder: Path, **how: Any) -> dict[str, Tensor]:
    """Weights after three steps and an evaluation, and the losses."""
    clip = 0.5 if update == "next_forward" else None
    choice = Choice(Numerics(precision), Policy(update=update)).change(**{**SMALL, **how})  # type: ignore[arg-type]
    policy = choice.policy
    dropout = {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.1} if family == "gpt2" else {}
    model = tiny_model(family, attn_implementation="eager", **dropout)
    disk = [Disk([folder])] if any("disk" in str(placement) for placement in policy.placements) else []
    options: dict[str, Any] = {"disk": disk[0]} if disk else {}
    with Engine.from_model(
        model, "cuda:0", None, AdamW(lr=1e-2), clip, policy, seed=3, verify=False, numerics=choice.numerics, **options
    ) as engine:
        losses = [engine.step(unequal_batches(count)).loss for count in (2, 3, 2)]
        return engine.master_weights() | {"losses": Tensor([*losses, engine.evaluate(unequal_batches(2))])}


@cache
def plainest(family: str, precision: str, update: str) -> dict[str, Tensor]:
    return trained(family, precision, update, Path())


@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
@pytest.mark.parametrize("name", POLICIES)
def test_policies_change_no_bit(name: str, update: str, tmp_path: Path) -> None:
    family = "gpt2" if name in ("offloaded, kept and dropped", "gates by shards", "one slot") else "llama-tied"
    if name == "through slabs" or "rounds" in name:  # not of a tied head
        family = "mixtral-balanced"
    if name == "parts in chunks":  # a product of fewer rows rounds otherwise
        found = [trained(family, "fp32", update, tmp_path, **POLICIES[name], weight_slots=slots) for slots in (1, 2)]
    else:
        precision = "fp32" if update == "during_backward" else "bf16"
        found = [trained(family, precision, update, tmp_path, **POLICIES[name]), plainest(family, precision, update)]
    assert equal(*found)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mixtral", "qwen3-moe"])
def test_gates_and_resident_layers_change_no_bit_in_other_families(family: str, tmp_path: Path) -> None:
    units = len(tiny_model(family).model.layers) + 2
    placements = (Placement(), ON_DEVICE, CACHED, *(Placement(),) * (units - 3))
    how: dict[str, Any] = {"wait_for": "shard", "weight_slots": 1, "placements": placements, "activations": "keep"}
    assert equal(trained(family, "bf16", "next_forward", tmp_path, **how), plainest(family, "bf16", "next_forward"))


@pytest.mark.parametrize("name", ["offloaded", "by shards, in rounds"])
def test_offloaded_side_values_change_no_bit(name: str, tmp_path: Path) -> None:
    """Keys and values that layers share, and inputs of each layer."""
    how: dict[str, Any] = {"activations_by_layer": (("offload",),), "offload_slots": 1}
    if name != "offloaded":
        how |= {"wait_for": "shard", "micro_batches_per_round": 2, "activations_by_layer": (("offload", "drop"),)}
    assert equal(trained("gemma4", "bf16", "next_forward", tmp_path, **how), plainest("gemma4", "bf16", "next_forward"))
