"""Writes timelines of a few steps to a trace file for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated

from megatrain.errors import ConfigError
from megatrain.plan import stalls
from megatrain.schedule import Timeline, chrome_trace
from megatrain.spec.validate_fields import Bounds, checked
from megatrain.system.paths import usable_path

TRACE = "trace.json"
"""Default trace in the run folder, of one early step."""


class Trace:
    """Collects the timelines of `steps` steps, without the first, which warms up, and writes them when complete.

    Raises `ConfigError` at once for a path that is not writable; a later failure is only a warning.
    """

    def __init__(self, path: str | Path, steps: int) -> None:
        self.path = usable_path(path, where="trace", to_write="file")
        self.steps = checked(steps, Annotated[int, Bounds(1)], ConfigError, "trace.steps")
        self._timelines: list[Timeline] = []
        self._warm = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise ConfigError(f"cannot be written ({error.strerror})", where=f"trace {self.path}") from error

    def add(self, timeline: Timeline) -> bool:
        """Add a step; with the last one, writes the file and returns true."""
        if self._warm:
            self._timelines.append(timeline)
        self._warm = True
        if len(self._timelines) < self.steps:
            return False
        waits = stalls(self._timelines[-1])  # stream -> seconds for which compute waited for it
        try:
            self.path.write_text(json.dumps(chrome_trace(self._timelines) | {"waits": waits}))
        except OSError as error:
            warnings.warn(f"the trace {self.path} cannot be written ({error.strerror or error})", stacklevel=2)
        return True
