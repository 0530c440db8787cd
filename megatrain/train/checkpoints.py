"""A run's checkpoints: started between steps, written during training, reported when complete.

Failures here are reported and never stop training: if the disk is full, existing checkpoints stay, and the next
save is tried when due. `megatrain.run.resume` decides which checkpoint a run resumes from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.checkpoint.folder import Retention, newest_sound, open_checkpoint, prune
from megatrain.checkpoint.load import Checkpoint
from megatrain.checkpoint.manifest import quick_check
from megatrain.checkpoint.save import step_folder
from megatrain.dist import World
from megatrain.errors import CheckpointError, MegaTrainError, NonFinite
from megatrain.formatting import amount
from megatrain.train.async_save import Save
from megatrain.train.engine import Engine
from megatrain.train.events import Evaluated, Event, Resumed, RolledBack, Saved, Warned
from megatrain.train.loop import Feed

MARGIN = 1.5
"""Safety factor on the duration of the last save when there is a deadline."""
REST_SECONDS = 1.0
"""Seconds to finish running ops and pending updates before a save can begin."""
ASSUMED_BANDWIDTH = 0.5e9
"""Disk bandwidth in bytes per second, assumed until a save has measured it."""


@dataclass
class LowestLoss:
    """The lowest validation loss, and whether patience has run out. It is saved in checkpoints, so a run that resumes
    or rolls back counts as if it had never stopped.

    patience: evaluations in a row without improvement that end the run; `None` never ends it. threshold: minimum
    decrease of the loss that counts as improvement. of: what is measured, and with which loss.
    """

    patience: int | None = None
    threshold: float = 0.0
    of: str = ""
    since: int = -1
    """Losses up to this step measure something other than `of`."""
    loss: float = math.inf
    step: int = -1
    """Step of the lowest loss; -1 if nothing was measured."""
    waited: int = 0
    """Evaluations since the last improvement."""

    def add(self, step: int, loss: float) -> None:
        """Add the loss after `step` steps; NaN is no improvement."""
        self.waited = 0 if loss < self.loss - self.threshold else self.waited + 1
        if loss < self.loss:
            self.step, self.loss = step, loss

    @property
    def is_over(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    @property
    def why(self) -> str:
        by = f" by more than {self.threshold:g}" if self.threshold else ""
        times = "1 measurement" if self.waited == 1 else f"{self.waited} measurements"
        lowest = f"; the lowest was {self.loss:.4g}, after step {self.step:,}" if self.step >= 0 else ""
        return f"the validation loss has not fallen{by} in {times}{lowest}"

    def state(self) -> dict[str, Any]:
        loss = self.loss if self.step >= 0 else None
        return {"of": self.of, "since": self.since, "loss": loss, "step": self.step, "waited": self.waited}

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Continue from `state`, saved after `step` steps; start anew if it measures something else, or is None."""
        found = state if state is not None and state.get("of") == self.of else {"since": step}
        self.since, self.step, self.waited = found["since"], found.get("step", -1), found.get("waited", 0)
        loss = found.get("loss")
        self.loss = math.inf if loss is None else loss


@dataclass
class Checkpoints:
    """The saves of one run in one folder. Also a watcher of validation losses, to keep the best checkpoints."""

    engine: Engine
    folder: Path
    retention: Retention
    feed: Feed
    facts: Mapping[str, Any]
    """Further facts about the run for each checkpoint, such as its configuration."""
    write_more: Callable[[Path], object] | None = None
    step: int = -1
    """Step of the last complete checkpoint."""
    newest: str = ""
    """Its folder."""
    _save: Save | None = None
    """A save that has not been reported."""
    _tried: int = -1
    """Step of the last save that was tried."""
    lowest: LowestLoss = field(default_factory=LowestLoss)
    """The lowest validation loss reported to it."""
    _score: tuple[int, float] | None = None
    """Step and loss of the last evaluation."""
    _seconds: float = 0.0
    _untold: list[Event] = field(default_factory=list)
    _has_told_copies: bool = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Evaluated):
            self._score = event.step, event.loss
            self.lowest.add(event.step, event.loss)
        elif isinstance(event, RolledBack):
            self._score = None
        elif isinstance(event, Resumed) and Path(event.checkpoint) == step_folder(self.folder, event.step).resolve():
            self.step, self.newest = event.step, event.checkpoint

    def is_best(self, step: int) -> bool:
        """Whether the state after `step` steps has the lowest validation loss so far, and the best are kept."""
        return bool(self.retention.keep_best) and self.lowest.step == step

    def save(self, step: int) -> Event | None:
        """Start saving the state after `step` steps; the outcome is reported later.

        While a save is in progress no other is started, except one that is always kept, or the best: training then
        waits.
        """
        is_kept = self.retention.is_regular(step) or self.is_best(step)
        if self._save is not None and not self._save.is_over and is_kept:
            self.engine.saver.wait()
        is_over = self._save is None or self._save.is_over
        if not all(self.engine.world.exchange("whether a save is over", is_over)):
            seconds = "still being written"
            return Warned(step, f"not saved at step {step:,}: the checkpoint of step {self._tried:,} is {seconds}")
        told = self.collect(step)
        return self._begun(step) or told

    def collect(self, step: int) -> Event | None:
        """The outcome of the last save, once."""
        if self._save is None or not self._save.is_over:
            return self._untold.pop(0) if self._untold else None
        save, self._save = self._save, None
        try:
            path = save.wait()
        except MegaTrainError as error:
            return Warned(step, f"the checkpoint of step {save.step:,} was not written: {error}")
        self.step, self.newest, self._seconds = save.step, str(path), save.seconds
        nbytes, why = save.copied
        if nbytes and not self._has_told_copies:
            self._has_told_copies = True
            what = f"{amount(nbytes)} that did not change are written again with every checkpoint, because its folder "
            self._untold.append(Warned(step, f"{what}takes no hard links to the previous one ({why})"))
        return Saved(save.step, save.seconds, save.nbytes, self.newest, save.shared_nbytes, save.streamed)

    def settle(self) -> list[Event]:
        """When a run fails, wait for a save in progress, whose state is still good."""
        self.engine.saver.wait()
        told = self.collect(self.step if self._save is None else self._save.step)
        return [] if told is None else [told]

    def finish(self, step: int, timeout: float | None = None) -> list[Event]:
        """Save the state after `step` steps, unless already tried, and wait, at most `timeout` seconds in total."""
        ends = None if timeout is None else time.monotonic() + timeout
        events: list[Event | None] = []
        if self._save is not None and not self._is_over_by(ends):
            return self._given_up(step)
        events.append(self.collect(step))
        if self.step != step and self._tried != step:
            if (refused := self._begun(step)) is not None:
                events.append(refused)
            else:
                events += [self.collect(step)] if self._is_over_by(ends) else self._given_up(step)
        events += self._untold
        self._untold.clear()
        return [event for event in events if event is not None]

    def refuse_unsaved(self, step: int, model: Path | None = None) -> None:
        """Raise `CheckpointError` if a run has ended after `step` steps without a checkpoint of that state.

        model: where the trained model was nevertheless written.
        """
        if self.step == step:
            return
        written = f"; the model is in {model}" if model else ""
        newest = f"the newest checkpoint is that of step {self.step:,}" if self.newest else "there is no checkpoint"
        onward = f"set resume=auto, which continues after step {self.step:,}" if self.newest else "train again"
        what = f"the state after step {step:,}, the last one, was not saved; {newest}{written}"
        raise CheckpointError(what, where=str(self.folder), fix=f"fix what the warnings report, and {onward}")

    def expected_seconds(self) -> float:
        """Expected seconds from interrupting a step until the next save is complete."""
        return REST_SECONDS + MARGIN * (self._seconds or 12 * self.engine.structure.numel / ASSUMED_BANDWIDTH)

    def roll_back(self, error: NonFinite, step: int) -> int:
        """Go back to the newest sound checkpoint, and skip the data of the step that was not finite.

        Returns the checkpoint's step. Raises `CheckpointError` if there is none.
        """
        offending = self.feed.drawn - 1
        self.engine.saver.wait()
        if (told := self.collect(step)) is not None:
            self._untold.append(told)
        checkpoint = found_by_first(self.engine.world, lambda: newest_sound(self.folder).checkpoint)
        if checkpoint is None:
            raise CheckpointError("has no checkpoint to go back to", where=str(self.folder)) from error
        self.engine.restore(checkpoint)
        facts = checkpoint.training["run"]
        self.feed.leave_out(offending, facts["data"])
        self.step, self.newest = int(facts["step"]), str(checkpoint.folder)
        self.lowest.restore(facts.get("validation"), self.step)
        self._tried = -1  # belongs to the abandoned steps
        return self.step

    def _begun(self, step: int) -> Warned | None:
        """Start a save, or report why not. With several ranks this raises, since the others' saves wait for this
        one's."""
        self._tried = step
        training = {"step": step, "data": self.feed.state(), "validation": self.lowest.state(), **self.facts}
        score = self._score[1] if self._score is not None and self._score[0] == step else None
        told: dict[str, Any] = {"step": step, "score": score, "write_more": self.write_more}
        try:
            self._save = self.engine.save(self.folder, training, then=lambda _: self._prune(), **told)
        except MegaTrainError as error:
            if self.engine.world.size > 1:
                raise
            return Warned(step, f"not saved: {error}")
        return None

    def _prune(self) -> None:
        """On the writing thread, since removing takes time too."""
        try:
            prune(self.folder, self.retention, self.lowest.since)
        except MegaTrainError as error:
            self._untold.append(Warned(max(self.step, 0), str(error)))

    def _is_over_by(self, ends: float | None) -> bool:
        assert self._save is not None
        try:
            self._save.wait(None if ends is None else max(0.0, ends - time.monotonic()))
        except MegaTrainError:
            return self._save.is_over
        return True

    def _given_up(self, step: int) -> list[Event]:
        """Cancel the save in progress, unless it completes meanwhile."""
        self.engine.saver.abandon()
        told: list[Event] = []
        if self._save is not None and self._save.path is not None and (event := self.collect(step)) is not None:
            told.append(event)
            if self.step == step:
                return told
        self._save = None
        newest = f"the newest checkpoint is that of step {self.step:,}" if self.step >= 0 else "there is no checkpoint"
        return [*told, Warned(step, f"the deadline has come before step {step:,} was saved; {newest}")]


def found_by_first(world: World, find: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """The checkpoint that rank 0 finds, on all ranks, since each rank may see a folder differently.

    Rank 0 checks every byte, the others that all files exist. An error on one rank is raised on all.
    """
    known: list[Checkpoint | None] = []

    def look() -> str | None:
        known.append(find() if world.rank == 0 else None)
        return None if known[0] is None else str(known[0].folder)

    folder = world.agree("the checkpoint to go on from", look)[0]
    return known[0] if world.rank == 0 or folder is None else open_checkpoint(Path(folder), quick_check)
