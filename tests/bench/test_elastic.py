"""The sweep of `bench.elastic` on a small shape: a few corners, replayed and on the simulator's virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.elastic import INFINITE, REACHED, Point, bounded, claims, knees, point, table
from bench.shapes import llama_shape

pytestmark = pytest.mark.slow  # a benchmark at a tiny size

SHAPE = llama_shape("small", 6, 2048, vocabulary=4096)
TOKENS = 32_768
FIXED = ("recomputed", "offloaded")


@pytest.mark.parametrize(("bus", "memory"), [(128, 5), (64, 12)])
def test_a_mixture_is_never_slower_than_a_fixed_plan_and_near_an_infinite_bus_above_the_knee(
    bus: float, memory: float
) -> None:
    found = point(bus, memory, TOKENS, SHAPE, FIXED)
    assert found.elastic is not None
    assert found.elastic <= 1.0001 * found.best_fixed
    assert found.executed == pytest.approx(found.elastic, rel=1e-9)
    assert found.above_knee
    assert found.reached >= REACHED


def test_the_knee_moves_with_bus_bandwidth() -> None:
    bound = bounded(SHAPE, 2, TOKENS)
    assert bound is not None
    assert bound.policy.offloads, "so little memory lets inputs leave"
    alone, besides = knees(bound, 16)
    assert knees(bound, 8)[0] == pytest.approx(2 * alone)
    assert besides is not None
    assert besides >= alone
    assert knees(bound, 0.05)[1] is None, "inputs take longer than the compute of their tokens, however many there are"
    assert knees(bound, INFINITE)[1] == pytest.approx(0, abs=10)


def test_points_below_the_knee_make_no_claim() -> None:
    there = Point(16, 8, 65_536, 10.0, 10.0, {"offloaded": 11.0}, 9.0, {"offload": 1.0}, 28_000.0, 30_000.0)
    below = replace(there, tokens=29_000)
    assert "0 of 1 corners reach 95%" in "\n".join(claims([there, below]))
    assert "**90.0%**" in table([there])[-1]
    assert "**" not in table([below])[-1]
    assert "below that of inputs: 1 corners, at least 90.0%" in "\n".join(claims([below]))
