"""Updates of whole matrices, in three steps: schedules are proven for any placement, and products are paid for."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from megatrain.errors import ScheduleError
from megatrain.plan import contention, op_seconds
from megatrain.schedule import Op, Schedule, Use, build_flush, build_step, check, replay
from megatrain.schedule.contents import Direction
from megatrain.schedule.passes import pieces
from megatrain.schedule.passes.state_buffers import state_nbytes
from megatrain.spec import Hardware, ModelSpec, Numerics, ParamSpec, Placement, Policy, UnitSpec, Work
from megatrain.spec.layout import layout_of
from megatrain.testing import SimDevice, executed_timeline, run_idle, surviving_waits
from tests.schedule.test_disk_staging import random_case
from tests.small import small_spec

STEPS = ("MOMENTUM", "ORTHOGONALIZE", "APPLY")
BF16, TWO = Numerics("bf16"), Work((4, 4))
HOST, DEVICE, DISK = Placement(), Placement("device", "device", "device"), Placement("disk", "disk", "disk", "disk")
MACHINE = Hardware("desktop", 1 << 40, 1 << 40, 1e9, 40e6, 25e6, 25e6, host_dram_bandwidth=46e6, device_bandwidth=1e9)


def with_matrices(model: ModelSpec, draw: random.Random | None = None) -> ModelSpec:
    """The model with parameters that are updated whole, of which an optimizer keeps one array: those of its layers, or
    any that are drawn."""

    def described(unit: UnitSpec, param: ParamSpec) -> ParamSpec:
        chosen = unit.kind == "layer" if draw is None else draw.random() < 0.7
        if not (param.trainable and len(param.shape) > 1 and chosen):
            return param
        return replace(param, state=("momentum",), matrices=1 if draw is None else draw.choice((1, 1, 2)))

    units = (
        replace(unit, params=tuple(described(unit, param) for param in unit.params)) if unit.params else unit
        for unit in model.units
    )
    return replace(model, units=tuple(units))


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of 64 elements, and pieces of 96, which reach into several."""
    monkeypatch.setattr(pieces, "GROUP_NBYTES", 128)
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 1)
    monkeypatch.setattr(pieces, "NORM_BLOCK", 96)


def built(model: ModelSpec, policy: Policy, numerics: Numerics = BF16, work: Work = TWO) -> Schedule:
    return build_step(model, numerics, policy, work, "all" if policy.update == "next_forward" else "none")


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 90), marks=pytest.mark.slow)])
def test_schedules_of_any_placement_pass_the_checker_without_races(seeds: range) -> None:
    """Every element of a matrix passes MOMENTUM and APPLY once, and every group is made orthogonal once between them.
    Foretold bytes are those of the buffers."""
    streams = set[str]()
    for seed in seeds:
        draw = random.Random(seed)
        plain, numerics, policy, work = random_case(draw)
        policy = replace(policy, shard_nbytes=max(256, policy.shard_nbytes))
        model = with_matrices(plain, draw)
        schedules = [built(model, policy, numerics, work)]
        schedules += [build_flush(model, numerics, policy)] if policy.update == "next_forward" else []
        for schedule in schedules:
            check(schedule)
            run_idle(schedule, SimDevice(seed))
            passed = {kind: Counter[int]() for kind in STEPS}
            for op in schedule.ops:
                if op.kind in STEPS:
                    accesses = op.writes if op.kind == "MOMENTUM" else op.reads
                    of_directions = [each for each in accesses if isinstance(each.content, Direction)]
                    passed[op.kind][op.unit] += sum(each.stop - each.start for each in of_directions) // 2
                    streams.add(op.stream)
            for unit, spec in enumerate(model.units):
                trained = layout_of(spec).trained
                assert {counts[unit] for counts in passed.values()} == {trained.size - trained.matrices_start}
        held = [b for b in schedules[0].buffers.values() if b.tier == "host"]
        uses = (Use.NORMS, Use.GRADIENTS, Use.DISK_STAGING, Use.DIRECTIONS)
        assert (
            sum(b.nbytes for b in held if b.is_state or b.use in uses) == state_nbytes(model, numerics, policy)["host"]
        )
    assert streams == {"host", "compute", "products"}


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("placement", [HOST, DEVICE, DISK])
def test_removing_any_single_wait_is_detected(placement: Placement) -> None:
    policy = Policy(placements=(HOST, placement, HOST), shard_nbytes=256)
    schedule = built(with_matrices(small_spec(1)), policy, work=Work((4,)))
    assert {op.kind for op in schedule.ops} >= {*STEPS}
    assert surviving_waits(schedule, range(1)) == []


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("placement", [HOST, DEVICE, DISK])
def test_a_step_left_out_or_repeated_is_refused(kind: str, placement: Placement) -> None:
    schedule = built(with_matrices(small_spec(1)), Policy(placements=(HOST, placement, HOST)))
    of_kind = [op for op in schedule.ops if op.kind == kind]
    assert len(of_kind) > 1
    without = tuple(op for op in schedule.ops if op is not of_kind[-1])
    twice = tuple(each for op in schedule.ops for each in ([op, op] if op is of_kind[-1] else [op]))
    for ops in (without, twice):
        with pytest.raises(ScheduleError, match=r"but finds|is left with|happens 2 times|nothing reads"):
            check(replace(schedule, ops=ops, waits=((),) * len(ops)))


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("seed", range(4))
def test_the_executed_timeline_equals_the_replay(seed: int) -> None:
    model, policy = with_matrices(small_spec(3)), Policy(placements=(HOST, DISK, HOST, HOST, HOST), shard_nbytes=256)
    schedule = built(model, policy)
    price, shared = (
        op_seconds(model, Numerics("bf16"), policy, Work((4, 4)), MACHINE),
        contention(model, Numerics("bf16"), MACHINE),
    )
    predicted, executed = replay(schedule, price, shared), executed_timeline(schedule, price, seed, shared)
    assert executed.starts == pytest.approx(predicted.starts, abs=1e-9)
    assert executed.ends == pytest.approx(predicted.ends, abs=1e-9)


def test_directions_cross_the_bus_once_each_way_and_nothing_else_does() -> None:
    matrices, plain = (built(model, Policy()) for model in (with_matrices(small_spec(3)), small_spec(3)))
    moved: dict[str, Counter[str]] = defaultdict(Counter)
    for name, schedule in (("matrices", matrices), ("plain", plain)):
        for op in schedule.ops:
            moved[name][op.kind] += op.nbytes
    numel = 3 * 3 * 16 * 8
    assert moved["matrices"]["RELOAD"] == moved["matrices"]["OFFLOAD"] == 2 * numel
    assert {kind: moved["matrices"][kind] for kind in ("FETCH", "GRAD")} == {
        k: moved["plain"][k] for k in ("FETCH", "GRAD")
    }


def test_products_of_an_update_are_paid_for_in_full_beside_compute() -> None:
    """A step that only computes takes as long as its calls and its products one after the other."""
    model, work = with_matrices(wide(2)), Work((64,))
    busy = replace(MACHINE, fetch_bandwidth=1e15, grad_bandwidth=1e15, host_bandwidth=1e15, host_dram_bandwidth=1e15)
    schedule = built(model, Policy(), work=work)
    price, shared = op_seconds(model, Numerics("bf16"), Policy(), work, busy), contention(model, Numerics("bf16"), busy)
    steps, flops = 5, 0.0
    for unit in model.units:
        for param in unit.params:
            m, n = sorted(param.shape) if param.matrices else (0, 0)
            flops += steps * (4 * m * m * n + 2 * m**3)
    products = sum(price(op) for op in schedule.ops if op.kind == "ORTHOGONALIZE")
    assert products > flops / busy.flops > 0.5 * products
    calls = sum(price(op) for op in schedule.ops if op.stream == "compute")
    assert replay(schedule, price, shared).seconds >= 0.999 * (calls + products)


def wide(layers: int) -> ModelSpec:
    small = small_spec(layers)
    units = [
        replace(unit, params=tuple(ParamSpec(p.name, (512, 256)) for p in unit.params))
        if unit.kind == "layer"
        else unit
        for unit in small.units
    ]
    return replace(small, units=tuple(units))


@pytest.mark.parametrize("most", [64, 100, 128, 1000])
def test_groups_hold_whole_matrices_and_cover_them_all(most: int) -> None:
    params = [ParamSpec("bias", (40,)), *(ParamSpec(f"m{i}", (8 + i, 8), state=("m",), matrices=1) for i in range(3))]
    params += [ParamSpec("experts", (5, 6, 4), state=("m",), matrices=5), ParamSpec("frozen", (8, 8), trainable=False)]
    trained = layout_of(UnitSpec("x", "layer", tuple(params))).trained
    groups = trained.matrix_groups(most)
    assert groups[0].start == trained.matrices_start
    assert [group.stop for group in groups[:-1]] == [group.start for group in groups[1:]]
    assert groups[-1].stop == trained.size
    stacks = [stack for group in groups for stack in group.stacks]
    assert (
        sum(stack.stacked * stack.rows * stack.columns for stack in stacks)
        == sum(p.shape[0] * 8 for p in params[1:4]) + 120
    )
    for group in groups:
        last = group.stacks[-1]
        end = last.start + last.stacked * last.rows * last.columns
        assert end <= group.stop
        assert end - group.start <= most or (len(group.stacks), last.stacked) == (1, 1)


def test_pieces_of_a_plan_are_joined_within_groups() -> None:
    cut = [(0, 10), (10, 20), (20, 30), (30, 45), (45, 50), (50, 60)]
    assert pieces.merged_within(cut, [0, 25, 50]) == [(0, 20), (20, 30), (30, 50), (50, 60)]


def updates(schedule: Schedule) -> list[Op]:
    return [op for op in schedule.ops if op.kind in STEPS]


def test_the_gradient_of_a_pending_update_stays_until_its_last_step() -> None:
    """A retry after an interruption needs it again, to write the directions."""
    schedule = built(with_matrices(small_spec(2)), Policy())
    for op in updates(schedule):
        used = [access.buffer for access in op.writes if str(access.content) == "used"]
        assert bool(used) == (op is [each for each in updates(schedule) if each.unit == op.unit][-1])
