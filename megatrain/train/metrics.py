"""Metrics as JSON lines, and in the programs that people watch them in: TensorBoard, Weights & Biases, Trackio."""

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
# Metrics as a file of JSON lines, and as the named numbers that curves are drawn of.
#
# The file holds one strict JSON object per event, written as it happens, so it can be followed while the run goes on
# and what a crash leaves is whole lines. A number that is not finite becomes null, because JSON has none. A disk that
# refuses is told once and ends no run: lines wait in memory until there is room again, and nothing half-written stays
# in between. Left out: TensorBoard and others that draw curves (`trackers`).


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
    if isinstance(event, Evaluated | Scored):
        part = "by_source" if isinstance(event, Evaluated) else "scores"
        values[part] = {name: _finite(value) for name, value in values[part].items()}
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
            found |= {f"loss/validation/{name}": loss for name, loss in event.by_source.items()}
            return found | {f"{name}/validation": value for name, value in event.metrics.items()}
        case Scored():
            return {f"eval/{name}": value for name, value in event.scores.items()}
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


# Curves in other programs ---------------------------------------------------------------------------------------------
#
# Curves of a run in the programs that people watch them in: TensorBoard, Weights & Biases, Trackio.
#
# Each is told the same numbers under the same names (`metrics.scalars`), and the samples. A tracker that fails, for
# lack of space, of a network or of a defect of its own, is told of once, let go of, and opened again a while later;
# training goes on and `metrics.jsonl` has what it missed. Nothing leaves the machine unless `online` is asked for:
# otherwise Weights & Biases writes into the run folder (`wandb sync` sends it later). Trackio writes into its own store
# on this machine; where its environment names a server, that is its user's wish.
#
# Only TensorBoard comes with MegaTrain; the others are imported where they are named, and refused in a line where they
# are not installed. Left out: what is told (`events`), and the file that has all of it (`metrics`).


OPTIONAL = ("wandb", "trackio")
"""Trackers that are packages of their own, each called as its package is."""
IDENTITY = "tracked-as"
"""File in the run folder, where a tracker needs it."""
PAUSE_SECONDS = 60.0
"""After which a tracker that has failed is opened again."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """What trackers are told of a run before it begins."""

    folder: Path
    """The run folder."""
    project: str
    """Under which runs are gathered; the run is called as its folder."""
    online: bool
    """Whether a tracker may send what it is told."""
    config: dict[str, Any]
    identity: str
    """See `identity_of`."""
    step: int | None
    """The run goes on behind this step of an earlier process; `None` if it begins."""


class Tracker(Protocol):
    """An open tracker. Whatever it raises is caught (`Lenient`)."""

    def tell(self, event: Event) -> None: ...

    def close(self) -> None: ...


def refuse_missing(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a tracker that is not installed, before a run takes any time."""
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
    made: dict[str, Callable[[bool], Tracker]] = {
        "tensorboard": lambda again: TensorBoard(run, again),
        "wandb": lambda again: WandB(run),
        "trackio": lambda again: Trackio(run),
    }
    return Lenient(name, made[name], say)


class Lenient:
    """A watcher around a tracker, whose failures end nothing.

    make: opens it; told whether it had been open before. say: told a line at the first failure.
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
        self._again = -float("inf")

    def __call__(self, event: Event) -> None:
        if self._clock() < self._again:
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
            self._say(f"{self.name} fails, and training goes on without it for a while: {first_line(error)}")
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with contextlib.suppress(Exception):
                tracker.close()
        self._again = self._clock() + self._pause_seconds


# The trackers ------------------------------------------------------------------------------------------------------


class TensorBoard:
    """Events in `tensorboard/` of the run folder; what was told of steps after `run.step` is not shown."""

    def __init__(self, run: Tracked, again: bool = False) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import, and not every run wants it

        purged = None if run.step is None or again else run.step + 1
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


class WandB:
    """A run of Weights & Biases, below `wandb/` of the run folder."""

    def __init__(self, run: Tracked) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=run.project,
            name=run.folder.name,
            id=run.identity,
            resume="allow",
            dir=str(run.folder),
            config=run.config,
            mode="online" if run.online else "offline",
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("*", step_metric="step")  # its own count would refuse steps that come again

    def tell(self, event: Event) -> None:
        if values := _values(event):
            self._run.log({**values, "step": event.step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of Trackio, in its own store on this machine (`trackio show`)."""

    def __init__(self, run: Tracked) -> None:
        trackio: Any = importlib.import_module("trackio")
        more: dict[str, Any] = {"auto_log_gpu": False, "auto_log_cpu": False, "embed": False}
        self._run: Any = trackio.init(
            project=run.project,
            name=f"{run.folder.name}-{run.identity}",
            config=run.config,
            resume="allow",
            **more,
        )

    def tell(self, event: Event) -> None:
        if values := _values(event):
            self._run.log(values, step=event.step)

    def close(self) -> None:
        self._run.finish()


def _values(event: Event) -> dict[str, Any]:
    """The numbers of an event, and the text of a sample."""
    text = {"sample": f"{event.prompt}{event.text}"} if isinstance(event, Sampled) else {}
    return {**scalars(event), **text}


def identity_of(folder: Path, goes_on: bool) -> str:
    """What trackers know the run by: kept in the run folder, so that a run that goes on is drawn on."""
    path = folder / IDENTITY
    with contextlib.suppress(OSError):
        if goes_on and path.exists() and (kept := read_text(path, "ascii", "replace").strip()):
            return kept
    made = uuid.uuid4().hex[:12]
    with contextlib.suppress(OSError):  # the run is then drawn anew when it goes on
        path.write_text(made + "\n")
    return made
