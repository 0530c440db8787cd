"""The training loop.

`train` takes everything it works with as plain arguments and reports by telling events, so that it fits on one screen
and a test can hand it a fake engine and a fake clock. A step counts its tokens over its whole wall time, the wait for
its data included. A step that is not finite is skipped, as the engine has not applied it; several in a row end the run.

Left out: the learning rate's shape (`optim.lr`), what a report looks like (`metrics`, `progress`), and saving (`run`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from megatrain.errors import NonFinite
from megatrain.train.events import Ended, Event, Skipped, Stepped, Watcher

MicroBatches = Sequence[Mapping[str, Any]]
Clock = Callable[[], float]
"""Seconds from any origin that does not move."""


class StepOutput(Protocol):
    """What the loop reads of a step; see `train.engine.StepOutput`."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def stall_seconds(self) -> float: ...


class Trainable(Protocol):
    """What the loop needs of an engine; see `train.engine.Engine`."""

    def step(self, micro_batches: MicroBatches, lr: float | None = None) -> StepOutput: ...
    def step_flops(self, micro_batches: MicroBatches) -> float: ...
    def peak_flops(self) -> float: ...
    def memory_table(self) -> Mapping[tuple[str, str], int]: ...


@dataclass(frozen=True, slots=True)
class Task:
    """Something to do between steps: after every `every` of them (0: never) and the last; or `once`, after one."""

    every: int
    run: Callable[[int], Event | None]
    """From the number of steps done to what is to be told, if anything."""
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
    watchers: Sequence[Watcher] = (),
    tasks: Sequence[Task] = (),
    nonfinite_limit: int = 3,
    should_stop: Callable[[], bool] = lambda: False,
    clock: Clock = time.perf_counter,
) -> Ended:
    """Train for `steps` steps, or until `should_stop` says so after one of them; then no task is run.

    `lr` gives the learning rate of a step, counted from 0. A step that is not finite counts as one: its data is used up
    and the learning rate moves on. Raises `NonFinite` after `nonfinite_limit` of them in a row, with the weights as the
    last finite step left them, and whatever the engine or a watcher raises.
    """

    def tell(event: Event) -> None:
        for watch in watchers:
            watch(event)

    peak_flops = engine.peak_flops()
    done = in_a_row = 0
    began = ready = clock()
    for done, micro_batches in enumerate(islice(batches, steps), start=1):
        loaded, rate = clock(), lr(done - 1)
        try:
            out = engine.step(micro_batches, lr=rate)
        except NonFinite as error:
            in_a_row += 1
            now = clock()
            tell(Skipped(done, steps, str(error), in_a_row, seconds=now - ready, elapsed_seconds=now - began))
            if in_a_row >= nonfinite_limit:
                raise _hopeless(done, in_a_row, error) from error
        else:
            in_a_row, now = 0, clock()
            stepped = Stepped(
                step=done,
                steps=steps,
                loss=out.loss,
                grad_norm=out.grad_norm,
                lr=rate,
                tokens=out.tokens,
                seconds=now - ready,
                data_seconds=loaded - ready,
                stall_seconds=out.stall_seconds,
                flops=engine.step_flops(micro_batches),
                peak_flops=peak_flops,
                nbytes=_by_tier(engine),
                elapsed_seconds=now - began,
            )
            tell(stepped)
        if should_stop():
            break
        for task in tasks:
            if task.is_due(done, steps):
                event = task.run(done)
                if event is not None:
                    tell(event)
        ready = clock()
    ended = Ended(done, steps, clock() - began)
    tell(ended)
    return ended


def _by_tier(engine: Trainable) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for (tier, _), nbytes in engine.memory_table().items():
        totals[tier] += nbytes
    return dict(totals)


def _hopeless(step: int, in_a_row: int, last: NonFinite) -> NonFinite:
    steps = "1 step" if in_a_row == 1 else f"{in_a_row} steps in a row"
    return NonFinite(
        f"{steps} not finite, the last one: {last}",
        where=f"step {step}",
        fix="lower train.lr or lengthen train.warmup_steps",
    )
