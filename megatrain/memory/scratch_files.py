"""Files of the disk tier: without a name, aligned, direct, striped over several drives; gone with the process."""

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
from typing import IO

from megatrain.errors import DiskError, DiskFull
from megatrain.memory.disk_faults import Call
from megatrain.spec.hardware import SECTOR, whole_sectors

# Where bytes lie ------------------------------------------------------------------------------------------------------
#
# Where the bytes of a region lie on scratch files: split over the files by share, cut into blocks, put where room is.
#
# A region is cut at places that are multiples of a sector, once for each file, so that the files of a region are done
# at about the same time whatever its size. Each part is cut into blocks, and each block finds a place of its own: the
# first gap that holds it, else the end of its file, which grows. So what forgotten regions leave is used again, and no
# more than pieces smaller than a block are lost between them. Nothing here touches a file: a plan is made on copies of
# the spaces and kept only if the disk agrees. It leaves out moving blocks to close gaps.


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes [start, start + nbytes) of a region, at `place` of the file of that number; both are at a sector."""

    file: int
    start: int
    nbytes: int
    place: int


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


def lay_out(
    nbytes: int, spaces: Sequence[Space], shares: Sequence[float], block_nbytes: int, begin: int = 0
) -> tuple[Block, ...]:
    """The blocks of so many bytes of a region, from byte `begin` of it on, with places taken from `spaces`, one for
    each share."""
    return tuple(
        Block(file, begin + start, length, space.take(length))
        for file, (space, (first, last)) in enumerate(zip(spaces, split_by_share(nbytes, shares), strict=True))
        for start in range(first, last, block_nbytes)
        for length in [min(block_nbytes, last - start)]
    )


# Files ----------------------------------------------------------------------------------------------------------------
#
# Scratch files: storage without a name, aligned and direct, that is gone with the process whatever ends it.
#
# A file is made without a name where the file system can (`O_TMPFILE`), else it loses its name at once; so even a
# process that is killed leaves nothing behind. Space is allocated when the file grows, not when it is first written, so
# that a full disk is found out then. Where a file system allocates nothing in advance the file is sparse, and a full
# disk is found out by a write.
#
# Transfers go past the page cache (`O_DIRECT`). Where that is refused each write is sent through to the drive at once,
# and after each transfer the cache is asked to forget it: it would take host memory from those that need it, and give
# little back, since a region is read once for each time that it is written.


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
    """The typed form of what the system raised: `what` failed, at `where`, for its reason."""
    kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else DiskError
    fix = _FIXES.get(error.errno or 0, "give a folder on another drive")
    return kind(f"{what} ({error.strerror or error})", where=where, fix=fix)


class ScratchFile:
    """One file in `folder`. Raises `DiskError` if none can be made there. Several threads may transfer at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = _nameless(folder)
        self.number = self._file.fileno()
        self.device = os.fstat(self.number).st_dev
        """Files on one device share its free space."""
        self.write_flags = 0
        try:
            self.direct = self._goes_direct()
        except OSError as error:
            self.close()
            raise as_disk_error(error, "cannot be written", str(folder)) from error

    def free_nbytes(self) -> int:
        """What the file could still grow by. Raises `DiskError`."""
        try:
            found = os.statvfs(self.number)
        except OSError as error:
            raise as_disk_error(error, "does not say how much is free", str(self.folder)) from error
        return found.f_bavail * found.f_frsize

    def resize(self, before: int, after: int) -> None:
        """From so many bytes to so many; what it grows by is allocated. Raises OSError."""
        if after > before and _ALLOCATE is not None:
            try:
                return _ALLOCATE(self.number, before, after - before)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
        os.ftruncate(self.number, after)

    def read(self, views: Sequence[memoryview], place: int, call: Call) -> None:
        """Fill `views`, which begin and end at sectors, from `place` on, by `os.preadv`. Raises OSError."""
        self._transfer(call, views, place, 0)

    def write(self, views: Sequence[memoryview], place: int, call: Call) -> None:
        """Put `views`, which begin and end at sectors, at `place`, by `os.pwritev`. Raises OSError."""
        self._transfer(call, views, place, self.write_flags)

    def close(self) -> None:
        self._file.close()

    def _transfer(self, call: Call, views: Sequence[memoryview], place: int, flags: int) -> None:
        """All of `views`: what the system leaves over is asked for again. Python itself repeats interrupted calls."""
        wanted, start = sum(len(view) for view in views), place
        while views:
            moved = call(self.number, views, place, flags) // SECTOR * SECTOR
            if moved == 0:
                raise OSError(errno.EIO, f"{place - start:,} of {wanted:,} bytes were transferred")
            place += moved
            views = _behind(views, moved)
        if not self.direct and _FORGET is not None:
            os.posix_fadvise(self.number, start, wanted, _FORGET)

    def _goes_direct(self) -> bool:
        """Whether the page cache is out of the way now. Where it is not, writes go through it if they can."""
        if _DIRECT:
            flags = fcntl.fcntl(self.number, fcntl.F_GETFL)
            if self._accepts(lambda: fcntl.fcntl(self.number, fcntl.F_SETFL, flags | _DIRECT)):
                if self._accepts(self._try):
                    return True
                fcntl.fcntl(self.number, fcntl.F_SETFL, flags)
        if _FORGET is not None:
            os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead, to stay behind
        self.write_flags = _WRITE_THROUGH
        if not self._accepts(self._try):
            self.write_flags = 0
        return False

    @staticmethod
    def _accepts(call: Callable[[], object]) -> bool:
        """Whether the system knows how to do this; raises OSError where it knows and fails."""
        try:
            call()
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return False
        return True

    def _try(self) -> None:
        """One sector there and back, and the file empty again."""
        sector = memoryview(mmap.mmap(-1, SECTOR))
        os.pwritev(self.number, [sector], 0, self.write_flags)
        os.preadv(self.number, [sector], 0)
        os.ftruncate(self.number, 0)


def _nameless(folder: Path) -> IO[bytes]:
    """A new file in `folder` without a name."""
    try:
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.exists():
            above = next(parent for parent in folder.absolute().parents if parent.exists())
            raise DiskError("no such folder", where=str(folder), fix=f"make it in {above}, which exists") from error
        raise as_disk_error(error, "cannot be written", str(folder)) from error


def _behind(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of `views` behind so many bytes."""
    left = []
    for view in views:
        if nbytes < len(view):
            left.append(view[nbytes:])
        nbytes = max(nbytes - len(view), 0)
    return left
