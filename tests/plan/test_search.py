"""The planner's choice is the best there is, fits, and is the same each time; what does not fit is refused in words."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from bench.shapes import llama_shape
from megatrain.errors import DoesNotFit, PlanError
from megatrain.plan import Plan, Question, examine, find_plan
from megatrain.plan.search import KNOBS
from megatrain.spec import Hardware, ModelSpec, Policy


def llama(layers: int = 4) -> ModelSpec:
    return llama_shape("llama", layers, width=64, vocabulary=512)


BALANCED = Hardware("balanced", 1 << 40, 1 << 40, 1e9, 1e9, 2e10, 1e10, device_bandwidth=1e10, launch_seconds=1e-6)
MACHINES = {
    "balanced": BALANCED,
    "slow bus": replace(BALANCED, fetch_bandwidth=5e7, grad_bandwidth=5e7),
    "slow host": replace(BALANCED, host_bandwidth=3e8),
    "slow launches": replace(BALANCED, launch_seconds=1e-3),
    "small device": replace(BALANCED, device_nbytes=3 << 20),
    "a cpu": replace(BALANCED, shares_memory=True, host_nbytes=32 << 20),
}


def question(hardware: Hardware, **changes: object) -> Question:
    usual = Question(llama(), hardware, tokens_per_step=4 * 128, length=128)
    return replace(usual, **changes)  # type: ignore[arg-type]


def everything(asked: Question) -> list[Plan]:
    """Every policy of a grid, replayed whole."""
    plans = []
    values = product(("keep", "recompute"), KNOBS["weight_slots"], KNOBS["grad_slots"], (256, 512), (1, 2, 4))
    for activations, weight_slots, grad_slots, chunk, micro_batch in values:
        policy = Policy(
            activations=activations,
            weight_slots=weight_slots,
            grad_slots=grad_slots,
            loss_chunk_tokens=chunk,
            shares_memory=asked.hardware.shares_memory,
        )
        plans.append(examine(asked, policy, micro_batch))
    return [plan for plan in plans if fits(plan)]


def fits(plan: Plan) -> bool:
    return all(plan.nbytes[tier] <= budget for tier, budget in plan.question.budgets().items())


@pytest.mark.parametrize("name", MACHINES)
def test_the_choice_is_within_3_percent_of_an_exhaustive_search(name: str) -> None:
    asked = question(MACHINES[name])
    chosen = find_plan(asked)
    assert fits(chosen)
    assert chosen.seconds <= 1.03 * min(plan.seconds for plan in everything(asked))


@pytest.mark.parametrize("name", MACHINES)
def test_no_random_policy_that_fits_is_better(name: str) -> None:
    asked = question(MACHINES[name], model=llama(layers=12))
    chosen, draw, tried = find_plan(asked), random.Random(name), 0
    while tried < 50:
        policy = Policy(
            activations=draw.choice(("keep", "recompute")),
            weight_slots=draw.randint(1, 5),
            grad_slots=draw.randint(1, 4),
            shard_nbytes=draw.choice((1 << 14, 1 << 20, 1 << 28)),
            loss_chunk_tokens=draw.choice((64, 300, 512, 2048)),
            shares_memory=asked.hardware.shares_memory,
        )
        plan = examine(asked, policy, draw.choice((1, 2, 4)))
        tried += 1
        assert not fits(plan) or chosen.seconds <= 1.001 * plan.seconds, policy


def test_the_same_question_has_the_same_answer() -> None:
    asked = question(MACHINES["slow bus"])
    assert find_plan(asked).policy == find_plan(asked).policy


def test_what_is_pinned_stays() -> None:
    pinned = {"activations": "keep", "weight_slots": 3, "micro_batch": 2, "loss_chunk_tokens": 100}
    plan = find_plan(question(BALANCED, pinned=pinned))
    assert (plan.policy.activations, plan.policy.weight_slots, plan.micro_batch) == ("keep", 3, 2)
    assert plan.policy.loss_chunk_tokens == 100


def test_clipping_decides_when_updates_happen() -> None:
    assert find_plan(question(BALANCED)).policy.update == "next_forward"
    assert find_plan(question(BALANCED, clips=False)).policy.update == "during_backward"


@pytest.mark.parametrize("tier", ["device", "host"])
def test_what_does_not_fit_is_refused_with_the_number_and_a_way_out(tier: str) -> None:
    asked = question(BALANCED)
    least = find_plan(asked).nbytes
    budget = {f"{tier}_budget_nbytes": least[tier] // 50}
    with pytest.raises(DoesNotFit) as caught:
        find_plan(replace(asked, **budget))  # type: ignore[arg-type]
    assert f"bytes of {tier} memory" in str(caught.value)
    assert "more than there are" in str(caught.value)
    assert caught.value.fix


def test_a_step_of_less_than_a_sequence_is_refused() -> None:
    with pytest.raises(PlanError, match="tokens per step"):
        question(BALANCED, tokens_per_step=10)
