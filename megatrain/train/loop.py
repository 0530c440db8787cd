"""The training loop.

`train` is given everything it uses and reports by events, so that it fits on one screen and tests can pass a fake
engine and a fake clock. A step's tokens are counted over its whole wall time, including the wait for data.
A step that is not finite was not applied by the engine: it is skipped, or the run goes back to its last checkpoint;
several in a row end it. Saving is a task like any other (`checkpoints`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from megatrain.data.loader import Loader
from megatrain.dist import World
from megatrain.errors import NonFinite
from megatrain.train.engine import Engine
from megatrain.train.events import Ended, Event, RolledBack, Skipped, StepOutput, Stepped, Watcher, tell_all
from megatrain.train.stop import OutOfTime

MicroBatches = Sequence[Mapping[str, Any]]
Clock = Callable[[], float]
"""Seconds since any fixed origin."""


@dataclass(frozen=True, slots=True)
class RunSteps:
    steps: int
    """Number of the last step."""
    lr: Callable[[int], float]
    """Step, counted from 0 -> learning rate."""
    start: int = 0
    """Steps done before, by the run that this one resumes."""
    epochs: Callable[[], tuple[float | None, float | None]] = lambda: (None, None)
    """Passes over the data so far, and of the whole run."""


@dataclass(frozen=True, slots=True)
class Task:
    """Something to do between steps: after every `every` steps (0: never) and the last."""

    every: int
    run: Callable[[int], Event | None]
    """Number of steps done -> events to report, if any."""

    def is_due(self, step: int, steps: int) -> bool:
        return step == steps or (self.every > 0 and step % self.every == 0)


@dataclass(frozen=True, slots=True)
class BetweenSteps:
    """What happens between two steps: tasks, a stop, and how the run goes on after a step that is not finite."""

    tasks: Sequence[Task] = ()
    should_stop: Callable[[], bool] = lambda: False
    """Whether the run ends now; then no more tasks run."""
    undo: Callable[[], None] = lambda: None
    """Puts back the data of a step that ran `OutOfTime`."""
    keep: Callable[[int], None] = lambda _: None
    """Given the number of steps done, saves their state when a task fails, such as a measurement: no step has."""
    nonfinite_limit: int = 3
    """As many failed steps in a row end the run."""
    recover: Callable[[NonFinite, int], int] | None = None
    """Given a failed step's error and number, rolls the run back and returns the step it went back to. Without it the
    step is skipped, and its data are used up."""


def train(
    engine: Engine,
    batches: Iterable[MicroBatches],
    course: RunSteps,
    loss_fn: Any = None,
    watchers: Sequence[Watcher] = (),
    between: BetweenSteps = BetweenSteps(),
    clock: Clock = time.perf_counter,
) -> Ended:
    """Train all steps of the course, or until `between.should_stop` returns true, and tell the watchers.

    loss_fn: as of `Engine.step`. Raises `NonFinite` after `between.nonfinite_limit` failed steps in a row, and at once
    if weights are not finite and there are no others to go back to.
    """
    tell, feed, steps, diagnostics = partial(tell_all, watchers), iter(batches), course.steps, engine.diagnostics
    peak_flops = diagnostics.peak_flops()
    done, in_a_row, failed, restored = course.start, 0, 0, course.start
    recover, should_stop = between.recover, between.should_stop
    began = ready = clock()
    while done < steps:
        try:
            micro_batches = next(feed)
            loaded, rate, waited = clock(), course.lr(done), engine.world.waited_seconds
            out = engine.step(micro_batches, rate, loss_fn)
        except StopIteration:
            break
        except OutOfTime:
            between.undo()
            break
        except NonFinite as error:
            done, in_a_row, failed, now = done + 1, in_a_row + 1, done + 1, clock()
            lost = bool(error.parameters) and (recover is None or done - 1 == restored)  # so would all other steps
            ends = lost or in_a_row >= between.nonfinite_limit
            tell(Skipped(done, steps, str(error), in_a_row, now - ready, now - began, ends))
            if ends:
                raise _hopeless(done, in_a_row, error) from error
            if recover is not None:
                restored = recover(error, done)
                tell(RolledBack(done, restored, str(error)))
                done, ready = restored, clock()
                if should_stop():
                    break
                continue
        else:
            done, now = done + 1, clock()
            in_a_row = in_a_row if done < failed else 0  # failing again after a rollback is the same failure
            flops = diagnostics.step_flops(micro_batches)
            peak_flops = max(peak_flops, flops / (now - ready))  # if the measurement was disturbed: this was reached
            waited = engine.world.waited_seconds - waited
            measured = _Measured(now - ready, loaded - ready, now - began, waited, flops, peak_flops)
            tell(_stepped(engine, course, out, done, rate, measured))
        try:
            for task in between.tasks if not should_stop() else ():
                tell(task.run(done) if task.is_due(done, steps) else None)
        except OutOfTime:
            break
        except Exception:
            between.keep(done)
            raise
        if should_stop():
            break
        ready = clock()
    ended = Ended(done, steps, clock() - began)
    tell(ended)
    return ended


class _Measured(NamedTuple):
    """Seconds of a step, of its wait for data, since the start, and of the step's waits for other ranks; its FLOPs, and
    the most that the devices do in a second."""

    seconds: float
    data_seconds: float
    elapsed_seconds: float
    waited_seconds: float
    flops: float
    peak_flops: float


def _stepped(engine: Engine, course: RunSteps, out: StepOutput, step: int, rate: float, measured: _Measured) -> Stepped:
    epoch, epochs = course.epochs()
    event = Stepped(
        step=step,
        steps=course.steps,
        loss=out.loss,
        grad_norm=out.grad_norm,
        lr=rate,
        tokens=out.tokens,
        seconds=measured.seconds,
        data_seconds=measured.data_seconds,
        stall_seconds=out.stall_seconds,
        flops=measured.flops,
        peak_flops=measured.peak_flops,
        nbytes=_by_tier(engine),
        elapsed_seconds=measured.elapsed_seconds,
        resumed_at=course.start,
        epoch=epoch,
        epochs=epochs,
        written_nbytes=out.written_nbytes,
        metrics=out.metrics,
    )
    return _of_all(event, measured, engine.world)


def _of_all(event: Stepped, measured: _Measured, world: World) -> Stepped:
    """The event with the slowest of all ranks, by the time it did not wait, and the bytes of the fullest."""
    if world.size == 1:
        return event
    busy = max(0.0, event.seconds - event.stall_seconds - measured.waited_seconds)
    told = world.exchange("a step", (busy, dict(event.nbytes)))
    seconds, held = [seconds for seconds, _ in told], [nbytes for _, nbytes in told]
    nbytes = {tier: max(each.get(tier, 0) for each in held) for tier in dict.fromkeys(chain.from_iterable(held))}
    longest, mean = max(seconds), sum(seconds) / len(seconds)
    return replace(event, nbytes=nbytes, slowest=(seconds.index(longest), longest / mean if mean else 1.0))


def _by_tier(engine: Engine) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for (tier, _), nbytes in engine.diagnostics.memory_table().items():
        totals[tier] += nbytes
    return dict(totals)


def _hopeless(step: int, in_a_row: int, last: NonFinite) -> NonFinite:
    steps = "1 step" if in_a_row == 1 else f"{in_a_row} steps in a row"
    said = f"{last.where}: {last.what}" if last.where else last.what
    fix = last.fix if last.parameters else "lower train.learning_rate or lengthen train.warmup_steps"
    what = f"{steps} not finite, the last one: {said}"
    return NonFinite(what, where=f"step {step:,}", fix=fix, parameters=last.parameters)


# The data feed --------------------------------------------------------------------------------------------------------


class Feed:
    """Steps from a loader, without the draws to skip, and a position that can be saved.

    A draw is one `next` of the loader, counted from the start of the run. After a rollback, draws that gave a
    non-finite step are skipped when they come again, in a resumed run too.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.drawn = 0
        """Draws so far, including skipped ones."""
        self.left_out: set[int] = set()
        """Numbers of the draws to skip, from 0."""
        self._before: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Sequence[Mapping[str, Any]]]:
        return self

    def __next__(self) -> Sequence[Mapping[str, Any]]:
        self._before = self.state()
        while True:
            micro_batches = next(self.loader)
            self.drawn += 1
            if self.drawn - 1 not in self.left_out:
                return micro_batches

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "left_out": sorted(self.left_out), "loader": self.loader.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state`. Raises `DataError`, changing nothing, if the data has changed."""
        self.loader.load_state_dict(state["loader"])
        self.drawn, self.left_out = state["drawn"], set(state["left_out"])

    def put_back(self) -> None:
        """Undo the last draw, which was not used."""
        if self._before:
            self.restore(self._before)

    def leave_out(self, draw: int, back_to: Mapping[str, Any]) -> None:
        """Go back to `back_to`, and skip `draw`, and all draws skipped so far, when they come again."""
        known = self.left_out | {draw}
        self.restore(back_to)
        self.left_out |= known
