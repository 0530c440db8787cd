"""The prediction benchmark at a tiny size: it runs, and the machine's speed is taken out of what it measures."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from bench import prediction
from bench.pace import Pace
from megatrain.device.base import Errand
from megatrain.spec import Hardware

pytestmark = pytest.mark.slow  # a benchmark at a tiny size

HARDWARE = Hardware("here", 1 << 40, 1 << 40, 1e10, 1e10, 1e11, 1e10, shares_memory=True, device_bandwidth=1e10)


def sampled(pace: Pace, product: float, passing: float, until: int) -> None:
    """As if both references had taken so long at seconds 0, 1, ..."""
    pace._when += range(until)
    pace._seconds += [(product, passing)] * until


def test_a_slower_machine_is_detected_from_matmuls_and_memory_passes() -> None:
    pace = Pace()
    sampled(pace, 0.002, 0.003, 9)
    pace.set_out()
    sampled(pace, 0.004, 0.003, 9)
    pace.ops = [(Errand("products"), 1.0, 3.0)]
    assert pace.slowdown(lambda task: 1.0) == pytest.approx(2)
    assert pace.slowdown(lambda task: 0.0) == pytest.approx(1)
    assert pace.slowdown(lambda task: 0.5) == pytest.approx(1.5)
    pace.ops.append((Errand("passes"), 4.0, 6.0))
    assert pace.slowdown(lambda task: float(task.name == "products")) == pytest.approx(4 / 3)


def test_the_benchmark_runs_and_its_numbers_agree() -> None:
    pace = Pace()
    pace.sample()
    pace.set_out()
    outcome = prediction.run(prediction.Case(64, 2, "fp32", length=16, vocabulary=64), HARDWARE, pace)
    low, high = outcome.spread
    assert 0 < low <= outcome.measured <= high
    assert outcome.slowdown > 0
    assert outcome.ledger_nbytes < outcome.allocated_nbytes
    assert sum(share for _, share in outcome.by_kind.values()) == pytest.approx(1, abs=0.01)
    assert json.dumps(asdict(outcome))
    assert f"predicted {outcome.time_ratio:4.2f}x" in prediction.show(outcome, kinds=True)
