"""Writes metrics as JSON lines and to trackers: TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import math
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megatrain.errors import ConfigError, ExportError, first_line
from megatrain.system.paths import parsed_json, read_text, written_whole
from megatrain.train.events import Ended, Evaluated, Event, Sampled, Scored, Skipped, Stepped

# A file of JSON lines -------------------------------------------------------------------------------------------------
#
# The file has one strict JSON object per event, written as it happens, so it can be followed during the run and a crash
# leaves complete lines. Non-finite numbers become null, because JSON lacks them. A failing disk is reported once and
# does not end the run: lines wait in memory until there is space, and no partial line stays in between.


DERIVED = ("tokens_per_second", "flops_per_second", "mfu", "stall_share", "written_nbytes_per_day")
"""A step's record entries besides the fields of the event."""


def record(event: Event) -> dict[str, Any]:
    """An event as a JSON object: its fields, values derived from them, and `event`, its kind in lower case.

    Metrics of the loss function appear under their own names: `rewards/margins`, say.
    """
    values = {"event": type(event).__name__.lower(), **asdict(event)}
    values |= values.pop("metrics", {})
    if isinstance(event, Evaluated | Scored):
        part = "by_source" if isinstance(event, Evaluated) else "scores"
        values[part] = {name: _finite(value) for name, value in values[part].items()}
    if isinstance(event, Stepped):
        values |= {name: getattr(event, name) for name in DERIVED}
    if isinstance(event, Evaluated):
        values["perplexity"] = event.perplexity
    return {key: _finite(value) for key, value in values.items()}


class JsonLines:
    """A watcher that writes each event to a file. Raises `ExportError` if it cannot be opened; never later.

    Starts the file anew; or, given `step`, keeps its lines up to that step of an earlier process and appends. say:
    called with a message when the disk begins to fail, and when it works again.
    """

    def __init__(self, path: Path, step: int | None = None, say: Callable[[str], None] = lambda line: None) -> None:
        self.path, self._say = path, say
        self._waiting: deque[bytes] = deque()
        self._refused = False
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
        self._write_waiting()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._waiting:
            self._write_waiting()
        with contextlib.suppress(OSError):
            self._file.close()
        if self._waiting:
            self._say(f"{self.path} lacks the last {len(self._waiting):,} lines: there was no space for them")

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._refused:
                self._refused = True
                why = error.strerror or error
                self._say(f"{self.path} cannot be written ({why}): training continues, and lines wait for space")
        else:
            if self._refused:
                self._say(f"{self.path} is written again")
                self._refused = False

    def _append(self, line: bytes) -> None:
        """Write a complete line or nothing, after removing what an earlier failure left."""
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
    """Curve name -> number, for the numbers of an event that are plotted; empty for most events."""
    match event:
        case Stepped():
            return _of_step(event)
        case Evaluated():
            return {
                "loss/validation": event.loss,
                **({} if event.metrics else {"loss/validation_perplexity": event.perplexity}),
                **{f"loss/validation/{name}": loss for name, loss in event.by_source.items()},
                **{f"{name}/validation": value for name, value in event.metrics.items()},
            }
        case Scored():
            return {f"eval/{name}": value for name, value in event.scores.items()}
    return {}


def _told_until(path: Path, step: int) -> Iterator[str]:
    """Lines about steps up to `step`, without an earlier process's end; incomplete lines are dropped.

    A rollback after `step` is kept: the steps that it discarded remain discarded.
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
        **event.metrics,
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Curves in other programs ---------------------------------------------------------------------------------------------
#
# Each tracker gets the same numbers under the same names (`scalars`) and the samples. A tracker that fails, for lack of
# space or network or by its own fault, is reported once, closed, and opened again later; training continues, and
# `metrics.jsonl` has what it missed. Nothing leaves the machine unless `online` is set: otherwise Weights & Biases
# writes into the run folder (`wandb sync` uploads it later). Trackio writes into its own store on this machine, unless
# its environment names a server.
#
# Only TensorBoard is installed with MegaTrain; the others are imported on request, with a clear error if missing.


OPTIONAL = ("wandb", "trackio")
"""Trackers in separate packages, named after the package."""
IDENTITY = "tracked-as"
"""File in the run folder with the trackers' id of the run."""
PAUSE_SECONDS = 60.0
"""Seconds until a failed tracker is opened again."""


@dataclass(frozen=True, slots=True)
class Tracked:
    folder: Path
    """The run folder."""
    project: str
    """The project; the run is named after its folder."""
    online: bool
    """Whether trackers may send data over the network."""
    config: dict[str, Any]
    identity: str
    """See `identity_of`."""
    step: int | None
    """The run resumes after this step; `None` if it is new."""


class Tracker(Protocol):
    """An open tracker. `Lenient` catches whatever it raises."""

    def tell(self, event: Event) -> None: ...

    def close(self) -> None: ...


def refuse_missing(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a tracker that is not installed, before the run starts."""
    for name in names:
        if name in OPTIONAL:
            try:
                importlib.import_module(name)
            except ImportError as error:
                fix = f"pip install {name}, or leave it out"
                raise ConfigError(
                    f"{name} cannot be imported ({first_line(error)})", where="output.trackers", fix=fix
                ) from error


def open_tracker(name: str, run: Tracked, say: Callable[[str], None]) -> Lenient:
    """A watcher for the length of a `with` block."""
    if name == "tensorboard":
        return Lenient(name, lambda was_open: TensorBoard(run, was_open), say)
    return Lenient(name, lambda was_open: Logger(name, run), say)


class Lenient:
    """A watcher around a tracker whose failures do not end the run.

    make: opens it; its argument says whether it was open before. say: called with a message at the first failure.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[bool], Tracker],
        say: Callable[[str], None],
        pause_seconds: float = PAUSE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._make, self._say, self._pause_seconds, self._clock = make, say, pause_seconds, clock
        self._tracker: Tracker | None = None
        self._opened = self._told = False
        self._paused_until = -float("inf")

    def __call__(self, event: Event) -> None:
        if self._clock() < self._paused_until:
            return
        try:
            if self._tracker is None:
                self._tracker = self._make(self._opened)
                self._opened = True
            self._tracker.tell(event)
        except Exception as error:
            self._let_go(error)

    def __enter__(self) -> Lenient:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tracker is not None:
            try:
                self._tracker.close()
            except Exception as error:
                self._let_go(error)

    def _let_go(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            self._say(f"{self.name} fails; training continues without it for a while: {first_line(error)}")
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with contextlib.suppress(Exception):
                tracker.close()
        self._paused_until = self._clock() + self._pause_seconds


# The trackers ------------------------------------------------------------------------------------------------------


class TensorBoard:
    """Writes events to `tensorboard/` in the run folder; hides those after `run.step` from an earlier process."""

    def __init__(self, run: Tracked, was_open: bool = False) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

        purged = None if run.step is None or was_open else run.step + 1
        self._writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purged)

    def tell(self, event: Event) -> None:
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event.step)
        match event:
            case Sampled():
                self._writer.add_text("sample", f"    {event.prompt}{event.text}".replace("\n", "\n    "), event.step)
            case Skipped() | Ended():
                self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Logger:
    """A run of Weights & Biases, in `wandb/` of the run folder, or of Trackio, in its store on this machine (`trackio
    show`). Trackio has the functions of Weights & Biases; what differs are their options."""

    def __init__(self, name: str, run: Tracked) -> None:
        library: Any = importlib.import_module(name)
        if name == "wandb":
            options: dict[str, Any] = {"name": run.folder.name, "id": run.identity, "dir": str(run.folder)}
            options |= {"mode": "online" if run.online else "offline", "settings": library.Settings(console="off")}
        else:
            options = {"name": f"{run.folder.name}-{run.identity}", "auto_log_gpu": False, "auto_log_cpu": False}
            options["embed"] = False
        self._run: Any = library.init(project=run.project, config=run.config, resume="allow", **options)
        self._counts_steps = name == "wandb"
        if self._counts_steps:  # by a counter of its own, which would refuse repeated steps
            self._run.define_metric("*", step_metric="step")

    def tell(self, event: Event) -> None:
        values: dict[str, Any] = dict(scalars(event))
        if isinstance(event, Sampled):
            values["sample"] = f"{event.prompt}{event.text}"
        if values and self._counts_steps:
            self._run.log({**values, "step": event.step})
        elif values:
            self._run.log(values, step=event.step)

    def close(self) -> None:
        self._run.finish()


def identity_of(folder: Path, goes_on: bool) -> str:
    """The trackers' id of the run, kept in the run folder, so that a resumed run continues its curves."""
    path = folder / IDENTITY
    with contextlib.suppress(OSError):
        if goes_on and path.exists() and (kept := read_text(path, "ascii", "replace").strip()):
            return kept
    made = uuid.uuid4().hex[:12]
    with contextlib.suppress(OSError):  # a resumed run then gets new curves
        path.write_text(made + "\n")
    return made
