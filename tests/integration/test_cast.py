"""Gradients whose sum has another dtype than what crosses the bus: the cast has memory that the ledger counts."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain import AdamW, Engine, Policy
from megatrain.engine import streamer
from megatrain.plan import Choice
from megatrain.schedule import build_step
from megatrain.spec import Numerics, Placement, Work
from megatrain.spec.layout import layout_of
from tests.small import small_spec
from tests.tiny import tiny_model, unequal_batches

MODEL = small_spec()
RESIDENT = (Placement("device", "device", "device"),) * len(MODEL.units)
WITHOUT: list[tuple[Any, dict[str, Any]]] = [
    ("fp32", {}),
    ("bf16", {"grad_precision": "fp32"}),
    ("bf16", {"shares_memory": True}),
    ("bf16", {"placements": RESIDENT}),
]


class Copies(TorchDispatchMode):
    """Every operation in its block, with the dtypes of its tensors."""

    found: ClassVar[set[tuple[str, tuple[torch.dtype, ...]]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtypes = tuple(each.dtype for each in args if isinstance(each, torch.Tensor))
        self.found.add((func.overloadpacket.__name__, dtypes))
        return func(*args, **(kwargs or {}))


def cast_nbytes(precision: Any, **how: Any) -> int:
    choice = Choice(Numerics(precision), Policy(shard_nbytes=1 << 10)).change(**how)
    buffers = build_step(MODEL, choice.numerics, choice.policy, Work((8, 8))).buffers
    return buffers["device/cast"].nbytes if "device/cast" in buffers else 0


def test_cast_buffers_are_as_large_as_the_largest_shard() -> None:
    shards = [shard for unit in MODEL.units for shard in layout_of(unit).trained.shards((1 << 10) // 4)]
    assert cast_nbytes("bf16") == 2 * max(shard.stop - shard.start for shard in shards)


@pytest.mark.parametrize(("precision", "how"), WITHOUT)
def test_no_cast_buffer_without_a_cast(precision: Any, how: dict[str, Any]) -> None:
    assert cast_nbytes(precision, **how) == 0


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"transfer": "pageable"},
        {"placements": (Placement("device", "device", "device"),) * 5},
    ],
)
def test_copies_allocate_nothing(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the bus's two ends the dtype is one, and no operation makes a tensor of its own."""
    whole = streamer.ACTIONS["GRAD"]

    def watched(*args: Any) -> None:
        with Copies():
            whole(*args)

    monkeypatch.setattr(Copies, "found", set())
    for kind in ("FETCH", "PLACE", "GRAD", "OFFLOAD", "RELOAD"):
        monkeypatch.setitem(streamer.ACTIONS, kind, watched)
    policy = Policy(shard_nbytes=4096, activations_by_layer=(("offload",),), **how)
    with Engine.from_model(tiny_model(), "sim:1", "bf16", AdamW(), None, policy, verify=False) as engine:
        engine.step(unequal_batches(2))
    assert {name for name, _ in Copies.found} == {"view", "slice", "detach", "copy_"}
    if not how.get("placements"):
        assert ("copy_", (torch.bfloat16, torch.float32)) in Copies.found
