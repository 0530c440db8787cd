"""The disk benchmark at a tiny size: it runs, its numbers agree with each other, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import disk

pytestmark = pytest.mark.slow  # a benchmark at a tiny size


def test_the_benchmark_runs_and_its_ratios_agree(tmp_path: Path) -> None:
    result = disk.measure(tmp_path, nbytes=8 << 20, rounds=2, probe_seconds=0.1)
    assert list(tmp_path.iterdir()) == []
    rows = {(row["name"], row["way"]): row for row in result["rows"]}
    names = ["sequential", "raw", "disk", "disk, no sums"]
    assert set(rows) == {(name, way) for name in names for way in ("read", "write", "both")} - {("sequential", "both")}
    assert all(row["ratio_to_raw"] == 1 for (name, _), row in rows.items() if name == "raw")
    assert all(rows["sequential", way]["ratio_to_sequential"] == 1 for way in ("read", "write"))
    assert all(row["bandwidth"] > 0 for row in rows.values())
    assert result["disk"]["block_nbytes"] == result["raw"]["block_nbytes"]
    ours = [rows["disk", way]["ratio_to_raw"] for way in ("read", "write")]
    assert disk.holds(result) == (min(ours) >= disk.GOAL)
    assert all(name in disk.show(result) for name in names)
    assert json.dumps(result)
