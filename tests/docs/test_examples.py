"""What the documents show runs as it is printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", ["README.md", "docs/testing.md"])
def test_python_in_the_documents_runs(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(document, "python")
    assert found
    for block in found:
        exec(compile(block, document, "exec"), {})


def test_commands_in_the_readme_run(tmp_path: Path) -> None:
    commands = [line[2:] for block in blocks("README.md", "console") for line in block.splitlines() if line[:2] == "$ "]
    assert commands
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "megatrain"
        quick = ["model.config.num_hidden_layers=1", "model.config.hidden_size=48", f"output.folder={tmp_path / 'run'}"]
        subprocess.run([sys.executable, "-m", program, *arguments, *quick], cwd=ROOT, check=True, timeout=120)
    assert (tmp_path / "run" / "model" / "config.json").exists()
