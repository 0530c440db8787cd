"""`megatrain report`: write the HTML page of a run, or of several runs compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatrain.run.compare_runs import write_comparison
from megatrain.run.report import write_report
from megatrain.system.paths import usable_path


def run_report(folders: Sequence[str], html: str | None) -> Path:
    """Write the page of the runs in `folders` to `html`, by default into the first folder; returns its path.

    Raises `ConfigError` for a folder without a run, `ExportError` if the page cannot be written.
    """
    target = None if html is None else usable_path(html, where="--html", to_write="file")
    runs = [usable_path(folder, where="RUN") for folder in folders]
    return write_report(runs[0], target) if len(runs) == 1 else write_comparison(runs, target)
