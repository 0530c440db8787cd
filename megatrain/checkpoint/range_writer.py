"""Writes byte ranges of a folder's files with a few threads, and computes the checksums of the files.

Data is copied into buffers of one block, the unit of checksums, so that the caller's memory is free at once; a thread
checksums and writes each buffer. Ranges that follow each other share one. Whole sectors are written past the page cache
(direct I/O), which does not take host memory from others. Where a file system refuses, and for what is not whole
sectors, the page cache is used. Space is preallocated if the file system can, so that a full disk is noticed before
anything is written; unless the file system would compress it otherwise, for which writes have to go through the page
cache, too.

A block that one process has written in one piece has that piece's checksum. Any other block is read back once
everything is written and synced: its pieces must fill it and match their checksums, which are of what was in memory.
Ranks that write one file together exchange these, and divide the blocks among themselves. They write through the page
cache, to files that are opened write-only and read by nobody before all have written: a network file system then sends
the written bytes, not the pages around them. `probe` tests whether it does.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import LifoQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatrain.checkpoint import manifest
from megatrain.checkpoint.manifest import FileSum, block_sum, file_sum
from megatrain.checkpoint.safetensors_writer import Shard, tensor_blocks
from megatrain.errors import CheckpointError
from megatrain.model import WrittenTensor
from megatrain.system.paths import compresses_what_is_not_preallocated

SECTOR = 4096
"""Alignment of direct writes, in bytes."""
PROBE = ".ranks"
"""The file with which ranks test whether they share a folder."""
NONCE_NBYTES = 16
_THREADS = 4
_MOST_OPEN = 8
"""Maximum open files, each with a buffer; they are written one after another."""


class Written(NamedTuple):
    """A piece of one block: the number of its file, its first byte, its length, and its checksum."""

    file: int
    start: int
    nbytes: int
    sum: int


class OpenFile:
    """A file's descriptors, and the buffer with what follows its last write."""

    def __init__(self, path: Path, number: int, *, direct: bool) -> None:
        self.number = number
        self.cached = os.open(path, os.O_WRONLY)
        self.direct: int | None = None
        """The descriptor for direct writes, unless they are refused."""
        with suppress(OSError):
            if direct and hasattr(os, "O_DIRECT"):
                self.direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
        self.buffer: mmap.mmap | None = None
        self.start = self.nbytes = 0
        """What is in the buffer: the first byte in the file, and the length."""

    def close(self) -> None:
        for descriptor in (self.cached, self.direct):
            if descriptor is not None:
                os.close(descriptor)


class RangeWriter:
    """Writes into existing `files` in `folder` (see `create`). Not thread-safe.

    Errors of its threads are raised as `OSError` by a later `write` or by `finish`.
    """

    def __init__(self, folder: Path, files: Iterable[Shard], *, direct: bool = True) -> None:
        """direct: whether to write past the page cache; only if no other process writes to the same files."""
        self.written: list[Written] = []
        """The pieces that were written, complete after `finish`."""
        self.nbytes = 0
        """Bytes passed to `write` so far."""
        self._folder, self._alone = folder, direct
        self._direct = direct and not compresses_what_is_not_preallocated(folder)
        self._numbers = {shard.name: number for number, shard in enumerate(files)}
        self._open: OrderedDict[str, OpenFile] = OrderedDict()
        self._under_way: deque[Future[Written]] = deque()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint")
        self._free: LifoQueue[mmap.mmap] = LifoQueue()
        for _ in range(_THREADS + _MOST_OPEN):  # open files cannot starve the threads
            self._free.put(mmap.mmap(-1, manifest.BLOCK_NBYTES))

    def takes(self, name: str) -> bool:
        """Whether it is one of the files."""
        return name in self._numbers

    def write(self, name: str, start: int, data: memoryview | bytes | NDArray[np.uint8]) -> None:
        """Write `data` to a file from byte `start` on; its memory may be reused after the call."""
        file, rest = self._file(name), np.frombuffer(data, np.uint8)
        self.nbytes += rest.size
        while rest.size:
            if file.buffer is not None and start != file.start + file.nbytes:
                self._send(file)
            if file.buffer is None:
                file.buffer, file.start, file.nbytes = self._free.get(), start, 0
            part = rest[: manifest.BLOCK_NBYTES - start % manifest.BLOCK_NBYTES]
            np.frombuffer(file.buffer, np.uint8)[file.nbytes : file.nbytes + part.size] = part
            file.nbytes += part.size
            start, rest = start + part.size, rest[part.size :]
            if start % manifest.BLOCK_NBYTES == 0:
                self._send(file)

    def finish(self) -> None:
        """Write what is left, sync all files to the disk, and close them. Raises `OSError`."""
        while self._open:
            self._close_oldest()

    def __enter__(self) -> RangeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        for file in self._open.values():
            file.close()

    def _file(self, name: str) -> OpenFile:
        if name not in self._open:
            if len(self._open) == _MOST_OPEN:
                self._close_oldest()
            self._open[name] = OpenFile(self._folder / name, self._numbers[name], direct=self._direct)
        self._open.move_to_end(name)
        return self._open[name]

    def _close_oldest(self) -> None:
        """Finish the file that was written to least recently."""
        name, file = next(iter(self._open.items()))
        if file.buffer is not None:
            self._send(file)
        self._wait_for_all_but(0)
        os.fsync(file.cached)
        if self._alone:
            _forget(file.cached)
        del self._open[name]
        file.close()

    def _send(self, file: OpenFile) -> None:
        """Pass a file's buffer to a thread."""
        assert file.buffer is not None
        buffer, file.buffer = file.buffer, None
        self._under_way.append(self._threads.submit(self._put, file, buffer, file.start, file.nbytes))
        self._wait_for_all_but(_THREADS)

    def _wait_for_all_but(self, count: int) -> None:
        """Wait until at most this many pieces are in progress."""
        while len(self._under_way) > count:
            self.written.append(self._under_way.popleft().result())

    def _put(self, file: OpenFile, buffer: mmap.mmap, start: int, nbytes: int) -> Written:
        """Write the first bytes of a buffer, and release it."""
        try:
            write_all(file, memoryview(buffer)[:nbytes], start)
            return Written(file.number, start, nbytes, block_sum(np.frombuffer(buffer, np.uint8), nbytes))
        finally:
            self._free.put(buffer)


@contextmanager
def writing_ranges(folder: Path, files: Iterable[Shard]) -> Iterator[RangeWriter]:
    """Create files, and write to them; they are complete and synced when the block ends. Raises `OSError`."""
    files = list(files)
    create(folder, files)
    with RangeWriter(folder, files) as ranges:
        yield ranges
        ranges.finish()


class TensorWriter:
    """Writes tensors, in any order and piece by piece, to those of `shards` that are files of a `RangeWriter`."""

    def __init__(self, ranges: RangeWriter, shards: Iterable[Shard], *, headers: bool = True) -> None:
        """headers: whether to write those of the files, too."""
        self._ranges = ranges
        self._shards = {name: shard for shard in shards for name in shard.starts if ranges.takes(shard.name)}
        self._begun: set[str] = set() if headers else {shard.name for shard in self._shards.values()}

    def takes(self, tensor: WrittenTensor) -> bool:
        """Whether it is in one of the files."""
        return tensor.name in self._shards

    def write(self, planned: WrittenTensor, values: Tensor, at: int = 0) -> None:
        """Write the elements from `at` on of a tensor, rounding to nearest even if the dtypes differ."""
        self.copy(planned, tensor_blocks(values, planned.dtype), at)

    def copy(self, planned: WrittenTensor, blocks: Iterable[memoryview], at: int = 0) -> None:
        """Write a tensor's bytes from element `at` on as they are."""
        shard = self._shards[planned.name]
        if shard.name not in self._begun:
            self._begun.add(shard.name)
            self._ranges.write(shard.name, 0, shard.header)
        start = shard.starts[planned.name] + at * planned.dtype.itemsize
        for block in blocks:
            self._ranges.write(shard.name, start, block)
            start += len(block)


def create(folder: Path, files: Iterable[Shard]) -> None:
    """Create the files with their full size and space, and keep nothing of them in the page cache. Raises `OSError`.

    A network file system would write back whole cached pages, overwriting what other ranks write there.
    """
    preallocates = not compresses_what_is_not_preallocated(folder)
    for shard in files:
        (folder / shard.name).parent.mkdir(exist_ok=True)
        file = os.open(folder / shard.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if preallocates:
                _allocate(file, shard.nbytes)
            os.ftruncate(file, shard.nbytes)
            os.fsync(file)
            _forget(file)
        finally:
            os.close(file)


def _forget(file: int) -> None:
    """Keep nothing of a synced file in the page cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _allocate(file: int, nbytes: int) -> None:
    """Preallocate space if the file system can. Raises `OSError` if it is full."""
    if not nbytes or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def write_all(file: OpenFile, data: memoryview, start: int) -> None:
    """Write `data` at byte `start`, past the page cache where that is possible. Raises `OSError`."""
    while data:
        descriptor = file.cached
        if (direct := file.direct) is not None and start % SECTOR == len(data) % SECTOR == 0:
            descriptor = direct
        try:
            nbytes = os.pwrite(descriptor, data, start)
        except OSError as error:
            if error.errno != errno.EINVAL or descriptor == file.cached:
                raise
            nbytes = os.pwrite(file.cached, data, start)
        if not nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data, start = data[nbytes:], start + nbytes


# Checksums ------------------------------------------------------------------------------------------------------------


def dealt_blocks(files: Sequence[Shard], rank: int = 0, ranks: int = 1) -> list[tuple[int, int]]:
    """The blocks that a rank checksums, as (number of the file, number of the block)."""
    blocks = [(number, block) for number, shard in enumerate(files) for block in range(_blocks(shard))]
    return blocks[len(blocks) * rank // ranks : len(blocks) * (rank + 1) // ranks]


def sums_of_blocks(
    folder: Path,
    files: Sequence[Shard],
    blocks: Sequence[tuple[int, int]],
    written: Sequence[Sequence[Written]],
    progress: Callable[[], object] = lambda: None,
) -> list[int]:
    """The checksums of blocks. written: pieces of each rank. progress: called for each block.

    Raises `CheckpointError` if the ranks' pieces do not fill a block, or its content differs from theirs.
    """
    pieces: dict[tuple[int, int], list[tuple[Written, int]]] = {block: [] for block in blocks}
    for rank, of_rank in enumerate(written):
        for piece in of_rank:
            if (place := (piece.file, piece.start // manifest.BLOCK_NBYTES)) in pieces:
                pieces[place].append((piece, rank))

    def summed(block: tuple[int, int]) -> int:
        progress()
        shard, number = files[block[0]], block[1]
        in_order = sorted(pieces[block])
        if len(written) == len(in_order) == 1 and in_order[0][0].nbytes == _nbytes(shard, number):
            return in_order[0][0].sum
        return _verified_sum(folder, shard, number, in_order)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint") as threads:
        return list(threads.map(summed, blocks))


def sums_of_files(folder: Path, files: Sequence[Shard], written: Sequence[Written]) -> Mapping[str, FileSum]:
    """Name -> checksums of files that this process alone has written."""
    return file_sums(files, sums_of_blocks(folder, files, dealt_blocks(files), [written]))


def file_sums(files: Sequence[Shard], sums: Iterable[int]) -> Mapping[str, FileSum]:
    """Name -> checksums, from the checksums of all blocks of all files in order."""
    rest = iter(sums)
    return {shard.name: file_sum(shard.nbytes, [next(rest) for _ in range(_blocks(shard))]) for shard in files}


def _verified_sum(folder: Path, shard: Shard, block: int, pieces: Sequence[tuple[Written, int]]) -> int:
    """The checksum of a block as it is in its file, whose pieces are compared with what their ranks have written."""
    first, nbytes = block * manifest.BLOCK_NBYTES, _nbytes(shard, block)
    memory, part = (np.empty(-(-nbytes // 8) * 8, np.uint8) for _ in range(2))
    with (folder / shard.name).open("rb", buffering=0) as file:
        data = os.pread(file.fileno(), nbytes, first)
    memory[: len(data)] = np.frombuffer(data, np.uint8)
    end = first
    for piece, rank in pieces:
        inside = memory[piece.start - first : piece.start - first + piece.nbytes]
        part[: inside.size] = inside
        if piece.start != end or inside.size != piece.nbytes or block_sum(part, piece.nbytes) != piece.sum:
            raise _differs(folder, shard, piece.start, piece.start + piece.nbytes, f"not what rank {rank} has written")
        end += piece.nbytes
    if end != first + nbytes:
        raise _differs(folder, shard, end, first + nbytes, "what no rank has written")
    return block_sum(memory, nbytes)


def _differs(folder: Path, shard: Shard, start: int, stop: int, what: str) -> CheckpointError:
    what = f"{shard.name} holds between byte {start:,} and byte {stop:,} {what}"
    return CheckpointError(what, where=str(folder), fix="check the file system that the ranks share")


def _blocks(shard: Shard) -> int:
    return -(-shard.nbytes // manifest.BLOCK_NBYTES)


def _nbytes(shard: Shard, block: int) -> int:
    """Bytes in a block; the last one of a file may be shorter."""
    return min(manifest.BLOCK_NBYTES, shard.nbytes - block * manifest.BLOCK_NBYTES)


# Whether ranks share a folder -----------------------------------------------------------------------------------------


def probe(folder: Path, rank: int, nonce: bytes) -> str:
    """Write a nonce for the other ranks into the file `PROBE`; returns it in hexadecimal, or nothing if that fails."""
    try:
        file = os.open(folder / PROBE, os.O_WRONLY)
        try:
            os.pwrite(file, nonce, rank * NONCE_NBYTES)
            os.fsync(file)
        finally:
            os.close(file)
    except OSError:
        return ""
    return nonce.hex()


def sees(folder: Path, nonces: Sequence[str]) -> bool:
    """Whether everything that the ranks wrote is in the file."""
    try:
        return all(nonces) and (folder / PROBE).read_bytes().hex() == "".join(nonces)
    except OSError:
        return False
