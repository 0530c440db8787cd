"""On a GPU: a training step makes the host wait where its numbers leave, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatrain import AdamW, Engine, Policy
from megatrain.losses import SmoothedCrossEntropy
from megatrain.spec import Placement
from tests.tiny import tiny_model, unequal_batches

pytestmark = pytest.mark.gpu

ON_DEVICE = (Placement("device", "device", "device"),) * 5
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "tied, graphs kept": ("llama-tied", {"activations": "keep"}),
    "windows": ("gemma2", {}),
    "dropout": ("gpt2", {}),
    "wait_for": ("llama", {"wait_for": "shard", "weight_slots": 1}),
    "resident": ("llama", {"placements": ON_DEVICE}),
    "resident, updated at once": ("llama", {"placements": ON_DEVICE, "update": "during_backward"}),
    "updated at once": ("llama", {"update": "during_backward"}),
    "updates streamed": ("llama", {"streamed_updates": 1.0, "shard_nbytes": 60_000}),
    "updates streamed, at once": ("llama", {"streamed_updates": 1.0, "update": "during_backward"}),
}


@pytest.fixture
def _waits_are_errors() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_waits_are_errors")
@pytest.mark.parametrize("loss_fn", [None, SmoothedCrossEntropy(0.1)], ids=["cross-entropy", "smoothed"])
@pytest.mark.parametrize("way", WAYS)
def test_no_op_of_a_step_waits_for_the_device(way: str, loss_fn: Any) -> None:
    """A hidden wait (`item`, a copy of pageable memory, `nonzero`) is an error here, on every thread."""
    family, how = WAYS[way]
    clip = None if how.get("update") else 1.0
    policy = Policy(**how)
    with Engine.from_model(tiny_model(family), "cuda:0", "bf16", AdamW(), clip, policy, verify=False, seed=1) as engine:
        engine.step(unequal_batches(3), loss_fn=loss_fn)
        engine.step(unequal_batches(3), loss_fn=loss_fn)  # the first with pending updates
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(2):
            engine.step(unequal_batches(3), loss_fn=loss_fn)
        engine.evaluate(unequal_batches(2))
