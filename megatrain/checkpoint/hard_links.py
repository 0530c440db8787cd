"""Files that a checkpoint has in common with the one before it: linked, not written again.

What is frozen does not change, nor does a tokenizer, and neither need be written twice. A file is compared with that
of the earlier checkpoint while its content comes by: block by block, checksum by checksum, and nothing is written as
long as they agree. One that agrees to its end becomes a hard link, so either checkpoint may be removed and the other
stays whole. At the first block that differs it is written after all, what was the same so far being read back and
compared again. So it needs no word about what is frozen; files of trained weights differ in their first block.

Before a file is shared it must be what the earlier checkpoint says: untouched since this process wrote it (by its
number, size and time), or read through. A shared file is made read-only, since whoever wrote into it would write into
both. Where the file system makes no hard links, files are copied, compared on the way. Small files, which people
may edit, are never shared. It leaves out which checkpoint is the earlier one (`train.async_save`).
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megatrain.checkpoint import manifest
from megatrain.checkpoint.manifest import FileSum, block_sum, digits, digits_of_block, read_manifest, sum_of
from megatrain.checkpoint.safetensors_writer import ShardFile

SMALLEST = 1 << 20
"""Bytes of a file below which sharing saves nothing."""
READ_ONLY = 0o444

Stamp = tuple[int, int, int]
"""A file's number, size, and time of its last change."""


class Earlier:
    """A checkpoint whose files the next one may share. Raises `DamagedCheckpoint` where it has no sound manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = read_manifest(folder).files
        self._stamps: dict[str, Stamp] = {}

    @classmethod
    def just_written(cls, folder: Path) -> Earlier:
        """One that this process has written, and nobody has touched."""
        earlier = cls(folder)
        for name in earlier._files:
            earlier._stamps[name] = _stamp(folder / name)
        return earlier

    def sum_of(self, name: str, nbytes: int) -> FileSum | None:
        """What the file of that name holds, if there is one of that size that may be shared."""
        found = self._files.get(name)
        return found if found is not None and found.nbytes == nbytes >= SMALLEST else None

    def is_as_written(self, name: str) -> bool:
        """Whether the file still holds what the manifest says."""
        path, kept = self.folder / name, self._stamps.get(name)
        try:
            now = _stamp(path)
            if kept is None and sum_of(path) == self._files[name]:
                kept = self._stamps[name] = now
        except OSError:
            return False
        return kept == now

    def link(self, name: str, target: Path) -> None:
        """Make `target` the same file. Raises `OSError` where the file system does not."""
        source = self.folder / name
        source.chmod(READ_ONLY)
        os.link(source, target)

    def shared_as(self, name: str, target: Path) -> FileSum | None:
        """Make `target` the same file and return what it holds, if it still holds what the manifest says, and the file
        system makes links."""
        try:
            if not self.is_as_written(name):
                return None
            self.link(name, target)
        except OSError:
            return None
        return self._files[name]

    def blocks(self, name: str, count: int) -> Iterator[bytes]:
        """The first blocks of a file, compared with their checksums. Raises `OSError`, and shares nothing any more."""
        expected = self._files[name]
        try:
            with (self.folder / name).open("rb") as file:
                for number in range(count):
                    data = file.read(manifest.BLOCK_NBYTES)
                    memory = np.zeros(-(-len(data) // 8) * 8, np.uint8)
                    memory[: len(data)] = np.frombuffer(data, np.uint8)
                    if digits(block_sum(memory, len(data))) != digits_of_block(expected, number):
                        raise OSError(errno.EIO, f"{name} is not as it was written", str(self.folder))
                    yield data
        except OSError:
            self._files = {}
            raise


class SharedFile:
    """Takes the bytes of a file, as `DirectFile` does, and writes them only where they differ from the earlier one's.

    create: makes the file that is written then. shared: called with its sum if nothing was written.
    """

    def __init__(
        self,
        earlier: Earlier,
        name: str,
        expected: FileSum,
        path: Path,
        create: Callable[[], ShardFile],
        shared: Callable[[FileSum], None],
    ) -> None:
        self._earlier, self._name, self._expected, self._path = earlier, name, expected, path
        self._create, self._shared = create, shared
        self._block = mmap.mmap(-1, manifest.BLOCK_NBYTES)
        self._memory = np.frombuffer(self._block, np.uint8)
        self._same, self._filled = 0, 0  # blocks that agreed, and bytes of the next
        self._file: ShardFile | None = None

    def write(self, data: memoryview | bytes) -> None:
        """Append `data`, whose memory may be used for something else after the call. Raises `OSError`."""
        rest = np.frombuffer(data, np.uint8)
        while rest.size and self._file is None:
            part = rest[: manifest.BLOCK_NBYTES - self._filled]
            self._memory[self._filled : self._filled + part.size] = part
            self._filled += part.size
            rest = rest[part.size :]
            if self._filled == manifest.BLOCK_NBYTES:
                self._compare()
        if rest.size and self._file is not None:
            self._file.write(rest.data)

    def seek(self, position: int) -> None:
        """Only to where the file ends: raises `ValueError` for any other position."""
        if self._file is not None:
            self._file.seek(position)
        elif position != self._same * manifest.BLOCK_NBYTES + self._filled:
            raise ValueError(f"byte {position} of a file that is written front to back")

    def close(self) -> None:
        """Share the file if it is the same, else finish writing it. One that is not whole is left out."""
        if self._file is None and self._same * manifest.BLOCK_NBYTES + self._filled == self._expected.nbytes:
            if self._filled:
                self._compare()
            if self._file is None:
                self._link()
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _compare(self) -> None:
        """One more block is there, or the last part of one."""
        nbytes, self._filled = self._filled, 0
        agrees = digits(block_sum(self._memory, nbytes)) == digits_of_block(self._expected, self._same)
        if agrees and (self._same or self._earlier.is_as_written(self._name)):
            self._same += 1
            return
        self._write_after_all(self._same)
        assert self._file is not None
        self._file.write(memoryview(self._block)[:nbytes])

    def _link(self) -> None:
        try:
            if not self._earlier.is_as_written(self._name):  # it was, when the first block agreed
                raise OSError(errno.EIO, f"{self._name} has changed", str(self._earlier.folder))
            self._earlier.link(self._name, self._path)
        except OSError:
            self._write_after_all(self._same)
        else:
            self._shared(self._expected)

    def _write_after_all(self, blocks: int) -> None:
        self._file = self._create()
        for data in self._earlier.blocks(self._name, blocks):
            self._file.write(data)


def share_instead(earlier: Earlier, name: str, found: FileSum, path: Path) -> bool:
    """Put the earlier checkpoint's file in the place of one that was written and holds the same; whether it was."""
    if earlier.sum_of(name, found.nbytes) != found or not earlier.is_as_written(name):
        return False
    beside = path.with_name(f".{path.name}.link")
    try:
        earlier.link(name, beside)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        return False
    return True


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
