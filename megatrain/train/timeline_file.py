"""Timelines of a few steps in a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated

from megatrain.errors import ConfigError
from megatrain.plan import stalls
from megatrain.schedule import Timeline, chrome_trace
from megatrain.spec.fields import Bounds, checked
from megatrain.system.paths import usable_path

TRACE = "trace.json"
"""The trace of one early step in the folder of a run, where no other is asked for."""


class Trace:
    """Gathers the timelines of `steps` steps, the first left out since it warms up, and writes them when complete.

    Raises `ConfigError` at once for a path that cannot be written; a disk that is full later is warned of.
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
        """One more step; the file is written, and true returned, with the last of them."""
        if self._warm:
            self._timelines.append(timeline)
        self._warm = True
        if len(self._timelines) < self.steps:
            return False
        waits = stalls(self._timelines[-1])  # stream -> seconds that compute waited for it
        try:
            self.path.write_text(json.dumps(chrome_trace(self._timelines) | {"waits": waits}))
        except OSError as error:
            warnings.warn(f"the trace {self.path} cannot be written ({error.strerror or error})", stacklevel=2)
        return True
