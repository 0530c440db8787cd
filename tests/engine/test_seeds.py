"""Randomness inside layers depends on the run's seed, the step, the unit and the micro-batch alone."""

from __future__ import annotations

from itertools import product

from megatrain.engine.context import call_seed


def test_dropout_seeds_are_the_documented_hash() -> None:
    """Computed by `printf '3 14 1 5' | b2sum -l 64` and shifted by one bit."""
    assert call_seed(3, 14, 1, 5) == 0xF1F2D7D55AF0E362 >> 1


def test_dropout_seeds_are_unique() -> None:
    found = [call_seed(*each) for each in product((0, 1), range(20), range(10), range(10))]
    assert len(set(found)) == len(found)
    assert all(0 <= seed < 2**63 for seed in found)
