"""A forward in less device memory than a unit takes: proven, in the bytes that it promises, whatever the sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import PlanError, ScheduleError
from megatrain.layout import layout_of
from megatrain.schedule import RING, Op, Schedule, build_forward, check, derive_waits, passing_place, replay
from megatrain.schedule.passing import blocks_of
from megatrain.spec import Gates, Home, ModelSpec, ParamSpec, Policy, Precision, Transit, UnitSpec, Work
from megatrain.testing import surviving_waits
from tests.small import small_spec

ROWS = Policy(shard_nbytes=256, gates="rows", forward_nbytes=600)


def by_rows(model: ModelSpec) -> ModelSpec:
    """Its matrices are read as the code of nearly all models reads them."""
    units = (
        replace(unit, params=tuple(replace(param, by_rows=len(param.shape) > 1) for param in unit.params))
        for unit in model.units
    )
    return replace(model, units=tuple(units))


def varied(shapes: list[tuple[int, ...]], held: list[int], tied: bool) -> ModelSpec:
    """Layers of these parameters between small ends."""
    layers = tuple(
        UnitSpec(
            f"layers.{i}",
            "layer",
            tuple(
                ParamSpec(f"layers.{i}.{k}", shape, held=span, by_rows=len(shape) > 1 and span >= 0)
                for k, (shape, span) in enumerate(zip(shapes, held, strict=True))
            ),
        )
        for i in range(2)
    )
    ends = by_rows(small_spec(1, tied)).units
    return ModelSpec("varied", (ends[0], *layers, ends[-1]), hidden_size=8, vocab_size=64)


def least(model: ModelSpec, policy: Policy, work: Work) -> int:
    """Bytes that a refusal names."""
    with pytest.raises(PlanError, match="do not hold what is used together") as caught:
        build_forward(model, replace(policy, forward_nbytes=1), work)
    return int(caught.value.fix.split()[1].replace(",", ""))


def largest(model: ModelSpec, policy: Policy) -> int:
    return max(layout_of(unit).size for unit in model.units) * policy.weight_nbytes


SHAPES = st.sampled_from([(8,), (40,), (16, 8), (64, 8), (5, 24), (4, 6, 10)])


@given(
    layer=st.lists(st.tuples(SHAPES, st.sampled_from([0, 0, 0, 1, 2, -1])), min_size=1, max_size=7),
    tied=st.booleans(),
    precision=st.sampled_from(["bf16", "fp32"]),
    gates=st.sampled_from(["shard", "rows"]),
    shard=st.sampled_from([1, 200, 500, 1 << 20]),
    spare=st.sampled_from([0, 64, 700, 1 << 20]),
    transit=st.sampled_from(["locked", "slabs"]),
    weights=st.sampled_from([(), (0,), (1,), (3,), (0, 3)]),
    tokens=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_forwards_in_less_than_a_unit_are_proven_in_all_bytes_that_suffice(
    layer: list[tuple[tuple[int, ...], int]],
    tied: bool,
    precision: Precision,
    gates: Gates,
    shard: int,
    spare: int,
    transit: Transit,
    weights: tuple[int, ...],
    tokens: list[int],
) -> None:
    """Also where units stay on the device, or what is pageable goes through slabs."""
    model = varied([shape for shape, _ in layer], [held for _, held in layer], tied)
    homes = tuple(Home(weights="device" if unit in weights else "host") for unit in range(4))
    policy = Policy(precision, shard_nbytes=shard, gates=gates, transit=transit, homes=homes, loss_chunk_tokens=4)
    work = Work(tuple(tokens))
    enough = least(model, policy, work)
    schedule = build_forward(model, replace(policy, forward_nbytes=enough + spare), work)
    check(schedule)
    assert schedule.buffers[RING].nbytes <= enough + spare
    assert not [name for name in schedule.buffers if name.startswith("device/weights/") and name != RING]
    used = {op.unit for op in schedule.ops if op.kind == "FETCH"}
    assert used == {unit for unit in range(4) if layout_of(model.units[unit]).size}
    for op in schedule.ops:
        assert all(passing_place(access.content) for access in op.reads if access.buffer == RING)


@pytest.mark.parametrize("gates", ["shard", "rows"])
@pytest.mark.parametrize("tied", [False, True])
def test_each_wait_that_is_left_out_is_found(gates: Gates, tied: bool) -> None:
    model = by_rows(small_spec(2, tied))
    policy = replace(ROWS, gates=gates, loss_chunk_tokens=4)
    enough = least(model, policy, Work((4, 8)))
    schedule = build_forward(model, replace(policy, forward_nbytes=enough + 256), Work((4, 8)))
    assert surviving_waits(schedule) == []


def test_a_model_whose_embedding_is_its_largest_unit_takes_less_by_rows() -> None:
    model = by_rows(small_spec(3))
    assert least(model, ROWS, Work((4,))) < largest(model, ROWS) / 3
    assert build_forward(model, ROWS, Work((4,))).buffers[RING].nbytes <= ROWS.forward_nbytes


def test_a_model_whose_layer_is_its_largest_unit_takes_less_also_with_whole_matrices() -> None:
    model = varied([(16, 8)] * 9, [0] * 9, tied=False)
    policy = replace(ROWS, gates="shard")
    assert largest(model, policy) == 9 * 256
    assert least(model, policy, Work((4,))) < 0.7 * largest(model, policy)
    assert build_forward(model, replace(policy, forward_nbytes=1600), Work((4,))).buffers[RING].nbytes <= 1600


def test_micro_batches_go_one_by_one_and_a_head_comes_for_each_chunk_of_their_tokens() -> None:
    model = by_rows(small_spec(2))
    schedule = build_forward(model, replace(ROWS, loss_chunk_tokens=4), Work((4, 9)))
    calls = [(op.unit, op.micro) for op in schedule.ops if op.stream == "compute" and op.shard == 0]
    assert calls == [(unit, micro) for micro in (0, 1) for unit in range(4)]
    rows = {(op.micro, op.shard) for op in schedule.ops if op.kind == "LOSS"}
    assert [sum(micro == each for micro, _ in rows) for each in (0, 1)] == [1 + 4, 1 + 3 * 4]
    once = build_forward(model, replace(ROWS, loss_chunk_tokens=4), Work((4, 9)), head_passes=(1, 1))
    assert sum(op.kind == "LOSS" for op in once.ops) == 2 * (1 + 4)


def test_the_next_shards_come_while_a_layer_computes() -> None:
    def price(op: Op) -> float:
        return {"FETCH": 1.0, "FORWARD": 4.0, "LOSS": 4.0}.get(op.kind, 0.0) * op.share

    model = by_rows(small_spec(12))
    roomy = replay(build_forward(model, replace(ROWS, forward_nbytes=1000), Work((4,))), price)
    slots = replay(build_forward(model, replace(ROWS, forward_nbytes=0, gates="unit"), Work((4,))), price)
    assert roomy.seconds < slots.seconds, "filled by one shard, and never waiting behind that"
    assert roomy.stall_seconds() < 4


def _with(schedule: Schedule, index: int, op: Op) -> Schedule:
    return derive_waits(replace(schedule, ops=(*schedule.ops[:index], op, *schedule.ops[index + 1 :])))


def test_a_phase_that_reads_what_has_been_given_up_is_found() -> None:
    """Its successor is of the same unit and lies in the same place, so that only its content tells."""
    model = by_rows(small_spec(2))
    schedule = build_forward(model, replace(ROWS, forward_nbytes=512), Work((4,)))
    phases = [i for i, op in enumerate(schedule.ops) if op.name.startswith("FORWARD u0 m0")]
    first = schedule.ops[phases[0]].reads[0]
    index = next(i for i in phases[1:] if any(each.overlaps(first) for each in schedule.ops[i].reads))
    late = replace(schedule.ops[index], reads=(first, *schedule.ops[index].reads))
    with pytest.raises(ScheduleError, match=r"reads w0@0 from .* but finds w0@\d"):
        check(_with(schedule, index, late))


def test_a_fetch_over_what_is_still_read_is_found() -> None:
    model = by_rows(small_spec(2))
    schedule = build_forward(model, replace(ROWS, forward_nbytes=1000), Work((4,)))
    loss = next(op for op in schedule.ops if op.name == "LOSS u3 m0 s3")
    norm = next(access for access in loss.reads if access.content == "w3@0")
    index = next(i for i, op in enumerate(schedule.ops) if op is loss) - 1
    wrong = next(i for i in range(index, 0, -1) if schedule.ops[i].kind == "FETCH")
    (place,) = schedule.ops[wrong].writes
    over = replace(place, start=norm.stop - 64, stop=norm.stop - 64 + place.stop - place.start)
    with pytest.raises(ScheduleError, match="finds"):
        check(_with(schedule, wrong, replace(schedule.ops[wrong], writes=(over,))))


def blocks(*params: ParamSpec, kind: str = "layer", passes: int = 1, **policy: object) -> list[tuple[int, int, int]]:
    """(start, elements, until) of each block of a unit, with matrices of 128 elements cut at 64."""
    first, *_, last = small_spec(1).units
    unit = UnitSpec("unit", "layer", params)
    model = ModelSpec("model", (first, unit, last), 8, 64)
    number = 1
    if kind == "epilogue":
        model, number = ModelSpec("m", (*small_spec(1).units[:2], replace(unit, kind="epilogue")), 8, 64), 2
    of = replace(Policy(shard_nbytes=128, gates="rows"), **policy)  # type: ignore[arg-type]
    return [(each.start, each.size, each.until) for each in blocks_of(model, of, [number], passes)]


MATRIX = ParamSpec("matrix", (4, 32), by_rows=True)


def test_a_bias_comes_ahead_of_the_rows_that_it_is_added_to_and_stays_with_them() -> None:
    bias, last = ParamSpec("bias", (4,)), ParamSpec("last", (64,))
    assert blocks(replace(MATRIX, held=1), bias, last) == [(128, 32, 2), (0, 64, 1), (64, 64, 2), (160, 64, 3)]


def test_a_matrix_that_is_read_otherwise_or_again_comes_whole() -> None:
    whole, last = replace(MATRIX, by_rows=False), ParamSpec("last", (64,))
    assert blocks(whole, last) == [(0, 128, 0), (128, 64, 1)]
    assert blocks(replace(whole, held=1), last) == [(0, 128, 1), (128, 64, 1)]
    assert blocks(replace(whole, held=-1), last, last) == [(0, 128, 2), (128, 64, 1), (192, 64, 2)]
    assert blocks(MATRIX, last, gates="shard") == [(0, 128, 0), (128, 64, 1)]
    assert blocks(MATRIX, last, mlp_chunk_tokens=4) == [(0, 192, 0)], (
        "chunks come back to what the ones before have used"
    )


def test_of_a_layer_in_part_frozen_all_stay() -> None:
    """Its parameters are not in order of use."""
    assert blocks(MATRIX, ParamSpec("last", (64,), trainable=False)) == [(0, 192, 0)]


def test_small_parameters_lie_with_their_neighbours() -> None:
    norm, large = ParamSpec("norm", (32,)), ParamSpec("large", (16, 32))
    assert blocks(norm, large, norm, ParamSpec("next", (64,))) == [(0, 576, 0), (576, 64, 1)]
    bias = ParamSpec("bias", (32,), held=1)  # read with what comes behind it: what is before it need not stay for that
    assert blocks(large, bias, large) == [(0, 512, 0), (512, 544, 1)]


def test_the_rows_of_a_head_come_again_for_each_chunk_and_all_else_stays() -> None:
    norm = ParamSpec("norm", (32,))
    found = blocks(norm, MATRIX, kind="epilogue", passes=2)
    assert found == [(0, 32, 4), (32, 64, 1), (96, 64, 2), (32, 64, 3), (96, 64, 4)]


@pytest.mark.parametrize("wrong", [{"gates": "unit"}, {"gates": "shard", "shares_memory": True}])
def test_a_policy_without_gates_or_with_one_memory_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=r"policy\.forward_nbytes: weights pass .*; use"):
        Policy(forward_nbytes=1000, **wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"forward_nbytes: -1 is not valid; use a whole number, 0 to 2\*\*60"):
        Policy(forward_nbytes=-1)
