"""Transfers blocks between memory and files, several at a time, with the threads of the disk tier.

Each thread makes blocking calls, which release the GIL, as do checksums; so `depth` blocks of each file are in
progress while one more thread computes checksums and copies. The blocks of all ranges that move together, be they of
one region or of several, wait in one queue per file, and threads take the next until none is left, or until one fails;
so little Python runs between blocks, and the drive has fewer than `depth` only at the end.

Sector-aligned memory is transferred without a copy. Other memory, and the last bytes of a region that do not fill
a sector, pass through a buffer of the thread: at most `depth` + 1 blocks for each file and direction. Either way a
block is split into the same two pieces, its whole sectors and the rest, and so has the same checksum.
"""

from __future__ import annotations

import mmap
import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.errors import CorruptRegion, DiskError
from megatrain.memory.checksum import checksum
from megatrain.memory.scratch_files import Block, Calls, ScratchFile, as_disk_error
from megatrain.spec.hardware import SECTOR, whole_sectors

Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class Region:
    """A region's place and state."""

    name: str
    label: str
    nbytes: int
    blocks: tuple[Block, ...]
    """Consecutive, in order."""
    sums: list[int] | None
    """The checksum of each block as written; None if there are none."""
    torn: list[str | None] = field(default_factory=list)
    """Why each block does not hold what was last written; empty if it does, `None` if it was never written."""

    def within(self, start: int, stop: int) -> Sequence[int]:
        """The numbers of the blocks that hold bytes [start, stop)."""
        if start >= stop:
            return range(0)
        first = bisect_right(self.blocks, start, key=lambda block: block.start) - 1
        return range(first, bisect_left(self.blocks, stop, key=lambda block: block.start))


class Request(NamedTuple):
    """Blocks of a region to transfer, and the memory with the region's bytes from `start` on."""

    region: Region
    memory: Bytes
    start: int
    blocks: Sequence[int]


@dataclass(slots=True)
class _Passage:
    """How a block moves between `part` of the caller's memory and the disk."""

    part: Bytes
    pieces: list[Bytes]
    """The pieces to transfer, of `part` or of the thread's buffer."""
    through: Bytes
    """The used whole sectors of the thread's buffer, for the bytes of `part` from `first` on."""
    first: int

    def load(self) -> None:
        """Copy bytes that pass through the buffer into it, padded with zeros."""
        rest = self.part[self.first :]
        self.through[: rest.size] = rest
        self.through[rest.size :] = 0

    def unload(self) -> None:
        """Copy bytes that passed through the buffer out of it."""
        rest = self.part[self.first :]
        rest[:] = self.through[: rest.size]

    @property
    def views(self) -> list[memoryview]:
        return [piece.data for piece in self.pieces]


_Queue = deque[tuple[Request, int]]
"""Requests, and the numbers of their blocks."""


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
            for index in request.blocks:
                queues[request.region.blocks[index].file].append((request, index))

        def work(queue: _Queue) -> None:
            nbytes = 0
            try:
                while (following := _next(queue)) is not None:
                    request, index = following
                    nbytes += self._carry_block(request.region, index, request.memory, request.start)
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
    def _carry_block(self, region: Region, index: int, memory: Bytes, start: int) -> int:
        """Transfer one block of the region, of which `memory` holds the bytes from `start` on; returns the bytes of its
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


class _ScratchTraffic(Traffic):
    """Transfers of scratch files."""

    def __init__(self, files: Sequence[ScratchFile], block_nbytes: int, depth: int, calls: Calls) -> None:
        super().__init__(len(files), block_nbytes, depth)
        self._files, self._call_of = files, calls

    @abstractmethod
    def _transfer(self, region: Region, index: int, passage: _Passage) -> None:
        """Transfer one block. Raises OSError and `CorruptRegion`."""

    def _carry_block(self, region: Region, index: int, memory: Bytes, start: int) -> int:
        block = region.blocks[index]
        first, last = block.start - start, block.start - start + block.nbytes
        inside = slice(max(0, first), min(last, memory.size))
        is_whole = inside == slice(first, last)
        part = memory[inside] if is_whole else np.empty(block.nbytes, np.uint8)  # the checksum is of the whole block
        try:
            self._transfer(region, index, self._passage(part))
        except OSError as error:
            what = f"cannot be {self.direction} in {self._files[block.file].folder}"
            raise as_disk_error(error, what, region.label) from error
        if not is_whole:
            memory[inside] = part[inside.start - first : inside.stop - first]
        return whole_sectors(block.nbytes)

    def _passage(self, part: Bytes) -> _Passage:
        whole = part.size - part.size % SECTOR
        first = 0 if part.ctypes.data % SECTOR else whole
        if first == part.size:
            return _Passage(part, [part], part[first:], first)
        through = self._buffer()[: whole_sectors(part.size)]
        pieces = [part[:first], through[first:whole], through[whole:]]
        return _Passage(part, [piece for piece in pieces if piece.size], through[first:], first)


class Writes(_ScratchTraffic):
    """From memory to files. Only whole blocks are written."""

    direction = "written"

    def _transfer(self, region: Region, index: int, passage: _Passage) -> None:
        block = region.blocks[index]
        if passage.through.size:
            passage.load()
        if region.sums is not None:
            region.sums[index] = checksum(passage.pieces)
        call = self._call_of("write", region.name, os.pwritev)
        self._files[block.file].write(passage.views, block.place, call)


class Reads(_ScratchTraffic):
    """From files to memory."""

    direction = "read"

    def _transfer(self, region: Region, index: int, passage: _Passage) -> None:
        block = region.blocks[index]
        file = self._files[block.file]
        file.read(passage.views, block.place, self._call_of("read", region.name, os.preadv))
        if region.sums is not None and region.sums[index] != checksum(passage.pieces):
            raise CorruptRegion(
                f"bytes {block.start:,} to {block.start + block.nbytes:,} are not what was written in {file.folder}",
                where=region.label,
                fix="look for errors of the drive in the system's log, and go on from a checkpoint",
            )
        if passage.through.size:
            passage.unload()


def _next(queue: _Queue) -> tuple[Request, int] | None:
    try:
        return queue.popleft()
    except IndexError:
        return None


def _empty(queues: Sequence[_Queue]) -> None:
    for queue in queues:
        queue.clear()
