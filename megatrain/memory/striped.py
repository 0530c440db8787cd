"""Where the bytes of a region lie on scratch files: split over the files by share, cut into blocks, put where room is.

A region is cut at places that are multiples of a sector, once for each file, so that the files of a region are done at
about the same time whatever its size. Each part is cut into blocks, and each block finds a place of its own: the first
gap that holds it, else the end of its file, which grows. So what forgotten regions leave is used again, and no more
than pieces smaller than a block are lost between them. Nothing here touches a file: a plan is made on copies of the
spaces and kept only if the disk agrees. It leaves out moving blocks to close gaps.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

SECTOR = 4096
"""Bytes. Direct transfers begin and end at multiples of it, in memory and in files, on every drive known to us."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes [start, start + nbytes) of a region, at `place` of the file of that number; both are at a sector."""

    file: int
    start: int
    nbytes: int
    place: int


def whole_sectors(nbytes: int) -> int:
    """The bytes of the sectors that so many bytes take."""
    return -(-nbytes // SECTOR) * SECTOR


class Space:
    """What of one file is taken. `nbytes`: how long the file must be; between its blocks there may be gaps."""

    def __init__(self, nbytes: int = 0, gaps: Sequence[tuple[int, int]] = ()) -> None:
        self.nbytes = nbytes
        self._gaps = list(gaps)
        """(start, stop), ascending; no two of them touch."""

    def copy(self) -> Space:
        return Space(self.nbytes, self._gaps)

    @property
    def unused_nbytes(self) -> int:
        return sum(stop - start for start, stop in self._gaps)

    def take(self, nbytes: int) -> int:
        """The place of so many bytes, rounded up to whole sectors, that are now taken."""
        nbytes = whole_sectors(nbytes)
        for index, (start, stop) in enumerate(self._gaps):
            if stop - start >= nbytes or stop == self.nbytes:
                rest = [(start + nbytes, stop)] if stop - start > nbytes else []
                self._gaps[index : index + 1] = rest
                self.nbytes = max(self.nbytes, start + nbytes)
                return start
        self.nbytes += nbytes
        return self.nbytes - nbytes

    def give(self, place: int, nbytes: int) -> None:
        """What `take` gave is a gap again, one with its neighbours."""
        insort(self._gaps, (place, place + whole_sectors(nbytes)))
        joined: list[tuple[int, int]] = []
        for start, stop in self._gaps:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        self._gaps = joined


def split_by_share(nbytes: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """(start, stop) of each file's part of a region, in order. Cuts are at sectors; a part may be empty."""
    sums = list(accumulate(shares))
    cuts = [min(whole_sectors(round(nbytes * reached / sums[-1])), nbytes) for reached in sums[:-1]]
    return list(zip([0, *cuts], [*cuts, nbytes], strict=True))


def lay_out(nbytes: int, spaces: Sequence[Space], shares: Sequence[float], block_nbytes: int) -> tuple[Block, ...]:
    """The blocks of a region of so many bytes, with places taken from `spaces`, one for each share."""
    return tuple(
        Block(file, start, length, space.take(length))
        for file, (space, (first, last)) in enumerate(zip(spaces, split_by_share(nbytes, shares), strict=True))
        for start in range(first, last, block_nbytes)
        for length in [min(block_nbytes, last - start)]
    )
