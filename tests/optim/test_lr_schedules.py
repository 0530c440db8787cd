"""Learning-rate schedules: where each starts, peaks and ends, and that nothing jumps on the way."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatrain.errors import ConfigError
from megatrain.optim import LrSchedule

NAMES = ("constant", "cosine", "linear", "wsd")

Numbers = dict[str, float]


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = NAMES) -> tuple[LrSchedule, Numbers]:
    warmup, flat, decay = draw(st.integers(0, 50)), draw(st.integers(0, 50)), draw(st.integers(0, 50))
    assume(warmup + flat + decay >= 1)
    numbers = {
        "warmup_steps": warmup,
        "decay_steps": decay,
        "total_steps": warmup + flat + decay,
        "min_ratio": draw(st.floats(0, 1)),
    }
    return LrSchedule(draw(st.sampled_from(names)), **numbers), numbers


@given(schedules(), st.integers(0, 300))
def test_a_multiplier_is_between_zero_and_one(case: tuple[LrSchedule, Numbers], step: int) -> None:
    assert 0 <= case[0].multiplier(step) <= 1


@given(schedules())
def test_warm_up_rises_by_equal_steps_to_the_peak_and_is_never_zero(case: tuple[LrSchedule, Numbers]) -> None:
    schedule, numbers = case
    warmup = numbers["warmup_steps"]
    assume(0 < warmup < numbers["total_steps"])
    rise = [schedule.multiplier(step) for step in range(warmup)]
    assert rise == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert schedule.multiplier(warmup) == pytest.approx(1.0)


@given(schedules())
def test_after_warm_up_the_rate_never_rises(case: tuple[LrSchedule, Numbers]) -> None:
    schedule, numbers = case
    rates = [schedule.multiplier(step) for step in range(numbers["warmup_steps"], numbers["total_steps"] + 5)]
    assert all(after <= before + 1e-12 for before, after in pairwise(rates))


@given(schedules(("linear", "cosine", "wsd")), st.integers(0, 100))
def test_from_the_last_step_on_the_rate_is_the_least(case: tuple[LrSchedule, Numbers], beyond: int) -> None:
    schedule, numbers = case
    assert schedule.multiplier(numbers["total_steps"] + beyond) == pytest.approx(numbers["min_ratio"], abs=1e-12)


@given(schedules(("linear", "cosine")))
def test_half_way_linear_and_cosine_are_half_way_down(case: tuple[LrSchedule, Numbers]) -> None:
    schedule, numbers = case
    span = numbers["total_steps"] - numbers["warmup_steps"]
    assume(span > 0 and span % 2 == 0)
    middle = schedule.multiplier(numbers["warmup_steps"] + span // 2)
    assert middle == pytest.approx((1 + numbers["min_ratio"]) / 2)


@given(schedules(("wsd",)))
def test_wsd_holds_the_peak_until_its_decay(case: tuple[LrSchedule, Numbers]) -> None:
    schedule, numbers = case
    for step in range(numbers["warmup_steps"], numbers["total_steps"] - numbers["decay_steps"]):
        assert schedule.multiplier(step) == 1.0


def test_values_by_hand() -> None:
    linear = LrSchedule("linear", total_steps=6, warmup_steps=2, min_ratio=0.2)
    assert [linear.multiplier(s) for s in range(8)] == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    wsd = LrSchedule("wsd", total_steps=6, warmup_steps=2, decay_steps=2)
    assert [wsd.multiplier(s) for s in range(7)] == pytest.approx([0.5, 1, 1, 1, 1, 0.5, 0])
    cosine = LrSchedule("cosine", total_steps=3)
    assert [cosine.multiplier(s) for s in range(4)] == pytest.approx([1, 0.75, 0.25, 0])
    assert LrSchedule("constant", total_steps=1).multiplier(10**9) == 1


def test_a_schedule_is_a_value() -> None:
    one = LrSchedule("cosine", total_steps=10, warmup_steps=2)
    assert one == LrSchedule("cosine", total_steps=10, warmup_steps=2)
    assert len({one, one}) == 1


@pytest.mark.parametrize(
    ("where", "numbers"),
    [
        ("warmup_steps", {"total_steps": 10, "warmup_steps": -1}),
        ("total_steps", {"total_steps": 0}),
        ("total_steps", {"total_steps": 10, "warmup_steps": 11}),
        ("min_ratio", {"total_steps": 10, "min_ratio": 1.5}),
        ("min_ratio", {"total_steps": 10, "min_ratio": math.nan}),
        ("decay_steps", {"total_steps": 10, "warmup_steps": 4, "decay_steps": 7}),
        ("decay_steps", {"total_steps": 10, "decay_steps": -1}),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(where: str, numbers: dict) -> None:
    with pytest.raises(ConfigError, match=f"^{where}: "):
        LrSchedule("wsd", **numbers)
