"""Other systems on the same question: their bytes are those that define them, and ours is never slower."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from bench.shapes import llama_shape
from megatrain.plan import Plan, Question, Row, compare, find_plan, machine, op_seconds
from megatrain.schedule import Schedule, check, replay
from megatrain.schedule.others import build_interval, build_micro_major
from megatrain.spec import ModelSpec, Policy, Work

MODEL = llama_shape("1B", 12, 2048, vocabulary=32_000)


@cache
def planned(model: ModelSpec, name: str, tokens: int, length: int, clips: bool = True) -> Plan:
    roomy = replace(machine(name), host_nbytes=4 * 10**12)
    return find_plan(Question(model, roomy, tokens, length, clips=clips))


def by_name(rows: tuple[Row, ...]) -> dict[str, Row]:
    return {row.name: row for row in rows}


@pytest.mark.parametrize(
    ("name", "tokens", "length", "clips"),
    [
        ("laptop", 4096, 1024, True),
        pytest.param("rtx-4090", 32_768, 4096, True, marks=pytest.mark.slow),
        ("h200", 65_536, 4096, False),
        pytest.param("gh200", 4096, 4096, True, marks=pytest.mark.slow),
    ],
)
def test_nobody_is_quicker_than_ours_but_a_model_that_fits(name: str, tokens: int, length: int, clips: bool) -> None:
    plan = planned(MODEL, name, tokens, length, clips)
    rows = compare(plan)
    ours, *others = rows
    assert [row.name for row in rows] == ["this plan", "ZeRO-3 offload", "MegaTrain as published", "in memory"]
    assert (ours.seconds, ours.ratio, ours.fits) == (plan.seconds, 1.0, True)
    assert ours.device_nbytes == plan.nbytes["device"]
    for row in others[:2]:
        assert row.ratio >= 1 - 1e-3, row
    assert others[2].ratio <= 1.05, others[2]  # graphs that fit beside the state come in smaller micro-batches
    for row in rows:
        assert row.tokens_per_second * row.seconds == pytest.approx(tokens)
        assert row.flops_per_second / ours.flops_per_second == pytest.approx(1 / row.ratio)
        assert 0 <= row.stall_share < 1
    assert name != "laptop" or compare(plan) == rows, "it tells the same each time"


def test_bytes_per_parameter_are_those_that_each_system_is_known_for() -> None:
    plan = planned(MODEL, "h200", 16_384, 2048)
    rows = by_name(compare(plan))
    each = {name: row.host_nbytes / MODEL.numel for name, row in rows.items()}
    assert each["this plan"] == pytest.approx(14, rel=0.01)
    assert each["MegaTrain as published"] == pytest.approx(12, rel=0.01)
    assert 18 <= each["ZeRO-3 offload"] < 20  # and gradients on their way
    assert each["in memory"] == 0
    assert rows["in memory"].device_nbytes > 16 * MODEL.numel


def test_in_memory_is_shown_at_the_speed_it_would_have_where_it_does_not_fit() -> None:
    model = llama_shape("8B", 12, 4096)
    on_small, on_large = (by_name(compare(planned(model, name, 8192, 2048)))["in memory"] for name in ("a6000", "b200"))
    assert not on_small.fits
    assert on_small.device_nbytes > machine("a6000").device_nbytes
    assert on_small.ratio < 1
    assert on_large.fits
    assert on_large.device_nbytes < machine("b200").device_nbytes


def test_a_system_that_needs_more_host_memory_than_there_is_is_marked() -> None:
    plan = planned(MODEL, "h200", 16_384, 2048)
    tight = replace(plan.question, host_budget_nbytes=int(1.01 * plan.nbytes["host"]))
    rows = by_name(compare(find_plan(tight)))
    assert not rows["ZeRO-3 offload"].fits
    assert rows["ZeRO-3 offload"].seconds > 0
    assert rows["MegaTrain as published"].fits


def test_on_shared_memory_only_training_in_memory_is_left_to_compare_with() -> None:
    shared = replace(machine("laptop"), shares_memory=True, host_nbytes=10**12)
    plan = find_plan(Question(llama_shape("small", 6, 512, vocabulary=2000), shared, 4096, 1024))
    ours, memory = compare(plan)
    assert 0.95 < memory.ratio < 1.05  # the same products; its optimizer passes over more bytes
    assert memory.host_nbytes > ours.host_nbytes
    assert (memory.device_nbytes, ours.device_nbytes) == (0, 0)


def whole(plan: Plan, schedule: Schedule, policy: Policy, work: Work) -> float:
    question = plan.question
    check(schedule)
    return replay(schedule, op_seconds(question.model, policy, work, question.hardware)).seconds


def test_extrapolated_steps_of_others_are_those_of_their_whole_schedules() -> None:
    model = llama_shape("small", 16, 1024, vocabulary=8000)
    plan = planned(model, "rtx-4090", 12 * 2048, 2048)
    rows = by_name(compare(plan))
    chosen = replace(plan.policy, activations="recompute", update="after_backward", weight_slots=2, grad_slots=2)
    found = []
    for size in (1, 2, 4, 8, 12):
        sizes = [size] * (12 // size) + ([12 % size] if 12 % size else [])
        work = Work(tuple(2048 * each for each in sizes), 2048)
        policy = replace(chosen, masters="whole", grad_precision="fp32")
        found.append(whole(plan, build_micro_major(model, policy, work), policy, work))
    assert rows["ZeRO-3 offload"].seconds == pytest.approx(min(found), rel=0.02)
    assert found[0] > found[2]  # more micro-batches, more loads
    work = Work((2048 * 12,), 2048)
    again = [whole(plan, build_interval(model, chosen, work, interval), chosen, work) for interval in (2, 4, 8)]
    assert all(less <= more for less, more in pairwise(again))
    # its updates read and write 26 bytes for each parameter there, and 22 here, where no masters are
    spared = 4 * model.numel / plan.question.hardware.host_bandwidth
    assert rows["MegaTrain as published"].seconds == pytest.approx(again[0] - spared, rel=0.02)
