"""Reads frozen weights straight from the model's own safetensors files, like regions of the disk; never writes.

A unit's weights are one flat buffer here, but several tensors there, in one or more files, at any offset: tensors are
read in blocks of whole sectors into a buffer of the thread, and copied from there to their place. Reads go through
the page cache or bypass it, whichever was faster on samples of these very files (they may be cached already, and need
not all fit the cache).

The files belong to somebody else, and a step reads each byte twice. The run ends if a file is not the one that was
there when reading began (by modification time, size and identity), or if a block's bytes differ from the first
read. Which parameters can be read from files is decided in `model.pretrained`.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatrain.device.worker import OwningProcess
from megatrain.errors import CorruptRegion, DiskError
from megatrain.memory.checksum import checksum
from megatrain.memory.disk import DEPTH
from megatrain.memory.io_queue import Bytes, Grains, Region, Request, Traffic
from megatrain.memory.scratch_files import Block, as_disk_error
from megatrain.spec import FileBytes
from megatrain.spec.hardware import BLOCK_NBYTES, SECTOR, whole_sectors
from megatrain.spec.layout import Layout

SAMPLES = 8
"""Blocks read each way to find out which is faster."""

_DIRECT: int = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, slots=True)
class FileBlock(Block):
    """Bytes of a region that are in a file, at any offset. `file` is the queue of its drive."""

    number: int
    """Number of the file itself."""


Extents = Sequence[tuple[int, FileBytes]]
"""(start in the region, bytes of a file), ascending."""


def extents_of(layout: Layout, files: Mapping[str, Sequence[FileBytes]]) -> list[tuple[int, FileBytes]]:
    """Map the weights of a unit that are in files into a region of only these. files: name -> byte ranges in
    order."""
    extents: list[tuple[int, FileBytes]] = []
    for field in layout.fields:
        if field.stop > layout.files_start:
            pieces = files[field.name]
            each = sum(piece.nbytes for piece in pieces) // (field.stop - field.start)
            start = (field.start - layout.files_start) * each
            for piece in pieces:
                extents.append((start, piece))
                start += piece.nbytes
    return extents


class ModelFiles:
    """Regions made of byte ranges of files, by name.

    direct: whether reads bypass the page cache; `None` measures which is faster, when the first region is read.
    """

    def __init__(
        self,
        regions: Mapping[str, Extents],
        *,
        direct: bool | None = None,
        block_nbytes: int = BLOCK_NBYTES,
        depth: int = DEPTH,
    ) -> None:
        """Inspect the files. Raises `DiskError` for one that is missing or too short."""
        self._regions, self._block_nbytes = dict(regions), block_nbytes
        paths = sorted({each.file for extents in regions.values() for _, each in extents})
        self._numbers = {path: number for number, path in enumerate(paths)}
        self._paths, self._then = paths, [_identity(path) for path in paths]
        for extents in regions.values():
            for _, each in extents:
                if self._then[self._numbers[each.file]][2] < each.place + each.nbytes:
                    raise _changed(each.file, "is shorter than it was")
        drives = {device: queue for queue, device in enumerate(sorted({device for device, *_ in self._then}))}
        self._queues = [drives[device] for device, *_ in self._then]
        self._known: dict[tuple[str, int, int], Region] = {}
        self._opening = threading.Lock()
        self._direct = direct
        self._reads = _FileReads(paths, max(1, len(drives)), block_nbytes, depth)
        self._finalizer = weakref.finalize(self, _let_go, OwningProcess(), self._reads)

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(each.nbytes for extents in self._regions.values() for _, each in extents)

    @property
    def read_nbytes(self) -> int:
        """Bytes read from drives or page cache so far, in whole sectors."""
        return self._reads.nbytes

    @property
    def direct(self) -> bool:
        """Whether reads bypass the page cache."""
        self._open()
        assert self._direct is not None
        return self._direct

    def read(self, name: str, start: int, memory: Tensor | NDArray[np.uint8], label: str = "") -> None:
        """Fill `memory`, uint8[n] on the host, with a region from byte `start` on; bytes outside tensors stay
        unchanged.

        Blocks until done; several threads may call it. Raises `CorruptRegion` for a file that has changed, and
        `DiskError` for one that cannot be read; `memory` is then undefined.
        """
        target = memory.numpy() if isinstance(memory, Tensor) else memory
        self._open()
        key = name, start, target.nbytes
        if key not in self._known:
            blocks = self._blocks(self._regions[name], start, start + target.nbytes)
            self._known[key] = Region(name, label or name, target.nbytes, blocks, self._block_nbytes)
        region = self._known[key]
        self._reads.carry([_all_of(region, target)])
        for number in {block.number for block in region.blocks if isinstance(block, FileBlock)}:
            if _identity(self._paths[number]) != self._then[number]:
                raise _changed(self._paths[number], "has changed during training")

    def close(self) -> None:
        """Stop the threads, once requests in progress have ended. May be repeated."""
        if self._finalizer.alive:
            self._reads.close()
            self._finalizer()

    def _blocks(self, extents: Extents, first: int, last: int) -> tuple[FileBlock, ...]:
        """The blocks of bytes [first, last) of a region, counted from `first`."""
        blocks = []
        for start, extent in extents:
            begin, end = max(first, start), min(last, start + extent.nbytes)
            number = self._numbers[extent.file]
            for at in range(begin, end, self._block_nbytes):
                length, place = min(self._block_nbytes, end - at), extent.place + at - start
                blocks.append(FileBlock(self._queues[number], at - first, length, place, number))
        return tuple(blocks)

    def _open(self) -> None:
        with self._opening:
            if not self._reads.is_open:
                if self._direct is None:
                    self._direct = self._is_direct_quicker()
                self._reads.open(direct=self._direct)

    def _is_direct_quicker(self) -> bool:
        """Measure by reading blocks spread over all regions, alternately each way."""
        whole = [block for extents in self._regions.values() for block in self._whole(extents)]
        whole = [block for block in whole if block.nbytes == self._block_nbytes]
        if len(whole) < 2 * SAMPLES or not _DIRECT:
            return False  # so few bytes stay cached
        spread = [whole[place * len(whole) // (2 * SAMPLES)] for place in range(2 * SAMPLES)]
        seconds = {}
        for direct in (True, False):
            try:
                self._reads.open(direct=direct)
                seconds[direct] = self._sample(spread[int(direct) :: 2])
            except DiskError:
                if not direct:
                    raise
                return False
            finally:
                self._reads.shut()
        return seconds[True] < seconds[False]

    def _whole(self, extents: Extents) -> tuple[FileBlock, ...]:
        return self._blocks(extents, 0, max((start + each.nbytes for start, each in extents), default=0))

    def _sample(self, blocks: Sequence[FileBlock]) -> float:
        placed = tuple(
            FileBlock(each.file, at * each.nbytes, each.nbytes, each.place, each.number)
            for at, each in enumerate(blocks)
        )
        memory = np.empty(sum(each.nbytes for each in blocks), np.uint8)
        began = time.perf_counter()
        region = Region("samples", "the model's files", memory.size, placed, self._block_nbytes, has_sums=False)
        self._reads.carry([_all_of(region, memory)])
        return time.perf_counter() - began


class _FileReads(Traffic):
    """Reads of files that belong to somebody else."""

    direction = "read"

    def __init__(self, paths: Sequence[str], queues: int, block_nbytes: int, depth: int) -> None:
        super().__init__(queues, block_nbytes + 2 * SECTOR, depth)
        self._paths = paths
        self._files: list[int] = []

    @property
    def is_open(self) -> bool:
        return bool(self._files)

    def open(self, *, direct: bool) -> None:
        """Open all files read-only."""
        for path in self._paths:
            try:
                self._files.append(
                    os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | (_DIRECT if direct else 0))
                )
            except OSError as error:
                self.shut()
                raise as_disk_error(error, "cannot be opened", path) from error

    def shut(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _carry(self, region: Region, grains: Grains, memory: Bytes, start: int) -> int:
        block = region.blocks[grains.block]
        assert isinstance(block, FileBlock)
        begin = block.place // SECTOR * SECTOR
        before, wanted = block.place - begin, block.place - begin + block.nbytes
        through = self._buffer()[: whole_sectors(wanted)]
        through[-SECTOR:] = 0  # if the file ends within its last sector
        try:
            read_nbytes = self._read_into(through, self._files[block.number], begin, wanted)
        except OSError as error:
            raise as_disk_error(error, f"cannot be read from {self._paths[block.number]}", region.label) from error
        if read_nbytes < wanted:
            raise _changed(self._paths[block.number], "is shorter than it was")
        if region.sums is not None:
            total = checksum([through])
            if region.sums[grains.block, 0] not in (0, total):
                raise _changed(self._paths[block.number], f"has other bytes than before at {block.place:,}")
            region.sums[grains.block, 0] = total
        memory[block.start : block.start + block.nbytes] = through[before:wanted]
        return through.size

    @staticmethod
    def _read_into(through: Bytes, file: int, begin: int, wanted: int) -> int:
        """Number of bytes read: at least `wanted`, unless the file ends before."""
        done = 0
        while done < wanted:
            moved = os.preadv(file, [through[done:].data], begin + done)
            if moved == 0 or (done + moved < wanted and moved % SECTOR):
                return done + moved
            done += moved
        return done


def _all_of(region: Region, memory: Bytes) -> Request:
    """A request for every block, of one grain each."""
    return Request(region, memory, 0, [Grains(number, 0, 1) for number in range(len(region.blocks))])


def _let_go(process: OwningProcess, reads: _FileReads) -> None:
    if not process.is_elsewhere:
        reads.abandon()
        reads.shut()


def _identity(path: str) -> tuple[int, int, int, int]:
    """What identifies a version of a file: device, inode, size and modification time. Raises `DiskError`."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise as_disk_error(error, "is gone, but training reads it", path) from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _changed(path: str, what: str) -> CorruptRegion:
    fix = "do not touch the base's files while a run reads them; restore them and go on from a checkpoint"
    return CorruptRegion(what, where=str(Path(path)), fix=fix)
