"""A read-ahead is used where the memory that it frees makes a plan faster, or lets it fit at all."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from bench.shapes import llama_shape
from megatrain.errors import DoesNotFit
from megatrain.plan import Choice, Plan, Question, estimate, find_plan, machine, survey
from megatrain.spec import Limits, Numerics, Policy

MODEL = llama_shape("1B", 6, 2048, feed_forward=8192, vocabulary=64_000)
HARDWARE = replace(machine("rtx-4090"), host_nbytes=10**13)
QUESTION = Question(MODEL, HARDWARE, 8192, 1024)


def budget(step: float) -> int:
    """From memory that only a read-ahead fits into, to memory that needs none."""
    lean = Choice(Numerics(loss_chunk_tokens=64), Policy(weight_slots=1, grad_slots=1))
    return round(estimate(QUESTION, lean, 1).nbytes["device"] * (0.8 + 0.1 * step))


@cache
def planned(step: float, **overrides: object) -> Plan | None:
    try:
        return find_plan(replace(QUESTION, limits=Limits(device_nbytes=budget(step)), overrides=overrides))
    except DoesNotFit:
        return None


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("step", "gains"), [*(pytest.param(each, True, marks=pytest.mark.slow) for each in (0, 1)), (2, True), (5, False)]
)
def test_allowing_a_read_ahead_is_never_slower(step: int, gains: bool) -> None:
    without, chosen = planned(step, read_ahead_nbytes=0), planned(step)
    assert chosen
    assert chosen.taken.fits(chosen.question.budgets())
    assert chosen.question.overrides == {}
    assert bool(chosen.policy.read_ahead_nbytes) == gains
    if without:  # the same plan where it gains nothing, or another that takes as long
        assert chosen.seconds <= (0.99 if gains else 1.0) * without.seconds


def test_memory_freed_by_a_read_ahead_allows_a_larger_micro_batch() -> None:
    without, chosen = planned(2.5, read_ahead_nbytes=0), planned(2.5)
    assert without
    assert chosen
    assert chosen.micro_batch == 2 * without.micro_batch


def test_a_read_ahead_fits_devices_that_are_otherwise_too_small() -> None:
    assert planned(0, read_ahead_nbytes=0) is None
    asked = replace(QUESTION, limits=Limits(device_nbytes=budget(0)))
    assert survey(asked, [asked.budgets()]) != [None]


@pytest.mark.slow
def test_a_refusal_names_the_least_memory_with_a_plan() -> None:
    with pytest.raises(DoesNotFit) as caught:
        find_plan(replace(QUESTION, limits=Limits(device_nbytes=1 << 29)))
    assert "of device memory" in str(caught.value)
    least = caught.value.needed["device"]
    assert least < budget(0)
    found = find_plan(replace(QUESTION, limits=Limits(device_nbytes=least)))
    assert found.nbytes["device"] <= least
    assert found.policy.read_ahead_nbytes


TOLD = [{"weight_slots": 2}, {"wait_for": "unit"}, {"read_ahead_nbytes": 0}]


@pytest.mark.few(2)
@pytest.mark.parametrize("told", [*TOLD, {"shard_nbytes": 1 << 24}])
def test_user_choices_are_kept(told: dict[str, object]) -> None:
    plan = planned(3, **told)
    assert plan
    assert not plan.policy.read_ahead_nbytes
    assert {name: plan.choice.get(name) for name in told} == told


def test_no_read_ahead_on_shared_memory_devices() -> None:
    plan = find_plan(replace(QUESTION, hardware=replace(HARDWARE, shares_memory=True, host_nbytes=budget(9) * 4)))
    assert not plan.policy.read_ahead_nbytes
