"""The export benchmark at a tiny size: it runs, and its numbers agree with each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import exporting

pytestmark = pytest.mark.slow  # a benchmark at a tiny size


def test_the_benchmark_runs_and_its_numbers_agree(tmp_path: Path) -> None:
    result = exporting.measure(9e6, "bf16", 2, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert result["parameters"] == pytest.approx(9e6, rel=0.2)
    assert 12 * result["parameters"] <= result["store_nbytes"] < 12.01 * result["parameters"]
    assert result["largest_unit_nbytes"] >= 4 * exporting.VOCABULARY * 64
    assert 2 * result["parameters"] < result["written_nbytes"] < 2 * result["parameters"] + 100_000
    assert result["holds"] == (result["peak_to_store_and_unit"] <= 1.05)
    assert json.dumps(result)
    assert f"{result['parameters'] / 1e6:,.0f}M parameters" in exporting.show(result)
