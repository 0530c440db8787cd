"""Checks that the command line reports mistakes before it imports a slow library such as torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SLOW = ("torch", "transformers", "numba", "datasets")
TELL = """
import sys
from megatrain import cli
slow, *commands = sys.argv[1:]
for command in commands:
    try:
        cli.main(command.split())
    except SystemExit as left:
        assert left.code == 2, left.code
loaded = set(slow.split()) & set(sys.modules)
assert not loaded, loaded
"""


def told(commands: Sequence[str], folder: Path, *, slow: Sequence[str] = SLOW, before: str = "") -> list[str]:
    """The lines that `megatrain COMMAND` writes to standard error for each of the commands, which all are mistakes.

    All in one process: had one of them loaded a library of `slow`, it would be there at the end. before: Python code
    that is run first.
    """
    command = [sys.executable, "-c", before + TELL, " ".join(slow), *commands]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr.splitlines()
