"""Blocks between memory and files, several at once: the threads of the disk room.

One blocking call for each thread keeps `depth` blocks of each file under way, because system calls and checksums let go
of the GIL; one thread more works out checksums and copies meanwhile, whichever it is at the time. A region's blocks
wait in one queue for each file, and a thread takes the next until none is left; so a Python thread does little between
two blocks, and after a failure nobody takes another.

Memory that begins at a sector is transferred as it is, without a copy. Other memory, and the last bytes of a region
that do not fill a sector, pass through a buffer that each thread has: at most one block more than `depth` for each file
and direction. Either way a block is the same two pieces, its whole sectors and its last one, and so has the same
checksum.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.errors import CorruptRegion, DiskError
from megatrain.memory.checksum import checksum
from megatrain.memory.disk_faults import FaultPlan
from megatrain.memory.scratch_files import Block, ScratchFile, as_disk_error
from megatrain.spec.hardware import SECTOR, whole_sectors

Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class Region:
    """Where a region lies, and what is known of it."""

    name: str
    label: str
    nbytes: int
    frozen_nbytes: int
    """At its end, which a write may leave out. No block has some of them and some of the others."""
    blocks: tuple[Block, ...]
    sums: list[int] | None
    """The checksum of each block, as it was written; None where none are kept."""
    written: bool = False
    """Whether all of it has been; what a write may leave out is then as it was last written."""
    torn: str = ""
    """Why not all of it is what was last written; empty if it is."""


@dataclass(slots=True)
class _Passage:
    """How a block gets between `part` of the caller's memory and the disk."""

    part: Bytes
    pieces: list[Bytes]
    """What is transferred: of `part` or of the thread's buffer."""
    through: Bytes
    """The thread's buffer as far as it is used, in whole sectors, for the bytes of `part` from `first` on."""
    first: int

    def load(self) -> None:
        """Copy in what passes through the buffer, zeros behind it."""
        rest = self.part[self.first :]
        self.through[: rest.size] = rest
        self.through[rest.size :] = 0

    def unload(self) -> None:
        """Copy out what passed through the buffer."""
        rest = self.part[self.first :]
        rest[:] = self.through[: rest.size]

    @property
    def views(self) -> list[memoryview]:
        return [piece.data for piece in self.pieces]


class Traffic(ABC):
    """All transfers of one direction, over one thread more than `depth` for each queue."""

    direction: str

    def __init__(self, queues: int, buffer_nbytes: int, depth: int) -> None:
        """queues: of blocks, one for each file, or for what else has threads of its own (`Block.file`)."""
        self._buffer_nbytes, self._at_once = buffer_nbytes, depth + 1
        self._threads = [ThreadPoolExecutor(self._at_once, f"megatrain-disk-{self.direction}") for _ in range(queues)]
        self._own = threading.local()
        self._lock = threading.Lock()
        self._nbytes, self._calls, self._began, self._seconds = 0, 0, 0.0, 0.0

    @property
    def nbytes(self) -> int:
        """That have been transferred, in whole sectors."""
        return self._nbytes

    @property
    def seconds(self) -> float:
        """During which there was something to transfer."""
        with self._lock:
            return self._seconds + (time.perf_counter() - self._began if self._calls else 0.0)

    def carry(self, region: Region, memory: Bytes) -> None:
        """Transfer a region, as far as `memory` goes, and return when no thread touches that any more, well or badly.

        Raises `DiskError`: of several blocks that failed, what the first in the order of threads met.
        """
        queues: list[deque[int]] = [deque() for _ in self._threads]
        for index, block in enumerate(region.blocks):
            if block.start < memory.size:
                queues[block.file].append(index)

        def work(queue: deque[int]) -> None:
            nbytes = 0
            try:
                while (index := _next(queue)) is not None:
                    nbytes += self._carry_block(region, index, memory)
            except BaseException:
                _empty(queues)
                raise
            finally:
                with self._lock:
                    self._nbytes += nbytes

        futures: list[Future[None]] = []
        with self._busy():
            try:
                for threads, queue in zip(self._threads, queues, strict=True):
                    futures += [self._submit(threads, work, queue) for _ in range(min(self._at_once, len(queue)))]
                wait(futures)
            finally:  # an interrupt from the keyboard comes here too
                _empty(queues)
                wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """Return when the threads have ended."""
        for threads in self._threads:
            threads.shutdown()

    def abandon(self) -> None:
        """Let the threads end by themselves: for a finalizer, which may be running on one of them."""
        for threads in self._threads:
            threads.shutdown(wait=False)

    @abstractmethod
    def _carry_block(self, region: Region, index: int, memory: Bytes) -> int:
        """Transfer one block; the bytes of its sectors. Raises `DiskError`."""

    def _buffer(self) -> Bytes:
        """The calling thread's own, at a sector; pages of it exist once they are touched."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = np.frombuffer(mmap.mmap(-1, self._buffer_nbytes), np.uint8)
        buffer: Bytes = self._own.buffer
        return buffer

    @staticmethod
    def _submit(threads: ThreadPoolExecutor, work: Callable[[deque[int]], None], queue: deque[int]) -> Future[None]:
        try:
            return threads.submit(work, queue)
        except RuntimeError as error:  # closed by another thread in the meantime
            raise DiskError("is closed", where="disk", fix="open another") from error

    @contextmanager
    def _busy(self) -> Iterator[None]:
        with self._lock:
            self._began = self._began if self._calls else time.perf_counter()
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                self._seconds += 0.0 if self._calls else time.perf_counter() - self._began


class _ScratchTraffic(Traffic):
    """Transfers of scratch files."""

    def __init__(self, files: Sequence[ScratchFile], block_nbytes: int, depth: int, faults: FaultPlan) -> None:
        super().__init__(len(files), block_nbytes, depth)
        self._files, self._faults = files, faults

    @abstractmethod
    def _transfer(self, region: Region, index: int, passage: _Passage) -> None:
        """One block. Raises OSError and `CorruptRegion`."""

    def _carry_block(self, region: Region, index: int, memory: Bytes) -> int:
        """Transfer one block; the bytes of its sectors."""
        block = region.blocks[index]
        passage = self._passage(memory[block.start : block.start + block.nbytes])
        try:
            self._transfer(region, index, passage)
        except OSError as error:
            what = f"cannot be {self.direction} in {self._files[block.file].folder}"
            raise as_disk_error(error, what, region.label) from error
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
    """From memory to files."""

    direction = "written"

    def _transfer(self, region: Region, index: int, passage: _Passage) -> None:
        block = region.blocks[index]
        if passage.through.size:
            passage.load()
        if region.sums is not None:
            region.sums[index] = checksum(passage.pieces)
        call = self._faults.call("write", region.name, os.pwritev)
        self._files[block.file].write(passage.views, block.place, call)


class Reads(_ScratchTraffic):
    """From files to memory."""

    direction = "read"

    def _transfer(self, region: Region, index: int, passage: _Passage) -> None:
        block = region.blocks[index]
        file = self._files[block.file]
        file.read(passage.views, block.place, self._faults.call("read", region.name, os.preadv))
        if region.sums is not None and region.sums[index] != checksum(passage.pieces):
            raise CorruptRegion(
                f"bytes {block.start:,} to {block.start + block.nbytes:,} are not what was written in {file.folder}",
                where=region.label,
                fix="look for errors of the drive in the system's log, and go on from a checkpoint",
            )
        if passage.through.size:
            passage.unload()


def _next(queue: deque[int]) -> int | None:
    try:
        return queue.popleft()
    except IndexError:
        return None


def _empty(queues: Sequence[deque[int]]) -> None:
    for queue in queues:
        queue.clear()
