"""Find an earlier run in this run's folders, and refuse to overwrite it unless asked.

Needs no torch, so the command line can check before loading anything; the run checks again once it knows the checkpoint
that it resumes from (`resume`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.checkpoint.listing import checkpoints, step_of
from megatrain.config import Config
from megatrain.errors import ConfigError, ExportError
from megatrain.system.atomic import vanish
from megatrain.system.locks import Claim
from megatrain.system.paths import usable_path

if TYPE_CHECKING:
    from megatrain.checkpoint.load import Checkpoint

Say = Callable[[str], None]
"""Shows the user a line."""

AUTO = "auto"
MODEL = "model"
"""Subfolder with the model of a finished run."""
METRICS, CONFIG, TRACE = "metrics.jsonl", "config.yaml", "trace.json"
"""Files in the run folder; the trace is of one early step."""
MOST_NAMED = 4
"""Most checkpoints that are listed one by one."""


def refuse_early(config: Config) -> None:
    """Raise what `check_overwriting` would, and `ConfigError` if another run is using the folders.

    Not for a run that resumes from a checkpoint: that must be read first, so the run itself checks.
    """
    with Claim() as claim:
        claim.take(config.folder)
        claim.take(config.checkpoints)
        if config.resume not in (None, AUTO):
            named_checkpoint(config)
        elif config.resume is None or not checkpoints(config.checkpoints):
            check_overwriting(config, None, lambda line: None)


def named_checkpoint(config: Config) -> Path:
    """The path in `resume`. Raises `ConfigError` if it does not exist."""
    assert config.resume is not None
    path = usable_path(config.resume, where="resume")
    if not path.exists():
        raise ConfigError("there is no such checkpoint", where=f"resume={path}", fix="name a folder step-... or a run")
    return path


def check_overwriting(config: Config, resumed: Checkpoint | None, say: Say) -> None:
    """Tell the user what will be deleted from the run and checkpoint folders, for a run that resumes from `resumed`.

    Raises `ConfigError` if that is more than metrics and `output.overwrite` is not set.
    """
    goes = _what_goes(config, resumed)
    if goes.names and not config.output.overwrite:
        fix = f"{goes.fix}, or output.overwrite=true to replace it"
        raise ConfigError(f"{goes.kind}: {' and '.join(goes.names)}", where=str(goes.where), fix=fix)
    if goes.names:
        metrics = " and its metrics" if goes.has_metrics else ""
        say(f"output.overwrite=true: replacing {' and '.join(goes.names)} in {goes.where}{metrics}")
    elif goes.has_metrics:
        say(f"replacing the metrics of an earlier run in {config.folder}")


def holds_model(folder: Path, *, overwrite: bool) -> bool:
    """Whether there is a model in the folder that an export is written to. Raises `ExportError` if it must stay."""
    if not (folder / "config.json").exists():
        return False
    if not overwrite:
        raise ExportError("already holds a model", where=str(folder), fix="use another folder, or --overwrite")
    return True


def has_model(config: Config) -> bool:
    return (config.folder / MODEL).exists()


@dataclass(frozen=True, slots=True)
class _Goes:
    names: tuple[str, ...] = ()
    """Its model and checkpoints, in words; empty if there are none."""
    kind: str = ""
    where: Path = Path()
    fix: str = ""
    """Alternatives to overwriting, for the error."""
    has_metrics: bool = False


def _what_goes(config: Config, resumed: Checkpoint | None) -> _Goes:
    steps = [step_of(path) for path in reversed(checkpoints(config.checkpoints))]
    if resumed is not None and is_own(config, resumed):  # resumes this run, so replacing its model is expected
        later = [step for step in steps if step > resumed.step and _names(config, resumed)]
        what = f"holds checkpoints after step {resumed.step:,}, from which this run would branch off"
        return _Goes(_steps(later), what, config.checkpoints, "set resume=auto to resume from the newest valid one")
    has_metrics = (config.folder / METRICS).exists()
    if not has_model(config):
        fix = "set resume=auto to continue it, output.folder=NEW"
        return _Goes(_steps(steps), "holds an earlier run", config.checkpoints, fix, has_metrics)
    names = ("the model", *_steps(steps))
    length = "train.epochs" if config.train.steps is None else "train.steps"
    longer = f", resume=auto with more {length} to extend it" if steps else ""
    fix = f"set output.folder=NEW{longer}"
    return _Goes(names, "holds a finished run", config.folder, fix, has_metrics)


def _names(config: Config, resumed: Checkpoint) -> bool:
    """Whether `resume` names this checkpoint; otherwise it is the newest valid one, and newer ones were reported."""
    return config.resume is not None and usable_path(config.resume, where="resume").resolve() == resumed.folder


def _steps(steps: Sequence[int]) -> tuple[str, ...]:
    if not steps:
        return ()
    if len(steps) > MOST_NAMED:
        return (f"{len(steps):,} checkpoints, of steps {steps[0]:,} to {steps[-1]:,}",)
    named = ", ".join(f"{step:,}" for step in steps)
    return (f"the checkpoint of step {named}" if len(steps) == 1 else f"the checkpoints of steps {named}",)


def is_own(config: Config, resumed: Checkpoint) -> bool:
    """Whether a checkpoint belongs to this run; it may be a link in its folder to somewhere else."""
    return any(path.resolve() == resumed.folder for path in checkpoints(config.checkpoints))


def remove_others(config: Config, resumed: Checkpoint | None) -> None:
    """Delete checkpoints that are not part of this run: all, or those after the one that it resumes from."""
    for path in checkpoints(config.checkpoints):
        if resumed is None or step_of(path) > resumed.step:
            vanish(path)
