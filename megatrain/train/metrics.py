"""Metrics leave here: a file of JSON lines, and TensorBoard events.

The file holds one strict JSON object per event, flushed as it happens, so it can be followed while the run goes on and
what a crash leaves is whole lines. A number that is not finite becomes null, because JSON has none. Left out: anything
that sends metrics elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatrain.errors import ExportError
from megatrain.train.events import Ended, Evaluated, Event, Sampled, Skipped, Stepped

DERIVED = ("tokens_per_second", "flops_per_second", "light_share", "stall_share", "written_nbytes_per_day")
"""What a step's record holds beyond the fields of the event."""


def record(event: Event) -> dict[str, Any]:
    """An event as a JSON object: its fields, what follows from them, and `event`, its kind in lower case."""
    values = {"event": type(event).__name__.lower(), **asdict(event)}
    if isinstance(event, Stepped):
        values |= {name: getattr(event, name) for name in DERIVED}
    return {key: _finite(value) for key, value in values.items()}


class JsonLines:
    """A watcher that writes each event to a file. Raises `ExportError` where the disk refuses.

    It starts the file anew; or, after `step` steps of an earlier process, goes on behind what was told up to there.
    """

    def __init__(self, path: Path, step: int | None = None) -> None:
        self.path = path
        try:
            if step is not None and path.exists():
                beside = path.with_name(f".{path.name}.part")
                beside.write_text("".join(_told_until(path, step)), encoding="utf-8")
                beside.replace(path)
            self._file = path.open("w" if step is None else "a", encoding="utf-8")
        except OSError as error:
            raise self._refused(error) from error

    def __call__(self, event: Event) -> None:
        try:
            self._file.write(json.dumps(record(event), allow_nan=False, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._refused(error) from error

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _refused(self, error: OSError) -> ExportError:
        what = f"cannot be written ({error.strerror or error})"
        return ExportError(what, where=str(self.path), fix="free some space, or choose another output.folder")


class TensorBoard:
    """A watcher that writes TensorBoard events into a folder; what was told of steps after `step` is not shown."""

    def __init__(self, folder: Path, step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import, and not every run wants it

        self._writer: Any = SummaryWriter(str(folder), purge_step=None if step is None else step + 1)

    def __call__(self, event: Event) -> None:
        match event:
            case Stepped():
                for tag, value in _scalars(event).items():
                    self._writer.add_scalar(tag, value, event.step)
            case Evaluated():
                self._writer.add_scalar("loss/validation", event.loss, event.step)
            case Sampled():
                self._writer.add_text("sample", f"    {event.prompt}{event.text}".replace("\n", "\n    "), event.step)
            case Skipped() | Ended():
                self._writer.flush()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()


def _told_until(path: Path, step: int) -> Iterator[str]:
    """Lines about steps up to `step`, but for the end that an earlier process told; a torn line is none."""
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            fields = json.loads(line)
            if fields["step"] <= step and fields["event"] != "ended":
                yield line + "\n"
        except (ValueError, KeyError, TypeError):
            continue


def _scalars(event: Stepped) -> dict[str, float]:
    return {
        "loss/train": event.loss,
        "optimizer/grad_norm": event.grad_norm,
        "optimizer/lr": event.lr,
        "speed/tokens_per_second": event.tokens_per_second,
        "speed/light_share": event.light_share,
        "speed/stall_share": event.stall_share,
        **({"disk/written_nbytes_per_day": event.written_nbytes_per_day} if event.written_nbytes else {}),
        **{f"memory/{tier}_nbytes": nbytes for tier, nbytes in event.nbytes.items()},
        **{f"kept/{keep}_share": share for keep, share in event.kept.items()},
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
