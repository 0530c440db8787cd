"""Maintains `status.json`, a run's health for people and scripts, and detects what hangs.

The file holds one JSON object, replaced atomically every few seconds and whenever `state` changes: `starting`,
`running`, `stopping` (requested), and finally `finished`, `stopped`, or `failed` with the `error`. A killed process
leaves `running` with a `heartbeat` (seconds since 1970) that no longer advances, and its `pid`.

An op that runs longer than `stall_seconds` while nothing else moves, a save that has written nothing for as long,
and a dead thread are reported once each, and listed under `stalled` while they last. Nothing is stopped: a slow
disk may recover, and whoever watches the file decides.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megatrain.errors import typed_line
from megatrain.system.paths import written_whole
from megatrain.train.events import (
    Ended,
    Evaluated,
    Event,
    Resumed,
    RolledBack,
    Saved,
    Scored,
    Skipped,
    Stepped,
    StoppedEarly,
    mean_loss,
)

if TYPE_CHECKING:
    from megatrain.train.engine import Engine

STATUS = "status.json"
THREADS = "megatrain-"
"""Prefix of our threads' names."""


@dataclass(frozen=True)
class Intervals:
    """How often the status is renewed, and when something counts as hanging."""

    log_every: int
    """Steps over which the loss is averaged, as on the terminal."""
    stall_seconds: float
    """What makes no progress for as long hangs."""
    beat_seconds: float = 2.0
    """Time between two versions of the file."""


class Health:
    """A watcher, with a thread during a `with` block.

    steps: of the whole run. say: called from the thread with a message about anything that hangs. stopping: whether the
    run has been asked to stop.
    """

    def __init__(
        self,
        path: Path,
        engine: Engine,
        steps: int,
        pace: Intervals,
        *,
        say: Callable[[str], None] = lambda line: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.path, self._engine, self._say, self._stopping = path, engine, say, stopping
        self._pace = pace
        self._recent: deque[Stepped | Skipped] = deque(maxlen=pace.log_every)
        self._fields: dict[str, Any] = {
            "state": "starting",
            "step": 0,
            "steps": steps,
            "epoch": None,
            "loss": None,
            "validation_loss": None,
            "validation_perplexity": None,
            "validation_losses": {},
            "scores": {},
            "tokens_per_second": None,
            "seconds_per_step": None,
            "last_checkpoint": None,
            "last_checkpoint_step": None,
            "saving": None,
            "stalled": [],
            "error": None,
            "pid": os.getpid(),
            "started": time.time(),
            "heartbeat": time.time(),
        }
        self._told: set[str] = set()
        self._early = False
        self._refused = False
        self._threads: dict[int, threading.Thread] = {}
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="health", daemon=True)

    def __enter__(self) -> Health:
        self.write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()
        if self._fields["state"] == "failed":  # another rank failed, and this one ends because of it
            return
        whole = self._early or self._fields["step"] >= self._fields["steps"]
        state = "failed" if error is not None else "finished" if whole else "stopped"
        self._fields |= {"state": state, "error": None if error is None else typed_line(error), "saving": None}
        self._fields["stalled"] = []
        self.write()

    def __call__(self, event: Event) -> None:
        match event:
            case Stepped():
                first = self._fields["state"] == "starting"
                self._recent.append(event)
                loss = mean_loss(self._recent)
                self._fields |= {
                    "state": "running",
                    "step": event.step,
                    "loss": loss if math.isfinite(loss) else None,
                    "epoch": event.epoch,
                    "tokens_per_second": event.tokens_per_second,
                    "seconds_per_step": event.seconds,
                }
                if first:
                    self.write()
            case Skipped() | Ended():
                self._fields["step"] = event.step
                if isinstance(event, Skipped):
                    self._recent.append(event)
            case Evaluated():
                self._fields["validation_loss"] = event.loss if math.isfinite(event.loss) else None
                finite = math.isfinite(event.perplexity)
                self._fields["validation_perplexity"] = event.perplexity if finite else None
                self._fields["validation_losses"] = {
                    name: loss if math.isfinite(loss) else None for name, loss in event.by_source.items()
                }
            case Scored():
                finite_scores = {name: score if math.isfinite(score) else None for name, score in event.scores.items()}
                self._fields["scores"] = {**self._fields["scores"], **finite_scores}
            case StoppedEarly():
                self._early = True
            case RolledBack():
                self._fields["step"] = event.to
            case Resumed() | Saved():
                self._fields |= {"last_checkpoint": event.checkpoint, "last_checkpoint_step": event.step}
                self._fields["step"] = max(self._fields["step"], event.step)

    def failed(self, line: str) -> None:
        """A thread is about to end the process because of `line`."""
        self._end.set()
        self._fields |= {"state": "failed", "error": line, "saving": None, "stalled": []}
        self.write()

    def write(self) -> None:
        """Replace the file. A failing disk is reported once, and tried again at the next beat."""
        if self._stopping() and self._fields["state"] == "running":
            self._fields["state"] = "stopping"
        self._fields |= {"heartbeat": time.time(), "saving": self._saving()}
        with self._lock:
            try:
                with written_whole(self.path) as draft:
                    draft.write_text(json.dumps(self._fields, indent=1) + "\n")
                self._refused = False
            except OSError as error:
                if not self._refused:
                    self._refused = True
                    self._say(f"{self.path} cannot be written ({error.strerror or error}) and is out of date")

    def _beat(self) -> None:
        while not self._end.wait(self._pace.beat_seconds):
            self._fields["stalled"] = stalled = self.stalled()
            for line in stalled:
                key = line.partition(" for ")[0]
                if key not in self._told:
                    self._told.add(key)
                    self._say(line)
            self.write()

    def stalled(self) -> list[str]:
        """What hangs now, each with its age, one per line."""
        lines: list[str] = []
        ops, quiet = self._engine.diagnostics.under_way()
        if ops and quiet > self._pace.stall_seconds:
            op, stream, seconds = max(ops, key=lambda op: op[2])
            lines.append(f"op {op} on stream {stream} has been running for {seconds:.0f} s")
        save = self._engine.saver.current
        if save is not None and not save.is_over and (age := time.monotonic() - save.moved) > self._pace.stall_seconds:
            lines.append(f"the checkpoint of step {save.step:,} has been stuck at {save.at} for {age:.0f} s")
        return [*lines, *self._died()]

    def _died(self) -> list[str]:
        """Our threads that no longer run, except those that write a single checkpoint."""
        for thread in threading.enumerate():
            if thread.name.startswith(THREADS) and thread.name != "megatrain-save" and thread.ident is not None:
                self._threads[thread.ident] = thread
        return [f"thread {thread.name} has died" for thread in self._threads.values() if not thread.is_alive()]

    def _saving(self) -> dict[str, Any] | None:
        save = self._engine.saver.current
        if save is None or save.is_over:
            return None
        share = save.written_nbytes / save.nbytes if save.nbytes else 0.0
        return {"step": save.step, "at": save.at, "share": round(share, 3), "seconds": time.monotonic() - save.began}
