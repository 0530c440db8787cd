"""How fast the disk under a folder reads and writes, by block size and by how many are under way.

Direct I/O on a file without a name, which is gone when it is closed, whatever happens. One blocking call per thread
keeps as many blocks in flight as there are threads, because calls release the GIL. Where direct I/O is refused (by some
network and memory file systems) the calls go through the page cache: writes are then timed until they are on the
device, and reads begin after the cache was asked to forget. It leaves out what a drive sustains once its own cache is
full, which a short burst cannot tell.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path

from megatrain.errors import DeviceError
from megatrain.spec.hardware import DiskRate

BLOCKS = (128 << 10, 512 << 10, 2 << 20, 8 << 20)
DEPTHS = (1, 2, 4, 8)
LARGE_BLOCK = 2 << 20
"""A call costs next to nothing beside so many bytes, and a region of a few still keeps several under way."""
ABOUT_AS_QUICK = 1.1
DUPLEX_SHARE = 0.15
"""Of the time, for both directions at once."""
_GRID = sorted(((block, depth) for block in BLOCKS for depth in DEPTHS), key=lambda pair: -pair[0] * pair[1])
"""The pairs from which most is in flight come first, in case that time runs out."""


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """What was measured in one folder."""

    rates: tuple[DiskRate, ...]
    best: DiskRate
    """The pair of block and depth with which a byte is written and read back soonest; of those about as quick, the one
    that takes the fewest calls."""
    duplex_read_bandwidth: float
    """With that pair, in both directions at once."""
    duplex_write_bandwidth: float
    direct: bool
    """Whether the page cache was out of the way."""
    file_nbytes: int
    written_nbytes: int
    """All that was written, which counts against the endurance of the drive."""


def refuse_unwritable(folder: Path) -> None:
    """Raise `DeviceError` unless a file can be made in `folder`."""
    with _nameless(folder):
        return


def disk_speed(folder: Path, nbytes: int, seconds: float) -> DiskSpeed:
    """Measure in `folder` on a file of `nbytes` at most, in about `seconds`. Leaves nothing behind.

    Raises `DeviceError` where no file can be made there, or the disk is full.
    """
    with _nameless(folder) as file, ThreadPoolExecutor(2 * max(DEPTHS)) as threads:
        bench = _Bench(file, threads)
        bench.direct = bench.go_direct()
        began = time.perf_counter()
        bench.fill(max(nbytes // BLOCKS[-1], 1) * BLOCKS[-1], seconds / 4)
        rates: list[DiskRate] = []
        together, seconds = seconds * DUPLEX_SHARE, seconds * (1 - DUPLEX_SHARE)
        for index, (block, depth) in enumerate(_GRID):
            left = seconds - (time.perf_counter() - began)
            if rates and left <= 0:
                break
            share = max(left, 0.0) / (len(_GRID) - index) / 2
            written = bench.bandwidth(bench.write, block, depth, share)
            read = bench.bandwidth(bench.read, block, depth, share)
            rates.append(DiskRate(block, depth, read, written))
        best = _best(rates)
        duplex = bench.duplex(best.block_nbytes, best.depth, together)
        return DiskSpeed(
            tuple(sorted(rates, key=_place)), best, *duplex, bench.direct, bench.nbytes, bench.written_nbytes
        )


def _best(rates: Sequence[DiskRate]) -> DiskRate:
    """A burst of a tenth of a second is a noisy measure, so what is about as quick as the quickest counts as such."""

    def seconds(rate: DiskRate) -> float:
        return 1 / rate.read_bandwidth + 1 / rate.write_bandwidth

    limit = ABOUT_AS_QUICK * min(map(seconds, rates))
    near = (rate for rate in rates if seconds(rate) <= limit)
    return max(near, key=lambda rate: (min(rate.block_nbytes, LARGE_BLOCK), -rate.block_nbytes, -rate.depth))


def _place(rate: DiskRate) -> tuple[int, int]:
    return rate.block_nbytes, rate.depth


class _Bench:
    """A file, threads with an aligned buffer each, and the reads and writes between them."""

    def __init__(self, file: int, threads: ThreadPoolExecutor) -> None:
        self.direct = False
        self.nbytes = 0
        """Of the file, as far as it has been filled."""
        self.written_nbytes = 0
        self._file, self._threads = file, threads
        self._noise = memoryview(_aligned(BLOCKS[-1]))
        self._noise[:] = os.urandom(BLOCKS[-1])  # no drive can compress it
        self._buffers = [memoryview(_aligned(BLOCKS[-1])) for _ in range(max(DEPTHS))]

    def go_direct(self) -> bool:
        """Take the page cache out of the way, if the file system lets us."""
        if not hasattr(os, "O_DIRECT"):
            return False
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwrite(self._file, self._noise[: BLOCKS[0]], 0)
        except OSError:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
            return False
        return True

    def fill(self, nbytes: int, seconds: float) -> None:
        """Make the file as large as `nbytes`, or as gets written in `seconds`: at least one block."""
        began = time.perf_counter()
        while self.nbytes < nbytes and (self.nbytes == 0 or time.perf_counter() - began < seconds):
            self.write(0, self.nbytes, BLOCKS[-1])
            self.nbytes += BLOCKS[-1]
            self.written_nbytes += BLOCKS[-1]
        os.fsync(self._file)

    def write(self, thread: int, start: int, nbytes: int) -> None:
        if os.pwrite(self._file, self._noise[:nbytes], start) != nbytes:
            raise OSError("the disk took less than it was given")

    def read(self, thread: int, start: int, nbytes: int) -> None:
        if os.preadv(self._file, [self._buffers[thread][:nbytes]], start) != nbytes:
            raise OSError("the disk gave less than it was asked for")

    def bandwidth(self, call: Callable[[int, int, int], None], block: int, depth: int, seconds: float) -> float:
        """Bytes per second of `call` over at most the whole file once, by `depth` threads at a time."""
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()

        def work(thread: int) -> int:
            done = 0
            for start in range(thread * block, self.nbytes, depth * block):
                call(thread, start, block)
                done += block
                if time.perf_counter() - began > seconds:
                    break
            return done

        done = sum(self._threads.map(work, range(depth)))
        if call == self.write:
            os.fdatasync(self._file)
            self.written_nbytes += done
        return done / (time.perf_counter() - began)

    def duplex(self, block: int, depth: int, seconds: float) -> tuple[float, float]:
        """Bytes per second read and written while both are under way, by `depth` threads each."""
        began = time.perf_counter()

        def work(job: tuple[Callable[[int, int, int], None], int]) -> int:
            call, thread = job
            done = 0
            for start in cycle(range(thread * block, self.nbytes, depth * block)):
                call(thread, start, block)
                done += block
                if time.perf_counter() - began > seconds:
                    break
            return done

        done = list(self._threads.map(work, product((self.read, self.write), range(depth))))
        os.fdatasync(self._file)
        self.written_nbytes += sum(done[depth:])
        spent = time.perf_counter() - began
        return sum(done[:depth]) / spent, sum(done[depth:]) / spent


def _aligned(nbytes: int) -> mmap.mmap:
    """A buffer at the beginning of a page, as direct I/O wants it."""
    return mmap.mmap(-1, nbytes)


@contextmanager
def _nameless(folder: Path) -> Iterator[int]:
    """A new file in `folder` without a name: it vanishes with the process at the latest."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            yield file.fileno()
    except OSError as error:
        what = f"cannot be written ({error.strerror or error})"
        raise DeviceError(what, where=str(folder), fix="give a folder with space that you may write to") from error
