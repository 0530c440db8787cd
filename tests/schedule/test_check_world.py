"""Schedules of several ranks: proven together, and every change that would hang or mix them up is found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatrain.errors import PlanError, ScheduleError
from megatrain.schedule import Schedule, build_flush, build_forward, build_step, check, check_world, derive_waits
from megatrain.schedule.contents import Direction, Weights
from megatrain.schedule.ops import COLLECTIVES, Access, Use
from megatrain.schedule.passes import pieces
from megatrain.schedule.passes.collectives import shared_nbytes
from megatrain.schedule.passes.state_buffers import state_nbytes
from megatrain.spec import ModelSpec, Numerics, ParamSpec, Placement, Policy, UnitSpec, Work
from megatrain.spec.layout import layout_of
from megatrain.spec.policy import Delivery
from megatrain.testing import without_each_wait
from tests.schedule.test_directions import with_matrices
from tests.small import small_spec

DISK = Placement(weights="disk", low_bits="disk", moments="disk", gradients="disk")
KEPT, ON_DEVICE = Placement(weights="device"), Placement("device", "device", "device")
policies = st.builds(
    Policy,
    weight_slots=st.integers(1, 4),
    grad_slots=st.integers(1, 3),
    shard_nbytes=st.sampled_from([1, 5000, 1 << 20]),
    wait_for=st.sampled_from(["unit", "shard"]),
    activations=st.sampled_from(["keep", "recompute"]),
    transfer=st.sampled_from(["pinned", "pageable"]),
    placements=st.sampled_from([(), (DISK,) * 5, (ON_DEVICE,) * 5, (KEPT, DISK, ON_DEVICE, KEPT, ON_DEVICE)]),
    update=st.sampled_from(["next_forward", "during_backward"]),
) | st.builds(
    Policy,
    delivery=st.just("shared"),
    weight_slots=st.integers(1, 4),
    grad_slots=st.integers(1, 3),
    shard_nbytes=st.sampled_from([1, 5000, 1 << 20]),
    wait_for=st.sampled_from(["unit", "shard"]),
    activations=st.sampled_from(["keep", "recompute"]),
    micro_batches_per_round=st.integers(0, 1),
    placements=st.sampled_from([(), (replace(DISK, weights="host"),) * 5, (KEPT,) * 5]),
    update=st.sampled_from(["next_forward", "during_backward"]),
    streamed_updates=st.sampled_from([0.0, 0.5, 1.0]),
)


def world(
    ranks: int, numerics: Numerics, policy: Policy, *, tied: bool = False, more: int = 0, matrices: bool = False
) -> list[Schedule]:
    """Schedules of a step; the first `more` ranks have one micro-batch more than the others' two. matrices: whether
    layers have any that are updated whole."""
    spec = spec_in_shards(tied, matrices=matrices).over(ranks)
    works = [Work((4,) * (2 + (rank < more))) for rank in range(ranks)]
    pending = "none" if policy.update == "during_backward" else "all"
    return [build_step(spec, numerics, policy, work, pending, rank=rank) for rank, work in enumerate(works)]


def spec_in_shards(tied: bool = False, *, matrices: bool = False) -> ModelSpec:
    """A model of which each layer has several shards, the last of them frozen but in the lowest."""
    spec = small_spec(3, tied)
    units = []
    for number, unit in enumerate(spec.units):
        more = (
            ParamSpec(f"{unit.name}.rows", (300, 32)),
            ParamSpec(f"{unit.name}.more", (100, 32), trainable=number == 1),
        )
        units.append(replace(unit, params=(*unit.params, *more)) if unit.kind == "layer" else unit)
    spec = replace(spec, units=tuple(units))
    return with_matrices(spec) if matrices else spec


@pytest.fixture(autouse=True, scope="module")
def small_groups() -> Iterator[None]:
    """A matrix for each rank in a group, or a few small ones."""
    with patch.object(pieces, "GROUP_NBYTES", 128):
        yield


@given(
    ranks=st.integers(2, 5),
    precision=st.sampled_from(["bf16", "fp32"]),
    policy=policies,
    tied=st.booleans(),
    more=st.integers(0, 1),
    matrices=st.booleans(),
)
def test_the_schedules_of_all_ranks_pass_the_checker_together(
    ranks: int, precision: str, policy: Policy, tied: bool, more: int, matrices: bool
) -> None:
    numerics = Numerics(precision)  # type: ignore[arg-type]  # drawn from its values
    policy = replace(policy, micro_batches_per_round=0) if tied or more else policy
    found = world(ranks, numerics, policy, tied=tied, more=more, matrices=matrices)
    check_world(found)
    assert len({schedule.digest for schedule in found}) == 1
    spec = spec_in_shards(tied, matrices=matrices).over(ranks)
    check_world([build_forward(spec, numerics, policy, Work((4, 4)), rank=rank) for rank in range(ranks)])
    if policy.update == "next_forward":
        check_world([build_flush(spec, numerics, policy, rank=rank) for rank in range(ranks)])


@given(ranks=st.integers(2, 5), policy=policies)
@example(ranks=3, policy=Policy(update="during_backward"))
def test_each_matrix_is_made_orthogonal_once_in_the_world(ranks: int, policy: Policy) -> None:
    """Of its direction each rank sends its own part, and gets it back; host memory is as foretold on all ranks."""
    spec = spec_in_shards(matrices=True).over(ranks)
    found, sent, made = world(ranks, Numerics("bf16"), policy, matrices=True), 0, 0
    for rank, schedule in enumerate(found):
        for op in schedule.ops:
            directions = [each for each in op.reads if isinstance(each.content, Direction)]
            nbytes = sum(each.stop - each.start for each in directions)
            sent += nbytes if op.kind == "ALLTOALL" else 0
            made += nbytes if op.kind == "ORTHOGONALIZE" else 0
        held = [each for each in schedule.buffers.values() if each.tier == "host"]
        uses = (Use.NORMS, Use.GRADIENTS, Use.DISK_STAGING, Use.DIRECTIONS)
        nbytes = sum(each.nbytes for each in held if each.is_state or each.use in uses)
        assert nbytes == state_nbytes(spec, Numerics("bf16"), policy)["host"], rank
    trained = [layout_of(unit).trained for unit in spec.units]
    assert made == sent / 2 == 2 * sum(layout.size - layout.matrices_start for layout in trained) > 0


def test_ranks_map_no_more_directions_than_are_planned() -> None:
    """They map them once, though a run may come to place on the disk what needs more of them."""
    plain, mapped = small_spec(3), list[dict[str, int]]()
    layers = {name: tuple(ParamSpec(f"{name}.{number}", (16, 16)) for number in range(6)) for name in plain.names[1:-1]}
    units = tuple(replace(unit, params=(*unit.params, *layers.get(unit.name, ()))) for unit in plain.units)
    spec = with_matrices(replace(plain, units=units)).over(2)
    for placements in ((), (Placement(moments="disk"),) * 5):
        policy = Policy(delivery="shared", placements=placements)
        buffers = build_step(spec, Numerics("bf16"), policy, Work((4, 4)), "all").buffers
        held = {b.name: b.nbytes for b in buffers.values() if (b.tier, b.use) == ("host", Use.DIRECTIONS)}
        mapped.append(shared_nbytes(spec, Numerics("bf16"), policy))
        assert held == {name: nbytes for name, nbytes in mapped[-1].items() if name in held or "directions" in name}
    assert mapped[0] == mapped[1]


@given(ranks=st.integers(2, 5), policy=policies)
@example(ranks=3, policy=Policy(update="during_backward", streamed_updates=1.0))
@example(ranks=3, policy=Policy(update="during_backward", streamed_updates=1.0, delivery="shared"))
def test_each_byte_crosses_one_ranks_bus_and_state_is_not_duplicated(ranks: int, policy: Policy) -> None:
    spec, (schedule, *_) = spec_in_shards().over(ranks), world(ranks, Numerics("bf16"), policy)
    for unit, each in enumerate(spec.units):
        layout = layout_of(each)
        whole = {kind: [op for op in schedule.ops if op.kind == kind and op.unit == unit] for kind in ("FETCH", "GRAD")}
        is_shared = policy.delivery == "shared"  # then every byte crosses it, and gradients in float32
        whole["GRAD"] = [op for op in whole["GRAD"] if "sums" not in op.writes[0].buffer]  # between rounds
        on_device = policy.placement(unit).on_device
        streamed = policy.update == "during_backward" and unit in policy.updates_streamed(spec)
        stays = on_device or (streamed and not is_shared)  # shared gradients are summed in host memory
        crosses = (4 if is_shared else 2 / ranks) * (not stays)
        assert sum(op.nbytes for op in whole["GRAD"]) == layout.trained.size * crosses
        assert bool(whole["FETCH"]) != on_device
        assert sum(op.nbytes for op in whole["FETCH"]) % (2 * layout.size // (1 if is_shared else ranks)) == 0
        state = [buffer for buffer in schedule.buffers.values() if buffer.unit == unit and buffer.is_state]
        assert sum(buffer.nbytes for buffer in state) == (2 * layout.size + 10 * layout.trained.size) // ranks


def test_one_rank_has_the_single_rank_schedule() -> None:
    spec, work = spec_in_shards(), Work((4, 4))
    alone = build_step(spec, Numerics("bf16"), Policy(), work)
    assert spec.over(1) is spec
    assert not alone.collectives
    assert spec.over(3).over(1) == spec


def refused(schedules: list[Schedule]) -> bool:
    try:
        check_world(schedules)
    except ScheduleError:
        return True
    return False


PLACES: dict[str, tuple[Delivery, Placement]] = {
    "gather": ("gather", Placement()),
    "shared": ("shared", Placement()),
    "on the device": ("gather", ON_DEVICE),
    "matrices, gather": ("gather", Placement()),
    "matrices, shared": ("shared", Placement()),
    "matrices, on the device": ("gather", ON_DEVICE),
}


@pytest.fixture(scope="module", params=PLACES)
def three(request: pytest.FixtureRequest) -> list[Schedule]:
    delivery, placement = PLACES[request.param]
    policy = Policy(shard_nbytes=6 << 10, delivery=delivery, placements=(placement,) * 5)
    return world(3, Numerics("bf16"), policy, more=1, matrices="matrices" in request.param)


def test_every_removed_wait_is_detected(three: list[Schedule]) -> None:
    mutants = [mutant for _, _, mutant in without_each_wait(three[1])]
    assert len(mutants) > (50 if any(op.stream in ("fetch", "shared") for op in three[1].ops) else 20)
    assert all(refused([three[0], mutant, three[2]]) for mutant in mutants)


def test_every_missing_collective_is_detected(three: list[Schedule]) -> None:
    gone = [index for index, op in enumerate(three[1].ops) if op.kind in COLLECTIVES]
    for index in gone:
        ops = [op for at, op in enumerate(three[1].ops) if at != index]
        mutant = derive_waits(replace(three[1], ops=tuple(ops)))
        assert refused([three[0], mutant, three[2]])
        assert refused([derive_waits(replace(each, ops=tuple(ops))) for each in three])


def test_every_swapped_pair_of_collectives_is_detected(three: list[Schedule]) -> None:
    """Also one that is right for its own rank."""
    places = [index for index, op in enumerate(three[1].ops) if op.kind in COLLECTIVES]
    right_alone = 0
    for left, right in pairwise(places):
        ops = list(three[1].ops)
        begin, end = (at - (ops[at - 1].kind == "FETCH") for at in (left, right))  # of what is gathered
        ops[begin:begin] = ops[end : right + 1]
        size = right + 1 - end
        del ops[end + size : right + 1 + size]
        mutant = derive_waits(replace(three[1], ops=tuple(ops)))
        assert sorted(op.name for op in mutant.ops) == sorted(op.name for op in three[1].ops)
        right_alone += not refused_alone(mutant)
        assert refused([three[0], mutant, three[2]])
        assert mutant.digest != three[0].digest
    assert right_alone


def refused_alone(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ScheduleError:
        return True
    return False


def test_mismatched_and_duplicate_rank_parts_are_detected(three: list[Schedule]) -> None:
    larger = world(3, Numerics("bf16"), Policy(shard_nbytes=12 << 10))
    with pytest.raises(ScheduleError, match=r"on rank 0 and .* on rank 1"):
        check_world([three[0], larger[1], three[2]])
    with pytest.raises(ScheduleError, match=r"rank 1 (contributes|takes) another rank's part|of directions and"):
        fetches = any(op.kind == "FETCH" for op in three[1].ops)
        check_world([three[0], three[2] if fetches else _with_parts_of_another_shard(three[1]), three[1]])
    with pytest.raises(ScheduleError, match=r"none on rank 0 and .* on rank 1"):
        check_world([build_flush(spec_in_shards().over(3), Numerics("bf16"), Policy()), three[1]])


def _with_parts_of_another_shard(schedule: Schedule) -> Schedule:
    """Where ranks gather from where each has its parts, these are at the same place on all."""
    ops = list(schedule.ops)
    at, *_, late = (index for index, op in enumerate(ops) if op.kind == "GATHER" and op.unit == 2)
    ops[late] = ops[late]._replace(reads=ops[at].reads)
    return derive_waits(replace(schedule, ops=tuple(ops)))


def test_shared_memory_is_not_written_while_others_may_read() -> None:
    """Each for itself, such schedules are right."""
    right = world(3, Numerics("bf16"), Policy(shard_nbytes=6 << 10, delivery="shared"))
    found = 0
    for rank, schedule in enumerate(right):
        for op in schedule.ops:
            if op.kind != "UPDATE":
                continue
            behind = max(at for at, each in enumerate(schedule.ops) if each.kind == "FETCH" and each.unit == op.unit)
            ops = list(schedule.ops)
            late = [access._replace(content=Weights(op.unit)) for access in op.writes if _is_weights(access)]
            again = op._replace(kind="READ", reads=(), writes=tuple(late))
            ops.insert(behind + 1, again)
            mutant = derive_waits(replace(schedule, ops=tuple(ops)))
            check(mutant)
            with pytest.raises(ScheduleError, match="nothing orders"):
                check_world([mutant if of == rank else each for of, each in enumerate(right)])
            found += 1
    assert found == 15


def _is_weights(access: Access) -> bool:
    return isinstance(access.content, Weights)


def test_waiting_for_a_later_op_is_a_deadlock(three: list[Schedule]) -> None:
    waits = list(three[0].waits)
    waits[3] = (len(waits) - 1,)
    with pytest.raises(ScheduleError, match="which comes later"):
        check_world([replace(three[0], waits=tuple(waits)), *three[1:]])


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        (Policy(shares_memory=True), "slots"),
        (Policy(read_ahead_nbytes=1 << 20), "read-ahead"),
        (Policy(delivery="shared", placements=(DISK, *(ON_DEVICE,) * 4)), "on the device and on the disk are not in"),
        (Policy(delivery="shared", placements=(DISK,) * 5), "weights on the disk are not in memory"),
    ],
)
def test_settings_unsupported_on_ranks_are_refused_by_name(policy: Policy, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        build_step(small_spec(3).over(2), Numerics("bf16"), policy, Work((4, 4)))
    build_step(small_spec(3), Numerics("bf16"), policy, Work((4, 4)))


def test_single_rank_and_multi_rank_units_are_distinguished() -> None:
    unit = UnitSpec("u", "layer", (ParamSpec("p", (70, 64)),))
    many = replace(unit, ranks=2)
    assert [layout_of(each).ranks for each in (unit, many, unit, many)] == [1, 2, 1, 2]
