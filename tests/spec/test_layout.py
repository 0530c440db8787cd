"""The layout: the only source of offsets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatrain.spec import ParamSpec, UnitSpec
from megatrain.spec.layout import ALIGNMENT, layout_of

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
    assert all(shard.stop - shard.start <= max(most, longest_row + ALIGNMENT) for shard in shards)
