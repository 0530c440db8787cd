"""Transfers blocks between memory and files, several at a time, with the threads of the disk tier.

Each thread makes blocking calls, which release the GIL, as do checksums; so `depth` blocks of each file are in
progress while one more thread computes checksums and copies. The blocks of all ranges that move together, be they of
one region or of several, wait in one queue per file, and threads take the next until none is left, or until one fails;
so little Python runs between blocks, and the drive has fewer than `depth` only at the end.

Of a block that a range reaches into only its *grains* there move, each of which has a checksum of its own.
Sector-aligned memory is transferred without a copy. Other memory, grains that are only partly wanted, and blocks that
end within a sector pass through a buffer of the thread: at most `depth` + 1 blocks for each file and direction. Either
way a grain's checksum is that of its whole sectors, padded with zeros.
"""

from __future__ import annotations

import mmap
import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.errors import CorruptRegion, DiskError
from megatrain.memory.checksum import checksums
from megatrain.memory.scratch_files import Block, Calls, ScratchFile, as_disk_error
from megatrain.spec.hardware import SECTOR, whole_sectors

Bytes = NDArray[np.uint8]


UNWRITTEN, WRITTEN, UNFINISHED, FAILED = range(4)
"""The state of a grain: it was never written; it holds what was last written; its last write has not ended, or was
interrupted; its last write failed."""


class Grains(NamedTuple):
    """Grains [first, last) of a block, which move together."""

    block: int
    first: int
    last: int


class Region:
    """A region's place and state. blocks: consecutive, in order; each is cut into grains of `grain_nbytes`, the last of
    which may be shorter."""

    def __init__(
        self, name: str, label: str, nbytes: int, blocks: Sequence[Block], grain_nbytes: int, *, has_sums: bool = True
    ) -> None:
        self.name, self.label, self.nbytes, self.grain_nbytes = name, label, nbytes, grain_nbytes
        self.blocks = blocks
        grains = len(blocks), -(-max((block.nbytes for block in blocks), default=0) // grain_nbytes)
        self.sums = np.zeros(grains, np.uint64) if has_sums else None
        """The checksum of each grain of each block as written; None if there are none."""
        self.states = np.zeros(grains, np.uint8)
        """Whether each grain of each block holds what was last written (`UNWRITTEN` and so on)."""
        self.failure = ""
        """What the last write that failed did."""

    def within(self, start: int, stop: int) -> list[Grains]:
        """The grains that hold bytes [start, stop), block by block."""
        if start >= stop:
            return []
        first = bisect_right(self.blocks, start, key=lambda block: block.start) - 1
        last = bisect_left(self.blocks, stop, key=lambda block: block.start)
        return [self._within(number, start, stop) for number in range(first, last)]

    def _within(self, number: int, start: int, stop: int) -> Grains:
        block, nbytes = self.blocks[number], self.grain_nbytes
        last = min(stop - block.start, block.nbytes)
        return Grains(number, max(0, start - block.start) // nbytes, -(-last // nbytes))

    def place(self, grains: Grains) -> Block:
        """Their bytes, and where they lie."""
        return self.blocks[grains.block].cut(grains.first * self.grain_nbytes, grains.last * self.grain_nbytes)

    def states_of(self, grains: Grains) -> bytes:
        """The state of each."""
        return self.states[grains.block, grains.first : grains.last].tobytes()

    def mark(self, grains: Iterable[Grains], state: int) -> None:
        """Set the state of all of them."""
        for block, first, last in grains:
            self.states[block, first:last] = state

    def written(self, grains: Grains) -> Iterator[Grains]:
        """Those of them that were written, in runs."""
        at = grains.first
        for state, run in groupby(self.states_of(grains)):
            begin, at = at, at + sum(1 for _ in run)
            if state == WRITTEN:
                yield Grains(grains.block, begin, at)


class Request(NamedTuple):
    """Grains of a region to transfer, and the memory with the region's bytes from `start` on."""

    region: Region
    memory: Bytes
    start: int
    grains: Sequence[Grains]


_Queue = deque[tuple[Request, Grains]]
"""Requests, and what of them moves at once."""


class Traffic(ABC):
    """All transfers in one direction, with `depth` + 1 threads per queue."""

    direction: str

    def __init__(self, queues: int, buffer_nbytes: int, depth: int) -> None:
        """queues: number of block queues, one per file, or per whatever has its own threads (`Block.file`)."""
        self._buffer_nbytes, self._at_once = buffer_nbytes, depth + 1
        self._threads = [ThreadPoolExecutor(self._at_once, f"megatrain-disk-{self.direction}") for _ in range(queues)]
        self._own = threading.local()
        self._lock = threading.Lock()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes transferred so far, in whole sectors."""
        return self._nbytes

    def carry(self, requests: Sequence[Request]) -> None:
        """Transfer all of them together; return once no thread uses their memory, whether successful or not.

        Raises `DiskError`; if several blocks failed, that of the first thread in order.
        """
        queues: list[_Queue] = [deque() for _ in self._threads]
        for request in requests:
            for grains in request.grains:
                queues[request.region.blocks[grains.block].file].append((request, grains))

        def work(queue: _Queue) -> None:
            nbytes = 0
            try:
                while (following := _next(queue)) is not None:
                    request, grains = following
                    nbytes += self._carry(request.region, grains, request.memory, request.start)
            except BaseException:
                _empty(queues)
                raise
            finally:
                with self._lock:
                    self._nbytes += nbytes

        futures: list[Future[None]] = []
        try:
            for threads, queue in zip(self._threads, queues, strict=True):
                futures += [self._submit(threads, work, queue) for _ in range(min(self._at_once, len(queue)))]
            wait(futures)
        finally:  # also after a KeyboardInterrupt
            _empty(queues)
            wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """Wait until the threads have ended."""
        for threads in self._threads:
            threads.shutdown()

    def abandon(self) -> None:
        """Let the threads end by themselves: for finalizers, which may run on one of them."""
        for threads in self._threads:
            threads.shutdown(wait=False)

    @abstractmethod
    def _carry(self, region: Region, grains: Grains, memory: Bytes, start: int) -> int:
        """Transfer grains of the region, of which `memory` holds the bytes from `start` on; returns the bytes of their
        sectors. Raises `DiskError`."""

    def _buffer(self) -> Bytes:
        """The calling thread's own buffer, sector-aligned; its pages exist once touched."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = np.frombuffer(mmap.mmap(-1, self._buffer_nbytes), np.uint8)
        buffer: Bytes = self._own.buffer
        return buffer

    @staticmethod
    def _submit(threads: ThreadPoolExecutor, work: Callable[[_Queue], None], queue: _Queue) -> Future[None]:
        try:
            return threads.submit(work, queue)
        except RuntimeError as error:  # closed by another thread meanwhile
            raise DiskError("is closed", where="disk", fix="open another") from error


class ScratchTraffic(Traffic):
    """Transfers of scratch files in one direction, "read" or "written". Only whole grains are written."""

    def __init__(
        self, direction: str, files: Sequence[ScratchFile], block_nbytes: int, depth: int, calls: Calls
    ) -> None:
        self.direction = direction
        super().__init__(len(files), block_nbytes, depth)
        self._files, self._call_of = files, calls

    def _carry(self, region: Region, grains: Grains, memory: Bytes, start: int) -> int:
        """What is aligned moves at once; the rest through the thread's buffer, padded with zeros."""
        place = region.place(grains)
        at, nbytes = place.start - start, whole_sectors(place.nbytes)
        part = memory[max(0, at) : at + place.nbytes]
        at_once = part.size == nbytes and not part.ctypes.data % SECTOR
        sectors = part if at_once else self._buffer()[:nbytes]
        wanted = sectors[max(0, -at) :][: part.size]
        try:
            if self.direction == "read":
                self._read(region, grains, place, sectors)
                if not at_once:
                    part[:] = wanted
                return nbytes
            if not at_once:
                wanted[:] = part
                sectors[part.size :] = 0
            self._write(region, grains, place, sectors)
        except OSError as error:
            what = f"cannot be {self.direction} in {self._files[place.file].folder}"
            raise as_disk_error(error, what, region.label) from error
        return nbytes

    def _write(self, region: Region, grains: Grains, place: Block, sectors: Bytes) -> None:
        if region.sums is not None:
            region.sums[grains.block, grains.first : grains.last] = checksums(sectors, region.grain_nbytes)
        self._files[place.file].write(sectors.data, place.place, self._call_of("write", region.name, os.pwritev))

    def _read(self, region: Region, grains: Grains, place: Block, sectors: Bytes) -> None:
        file = self._files[place.file]
        file.read(sectors.data, place.place, self._call_of("read", region.name, os.preadv))
        if region.sums is None:
            return
        differs = region.sums[grains.block, grains.first : grains.last] != checksums(sectors, region.grain_nbytes)
        if differs.any():
            wrong = grains.first + int(differs.argmax())
            bad = region.place(Grains(grains.block, wrong, wrong + 1))
            raise CorruptRegion(
                f"bytes {bad.start:,} to {bad.start + bad.nbytes:,} are not what was written in {file.folder}",
                where=region.label,
                fix="look for errors of the drive in the system's log, and go on from a checkpoint",
            )


def _next(queue: _Queue) -> tuple[Request, Grains] | None:
    try:
        return queue.popleft()
    except IndexError:
        return None


def _empty(queues: Sequence[_Queue]) -> None:
    for queue in queues:
        queue.clear()
