"""Schedules: what `build` makes is proven by `check`, and what is changed in it is refused with the culprit shown."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.errors import PlanError, ScheduleError
from megatrain.schedule import (
    Op,
    Schedule,
    build_flush,
    build_forward,
    build_step,
    check,
    derive_waits,
    replay,
    show_op,
    show_schedule,
)
from megatrain.schedule.deps import conflicts, unordered
from megatrain.spec import ModelSpec, Numerics, Policy, UnitSpec, Work
from tests.small import small_spec, with_encoder

precisions = st.builds(Numerics, st.sampled_from(["bf16", "fp32"]))
policies = st.builds(
    Policy,
    weight_slots=st.integers(1, 6),
    grad_slots=st.integers(1, 6),
    shard_nbytes=st.sampled_from([1, 100, 300, 1 << 20]),
    activations=st.sampled_from(["keep", "recompute"]),
    update=st.sampled_from(["next_forward", "during_backward"]),
    shares_memory=st.booleans(),
)
works = st.builds(Work, st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple))


def seconds(op: Op) -> float:
    return {"FORWARD": 2.0, "LOSS": 1.0, "BACKWARD": 4.0, "FETCH": 1.0, "GRAD": 0.5, "NORM": 0.1, "UPDATE": 1.0}[
        op.kind
    ]


@given(
    numerics=precisions,
    policy=policies,
    work=works,
    layers=st.integers(1, 6),
    tied=st.booleans(),
    pending=st.booleans(),
    in_round=st.integers(0, 3),
)
def test_every_built_schedule_passes_the_checker(
    numerics: Numerics, policy: Policy, work: Work, layers: int, tied: bool, pending: bool, in_round: int
) -> None:
    of = small_spec(layers, tied)
    policy = replace(policy, micro_batches_per_round=0 if tied else in_round)
    waiting = pending and policy.update == "next_forward"
    check(build_step(of, numerics, policy, work, "all" if waiting else "none"))
    check(build_forward(of, numerics, policy, work))
    if policy.update == "next_forward":
        check(build_flush(of, numerics, policy))


@given(
    numerics=precisions,
    policy=policies,
    work=works,
    tied=st.booleans(),
    pending=st.booleans(),
    in_round=st.integers(0, 3),
    trained=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    keep=st.sampled_from([(), (("offload",),), (("drop",), ("offload", "input"))]),
    reading=st.sampled_from([{}, {"wait_for": "shard"}, {"wait_for": "shard", "read_ahead_nbytes": 200}]),
    taps=st.booleans(),
)
def test_schedules_with_an_encoder_pass_the_checker_and_use_it_for_images_alone(
    numerics: Numerics,
    policy: Policy,
    work: Work,
    tied: bool,
    pending: bool,
    in_round: int,
    trained: tuple[bool, bool, bool],
    keep: Any,
    reading: Any,
    taps: bool,
) -> None:
    of = with_encoder(small_spec(3, tied), 2, trained, taps=taps)
    policy = replace(policy, micro_batches_per_round=0 if tied else in_round, activations_by_layer=keep, **reading)
    waiting: Any = "all" if pending and policy.update == "next_forward" else "none"
    images = replace(work, beyond_text=True, values_per_token=5.0)
    step, forward = build_step(of, numerics, policy, images, waiting), build_forward(of, numerics, policy, images)
    calls = Counter((op.kind, op.unit) for op in step.ops if op.shard <= 0 and op.kind in ("FORWARD", "BACKWARD"))
    for unit in of.encoder:
        assert calls["FORWARD", unit] == work.micro_batches
        assert calls["BACKWARD", unit] == work.micro_batches * of.has_backward(unit)
    text = build_step(of, numerics, policy, work, waiting), build_forward(of, numerics, policy, work)
    for schedule in (step, forward, *text):
        check(schedule)
    for schedule in text:
        assert not {op.unit for op in schedule.ops if op.kind in ("FORWARD", "FETCH")} & {*of.encoder}
    normed = {op.unit for op in text[0].ops if op.kind == "NORM"}
    assert normed & {*of.encoder} == {unit for unit in of.encoder if of.units[unit].trains}, "which has no gradient"


@given(numerics=precisions, policy=policies, work=works, tied=st.booleans())
def test_weights_cross_twice_and_gradients_once_for_any_micro_batches(
    numerics: Numerics, policy: Policy, work: Work, tied: bool
) -> None:
    ops = build_step(small_spec(4, tied), numerics, policy, work).ops
    of = small_spec(4, tied)
    for unit, spec in enumerate(of.units):
        fetched = sum(op.nbytes for op in ops if op.kind == "FETCH" and op.unit == unit)
        assert fetched <= 2 * numerics.weight_nbytes * (spec.numel + 32 * len(spec.params))
        left = [op for op in ops if op.kind == "GRAD" and op.unit == unit]
        direct = policy.shares_memory and not left
        assert direct or sum(op.nbytes for op in left) >= numerics.grad_nbytes * spec.numel
        assert sum(op.kind == "BACKWARD" and op.unit == unit for op in ops) == (
            0 if spec.kind == "epilogue" else work.micro_batches
        )


def test_the_last_layers_are_not_refetched_for_backward() -> None:
    ops = build_step(small_spec(6), Numerics(), Policy(weight_slots=2), Work((4,))).ops
    fetches = [op.unit for op in ops if op.kind == "FETCH"]
    assert fetches == [0, 1, 2, 3, 4, 5, 6, 7, 0, 4, 3, 2, 1] or sorted(fetches) == sorted(
        [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7]
    )


def test_the_forward_takes_the_micro_batches_in_reverse() -> None:
    """So that what was left last is needed first, and a loss function is called in their order."""
    ops = build_step(small_spec(), Numerics(), Policy(), Work((4, 4, 4))).ops
    for kind, order in (("FORWARD", [2, 1, 0]), ("BACKWARD", [0, 1, 2])):
        assert [op.micro for op in ops if op.kind == kind and op.unit == 2] == order
    assert [op.micro for op in ops if op.kind == "LOSS"] == [0, 1, 2]
    seen = build_forward(small_spec(), Numerics(), Policy(), Work((4, 4))).ops
    assert [op.micro for op in seen if op.kind == "LOSS"] == [0, 1]


def test_every_fetch_hides_behind_compute_when_compute_is_slow() -> None:
    schedule = build_step(small_spec(8), Numerics(), Policy(weight_slots=2), Work((4, 4)), "all")
    timeline = replay(schedule, lambda op: {"FORWARD": 4.0, "LOSS": 4.0, "BACKWARD": 9.0}.get(op.kind, 1.0))
    fill = 2.0  # the first update and the first fetch
    turns = 2.0  # the top layer's sum follows the head's in its memory, the prologue's that of the lowest layer
    assert timeline.stall_seconds() == pytest.approx(fill + turns + 2.0)  # and the last gradient with its norm
    assert timeline.utilisation("compute") > 0.95


def test_one_slot_cannot_overlap_and_two_can() -> None:
    one, two = (
        replay(build_step(small_spec(8), Numerics(), Policy(weight_slots=n), Work((4,))), seconds).seconds
        for n in (1, 2)
    )
    assert two < one


def test_replayed_peaks_count_arenas_and_live_transients() -> None:
    schedule = build_step(small_spec(), Numerics(), Policy(), Work((16,)))
    timeline = replay(schedule, seconds)
    assert timeline.peak_nbytes("device") >= schedule.arena_nbytes("device") + 4 * 16 * 8 * 2  # one input per layer
    assert timeline.peak_nbytes("host") == schedule.arena_nbytes("host")
    assert schedule.peak_nbytes("device") == timeline.peak_nbytes("device")
    assert "compute" in timeline.show()


def test_the_text_form_of_an_op_is_one_line() -> None:
    schedule = build_step(small_spec(), Numerics(), Policy(), Work((4,)))
    text = show_schedule(schedule)
    assert len(text.splitlines()) == len(schedule.ops)
    assert show_op(schedule.ops[0]).startswith("fetch    FETCH u0 s0")
    assert re.search(r"BACKWARD u1 m0 .* device/weight_slots/layer\d\[0:\d+\]=w1", text)


# Refusals -------------------------------------------------------------------------------------------------------------


def built(**changes: object) -> Schedule:
    return build_step(small_spec(), Numerics(), Policy(shard_nbytes=300, **changes), Work((4, 4)), "all")  # type: ignore[arg-type]


def changed(schedule: Schedule, ops: list[Op]) -> Schedule:
    return derive_waits(replace(schedule, ops=tuple(ops)))


@pytest.mark.parametrize("kind", ["FETCH", "FORWARD", "LOSS", "BACKWARD", "GRAD", "NORM", "UPDATE"])
def test_removing_any_op_is_refused(kind: str) -> None:
    schedule = built()
    for index, op in enumerate(schedule.ops):
        if op.kind == kind:
            with pytest.raises(ScheduleError):
                check(changed(schedule, [*schedule.ops[:index], *schedule.ops[index + 1 :]]))


@pytest.mark.parametrize("kind", ["GRAD", "NORM", "UPDATE"])
def test_gradients_transferred_or_used_twice_are_refused(kind: str) -> None:
    schedule = built()
    index = next(i for i, op in enumerate(schedule.ops) if op.kind == kind)
    with pytest.raises(ScheduleError, match=r"twice|2 times|finds"):
        check(changed(schedule, [*schedule.ops[: index + 1], *schedule.ops[index:]]))


def test_a_slot_overwritten_too_early_is_refused_with_the_culprit_marked() -> None:
    schedule = built()
    fetch = max(i for i, op in enumerate(schedule.ops) if op.kind == "FETCH" and op.unit == 3 and op.shard == 0)
    early = [*schedule.ops[:fetch], *schedule.ops[fetch + 1 :]]
    early.insert(next(i for i, op in enumerate(early) if op.kind == "FORWARD" and op.unit == 1), schedule.ops[fetch])
    with pytest.raises(ScheduleError, match=r"FORWARD u1 m1\): reads w1 .* but finds w3") as caught:
        check(changed(schedule, early))
    assert "^^^^" in str(caught.value)


def test_a_tier_over_its_capacity_is_refused() -> None:
    schedule = built()
    peak = schedule.peak_nbytes("device")
    check(schedule, {"device": peak})
    with pytest.raises(ScheduleError, match="device memory peaks"):
        check(schedule, {"device": peak - 1})


def test_out_of_bounds_and_unknown_buffers_are_refused() -> None:
    schedule = built()
    index = next(i for i, op in enumerate(schedule.ops) if op.kind == "FETCH")
    op = schedule.ops[index]
    for broken in (op.reads[0]._replace(stop=1 << 40), op.reads[0]._replace(buffer="host/nowhere")):
        ops = list(schedule.ops)
        ops[index] = op._replace(reads=(broken,))
        with pytest.raises(ScheduleError, match=r"out of bounds|not a buffer"):
            check(changed(schedule, ops))


# Waits ----------------------------------------------------------------------------------------------------------------


@given(policy=policies, work=works, tied=st.booleans())
def test_derived_waits_order_every_conflict_and_none_is_redundant(policy: Policy, work: Work, tied: bool) -> None:
    schedule = build_step(small_spec(3, tied), Numerics(), policy, work)
    assert not list(unordered(schedule))
    for index, waits in enumerate(schedule.waits):
        for wait in waits:
            fewer = list(schedule.waits)
            fewer[index] = tuple(w for w in waits if w != wait)
            assert list(unordered(replace(schedule, waits=tuple(fewer)))), f"op {index} need not wait for {wait}"


@settings(max_examples=settings.default.max_examples // 2)
@given(policy=policies, work=works, tied=st.booleans())
def test_conflicts_equal_a_brute_force_definition(policy: Policy, work: Work, tied: bool) -> None:
    """With the order inside each stream, what `conflicts` reports implies what all conflicting pairs do."""
    ops = build_step(small_spec(2, tied), Numerics(), policy, work).ops
    before = [{i for i in range(j) if ops[i].stream == ops[j].stream} for j in range(len(ops))]
    quick = _closure([{*a} - {-1} | b for a, b in zip(conflicts(ops), before, strict=True)])
    slow = _closure([{i for i in range(j) if _conflict(ops[i], ops[j])} | before[j] for j in range(len(ops))])
    assert quick == slow


def _conflict(left: Op, right: Op) -> bool:
    return any(
        a.overlaps(b)
        for mine, theirs in ((left.writes, right.writes), (left.writes, right.reads), (left.reads, right.writes))
        for a in mine
        for b in theirs
    )


def _closure(direct: list[set[int]]) -> list[set[int]]:
    result: list[set[int]] = []
    for before in direct:
        result.append(before.union(*(result[i] for i in before)))
    return result


def test_fetches_wait_for_updates_and_updates_never_for_later_units() -> None:
    """The host stream works through the updates in unit order while the first units already compute."""
    schedule = build_step(small_spec(6), Numerics(), Policy(), Work((4,)), "all")
    timeline = replay(schedule, seconds)
    starts = {op.name: start for op, start in zip(schedule.ops, timeline.starts, strict=True)}
    assert starts["FORWARD u1 m0"] < starts["UPDATE u6"]
    fetches = [op.unit for op in schedule.ops if op.kind == "FETCH"]
    forward = fetches[: fetches.index(7) + 1]
    assert all(left <= right for left, right in pairwise(forward)), "a late unit's fetch must not block earlier ones"


# Values ---------------------------------------------------------------------------------------------------------------


def test_invalid_values_are_refused_on_construction() -> None:
    with pytest.raises(PlanError, match="prologue, layers and an epilogue"):
        ModelSpec("x", (UnitSpec("a", "layer", ()),), 1, 1)
    with pytest.raises(PlanError, match="at least one token"):
        Work(())
    with pytest.raises(PlanError, match="less than precision fp32 promises"):
        Numerics("fp32", grad_precision="bf16")
    with pytest.raises(PlanError, match=r"numerics\.precision"):
        Numerics("int8")  # type: ignore[arg-type]
    for field, value in {"activations": "drop", "update": "now", "shard_nbytes": 0}.items():
        with pytest.raises(PlanError, match=rf"policy\.{field}"):
            Policy(**{field: value})  # type: ignore[arg-type]
