"""Schedules of state on the disk and on the device: proven, and no byte moved more often than it must be."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from megatrain.errors import PlanError, ScheduleError
from megatrain.schedule import Schedule, build_flush, build_forward, build_step, check, replay
from megatrain.schedule.contents import Weights
from megatrain.schedule.passes.state_buffers import fills_slot
from megatrain.spec import ModelSpec, Numerics, ParamSpec, Part, Placement, Policy, Work
from megatrain.spec.hardware import SECTOR
from megatrain.spec.layout import layout_of
from tests.small import small_spec

ON_DEVICE = Placement("device", "device", "device")


def random_case(draw: random.Random) -> tuple[ModelSpec, Numerics, Policy, Work]:
    shares = draw.random() < 0.4
    model = small_spec(draw.randint(1, 7), tied=draw.random() < 0.5)
    frozen = draw.sample(range(len(model.units)), draw.randint(0, 2))
    units = [
        replace(unit, params=tuple(replace(param, trainable=index not in frozen) for param in unit.params))
        for index, unit in enumerate(model.units)
    ]
    policy = Policy(
        weight_slots=draw.randint(1, 3),
        grad_slots=draw.randint(1, 3),
        shard_nbytes=draw.choice([64, 256, 1 << 20]),
        activations=draw.choice(["keep", "recompute"]),
        update=draw.choice(["next_forward", "during_backward"]),
        shares_memory=shares,
        placements=tuple(_home(draw, shares) for _ in units),
        disk_staging_slots=draw.randint(1, 4),
    )
    numerics = Numerics(draw.choice(["bf16", "fp32"]))
    work = Work((4,) * draw.randint(1, 4))
    model = replace(model, units=tuple(units))
    return over_a_base(model) if draw.random() < 0.5 else model, numerics, policy, work


def over_a_base(model: ModelSpec) -> ModelSpec:
    """The same with a frozen matrix of several sectors in each unit that has parameters."""
    units = [
        replace(unit, params=(*unit.params, ParamSpec(f"{unit.name}.base", (100, 64), trainable=False)))
        if unit.params
        else unit
        for unit in model.units
    ]
    return replace(model, units=tuple(units))


def _home(draw: random.Random, shares: bool) -> Placement:
    if not shares and draw.random() < 0.15:
        return ON_DEVICE
    weights = draw.choice(["host", "disk"] if shares else ["host", "disk", "device"])
    return Placement(weights, *(draw.choice(["host", "disk"]) for _ in range(3)))  # type: ignore[arg-type]


def schedules(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work) -> list[Schedule]:
    found = [build_step(model, numerics, policy, work), build_forward(model, numerics, policy, work)]
    if policy.update == "next_forward":
        found += [build_step(model, numerics, policy, work, pending="all"), build_flush(model, numerics, policy)]
    return found


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 300), marks=pytest.mark.slow)])
def test_any_disk_split_passes_the_checker_with_minimal_moves(seeds: range) -> None:
    """State once in and once out a step; weights in twice at most, and out once. An update reads them once more where
    no host memory holds a layer's, and what it has left does not go on to the device."""
    for seed in seeds:
        model, numerics, policy, work = random_case(random.Random(seed))
        for schedule in schedules(model, numerics, policy, work):
            check(schedule)
            for (kind, region), count in moved(schedule).items():
                buffer, passes = schedule.buffers[region], 1
                if kind == "READ" and buffer.part is Part.WEIGHTS and buffer.unit is not None:
                    layout, place = layout_of(model.units[buffer.unit]), policy.placement(buffer.unit)
                    goes_on = policy.update == "next_forward" and fills_slot(layout, policy, place)
                    passes = 2 if policy.shares_memory or goes_on else 3
                assert count <= passes * buffer.nbytes, (seed, kind, region)


def moved(schedule: Schedule) -> Counter[tuple[str, str]]:
    """(READ or WRITE, region) -> bytes."""
    nbytes: Counter[tuple[str, str]] = Counter()
    for op in schedule.ops:
        for access in {"READ": op.reads, "WRITE": op.writes}.get(op.kind, ()):
            nbytes[op.kind, access.buffer] += access.stop - access.start
    return nbytes


def on_disk(model: ModelSpec) -> Policy:
    return Policy(placements=(Placement("disk", "disk", "disk", "disk"),) * len(model.units))


def test_partly_frozen_units_are_read_whole_and_written_in_part() -> None:
    model = over_a_base(small_spec(3))
    units = [replace(model.units[0], params=model.units[0].params[-1:]), *model.units[1:]]  # the first is all frozen
    model = replace(model, units=tuple(units))
    schedule = build_step(model, Numerics("bf16"), on_disk(model), Work((4,)), pending="all")
    check(schedule)
    for unit, spec in enumerate(model.units):
        updated = SECTOR if unit else 0
        assert moved(schedule)["WRITE", f"disk/weights/{unit}"] == updated
        fetches = moved(schedule)["READ", f"disk/weights/{unit}"] - updated
        assert fetches == (2 if unit == 1 else 1) * 2 * layout_of(spec).size, "the others stay until the backward pass"


def test_incomplete_writes_of_trained_state_are_refused() -> None:
    model = over_a_base(small_spec(3))
    schedule = build_step(model, Numerics("bf16"), on_disk(model), Work((4,)), pending="all")
    ops = list(schedule.ops)
    at = next(i for i, op in enumerate(ops) if any(access.buffer == "disk/weights/2" for access in op.writes))
    reads, writes = (
        [access._replace(stop=access.stop - 64) if access.content == Weights(2) else access for access in side]
        for side in (ops[at].reads, ops[at].writes)
    )
    ops[at] = ops[at]._replace(reads=tuple(reads), writes=tuple(writes))
    with pytest.raises(ScheduleError, match=r"w2"):
        check(replace(schedule, ops=tuple(ops)))


def test_resident_units_never_cross_the_bus() -> None:
    model = small_spec(4)
    policy = Policy(placements=(ON_DEVICE,) * len(model.units))
    for schedule in schedules(model, Numerics(), policy, Work((4, 4))):
        for op in schedule.ops:
            tiers = {schedule.buffers[access.buffer].tier for access in (*op.reads, *op.writes)}
            assert tiers == {"device"} or op.kind in ("NORM", "UPDATE")  # which write and read eight bytes of a norm


def test_kept_weights_are_fetched_once() -> None:
    model = small_spec(4)
    step = build_step(
        model, Numerics("bf16"), Policy(placements=(Placement("device"),) * len(model.units)), Work((4,)), pending="all"
    )
    fetched = Counter(op.unit for op in step.ops if op.kind == "FETCH")
    assert fetched == {unit: 1 for unit in range(len(model.units))}


def test_the_optimizer_pass_works_while_the_next_unit_is_read_and_the_last_one_written() -> None:
    """Where reading, updating and writing take as long, three units are under way at once, and each stream is busy."""
    model = small_spec(12)
    policy = Policy(placements=(Placement("disk", "disk", "disk", "host"),) * len(model.units), disk_staging_slots=3)
    schedule = build_step(model, Numerics(), policy, Work((4,)), pending="all")
    costs = {"READ": 1.0 / 5, "WRITE": 1.0 / 5, "UPDATE": 1.0}
    timeline = replay(schedule, lambda op: len(op.writes) ** (op.kind != "UPDATE") * costs.get(op.kind, 1e-6))
    loss = next(end for op, end in zip(schedule.ops, timeline.ends, strict=True) if op.kind == "LOSS")
    updates = [i for i, op in enumerate(schedule.ops) if op.kind == "UPDATE" and 2 <= op.unit <= len(model.units) - 3]
    assert len(updates) == len(model.units) - 4
    for index in updates:
        began, ended, unit = timeline.starts[index], timeline.ends[index], schedule.ops[index].unit
        beside = {
            (op.kind, op.unit - unit)
            for op, start, end in zip(schedule.ops, timeline.starts, timeline.ends, strict=True)
            if op.kind in ("READ", "WRITE") and min(ended, end) - max(began, start) > 0.1 and start < loss
        }
        assert any(kind == "READ" and ahead >= 1 for kind, ahead in beside), (unit, beside)
        assert ("WRITE", -1) in beside, (unit, beside)


def test_impossible_placements_are_refused() -> None:
    with pytest.raises(PlanError, match="updated where all of its state is"):
        Placement("host", "host", "device")
    with pytest.raises(PlanError, match="must wait where their unit is updated"):
        Placement(gradients="device")
    with pytest.raises(PlanError, match="no memory of its own"):
        Policy(shares_memory=True, placements=(ON_DEVICE,))
    with pytest.raises(PlanError, match="places the state of 2 units"):
        build_step(small_spec(4), Numerics(), Policy(placements=(Placement(), Placement())), Work((4,)))
