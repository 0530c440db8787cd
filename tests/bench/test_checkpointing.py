"""The benchmark of checkpoints runs, and its figures belong together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.checkpointing import main

pytestmark = pytest.mark.slow  # a benchmark at a tiny size


def test_a_tiny_benchmark_runs(tmp_path: Path) -> None:
    main(
        ["--parameters", "1e6", "--tokens", "32", "--rounds", "1", "--folder", str(tmp_path), "--json", f"{tmp_path}/j"]
    )
    result = json.loads((tmp_path / "j").read_text())
    assert result["same_loss"]
    assert result["same_state"]
    assert result["tensors"] % 3 == 0
    assert result["checkpoint_nbytes"] > 12 * result["parameters"]
    assert result["step_ratio"] == result["step_beside_save_seconds"] / result["step_seconds"]
    assert [path.name for path in tmp_path.iterdir()] == ["j"]


def test_the_benchmark_runs_in_two_processes(tmp_path: Path) -> None:
    how = ["--parameters", "1e6", "--tokens", "32", "--rounds", "0", "--folder", str(tmp_path)]
    main([*how, "--part", "train", "--json", f"{tmp_path}/j"])
    main([*how, "--part", "resume", "--json", f"{tmp_path}/j"])
    result = json.loads((tmp_path / "j").read_text())
    assert result["holds"] == {"resume": True}
