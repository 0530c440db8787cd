"""The manifest of a checkpoint: every file with its size and a checksum of each block, and whether they still hold.

`manifest.json` is written last, and protects itself: its last field is the SHA-256 of all before it, and its text
must be exactly what its content is written as, so no byte of it can change unseen. `quick_check` looks at names and
sizes, `full_check` reads everything. Files that a manifest does not know are passed over, but for those that a loader
might take for the model's weights.
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

# What a file holds, as its size and a checksum of each block.
#
# The checksum is the one that guards the disk tier (`memory.checksum`): 64 bits, sure to find any change inside one
# word, and at memory bandwidth, which matters since it is taken while training goes on (measured: 15 GB/s a core, where
# CRC-32 did 1.6 and SHA-256 0.2). It is part of the format. One for each block lets several threads share a file, and
# tells where the damage is.


BLOCK_NBYTES = 4 << 20
"""Bytes under one checksum; part of the format (see `manifest.FORMAT`). The last block of a file may be shorter."""

DIGITS = 16
"""Of a checksum."""

_RUN = 16
"""Blocks that a thread reads in one go."""
_READERS = 8
"""Threads at most, so that a slow drive has several requests to work on."""


@dataclass(frozen=True, slots=True)
class FileSum:
    """Bytes in the file, and `DIGITS` hexadecimal digits for each block."""

    nbytes: int
    blocks: str


def file_sum(nbytes: int, sums: Iterable[int]) -> FileSum:
    """The sum of a file of so many bytes, from those of its blocks."""
    return FileSum(nbytes, "".join(digits(each) for each in sums))


def block_sum(memory: NDArray[np.uint8], nbytes: int) -> int:
    """The checksum of the first bytes of `memory`, which is aligned to words; zeros fill the last word."""
    end = -(-nbytes // 8) * 8
    memory[nbytes:end] = 0
    return checksum([memory[:end]])


def sum_of(path: Path) -> FileSum:
    """Read a file, and sum it up. Raises `OSError`."""
    return file_sum(path.stat().st_size, _sums(path, 0))


def differences(folder: Path, files: Mapping[str, FileSum]) -> dict[str, str]:
    """Read all files with several threads. Name -> what is wrong, of those that are not as their sum says.

    Sizes are taken for granted; a file that has another one is reported where it ends too early.
    """
    runs = [(name, first) for name in files for first in range(0, max(_blocks(files[name]), 1), _RUN)]
    with ThreadPoolExecutor(min(_READERS, 2 * available_threads())) as threads:
        found = threads.map(lambda run: _difference(folder / run[0], files[run[0]], run[1]), runs)
        wrong: dict[str, str] = {}
        for (name, _), what in zip(runs, found, strict=True):
            if what and name not in wrong:
                wrong[name] = what
    return wrong


def _difference(path: Path, expected: FileSum, first: int) -> str:
    """What is wrong with the blocks of one run, nothing if nothing is."""
    try:
        found = [digits(each) for each in itertools.islice(_sums(path, first), _RUN)]
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    last = min(first + _RUN, _blocks(expected))
    for block in range(first, last):
        if block - first >= len(found) or found[block - first] != digits_of_block(expected, block):
            start, stop = block * BLOCK_NBYTES, min((block + 1) * BLOCK_NBYTES, expected.nbytes)
            return f"is damaged between byte {start:,} and byte {stop:,}"
    return ""


def _blocks(file: FileSum) -> int:
    return len(file.blocks) // DIGITS


def digits(found: int) -> str:
    """A checksum in hexadecimal."""
    return f"{found:0{DIGITS}x}"


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
    """Read until the buffer is full or the file ends, and return how much that was."""
    filled = 0
    while filled < len(buffer) and (nbytes := file.readinto(buffer[filled:])):
        filled += nbytes
    return filled


MANIFEST = "manifest.json"
FORMAT = 1
"""Grows with every change that an older version could not read."""

_WEIGHTS = (".safetensors", ".index.json")
"""Endings of files that a loader of models looks for by itself, and prefers to one another."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is, and what its files hold: name relative to the folder -> sum."""

    step: int
    score: float | None
    """What the best checkpoints are told by, lower is better; `None` where nothing was measured."""
    version: str
    """Of MegaTrain, when it was written."""
    files: Mapping[str, FileSum]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files.values())

    def text(self) -> str:
        """What `manifest.json` holds."""
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
"""Finds what is wrong with a checkpoint, nothing if it is sound: `quick_check` or `full_check`."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises `DamagedCheckpoint` where there is none that is as it was written."""
    try:
        raw = read_bytes(folder / MANIFEST)
    except FileNotFoundError as error:
        raise _damaged(folder, "is missing: the folder is unfinished, or no checkpoint") from error
    except OSError as error:
        raise _damaged(folder, f"cannot be read ({error.strerror or error})") from error
    try:
        fields = parsed_json(raw)
        found = fields["format"]
        if isinstance(found, int) and found > FORMAT:
            raise _damaged(folder, f"has format {found}, and this MegaTrain reads up to {FORMAT}")
        files = {name: FileSum(**each) for name, each in fields["files"].items()}
        manifest = Manifest(fields["step"], fields["score"], fields["version"], files)
        if manifest.text().encode() == raw:
            return manifest
    except (ValueError, TypeError, KeyError, AttributeError):  # whatever a damaged one holds instead
        pass
    raise _damaged(folder, "is damaged")


def quick_check(folder: Path) -> list[Damage]:
    """What is wrong as far as names and sizes tell: nothing is read but the manifest."""
    return _look(folder)[1]


def full_check(folder: Path) -> list[Damage]:
    """What is wrong, in any byte of any file. Reads all of it, with several threads."""
    listed, found = _look(folder)
    known = {damage.file for damage in found}
    files = {name: file for name, file in listed.items() if name not in known}
    return [*found, *(Damage(name, what) for name, what in differences(folder, files).items())]


def _look(folder: Path) -> tuple[Mapping[str, FileSum], list[Damage]]:
    """The files that should be there, and what is wrong as far as names and sizes tell."""
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
        found = path.stat().st_size
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return "" if found == nbytes else f"has {found:,} bytes, and was written with {nbytes:,}"


def _strangers(folder: Path, files: Mapping[str, FileSum]) -> list[Damage]:
    """Files of weights that were not written with the checkpoint."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name.endswith(_WEIGHTS))
    except OSError as error:
        return [Damage(".", f"cannot be read ({error.strerror or error})")]
    return [Damage(name, "was not there when the checkpoint was written") for name in names if name not in files]
