"""WaitFor are taken where a replay says that they gain, and never where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.scaling import shape
from bench.shapes import llama_shape
from megatrain.plan import Question, find_plan, machine
from megatrain.plan.cost import PHASED_CALL_KERNELS, SWITCH_KERNELS, op_seconds
from megatrain.plan.search_space import WORTH_SHARDS
from megatrain.schedule import build_step
from megatrain.spec import ModelSpec, Numerics, Policy, Work

GB, TB = 10**9, 10**12


def model() -> ModelSpec:
    return llama_shape("3B", 8, 4096, feed_forward=11_008, vocabulary=64_000)


QUESTIONS = {
    "one slot": Question(shape("7B"), replace(machine("rtx-4090"), device_nbytes=8 * GB, host_nbytes=TB), 4096, 1024),
    "few tokens": Question(model(), machine("gh200"), 512, 512, clips=False),
    "compute": Question(model(), machine("h200"), 1 << 17, 4096),
    "the optimizer": Question(model(), machine("rtx-4090"), 512, 512),
}


QUESTIONS["one slot"] = replace(QUESTIONS["one slot"], overrides={"weight_slots": 1})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ("few tokens", "compute") else ()) for name in QUESTIONS],
)
def test_allowing_gates_is_never_slower(name: str) -> None:
    asked = QUESTIONS[name]
    without, chosen = find_plan(replace(asked, overrides={**asked.overrides, "wait_for": "unit"})), find_plan(asked)
    if chosen.policy.wait_for == "unit":
        assert chosen.policy == without.policy
    else:
        assert chosen.seconds < WORTH_SHARDS * without.seconds
        assert chosen.taken.fits(asked.budgets())
    assert chosen.policy.wait_for == ("shard" if name == "one slot" else "unit")
    assert find_plan(asked).policy == chosen.policy


@pytest.mark.parametrize(
    "told",
    [
        {"wait_for": "shard"},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({"wait_for": "unit"}, {"kernels": "compile"})),
    ],
)
def test_user_choices_are_kept(told: dict[str, object]) -> None:
    policy = find_plan(replace(QUESTIONS["few tokens"], overrides=told)).policy
    assert policy.wait_for == told.get("wait_for", "unit")


@pytest.mark.slow
def test_user_set_shards_and_slots_are_kept_with_gates() -> None:
    told = {"shard_nbytes": 200 << 20, "weight_slots": 1}
    policy = find_plan(replace(QUESTIONS["one slot"], overrides=told)).policy
    assert (policy.shard_nbytes, policy.weight_slots, policy.wait_for) == (200 << 20, 1, "shard")


def test_a_phased_call_costs_its_work_and_switches() -> None:
    of, work, hardware = model(), Work((512,), 512), machine("h200")
    policy = Policy(shard_nbytes=64 << 20)
    totals = []
    for each in (policy, replace(policy, wait_for="shard")):
        price, ops = op_seconds(of, Numerics(), each, work, hardware), build_step(of, Numerics(), each, work).ops
        calls = [op for op in ops if op.stream == "compute" and op.unit == 3]
        turns = (
            sum(op.shard >= 0 for op in calls) * SWITCH_KERNELS
            + sum(op.shard == 0 for op in calls) * PHASED_CALL_KERNELS
        )
        assert bool(turns) == (each.wait_for == "shard")
        totals.append(sum(price(op) for op in calls) - turns * (hardware.launch_seconds or 0.0))
    assert totals[0] == pytest.approx(totals[1])
