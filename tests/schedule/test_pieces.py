"""State on the disk passes through host memory in pieces, so that no buffer there grows with the units."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from megatrain.errors import ScheduleError
from megatrain.schedule import Op, Schedule, Use, build_flush, build_step, check, replay
from megatrain.schedule.passes import pieces
from megatrain.schedule.passes.state_buffers import state_nbytes
from megatrain.spec import ModelSpec, Numerics, ParamSpec, Part, Placement, Policy, UnitSpec, Work, layout
from megatrain.spec.layout import NORM_BLOCK, layout_of
from megatrain.testing import SimDevice, run_idle, surviving_waits
from tests.schedule.test_disk_staging import random_case
from tests.small import small_spec

ON_DISK = Placement("disk", "disk", "disk", "disk")
HELD = (Use.NORMS, Use.GRADIENTS, Use.DIRECTIONS)
NUMEL = 3 * (28 << 20)


def large(layers: int = 4) -> ModelSpec:
    """Layers of 88 million parameters: 1.1 GiB of state, in about twenty pieces."""
    small = small_spec(layers)
    units = [
        UnitSpec(f"layers.{i}", "layer", tuple(ParamSpec(f"layers.{i}.{name}", (28 << 10, 1 << 10)) for name in "abc"))
        for i in range(layers)
    ]
    return replace(small, units=(small.units[0], *units, small.units[-1]))


def steps(update: str, *, shares_memory: bool = False, numerics: Numerics = Numerics("bf16")) -> list[Schedule]:  # noqa: B008
    policy = Policy(placements=(ON_DISK,) * 6, update=update, shares_memory=shares_memory)  # type: ignore[arg-type]
    if update == "during_backward":
        return [build_step(large(), numerics, policy, Work((4, 4)))]
    return [build_step(large(), numerics, policy, Work((4, 4)), "all"), build_flush(large(), numerics, policy)]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 32 elements, so that the layers of `small_spec` have twelve."""
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 1)
    monkeypatch.setattr(pieces, "NORM_BLOCK", 32)
    monkeypatch.setattr(layout, "NORM_BLOCK", 96)


def by_another_optimizer(draw: random.Random, model: ModelSpec) -> ModelSpec:
    """The model with zero to two arrays of each unit's state, and fewer of the matrices that are updated whole."""
    units = []
    for unit in model.units:
        most, whole = draw.randint(0, 2), draw.sample(unit.params, draw.randint(0, len(unit.params)))
        fewer = draw.randint(0, most)
        of = {param.name: {"state": ("a", "b")[:fewer], "matrices": 1} for param in whole}
        rest = {"state": ("a", "b")[:most], "matrices": 0}
        units.append(replace(unit, params=tuple(replace(param, **of.get(param.name, rest)) for param in unit.params)))
    return replace(model, units=tuple(units))


@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
@pytest.mark.parametrize("shares_memory", [False, True])
def test_no_buffer_of_host_memory_is_as_large_as_a_part_of_a_unit(update: str, *, shares_memory: bool) -> None:
    """Except where compute uses all of it: the weights, and where memory is shared, the sum of the gradient."""
    for schedule in steps(update, shares_memory=shares_memory):
        check(schedule)
        whole = 2 * NUMEL  # bytes of weights, low bits or gradients, the smallest parts
        wide = {name for name, b in schedule.buffers.items() if b.tier == "host" and b.nbytes >= whole}
        allowed = ("host/disk_staging/weights/", *(("host/landed_gradients/",) if shares_memory else ()))
        assert not [name for name in wide if not name.startswith(allowed)]


def test_peak_host_memory_of_the_disk_tier_is_a_ring_of_pieces() -> None:
    """Beside weights on their way to the device."""
    for schedule in [*steps("next_forward"), *steps("during_backward")]:
        beside = sum(b.nbytes for b in schedule.buffers.values() if b.name.startswith("host/weight_staging/"))
        assert schedule.peak_nbytes("host") - beside < pieces.SLOTS * (pieces.PIECE_NBYTES + (1 << 20))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_pieces_are_cut_alike_whatever_the_policy(precision: str) -> None:
    """Regions of the disk outlive a policy, and their blocks end where pieces do; so do the blocks of the norm."""
    numerics, trained = Numerics(precision), layout_of(large().units[1]).trained  # type: ignore[arg-type]
    cuts = {
        tuple(pieces.disk_pieces(trained, numerics, Policy(update=update, shard_nbytes=nbytes)))  # type: ignore[arg-type]
        for update in ("next_forward", "during_backward")
        for nbytes in (1000, 1 << 24)
    }
    (cut,) = cuts
    assert cut[0][0] == 0
    assert cut[-1][1] == trained.own_size
    assert all(stop == start for (_, stop), (start, _) in pairwise(cut))
    assert all(start % NORM_BLOCK == 0 for start, _ in cut)
    huge = layout_of(UnitSpec("x", "layer", (ParamSpec("x", (1 << 17, 1 << 15)),)))
    assert len(pieces.disk_pieces(huge, numerics, Policy())) <= pieces.MOST_PIECES + 1


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 400), marks=pytest.mark.slow)])
def test_schedules_of_many_pieces_pass_the_checker_without_races(seeds: range) -> None:
    """What is on the disk is read and written once; foretold bytes are those of the buffers."""
    most = 0
    for seed in seeds:
        draw = random.Random(seed)
        model, numerics, policy, work = random_case(draw)
        if draw.random() < 0.5:
            model = by_another_optimizer(draw, model)
        found = [build_step(model, numerics, policy, work)]
        if policy.update == "next_forward":
            found += [build_step(model, numerics, policy, work, "all"), build_flush(model, numerics, policy)]
        for schedule in found:
            check(schedule)
            run_idle(schedule, SimDevice(seed))
            moved = Counter[tuple[str, str]]()
            for op in schedule.ops:
                for access in (*op.reads, *op.writes) if op.kind in ("READ", "WRITE") else ():
                    moved[op.kind, access.buffer] += access.stop - access.start
                most = max(most, op.shard if op.kind == "UPDATE" else 0)
            for (kind, name), nbytes in moved.items():
                buffer = schedule.buffers[name]
                if buffer.tier == "disk" and not (buffer.part is Part.WEIGHTS and kind == "READ"):
                    assert nbytes == buffer.nbytes - buffer.frozen_nbytes * (buffer.part is Part.WEIGHTS)
        updating = found[1 % len(found)]
        ring = sum(b.nbytes for b in updating.buffers.values() if b.use is Use.DISK_STAGING)
        own = (b for b in updating.buffers.values() if b.tier == "host" and (b.is_state or b.use in HELD))
        assert ring + sum(b.nbytes for b in own) == state_nbytes(model, numerics, policy)["host"]
    assert most >= 11


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
def test_removing_any_single_wait_is_detected(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers in four pieces, which pass through three slots."""
    monkeypatch.setattr(pieces, "NORM_BLOCK", 96)
    policy = Policy(placements=(ON_DISK,) * 3, update=update, shard_nbytes=200)  # type: ignore[arg-type]
    pending = "none" if update == "during_backward" else "all"
    schedule = build_step(small_spec(1), Numerics("bf16"), policy, Work((4,)), pending)  # type: ignore[arg-type]
    assert surviving_waits(schedule, range(1)) == []


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", ["READ", "UPDATE", "WRITE"])
def test_a_piece_left_out_is_refused(kind: str) -> None:
    policy = Policy(placements=(ON_DISK,) * 5)
    schedule = build_step(small_spec(3), Numerics("bf16"), policy, Work((4,)), "all")
    lost = next(op for op in schedule.ops if op.kind == kind and (op.unit, op.shard) == (2, 3))
    ops = tuple(op for op in schedule.ops if op is not lost)
    with pytest.raises(ScheduleError, match=r"but finds|is left with .*old"):
        check(replace(schedule, ops=ops, waits=((),) * len(ops)))


@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
def test_a_plan_with_few_pieces_takes_as_long_as_the_step(update: str) -> None:
    """And in as much memory. It reads up to three quarters of a unit further ahead, which is little of many."""
    policy = Policy(placements=(Placement("host", "disk", "disk", "disk"),) * 26, update=update)  # type: ignore[arg-type]
    pending = "none" if update == "during_backward" else "all"
    whole, few = (
        build_step(large(24), Numerics("bf16"), policy, Work((4,)), pending, most_pieces=most)  # type: ignore[arg-type]
        for most in (None, 4)
    )
    seconds = {"READ": 1e-9, "WRITE": 1e-9, "GRAD": 1e-10, "FETCH": 1e-10}

    def price(op: Op) -> float:
        if op.kind in ("FORWARD", "BACKWARD", "LOSS"):
            return 0.5
        return 0.4 * op.share if op.kind == "UPDATE" else op.nbytes * seconds.get(op.kind, 0.0)

    few_updates, updates = (sum(op.kind == "UPDATE" for op in step.ops) for step in (few, whole))
    assert 3 * few_updates < updates
    assert 2.5 * len(few.ops) < len(whole.ops), "gradients leave in few pieces anyway"
    assert replay(few, price).seconds == pytest.approx(replay(whole, price).seconds, rel=0.04)
    assert few.arena_nbytes("host") == whole.arena_nbytes("host")
