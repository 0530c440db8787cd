"""`make gpu` runs with a machine's own Python, which may have none of the development tools but pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BARE = """
import sys
for absent in ("hypothesis", "pytest_timeout", "xdist"):
    sys.modules[absent] = None
import pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", "-W", "default", "--collect-only", "-q", "tests/gpu"]))
"""


@pytest.mark.slow
def test_the_gpu_tests_are_collected_without_the_development_tools(tmp_path: Path) -> None:
    words = [sys.executable, "-c", BARE]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "test_parity.py" in done.stdout
