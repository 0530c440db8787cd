"""Updates on the device of state that waits in host memory: their schedules are proven, and move what they must."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from megatrain.errors import PlanError, ScheduleError
from megatrain.plan import contention, op_seconds
from megatrain.schedule import Schedule, build_flush, build_forward, build_step, check, replay
from megatrain.schedule.passes.pieces import SLOTS
from megatrain.schedule.passes.pinned_staging import pinned_nbytes
from megatrain.schedule.passes.updates import CHUNK
from megatrain.spec import Hardware, ModelSpec, Numerics, ParamSpec, Placement, Policy, UnitSpec, Work
from megatrain.testing import SimDevice, executed_timeline, run_idle, surviving_waits
from megatrain.train import device_update
from tests.small import small_spec

DEVICE, DISK, CACHED = Placement("device", "device", "device"), Placement(moments="disk"), Placement("device")
DESKTOP = Hardware("desktop", 1 << 40, 1 << 40, 1e9, 40e6, 25e6, 25e6, host_dram_bandwidth=46e6, device_bandwidth=1e9)
TWO = Work((4, 4))
NUMEL = 48 * 32 * 2
"""Of a layer: three pieces, and the last one is smaller."""


def spec(layers: int = 3, *, tied: bool = False, frozen: int = 0) -> ModelSpec:
    """Layers of several pieces, the first of them with a frozen matrix."""
    small = small_spec(layers, tied)

    def layer(index: int) -> UnitSpec:
        names = [f"layers.{index}.{name}" for name in "ab"]
        params = [ParamSpec(name, (48, 32)) for name in names]
        params += [ParamSpec(f"layers.{index}.c", (48, 32), trainable=False)] * (index < frozen)
        return UnitSpec(f"layers.{index}", "layer", tuple(params))

    return replace(small, units=(small.units[0], *map(layer, range(layers)), small.units[-1]))


def step(policy: Policy, of: ModelSpec | None = None, work: Work = TWO, numerics: Numerics | None = None) -> Schedule:
    pending = "none" if policy.update == "during_backward" else "all"
    return build_step(of or spec(), numerics or Numerics(), policy, work, pending)  # type: ignore[arg-type]


def drawn(seed: int) -> tuple[Schedule, Policy]:
    draw = random.Random(seed)
    layers, tied = draw.randint(2, 5), draw.random() < 0.5
    placements = tuple(draw.choice((Placement(), DEVICE, DISK, CACHED)) for _ in range(layers + 2))
    policy = Policy(
        streamed_updates=draw.choice((0.4, 0.7, 1.0)),
        weight_slots=draw.randint(1, 4),
        read_ahead_nbytes=draw.choice((0, 0, 900, 5000)),
        grad_slots=draw.randint(1, 3),
        shard_nbytes=draw.choice((900, 5000, 1 << 20)),
        wait_for=draw.choice(("unit", "shard")),  # type: ignore[arg-type]
        activations_by_layer=draw.choice(((("graph",),), (("input",),), (("offload",), ("drop",)))),  # type: ignore[arg-type]
        micro_batches_per_round=0 if tied else draw.choice((0, 1)),
        update=draw.choice(("next_forward", "during_backward")),  # type: ignore[arg-type]
        placements=placements if draw.random() < 0.5 else (),
    )
    numerics = Numerics(draw.choice(("bf16", "fp32")), grad_precision=draw.choice((None, "fp32")))  # type: ignore[arg-type]
    of = spec(layers, tied=tied, frozen=draw.choice((0, 1)))
    return step(policy, of, Work((4,) * draw.randint(1, 3)), numerics), policy


def updated_there(schedule: Schedule) -> set[int]:
    return {op.unit for op in schedule.ops if op.kind == "UPDATE" and op.stream == "grad"}


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 3000), marks=pytest.mark.slow)])
def test_schedules_of_any_policy_pass_the_checker_without_races(seeds: range) -> None:
    streamed = 0
    for seed in seeds:
        schedule, policy = drawn(seed)
        check(schedule)
        run_idle(schedule, SimDevice(seed))
        there = updated_there(schedule)
        streamed += bool(there)
        for unit in there:
            placement = policy.placement(unit)
            assert placement in (Placement(), CACHED)
        assert {op.unit for op in schedule.ops if op.kind == "UPDATE"} >= there
    assert streamed > len(seeds) / 2


@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
@pytest.mark.parametrize("slots", [1, 3])
def test_removing_any_single_wait_is_detected(update: str, slots: int) -> None:
    policy = Policy(streamed_updates=0.7, weight_slots=slots, update=update, shard_nbytes=6000)  # type: ignore[arg-type]
    schedule = step(policy)
    assert updated_there(schedule)
    assert surviving_waits(schedule, range(1)) == []


@pytest.mark.parametrize("seed", range(6))
def test_the_executed_timeline_equals_the_replay(seed: int) -> None:
    schedule, policy = drawn(seed)
    model, work = spec(len(schedule.units) - 2), Work((4,) * 3)
    price, shared = op_seconds(model, Numerics(), policy, work, DESKTOP), contention(model, Numerics(), DESKTOP)
    predicted, executed = replay(schedule, price, shared), executed_timeline(schedule, price, seed, shared)
    assert executed.starts == pytest.approx(predicted.starts, abs=1e-9)
    assert executed.ends == pytest.approx(predicted.ends, abs=1e-9)


def test_streamed_state_crosses_once_each_way_and_weights_are_not_refetched() -> None:
    host, device = (step(Policy(streamed_updates=share, weight_slots=4)) for share in (0.0, 1.0))
    check(device)
    moved: dict[str, Counter[str]] = {}
    for name, schedule in (("host", host), ("device", device)):
        moved[name] = Counter()
        for op in schedule.ops:
            moved[name][op.kind] += op.nbytes if op.unit in (1, 2, 3) else 0
    more = {
        kind: moved["device"][kind] - moved["host"][kind] for kind in ("RELOAD", "OFFLOAD", "PLACE", "FETCH", "GRAD")
    }
    assert more == {
        "RELOAD": 3 * NUMEL * (2 + 2 + 8 + 2),  # weights, low bits, moments, gradient
        "OFFLOAD": 3 * NUMEL * (2 + 2 + 8),
        "PLACE": 3 * NUMEL * 2,
        "FETCH": -3 * NUMEL * 2,
        "GRAD": 0,
    }
    assert sum(buffer.use == "update slots" for buffer in device.buffers.values()) == SLOTS


def test_during_the_backward_pass_the_gradient_never_leaves() -> None:
    one = step(Policy(streamed_updates=1.0, update="during_backward"), work=Work((4,)))
    check(one)
    assert {op.unit for op in one.ops if op.kind == "GRAD"} == {0, 4}
    assert sum(op.nbytes for op in one.ops if op.kind == "RELOAD") == 3 * NUMEL * (2 + 2 + 8)
    wide = step(Policy(streamed_updates=1.0, update="during_backward"))  # float32 sums: rounded as those that leave
    landed = {wide.buffers[op.writes[0].buffer].tier for op in wide.ops if op.kind == "GRAD" and op.unit in (1, 2, 3)}
    assert landed == {"device"}
    assert {op.stream for op in wide.ops if op.kind == "NORM" and op.unit in (1, 2, 3)} == {"grad"}


def test_device_memory_is_bounded_by_pieces() -> None:
    for nbytes in (20_000, 1 << 20):
        policy = Policy(streamed_updates=1.0, shard_nbytes=nbytes)
        slots = [buffer for buffer in step(policy).buffers.values() if buffer.use == "update slots"]
        assert all(0 < buffer.nbytes <= max(nbytes, 14 * 1024) for buffer in slots)
    assert CHUNK == device_update.CHUNK


def test_the_streamed_share_is_spread_over_host_resident_layers() -> None:
    of = spec(8)
    assert Policy(streamed_updates=0.25).updates_streamed(of) == {3, 7}
    assert Policy(streamed_updates=0.5).updates_streamed(of) == {2, 4, 6, 8}
    assert Policy(streamed_updates=1.0).updates_streamed(of) == set(range(1, 9))
    assert Policy(streamed_updates=0.01).updates_streamed(of) == set()
    placements = (Placement(), DEVICE, DISK, *[Placement()] * 4, CACHED, Placement(), Placement())
    assert Policy(streamed_updates=1.0, placements=placements).updates_streamed(of) == {3, 4, 5, 6, 7, 8}
    assert Policy(streamed_updates=1.0).updates_streamed(spec(8, frozen=3)) == {4, 5, 6, 7, 8}


def test_streamed_updates_need_a_bus_and_pinned_state() -> None:
    for other in ({"shares_memory": True}, {"transfer": "pageable"}):
        with pytest.raises(PlanError, match=r"policy\.streamed_updates"):
            Policy(streamed_updates=0.5, **other)  # type: ignore[arg-type]
    for share in (-0.1, 1.5, True):
        with pytest.raises(PlanError, match=r"policy\.streamed_updates"):
            Policy(streamed_updates=share)


def test_only_state_streamed_to_the_device_is_pinned() -> None:
    host, half = (step(Policy(streamed_updates=share), spec(4)) for share in (0.0, 0.5))
    more = pinned_nbytes(half.buffers.values(), "pinned") - pinned_nbytes(host.buffers.values(), "pinned")
    assert more == 2 * NUMEL * (2 + 8)


def test_passes_without_updates_have_none_on_the_device() -> None:
    policy = Policy(streamed_updates=1.0)
    for schedule in (
        build_forward(spec(), Numerics(), policy, Work((4,))),
        build_flush(spec(), Numerics(), policy),
        build_step(spec(), Numerics(), policy, Work((4,))),
    ):
        check(schedule)
        assert updated_there(schedule) == set()


@pytest.mark.parametrize("kind", ["RELOAD", "UPDATE", "OFFLOAD"])
def test_missing_update_pieces_are_refused(kind: str) -> None:
    schedule = step(Policy(streamed_updates=1.0, update="during_backward", shard_nbytes=1000))
    lost = next(op for op in schedule.ops if op.kind == kind and op.stream != "host" and op.unit == 2 and op.shard == 1)
    ops = tuple(op for op in schedule.ops if op is not lost)
    says = (
        "is left with .*w2 and w2.new|reads .* but finds"
        if kind != "OFFLOAD"
        else r"weights/2 is left with w2 and w2\.new"
    )
    with pytest.raises(ScheduleError, match=says):
        check(replace(schedule, ops=ops, waits=((),) * len(ops)))


def test_pieces_updated_twice_are_refused() -> None:
    schedule = step(Policy(streamed_updates=1.0, shard_nbytes=1000))
    twice = next(op for op in schedule.ops if op.kind == "UPDATE" and op.shard == 1)
    again = twice._replace(
        reads=tuple(a._replace(content=w.content) for a, w in zip(twice.reads[1:], twice.writes, strict=False))
    )
    index = schedule.ops.index(twice)
    ops = (*schedule.ops[: index + 1], again, *schedule.ops[index + 1 :])
    with pytest.raises(ScheduleError, match=f"UPDATE of unit {twice.unit}, piece 1 happens 2 times"):
        check(replace(schedule, ops=ops, waits=((),) * len(ops)))


def test_with_one_slot_updated_weights_are_fetched_from_the_host() -> None:
    """The slot is in use until the layer's turn comes."""
    for fields in ({"weight_slots": 1}, {"read_ahead_nbytes": 4000}):
        schedule = step(Policy(streamed_updates=1.0, **fields))  # type: ignore[arg-type]
        check(schedule)
        kinds = [op.kind for op in schedule.ops if op.unit == 2]
        assert not any(op.kind == "PLACE" and op.stream == "grad" for op in schedule.ops)
        assert kinds.index("OFFLOAD") < kinds.index("FETCH")
