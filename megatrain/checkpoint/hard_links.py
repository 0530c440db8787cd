"""Hard-links files that are the same as in the previous checkpoint instead of writing them again.

Frozen weights and tokenizers do not change between checkpoints. A file's content is compared with the previous
checkpoint's while it is being produced, block by block by checksum, and nothing is written as long as they agree. If
they agree to the end, the file becomes a hard link, so either checkpoint may be removed without affecting the other.
At the first difference the file is written after all; the equal part is read back and compared again. So nobody needs
to say what is frozen; files of trained weights differ in their first block.

Before a file is linked it must be what the previous checkpoint's manifest says: unchanged since this process wrote it
(by inode, size and time), or read and compared. A linked file is made read-only, since writing to it would change
both. If the file system has no hard links, files are copied and compared on the way, and the run says so once. Small
files, which people may edit, are never linked. `train.async_save` decides which checkpoint is the previous one.
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
"""Smaller files (in bytes) are not worth sharing."""
READ_ONLY = 0o444

Stamp = tuple[int, int, int]
"""A file's inode, size, and time of its last change."""


class Earlier:
    """A checkpoint whose files the next one may share. Raises `DamagedCheckpoint` if it has no sound manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = read_manifest(folder).files
        self._stamps: dict[str, Stamp] = {}
        self.copied_nbytes = 0
        """Bytes of unchanged files that could not be linked, so that they were written again."""
        self.why_copied = ""

    @classmethod
    def just_written(cls, folder: Path) -> Earlier:
        """A checkpoint that this process wrote, with its files unchanged since."""
        earlier = cls(folder)
        for name in earlier._files:
            earlier._stamps[name] = _stamp(folder / name)
        return earlier

    def sum_of(self, name: str, nbytes: int) -> FileSum | None:
        """The checksums of the file with that name, if it has that size and may be shared."""
        known = self._files.get(name)
        return known if known is not None and known.nbytes == nbytes >= SMALLEST else None

    def is_as_written(self, name: str) -> bool:
        """Whether the file still has the content in the manifest."""
        path, kept = self.folder / name, self._stamps.get(name)
        try:
            now = _stamp(path)
            if kept is None and sum_of(path) == self._files[name]:
                kept = self._stamps[name] = now
        except OSError:
            return False
        return kept == now

    def link(self, name: str, target: Path) -> None:
        """Hard-link `target` to the file. Raises `OSError` if the file system cannot."""
        source = self.folder / name
        try:
            source.chmod(READ_ONLY)
            os.link(source, target)
        except OSError as error:
            self.copied_nbytes += self._files[name].nbytes
            self.why_copied = error.strerror or str(error)
            raise

    def shared_as(self, name: str, target: Path) -> FileSum | None:
        """Hard-link `target` to the file and return its checksums; `None` if it has changed, or links are not
        supported."""
        try:
            if not self.is_as_written(name):
                return None
            self.link(name, target)
        except OSError:
            return None
        return self._files[name]

    def blocks(self, name: str, count: int) -> Iterator[bytes]:
        """The first blocks of a file, compared with their checksums. On a mismatch raises `OSError`, and shares
        nothing more."""
        expected = self._files[name]
        try:
            with (self.folder / name).open("rb") as file:
                for number in range(count):
                    data = file.read(manifest.BLOCK_NBYTES)
                    memory = np.zeros(-(-len(data) // 8) * 8, np.uint8)
                    memory[: len(data)] = np.frombuffer(data, np.uint8)
                    if digits(block_sum(memory, len(data))) != digits_of_block(expected, number):
                        raise OSError(errno.EIO, f"{name} has changed since it was written", str(self.folder))
                    yield data
        except OSError:
            self._files = {}
            raise


class SharedFile:
    """Takes a file's bytes like `DirectFile`, but writes them only if they differ from the previous checkpoint's
    file.

    create: creates the file if it must be written. shared: called with its checksums if nothing was written.
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
        self._same, self._filled = 0, 0  # number of equal blocks, and bytes of the next
        self._file: ShardFile | None = None

    def write(self, data: memoryview | bytes) -> None:
        """Append `data`; its memory may be reused after the call. Raises `OSError`."""
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
        """Only to the end of the file; raises `ValueError` for any other position."""
        if self._file is not None:
            self._file.seek(position)
        elif position != self._same * manifest.BLOCK_NBYTES + self._filled:
            raise ValueError(f"byte {position} of a file that is written front to back")

    def close(self) -> None:
        """Share the file if it is the same, else finish writing it. An incomplete file is dropped."""
        if self._file is None and self._same * manifest.BLOCK_NBYTES + self._filled == self._expected.nbytes:
            if self._filled:
                self._compare()
            if self._file is None:
                self._link()
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _compare(self) -> None:
        """Compare the next block, or the last partial one."""
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
            if not self._earlier.is_as_written(self._name):  # checked once already, at the first block
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


def share_instead(earlier: Earlier, name: str, sums: FileSum, path: Path) -> bool:
    """Replace a written file by the previous checkpoint's equal one; returns whether that was possible."""
    if earlier.sum_of(name, sums.nbytes) != sums or not earlier.is_as_written(name):
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
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
