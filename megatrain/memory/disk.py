"""The disk tier: scratch files below host memory, with named regions (a unit's moments, say) read and written by
ranges.

A region lies in *blocks*, which are the largest requests to a drive, and a block is cut into *grains*. Any bytes of a
region may be read, for which the grains that hold them are; whole grains of it are written. A region may name bytes
where a block begins, so that what is before and behind may be written alone.

Regions live as long as the process, in files without names; this is no checkpoint. Unless that is not wanted, space
is allocated when a region is provided, so that a full disk is found before a step, not during it. A grain reads as
zeros until its first write; a failed write leaves all of its grains *torn* until they are written again; and the
checksum of each grain, kept in memory, is compared on every read. So a read returns the bytes of the last write, or
zeros, or raises. Regions share nothing but files: a failure in one does not affect the others.

The schedule gives a region to one caller at a time; different regions, and reads beside writes, may proceed
concurrently. There is no cache (every byte is used once per step), and failed requests are not retried.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatrain.device.worker import OwningProcess
from megatrain.errors import CorruptRegion, DiskError, DiskFull
from megatrain.formatting import amount, at_least, at_most
from megatrain.memory.io_queue import (
    FAILED,
    UNFINISHED,
    WRITTEN,
    Bytes,
    Grains,
    Region,
    Request,
    ScratchTraffic,
    Traffic,
)
from megatrain.memory.scratch_files import Block, Calls, ScratchFile, Space, as_disk_error, lay_out, system_calls
from megatrain.spec.hardware import BLOCK_NBYTES, SECTOR

DEPTH = 4

GRAIN_NBYTES = 256 << 10
"""Bytes with a checksum of their own, if blocks are no smaller: so few that a save, which reads parameter by parameter,
reads little beside them, and enough that what is kept of each (9 bytes) and done for it is nothing."""

Range = tuple[str, Tensor | NDArray[np.uint8], int]
"""Name of a region, uint8[n] of memory, and the first of its n bytes in the region."""


class Disk:
    """Regions in `folders`, divided in proportion to `shares` (bandwidths, or any positive numbers).

    Reads and writes move blocks of `block_nbytes` (a multiple of 4096), `depth` at a time in each folder. `direct`:
    whether they bypass the page cache, in all folders. `preallocate`: whether space is allocated before it is used; if
    not, a file system may compress it, and a full disk is found by a write. `calls`: the system call of each block;
    tests let some fail.

    Raises `DiskError` for a folder that is missing or not writable.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        shares: Sequence[float] | None = None,
        block_nbytes: int = BLOCK_NBYTES,
        depth: int = DEPTH,
        checksums: bool = True,
        preallocate: bool = True,
        calls: Calls = system_calls,
    ) -> None:
        self._shares = list(shares) if shares is not None else [1.0] * len(folders)
        _check_arguments(folders, self._shares, block_nbytes, depth)
        self._block_nbytes, self._checksums = block_nbytes, checksums
        self._files = _open_all(folders, preallocate)
        self.direct = all(file.direct for file in self._files)
        self._spaces = [Space() for _ in folders]
        self._regions: dict[str, Region] = {}
        self._lock = threading.Lock()
        self._reads = ScratchTraffic("read", self._files, block_nbytes, depth, calls)
        self._writes = ScratchTraffic("written", self._files, block_nbytes, depth, calls)
        self._process = OwningProcess()
        self._finalizer = weakref.finalize(self, _let_go, self._process, self._files, (self._reads, self._writes))

    def provide(self, regions: Mapping[str, tuple[int, str]], cuts: Mapping[str, Sequence[int]] | None = None) -> None:
        """Create regions: name -> (bytes, label for messages). Existing ones keep place and content.

        cuts: name -> bytes of a region, ascending, at which a block begins. Raises `DiskFull` before allocating
        anything if the disks lack space, and `DiskError` if a region exists with another size.
        """
        with self._open():
            new = {name: wanted for name, wanted in regions.items() if not _is_known(self._regions.get(name), *wanted)}
            spaces = [space.copy() for space in self._spaces]
            laid = {name: self._laid(nbytes, (cuts or {}).get(name, ()), spaces) for name, (nbytes, _) in new.items()}
            self._require_space(spaces, [label for _, label in new.values()])
            self._resize(spaces)
            self._spaces = spaces
            for name, (nbytes, label) in new.items():
                grain_nbytes = min(GRAIN_NBYTES, self._block_nbytes)
                region = Region(name, label, nbytes, laid[name], grain_nbytes, has_sums=self._checksums)
                self._regions[name] = region

    def _laid(self, nbytes: int, cuts: Sequence[int], spaces: Sequence[Space]) -> tuple[Block, ...]:
        """The blocks of a region; what is between two cuts is spread over all folders."""
        ends = [0, *(cut for cut in cuts if 0 < cut < nbytes), nbytes]
        return tuple(
            block
            for begin, end in pairwise(ends)
            for block in lay_out(end - begin, spaces, self._shares, self._block_nbytes, begin)
        )

    def read(self, name: str, memory: Tensor | NDArray[np.uint8], start: int = 0) -> None:
        """Fill `memory`, uint8[n], with what was last written to bytes [start, start + n) of the region, or zeros where
        nothing was. See `read_together`."""
        self.read_together([(name, memory, start)])

    def read_together(self, ranges: Sequence[Range]) -> None:
        """Fill the memory of each range, as `read` does; they move side by side.

        Blocks until done. Raises `CorruptRegion` if one of these bytes is torn or comes back changed, and `DiskError`
        if the drive fails; all memory is then undefined.
        """
        self._reads.carry([self._to_read(self._region(name), memory, start) for name, memory, start in ranges])

    def write(self, name: str, memory: Tensor | NDArray[np.uint8], start: int = 0) -> None:
        """Write `memory`, uint8[n], to bytes [start, start + n) of the region, which must be whole grains (`around`).
        See `write_together`."""
        self.write_together([(name, memory, start)])

    def write_together(self, ranges: Sequence[Range]) -> None:
        """Write each range, as `write` does; they move side by side. No memory may change meanwhile.

        Blocks until the drive has them. Raises `DiskError`, or `DiskFull` if space could not be allocated in advance;
        all these grains are then torn until all of them have been written again.
        """
        requests = [_to_write(self._region(name), memory, start) for name, memory, start in ranges]
        for region, _, _, grains in requests:
            region.mark(grains, UNFINISHED)
        try:
            self._writes.carry(requests)
        except DiskError as error:
            for region, _, _, grains in requests:
                region.failure = error.what
                region.mark(grains, FAILED)
            raise
        for region, _, _, grains in requests:
            region.mark(grains, WRITTEN)

    def around(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """The bytes [first, last) of the whole grains that hold bytes [start, stop) of a region."""
        region = self._region(name)
        return _extent(region, region.within(start, stop), start)

    def forget(self, name: str) -> None:
        """Remove the region; its space may be reused."""
        region = self._region(name)
        with self._lock:
            del self._regions[name]
            for block in region.blocks:
                self._spaces[block.file].give(block.place, block.nbytes)

    def nbytes(self) -> int:
        """Bytes of all regions."""
        with self._lock:
            return sum(region.nbytes for region in self._regions.values())

    def free_nbytes(self) -> int:
        """Approximate bytes of further regions that fit, divided among folders as usual."""
        with self._open():
            total = sum(self._shares)
            room = {file.device: file.free_nbytes() for file in self._files}
            part = dict.fromkeys(room, 0.0)
            for file, space, share in zip(self._files, self._spaces, self._shares, strict=True):
                room[file.device] += space.unused_nbytes
                part[file.device] += share / total
            return int(min(room[device] / part[device] for device in room))

    @property
    def read_nbytes(self) -> int:
        """Bytes read from the drives so far, in whole sectors."""
        return self._reads.nbytes

    @property
    def written_nbytes(self) -> int:
        """Bytes written to the drives so far, in whole sectors; relevant for their endurance."""
        return self._writes.nbytes

    def close(self) -> None:
        """Free the space, once requests in progress have ended. May be repeated; any other use raises `DiskError`."""
        if self._finalizer.alive and not self._process.is_elsewhere:
            self._reads.close()
            self._writes.close()
            self._finalizer()

    def _to_read(self, region: Region, memory: Tensor | NDArray[np.uint8], start: int) -> Request:
        target = _flat(memory, region, start)
        if not target.flags.writeable:
            raise DiskError("cannot be read into read-only memory", where=region.label)
        grains = region.within(start, start + target.nbytes)
        states = b"".join(map(region.states_of, grains))
        if FAILED in states or UNFINISHED in states:
            folders = (str(self._files[number].folder) for number in sorted({block.file for block in region.blocks}))
            torn = f"was not written completely in {', '.join(folders)}"
            if FAILED in states:
                torn = f"is torn because its last write failed: it {region.failure}"
            raise CorruptRegion(torn, where=region.label, fix="write all of it, or go on from a checkpoint")
        if states.count(WRITTEN) < len(states):
            target.fill(0)
            grains = [run for each in grains for run in region.written(each)]
        return Request(region, target, start, grains)

    def _region(self, name: str) -> Region:
        with self._open():
            if name not in self._regions:
                raise DiskError("no such region", where=name, fix="provide it first")
            return self._regions[name]

    @contextmanager
    def _open(self) -> Iterator[None]:
        """In the block, no other thread changes the set of regions.

        Raises `DiskError` for a closed disk, and `DeviceError` in a forked child, which would write to its
        parent's files.
        """
        self._process.refuse_elsewhere("disk")  # first: a lock held during the fork is never released
        with self._lock:
            if not self._finalizer.alive:
                raise DiskError("is closed", where="disk", fix="open another")
            yield

    def _require_space(self, spaces: Sequence[Space], labels: Sequence[str]) -> None:
        """Raise `DiskFull` unless each device has space for the growth of its files."""
        growth = Counter[int]()
        for file, before, after in zip(self._files, self._spaces, spaces, strict=True):
            growth[file.device] += after.nbytes - before.nbytes
            if growth[file.device] and growth[file.device] > (free := file.free_nbytes()):
                more = f" and {len(labels) - 1} more" if labels[1:] else ""
                needed = at_least(growth[file.device])
                raise DiskFull(
                    f"{labels[0]}{more} need {needed} of disk, of which {at_most(free)} are free",
                    where=str(file.folder),
                    fix="free space there, give a folder on another drive, or keep less on the disk",
                )

    def _resize(self, spaces: Sequence[Space]) -> None:
        """Resize each file to its space; if one fails, undo all."""
        grown: list[tuple[ScratchFile, int, int]] = []
        for file, before, after in zip(self._files, self._spaces, spaces, strict=True):
            if after.nbytes == before.nbytes:
                continue
            grown.append((file, before.nbytes, after.nbytes))
            try:
                file.resize(before.nbytes, after.nbytes)
            except OSError as error:
                for each, length, longer in grown:
                    with suppress(OSError):
                        each.resize(longer, length)
                what = f"cannot allocate {amount(after.nbytes - before.nbytes)} more"
                raise as_disk_error(error, what, str(file.folder)) from error


def _let_go(process: OwningProcess, files: Sequence[ScratchFile], traffic: Sequence[Traffic]) -> None:
    """Finalizer for a dropped disk, too. In a forked child the threads do not exist, and locks may be held
    forever."""
    if process.is_elsewhere:
        return
    for each in traffic:
        each.abandon()
    for file in files:
        file.close()


def _open_all(folders: Sequence[Path], preallocate: bool) -> list[ScratchFile]:
    """A file in each folder; if one fails, none."""
    files: list[ScratchFile] = []
    try:
        for folder in folders:
            files.append(ScratchFile(Path(folder), preallocate=preallocate))
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _check_arguments(folders: Sequence[Path], shares: Sequence[float], block_nbytes: int, depth: int) -> None:
    what = ""
    if not folders:
        what = "no folder is given"
    elif len(shares) != len(folders) or not all(np.isfinite(share) and share > 0 for share in shares):
        what = f"shares are {list(shares)} for {len(folders)} folders, but each needs one above zero"
    elif block_nbytes < SECTOR or block_nbytes % SECTOR:
        what = f"blocks have {block_nbytes:,} bytes, which is not a multiple of {SECTOR:,}"
    elif depth < 1:
        what = f"{depth} blocks at a time is less than one"
    if what:
        raise DiskError(what, where="disk")


def _to_write(region: Region, memory: Tensor | NDArray[np.uint8], start: int) -> Request:
    source = _flat(memory, region, start)
    grains = region.within(start, start + source.nbytes)
    if _extent(region, grains, start) != (start, start + source.nbytes):
        what = f"bytes {start:,} to {start + source.nbytes:,} do not begin and end where grains do"
        raise DiskError(what, where=region.label, fix="write whole grains")
    return Request(region, source, start, grains)


def _is_known(region: Region | None, nbytes: int, label: str) -> bool:
    if region is not None and region.nbytes != nbytes:
        raise DiskError(f"has {region.nbytes:,} bytes, not {nbytes:,}", where=label, fix="forget it first")
    return region is not None


def _extent(region: Region, grains: Sequence[Grains], start: int) -> tuple[int, int]:
    """The bytes of consecutive grains; none, at `start`, of no grains."""
    if not grains:
        return start, start
    first, last = region.place(grains[0]), region.place(grains[-1])
    return first.start, last.start + last.nbytes


def _flat(memory: Tensor | NDArray[np.uint8], region: Region, start: int) -> Bytes:
    """Host memory for bytes of the region from `start` on, as an array that shares it."""
    if isinstance(memory, Tensor) and memory.device.type != "cpu":
        raise DiskError(f"memory is on {memory.device}, not on the host", where=region.label)
    array = memory.numpy() if isinstance(memory, Tensor) else memory
    fits = 0 <= start <= region.nbytes - array.nbytes
    if array.dtype != np.uint8 or not fits or not array.flags.c_contiguous:
        found = f"{array.dtype}{list(array.shape)}" + ("" if array.flags.c_contiguous else ", not contiguous")
        what = f"memory is {found} for bytes from {start:,} on, not uint8 within the region's {region.nbytes:,} bytes"
        raise DiskError(what, where=region.label)
    flat: Bytes = array.reshape(-1)
    return flat
