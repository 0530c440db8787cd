"""Hard-links files that are the same as in the previous checkpoint instead of writing them again.

Frozen weights, tensors that are copied from the model's source, and tokenizers do not change between checkpoints. A
file of frozen weights is the same if its header is, and the checksum of all frozen weights (`Store.frozen_checksum`);
tensors that are not parameters are compared byte by byte. Other files are compared by their checksums once they are
written, and then replaced. Either checkpoint may be removed without affecting the other.

The previous file must not have been touched since this process wrote or checked it (by inode, size and time). A linked
file is made read-only, since writing to it would change both. If the file system has no hard links, files are written
again, and the run says so once. Small files, which people may edit, are never linked.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatrain.checkpoint.manifest import read_manifest

SMALLEST = 1 << 20
"""Smaller files (in bytes) are not worth linking."""
READ_ONLY = 0o444

Stamp = tuple[int, int, int]
"""A file's inode, size, and time of its last change."""


class PreviousCheckpoint:
    """A checkpoint that this process has written or checked, and that still is as it was then.

    Raises `DamagedCheckpoint` if it has no sound manifest, and `OSError` if a file is missing.
    """

    def __init__(self, folder: Path, frozen: str | None = None) -> None:
        """frozen: the checksum of the frozen weights in it, if known."""
        self.folder, self.frozen = folder, frozen
        self.files = read_manifest(folder).files
        self._stamps = {name: _stamp(folder / name) for name in self.files}
        self.has_same_weights = False
        """Whether the frozen weights are the same now."""
        self.linked_nbytes = 0
        """Bytes of files that the checkpoint being written shares with this one."""
        self.copied_nbytes = 0
        """Bytes of files that could not be linked, so that they are written again."""
        self.why_copied = ""

    def begin(self, frozen: str | None) -> None:
        """Count the links of another checkpoint, with frozen weights of that checksum."""
        self.has_same_weights = frozen is not None and frozen == self.frozen
        self.linked_nbytes, self.copied_nbytes, self.why_copied = 0, 0, ""

    def holds(self, name: str, nbytes: int, pieces: Iterable[tuple[int, bytes | memoryview]]) -> bool:
        """Whether there is a file of that name and size, with these bytes at these places."""
        if name not in self.files or self.files[name].nbytes != nbytes:
            return False
        try:
            with (self.folder / name).open("rb") as file:
                return all(file.seek(start) == start and file.read(len(data)) == data for start, data in pieces)
        except OSError:
            return False

    def link(self, name: str, path: Path) -> bool:
        """Make `path` a hard link to the file; whether that was possible."""
        source, nbytes, beside = self.folder / name, self.files[name].nbytes, path.with_name(f".{path.name}.link")
        try:
            if nbytes < SMALLEST or _stamp(source) != self._stamps[name]:
                return False
        except OSError:
            return False
        try:
            source.chmod(READ_ONLY)
            beside.hardlink_to(source)
            beside.replace(path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            self.copied_nbytes += nbytes
            self.why_copied = error.strerror or str(error)
            return False
        self.linked_nbytes += nbytes
        return True


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
