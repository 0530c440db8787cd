"""The optimizer benchmark at a tiny size: it runs, and its numbers agree with each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import adamw

pytestmark = pytest.mark.slow  # a benchmark at a tiny size


def test_the_benchmark_runs_and_its_ratios_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    adamw.main(["--millions", "0.01", "--rounds", "3", "--threads", "1", "--json", str(tmp_path / "adamw.json")])
    report = json.loads((tmp_path / "adamw.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["split master", "float32 master", "torch fused", "torch bf16", "copy"]
    assert rows["torch fused"]["ratio_to_torch"] == 1
    assert rows["torch bf16"]["ratio_to_torch_bf16"] == 1
    assert rows["copy"]["ratio_to_copy"] == 1
    for row in rows.values():
        assert 25 < row["nbytes_per_second"] / row["params_per_second"] < 41
        assert row["ratio_to_torch"] > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)
    assert torch.get_num_threads() == threads
