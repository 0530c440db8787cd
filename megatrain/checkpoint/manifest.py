"""The manifest of a checkpoint: size and block checksums of every file, and the checks against them.

`manifest.json` is written last and protects itself: its last field is the SHA-256 of everything before, and its
text must be exactly what its content serializes to, so no byte can change unnoticed. `quick_check` compares names
and sizes, `full_check` reads everything. Unknown files are ignored, unless a loader might take them for the
model's weights.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatrain.errors import DamagedCheckpoint
from megatrain.memory.checksum import checksum
from megatrain.plan import available_threads
from megatrain.system.paths import lies_within, parsed_json, read_bytes

# The checksum is the disk tier's (`memory.checksum`): 64 bits, certain to detect any change inside one word, and at
# memory bandwidth, which matters since it is computed during training (measured: 15 GB/s per core, against 1.6 for
# CRC-32 and 0.2 for SHA-256). It is part of the format. One per block lets several threads check a file, and locates
# damage.


BLOCK_NBYTES = 4 << 20
"""Bytes per checksum; part of the format (see `FORMAT`). The last block of a file may be shorter."""

DIGITS = 16
"""Hexadecimal digits of a checksum."""

_RUN = 16
"""Blocks that a thread reads at a time."""
_READERS = 8
"""Maximum threads, so that a slow drive gets several requests."""


@dataclass(frozen=True, slots=True)
class FileSum:
    """Size of a file in bytes, and `DIGITS` hexadecimal digits for each block."""

    nbytes: int
    blocks: str


def file_sum(nbytes: int, sums: Iterable[int]) -> FileSum:
    """The `FileSum` for a file's size and its blocks' checksums."""
    return FileSum(nbytes, "".join(digits(value) for value in sums))


def block_sum(memory: NDArray[np.uint8], nbytes: int) -> int:
    """The checksum of the first bytes of `memory`, which is word-aligned; the last word is padded with zeros."""
    end = -(-nbytes // 8) * 8
    memory[nbytes:end] = 0
    return checksum([memory[:end]])


def sum_of(path: Path) -> FileSum:
    """Read a file and compute its checksums. Raises `OSError`."""
    return file_sum(path.stat().st_size, _sums(path, 0))


def differences(folder: Path, files: Mapping[str, FileSum]) -> dict[str, str]:
    """Read all files with several threads; name -> what is wrong, for those that differ from their checksums.

    Sizes are not checked; a file with another size is reported where it ends too early.
    """
    runs = [(name, first) for name in files for first in range(0, max(_blocks(files[name]), 1), _RUN)]
    with ThreadPoolExecutor(min(_READERS, 2 * available_threads())) as threads:
        complaints = threads.map(lambda run: _difference(folder / run[0], files[run[0]], run[1]), runs)
        wrong: dict[str, str] = {}
        for (name, _), what in zip(runs, complaints, strict=True):
            if what and name not in wrong:
                wrong[name] = what
    return wrong


def _difference(path: Path, expected: FileSum, first: int) -> str:
    """What is wrong with a run of blocks, empty if nothing."""
    try:
        sums = [digits(value) for value in itertools.islice(_sums(path, first), _RUN)]
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    last = min(first + _RUN, _blocks(expected))
    for block in range(first, last):
        if block - first >= len(sums) or sums[block - first] != digits_of_block(expected, block):
            start, stop = block * BLOCK_NBYTES, min((block + 1) * BLOCK_NBYTES, expected.nbytes)
            return f"is damaged between byte {start:,} and byte {stop:,}"
    return ""


def _blocks(file: FileSum) -> int:
    return len(file.blocks) // DIGITS


def digits(value: int) -> str:
    """A checksum in hexadecimal."""
    return f"{value:0{DIGITS}x}"


def digits_of_block(file: FileSum, block: int) -> str:
    """The checksum of one block, in hexadecimal digits."""
    return file.blocks[DIGITS * block : DIGITS * (block + 1)]


def _sums(path: Path, first: int) -> Iterator[int]:
    """The checksums of a file's blocks, from block `first` on."""
    size = min(BLOCK_NBYTES, path.stat().st_size)
    memory = np.empty(-(-size // 8) * 8, np.uint8)
    with path.open("rb", buffering=0) as file:
        file.seek(first * BLOCK_NBYTES)
        while nbytes := _fill(memory.data[:size], file):
            yield block_sum(memory, nbytes)


def _fill(buffer: memoryview, file: FileIO) -> int:
    """Read until the buffer is full or the file ends; returns the bytes read."""
    filled = 0
    while filled < len(buffer) and (nbytes := file.readinto(buffer[filled:])):
        filled += nbytes
    return filled


MANIFEST = "manifest.json"
FORMAT = 1
"""Increases with every change that older versions cannot read."""

_WEIGHTS = (".safetensors", ".index.json")
"""Suffixes of weight files that model loaders look for."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's metadata, and its files: name relative to the folder -> checksums."""

    step: int
    score: float | None
    """The score for choosing the best checkpoint, lower is better; `None` if not measured."""
    version: str
    """MegaTrain's version that wrote it."""
    files: Mapping[str, FileSum]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files.values())

    def text(self) -> str:
        """The content of `manifest.json`."""
        fields = {
            "format": FORMAT,
            "version": self.version,
            "step": self.step,
            "score": self.score,
            "files": {name: asdict(self.files[name]) for name in sorted(self.files)},
        }
        return _sealed(fields)


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with one file of a checkpoint."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


Check = Callable[[Path], list[Damage]]
"""Lists what is wrong with a checkpoint, empty if it is sound: `quick_check` or `full_check`."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises `DamagedCheckpoint` if it is missing or changed."""
    try:
        raw = read_bytes(folder / MANIFEST)
    except FileNotFoundError as error:
        raise _damaged(folder, "is missing: the folder is unfinished, or not a checkpoint") from error
    except OSError as error:
        raise _damaged(folder, f"cannot be read ({error.strerror or error})") from error
    try:
        fields = parsed_json(raw)
        version = fields["format"]
        if isinstance(version, int) and version > FORMAT:
            raise _damaged(folder, f"has format {version}, but this MegaTrain reads up to {FORMAT}")
        files = {name: FileSum(**file) for name, file in fields["files"].items()}
        manifest = Manifest(fields["step"], fields["score"], fields["version"], files)
        if manifest.text().encode() == raw:
            return manifest
    except (ValueError, TypeError, KeyError, AttributeError):  # raised for damaged content
        pass
    raise _damaged(folder, "is damaged")


def quick_check(folder: Path) -> list[Damage]:
    """List what is wrong by names and sizes, reading only the manifest."""
    return _look(folder)[1]


def full_check(folder: Path) -> list[Damage]:
    """List what is wrong in any byte of any file. Reads everything, with several threads."""
    listed, wrong = _look(folder)
    known = {damage.file for damage in wrong}
    files = {name: file for name, file in listed.items() if name not in known}
    return [*wrong, *(Damage(name, what) for name, what in differences(folder, files).items())]


def _look(folder: Path) -> tuple[Mapping[str, FileSum], list[Damage]]:
    """The files that should exist, and what is wrong by names and sizes."""
    try:
        files = read_manifest(folder).files
    except DamagedCheckpoint as error:
        return {}, [Damage(MANIFEST, error.what.removeprefix(f"{MANIFEST} "))]
    wrong = {name: _size_wrong(folder, name, file.nbytes) for name, file in files.items()}
    return files, [*(Damage(name, what) for name, what in wrong.items() if what), *_strangers(folder, files)]


def _sealed(fields: Mapping[str, object]) -> str:
    body = json.dumps(fields, indent=1, allow_nan=False).removesuffix("\n}")
    return f'{body},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def _damaged(folder: Path, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{MANIFEST} {what}", where=str(folder))


def _size_wrong(folder: Path, name: str, nbytes: int) -> str:
    path = folder / name
    try:
        if not lies_within(path, folder):
            return "lies outside the folder"
        if not path.is_file():
            return "is missing"
        size = path.stat().st_size
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return "" if size == nbytes else f"has {size:,} bytes, but was written with {nbytes:,}"


def _strangers(folder: Path, files: Mapping[str, FileSum]) -> list[Damage]:
    """Weight files that do not belong to the checkpoint."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name.endswith(_WEIGHTS))
    except OSError as error:
        return [Damage(".", f"cannot be read ({error.strerror or error})")]
    return [Damage(name, "was not there when the checkpoint was written") for name in names if name not in files]
