"""Scratch files of the disk tier: nameless, aligned, direct I/O, striped over drives, gone when the process ends."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Literal

from megatrain.errors import DiskError, DiskFull
from megatrain.spec.hardware import SECTOR, whole_sectors
from megatrain.system.paths import compresses_what_is_not_preallocated, is_cached

Direction = Literal["read", "write"]

Call = Callable[[int, Sequence[memoryview], int, int], int]
"""`os.preadv` or `os.pwritev`: (file, views, place, flags) -> bytes transferred."""

Calls = Callable[[Direction, str, Call], Call]
"""(direction, name of a region, the system call) -> the call that transfers the region's next block."""


def system_calls(direction: Direction, region: str, call: Call) -> Call:
    """The system's own."""
    return call


# Where bytes lie ------------------------------------------------------------------------------------------------------
#
# A region is split over the files by share, at sector boundaries, so that all files finish at about the same time. Each
# part is cut into blocks, and each block goes to the first gap that holds it, else to the end of its file, which grows.
# So the space of forgotten regions is reused, and only pieces smaller than a block are lost. No file is touched here:
# a layout is made on copies of the spaces and kept only if the disk has room. Blocks are not moved to close gaps.


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes [start, start + nbytes) of a region, at offset `place` of file number `file`; both sector-aligned."""

    file: int
    start: int
    nbytes: int
    place: int

    def cut(self, first: int, last: int) -> Block:
        """Its bytes [first, last), as far as it has them."""
        if first == 0 and last >= self.nbytes:
            return self
        return Block(self.file, self.start + first, min(last, self.nbytes) - first, self.place + first)


class Space:
    """The used ranges of one file. `nbytes`: the file's required length, including gaps between blocks."""

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
        """Reserve this many bytes, rounded up to whole sectors; returns their place."""
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
        """Turn what `take` reserved into a gap again, merged with its neighbours."""
        insort(self._gaps, (place, place + whole_sectors(nbytes)))
        joined: list[tuple[int, int]] = []
        for start, stop in self._gaps:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        self._gaps = joined


def split_by_share(nbytes: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """(start, stop) of each file's part of a region, in order. Cut at sectors; a part may be empty."""
    sums = list(accumulate(shares))
    cuts = [min(whole_sectors(round(nbytes * reached / sums[-1])), nbytes) for reached in sums[:-1]]
    return list(zip([0, *cuts], [*cuts, nbytes], strict=True))


def lay_out(
    nbytes: int, spaces: Sequence[Space], shares: Sequence[float], block_nbytes: int, begin: int = 0
) -> tuple[Block, ...]:
    """Blocks for this many bytes of a region, from its byte `begin` on, with places taken from `spaces` (one per
    share)."""
    return tuple(
        Block(file, begin + start, length, space.take(length))
        for file, (space, (first, last)) in enumerate(zip(spaces, split_by_share(nbytes, shares), strict=True))
        for start in range(first, last, block_nbytes)
        for length in [min(block_nbytes, last - start)]
    )


# Files ----------------------------------------------------------------------------------------------------------------
#
# A file is created without a name if the file system supports it (`O_TMPFILE`), else unlinked at once; so even a killed
# process leaves nothing behind. Space is allocated when the file grows, so that a full disk is found then; on a file
# system that cannot preallocate, and for a caller who wants the file system to compress, the file is sparse, and a
# write finds out.
#
# Transfers bypass the page cache (`O_DIRECT`). Where they cannot, each write is flushed to the drive at once, and the
# cache is asked to drop each transfer: it would take host memory for little use, since a region is read only once per
# write.


_DIRECT: int = getattr(os, "O_DIRECT", 0)
_WRITE_THROUGH: int = getattr(os, "RWF_DSYNC", 0)
_ALLOCATE: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
_FORGET: int | None = getattr(os, "POSIX_FADV_DONTNEED", None)
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)

_FIXES = {
    errno.EACCES: "give a folder that you may write to",
    errno.EPERM: "give a folder that you may write to",
    errno.EROFS: "give a folder on a file system that is not read-only",
    errno.ENOTDIR: "give a folder, not a file",
    errno.EIO: "look for errors of the drive in the system's log, or give a folder on another drive",
    errno.ENOSPC: "free space there, or give a folder on another drive",
    errno.EDQUOT: "free space there, ask for a larger quota, or give a folder on another drive",
}


def as_disk_error(error: OSError, what: str, where: str) -> DiskError:
    """The `DiskError` for a system error: `what` failed, at `where`, for its reason."""
    kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else DiskError
    fix = _FIXES.get(error.errno or 0, "give a folder on another drive")
    return kind(f"{what} ({error.strerror or error})", where=where, fix=fix)


class ScratchFile:
    """One file in `folder`. Raises `DiskError` if it cannot be created. Several threads may transfer concurrently.

    preallocate: whether its space is allocated as it grows.
    """

    def __init__(self, folder: Path, *, preallocate: bool = True) -> None:
        self.folder = folder
        self._preallocates = preallocate
        self._file = _nameless(folder)
        self.number = self._file.fileno()
        self.device = os.fstat(self.number).st_dev
        """Device number; files on one device share its free space."""
        self.write_flags = 0
        self._cached = False
        try:
            self.direct = self._goes_direct()
        except OSError as error:
            self.close()
            raise as_disk_error(error, "cannot be written", str(folder)) from error

    def free_nbytes(self) -> int:
        """Bytes by which the file could still grow. Raises `DiskError`."""
        try:
            status = os.statvfs(self.number)
        except OSError as error:
            raise as_disk_error(error, "does not report its free space", str(self.folder)) from error
        return status.f_bavail * status.f_frsize

    def resize(self, before: int, after: int) -> None:
        """Resize from `before` to `after` bytes; growth is allocated, if that is wanted. Raises OSError."""
        if after > before and self._preallocates and _ALLOCATE is not None:
            try:
                return _ALLOCATE(self.number, before, after - before)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
        os.ftruncate(self.number, after)

    def read(self, view: memoryview, place: int, call: Call) -> None:
        """Fill `view`, sector-aligned at both ends, from offset `place`, by `os.preadv`. Raises OSError."""
        self._transfer(call, view, place, 0)

    def write(self, view: memoryview, place: int, call: Call) -> None:
        """Write `view`, sector-aligned at both ends, to offset `place`, by `os.pwritev`. Raises OSError."""
        self._transfer(call, view, place, self.write_flags)

    def close(self) -> None:
        self._file.close()

    def _transfer(self, call: Call, view: memoryview, place: int, flags: int) -> None:
        """Transfer all of `view`, repeating partial transfers. Python itself repeats interrupted calls."""
        done = 0
        while done < len(view):
            moved = call(self.number, [view[done:]], place + done, flags) // SECTOR * SECTOR
            if moved == 0:
                raise OSError(errno.EIO, f"{done:,} of {len(view):,} bytes were transferred")
            done += moved
        if not self.direct and _FORGET is not None:
            os.posix_fadvise(self.number, place, len(view), _FORGET)

    def _goes_direct(self) -> bool:
        """Whether transfers bypass the page cache; if not, make writes synchronous if possible."""
        if _DIRECT and (self._preallocates or not compresses_what_is_not_preallocated(self.folder)):
            flags = fcntl.fcntl(self.number, fcntl.F_GETFL)
            if self._accepts(lambda: fcntl.fcntl(self.number, fcntl.F_SETFL, flags | _DIRECT)):
                if self._accepts(self._try) and not self._cached:
                    return True
                fcntl.fcntl(self.number, fcntl.F_SETFL, flags)
        if _FORGET is not None:
            os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead into the cache
        self.write_flags = _WRITE_THROUGH
        if not self._accepts(self._try):
            self.write_flags = 0
        return False

    @staticmethod
    def _accepts(call: Callable[[], object]) -> bool:
        """Whether the system supports this call; raises OSError if it does but fails."""
        try:
            call()
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return False
        return True

    def _try(self) -> None:
        """Write and read back one sector, then empty the file."""
        sector = memoryview(mmap.mmap(-1, SECTOR))
        os.pwritev(self.number, [sector], 0, self.write_flags)
        self._cached = is_cached(self.number, sector)
        os.preadv(self.number, [sector], 0)
        os.ftruncate(self.number, 0)


def _nameless(folder: Path) -> IO[bytes]:
    """A new nameless file in `folder`."""
    try:
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.exists():
            above = next(parent for parent in folder.absolute().parents if parent.exists())
            raise DiskError("no such folder", where=str(folder), fix=f"create it in {above}, which exists") from error
        raise as_disk_error(error, "cannot be written", str(folder)) from error
