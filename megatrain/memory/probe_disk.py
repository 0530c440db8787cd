"""Measures read and write speed of the disk under a folder, by block size and queue depth.

Uses the disk tier's own scratch files, which disappear when closed, whatever happens: direct I/O, or through the page
cache if that is refused. Each thread makes blocking calls, which release the GIL, so the number of threads is the queue
depth. A short burst cannot tell what a drive sustains once its own cache is full.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path

from megatrain.memory.scratch_files import ScratchFile, as_disk_error

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
    """Raise `DiskError` unless a file can be made in `folder`."""
    ScratchFile(folder).close()


def disk_speed(folder: Path, nbytes: int, seconds: float) -> DiskSpeed:
    """Measure in `folder`, with a file of at most `nbytes`, in about `seconds`. Leaves nothing behind.

    Raises `DiskError` if no file can be created there, or the disk is full.
    """
    with closing(ScratchFile(folder)) as file, ThreadPoolExecutor(2 * max(DEPTHS)) as threads:
        try:
            return _speed(_Bench(file, threads), nbytes, seconds)
        except OSError as error:
            raise as_disk_error(error, "cannot be written", str(folder)) from error


def _speed(bench: _Bench, nbytes: int, seconds: float) -> DiskSpeed:
    began = time.perf_counter()
    bench.fill(max(nbytes // BLOCKS[-1], 1) * BLOCKS[-1], seconds / 4)
    rates: list[DiskRate] = []
    together, seconds = seconds * DUPLEX_SHARE, seconds * (1 - DUPLEX_SHARE)
    for index, (block, depth) in enumerate(_GRID):
        left = seconds - (time.perf_counter() - began)
        if rates and left <= 0:
            break
        share = max(left, 0.0) / (len(_GRID) - index) / 2
        (written,) = bench.bandwidths([bench.write], block, depth, share)
        (read,) = bench.bandwidths([bench.read], block, depth, share)
        rates.append(DiskRate(block, depth, read, written))
    best = _best(rates)
    read, written = bench.bandwidths([bench.read, bench.write], best.block_nbytes, best.depth, together)
    return DiskSpeed(best, read, written, bench.file.direct, bench.nbytes, bench.written_nbytes)


def _best(rates: Sequence[DiskRate]) -> DiskRate:
    """The fastest rate; since short bursts are noisy, nearly equal ones count as equal."""

    def seconds(rate: DiskRate) -> float:
        return 1 / rate.read_bandwidth + 1 / rate.write_bandwidth

    limit = ABOUT_AS_QUICK * min(map(seconds, rates))
    near = (rate for rate in rates if seconds(rate) <= limit)
    return max(near, key=lambda rate: (min(rate.block_nbytes, LARGE_BLOCK), -rate.block_nbytes, -rate.depth))


Call = Callable[[int, int, int], None]
"""(thread, start, bytes): a transfer of one block."""


class _Bench:
    """A file, threads with a buffer each, and their reads and writes."""

    def __init__(self, file: ScratchFile, threads: ThreadPoolExecutor) -> None:
        self.nbytes = 0
        """Bytes of the file that have been filled."""
        self.written_nbytes = 0
        self.file, self._threads = file, threads
        self._noise = memoryview(mmap.mmap(-1, BLOCKS[-1]))  # page-aligned, as direct I/O needs it
        self._noise[:] = os.urandom(BLOCKS[-1])  # no drive can compress it
        self._buffers = [memoryview(mmap.mmap(-1, BLOCKS[-1])) for _ in range(max(DEPTHS))]

    def fill(self, nbytes: int, seconds: float) -> None:
        """Fill the file up to `nbytes`, or as far as `seconds` allow, but at least one block."""
        began = time.perf_counter()
        while self.nbytes < nbytes and (self.nbytes == 0 or time.perf_counter() - began < seconds):
            self.write(0, self.nbytes, BLOCKS[-1])
            self.nbytes += BLOCKS[-1]
        self.written_nbytes = self.nbytes
        os.fsync(self.file.number)

    def write(self, thread: int, start: int, nbytes: int) -> None:
        self.file.write(self._noise[:nbytes], start, os.pwritev)

    def read(self, thread: int, start: int, nbytes: int) -> None:
        self.file.read(self._buffers[thread][:nbytes], start, os.preadv)

    def bandwidths(self, calls: Sequence[Call], block: int, depth: int, seconds: float) -> list[float]:
        """Bytes per second of each of the calls, side by side, with `depth` threads each. One alone goes over the file
        at most once."""
        began = time.perf_counter()

        def work(job: tuple[Call, int]) -> int:
            call, thread = job
            starts: Iterable[int] = range(thread * block, self.nbytes, depth * block)
            done = 0
            for start in starts if len(calls) == 1 else cycle(starts):
                call(thread, start, block)
                done += block
                if time.perf_counter() - began > seconds:
                    break
            return done

        done = list(self._threads.map(work, product(calls, range(depth))))
        if self.write in calls:
            os.fdatasync(self.file.number)
        spent = time.perf_counter() - began
        by_call = [sum(done[first : first + depth]) for first in range(0, len(done), depth)]
        self.written_nbytes += sum(nbytes for call, nbytes in zip(calls, by_call, strict=True) if call == self.write)
        return [nbytes / spent for nbytes in by_call]
