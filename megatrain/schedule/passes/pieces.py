"""Cuts the trained elements of a unit into pieces, which are read, updated and written one after the other.

State on the disk, whichever parts of it are there, passes through the staging ring, a few slots in host memory with a
piece in each. So the host memory that the disk tier needs hardly grows with the units. Blocks of the disk end where
these pieces do and keep their ends, so these pieces depend on nothing that may change during a run. Pieces of streamed
updates pass through device memory instead, and may be as small as shards (`updates`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from megatrain.spec import WEIGHT_NBYTES, ModelSpec, Numerics, Part, Policy
from megatrain.spec.hardware import BLOCK_NBYTES, whole_sectors
from megatrain.spec.layout import ALIGNMENT, NORM_BLOCK, OWNED, Layout, MatrixGroup, Ownership

Piece = tuple[int, int]
"""Elements [start, stop) of the trained elements of a unit that a rank owns."""

PIECE_NBYTES, MOST_PIECES = 64 << 20, 64
"""Bytes of a piece, all its arrays together, which are enough for the full speed of bus and drive; and about how many
pieces a unit has at most. Larger units have larger pieces, since each piece costs a thread some time."""

WHOLE_BLOCKS = BLOCK_NBYTES // 2
"""Elements of which an array of two or four bytes each fills whole blocks of the disk; a multiple of `NORM_BLOCK`."""

LEAST_NUMEL = 1 << 10
"""Elements of the smallest streamed piece, however small shards are; a multiple of `ALIGNMENT`."""

SLOTS = 3
"""Slots that pieces take in turn: one is filled while another is updated or leaves; the third absorbs delays."""

STATE_NBYTES, LOW_BITS_NBYTES = 4, 2
"""Bytes of an element in each array that the optimizer keeps, and of the other half of a master."""


class Array(NamedTuple):
    """One value per trained element, in a part of a unit's state."""

    part: Part
    nbytes: int
    """Of an element."""
    size: int
    """Elements that it has a value of, from the first."""
    start: int = 0
    """Its first byte in the part."""

    def nbytes_in(self, piece: Piece) -> int:
        """Bytes of what it has of a piece, none if it ends before."""
        return self.nbytes * max(0, min(piece[1], self.size) - piece[0])


def arrays_of(trained: Layout, numerics: Numerics) -> tuple[Array, ...]:
    """The arrays of the trained elements that a rank owns, in the order of updates: weights, low bits, those that the
    optimizer keeps, gradient."""
    return _arrays(trained.own_size, trained.own_state_sizes, numerics.weight_nbytes, numerics.grad_nbytes)


@lru_cache(maxsize=1024)
def _arrays(size: int, state_sizes: tuple[int, ...], weight_nbytes: int, grad_nbytes: int) -> tuple[Array, ...]:
    arrays, state_start = [Array(Part.WEIGHTS, weight_nbytes, size)], 0
    if weight_nbytes < WEIGHT_NBYTES["fp32"]:
        arrays.append(Array(Part.LOW_BITS, LOW_BITS_NBYTES, size))
    for covered in state_sizes:
        arrays.append(Array(Part.MOMENTS, STATE_NBYTES, covered, state_start))
        state_start += STATE_NBYTES * covered
    return (*arrays, Array(Part.GRADIENTS, grad_nbytes, size))


def touched_nbytes(arrays: Sequence[Array], piece: Piece) -> int:
    """Bytes that the update of a piece reads and writes: it only reads the gradient."""
    return sum((1 if array.part is Part.GRADIENTS else 2) * array.nbytes_in(piece) for array in arrays)


def disk_pieces(trained: Layout, numerics: Numerics, policy: Policy) -> Sequence[Piece]:
    """The pieces in which state on the disk moves, in order.

    They are cut where blocks of the norm end, with several ranks where this rank's parts of shards do, and where an
    array of the optimizer's ends, so that each array has a value of all elements of a piece or of none.
    """
    return _cut(trained.own_spans, _disk_numel(trained, numerics, policy))


def largest_disk_pieces(trained: Layout, numerics: Numerics, policy: Policy) -> Sequence[Piece]:
    """Of the pieces in which the same arrays have values, the first, which is as large as any of them."""
    numel = _disk_numel(trained, numerics, policy)
    return [(start, min(stop, start + numel)) for start, stop in trained.own_spans]


def _disk_numel(trained: Layout, numerics: Numerics, policy: Policy) -> int:
    element_nbytes = sum(array.nbytes for array in arrays_of(trained, numerics))
    numel = max(PIECE_NBYTES, trained.own_size * element_nbytes // MOST_PIECES) // element_nbytes
    grain = WHOLE_BLOCKS if numel >= WHOLE_BLOCKS else NORM_BLOCK
    if trained.ranks > 1:
        most = max(1, policy.shard_nbytes // numerics.weight_nbytes)
        grain = max(1, most // (OWNED * trained.ranks)) * OWNED
    return max(grain, numel // grain * grain)


def streamed_pieces(trained: Layout, numerics: Numerics, policy: Policy) -> Sequence[Piece]:
    """The pieces in which state in host memory is updated on the device, in order; none is larger than a shard."""
    *state, gradient = [array.nbytes for array in arrays_of(trained, numerics)]
    element_nbytes = sum(state) + (gradient if policy.update == "next_forward" else 0)
    nbytes = min(policy.shard_nbytes, max(PIECE_NBYTES, trained.own_size * element_nbytes // MOST_PIECES))
    return _cut(trained.own_spans, max(LEAST_NUMEL, nbytes // element_nbytes // ALIGNMENT * ALIGNMENT))


@lru_cache(maxsize=1024)
def _cut(spans: Sequence[Piece], numel: int) -> Sequence[Piece]:
    return tuple((at, min(stop, at + numel)) for start, stop in spans for at in range(start, stop, numel))


def merged(pieces: Sequence[Piece], most: int) -> Sequence[Piece]:
    """The same elements in at most `most` pieces, each of them several consecutive ones joined."""
    together = max(1, -(-len(pieces) // most))
    return [(run[0][0], run[-1][1]) for run in (pieces[at : at + together] for at in range(0, len(pieces), together))]


def merged_within(pieces: Sequence[Piece], starts: Sequence[int]) -> Sequence[Piece]:
    """The same elements with all pieces joined that lie between the same two of `starts`; others stay as they are."""
    joined: list[tuple[int, int, int]] = []
    for start, stop in pieces:
        first, last = bisect_right(starts, start), bisect_left(starts, stop)
        if joined and first == last == joined[-1][2]:
            joined[-1] = joined[-1][0], stop, first
        else:
            joined.append((start, stop, first if first == last else -1))
    return [(start, stop) for start, stop, _ in joined]


def cuts_of(part: Part, trained: Layout, numerics: Numerics, policy: Policy) -> tuple[int, ...]:
    """The bytes of a part of state on the disk at which a piece ends. Frozen weights follow the last, in sectors of
    their own."""
    ends = [stop for _, stop in disk_pieces(trained, numerics, policy)]
    arrays = [array for array in arrays_of(trained, numerics) if array.part is part]
    cuts = [array.start + stop * array.nbytes for array in arrays for stop in ends if stop <= array.size]
    return (*cuts[:-1], whole_sectors(cuts[-1])) if part is Part.WEIGHTS and cuts else tuple(cuts)


# Matrices that are updated whole ------------------------------------------------------------------------------------

GROUP_NBYTES = 64 << 20
"""Bytes of the directions of a group, enough for the full speed of the bus; a larger matrix is a group by itself."""

Turn = tuple[Literal["MOMENTUM", "ORTHOGONALIZE", "APPLY"], int]
"""A step of an update, and the number of its piece or group."""


def groups_of(trained: Layout, model: ModelSpec) -> Sequence[MatrixGroup]:
    """The groups of matrices of a unit that are made orthogonal one after the other, whatever the policy is."""
    return trained.matrix_groups(GROUP_NBYTES // model.newton_schulz.nbytes)


def own_groups(trained: Layout, model: ModelSpec, owned: Ownership) -> Sequence[Piece]:
    """The elements of each group that a rank owns, which may be none."""
    return trained.own_groups(GROUP_NBYTES // model.newton_schulz.nbytes, owned)


def ends_of(trained: Layout, model: ModelSpec, owned: Ownership, *, alike: bool) -> Sequence[Piece]:
    """(first, last) place among the elements that a rank owns where it may take a group for ended. alike: the first and
    last of any rank, so that all ranks take steps in one order, as where pieces land on their way; else its own."""
    ranks = owned.all_ranks(trained) if alike else [owned]
    ends = zip(*([stop for _, stop in own_groups(trained, model, rank)] for rank in ranks), strict=True)
    return [(min(of_group), max(of_group)) for of_group in ends]


def in_steps(pieces: Sequence[Piece], start: int, ends: Sequence[Piece], lag: int) -> Iterator[Turn]:
    """The steps of an update of these pieces in an order in which they may run one by one. Those before element `start`
    are updated by elements; ends: as `ends_of` returns them."""
    begun = applied = next((number for number, (_, stop) in enumerate(pieces) if stop > start), len(pieces))
    for number, (_, last) in enumerate(ends):
        while begun < len(pieces) and pieces[begun][0] < last:
            yield "MOMENTUM", begun
            begun += 1
        yield "ORTHOGONALIZE", number
        ready = len(ends) if number == len(ends) - 1 else number + 1 - lag
        while applied < begun and ready and pieces[applied][1] <= ends[ready - 1][0]:
            yield "APPLY", applied
            applied += 1


def most_alive(pieces: Sequence[Piece], groups: Sequence[Piece], ends: Sequence[Piece], lag: int) -> int:
    """The most groups at a time, counted from the first to the last, whose directions are written and not yet
    applied."""
    most, alive = 0, set[int]()
    for step, number in in_steps(pieces, groups[0][0], ends, lag):
        if step == "MOMENTUM":
            alive.update(index for index, _ in within_groups(groups, pieces[number]))
            most = max(most, max(alive) - min(alive) + 1)
        elif step == "APPLY":
            alive -= {index for index, (_, stop) in within_groups(groups, pieces[number]) if stop == groups[index][1]}
    return most


def within_groups(groups: Sequence[Piece], piece: Piece) -> Iterator[tuple[int, Piece]]:
    """(number of a group, elements of the piece in it) of the groups into which a piece reaches."""
    for number, (begin, end) in enumerate(groups):
        start, stop = max(begin, piece[0]), min(end, piece[1])
        if start < stop:
            yield number, (start, stop)
