"""What a run writes of itself into its folder while it trains, and what a person sees of it.

Files of an earlier run in the same folder are replaced, or gone on with where the run goes on. Only what cannot be
opened ends a run; what fails later is told. It leaves out `status.json`, which needs the engine (`run`), and what each
of the watchers does.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from megatrain.checkpoint import Checkpoint
from megatrain.config import Config, save_config
from megatrain.errors import MegaTrainError
from megatrain.run import resume
from megatrain.run.history import CONFIG, METRICS
from megatrain.run.report import write_report
from megatrain.train.events import Watcher
from megatrain.train.metrics import OPTIONAL, JsonLines, Tracked, identity_of, open_tracker
from megatrain.train.progress import Progress, warn


def open_watchers(config: Config, taken: Checkpoint | None, stack: ExitStack, console: Console) -> list[Watcher]:
    """Everything that reports, opened for as long as `stack`. The run folder is there, and claimed."""
    folder, say = config.folder, partial(warn, console)
    goes_on = taken is not None and resume.is_own(config, taken)
    step = resume.facts_of(taken)["step"] if taken is not None and goes_on else None
    resume.remove_others(config, taken if goes_on else None)
    stack.callback(_report, folder, say)  # once all others have closed, however the run ends
    once = config.output.model_copy(update={"overwrite": False})  # a consent, and no part of what the run is
    save_config(config.model_copy(update={"output": once}), folder / CONFIG)
    watchers: list[Watcher] = [stack.enter_context(JsonLines(folder / METRICS, step, say))]
    if not goes_on:
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    output = config.output
    identity = identity_of(folder, goes_on) if set(output.trackers) & set(OPTIONAL) else ""
    tracked = Tracked(folder, output.project, output.trackers_online, config.model_dump(mode="json"), identity, step)
    watchers += [stack.enter_context(open_tracker(name, tracked, say)) for name in output.trackers]
    return [*watchers, stack.enter_context(Progress(console, config.train.log_every))]


def _report(folder: Path, say: Callable[[str], None]) -> None:
    try:
        write_report(folder)
    except MegaTrainError as error:
        say(f"no report: {error}")
