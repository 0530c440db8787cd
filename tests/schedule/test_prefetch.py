"""One slot and a read-ahead: schedules that are proven, in the bytes that they promise, and quick enough."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.schedule import Op, Schedule, Use, build_forward, build_step, check, replay
from megatrain.schedule.build import Builder
from megatrain.schedule.passes.prefetch import READ_AHEAD, Prefetch, Visit
from megatrain.schedule.passes.weight_slots import ONE_BUFFER
from megatrain.spec import IN_HOST, ModelSpec, Numerics, ParamSpec, Placement, Policy, UnitSpec, WaitFor, Work
from megatrain.spec.layout import layout_of
from megatrain.testing import surviving_waits
from tests.schedule.test_schedule import policies, works
from tests.small import small_spec

LAYER, ENDS = 2 * 3 * 128, 2 * (64 * 8 + 32)
"""Bytes of a layer of `small_spec`, and of the larger of its ends."""
AHEAD = Policy(shard_nbytes=256, wait_for="shard", read_ahead_nbytes=256)


@given(
    policy=policies,
    wait_for=st.sampled_from(["unit", "shard"]),
    ahead=st.sampled_from([1, 300, 500, 1 << 20]),
    rows=st.sampled_from([(), (("graph", "input"), ("drop",)), (("offload",), ("graph",))]),
    work=works,
    layers=st.integers(1, 5),
    tied=st.booleans(),
    pending=st.booleans(),
)
def test_read_ahead_schedules_pass_the_checker(
    policy: Policy,
    wait_for: WaitFor,
    ahead: int,
    rows: tuple[tuple[str, ...], ...],
    work: Work,
    layers: int,
    tied: bool,
    pending: bool,
) -> None:
    of, before = small_spec(layers, tied), "all" if pending and policy.update == "next_forward" else "none"
    one_slot = replace(policy, wait_for=wait_for, read_ahead_nbytes=ahead, activations_by_layer=rows[:layers])  # type: ignore[arg-type]
    step = build_step(of, Numerics(), one_slot, work, before)  # type: ignore[arg-type]
    check(step)
    check(build_forward(of, Numerics(), one_slot, work))
    plain = build_step(of, Numerics(), replace(policy, activations_by_layer=rows[:layers]), work, before)  # type: ignore[arg-type]
    fetched = [{(op.unit, op.nbytes) for op in each.ops if op.kind == "FETCH"} for each in (step, plain)]
    assert {unit for unit, _ in fetched[0]} == {unit for unit, _ in fetched[1]}
    if not policy.shares_memory:
        first, layer, *_, last = (layout_of(unit).size * Numerics().weight_nbytes for unit in of.units)
        ends = first + last if tied else max(first, last)  # a tied head needs both at once
        places = {
            each.name: each.nbytes for each in step.buffers.values() if each.use in (Use.WEIGHT_SLOTS, Use.READ_AHEAD)
        }
        assert places.pop(ONE_BUFFER) == max(layer, ends)
        assert places.pop(READ_AHEAD, 0) <= min(ahead, layer)
        assert not places


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_missing_wait_is_detected(activations: str, micro_batches: int) -> None:
    one_slot = replace(AHEAD, activations=activations)  # type: ignore[arg-type]
    assert surviving_waits(build_step(small_spec(2), Numerics(), one_slot, Work((4,) * micro_batches), "all")) == []


def weights_nbytes(schedule: Schedule) -> int:
    """Device memory that weights pass through."""
    return sum(each.nbytes for each in schedule.buffers.values() if each.use in (Use.WEIGHT_SLOTS, Use.READ_AHEAD))


def test_weights_take_one_unit_and_the_read_ahead() -> None:
    """The largest unit: here the head, which comes into the place of the layers. Without one it has its own."""
    work = Work((4, 4))
    assert weights_nbytes(build_step(small_spec(4), Numerics(), AHEAD, work)) == ENDS + AHEAD.read_ahead_nbytes
    assert (
        weights_nbytes(build_step(small_spec(4), Numerics(), replace(AHEAD, read_ahead_nbytes=0), work))
        == ENDS + 2 * LAYER
    )


@pytest.mark.parametrize("stays", ["prologue", "epilogue"])
@pytest.mark.parametrize("tied", [False, True])
def test_resident_embeddings_and_heads_have_no_place_in_the_ring(stays: str, tied: bool) -> None:
    of = small_spec(3, tied)
    placements = tuple(Placement(weights="device") if unit.kind == stays else IN_HOST for unit in of.units)
    step = build_step(of, Numerics(), replace(AHEAD, placements=placements), Work((4,)))
    check(step)
    first, layer, *_, last = (layout_of(unit).size * Numerics().weight_nbytes for unit in of.units)
    assert step.buffers[ONE_BUFFER].nbytes == max(layer, last if stays == "prologue" else first)
    fetched = [op.unit for op in step.ops if op.kind == "FETCH" and op.shard == 0]
    assert fetched.count(0 if stays == "prologue" else of.epilogue) == 1
    assert stays == "prologue" or fetched.count(0) == 2 + tied  # forward, a tied head, backward


def test_a_read_ahead_is_as_fast_as_two_slots_and_one_slot_is_not() -> None:
    def price(op: Op) -> float:
        return {"FETCH": 1.0, "FORWARD": 3.0, "BACKWARD": 6.0, "PLACE": 0.01}.get(op.kind, 0.0) * op.share

    for micro_batches in (1, 2):
        work = Work((4,) * micro_batches)
        took = {
            name: replay(build_step(small_spec(12), Numerics(), policy, work), price).seconds
            for name, policy in {
                "read-ahead": AHEAD,
                "two slots": replace(AHEAD, read_ahead_nbytes=0),
                "one slot": replace(AHEAD, read_ahead_nbytes=0, weight_slots=1),
                "whole units": replace(AHEAD, wait_for="unit"),
            }.items()
        }
        assert took["read-ahead"] <= 1.05 * took["two slots"], took
        assert took["one slot"] > 1.1 * took["two slots"], took
        assert took["read-ahead"] < took["whole units"], took


@pytest.mark.parametrize("policy", [Policy(shard_nbytes=16), replace(AHEAD, shard_nbytes=16, read_ahead_nbytes=1024)])
def test_placing_fetches_is_linear_in_shards(policy: Policy) -> None:
    """Where nothing is slower than linear, four times the shards take four times the calls of functions."""

    def calls(rows: int) -> int:
        table, head = ParamSpec("embed", (64, 8)), (ParamSpec("norm", (8,)), ParamSpec("head", (64, 8)))
        units = [
            UnitSpec("prologue", "prologue", (table,)),
            *(UnitSpec(f"l{i}", "layer", tuple(ParamSpec(f"l{i}.{k}", (rows, 8)) for k in "abc")) for i in range(3)),
            UnitSpec("epilogue", "epilogue", head),
        ]
        builder = Builder(ModelSpec("wide", tuple(units), 8, 64), Numerics(), policy, Work((4,)), "none", trains=True)
        count = 0

        def counted(*_: object) -> None:
            nonlocal count
            count += 1

        def placed(prefetch: Prefetch, visits: list[Visit]) -> None:
            sys.setprofile(counted)
            honest(prefetch, visits)
            sys.setprofile(None)

        honest = Prefetch.place
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Prefetch, "place", placed)
            builder.step()
        return count

    few, many = calls(32), calls(128)
    assert many < 4 * few
