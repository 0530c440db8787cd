"""Lets several ranks write one file together, each its own byte ranges, and computes the file's checksums.

A block, the unit of checksums, may be written by several ranks. Each rank keeps a checksum of every piece that it has
written, computed from memory. Once all have written and synced, the blocks are divided among the ranks: a rank reads
its blocks back and verifies that pieces fill each block and match their writers' checksums before it computes the
block's. So the manifest describes what was in memory, as when one rank writes alone.

Bytes go through the page cache, since pieces are not sector-aligned. Files are opened write-only, and nothing is
read before all ranks have written: a network file system then sends the written bytes, not the pages around them.
`probe` tests whether it does.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.checkpoint import manifest
from megatrain.checkpoint.direct_io import allocate, write_all
from megatrain.checkpoint.manifest import FileSum, block_sum, file_sum
from megatrain.checkpoint.rank_byte_ranges import OwnBytes
from megatrain.checkpoint.safetensors_writer import Shard
from megatrain.errors import CheckpointError

PROBE = ".ranks"
"""The file with which ranks test whether they share a folder."""
NONCE_NBYTES = 16
_THREADS = 4
_MOST_OPEN = 8
"""Maximum open files; they are written one after another."""


class Written(NamedTuple):
    """A piece of one block: the number of its file, its first byte, its length, and its checksum."""

    file: int
    start: int
    nbytes: int
    sum: int


def make_probe(folder: Path, ranks: int) -> None:
    """Create the file that each rank writes to. Raises `OSError`."""
    with (folder / PROBE).open("xb") as file:
        file.truncate(ranks * NONCE_NBYTES)


def probe(folder: Path, rank: int, nonce: bytes) -> str:
    """Write a nonce for the other ranks; returns it in hexadecimal, or an empty string if writing fails."""
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
    """Whether everything that the ranks wrote is there."""
    try:
        return all(nonces) and (folder / PROBE).read_bytes().hex() == "".join(nonces)
    except OSError:
        return False


class RangeWriter:
    """Writes one rank's share into `files` in `folder`."""

    def __init__(self, folder: Path, files: Sequence[Shard]) -> None:
        self.written: list[Written] = []
        self.nbytes = 0
        """Bytes passed to `write` so far."""
        self._folder, self._number = folder, {shard.name: number for number, shard in enumerate(files)}
        self._open: OrderedDict[str, int] = OrderedDict()
        self._under_way: list[Future[Written]] = []
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint")
        self._free: SimpleQueue[NDArray[np.uint8]] = SimpleQueue()
        for _ in range(_THREADS):
            self._free.put(np.empty(manifest.BLOCK_NBYTES, np.uint8))

    def takes(self, name: str) -> bool:
        """Whether it is one of the files."""
        return name in self._number

    def write(self, piece: OwnBytes) -> None:
        """Write into an existing file. The memory may change once `settle` has returned."""
        self.nbytes += piece.data.size
        file, start, rest = self._file(piece.file), piece.start, piece.data
        while rest.size:
            part = rest[: manifest.BLOCK_NBYTES - start % manifest.BLOCK_NBYTES]
            self._under_way.append(self._threads.submit(self._put, file, self._number[piece.file], start, part))
            start, rest = start + part.size, rest[part.size :]

    def settle(self) -> None:
        """Wait until everything is written. Raises `OSError`."""
        under_way, self._under_way = self._under_way, []
        self.written += [part.result() for part in under_way]

    def finish(self) -> None:
        """Wait, and sync everything to the disk. Raises `OSError`."""
        self.settle()
        while self._open:
            self._close()

    def __enter__(self) -> RangeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        for file in self._open.values():
            os.close(file)

    def _file(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) == _MOST_OPEN:
                self.settle()
                self._close()
            self._open[name] = os.open(self._folder / name, os.O_WRONLY)
        self._open.move_to_end(name)
        return self._open[name]

    def _close(self) -> None:
        """Close the least recently used file."""
        name, file = next(iter(self._open.items()))
        os.fsync(file)
        del self._open[name]
        os.close(file)

    def _put(self, file: int, number: int, start: int, data: NDArray[np.uint8]) -> Written:
        buffer = self._free.get()
        try:
            buffer[: data.size] = data
            write_all(file, buffer.data[: data.size], start)
            return Written(number, start, data.size, block_sum(buffer, data.size))
        finally:
            self._free.put(buffer)


def create(folder: Path, files: Iterable[Shard]) -> None:
    """Create the files with their full size and space, and keep nothing of them in the page cache. Raises `OSError`.

    A network file system would write back whole cached pages, overwriting what other ranks write there.
    """
    for shard in files:
        file = os.open(folder / shard.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            allocate(file, shard.nbytes)
            os.ftruncate(file, shard.nbytes)
            os.fsync(file)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def header_of(shard: Shard) -> OwnBytes:
    """The header of a file."""
    return OwnBytes(shard.name, 0, np.frombuffer(shard.header, np.uint8))


def differing(folder: Path, pieces: Iterable[OwnBytes]) -> set[str]:
    """Names of the files that do not hold these bytes."""
    wrong: set[str] = set()
    for name, start, data in pieces:
        if name in wrong:
            continue
        try:
            with (folder / name).open("rb") as file:
                for at in range(0, data.size, manifest.BLOCK_NBYTES):
                    part = data[at : at + manifest.BLOCK_NBYTES]
                    found = os.pread(file.fileno(), part.size, start + at)
                    if not np.array_equal(np.frombuffer(found, np.uint8), part):
                        wrong.add(name)
                        break
        except OSError:
            wrong.add(name)
    return wrong


def dealt_blocks(files: Sequence[Shard], rank: int, ranks: int) -> list[tuple[int, int]]:
    """The blocks that a rank checksums, as (number of the file, number of the block)."""
    blocks = [(number, block) for number, shard in enumerate(files) for block in range(_blocks(shard))]
    return blocks[len(blocks) * rank // ranks : len(blocks) * (rank + 1) // ranks]


def sums_of_blocks(
    folder: Path,
    files: Sequence[Shard],
    blocks: Sequence[tuple[int, int]],
    written: Sequence[Sequence[Written]],
    progress: Callable[[], object],
) -> list[int]:
    """The checksums of blocks, each read once. written: pieces of each rank. progress: called for each block.

    Raises `CheckpointError` if the ranks' pieces do not fill a block, or its content differs from theirs.
    """
    pieces: dict[tuple[int, int], list[tuple[Written, int]]] = {block: [] for block in blocks}
    for rank, of_rank in enumerate(written):
        for piece in of_rank:
            if (at := (piece.file, piece.start // manifest.BLOCK_NBYTES)) in pieces:
                pieces[at].append((piece, rank))

    def summed(at: tuple[int, int]) -> int:
        progress()
        return _block(folder, files[at[0]], at[1], sorted(pieces[at]))

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint") as threads:
        return list(threads.map(summed, blocks))


def file_sums(files: Sequence[Shard], sums: Sequence[int]) -> Mapping[str, FileSum]:
    """Name -> checksums, from the checksums of all blocks of all files in order."""
    rest = iter(sums)
    return {shard.name: file_sum(shard.nbytes, [next(rest) for _ in range(_blocks(shard))]) for shard in files}


def _block(folder: Path, shard: Shard, block: int, pieces: Sequence[tuple[Written, int]]) -> int:
    first = block * manifest.BLOCK_NBYTES
    nbytes = min(manifest.BLOCK_NBYTES, shard.nbytes - first)
    memory, part = (np.empty(-(-nbytes // 8) * 8, np.uint8) for _ in range(2))
    with (folder / shard.name).open("rb", buffering=0) as file:
        data = os.pread(file.fileno(), nbytes, first)
    memory[: len(data)] = np.frombuffer(data, np.uint8)
    at = first
    for piece, rank in pieces:
        inside = memory[piece.start - first : piece.start - first + piece.nbytes]
        part[: inside.size] = inside
        if piece.start != at or inside.size != piece.nbytes or block_sum(part, piece.nbytes) != piece.sum:
            raise _other(folder, shard, piece.start, piece.start + piece.nbytes, f"not what rank {rank} has written")
        at += piece.nbytes
    if at != first + nbytes:
        raise _other(folder, shard, at, first + nbytes, "what no rank has written")
    return block_sum(memory, nbytes)


def _other(folder: Path, shard: Shard, start: int, stop: int, what: str) -> CheckpointError:
    what = f"{shard.name} holds between byte {start:,} and byte {stop:,} {what}"
    return CheckpointError(what, where=str(folder), fix="check the file system that the ranks share")


def _blocks(shard: Shard) -> int:
    return -(-shard.nbytes // manifest.BLOCK_NBYTES)
