"""What layers keep follows the bus in real time: copies that are slept off, all times measured (`bench.replanning`)."""

from __future__ import annotations

import pytest

from bench.replanning import run


@pytest.mark.slow
def test_a_run_whose_bus_falls_stays_near_the_best_mixture_and_its_numbers_stay() -> None:
    """With much room for a noisy machine; the benchmark says how near to the newly optimal step time it comes."""
    found = run(layers=6, width=64, length=128)
    fell = found.fell_before
    assert found.equal
    assert found.bandwidth > 0
    assert all(step <= fell + 2 for step in found.changes), "the mixture is chosen again soon, or not at all"
    assert max(found.recovered[1:]) > 0.7, found
