"""Curves of a run in the programs that people watch them in: TensorBoard, Weights & Biases, Trackio.

Each is told the same numbers under the same names (`metrics.scalars`), and the samples. A tracker that fails, for lack
of space, of a network or of a defect of its own, is told of once, let go of, and opened again a while later; training
goes on and `metrics.jsonl` has what it missed. Nothing leaves the machine unless `online` is asked for: otherwise
Weights & Biases writes into the run folder (`wandb sync` sends it later). Trackio writes into its own store on this
machine; where its environment names a server, that is its user's wish.

Only TensorBoard comes with MegaTrain; the others are imported where they are named, and refused in a line where they
are not installed. Left out: what is told (`events`), and the file that has all of it (`metrics`).
"""

from __future__ import annotations

import contextlib
import importlib
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatrain.errors import ConfigError, first_line
from megatrain.files import read_text
from megatrain.train.events import Ended, Event, Sampled, Skipped
from megatrain.train.metrics import scalars

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
