"""The training loop.

`train` takes everything it uses as plain arguments and reports by events, so that it fits on one screen and tests can
pass a fake engine and a fake clock. A step's tokens are counted over its whole wall time, including the wait for data.
A step that is not finite was not applied by the engine: it is skipped, or the run goes back to its last checkpoint;
several in a row end it. Saving is a task like any other (`checkpoints`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

from megatrain.dist import ALONE, World
from megatrain.errors import NonFinite
from megatrain.spec import Policy
from megatrain.train.events import Ended, Event, RolledBack, Skipped, Stepped, Watcher
from megatrain.train.stop import OutOfTime

MicroBatches = Sequence[Mapping[str, Any]]
Clock = Callable[[], float]
"""Seconds since any fixed origin."""


class StepOutput(Protocol):
    """The results of a step that the loop reads; see `train.engine.StepOutput`."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def stall_seconds(self) -> float: ...
    @property
    def written_nbytes(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


class Trainable(Protocol):
    """What the loop needs from an engine; see `train.engine.Engine`."""

    def step(self, micro_batches: MicroBatches, lr: float | None = None, loss_fn: Any = None) -> StepOutput: ...
    def step_flops(self, micro_batches: MicroBatches) -> float: ...
    def peak_flops(self) -> float: ...
    def memory_table(self) -> Mapping[tuple[str, str], int]: ...
    @property
    def policy(self) -> Policy: ...


@dataclass(frozen=True, slots=True)
class Task:
    """Something to do between steps: after every `every` steps (0: never) and the last; or only after one, `once`."""

    every: int
    run: Callable[[int], Event | None]
    """Number of steps done -> events to report, if any."""
    once: int | None = None

    def is_due(self, step: int, steps: int) -> bool:
        if self.once is not None:
            return step == self.once
        return step == steps or (self.every > 0 and step % self.every == 0)


def train(
    engine: Trainable,
    batches: Iterable[MicroBatches],
    *,
    steps: int,
    lr: Callable[[int], float],
    loss_fn: Any = None,
    start: int = 0,
    watchers: Sequence[Watcher] = (),
    tasks: Sequence[Task] = (),
    nonfinite_limit: int = 3,
    recover: Callable[[NonFinite, int], int] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    undo: Callable[[], None] = lambda: None,
    epochs: Callable[[], tuple[float | None, float | None]] = lambda: (None, None),
    clock: Clock = time.perf_counter,
    world: World = ALONE,
) -> Ended:
    """Train from step `start` to step `steps`, or until `should_stop` returns true; then no more tasks run.

    lr: step, counted from 0 -> learning rate. epochs: so far, and of the whole run. A step that is not finite uses up
    its data, unless `recover`, given error and step, rolls back and returns the step it went back to. `undo` puts the
    data of a step that ran `OutOfTime` back. Raises `NonFinite` after `nonfinite_limit` failed steps in a row, and at
    once if weights are not finite and there are no others to go back to.
    """
    tell, peak_flops, feed = partial(_tell, watchers), engine.peak_flops(), iter(batches)
    done, in_a_row, failed, restored = start, 0, 0, start
    began = ready = clock()
    while done < steps:
        try:
            micro_batches = next(feed)
            loaded, rate, waited = clock(), lr(done), world.waited_seconds
            out = engine.step(micro_batches, rate, loss_fn)
        except StopIteration:
            break
        except OutOfTime:
            undo()
            break
        except NonFinite as error:
            done, in_a_row, failed, now = done + 1, in_a_row + 1, done + 1, clock()
            lost = bool(error.parameters) and (recover is None or done - 1 == restored)  # so would all other steps
            ends = lost or in_a_row >= nonfinite_limit
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
            timed = _Times(now - ready, loaded - ready, now - began, world.waited_seconds - waited)
            flops = engine.step_flops(micro_batches)
            peak_flops = max(peak_flops, flops / timed.step)  # if the measurement was disturbed: this was reached
            tell(_stepped(out, done, steps, rate, start, timed, (flops, peak_flops), epochs(), engine, world))
        try:
            for task in tasks if not should_stop() else ():
                tell(task.run(done) if task.is_due(done, steps) else None)
        except OutOfTime:
            break
        if should_stop():
            break
        ready = clock()
    ended = Ended(done, steps, clock() - began)
    tell(ended)
    return ended


def _tell(watchers: Sequence[Watcher], event: Event | None) -> None:
    if event is not None:
        for watch in watchers:
            watch(event)


class _Times(NamedTuple):
    """Seconds of a step, of its wait for data, since the start, and of the step's waits for other ranks."""

    step: float
    data: float
    elapsed: float
    waited: float


def _stepped(
    out: StepOutput,
    done: int,
    steps: int,
    rate: float,
    start: int,
    seconds: _Times,
    flops: tuple[float, float],
    epochs: tuple[float | None, float | None],
    engine: Trainable,
    world: World,
) -> Stepped:
    event = Stepped(
        step=done,
        steps=steps,
        loss=out.loss,
        grad_norm=out.grad_norm,
        lr=rate,
        tokens=out.tokens,
        seconds=seconds.step,
        data_seconds=seconds.data,
        stall_seconds=out.stall_seconds,
        flops=flops[0],
        peak_flops=flops[1],
        nbytes=_by_tier(engine),
        elapsed_seconds=seconds.elapsed,
        resumed_at=start,
        epoch=epochs[0],
        epochs=epochs[1],
        written_nbytes=out.written_nbytes,
        kept=engine.policy.kept_shares,
        metrics=out.metrics,
    )
    return _of_all(event, seconds, world)


def _of_all(event: Stepped, timed: _Times, world: World) -> Stepped:
    """The event with the slowest of all ranks, by the time it did not wait, and the bytes of the fullest."""
    if world.size == 1:
        return event
    busy = max(0.0, timed.step - event.stall_seconds - timed.waited)
    told = world.exchange("a step", (busy, dict(event.nbytes)))
    seconds, held = [seconds for seconds, _ in told], [nbytes for _, nbytes in told]
    nbytes = {tier: max(each.get(tier, 0) for each in held) for tier in dict.fromkeys(chain.from_iterable(held))}
    longest, mean = max(seconds), sum(seconds) / len(seconds)
    return replace(event, nbytes=nbytes, slowest=(seconds.index(longest), longest / mean if mean else 1.0))


def _by_tier(engine: Trainable) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for (tier, _), nbytes in engine.memory_table().items():
        totals[tier] += nbytes
    return dict(totals)


def _hopeless(step: int, in_a_row: int, last: NonFinite) -> NonFinite:
    steps = "1 step" if in_a_row == 1 else f"{in_a_row} steps in a row"
    said = f"{last.where}: {last.what}" if last.where else last.what
    fix = last.fix if last.parameters else "lower train.learning_rate or lengthen train.warmup_steps"
    what = f"{steps} not finite, the last one: {said}"
    return NonFinite(what, where=f"step {step:,}", fix=fix, parameters=last.parameters)
