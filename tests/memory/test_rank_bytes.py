"""Host memory of each rank of several, as its ledger counts it: an equal part of what the model takes."""

from __future__ import annotations

import pytest

from bench.shapes import llama_shape
from megatrain.memory.ledger import Ledger
from megatrain.schedule import build_step
from megatrain.spec import Numerics, Policy, Precision, Work
from megatrain.spec.policy import Delivery

MODEL = llama_shape("wide", 12, 4096)


@pytest.mark.parametrize("delivery", ["gather", "shared"])
@pytest.mark.parametrize(("precision", "each"), [("bf16", 14), ("fp32", 16)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_holds_its_part_and_two_hundredths_more_at_most(
    ranks: int, precision: Precision, each: int, delivery: Delivery
) -> None:
    """Bytes for a parameter: weights, moments and gradients, all that is on the host but for what is shared to sum."""
    exact = each * MODEL.numel / ranks
    for rank in range(ranks):
        ledger = Ledger()
        step = build_step(MODEL.over(ranks), Numerics(precision), Policy(delivery=delivery), Work((1,)), rank=rank)
        for buffer in step.buffers.values():
            if buffer.arena and buffer.peer is None:
                ledger.enter(buffer)
        assert exact <= ledger.nbytes("host") <= 1.02 * exact, ledger.table()
