"""What is left of each forward: any mixture is proven, takes the memory that it is meant to, and computes no more."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import comb
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import PlanError, ScheduleError
from megatrain.plan import op_seconds
from megatrain.schedule import Op, Schedule, Use, build_forward, build_step, check, derive_waits, replay
from megatrain.schedule.passes.recompute import ALIGNMENT_NBYTES, passes
from megatrain.spec import NOT_OFFLOADED, Hardware, Keep, ModelSpec, Numerics, Policy, SideValue, UnitSpec, Work
from megatrain.spec.layer_profile import Outputs
from megatrain.testing import SimDevice, run_idle, surviving_waits
from tests.schedule.test_disk_staging import random_case, schedules
from tests.small import small_spec, some_sides, with_sides

KEEPS: tuple[Keep, ...] = get_args(Keep)
MIXED: tuple[tuple[Keep, ...], ...] = (("offload",), ("drop", "input"), ("drop", "offload", "graph"), ("input", "drop"))
INTERVAL = (("input",), ("drop",), ("drop",), ("drop",))


def random_mixture(seed: int) -> tuple[ModelSpec, Numerics, Policy, Work]:
    """A case of state in any tier, with any rows on top, and side values in every second."""
    draw = random.Random(seed)
    model, numerics, policy, work = random_case(draw)
    model = some_sides(model, draw) if seed % 2 and len(model.layers) > 1 else model
    rows = [
        tuple(draw.choice(KEEPS) for _ in range(draw.randint(1, work.micro_batches)))
        for _ in range(draw.randint(1, len(model.layers)))
    ]
    changes = {"offload_slots": draw.randint(1, 4), "recompute_slots": draw.choice([None, 1, 2, 3])}
    return model, numerics, replace(policy, activations_by_layer=tuple(rows), **changes), work  # type: ignore[arg-type]


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 300), marks=pytest.mark.slow)])
def test_three_hundred_mixed_policies_on_any_tier_pass_the_checker(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        model, numerics, policy, work = random_mixture(seed)
        for schedule in schedules(model, numerics, policy, work):
            check(schedule)
            seen.update(op.kind for op in schedule.ops)
        run_idle(schedule, SimDevice(seed))
    assert min(seen["OFFLOAD"], seen["RELOAD"], seen["READ"], seen["GRAD"]) > len(seeds) // 3


@given(rows=st.sampled_from(["keep", "recompute"]), layers=st.integers(1, 4), micros=st.integers(1, 3))
def test_identical_rows_equal_the_uniform_plan(rows: str, layers: int, micros: int) -> None:
    keep: Keep = "graph" if rows == "keep" else "input"
    model, work = small_spec(layers), Work((4,) * micros)
    plain = build_step(model, Numerics(), Policy(activations=rows), work)  # type: ignore[arg-type]
    assert build_step(model, Numerics(), Policy(activations_by_layer=((keep,),)), work) == plain
    assert build_step(model, Numerics(), Policy(activations_by_layer=((keep,) * micros,) * layers), work) == plain


def test_activation_rows_restart_per_micro_batch() -> None:
    policy = Policy(activations_by_layer=(("input", "drop"), ("graph",)))
    found = [[policy.keep(layer, micro) for micro in range(3)] for layer in range(3)]
    assert found == [["input", "drop", "input"], ["graph"] * 3, ["input", "drop", "input"]]


def test_shared_memory_devices_offload_nothing() -> None:
    rows = (("offload",), ("graph", "offload"))
    of, work = small_spec(4), Work((4, 4))
    kept = tuple(tuple("input" if keep == "offload" else keep for keep in row) for row in rows)
    plain = build_step(of, Numerics(), Policy(shares_memory=True, activations_by_layer=kept), work)  # type: ignore[arg-type]
    assert build_step(of, Numerics(), Policy(shares_memory=True, activations_by_layer=rows), work) == plain  # type: ignore[arg-type]


# Dropped inputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("dropped", [0, 1, 2, 3, 7, 20, 60])
def test_dropped_inputs_are_recomputed_in_the_fewest_steps(dropped: int, slots: int) -> None:
    """By the closed form of Griewank and Walther; and no pass starts from what is not there or takes one slot more."""
    held, steps = {0}, 0
    for boundary in range(dropped, 0, -1):
        for start, stop in passes(dropped, slots)[boundary - 1]:
            assert start in held
            assert stop > start
            held.add(stop)
            steps += stop - start
        assert len(held) - 1 <= slots
        held.remove(boundary)
    repeats = next(r for r in range(dropped + 2) if dropped + 1 <= comb(slots + r, r))
    assert steps == (dropped + 1) * repeats - (comb(slots + repeats, repeats - 1) if repeats else 0)


def test_recomputation_steps_equal_exhaustive_search() -> None:
    def least(there: frozenset[int], wanted: int, slots: int) -> float:
        """Steps until boundaries wanted, ..., 1 have been there in turn, trying every pass and nothing clever."""
        if not wanted:
            return 0
        if wanted in there:
            return least(there - {wanted}, wanted - 1, slots)
        if len(there) > slots:
            return float("inf")
        pairs = [(start, stop) for start in there for stop in range(start + 1, wanted + 1) if stop not in there]
        return min((stop - start + least(there | {stop}, wanted, slots) for start, stop in pairs), default=float("inf"))

    for dropped in range(1, 6):
        for slots in range(1, 4):
            steps = sum(stop - start for each in passes(dropped, slots) for start, stop in each)
            assert steps == least(frozenset({0}), dropped, slots)


def forwards(schedule: Schedule) -> int:
    return sum(op.kind == "FORWARD" for op in schedule.ops)


def test_layers_are_recomputed_more_often_with_fewer_slots() -> None:
    of, work = small_spec(8), Work((4, 4))
    plain = build_step(of, Numerics(), Policy(), work)
    roomy = build_step(of, Numerics(), Policy(activations_by_layer=INTERVAL), work)
    tight = build_step(of, Numerics(), Policy(activations_by_layer=INTERVAL, recompute_slots=1), work)
    assert forwards(roomy) - forwards(plain) == 2 * 2 * 3
    assert forwards(tight) - forwards(plain) == 2 * 2 * (3 + 2 + 1)
    fetched = Counter(op.unit for op in roomy.ops if op.kind == "FETCH")
    assert max(fetched.values()) <= 3, "whatever the number of micro-batches"


# Memory ---------------------------------------------------------------------------------------------------------------

BOUNDARY = 16 * 8 * 2
"""Bytes of the input of a layer: 16 tokens, 8 wide, bfloat16."""


def inputs_nbytes(schedule: Schedule) -> int:
    """The largest sum of inputs of layers, kept, computed again and in slots, in schedule order."""
    return peak_of(schedule, Use.INPUTS, Use.RECOMPUTED_INPUTS, Use.OFFLOAD_SLOTS)


def peak_of(schedule: Schedule, *uses: Use) -> int:
    """The largest sum of the device's buffers of these uses, in schedule order."""
    buffers = {name: buffer for name, buffer in schedule.buffers.items() if buffer.use in uses}
    return replace(schedule, buffers=schedule.buffers | _emptied(schedule, set(buffers))).peak_nbytes("device")


def _emptied(schedule: Schedule, but: set[str]) -> dict[str, object]:
    return {name: buffer._replace(nbytes=0) for name, buffer in schedule.buffers.items() if name not in but}


def deep(rows: tuple[tuple[Keep, ...], ...] = (), micros: int = 2, **changes: int) -> Schedule:
    return build_step(
        small_spec(12), Numerics(), Policy(activations_by_layer=rows, **changes), Work((16,) * micros), "all"
    )  # type: ignore[arg-type]


def test_the_device_holds_the_planned_inputs() -> None:
    """In boundaries, over 12 layers and 2 micro-batches; the one that is being made counts."""
    moving = 2 + 1  # of each micro-batch one between two layers, and one being made
    assert inputs_nbytes(deep()) == (12 * 2 + 2) * BOUNDARY  # and the head's
    assert inputs_nbytes(deep((("offload",),))) == (2 + moving) * BOUNDARY  # two slots
    assert inputs_nbytes(deep((("offload",),), offload_slots=3)) == (3 + moving) * BOUNDARY
    # Every fourth is kept; of the three stretches of three in between, one at a time is there again, or its top alone.
    assert inputs_nbytes(deep(INTERVAL)) == (3 * 2 + 3 * 2) * BOUNDARY
    assert inputs_nbytes(deep(INTERVAL, recompute_slots=1)) == (3 * 2 + moving) * BOUNDARY
    assert inputs_nbytes(deep((("drop",),), recompute_slots=2)) == (2 + 2 * 2 + 1) * BOUNDARY


def test_a_representative_micro_batch_has_the_bytes_of_all_except_slots() -> None:
    of, policy = small_spec(12), Policy(activations_by_layer=(("offload",),))
    three, one = (build_step(of, Numerics(), policy, Work((16, 16), repeats=repeats)) for repeats in (3, 1))
    for schedule, times in ((three, 3), (one, 1)):
        assert inputs_nbytes(schedule) == (2 + 3 * times) * BOUNDARY
        assert schedule.peak_nbytes("host") - build_step(of, Numerics(), Policy(), Work((16, 16))).peak_nbytes(
            "host"
        ) == (22 * times * BOUNDARY)
    assert sum(op.nbytes for op in three.ops if op.kind == "RELOAD") == 22 * 3 * BOUNDARY


def test_host_memory_holds_only_offloaded_data() -> None:
    """What is still in its slot when it is needed neither leaves nor comes back."""
    away, plain = deep((("offload",),)), deep()
    table = [buffer for buffer in away.buffers.values() if buffer.use is Use.OFFLOADED_INPUTS]
    assert len(table) == 12 * 2 - 2
    assert away.peak_nbytes("host") - plain.peak_nbytes("host") == len(table) * BOUNDARY
    copies = Counter(op.kind for op in away.ops)
    assert copies["OFFLOAD"] == copies["RELOAD"] == len(table)
    assert [op.name for op in away.ops if op.kind == "RELOAD"] == [
        f"RELOAD u{unit} m{micro}" for unit in range(12, 0, -1) for micro in (0, 1)
    ][2:]


def test_offloaded_outputs_use_their_own_slots() -> None:
    """They go and come back with the inputs; those that are in their slot when they are needed stay."""
    of = replace(small_spec(12), units=tuple(_with_outputs(unit) for unit in small_spec(12).units))
    work, slots = Work((16, 16)), 3
    rows = (("offload_chosen",), ("offload_attention", "input"))
    away = build_step(of, Numerics(), Policy(activations_by_layer=rows, offload_slots=slots), work)
    check(away)
    for use, each in (
        (Use.OFFLOADED_INPUTS, [BOUNDARY] * 18),
        (Use.OFFLOADED_OUTPUTS, [100 * 16] * 12 + [10 * 16] * 6),
    ):
        table = [buffer for buffer in away.buffers.values() if buffer.use is use]
        assert len(table) == len(each) - slots
        assert sum(buffer.nbytes for buffer in table) <= sum(each) + ALIGNMENT_NBYTES * len(each)
    copies = Counter(op.kind for op in away.ops)
    assert copies["OFFLOAD"] == copies["RELOAD"] == 2 * (18 - slots)
    own = [buffer.nbytes for buffer in away.buffers.values() if buffer.use is Use.OFFLOAD_SLOTS]
    assert sorted(own) == [BOUNDARY] * slots + [1600 + ALIGNMENT_NBYTES] * slots


def test_what_waits_on_the_disk_takes_a_ring_of_host_memory() -> None:
    """Of any number of inputs, at most the slots' worth is in host memory; the rest is on the disk, once."""
    away, plain = deep((("disk",),), disk_staging_slots=3), deep()
    check(away)
    assert away.peak_nbytes("host") - plain.peak_nbytes("host") == 3 * BOUNDARY
    left, waits = 12 * 2 - 2, 12 * 2 - 2 - 3  # those in a slot of the device, and of the host, stay where they are
    assert away.arena_nbytes("disk") == waits * BOUNDARY
    copies = Counter(op.kind for op in away.ops)
    assert copies["OFFLOAD"] == copies["RELOAD"] == left
    assert copies["WRITE"] == copies["READ"] == waits
    assert {buffer.use for buffer in away.buffers.values() if buffer.tier == "disk"} == {Use.OFFLOADED_INPUTS}


def test_rows_say_which_inputs_wait_on_the_disk() -> None:
    """By layer and micro-batch; rounds use the same places again; dropped inputs are recomputed from the disk."""
    rows: tuple[tuple[Keep, ...], ...] = (("disk", "offload"), ("drop",), ("drop",), ("input", "disk"))
    away = deep(rows, micros=4, micro_batches_per_round=2)
    check(away)
    places = {buffer.name for buffer in away.buffers.values() if buffer.tier == "disk"}
    assert places <= {f"disk/offloaded_inputs/{unit}.{unit % 4 == 0:d}" for unit in (1, 4, 5, 8, 9, 12)}
    assert places >= {"disk/offloaded_inputs/1.0", "disk/offloaded_inputs/4.1"}, "others may stay in slots"
    written = Counter((op.unit, op.micro) for op in away.ops if op.kind == "WRITE")
    assert set(written.values()) == {1}
    assert {micro for unit, micro in written if unit == 1} == {0, 2}
    assert {micro for unit, micro in written if unit == 4} == {1, 3}


def test_a_device_in_host_memory_writes_from_where_it_computes() -> None:
    of = replace(small_spec(12), units=tuple(_with_outputs(unit) for unit in small_spec(12).units))
    policy = Policy(shares_memory=True, activations_by_layer=(("disk",),))
    away = build_step(of, Numerics(), policy, Work((16, 16)))
    check(away)
    copies = Counter(op.kind for op in away.ops)
    assert not copies["OFFLOAD"] + copies["RELOAD"]
    assert copies["WRITE"] == copies["READ"] == 12 * 2 - policy.disk_staging_slots
    assert inputs_nbytes(away) < 6 * BOUNDARY < inputs_nbytes(deep())


def _with_outputs(unit: UnitSpec) -> UnitSpec:
    outputs = Outputs(chosen_nbytes=100.0, attention_nbytes=10.0)
    return replace(unit, profile=replace(unit.profile, outputs=outputs)) if unit.kind == "layer" else unit


# Side values ----------------------------------------------------------------------------------------------------------

AWAY = Policy(activations_by_layer=(("offload",),), offload_slots=2)


def of_use(schedule: Schedule, *uses: Use) -> list[int]:
    return [buffer.nbytes for buffer in schedule.buffers.values() if buffer.use in uses]


def copies(schedule: Schedule) -> Counter[tuple[str, str]]:
    """(kind, letter of the content) -> number."""
    moved = [op for op in schedule.ops if op.kind in ("OFFLOAD", "RELOAD")]
    return Counter((op.kind, str(op.reads[0].content)[0]) for op in moved)


def test_side_values_are_offloaded_with_the_inputs_of_layers() -> None:
    """Keys, say: of every micro-batch on the device, or in slots, as are the sums of their gradients: two that an op
    reads, and one that is filled meanwhile."""
    of, work = with_sides(small_spec(12), SideValue(4, (6, 8, 9))), Work((16,) * 5)
    here, away = (build_step(of, Numerics(), policy, work) for policy in (Policy(), AWAY))
    for schedule in (here, away):
        check(schedule)
    assert of_use(here, Use.SIDE_VALUES) == of_use(here, Use.SIDE_GRADIENTS) == [BOUNDARY] * 5
    assert not of_use(away, Use.SIDE_VALUES, Use.SIDE_GRADIENTS)
    slots = [name for name in away.buffers if name.startswith("device/offload_slots/sides/")]
    assert [away.buffers[name].nbytes for name in slots] == [BOUNDARY] * 3
    sides = (Use.SIDE_VALUES, Use.SIDE_GRADIENTS, Use.OFFLOAD_SLOTS)
    assert [peak_of(here, *sides), peak_of(away, *sides)] == [2 * 5 * BOUNDARY, (3 + 2) * BOUNDARY]
    assert copies(away)["OFFLOAD", "s"] == 5, "a value leaves once"
    assert copies(away)["RELOAD", "s"] > 3 * 5, "and comes back for those that read it"
    assert 2 * 5 < copies(away)["RELOAD", "t"] == copies(away)["OFFLOAD", "t"] <= 3 * 5
    assert not copies(build_step(of, Numerics(), AWAY, Work((16,))))["OFFLOAD", "s"], "there is a slot for it"


def test_a_hidden_state_that_later_units_read_is_kept_once() -> None:
    """As the input of the next layer, wherever that is."""
    of = with_sides(small_spec(12), SideValue(4, (8, 13), is_hidden=True))
    without, work = small_spec(12), Work((16,) * 3)
    for keep in KEEPS:
        policy = Policy(activations_by_layer=((keep,),))
        schedule, plain = (build_step(model, Numerics(), policy, work) for model in (of, without))
        check(schedule)
        assert not of_use(schedule, Use.SIDE_VALUES), keep
        more = 3 if keep == "drop" or keep in NOT_OFFLOADED else 0  # a slot, and two for sums of gradients
        assert inputs_nbytes(schedule) - inputs_nbytes(plain) <= more * BOUNDARY, keep
    loss = build_forward(of, Numerics(), AWAY, work)
    check(loss)
    assert not of_use(loss, Use.SIDE_VALUES, Use.OFFLOAD_SLOTS), "only the loss is computed"


def test_what_a_kept_graph_holds_stays_on_the_device() -> None:
    """A graph refers to the values that its layer was given."""
    rows = (("offload",), ("offload",), ("offload",), ("graph", "offload"))
    of = with_sides(small_spec(4), SideValue(1, (4,)), SideValue(1, (4,), is_hidden=True))
    schedule = build_step(of, Numerics(), Policy(activations_by_layer=rows), Work((16,) * 4))
    check(schedule)
    for prefix in ("device/side_values/0.", "device/side_gradients/0.", "device/inputs/2."):
        lives = {name: end for name, (_, end) in schedule.lifetimes.items() if name.startswith(prefix)}
        backward = [name for name, end in lives.items() if schedule.ops[end].kind == "BACKWARD"]
        assert backward == [f"{prefix}2", f"{prefix}0"] or sorted(backward) == [f"{prefix}0", f"{prefix}2"]


def test_an_op_has_a_slot_for_each_value_that_it_reads() -> None:
    """And no more than the policy says if that is enough."""
    of = with_sides(small_spec(6), *(SideValue(unit, (5, 6), is_hidden=unit == 3) for unit in (1, 2, 2, 3)))
    schedule = build_step(of, Numerics(), replace(AWAY, offload_slots=1), Work((16, 16)))
    check(schedule)
    slots = Counter(name.rpartition("/")[0] for name in schedule.buffers if "offload_slots" in name)
    assert slots == {"device/offload_slots": 2, "device/offload_slots/sides": 3 + 4}


# Time -----------------------------------------------------------------------------------------------------------------


def test_copies_of_inputs_hide_behind_compute_and_come_back_just_in_time() -> None:
    def seconds(op: Op) -> float:
        return {"FORWARD": 2.0, "LOSS": 2.0, "BACKWARD": 4.0, "OFFLOAD": 1.0, "RELOAD": 1.0}.get(op.kind, 0.01)

    away, plain = replay(deep((("offload",),)), seconds), replay(deep(), seconds)
    assert away.seconds == pytest.approx(plain.seconds, abs=0.2)
    for stream in ("fetch", "grad"):  # one way of the bus for whatever takes it
        assert away.busy_seconds(stream) == pytest.approx(22.0 + plain.busy_seconds(stream))  # type: ignore[arg-type]


def test_each_bus_direction_carries_one_copy_at_a_time() -> None:
    """Weights and inputs on their way to the device, gradients and inputs on their way from it."""
    away = replay(deep((("offload",),)), lambda op: 1.0)
    for kinds in (("FETCH", "RELOAD"), ("GRAD", "OFFLOAD")):
        times = [
            (start, end)
            for op, start, end in zip(away.schedule.ops, away.starts, away.ends, strict=True)
            if op.kind in kinds
        ]
        assert len({op.stream for op in away.schedule.ops if op.kind in kinds}) == 1
        assert all(start >= end for (_, end), (start, _) in pairwise(sorted(times)))


def test_input_copies_cost_bytes_over_bandwidth() -> None:
    machine = Hardware("m", 1 << 30, 1 << 30, fetch_bandwidth=100.0, grad_bandwidth=50.0, flops=1e9, host_bandwidth=1e9)
    policy = Policy(activations_by_layer=(("offload",),))
    of, work = small_spec(4), Work((16,))
    price = op_seconds(of, Numerics(), policy, work, machine)
    found = {op.kind: price(op) for op in build_step(of, Numerics(), policy, work).ops}
    assert (found["RELOAD"], found["OFFLOAD"]) == (BOUNDARY / 100, BOUNDARY / 50)


# Refusals -------------------------------------------------------------------------------------------------------------


def mixed() -> Schedule:
    policy = Policy(shard_nbytes=1 << 20, activations_by_layer=MIXED, recompute_slots=1)
    return build_step(small_spec(8), Numerics(), policy, Work((4, 4, 4)), "all")


@pytest.mark.parametrize("kind", ["OFFLOAD", "RELOAD", "FORWARD"])
def test_removing_any_op_of_a_mixed_policy_is_refused(kind: str) -> None:
    schedule = mixed()
    chosen = [index for index, op in enumerate(schedule.ops) if op.kind == kind]
    assert len(chosen) >= 5
    for index in chosen:
        fewer = (*schedule.ops[:index], *schedule.ops[index + 1 :])
        with pytest.raises(ScheduleError, match=r"reads [ha]\d.* but finds"):
            check(derive_waits(replace(schedule, ops=fewer)))


def test_removing_any_wait_of_a_mixed_policy_is_a_race() -> None:
    schedule = mixed()
    assert {schedule.ops[wait].kind for waits in schedule.waits for wait in waits} >= {"OFFLOAD", "RELOAD"}
    assert surviving_waits(schedule, range(1)) == []


def test_impossible_rows_are_refused() -> None:
    for rows in (((),), (("input",), ("forget",)), (("input", "keep"),)):
        with pytest.raises(PlanError, match=r"policy\.activations_by_layer\[\d\].*; use .*graph, chosen") as caught:
            Policy(activations_by_layer=rows)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    for field in ("offload_slots", "recompute_slots"):
        with pytest.raises(PlanError, match=rf"policy\.{field}"):
            Policy(**{field: 0})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="has rows for 5 layers, but the model has 4"):
        build_step(small_spec(4), Numerics(), Policy(activations_by_layer=(("input",),) * 5), Work((4,)))
