"""The layout of a unit: parameter name -> place in one flat buffer. The only source of offsets in the project.

Offsets count *elements*, so that one layout serves every array of the unit (bfloat16 weights, 16 low bits, float32
moments, gradients in either dtype). Each parameter starts on a multiple of `ALIGNMENT` elements, which is 64 bytes or
more for every dtype in use: vector loads are aligned and two parameters never share a cache line. The gaps hold zeros
and are never read. A tied parameter has one place, in the unit that uses it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from megatrain.spec import ParamSpec, UnitSpec

ALIGNMENT = 32
"""Elements; 64 bytes of bfloat16, 128 bytes of float32."""


def align(count: int) -> int:
    """The smallest multiple of `ALIGNMENT` that is at least `count` elements."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Field:
    """The place of one parameter: elements [start, stop) of the flat buffer, viewed as `shape`."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous range of elements [start, stop) of a unit, cut at a parameter or a row of one."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """All fields of one unit, in order; `size` is the length of the flat buffer in elements.

    The first `trained_fields` of them train; see `trained`.
    """

    fields: tuple[Field, ...]
    size: int
    trained_fields: int

    @cached_property
    def trained(self) -> Layout:
        """The layout of what trains, a prefix of this one: that of gradients and moments."""
        fields = self.fields[: self.trained_fields]
        return Layout(fields, align(fields[-1].stop) if fields else 0, len(fields))

    @cached_property
    def by_name(self) -> dict[str, Field]:
        return {field.name: field for field in self.fields}

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Element ranges that belong to no parameter."""
        ends = [(field.stop, align(field.stop)) for field in self.fields]
        return tuple((start, stop) for start, stop in ends if start < stop)

    def shards(self, most: int) -> tuple[Shard, ...]:
        """Cut the unit into shards of at most `most` elements (or one row, where a row is longer)."""
        if most not in self._known_shards:
            self._known_shards[most] = self._cut(most)
        return self._known_shards[most]

    @cached_property
    def _known_shards(self) -> dict[int, tuple[Shard, ...]]:
        return {}

    def _cut(self, most: int) -> tuple[Shard, ...]:
        shards: list[Shard] = []
        start = stop = 0
        for piece_stop in self._cuts(most):
            if piece_stop - start > most and stop > start:
                shards.append(Shard(len(shards), start, stop))
                start = stop
            stop = piece_stop
        if stop > start:
            shards.append(Shard(len(shards), start, stop))
        return tuple(shards)

    def _cuts(self, most: int) -> Iterator[int]:
        """Every place where a cut is allowed, ascending: the ends of parameters, and of row blocks of large ones."""
        for field in self.fields:
            if field.stop - field.start > most and len(field.shape) > 1:
                row = (field.stop - field.start) // field.shape[0]
                step = max(1, most // row) * row
                yield from range(field.start + step, field.stop, step)
            yield align(field.stop)


def layout_of(unit: UnitSpec) -> Layout:
    """The layout of a unit's own parameters (borrowed ones live in their owner's)."""
    known = _KNOWN.get(id(unit.params))
    if known is None or known[0] is not unit.params:
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        known = _KNOWN[id(unit.params)] = unit.params, _layout_of_params(unit.params)
    return known[1]


MOST_KNOWN = 1 << 14
_KNOWN: dict[int, tuple[tuple[ParamSpec, ...], Layout]] = {}
"""The tuple's `id` -> the tuple, kept so that no other has its `id`, and its layout: a search for a plan asks some
hundred thousand times, and to hash a tuple of parameters takes longer than all else that it wants to know."""


@lru_cache(maxsize=4096)
def _layout_of_params(params: tuple[ParamSpec, ...]) -> Layout:
    fields: list[Field] = []
    offset = 0
    for param in params:
        fields.append(Field(param.name, param.shape, offset, offset + param.numel))
        offset = align(offset + param.numel)
    return Layout(tuple(fields), offset, sum(param.trainable for param in params))
