"""Other systems on the same question: their bytes are those that define them, and ours is never slower."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench import zero3
from bench.shapes import llama_shape
from bench.zero3 import MicroMajor, Taken, UpdatesLast, compare
from megatrain.plan import Plan, Question, find_plan, machine, op_seconds
from megatrain.schedule import Schedule, check, replay
from megatrain.schedule.contents import Gradient
from megatrain.spec import Limits, ModelSpec, Numerics, Policy, Work

pytestmark = pytest.mark.slow

MODEL = llama_shape("1B", 12, 2048, vocabulary=32_000)


IN_HOST = {"placements": ()}
"""All state in host memory, on devices that have room for some of it, too."""


@cache
def planned(model: ModelSpec, name: str, tokens: int, length: int, clips: bool = True) -> Plan:
    return find_plan(asked(model, name, tokens, length, clips=clips))


def asked(model: ModelSpec, name: str, tokens: int, length: int, **more: Any) -> Question:
    return Question(model, replace(machine(name), host_nbytes=4 * 10**12), tokens, length, **more)


def by_name(plan: Plan) -> dict[str, Taken]:
    return {taken.name: taken for taken in compare(plan)}


@pytest.mark.parametrize(
    ("name", "tokens", "length", "clips"),
    [
        ("laptop", 4096, 1024, True),
        pytest.param("rtx-4090", 32_768, 4096, True, marks=pytest.mark.slow),
        ("h200", 65_536, 4096, False),
        pytest.param("gh200", 4096, 4096, True, marks=pytest.mark.slow),
    ],
)
def test_only_a_model_that_fits_is_faster_than_ours(name: str, tokens: int, length: int, clips: bool) -> None:
    plan = planned(MODEL, name, tokens, length, clips)
    ours, *offloading, memory = compare(plan)
    assert [each.name for each in offloading] == ["ZeRO-3 offload", "MegaTrain as published"]
    assert (ours.seconds, ours.fits, ours.device_nbytes) == (plan.seconds, True, plan.nbytes["device"])
    assert all(each.seconds >= plan.seconds * (1 - 1e-3) for each in offloading)
    assert memory.seconds <= 1.05 * plan.seconds  # graphs that fit beside the state come in smaller micro-batches
    assert all(0 < each.compute_seconds <= each.seconds for each in (ours, *offloading, memory))


def test_bytes_per_parameter_match_each_systems_published_figure() -> None:
    found = by_name(find_plan(asked(MODEL, "h200", 16_384, 2048, overrides=IN_HOST)))
    each = {name: taken.host_nbytes / MODEL.numel for name, taken in found.items()}
    assert each["this plan"] == pytest.approx(14, rel=0.01)
    assert each["MegaTrain as published"] == pytest.approx(12, rel=0.01)
    assert 18 <= each["ZeRO-3 offload"] < 20  # and gradients on their way
    assert each["in memory"] == 0
    assert found["in memory"].device_nbytes > 16 * MODEL.numel


def test_in_memory_is_shown_at_the_speed_it_would_have_where_it_does_not_fit() -> None:
    model = llama_shape("8B", 12, 4096)
    plans = {name: planned(model, name, 8192, 2048) for name in ("a6000", "b200")}
    small, large = (by_name(plan)["in memory"] for plan in plans.values())
    assert not small.fits
    assert small.device_nbytes > machine("a6000").device_nbytes
    assert small.seconds < plans["a6000"].seconds
    assert large.fits
    assert large.device_nbytes < machine("b200").device_nbytes


def test_a_system_that_needs_more_host_memory_than_there_is_is_marked() -> None:
    plan = find_plan(asked(MODEL, "h200", 16_384, 2048, overrides=IN_HOST))
    tight = replace(plan.question, limits=Limits(host_nbytes=int(1.01 * plan.nbytes["host"])))
    found = by_name(find_plan(tight))
    assert not found["ZeRO-3 offload"].fits
    assert found["ZeRO-3 offload"].seconds > 0
    assert found["MegaTrain as published"].fits


def proved(schedule: Schedule) -> Schedule:
    """Checked, with what a micro-batch sends home before the last as a copy of its own, and no part of the gradient."""
    whole = [op.kind != "GRAD" or op.writes[0].content == Gradient(op.unit) for op in schedule.ops]
    ops = [op if known else op._replace(kind="OFFLOAD") for op, known in zip(schedule.ops, whole, strict=True)]
    check(replace(schedule, ops=tuple(ops)))
    return schedule


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_each_micro_batch_takes_two_loads_of_the_weights_and_one_of_gradients(tied: bool, micro_batches: int) -> None:
    model = llama_shape("tiny", 6, 256, vocabulary=500, tied=tied)
    schedule = proved(MicroMajor(model, Numerics(grad_precision="fp32"), Policy(), Work((64,) * micro_batches)).step())
    assert sum(op.nbytes for op in schedule.ops if op.kind == "GRAD") == 4 * micro_batches * model.numel
    for unit in (3, 4):  # those below and above are still in their slots where a pass turns
        fetched = sum(op.nbytes for op in schedule.ops if op.kind == "FETCH" and op.unit == unit)
        assert fetched == 2 * 2 * micro_batches * model.units[unit].numel
    assert [op.kind for op in schedule.ops[-len(model.units) :]] == ["UPDATE"] * len(model.units)


def whole(plan: Plan, builder: UpdatesLast, moved: float) -> float:
    """Seconds of the whole schedule, with `moved` bytes per parameter more in its updates; sums cost a read each."""
    question, bandwidth = plan.question, plan.question.hardware.host_bandwidth
    price = op_seconds(question.model, builder.numerics, builder.policy, builder.work, question.hardware)

    def seconds(op: zero3.Op) -> float:
        if op.kind == "REDUCE":
            return 4 * (1 + len(op.reads)) * builder.trained[op.unit].size / bandwidth
        return price(op) + (op.kind == "UPDATE") * moved * builder.trained[op.unit].size / bandwidth

    return replay(proved(builder.step()), seconds).seconds


def test_extrapolated_steps_of_others_are_those_of_their_whole_schedules() -> None:
    model = llama_shape("small", 16, 1024, vocabulary=8000)
    plan = planned(model, "rtx-4090", 12 * 2048, 2048)
    rows = by_name(plan)
    chosen = replace(
        plan.policy,
        activations="recompute",
        update="next_forward",
        weight_slots=2,
        grad_slots=2,
        activations_by_layer=(),
    )
    found = []
    for size in (1, 2, 4, 8, 12):
        sizes = [size] * (12 // size) + ([12 % size] if 12 % size else [])
        work = Work(tuple(2048 * each for each in sizes), 2048)
        found.append(whole(plan, MicroMajor(model, replace(plan.numerics, grad_precision="fp32"), chosen, work), 4))
    assert rows["ZeRO-3 offload"].seconds == pytest.approx(min(found), rel=0.02)
    assert found[0] > found[2]  # more micro-batches, more loads
    again = []
    for interval in (2, 4, 8):
        kept = replace(chosen, activations_by_layer=(("input",), *(("drop",),) * (interval - 1)))
        again.append(whole(plan, UpdatesLast(model, plan.numerics, kept, Work((2048 * 12,), 2048)), -4))
    assert all(less <= more for less, more in pairwise(again))
    assert rows["MegaTrain as published"].seconds == pytest.approx(again[0], rel=0.02)


def test_the_command_prints_a_row_for_each_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps({"model": asdict(llama_shape("small", 4, 512, vocabulary=4000))}))
    assert zero3.main([str(saved), "--hardware", "rtx-4090", "--tokens-per-step", "8192", "--length", "1024"]) == 0
    heads, _, *rows = ([cell.strip() for cell in row.split("|")[1:-1]] for row in capsys.readouterr().out.splitlines())
    assert heads == ["system", "choices", "step", "tokens/s", "TFLOP/s", "device", "host", "stall", "to ours"]
    assert [row[0] for row in rows] == ["this plan", "ZeRO-3 offload", "MegaTrain as published", "in memory"]
    assert rows[0][-1] == "1.00x"
    with pytest.raises(SystemExit):
        zero3.main([str(saved), "--hardware", "h20"])
    assert "did you mean h200" in capsys.readouterr().err
