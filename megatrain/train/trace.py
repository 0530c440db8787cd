"""Timelines of a few steps in a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from pathlib import Path

from megatrain.errors import ConfigError
from megatrain.schedule import Timeline, chrome_trace


class Trace:
    """Gathers the timelines of `steps` steps, the first left out since it warms up, and writes them when complete.

    Raises `ConfigError` at once for a path that cannot be written.
    """

    def __init__(self, path: str | Path, steps: int) -> None:
        self.path, self.steps = Path(path), steps
        self._timelines: list[Timeline] = []
        self._warm = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise ConfigError(f"cannot be written ({error.strerror})", where=f"trace {self.path}") from error

    def add(self, timeline: Timeline) -> bool:
        """One more step; the file is written, and true returned, with the last of them."""
        if self._warm:
            self._timelines.append(timeline)
        self._warm = True
        if len(self._timelines) < self.steps:
            return False
        self.path.write_text(json.dumps(chrome_trace(self._timelines)))
        return True
