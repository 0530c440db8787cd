"""Measures read and write speed of the disk under a folder, by block size and queue depth.

Uses direct I/O on a nameless file, which disappears when closed, whatever happens. Each thread makes blocking
calls, which release the GIL, so the number of threads is the queue depth. If direct I/O is refused (by some
network and memory file systems) calls go through the page cache: writes are then timed until they are on the
device, and the cache is dropped before reads. A short burst cannot tell what a drive sustains once its own cache
is full.
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
from megatrain.system.paths import is_cached

BLOCKS = (128 << 10, 512 << 10, 2 << 20, 8 << 20)
DEPTHS = (1, 2, 4, 8)
LARGE_BLOCK = 2 << 20
"""Block sizes: large enough to hide the cost of a call, small enough to split a region into several."""
ABOUT_AS_QUICK = 1.1
DUPLEX_SHARE = 0.15
"""Share of the time for both directions at once."""
_GRID = sorted(((block, depth) for block in BLOCKS for depth in DEPTHS), key=lambda pair: -pair[0] * pair[1])
"""(block, depth) pairs, those with most bytes in flight first, in case time runs out."""


@dataclass(frozen=True, slots=True)
class DiskRate:
    """Bytes per second of reads and of writes of `block_nbytes` each, `depth` at a time."""

    block_nbytes: int
    depth: int
    read_bandwidth: float
    write_bandwidth: float


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Results of measuring one folder."""

    best: DiskRate
    """The fastest block size and depth for writing and reading back; among nearly equal ones that with the fewest
    calls."""
    duplex_read_bandwidth: float
    """Rates with these in both directions at once."""
    duplex_write_bandwidth: float
    direct: bool
    """Whether the page cache was bypassed."""
    file_nbytes: int
    written_nbytes: int
    """Bytes written in total, which count against the drive's endurance."""


def refuse_unwritable(folder: Path) -> None:
    """Raise `DeviceError` unless a file can be made in `folder`."""
    with _nameless(folder):
        return


def disk_speed(folder: Path, nbytes: int, seconds: float) -> DiskSpeed:
    """Measure in `folder`, with a file of at most `nbytes`, in about `seconds`. Leaves nothing behind.

    Raises `DeviceError` if no file can be created there, or the disk is full.
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
        return DiskSpeed(best, *duplex, bench.direct, bench.nbytes, bench.written_nbytes)


def _best(rates: Sequence[DiskRate]) -> DiskRate:
    """The fastest rate; since short bursts are noisy, nearly equal ones count as equal."""

    def seconds(rate: DiskRate) -> float:
        return 1 / rate.read_bandwidth + 1 / rate.write_bandwidth

    limit = ABOUT_AS_QUICK * min(map(seconds, rates))
    near = (rate for rate in rates if seconds(rate) <= limit)
    return max(near, key=lambda rate: (min(rate.block_nbytes, LARGE_BLOCK), -rate.block_nbytes, -rate.depth))


class _Bench:
    """A file, threads with an aligned buffer each, and their reads and writes."""

    def __init__(self, file: int, threads: ThreadPoolExecutor) -> None:
        self.direct = False
        self.nbytes = 0
        """Bytes of the file that have been filled."""
        self.written_nbytes = 0
        self._file, self._threads = file, threads
        self._noise = memoryview(_aligned(BLOCKS[-1]))
        self._noise[:] = os.urandom(BLOCKS[-1])  # no drive can compress it
        self._buffers = [memoryview(_aligned(BLOCKS[-1])) for _ in range(max(DEPTHS))]

    def go_direct(self) -> bool:
        """Bypass the page cache, if the file system allows."""
        if not hasattr(os, "O_DIRECT"):
            return False
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwrite(self._file, self._noise[: BLOCKS[0]], 0)
            if not is_cached(self._file, self._buffers[0][: BLOCKS[0]]):
                return True
        except OSError:
            pass
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
        return False

    def fill(self, nbytes: int, seconds: float) -> None:
        """Fill the file up to `nbytes`, or as far as `seconds` allow, but at least one block."""
        began = time.perf_counter()
        while self.nbytes < nbytes and (self.nbytes == 0 or time.perf_counter() - began < seconds):
            self.write(0, self.nbytes, BLOCKS[-1])
            self.nbytes += BLOCKS[-1]
            self.written_nbytes += BLOCKS[-1]
        os.fsync(self._file)

    def write(self, thread: int, start: int, nbytes: int) -> None:
        if os.pwrite(self._file, self._noise[:nbytes], start) != nbytes:
            raise OSError("the disk wrote less than requested")

    def read(self, thread: int, start: int, nbytes: int) -> None:
        if os.preadv(self._file, [self._buffers[thread][:nbytes]], start) != nbytes:
            raise OSError("the disk read less than requested")

    def bandwidth(self, call: Callable[[int, int, int], None], block: int, depth: int, seconds: float) -> float:
        """Bytes per second of `call` with `depth` threads, going over the file at most once."""
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
        """Bytes per second read and written while both run, with `depth` threads each."""
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
    """A page-aligned buffer, for direct I/O."""
    return mmap.mmap(-1, nbytes)


@contextmanager
def _nameless(folder: Path) -> Iterator[int]:
    """A new nameless file in `folder`, which disappears with the process at the latest."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            yield file.fileno()
    except OSError as error:
        what = f"cannot be written ({error.strerror or error})"
        raise DeviceError(what, where=str(folder), fix="give a folder with space that you may write to") from error
