"""`Diagnostics` tells an engine's memory, FLOPs and step times, and writes traces of its steps for Perfetto."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from megatrain.device import matmul_flops
from megatrain.engine import MicroBatch, count_targets, sequences_of
from megatrain.errors import ConfigError
from megatrain.plan import available_host_nbytes, stalls, step_flops
from megatrain.schedule import Timeline, chrome_trace
from megatrain.spec.validate_fields import Bounds, checked
from megatrain.system.paths import usable_path
from megatrain.train.one_call_at_a_time import TakesTurns, one_at_a_time
from megatrain.train.parts import Parts


class Diagnostics(TakesTurns):
    """What an engine takes in memory and time. It is `Engine.diagnostics`; nothing in it changes a number."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._turn = parts, parts.turn
        self._trace: Trace | None = None
        self.record_timeline = False
        """Whether each step is timed op by op, for `timeline`."""

    def memory_table(self) -> dict[tuple[str, str], int]:
        """(tier, use) -> bytes held now, without activations inside layers."""
        return self._parts.pool.ledger.table()

    def host_nbytes_left(self) -> int:
        """Bytes of host memory that are free now, within the limit, if any."""
        free, budget = available_host_nbytes(), self._parts.limits.host_nbytes
        return free if budget is None else max(0, min(free, budget - self._parts.pool.ledger.nbytes_in_host_memory))

    def applied_updates(self) -> dict[str, int]:
        """Unit name -> optimizer updates applied to its state; pending ones are not counted."""
        units, versions = self._parts.structure.units, self._parts.optimizer.versions
        return {unit.name: version.applied for unit, version in zip(units, versions, strict=True)}

    def step_flops(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Model FLOPs of a step over these micro-batches and those of all other ranks.

        Masked positions do not count, packed sequences attend only to themselves, and only targets need the head.
        """
        batches = list(micro_batches)
        sequences, targets = [n for batch in batches for n in sequences_of(batch)], sum(map(count_targets, batches))
        flops = step_flops(self._parts.ported.spec, sequences, targets)
        return sum(self._parts.world.exchange("operations", flops))

    @one_at_a_time
    def peak_flops(self) -> float:
        """FLOPs per second of large matrix products, measured once, summed over the devices of all ranks."""
        mine = matmul_flops(self._parts.device, self._parts.streamer.context.dtype)
        return sum(self._parts.world.exchange("operations per second", mine))

    def under_way(self) -> tuple[list[tuple[str, str, float]], float]:
        """(op, stream, seconds so far) of each running op, and seconds since any began or ended; on any thread."""
        return self._parts.streamer.under_way()

    @property
    def timeline(self) -> Timeline | None:
        """Start and end of each op of the last call, in seconds, if recorded (`record_timeline`)."""
        return self._parts.streamer.timeline

    def trace(self, path: str | Path, steps: int = 3) -> None:
        """Write the ops of the next steps as a trace for Perfetto, without the next one, which warms up."""
        self._trace = Trace(path, steps)

    @property
    def wants_times(self) -> bool:
        return self.record_timeline or self._trace is not None

    def step_done(self) -> None:
        if self._trace is not None and (timeline := self.timeline) is not None and self._trace.add(timeline):
            self._trace = None


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
