"""The bounds that `python -m bench.launches` prints the figures of: waits, pageable copies, kernels, bytes."""

from __future__ import annotations

import pytest

from bench import launches
from bench.house import walk_on
from tests import standin_cuda

STANDIN = standin_cuda.installed()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(STANDIN is None, reason="needs the stand-in: make test-cuda")]

WAYS = [
    *(("dense", name) for name in launches.POLICIES),
    ("experts", "graphs kept"),
    ("experts", "recompute"),
    ("hybrid", "recompute"),
]


@pytest.mark.parametrize(("model", "policy"), WAYS)
def test_a_step_waits_once_copies_nothing_pageable_and_launches_what_the_stock_model_does(
    model: str, policy: str
) -> None:
    found = launches.row(model, policy)
    assert found.hidden_waits == 0
    assert found.waits <= 2
    assert found.pageable_copies == 0
    assert found.events == 0
    assert found.op_calls <= 100
    if policy == "resident":  # whose kernels are the optimizer's too, and whose weights stay
        return
    assert found.kernels <= 1.1 * found.stock_kernels
    assert found.in_ratio <= (1.2 if policy == "offload" else 1.05)
    assert found.out_ratio <= (1.2 if policy == "offload" else 1.05)


def test_at_most_seven_functions_lie_between_a_step_and_a_layer() -> None:
    walk = walk_on("cuda:0")
    assert 0 < len(walk.forward) <= 7, " > ".join(walk.forward)
    assert 0 < len(walk.backward) <= 7, " > ".join(walk.backward)
