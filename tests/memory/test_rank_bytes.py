"""Host memory of each rank of several, as its ledger counts it: an equal part of what the model takes."""

from __future__ import annotations

import pytest

from bench.shapes import llama_shape
from megatrain.memory.ledger import Ledger
from megatrain.schedule import Use, build_step
from megatrain.spec import Numerics, Policy, Precision, Work
from megatrain.spec.policy import Delivery, UpdateTime

MODEL = llama_shape("wide", 12, 4096)


@pytest.mark.parametrize("delivery", ["gather", "shared"])
@pytest.mark.parametrize(
    ("precision", "each", "update"),
    [("bf16", 14, "next_forward"), ("fp32", 16, "next_forward"), ("bf16", 12, "during_backward")],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_holds_its_share_within_two_percent(
    ranks: int, precision: Precision, each: int, update: UpdateTime, delivery: Delivery
) -> None:
    """Bytes for a parameter: weights, moments and gradients, all that is on the host but for what is shared to sum and
    gradients that are used as they land."""
    exact = each * MODEL.numel / ranks
    for rank in range(ranks):
        ledger = Ledger()
        policy = Policy(delivery=delivery, update=update)
        step = build_step(MODEL.over(ranks), Numerics(precision), policy, Work((1,)), rank=rank)
        for buffer in step.buffers.values():
            if buffer.arena and buffer.peer is None and buffer.use is not Use.LANDED_GRADIENTS:
                ledger.enter(buffer)
        assert exact <= ledger.nbytes("host") <= 1.02 * exact, ledger.table()
