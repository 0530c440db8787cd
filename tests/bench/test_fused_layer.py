"""What the count of a layer's kernels says of fused functions."""

from __future__ import annotations

import pytest
import torch

from bench.fused_layer import GOALS, SHAPES, CountKernels, compare


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_layers_reach_the_goals(shape: str) -> None:
    ratios = compare(shape, tokens=64)["ratios"]
    assert all(ratios[name] <= goal for name, goal in GOALS.items()), ratios


def test_launches_and_bytes_are_counted() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    counting = CountKernels([weight])
    with counting:
        y = (x.t().contiguous().t() @ weight).view(2, 16)
        y += 1
        y.expand(3, 2, 16).sum()
        torch.empty(100).zero_()
    assert dict(counting.counts.ops) == {
        "aten::clone": 1,
        "aten::mm": 1,
        "aten::add_": 1,
        "aten::sum": 1,
        "aten::zero_": 1,
    }
    assert counting.counts.nbytes == 2 * x.nbytes + 2 * y.nbytes + (y.nbytes + 4) + 400
