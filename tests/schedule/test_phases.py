"""Calls in phases: proven like every schedule, with gates that are waits and nothing more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.plan.cost import op_seconds
from megatrain.schedule import Op, Schedule, build_forward, build_step, calls_in, check, replay, whole
from megatrain.schedule.deps import unordered
from megatrain.spec import Hardware, Numerics, Policy, Work
from megatrain.testing import surviving_waits
from tests.schedule.test_schedule import policies, works
from tests.small import small_spec

SLOW = Hardware("slow", 1 << 40, 1 << 40, fetch_bandwidth=1e3, grad_bandwidth=1e3, flops=1e6, host_bandwidth=1e4)


def gated(policy: Policy) -> Policy:
    return replace(policy, wait_for="shard")


@given(policy=policies, work=works, layers=st.integers(1, 4), tied=st.booleans(), pending=st.booleans())
def test_gated_schedules_pass_the_checker_and_refine_ungated_ones(
    policy: Policy, work: Work, layers: int, tied: bool, pending: bool
) -> None:
    of = small_spec(layers, tied)
    before = "all" if pending and policy.update == "next_forward" else "none"
    plain, cut = (build_step(of, Numerics(), each, work, before) for each in (policy, gated(policy)))
    check(cut)
    check(build_forward(of, Numerics(), gated(policy), work))
    wholes = {places[0]: whole([cut.ops[place] for place in places]) for places in calls_in(cut.ops)}
    calls = [wholes.get(place, op) for place, op in enumerate(cut.ops) if op.stream == "compute" and op.shard < 1]
    assert [described(op) for op in calls] == [described(op) for op in plain.ops if op.stream == "compute"]
    assert sorted(op.name for op in cut.ops if op.stream != "compute") == sorted(
        op.name for op in plain.ops if op.stream != "compute"
    )


def described(op: Op) -> tuple[str, frozenset[object], frozenset[object]]:
    return op.name, frozenset(op.reads), frozenset(op.writes)


@given(policy=policies, work=works, tied=st.booleans())
def test_no_wait_of_a_gate_is_redundant(policy: Policy, work: Work, tied: bool) -> None:
    policy = replace(gated(policy), shard_nbytes=policy.shard_nbytes + 200)
    schedule = build_step(small_spec(1, tied), Numerics(), policy, work)
    for index, waits in enumerate(schedule.waits):
        for wait in waits:
            fewer = list(schedule.waits)
            fewer[index] = tuple(w for w in waits if w != wait)
            assert list(unordered(replace(schedule, waits=tuple(fewer)))), f"op {index} need not wait for {wait}"


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_every_missing_gate_is_detected(activations: str) -> None:
    policy = Policy(shard_nbytes=256, activations=activations, wait_for="shard")  # type: ignore[arg-type]
    assert surviving_waits(build_step(small_spec(2), Numerics(), policy, Work((4, 4)), "all")) == []


def waited(schedule: Schedule, call: str) -> list[float]:
    """For how many shards, a second each, each phase of a call has waited since the first of them set out."""
    timeline = replay(schedule, lambda op: float(op.kind == "FETCH"))
    phases = [i for i, op in enumerate(schedule.ops) if op.name.startswith(call)]
    fetches = [i for i, op in enumerate(schedule.ops[: phases[0]]) if op.name.startswith("FETCH u1")][-3:]
    return [timeline.starts[i] - timeline.starts[fetches[0]] for i in phases]


def test_a_layer_begins_with_the_first_shard_that_it_uses() -> None:
    """A graph is gone through from its end, so its weights come in reverse."""
    policy = Policy(weight_slots=1, shard_nbytes=256, activations="keep", wait_for="shard")
    schedule = build_step(small_spec(2), Numerics(), policy, Work((4,)))
    assert waited(schedule, "FORWARD u1") == [1.0, 2.0, 3.0]
    assert waited(schedule, "BACKWARD u1")[:3] == [1.0, 2.0, 3.0]
    back = [op.shard for op in schedule.ops if op.name.startswith("FETCH u1")]
    assert back == [0, 1, 2, 2, 1, 0]
    assert waited(
        build_step(small_spec(2), Numerics(), replace(policy, wait_for="unit"), Work((4,))), "FORWARD u1"
    ) == [3.0]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_gradient_shards_leave_after_their_phase(activations: str, micro_batches: int) -> None:
    policy = Policy(shard_nbytes=512, activations=activations, wait_for="shard")  # type: ignore[arg-type]
    schedule = build_step(small_spec(2), Numerics(), policy, Work((4,) * micro_batches))
    out = [i for i, op in enumerate(schedule.ops) if op.kind == "GRAD" and op.unit == 1]
    assert [schedule.ops[i].shard for i in out] == sorted(range(len(out)), reverse=True)
    behind = [schedule.ops[max(schedule.waits[i])] for i in out]
    assert all(op.kind == "BACKWARD" and op.micro == micro_batches - 1 for op in behind)
    assert [op.shard for op in behind] == list(range(behind[0].shard, behind[0].shard + len(out)))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_phases_cost_as_much_as_the_call(activations: str) -> None:
    of, work = small_spec(3), Work((8, 8))
    policy = Policy(shard_nbytes=256, activations=activations, weight_slots=1)  # type: ignore[arg-type]
    plain, cut = (build_step(of, Numerics(), each, work) for each in (policy, gated(policy)))
    price = op_seconds(of, Numerics(), policy, work, SLOW)
    for kind in ("FORWARD", "LOSS", "BACKWARD"):
        totals = [sum(price(op) for op in each.ops if op.kind == kind) for each in (plain, cut)]
        assert totals[1] == pytest.approx(totals[0])


def test_gates_reduce_waiting_with_slow_copies() -> None:
    policy = Policy(shard_nbytes=256, weight_slots=1)
    seconds = [
        replay(
            build_step(small_spec(6), Numerics(), each, Work((4,))),
            lambda op: {"FETCH": 1.0, "GRAD": 0.5, "FORWARD": 3.0, "BACKWARD": 6.0}.get(op.kind, 0.1) * op.share,
        ).seconds
        for each in (policy, gated(policy))
    ]
    assert seconds[1] < seconds[0]


def test_a_backward_pass_within_another_is_refused() -> None:
    """On a GPU autograd has one thread for the device, which is inside the outer pass."""
    policy = Policy(shard_nbytes=256, activations="keep", wait_for="shard")
    schedule = build_step(small_spec(2), Numerics(), policy, Work((4, 4)))
    for kind in ("BACKWARD", "LOSS"):
        calls = (places for places in calls_in(schedule.ops) if len(places) > 1)
        outer = next(places for places in calls if schedule.ops[places[0]].kind == kind)
        inner = next(op for place, op in enumerate(schedule.ops) if op.kind == "BACKWARD" and place not in outer)
        at = outer[0] + 1
        ops = (*schedule.ops[:at], inner._replace(), *schedule.ops[at:])
        with pytest.raises(ScheduleError, match="goes backward between the phases of"):
            check(replace(schedule, ops=ops, waits=(*schedule.waits[:at], (), *schedule.waits[at:])))
