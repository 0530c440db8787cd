"""Loading and exporting, measured: at a tiny size the numbers agree, at a larger one the claim holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import loading

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("what", "experts"), [("files", 0), ("config", 0), ("export", 2)])
def test_the_benchmark_runs_and_its_numbers_agree(what: loading.What, experts: int, tmp_path: Path) -> None:
    result = loading.measure(9e6, what, tmp_path, "bf16", experts)
    assert list(tmp_path.iterdir()) == []
    assert result["parameters"] == pytest.approx(9e6, rel=0.2)
    assert 12 * result["parameters"] <= result["store_nbytes"] < 12.01 * result["parameters"]
    assert result["largest_unit_nbytes"] >= 4 * loading.VOCABULARY * 64
    expected = 2 * result["parameters"] if what == "export" else 0
    assert expected <= result["written_nbytes"] <= expected + 100_000
    assert result["holds"] == (result["peak_nbytes"] <= result["bound_nbytes"])
    assert json.dumps(result)
    assert f"{result['parameters'] / 1e6:,.0f}M parameters, {what}" in loading.show(result)


def test_loading_and_exporting_need_the_store_and_one_unit(tmp_path: Path) -> None:
    """In a process of its own. Interpreter and allocator take a share that does not grow with the model."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "bench.loading", "--parameters", "120e6", "--json", str(report)]
    subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, check=False)
    for result in json.loads(report.read_text()):
        assert result["peak_nbytes"] <= result["bound_nbytes"] + (32 << 20), loading.show(result)
