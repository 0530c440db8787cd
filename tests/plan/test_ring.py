"""A ring of shards is taken where the memory that it frees makes a plan quicker, or is what a plan lacks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bench.shapes import llama_shape
from megatrain.errors import DoesNotFit
from megatrain.plan import Question, estimate, find_plan, machine, survey
from megatrain.plan.knobs import WORTH_A_RING
from megatrain.plan.ring import rings
from megatrain.spec import Policy

MODEL = llama_shape("1B", 6, 2048, feed_forward=8192, vocabulary=64_000)
HARDWARE = replace(machine("rtx-4090"), host_nbytes=10**13)
QUESTION = Question(MODEL, HARDWARE, 8192, 1024)
WITHOUT = {"read_ahead_nbytes": 0}


def budgets(number: int) -> list[int]:
    """From what a ring of the least takes to what the leanest plan takes without, and beyond."""
    lean = Policy(weight_slots=1, grad_slots=1, loss_chunk_tokens=64)
    least = estimate(QUESTION, lean, 1).nbytes["device"]
    return [round(least * (0.8 + 0.1 * step)) for step in range(number)]


@pytest.mark.parametrize("budget", budgets(8))
def test_a_plan_that_may_have_a_ring_is_never_slower_and_has_one_where_it_gains(budget: int) -> None:
    asked = replace(QUESTION, device_budget_nbytes=budget)
    try:
        without = find_plan(replace(asked, pinned=WITHOUT))
    except DoesNotFit:
        without = None
    try:
        chosen = find_plan(asked)
    except DoesNotFit:
        assert without is None
        return
    assert chosen.taken.fits(asked.budgets())
    if without and not chosen.policy.read_ahead_nbytes:
        assert chosen.policy == without.policy
    elif without:
        assert chosen.seconds < WORTH_A_RING * without.seconds


def test_what_a_ring_frees_buys_a_larger_micro_batch() -> None:
    chosen = [find_plan(replace(QUESTION, device_budget_nbytes=budget)) for budget in budgets(8)[2:5]]
    assert any(plan.policy.read_ahead_nbytes for plan in chosen)


def test_a_refusal_names_the_least_with_which_a_plan_is_found() -> None:
    with pytest.raises(DoesNotFit) as caught:
        find_plan(replace(QUESTION, device_budget_nbytes=1 << 29))
    named = re.search(r"needs ([\d,]+) bytes of device", str(caught.value))
    assert named
    least = int(named[1].replace(",", ""))
    found = find_plan(replace(QUESTION, device_budget_nbytes=least))
    assert found.nbytes["device"] <= least
    assert found.policy.read_ahead_nbytes
    short = replace(QUESTION, device_budget_nbytes=least - 1)
    assert survey(short, [short.budgets()]) == [None]
    with pytest.raises(DoesNotFit):
        find_plan(replace(short, pinned=WITHOUT))


TOLD = [{"weight_slots": 2}, {"gates": "unit"}, {"gates": "rows"}, {"read_ahead_nbytes": 0}, {"compile": True}]


@pytest.mark.parametrize("told", [*TOLD, {"shard_nbytes": 1 << 24}])
def test_what_the_user_has_said_stays(told: dict[str, object]) -> None:
    asked = replace(QUESTION, device_budget_nbytes=budgets(8)[3], pinned=told)
    assert rings(asked) == []
    assert rings(replace(asked, pinned={"gates": "shard"})) != []
    assert find_plan(asked).policy.read_ahead_nbytes == 0


def test_where_memory_is_shared_there_is_no_ring() -> None:
    assert rings(replace(QUESTION, hardware=replace(HARDWARE, shares_memory=True))) == []
