"""The training loop against a fake engine and a fake clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.dist import ALONE, World
from megatrain.errors import DataError, NonFinite
from megatrain.spec import Policy
from megatrain.train.events import Ended, Evaluated, Event, RolledBack, Skipped, Stepped
from megatrain.train.loop import BetweenSteps, RunSteps, Task, train

STEP_SECONDS, DATA_SECONDS, TASK_SECONDS = 3.0, 1.0, 10.0
TOKENS = 8


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Output:
    loss: float
    grad_norm: float = 2.0
    tokens: int = TOKENS
    stall_seconds: float = 0.5
    written_nbytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass
class FakeEngine:
    """Takes `STEP_SECONDS` a step and fails, as not finite, at the steps in `fails`, counted from 1."""

    policy = Policy()
    clock: FakeClock
    fails: frozenset[int] = frozenset()
    damaged: tuple[str, ...] = ()
    """Weights that are said not to be finite themselves."""
    world: World = ALONE
    rates: list[float | None] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)

    def step(self, micro_batches: Sequence[Mapping[str, Any]], lr: float | None = None, loss_fn: Any = None) -> Output:
        self.rates.append(lr)
        self.seen.append(micro_batches)
        self.clock.now += STEP_SECONDS
        if len(self.seen) in self.fails:
            raise NonFinite("the gradient is not finite", where="layer 2", parameters=self.damaged)
        return Output(loss=5.0 / len(self.seen))

    @property
    def diagnostics(self) -> FakeEngine:
        return self

    def step_flops(self, micro_batches: Sequence[Mapping[str, Any]]) -> float:
        return 60.0

    def peak_flops(self) -> float:
        return 30.0

    def memory_table(self) -> dict[tuple[str, str], int]:
        return {("device", "slots"): 5, ("host", "weights"): 20, ("host", "optimizer"): 80}


def batches(clock: FakeClock) -> Iterator[list[dict[str, Any]]]:
    index = 0
    while True:
        clock.now += DATA_SECONDS
        yield [{"input_ids": index}]
        index += 1


def run(steps: int = 4, fails: set[int] | None = None, **arguments: Any) -> tuple[FakeEngine, list[Event]]:
    clock = FakeClock()
    engine = FakeEngine(clock, frozenset(fails or ()))
    told: list[Event] = []
    course = RunSteps(steps, arguments.pop("lr", lambda step: 1.0))
    watchers, engine.world = arguments.pop("watchers", [told.append]), arguments.pop("world", ALONE)
    train(engine, batches(clock), course, watchers=watchers, between=BetweenSteps(**arguments), clock=clock)
    return engine, told


def test_trackers_get_each_step_and_the_end() -> None:
    _, told = run(steps=4)
    assert [(type(event), event.step) for event in told] == [
        (Stepped, 1),
        (Stepped, 2),
        (Stepped, 3),
        (Stepped, 4),
        (Ended, 4),
    ]


def test_every_listener_gets_every_event() -> None:
    first: list[Event] = []
    second: list[Event] = []
    run(watchers=[first.append, second.append])
    assert first == second
    assert len(first) == 5


def test_speed_counts_the_wait_for_data() -> None:
    _, told = run(steps=1)
    step = told[0]
    assert isinstance(step, Stepped)
    assert (step.seconds, step.data_seconds) == (STEP_SECONDS + DATA_SECONDS, DATA_SECONDS)
    assert step.tokens_per_second == TOKENS / 4
    assert step.flops_per_second == 15
    assert step.mfu == 0.5  # 60 operations at 30 a second need 2 of its 4 seconds
    assert step.stall_share == (1.0 + 0.5) / 4


def test_reported_mfu_is_at_most_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peak that was measured while others took the processor is too low; the quickest step then stands for it."""
    monkeypatch.setattr(FakeEngine, "peak_flops", lambda self: 10.0)
    flops = iter([60.0, 120.0, 60.0])
    monkeypatch.setattr(FakeEngine, "step_flops", lambda self, micro_batches: next(flops))
    _, told = run(steps=3)
    shares = [event.mfu for event in told if isinstance(event, Stepped)]
    assert shares == [1.0, 1.0, 0.5]


def test_tasks_between_steps_count_only_as_elapsed_time() -> None:
    clock = FakeClock()
    told: list[Event] = []

    def measure(step: int) -> Evaluated:
        clock.now += TASK_SECONDS
        return Evaluated(step, 1.0)

    train(
        FakeEngine(clock),
        batches(clock),
        RunSteps(2, lambda _: 1.0),
        watchers=[told.append],
        between=BetweenSteps([Task(1, measure)]),
        clock=clock,
    )
    steps = [event for event in told if isinstance(event, Stepped)]
    assert [step.seconds for step in steps] == [4.0, 4.0]
    assert [step.elapsed_seconds for step in steps] == [4.0, 18.0]
    assert told[-1] == Ended(2, 2, 28.0)


@given(every=st.integers(0, 7), steps=st.integers(1, 20))
def test_a_task_runs_at_its_interval_and_after_the_last_step(every: int, steps: int) -> None:
    _, told = run(steps=steps, tasks=[Task(every, lambda step: Evaluated(step, 0.0))])
    expected = {step for step in range(1, steps + 1) if every and step % every == 0} | {steps}
    assert [event.step for event in told if isinstance(event, Evaluated)] == sorted(expected)


def test_the_learning_rate_of_a_step_is_its_own() -> None:
    engine, told = run(steps=3, lr=lambda step: 0.1 * (step + 1))
    assert engine.rates == pytest.approx([0.1, 0.2, 0.3])
    assert [event.lr for event in told if isinstance(event, Stepped)] == engine.rates


def test_bytes_are_reported_per_tier() -> None:
    _, told = run(steps=1)
    assert isinstance(told[0], Stepped)
    assert told[0].nbytes == {"device": 5, "host": 100}


class OfTwo(World):
    """Rank 0 of two; the other was busy twice as long, and holds less on the device and more in host memory."""

    def exchange(self, what: str, value: Any) -> list[Any]:
        busy, nbytes = value
        return [value, (2 * busy, {"device": nbytes["device"] - 1, "host": nbytes["host"] + 1, "disk": 7})]


def test_of_several_ranks_the_slowest_and_the_fullest_are_reported() -> None:
    (alone,) = (event for event in run(steps=1)[1] if isinstance(event, Stepped))
    (event,) = (event for event in run(steps=1, world=OfTwo(0, 2))[1] if isinstance(event, Stepped))
    assert alone.slowest is None
    assert event.slowest == (1, pytest.approx(4 / 3))
    assert event.nbytes == {"device": 5, "host": 101, "disk": 7}


def test_ranks_that_only_wait_are_equally_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    step = FakeEngine.step
    monkeypatch.setattr(FakeEngine, "step", lambda *how: replace(step(*how), stall_seconds=100.0))
    (event,) = (event for event in run(steps=1, world=OfTwo(0, 2))[1] if isinstance(event, Stepped))
    assert event.slowest == (0, 1.0)


def test_nonfinite_steps_are_skipped_with_a_reason() -> None:
    engine, told = run(steps=4, fails={2})
    assert [type(event) for event in told] == [Stepped, Skipped, Stepped, Stepped, Ended]
    skipped = told[1]
    assert isinstance(skipped, Skipped)
    assert skipped.reason == "layer 2: the gradient is not finite"
    assert (skipped.seconds, skipped.in_a_row) == (4.0, 1)
    assert [batch[0]["input_ids"] for batch in engine.seen] == [0, 1, 2, 3]  # its data is not tried again


def test_only_consecutive_failures_end_the_run() -> None:
    _, told = run(steps=8, fails={2, 3, 5, 6}, nonfinite_limit=3)
    assert told[-1] == Ended(8, 8, 32.0)


@pytest.mark.parametrize("limit", [1, 3])
def test_too_many_consecutive_failures_end_the_run_with_the_last_as_cause(limit: int) -> None:
    told: list[Event] = []
    with pytest.raises(NonFinite, match=f"step {limit + 1}: .*not finite, the last one: layer 2") as caught:
        run(steps=8, fails={2, 3, 4, 5}, nonfinite_limit=limit, watchers=[told.append])
    assert isinstance(caught.value.__cause__, NonFinite)
    assert [type(event) for event in told] == [Stepped] + [Skipped] * limit


def test_nonfinite_weights_are_rolled_back_once_unless_loaded_so() -> None:
    def trained(fails: set[int], start: int = 0, **how: Any) -> list[tuple[type[Event], int]]:
        clock, told = FakeClock(), list[Event]()
        engine = FakeEngine(clock, frozenset(fails), damaged=("lm_head.weight",))
        with suppress(NonFinite):
            course = RunSteps(5, lambda _: 1.0, start)
            train(engine, batches(clock), course, watchers=[told.append], between=BetweenSteps(**how), clock=clock)
        return [(type(event), event.step) for event in told]

    def back(error: NonFinite, step: int) -> int:
        return 1

    assert trained({1}, start=1, recover=back) == [(Skipped, 2)]
    assert trained({3}) == [(Stepped, 1), (Stepped, 2), (Skipped, 3)]
    steps = [(Stepped, 1), (Stepped, 2), (Skipped, 3), (RolledBack, 3)]
    assert trained({3, 4}, recover=back) == [*steps, (Skipped, 2)]
    assert trained({3}, recover=back) == [*steps, *((Stepped, step) for step in range(2, 6)), (Ended, 5)]


def test_a_stop_takes_effect_after_the_current_step() -> None:
    told: list[Event] = []
    run(
        steps=9,
        watchers=[told.append],
        tasks=[Task(1, lambda step: Evaluated(step, 0.0))],
        should_stop=lambda: told[-1].step == 3,
    )
    assert [type(event) for event in told[-2:]] == [Stepped, Ended]
    assert told[-1] == Ended(3, 9, 12.0)


def test_other_errors_pass_through() -> None:
    def broken() -> Iterator[list[dict[str, Any]]]:
        raise DataError("gone", where="corpus.txt")
        yield []

    clock = FakeClock()
    with pytest.raises(DataError, match="corpus"):
        train(FakeEngine(clock), broken(), RunSteps(2, lambda _: 1.0), clock=clock)


def test_exhausted_data_ends_the_run_early() -> None:
    clock = FakeClock()
    ended = train(FakeEngine(clock), [[{}], [{}]], RunSteps(5, lambda _: 1.0), clock=clock)
    assert (ended.step, ended.steps) == (2, 5)
