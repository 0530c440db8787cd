"""The layout: the only source of offsets."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import PlanError
from megatrain.spec import ParamSpec, UnitSpec
from megatrain.spec.layout import ALIGNMENT, NORM_BLOCK, OWNED, Ownership, layout_of

shapes = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)


def unit(shapes: list[tuple[int, ...]]) -> UnitSpec:
    return UnitSpec("u", "layer", tuple(ParamSpec(f"p{i}", shape) for i, shape in enumerate(shapes)))


@given(shapes)
def test_fields_are_aligned_disjoint_and_in_order(sizes: list[tuple[int, ...]]) -> None:
    layout = layout_of(unit(sizes))
    assert [field.shape for field in layout.fields] == sizes
    assert all(field.start % ALIGNMENT == 0 for field in layout.fields)
    assert all(left.stop <= right.start for left, right in pairwise(layout.fields))
    covered = sum(field.stop - field.start for field in layout.fields) + sum(b - a for a, b in layout.gaps)
    assert covered == layout.size


@given(shapes, st.integers(1, 3000))
def test_shards_tile_the_unit_and_cut_only_at_parameters_and_rows(sizes: list[tuple[int, ...]], most: int) -> None:
    layout = layout_of(unit(sizes))
    shards = layout.shards(most)
    assert shards[0].start == 0
    assert shards[-1].stop == layout.size
    assert [shard.index for shard in shards] == list(range(len(shards)))
    for left, right in pairwise(shards):
        assert left.stop == right.start
        cut = left.stop
        inside = [f for f in layout.fields if f.start < cut < f.stop]
        assert all((cut - f.start) % ((f.stop - f.start) // f.shape[0]) == 0 for f in inside)
    longest_row = max((f.stop - f.start) // (f.shape[0] if len(f.shape) > 1 else 1) for f in layout.fields)
    for shard in shards:
        last = max(min(f.stop, shard.stop) for f in layout.fields if f.start < shard.stop)
        assert last - shard.start <= max(most, longest_row), "without the padding at its end"


@given(shapes, st.integers(0, 8), st.integers(2, 5), st.integers(1, 9000))
def test_ranks_own_equal_parts_of_every_shard_that_tile_the_unit(
    sizes: list[tuple[int, ...]], trained: int, ranks: int, most: int
) -> None:
    params = tuple(replace(param, trainable=i < trained) for i, param in enumerate(unit(sizes).params))
    alone = layout_of(replace(unit(sizes), params=params))
    layout = layout_of(replace(unit(sizes), params=params, ranks=ranks))
    pieces = [Ownership(rank, most).pieces(layout) for rank in range(ranks)]
    for shard, parts in zip(layout.shards(most), zip(*pieces, strict=True), strict=True):
        assert len({part.stop - part.start for part in parts}) == 1
        assert parts[0].start == shard.start
        assert parts[-1].stop == shard.stop
        assert all(left.stop == right.start for left, right in pairwise(parts))
        assert {part.at for part in parts} == {shard.start // ranks}
    for own in pieces:
        assert sum(piece.stop - piece.start for piece in own) == layout.own_size
        assert all(left.own.stop == right.at for left, right in pairwise(own))
        assert all(piece.start % OWNED == piece.stop % OWNED == 0 for piece in own)
        inside = [piece for piece in own if piece.start < layout.trained.size]
        assert sum(piece.stop - piece.start for piece in inside) == layout.trained.own_size
    assert layout.trained.shards(most) == layout.shards(most)[: len(layout.trained.shards(most))]
    assert alone.trained.fields == layout.trained.fields  # what is summed up for the norm lies where it did
    covered = sum(field.stop - field.start for field in layout.fields) + sum(b - a for a, b in layout.gaps)
    assert covered == layout.size


@given(shapes, st.integers(1, 4), st.integers(1, 9000), st.integers(1, 400))
def test_ranks_share_groups_of_whole_matrices(sizes: list[tuple[int, ...]], ranks: int, most: int, group: int) -> None:
    """By elements, all of which some rank owns once, and by matrices, of which the longest part has the fewest products
    of all ways to cut the group in order."""
    matrices = [replace(param, matrices=1, state=("m",)) for param in unit(sizes).params if len(param.shape) > 1]
    trained = layout_of(replace(unit(sizes), params=tuple(matrices), ranks=ranks)).trained
    groups = trained.matrix_groups(group)
    of_ranks = [trained.own_groups(group, Ownership(rank, most)) for rank in range(ranks)]
    for owned in of_ranks:
        assert [start for start, _ in owned[1:]] == [stop for _, stop in owned[:-1]]
        assert not owned or (owned[0][0], owned[-1][1]) == (0, trained.own_size)
    for whole, parts in zip(groups, zip(*of_ranks, strict=True), strict=True):
        assert sum(stop - start for start, stop in parts) == whole.stop - whole.start
        shares = whole.shares(ranks)
        ends = [whole.start, *(share.stop for share in shares)]
        assert ([share.start for share in shares], whole.stop) == (ends[:-1], ends[-1])
        assert shares[0].stacks
        each = [(stack.start, stack.products) for stack in whole.stacks for _ in range(stack.stacked)]
        given = [
            (stack.start, stack.products) for share in shares for stack in share.stacks for _ in range(stack.stacked)
        ]
        assert given == each
        assert all(share.start <= stack.start < stack.stop <= share.stop for share in shares for stack in share.stacks)
        longest = max(sum(stack.stacked * stack.products for stack in share.stacks) for share in shares)
        costs = [products for _, products in each]
        for cuts in combinations(range(1, len(costs)), min(ranks, len(costs)) - 1):
            parts_of = pairwise([0, *cuts, len(costs)])
            assert longest <= max(sum(costs[start:stop]) for start, stop in parts_of)


@given(shapes, st.integers(1, 4), st.integers(1, 9000))
def test_ranks_own_each_byte_of_a_range_once(sizes: list[tuple[int, ...]], ranks: int, most: int) -> None:
    layout = layout_of(replace(unit(sizes), ranks=ranks))
    for field in layout.fields:
        found = [p for rank in range(ranks) for p in Ownership(rank, most).within(layout, field.start, field.stop)]
        ends = sorted((piece.start, piece.stop) for piece in found)
        assert (ends[0][0], ends[-1][1]) == (field.start, field.stop)
        assert all(left[1] == right[0] for left, right in pairwise(ends))


MATRIX = {"state": ("momentum",), "matrices": 1}


@given(shapes, st.integers(1, 4), st.integers(1, 9000), st.data())
def test_arrays_of_the_optimizer_end_where_ranks_do(
    sizes: list[tuple[int, ...]], ranks: int, most: int, data: st.DataObject
) -> None:
    """Each array has values of the first of each rank's elements, those of the parameters that it is kept of."""
    whole = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    params = [replace(param, **MATRIX) if i in whole else param for i, param in enumerate(unit(sizes).params)]
    layout = layout_of(replace(unit(sizes), params=tuple(params), ranks=ranks))
    of = {param.name: param for param in params}
    for number, size in enumerate(layout.state_sizes):
        kept = [field for field in layout.fields if len(of[field.name].state) > number]
        assert layout.fields[: len(kept)] == tuple(kept)
        assert max(field.stop for field in kept) <= size
        assert all(field.start >= size for field in layout.fields[len(kept) :])
        for rank in range(ranks):
            pieces = Ownership(rank, most).pieces(layout)
            own = sum(min(piece.stop, size) - piece.start for piece in pieces if piece.start < size)
            assert own == layout.own_state_sizes[number]
    assert [*layout.own_spans] == [*pairwise(sorted({0, *layout.own_state_sizes, layout.own_size}))]
    if 0 < len(whole) < len(sizes):
        assert layout.matrices_start == layout.state_sizes[1]
        assert layout.matrices_start % (NORM_BLOCK * ranks) == 0


def test_matrices_with_more_state_than_the_rest_are_refused() -> None:
    first, second = unit([(4, 4), (4,)]).params
    with pytest.raises(PlanError, match="unit u: matrices updated whole have more state than its other parameters; d"):
        UnitSpec("u", "layer", (replace(first, matrices=1), replace(second, state=("momentum",))))
