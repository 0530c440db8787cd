"""The loader benchmark at a small size: it runs, and its claim holds with room to spare."""

from __future__ import annotations

import pytest

from bench import loader

pytestmark = pytest.mark.slow  # a benchmark at a tiny size


def test_the_loader_outpaces_a_step_in_constant_memory() -> None:
    found = loader.measure(window=128, workers=1, seconds=0.5, count=500)
    assert found["ratio"] > 20
    assert found["ratio"] == found["tokens_per_second"] / found["step_tokens_per_second"]
    assert found["grown_nbytes"] < 64 << 20
