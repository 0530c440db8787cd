"""Files that several ranks write, each at its own ranges, and what they hold.

A block of a file, which has one checksum, may be written by several ranks. Each keeps a checksum of every piece that it
has written, taken from its memory. Once all have written and forced what they wrote to the disk, the blocks are dealt
out: whoever has one reads it back, and proves that its pieces fill it and are, each, what its writer meant, before it
sums the whole. So what a manifest says is what was in memory, as where one rank writes alone.

Bytes go through the page cache: pieces do not begin at sectors. Files are opened to write alone, and nothing of them
is read before all have written: a network file system then sends the bytes that were written, and not the pages around
them. `probe` finds out whether it does.
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
from megatrain.checkpoint.places import OwnBytes
from megatrain.checkpoint.safetensors_writer import Shard
from megatrain.errors import CheckpointError

PROBE = ".ranks"
"""The file by which ranks find out whether they share a folder."""
NONCE_NBYTES = 16
_THREADS = 4
_MOST_OPEN = 8
"""Files at a time. They are written one behind the other."""


class Written(NamedTuple):
    """A piece of one block of a file: which of the files, its first byte, its bytes, and their checksum."""

    file: int
    start: int
    nbytes: int
    sum: int


def make_probe(folder: Path, ranks: int) -> None:
    """Where each rank is to write. Raises `OSError`."""
    with (folder / PROBE).open("xb") as file:
        file.truncate(ranks * NONCE_NBYTES)


def probe(folder: Path, rank: int, nonce: bytes) -> str:
    """Write what the others look for, beside what they write, and return it in hexadecimal; nothing where that cannot
    be."""
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
    """Whether all that the ranks have written is there."""
    try:
        return all(nonces) and (folder / PROBE).read_bytes().hex() == "".join(nonces)
    except OSError:
        return False


class RangeWriter:
    """Writes what one rank owns into `files` in `folder`."""

    def __init__(self, folder: Path, files: Sequence[Shard]) -> None:
        self.written: list[Written] = []
        self.nbytes = 0
        """That have been given."""
        self._folder, self._number = folder, {shard.name: number for number, shard in enumerate(files)}
        self._open: OrderedDict[str, int] = OrderedDict()
        self._under_way: list[Future[Written]] = []
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint")
        self._free: SimpleQueue[NDArray[np.uint8]] = SimpleQueue()
        for _ in range(_THREADS):
            self._free.put(np.empty(manifest.BLOCK_NBYTES, np.uint8))

    def takes(self, name: str) -> bool:
        """Whether that is one of the files."""
        return name in self._number

    def write(self, piece: OwnBytes) -> None:
        """Write into a file that is there. Its memory may change once `settle` has returned."""
        self.nbytes += piece.data.size
        file, start, rest = self._file(piece.file), piece.start, piece.data
        while rest.size:
            part = rest[: manifest.BLOCK_NBYTES - start % manifest.BLOCK_NBYTES]
            self._under_way.append(self._threads.submit(self._put, file, self._number[piece.file], start, part))
            start, rest = start + part.size, rest[part.size :]

    def settle(self) -> None:
        """Wait until all is written. Raises `OSError`."""
        under_way, self._under_way = self._under_way, []
        self.written += [each.result() for each in under_way]

    def finish(self) -> None:
        """Wait, and force all of it to the disk. Raises `OSError`."""
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
        """Close the file that has not been written for longest."""
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
    """Make the files, of their size, with space for all that comes, and keep nothing of them in memory: a network file
    system would write back whole what it holds of a page, which another rank writes to. Raises `OSError`."""
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
    """What a file begins with."""
    return OwnBytes(shard.name, 0, np.frombuffer(shard.header, np.uint8))


def differing(folder: Path, pieces: Iterable[OwnBytes]) -> set[str]:
    """Names of files that do not hold these bytes."""
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
    """The blocks that a rank sums up: (number of the file, number of the block)."""
    blocks = [(number, block) for number, shard in enumerate(files) for block in range(_blocks(shard))]
    return blocks[len(blocks) * rank // ranks : len(blocks) * (rank + 1) // ranks]


def sums_of_blocks(
    folder: Path,
    files: Sequence[Shard],
    blocks: Sequence[tuple[int, int]],
    written: Sequence[Sequence[Written]],
    progress: Callable[[], object],
) -> list[int]:
    """The checksums of blocks, each read once. written: of each rank. progress: called for each block.

    Raises `CheckpointError` for a block that is not filled by what the ranks have written, or holds something else.
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
    """By name, from the sums of all blocks of all files in order."""
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
