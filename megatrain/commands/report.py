"""`megatrain report`: the page of a run, or of several compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatrain.run.comparison import write_comparison
from megatrain.run.report import write_report
from megatrain.system.paths import usable_path


def run_report(folders: Sequence[str], html: str | None) -> Path:
    """Write the page of the runs in `folders` to `html`, or into the first of them. Returns where it is.

    Raises `ConfigError` for a folder that holds no run, `ExportError` where the page cannot be written.
    """
    target = None if html is None else usable_path(html, where="--html", to_write="file")
    runs = [usable_path(folder, where="RUN") for folder in folders]
    return write_report(runs[0], target) if len(runs) == 1 else write_comparison(runs, target)
