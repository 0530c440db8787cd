"""Read the history of a run from its folder, also of a running or killed one.

Reads `metrics.jsonl`, `status.json`, `config.yaml` and the trace of a step, as far as they exist; torn lines and lines
of other versions are skipped. Steps undone by a rollback are kept separately. Numbers are in flat arrays, 100 bytes per
step. `report` displays them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError
from megatrain.plan.analysis import STREAM_WORDS
from megatrain.system.paths import parsed_json, read_json, read_text, refuse_special
from megatrain.train.status import STATUS

METRICS, CONFIG, TRACE = "metrics.jsonl", "config.yaml", "trace.json"
"""Files in the run folder; the trace is of one early step."""
COLUMNS = (
    *("step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "seconds", "data_seconds", "stall_seconds"),
    "mfu",
    "epoch",
)
"""Values kept for each step."""
OLDER_NAMES = {"mfu": "light_share"}
"""Names of columns in metrics of earlier versions."""
LAST = 50
"""Steps whose mean loss is shown as the loss at the end."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened to a run."""

    step: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Validation loss and perplexity after a step; the perplexity is NaN if there is none (`Evaluated`)."""

    step: int
    loss: float
    perplexity: float
    by_source: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity_text(self) -> str:
        """Formatted; empty if there is none."""
        return f"{self.perplexity:,.4g}" if math.isfinite(self.perplexity) else ""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """How long a traced step took, and what compute waited for."""

    seconds: float
    waits: Mapping[str, float]
    """Name of a stream -> seconds."""


@dataclass
class History:
    """A run's metrics, status, configuration and events, as far as its folder has them."""

    folder: Path
    columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})
    tiers: dict[str, array[float]] = field(default_factory=dict)
    """Tier -> bytes held after each step."""
    undone: list[tuple[float, float]] = field(default_factory=list)
    """Step and loss of steps undone by a rollback."""
    evaluated: list[HeldOut] = field(default_factory=list)
    """Step and loss on held-out text."""
    scored: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    """Step and the values of metrics."""
    samples: list[Mapping[str, Any]] = field(default_factory=list)
    saved: list[Mapping[str, Any]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    planned: Mapping[str, Any] = field(default_factory=dict)
    """The plan's predictions when the run was last started."""
    steps: int = 0
    """Planned length of the run."""
    epochs: float = math.nan
    """The same in passes over the data, if known."""
    status: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    trace: TracedStep | None = None

    @property
    def done(self) -> int:
        """The last step that was not undone."""
        return int(self.columns["step"][-1]) if self.columns["step"] else 0

    @property
    def best(self) -> HeldOut | None:
        """The lowest validation loss, the first if there are several."""
        finite = (each for each in self.evaluated if math.isfinite(each.loss))
        return min(finite, key=lambda each: each.loss, default=None)

    def last_losses(self, step: float = math.inf) -> list[float]:
        """The finite losses of the last `LAST` steps up to `step`."""
        both = zip(self.columns["step"], self.columns["loss"], strict=True)
        return [loss for at, loss in both if at <= step and math.isfinite(loss)][-LAST:]

    def total(self, name: str) -> float:
        """The sum of a column without NaNs."""
        return math.fsum(value for value in self.columns[name] if not math.isnan(value))

    def share(self, name: str) -> list[float]:
        """A column of seconds as a share of each step's seconds."""
        both = zip(self.columns[name], self._seconds, strict=True)
        return [part / whole if whole else math.nan for part, whole in both]

    @property
    def _seconds(self) -> array[float]:
        return self.columns["seconds"]

    def add(self, told: Mapping[str, Any]) -> None:
        """Add a line of `metrics.jsonl`. Raises `KeyError`, `TypeError` or `ValueError` for a malformed one."""
        step = int(told["step"])
        match told["event"]:
            case "stepped":
                self._add_step(told)
            case "evaluated":
                loss, perplexity = _number(told["loss"]), _number(told.get("perplexity"))
                self.evaluated.append(HeldOut(step, loss, perplexity, _numbers(told.get("by_source"))))
            case "scored":
                self.scored.append((step, _numbers(told["scores"])))
            case "stoppedearly":
                self.notes.append(Note(step, "stopped early", str(told["why"])))
            case "sampled":
                self.samples.append({"step": step, "prompt": str(told["prompt"]), "text": str(told["text"])})
            case "saved":
                self.saved.append(told)
            case "planned":
                self.planned = told
            case "skipped" if not told.get("ends"):
                self.notes.append(Note(step, "skipped", str(told["reason"])))
            case "warned":
                self.notes.append(Note(step, "warning", str(told["what"])))
            case "replanned":
                times = f"{_number(told['seconds']):.3g} s to {_number(told['new_seconds']):.3g} s a step"
                self.notes.append(Note(step, "replanned", f"{times}: {told['changes']}"))
            case "resumed":
                self.notes.append(Note(step, "resumed", f"from {told['checkpoint']}"))
            case "rolledback":
                back = int(told["to"])
                self._go_back(back)
                self.notes.append(Note(step, "rolled back", f"to step {back:,}: {told['reason']}"))

    def _add_step(self, told: Mapping[str, Any]) -> None:
        count = len(self._seconds)
        for name, column in self.columns.items():
            column.append(_number(told.get(name, told.get(OLDER_NAMES.get(name, "")))))
        for tier, nbytes in dict(told.get("nbytes") or {}).items():
            column = self.tiers.setdefault(str(tier), array("d", [math.nan]) * count)
            column.append(_number(nbytes))
        for column in self.tiers.values():
            if len(column) == count:
                column.append(math.nan)
        self.steps, self.epochs = int(told.get("steps") or 0), _number(told.get("epochs"))

    def _go_back(self, step: int) -> None:
        steps = self.columns["step"]
        kept = len(steps)
        while kept and steps[kept - 1] > step:
            kept -= 1
        self.undone += zip(steps[kept:], self.columns["loss"][kept:], strict=True)
        for column in (*self.columns.values(), *self.tiers.values()):
            del column[kept:]
        self.evaluated = [each for each in self.evaluated if each.step <= step]
        self.scored = [each for each in self.scored if each[0] <= step]


def read_history(folder: Path) -> History:
    """Read the run in a folder. Raises `ConfigError` if there is none or it cannot be read."""
    history = History(folder)
    try:
        refuse_special(folder / METRICS)
        with (folder / METRICS).open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    history.add(parsed_json(line))
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue
    except FileNotFoundError as error:
        fix = "name the folder of a run, its output.folder"
        raise ConfigError(f"holds no {METRICS}", where=str(folder), fix=fix) from error
    except OSError as error:
        raise ConfigError(f"{METRICS} cannot be read ({error.strerror or error})", where=str(folder)) from error
    history.status = status_of(folder)
    history.steps = history.steps or int(_or_zero(history.status.get("steps")))
    try:
        history.config = read_text(folder / CONFIG, errors="replace")
    except OSError:
        history.config = ""
    history.trace = traced_step(_json(folder / TRACE))
    return history


def status_of(folder: Path) -> Mapping[str, Any]:
    """Content of a run's `status.json` (`train.status`); empty if there is none."""
    status = _json(folder / STATUS)
    return status if isinstance(status, dict) else {}


def traced_step(trace: Any) -> TracedStep | None:
    """The last step of a Chrome trace (`train.diagnostics`); `None` if there is none."""
    try:
        ops = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        last = max(event["args"]["step"] for event in ops)
        times = [(event["ts"], event["ts"] + event["dur"]) for event in ops if event["args"]["step"] == last]
        waits = {str(name): float(seconds) for name, seconds in dict(trace.get("waits") or {}).items()}
        seconds = (max(end for _, end in times) - min(start for start, _ in times)) / 1e6
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return TracedStep(seconds, {STREAM_WORDS.get(name, name): spent for name, spent in waits.items()})


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _numbers(told: Any) -> dict[str, float]:
    return {str(name): _number(value) for name, value in told.items()} if isinstance(told, Mapping) else {}


def _or_zero(value: Any) -> float:
    number = _number(value)
    return number if math.isfinite(number) else 0.0


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None
