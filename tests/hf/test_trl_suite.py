"""TRL's own SFT tests pass with the streamed trainer, or are refused by name; `trl_suite.json` has the counts.

This needs TRL's source, which is not in its package: MEGATRAIN_TRL_SOURCE names the folder. The tests run with the
library in that folder, once with its own trainer, to see which can pass here, and twice with the streamed one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hf.trl_suite import HUB, MODE, MODES, REPORT

SOURCE = os.environ.get("MEGATRAIN_TRL_SOURCE", "")
EXPECTED = Path(__file__).with_suffix("").with_name("trl_suite.json")
REFUSED_AT_MOST = 3
"""Among the tests that pass with TRL's own trainer, for any version of TRL."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not SOURCE, reason="MEGATRAIN_TRL_SOURCE does not name a folder with TRL's source"),
]


def run(source: Path, hub: Path, mode: str) -> dict[str, str]:
    """TRL's SFT tests, without those of vision models -> `passed`, `skipped`, `refused: ...` or `failed: ...`."""
    report = hub / f"{mode}.jsonl"
    here = Path(__file__).parent
    environment = {
        **os.environ,
        **{HUB: str(hub), MODE: mode, REPORT: str(report), "HF_HOME": str(hub)},
        **{"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "CI": "1", "OMP_NUM_THREADS": "1"},
        "PYTHONPATH": os.pathsep.join([str(here), str(source), str(here.parents[1])]),
        "PYTHONDONTWRITEBYTECODE": "1",  # the folder is the user's
    }
    tests = ["tests/test_sft_trainer.py", "-k", "not vlm", "-p", "trl_suite", "-p", "no:cacheprovider", "-q"]
    command = [sys.executable, "-m", "pytest", *tests, "--timeout", "300"]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert report.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return dict(json.loads(line) for line in report.read_text().splitlines())


def summary(source: Path, found: dict[str, dict[str, str]]) -> dict[str, Any]:
    """How many tests pass with TRL's own trainer, and which of them do not with the streamed one."""
    can_pass = {test for test, outcome in found["stock"].items() if outcome == "passed"}
    missing = {
        mode: {test: found[mode].get(test, "failed: not run") for test in sorted(can_pass)} for mode in MODES[1:]
    }
    return {
        "TRL": (source / "VERSION").read_text().strip(),
        "passed by its own trainer": len(can_pass),
        **{
            mode: {
                "passed": sum(outcome == "passed" for outcome in each.values()),
                **{test: outcome for test, outcome in each.items() if outcome != "passed"},
            }
            for mode, each in missing.items()
        },
    }


def test_trls_own_tests_pass_or_are_refused_by_name(tmp_path: Path) -> None:
    source, hub = Path(SOURCE).resolve(), tmp_path / "hub"
    script = [sys.executable, str(Path(__file__).with_name("trl_suite.py")), str(source), str(hub)]
    subprocess.run(script, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, check=True)
    found = summary(source, {mode: run(source, hub, mode) for mode in MODES})
    (tmp_path / "found.json").write_text(json.dumps(found, indent=2) + "\n")
    for mode in MODES[1:]:
        others = [outcome for test, outcome in found[mode].items() if test != "passed"]
        assert all(outcome.startswith("refused: ") for outcome in others), found[mode]
        assert len(others) <= REFUSED_AT_MOST
    expected = json.loads(EXPECTED.read_text())
    if found["TRL"] == expected["TRL"]:
        assert found == expected, f"see {tmp_path / 'found.json'}"
