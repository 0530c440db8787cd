"""Cuts the trained elements of a unit into pieces, which are read, updated and written one after the other.

State on the disk, whichever parts of it are there, passes through a small ring of slots in host memory, a piece in each
slot. So the host memory that the disk tier needs hardly grows with the units. Blocks of the disk end where these pieces
do and keep their ends, so these pieces depend on nothing that may change during a run. Pieces of streamed updates pass
through device memory instead, and may be as small as shards (`updates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from megatrain.spec import Numerics, Part, Policy
from megatrain.spec.hardware import whole_sectors
from megatrain.spec.layout import ALIGNMENT, NORM_BLOCK, OWNED, Layout

Piece = tuple[int, int]
"""Elements [start, stop) of the trained elements of a unit that a rank owns."""

PIECE_NBYTES, MOST_PIECES = 64 << 20, 64
"""Bytes of a piece, all its arrays together, which are enough for the full speed of bus and drive; and about how many
pieces a unit has at most. Larger units have larger pieces, since each piece costs a thread some time."""

LEAST_NUMEL = 1 << 10
"""Elements of the smallest streamed piece, however small shards are; a multiple of `ALIGNMENT`."""

SLOTS = 3
"""Slots of a ring: one is filled while another is updated or leaves; the third absorbs delays."""

MOMENTS_NBYTES, LOW_BITS_NBYTES = 8, 2
"""Bytes per trained parameter: float32 m and v; the other halves of masters."""


class Array(NamedTuple):
    """One value per trained element, in a part of a unit's state."""

    part: Part
    nbytes: int
    """Of an element."""
    start: int = 0
    """Its first byte in the part."""


def arrays_of(size: int, numerics: Numerics) -> tuple[Array, ...]:
    """The arrays of `size` trained elements in the order of updates: weights, low bits, m, v, gradient."""
    half = MOMENTS_NBYTES // 2
    low = () if numerics.precision == "fp32" else (Array(Part.LOW_BITS, LOW_BITS_NBYTES),)
    moments = Array(Part.MOMENTS, half), Array(Part.MOMENTS, half, half * size)
    return Array(Part.WEIGHTS, numerics.weight_nbytes), *low, *moments, Array(Part.GRADIENTS, numerics.grad_nbytes)


def disk_pieces(trained: Layout, numerics: Numerics, policy: Policy) -> Sequence[Piece]:
    """The pieces in which state on the disk moves, in order.

    They are cut where blocks of the norm end, with several ranks where this rank's parts of shards do. An optimizer
    that needs whole matrices would name its cuts here.
    """
    grain = NORM_BLOCK
    if trained.ranks > 1:
        most = max(1, policy.shard_nbytes // numerics.weight_nbytes)
        grain = max(1, most // (OWNED * trained.ranks)) * OWNED
    element_nbytes = sum(array.nbytes for array in arrays_of(trained.own_size, numerics))
    nbytes = max(PIECE_NBYTES, trained.own_size * element_nbytes // MOST_PIECES)
    return _cut(trained.own_size, max(grain, nbytes // element_nbytes // grain * grain))


def streamed_pieces(trained: Layout, numerics: Numerics, policy: Policy) -> Sequence[Piece]:
    """The pieces in which state in host memory is updated on the device, in order; none is larger than a shard."""
    *state, gradient = [array.nbytes for array in arrays_of(trained.own_size, numerics)]
    element_nbytes = sum(state) + (gradient if policy.update == "next_forward" else 0)
    nbytes = min(policy.shard_nbytes, max(PIECE_NBYTES, trained.own_size * element_nbytes // MOST_PIECES))
    return _cut(trained.own_size, max(LEAST_NUMEL, nbytes // element_nbytes // ALIGNMENT * ALIGNMENT))


@lru_cache(maxsize=1024)
def _cut(size: int, numel: int) -> Sequence[Piece]:
    return tuple((start, min(size, start + numel)) for start in range(0, size, numel))


def merged(pieces: Sequence[Piece], most: int) -> Sequence[Piece]:
    """The same elements in at most `most` pieces, each of them several consecutive ones joined."""
    together = max(1, -(-len(pieces) // most))
    return [(run[0][0], run[-1][1]) for run in (pieces[at : at + together] for at in range(0, len(pieces), together))]


def cuts_of(part: Part, trained: Layout, numerics: Numerics, policy: Policy) -> tuple[int, ...]:
    """The bytes of a part of state on the disk at which a piece ends. Frozen weights follow the last, in sectors of
    their own."""
    ends = [stop for _, stop in disk_pieces(trained, numerics, policy)]
    arrays = [array for array in arrays_of(trained.own_size, numerics) if array.part is part]
    cuts = [array.start + stop * array.nbytes for array in arrays for stop in ends]
    return (*cuts[:-1], whole_sectors(cuts[-1])) if part is Part.WEIGHTS and cuts else tuple(cuts)
