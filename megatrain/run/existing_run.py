"""Looks for an earlier run where this one is to write, says what would be overwritten, and refuses it unless asked.

It needs no torch, so that the command line asks here before anything is loaded; a run asks again, with the checkpoint
that it goes on from. Left out: which checkpoint that is (`resume`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.checkpoint.listing import checkpoints, step_of
from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.run.history import METRICS, status_of
from megatrain.system.atomic import vanish
from megatrain.system.locks import Claim
from megatrain.system.paths import usable_path

if TYPE_CHECKING:
    from megatrain.checkpoint import Checkpoint

Say = Callable[[str], None]
"""Tells the person a line."""

AUTO = "auto"
MODEL = "model"
"""What a finished run leaves in its folder."""
MOST_NAMED = 4
"""Checkpoints that are named one by one."""


def refuse_early(config: Config) -> None:
    """Raise what `check_overwriting` would for this run, and `ConfigError` where another is at work in its folders.

    Where the run goes on from a checkpoint, nobody knows before that has been read, and the run itself asks.
    """
    with Claim() as claim:
        claim.take(config.folder)
        claim.take(config.checkpoints)
        if config.resume not in (None, AUTO):
            named_checkpoint(config)
        elif config.resume is None or not checkpoints(config.checkpoints):
            check_overwriting(config, None, lambda line: None)


def named_checkpoint(config: Config) -> Path:
    """The path that `resume` names. Raises `ConfigError` where there is nothing."""
    assert config.resume is not None
    path = usable_path(config.resume, where="resume")
    if not path.exists():
        raise ConfigError("there is no such checkpoint", where=f"resume={path}", fix="name a folder step-... or a run")
    return path


def check_overwriting(config: Config, taken: Checkpoint | None, say: Say) -> None:
    """Say what has to go from the run folder and the folder of checkpoints, for a run that goes on from `taken`.

    Raises `ConfigError` where more than metrics would go and `output.overwrite` does not allow it.
    """
    goes = _what_goes(config, taken)
    if goes.names and not config.output.overwrite:
        fix = f"{goes.fix}, or output.overwrite=true, which replaces all of this"
        raise ConfigError(f"{goes.kind}: {' and '.join(goes.names)}", where=str(goes.where), fix=fix)
    if goes.names:
        metrics = " and its metrics" if goes.has_metrics else ""
        say(f"output.overwrite=true: replaces {' and '.join(goes.names)} in {goes.where}{metrics}")
    elif goes.has_metrics:
        say(f"replaces the metrics of an earlier run in {config.folder}")


def has_model(config: Config) -> bool:
    return (config.folder / MODEL).exists()


@dataclass(frozen=True, slots=True)
class _Goes:
    """What of an earlier run cannot stay where this one is to write."""

    names: tuple[str, ...] = ()
    """Whatever took an effort: its model, its checkpoints. Empty where there is nothing."""
    kind: str = ""
    where: Path = Path()
    fix: str = ""
    """What else can be done."""
    has_metrics: bool = False


def _what_goes(config: Config, taken: Checkpoint | None) -> _Goes:
    there = [step_of(path) for path in reversed(checkpoints(config.checkpoints))]
    if taken is not None and is_own(config, taken):  # it goes on; its model is replaced by what becomes of it
        later = [step for step in there if step > taken.step and _names(config, taken)]
        what = f"holds checkpoints after step {taken.step:,}, which would be of another past"
        return _Goes(_steps(later), what, config.checkpoints, "set resume=auto to go on from the newest sound one")
    has_metrics = (config.folder / METRICS).exists()
    if not has_model(config):
        fix = "set resume=auto to go on, output.folder=NEW"
        return _Goes(_steps(there), "holds an earlier run", config.checkpoints, fix, has_metrics)
    status = status_of(config.folder)
    done = f" of {status['step']:,} steps" if isinstance(status.get("step"), int) else ""
    names = (f"the model{done}", *_steps(there))
    length = "train.epochs" if config.train.steps is None else "train.steps"
    longer = f", resume=auto with more {length} to extend it" if there else ""
    fix = f"set output.folder=NEW{longer}"
    return _Goes(names, "holds a finished run", config.folder, fix, has_metrics)


def _names(config: Config, taken: Checkpoint) -> bool:
    """Whether `resume` is this very checkpoint; else it is the newest sound one, and what is newer has been told of."""
    return config.resume is not None and usable_path(config.resume, where="resume").resolve() == taken.folder


def _steps(there: Sequence[int]) -> tuple[str, ...]:
    """Checkpoints of these steps in words, if there are any."""
    if not there:
        return ()
    if len(there) > MOST_NAMED:
        return (f"{len(there):,} checkpoints, of steps {there[0]:,} to {there[-1]:,}",)
    steps = ", ".join(f"{step:,}" for step in there)
    return (f"the checkpoint of step {steps}" if len(there) == 1 else f"the checkpoints of steps {steps}",)


def is_own(config: Config, taken: Checkpoint) -> bool:
    """Whether a checkpoint is of this very run. It may lie elsewhere, behind a link among the others."""
    return any(path.resolve() == taken.folder for path in checkpoints(config.checkpoints))


def remove_others(config: Config, taken: Checkpoint | None) -> None:
    """Remove checkpoints that will be no part of this run: all, or those after the one that it goes on from."""
    for path in checkpoints(config.checkpoints):
        if taken is None or step_of(path) > taken.step:
            vanish(path)
