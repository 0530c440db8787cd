"""Metrics as a file of JSON lines, and as the named numbers that curves are drawn of.

The file holds one strict JSON object per event, written as it happens, so it can be followed while the run goes on and
what a crash leaves is whole lines. A number that is not finite becomes null, because JSON has none. A disk that refuses
is told once and ends no run: lines wait in memory until there is room again, and nothing half-written stays in between.
Left out: TensorBoard and others that draw curves (`trackers`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatrain.errors import ExportError
from megatrain.files import parsed_json, read_text, written_whole
from megatrain.train.events import Evaluated, Event, Stepped

KEPT_LINES = 20_000
"""Lines that wait for room, the newest; about 10 MB."""

DERIVED = ("tokens_per_second", "flops_per_second", "mfu", "stall_share", "written_nbytes_per_day")
"""What a step's record holds beyond the fields of the event."""


def record(event: Event) -> dict[str, Any]:
    """An event as a JSON object: its fields, what follows from them, and `event`, its kind in lower case.

    What a loss reports stands among them by its own name: `rewards/margins`, say.
    """
    values = {"event": type(event).__name__.lower(), **asdict(event)}
    values |= values.pop("metrics", {})
    if isinstance(event, Stepped):
        values |= {name: getattr(event, name) for name in DERIVED}
    if isinstance(event, Evaluated):
        values["perplexity"] = event.perplexity
    return {key: _finite(value) for key, value in values.items()}


class JsonLines:
    """A watcher that writes each event to a file. Raises `ExportError` where it cannot be opened; never later.

    It starts the file anew; or, after `step` steps of an earlier process, goes on behind what was told up to there.
    say: told a line when the disk begins to refuse, and when it takes lines again.
    """

    def __init__(self, path: Path, step: int | None = None, say: Callable[[str], None] = lambda line: None) -> None:
        self.path, self._say = path, say
        self._waiting: deque[bytes] = deque()
        self._lost, self._refused = 0, False
        try:
            if step is not None and path.exists():
                with written_whole(path) as draft:
                    draft.write_text("".join(_told_until(path, step)), encoding="utf-8")
            elif path.exists():
                os.truncate(path, 0)
            self._file = path.open("ab", buffering=0)
            self._whole_nbytes = path.stat().st_size
        except OSError as error:
            what = f"cannot be written ({error.strerror or error})"
            fix = "free some space, or choose another output.folder"
            raise ExportError(what, where=str(path), fix=fix) from error

    def __call__(self, event: Event) -> None:
        text = json.dumps(record(event), allow_nan=False, ensure_ascii=False) + "\n"
        self._waiting.append(text.encode(errors="replace"))
        if len(self._waiting) > KEPT_LINES:
            self._waiting.popleft()
            self._lost += 1
        self._write_waiting()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._waiting:
            self._write_waiting()
        with contextlib.suppress(OSError):
            self._file.close()
        if self._waiting:
            self._say(f"{self.path} lacks the last {len(self._waiting):,} lines: there was no room for them")

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._refused:
                self._refused = True
                why = error.strerror or error
                self._say(f"{self.path} cannot be written ({why}): training goes on, and its lines wait for room")
        else:
            if self._refused:
                missing = f", but for {self._lost:,} lines that were too many to keep" if self._lost else ""
                self._say(f"{self.path} is written again{missing}")
                self._refused, self._lost = False, 0

    def _append(self, line: bytes) -> None:
        """All of a line, or none of it: what an earlier failure has left of one goes first."""
        if self._refused:
            os.ftruncate(self._file.fileno(), self._whole_nbytes)
        rest = memoryview(line)
        while rest:
            written = self._file.write(rest)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            rest = rest[written:]
        self._whole_nbytes += len(line)


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event that curves are drawn of, each under the name of its curve; none of most events."""
    match event:
        case Stepped():
            return _of_step(event)
        case Evaluated():
            found = {"loss/validation": event.loss}
            if not event.metrics:
                found["loss/validation_perplexity"] = event.perplexity
            return found | {f"{name}/validation": value for name, value in event.metrics.items()}
    return {}


def _told_until(path: Path, step: int) -> Iterator[str]:
    """Lines about steps up to `step`, but for the end that an earlier process told; a torn line is none.

    A step that failed and was gone back from may lie beyond `step`: what it has undone is still undone.
    """
    for line in read_text(path, errors="replace").split("\n"):
        try:
            fields = parsed_json(line)
            about = fields["to"] if fields["event"] == "rolledback" else fields["step"]
            if about <= step and fields["event"] != "ended":
                yield line + "\n"
        except (ValueError, KeyError, TypeError):
            continue


def _of_step(event: Stepped) -> dict[str, float]:
    return {
        "loss/train": event.loss,
        "optimizer/grad_norm": event.grad_norm,
        "optimizer/lr": event.lr,
        "speed/tokens_per_second": event.tokens_per_second,
        "speed/mfu": event.mfu,
        "speed/stall_share": event.stall_share,
        **({"disk/written_nbytes_per_day": event.written_nbytes_per_day} if event.written_nbytes else {}),
        **{f"memory/{tier}_nbytes": nbytes for tier, nbytes in event.nbytes.items()},
        **{f"kept/{keep}_share": share for keep, share in event.kept.items()},
        **event.metrics,
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
