"""The layout of a unit: parameter name -> range in one flat buffer. The only source of offsets in the project.

Offsets count *elements*, so that one layout serves every array of the unit (bfloat16 weights, 16 low bits, float32
moments, gradients in either dtype). Each parameter starts at a multiple of `ALIGNMENT` elements, which is at least 64
bytes for every dtype in use: vector loads are aligned and parameters never share a cache line. The gaps hold zeros and
are never read. A tied parameter exists once, in the unit that uses it first.

If several ranks share a unit's state, each owns an equal part of every shard: rank r the r-th, so that all links carry
the same load at any time. Trained and frozen parameters are then padded and cut separately, so that each shard's parts
are equal and begin at a multiple of `OWNED`. In a rank's own buffers its parts follow each other (`Ownership`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from megatrain.spec import Numerics, ParamSpec, Policy, UnitSpec

ALIGNMENT = 32
"""In elements; 64 bytes of bfloat16, 128 bytes of float32."""

NORM_BLOCK = 1 << 16
"""Elements of a gradient whose squares are summed one after the other; the sums of blocks are added exactly."""

OWNED = 1 << 10
"""Granularity of ownership in elements; with several ranks the norm is summed in blocks of it, which thus belong to
one rank each."""

SAVED_AT_ONCE = 1 << 24
"""Elements of a unit's state that a save has in memory at a time, as float32."""


def align(count: int) -> int:
    """`count` elements rounded up to a multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Field:
    """One parameter's range: elements [start, stop) of the flat buffer, viewed as `shape`."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    matrices: int = 0
    """How many matrices, one behind the other, its optimizer needs whole (`ParamSpec.matrices`)."""


SYMMETRIC_ROWS = 1 << 11
"""Rows of a block of a symmetric product: enough to keep a large GPU busy (128 tiles of 128 x 256 on 132 cores)."""


def symmetric_blocks(size: int) -> list[tuple[int, int]]:
    """Blocks [start, stop) of the rows of a symmetric product, of each of which only the columns before `stop` are
    computed: the others mirror what the blocks after it compute."""
    count = max(1, size // SYMMETRIC_ROWS)
    height = -(-size // (ALIGNMENT * count)) * ALIGNMENT
    return [(start, min(start + height, size)) for start in range(0, size, height)]


class Matrices(NamedTuple):
    """Matrices of one shape, one behind the other from element `start` of their unit on."""

    start: int
    stacked: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.stacked * self.rows * self.columns

    @property
    def products(self) -> int:
        """Multiplications of one iteration of Newton-Schulz on one of them (`train.torch_muon`)."""
        small, large = sorted((self.rows, self.columns))
        computed = sum((stop - start) * stop for start, stop in symmetric_blocks(small))
        return computed * (large + small) + small * small * large


class MatrixGroup(NamedTuple):
    """Whole matrices that follow each other among the elements [start, stop) of a unit."""

    start: int
    stop: int
    stacks: tuple[Matrices, ...]

    def shares(self, ranks: int) -> tuple[MatrixGroup, ...]:
        """The group cut between matrices, a part for each rank, such that the longest has the fewest products that it
        can have. The first parts have matrices; the last may be empty."""
        return (self,) if ranks == 1 else _shares(self, ranks)


@lru_cache(maxsize=4096)
def _shares(group: MatrixGroup, ranks: int) -> tuple[MatrixGroup, ...]:
    low, high = 0, sum(stack.stacked * stack.products for stack in group.stacks)
    while low < high:
        most = (low + high) // 2
        low, high = (low, most) if 0 < len(_cut_at(most, group.stacks)) <= ranks else (most + 1, high)
    cut = [*_cut_at(low, group.stacks)]
    cut += [()] * (ranks - len(cut))
    ends = [*(share[0].start if share else group.stop for share in cut), group.stop]
    return tuple(MatrixGroup(start, stop, share) for (start, stop), share in zip(pairwise(ends), cut, strict=True))


def _cut_at(most: int, stacks: Sequence[Matrices]) -> list[tuple[Matrices, ...]]:
    """Matrices in shares of at most so many products each; none if one matrix has more."""
    shares: list[list[Matrices]] = [[]]
    free = most
    for stack in stacks:
        at, size = stack.start, stack.rows * stack.columns
        if stack.products > most:
            return []
        while at < stack.stop:
            if free < stack.products:
                shares.append([])
                free = most
            count = min(free // stack.products, (stack.stop - at) // size)
            shares[-1].append(stack._replace(start=at, stacked=count))
            at, free = at + count * size, free - count * stack.products
    return [tuple(share) for share in shares]


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous range of elements [start, stop) of a unit, cut between parameters or rows; with several ranks
    anywhere."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """All fields of one unit in order; `size` is the length of the flat buffer in elements.

    The first `trained_fields` of them train; see `trained`. `ranks` share its state.
    """

    fields: tuple[Field, ...]
    size: int
    trained_fields: int
    files_start: int
    """First element of the weights in the model's files, which come last; `size` if there are none."""
    ranks: int = 1
    state_sizes: tuple[int, ...] = ()
    """For each array that the optimizer keeps, how many elements, from the first, it has a value of."""
    matrices_start: int = 0
    """First trained element that is updated with the whole matrix that it is in; `trained.size` if there is none."""

    @cached_property
    def trained(self) -> Layout:
        """The layout of the trained parameters, a prefix of this one: that of gradients and moments."""
        fields = self.fields[: self.trained_fields]
        following = self.fields[self.trained_fields :]
        size = 0 if not fields else following[0].start if following else self.size
        return Layout(fields, size, len(fields), size, self.ranks, self.state_sizes, self.matrices_start)

    @property
    def own_size(self) -> int:
        """Elements of the unit that one rank owns, which is the length of its state buffers."""
        return self.size // self.ranks

    @cached_property
    def own_state_sizes(self) -> tuple[int, ...]:
        """For each array that the optimizer keeps, of how many elements that one rank owns it has a value."""
        return tuple(size // self.ranks for size in self.state_sizes)

    @property
    def own_matrices_start(self) -> int:
        """First element that a rank owns of those that are updated with the whole matrix that they are in."""
        return self.matrices_start // self.ranks

    @cached_property
    def own_spans(self) -> tuple[tuple[int, int], ...]:
        """The ranges [start, stop) of the trained elements that one rank owns, cut where an array of the optimizer's
        ends, and where matrices begin that are updated whole."""
        ends = {0, *self.own_state_sizes, self.own_matrices_start, self.trained.own_size}
        return tuple(pairwise(sorted(ends)))

    @cached_property
    def by_name(self) -> dict[str, Field]:
        return {field.name: field for field in self.fields}

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Element ranges that belong to no parameter."""
        following = [*(field.start for field in self.fields[1:]), self.size]
        ends = [(field.stop, start) for field, start in zip(self.fields, following, strict=True)]
        return tuple((start, stop) for start, stop in ends if start < stop)

    def shards(self, most: int) -> tuple[Shard, ...]:
        """Cut the unit into shards of at most `most` elements, not counting padding at a shard's end.

        A longer row is one shard; with several ranks a shard has at least `OWNED` elements per rank.
        """
        if most not in self._known_shards:
            self._known_shards[most] = self._cut(most)
        return self._known_shards[most]

    @cached_property
    def _known_shards(self) -> dict[int, tuple[Shard, ...]]:
        return {}

    def matrix_groups(self, most: int) -> tuple[MatrixGroup, ...]:
        """The matrices that are updated whole, in groups of at most `most` elements; a larger matrix is one group.

        The groups cover all trained elements from `matrices_start` on. With several ranks, which share the matrices of
        a group, it has so many elements, or the largest matrix of the unit, for each rank.
        """
        if most not in self._known_groups:
            self._known_groups[most] = self._group(most)
        return self._known_groups[most]

    @cached_property
    def _known_groups(self) -> dict[int, tuple[MatrixGroup, ...]]:
        return {}

    def own_groups(self, most: int, owned: Ownership) -> tuple[tuple[int, int], ...]:
        """The elements of each of the `matrix_groups` that a rank owns, which may be none."""
        key = most, owned if self.ranks > 1 else Ownership()
        if key not in self._known_own_groups:
            groups = self.matrix_groups(most)
            ends = (owned.before(self, element) for element in (*(group.start for group in groups), self.size))
            self._known_own_groups[key] = tuple(pairwise(ends))
        return self._known_own_groups[key]

    @cached_property
    def _known_own_groups(self) -> dict[tuple[int, Ownership], tuple[tuple[int, int], ...]]:
        return {}

    def _group(self, most: int) -> tuple[MatrixGroup, ...]:
        groups: list[list[Matrices]] = []
        if self.ranks > 1:
            sizes = [(field.stop - field.start) // field.matrices for field in self.fields if field.matrices]
            most = self.ranks * max([most, *sizes])
        for field in self.fields[: self.trained_fields]:
            size = (field.stop - field.start) // max(1, field.matrices)
            at, stop = field.start, field.stop if field.matrices else field.start
            while at < stop:
                fit = (groups[-1][0].start + most - at) // size if groups else 0
                if fit < 1:
                    groups.append([])
                    fit = max(1, most // size)
                count = min(fit, (stop - at) // size)
                groups[-1].append(Matrices(at, count, size // field.shape[-1], field.shape[-1]))
                at += count * size
        ends = [*(group[0].start for group in groups[1:]), self.trained.size]
        return tuple(MatrixGroup(group[0].start, end, tuple(group)) for group, end in zip(groups, ends, strict=False))

    def _cut(self, most: int) -> tuple[Shard, ...]:
        if self.ranks > 1:
            ends = sorted({0, *self.state_sizes, self.matrices_start, self.trained.size, self.size})
            step = max(1, most // (OWNED * self.ranks)) * OWNED * self.ranks
            cuts = [(at, min(at + step, stop)) for start, stop in pairwise(ends) for at in range(start, stop, step)]
            return tuple(Shard(index, start, stop) for index, (start, stop) in enumerate(cuts))
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
        """Every allowed cut, ascending: the ends of parameters, and of row blocks of large ones."""
        for field in self.fields:
            if field.stop - field.start > most and len(field.shape) > 1:
                row = (field.stop - field.start) // field.shape[0]
                step = max(1, most // row) * row
                yield from range(field.start + step, field.stop, step)
            yield align(field.stop)


def layout_of(unit: UnitSpec) -> Layout:
    """The layout of a unit's own parameters (borrowed ones are in their owner's)."""
    known = _KNOWN.get(id(unit.params))
    if known is None or known[0] is not unit.params or known[1].ranks != unit.ranks:
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        known = _KNOWN[id(unit.params)] = unit.params, _layout_of_params(unit.params, unit.ranks)
    return known[1]


MOST_KNOWN = 1 << 14
_KNOWN: dict[int, tuple[tuple[ParamSpec, ...], Layout]] = {}
"""`id` of a tuple of parameters -> the tuple (kept alive so that its `id` stays unique) and its layout. A plan search
needs it hundreds of thousands of times, and hashing the tuple would dominate."""


@lru_cache(maxsize=4096)
def _layout_of_params(params: tuple[ParamSpec, ...], ranks: int) -> Layout:
    fields: list[Field] = []
    offset = 0
    for index, param in enumerate(params):
        matrices = param.matrices if param.trainable else 0
        fields.append(Field(param.name, param.shape, offset, offset + param.numel, matrices))
        offset = _next_start(params, index, offset + param.numel, ranks)
    starts = [*(field.start for field in fields), offset]
    trained = sum(param.trainable for param in params)
    counts = [len(param.state) for param in params[:trained]]
    with_state = (sum(count > number for count in counts) for number in range(max(counts, default=0)))
    elementwise = sum(not param.matrices for param in params[:trained])
    in_files = (field.start for field, param in zip(fields, params, strict=True) if param.file_backed)
    state_sizes = tuple(starts[count] for count in with_state)
    files_start = next(in_files, offset)
    return Layout(tuple(fields), offset, trained, files_start, ranks, state_sizes, starts[elementwise])


def _next_start(params: tuple[ParamSpec, ...], index: int, stop: int, ranks: int) -> int:
    """The first element of what follows a parameter, which ends at `stop`.

    With several ranks each owns a multiple of `OWNED` of what trains, and of all. Where matrices begin that are updated
    whole, or an array of the optimizer's ends, a block of the norm begins, too.
    """
    param, following = params[index], params[index + 1] if index + 1 < len(params) else None
    is_alike = following is not None and following.trainable == param.trainable
    grain = ALIGNMENT if is_alike or ranks == 1 else ranks * OWNED
    if following is not None and following.trainable and _kept(following) != _kept(param):
        grain = ranks * NORM_BLOCK
    return -(-stop // grain) * grain


def _kept(param: ParamSpec) -> tuple[bool, int]:
    """Whether it is updated whole, and how many arrays its optimizer keeps of it."""
    return param.matrices > 0, len(param.state)


# Ownership ------------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Elements [start, stop) of a unit that a rank owns, at element `at` of its own buffers."""

    start: int
    stop: int
    at: int

    @property
    def own(self) -> slice:
        """Their range in the rank's own buffers."""
        return slice(self.at, self.at + self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which part of every unit belongs to `rank`: part number `rank` of each shard of at most `most` elements."""

    rank: int = 0
    most: int = 1

    @staticmethod
    def of(rank: int, numerics: Numerics, policy: Policy) -> Ownership:
        """The part of a rank under a policy."""
        return Ownership(rank, max(1, policy.shard_nbytes // numerics.weight_nbytes))

    def before(self, layout: Layout, element: int) -> int:
        """How many elements of a unit before this one it owns."""
        if layout.ranks == 1:
            return element
        pieces = self.pieces(layout)
        index = bisect_left(pieces, (element,))
        return pieces[index - 1].at + min(element, pieces[index - 1].stop) - pieces[index - 1].start if index else 0

    def all_ranks(self, layout: Layout) -> list[Ownership]:
        """The parts of all ranks that share a unit, in rank order."""
        return [replace(self, rank=rank) for rank in range(layout.ranks)]

    def pieces(self, layout: Layout) -> tuple[Piece, ...]:
        """The pieces of a unit that it owns, in order; with one rank all of it."""
        return _pieces(layout, self.rank, self.most)

    def within(self, layout: Layout, start: int, stop: int) -> Iterator[Piece]:
        """The pieces that it owns of elements [start, stop) of a unit."""
        for piece in self.pieces(layout):
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                yield Piece(first, last, piece.at + first - piece.start)


@lru_cache(maxsize=4096)
def _pieces(layout: Layout, rank: int, most: int) -> tuple[Piece, ...]:
    if layout.ranks == 1:
        return (Piece(0, layout.size, 0),)
    parts = []
    for shard in layout.shards(most):
        each = (shard.stop - shard.start) // layout.ranks
        begin = shard.start + rank * each
        parts.append(Piece(begin, begin + each, shard.start // layout.ranks))
    return tuple(parts)
