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
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.errors import DamagedCheckpoint
from megatrain.memory.checksum import checksum
from megatrain.plan import available_threads
from megatrain.system.paths import lies_within, parsed_json

# The checksum is the disk tier's (`memory.checksum`): 64 bits, certain to detect any change inside one word, and at
# memory bandwidth, which matters since it is computed during training. It is part of the format. One per block lets
# several threads check a file, and locates damage.


BLOCK_NBYTES = 4 << 20
"""Bytes per checksum; part of the format (see `FORMAT`). The last block of a file may be shorter."""

DIGITS = 16
"""Hexadecimal digits of a checksum."""

_RUN_BLOCKS = 16
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
    return FileSum(nbytes, "".join(f"{value:0{DIGITS}x}" for value in sums))


def block_sum(memory: NDArray[np.uint8], nbytes: int) -> int:
    """The checksum of the first bytes of `memory`, which is word-aligned; the last word is padded with zeros."""
    end = -(-nbytes // 8) * 8
    memory[nbytes:end] = 0
    return checksum([memory[:end]])


def sum_of(path: Path) -> FileSum:
    """Read a file and compute its checksums. Raises `OSError`."""
    return file_sum(path.stat().st_size, _sums(path, 0))


class _Run(NamedTuple):
    """Consecutive blocks of a file, compared by one thread."""

    name: str
    first: int
    blocks: int


def differences(folder: Path, files: Mapping[str, FileSum]) -> dict[str, str]:
    """Read all files with several threads; name -> what is wrong, for those that differ from their checksums.

    Sizes are not checked; a file with another size is reported where it ends too early.
    """
    runs = (run for name, file in files.items() for run in _runs(name, 0, max(len(file.blocks) // DIGITS, 1)))
    wrong: dict[str, str] = {}
    for run, what in _compared(folder, files, runs):
        if what:
            wrong.setdefault(run.name, what)
    return wrong


def _runs(name: str, first: int, stop: int) -> Iterator[_Run]:
    """The blocks [first, stop) of a file, in runs."""
    for start in range(first, stop, _RUN_BLOCKS):
        yield _Run(name, start, min(_RUN_BLOCKS, stop - start))


def _compared(folder: Path, files: Mapping[str, FileSum], runs: Iterable[_Run]) -> Iterator[tuple[_Run, str]]:
    """Read runs of blocks, with several threads if there are several; each with what is wrong, empty if nothing."""
    runs = list(runs)
    with ThreadPoolExecutor(min(_READERS, 2 * available_threads())) if runs[1:] else nullcontext() as threads:
        compare = partial(_difference, folder, files)
        yield from zip(runs, map(compare, runs) if threads is None else threads.map(compare, runs), strict=True)


def _difference(folder: Path, files: Mapping[str, FileSum], run: _Run) -> str:
    """What is wrong with a run, empty if nothing."""
    expected, path = files[run.name], folder / run.name
    due = expected.blocks[run.first * DIGITS : (run.first + run.blocks) * DIGITS]
    try:
        blocks = file_sum(0, itertools.islice(_sums(path, run.first), run.blocks)).blocks
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    for at in range(0, len(due), DIGITS):
        if blocks[at : at + DIGITS] != due[at : at + DIGITS]:
            start = (run.first + at // DIGITS) * BLOCK_NBYTES
            return f"is damaged between byte {start:,} and byte {min(start + BLOCK_NBYTES, expected.nbytes):,}"
    return ""


def _sums(path: Path, first: int) -> Iterator[int]:
    """The checksums of a file's blocks, from block `first` on."""
    size = min(BLOCK_NBYTES, path.stat().st_size)
    memory = np.empty(-(-size // 8) * 8, np.uint8)
    with path.open("rb") as file:
        file.seek(first * BLOCK_NBYTES)
        while nbytes := file.readinto(memory.data[:size]):
            yield block_sum(memory, nbytes)


class UnverifiedBlocks:
    """The blocks of a checkpoint's files that have not been compared with their checksums since it was opened.

    Whoever loads a checkpoint has those bytes compared first that it is about to read, and the others in the end: so a
    file is read once, by the drive, and its bytes are in the page cache when they are loaded. Any thread may call it.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileSum]) -> None:
        self._folder, self._files = folder, files
        self._left = {name: bytearray(b"\x01") * (len(file.blocks) // DIGITS) for name, file in files.items()}
        """Of each file, whether each block is still to be compared."""

    def verify(self, name: str, start: int, stop: int) -> None:
        """Compare the blocks with bytes [start, stop) of a file. Raises `DamagedCheckpoint`."""
        last = -(-stop // BLOCK_NBYTES)
        self._verify(_Run(name, block, 1) for block in range(start // BLOCK_NBYTES, last) if self._left[name][block])

    def verify_small(self) -> None:
        """Compare what tells how to load: small files, and the headers of those of tensors. Raises
        `DamagedCheckpoint`."""
        whole = {name for name in self._files if not name.endswith(".safetensors")}
        of_tensors = [name for name in self._files.keys() - whole if self._files[name].nbytes]
        firsts = (_Run(name, 0, 1) for name in of_tensors)
        self._verify([*firsts, *(run for name in whole for run in self._left_runs(name))])
        for name in of_tensors:
            with (self._folder / name).open("rb") as file:
                header_nbytes = int.from_bytes(file.read(8), "little")
            self.verify(name, 0, 8 + header_nbytes)

    def verify_rest(self) -> None:
        """Compare all others. Raises `DamagedCheckpoint`."""
        self._verify(run for name in self._files for run in self._left_runs(name))

    def _left_runs(self, name: str) -> Iterator[_Run]:
        for match in re.finditer(rb"\x01+", self._left[name]):
            yield from _runs(name, match.start(), match.end())

    def _verify(self, runs: Iterable[_Run]) -> None:
        for run, what in _compared(self._folder, self._files, runs):
            if what:
                raise DamagedCheckpoint(f"{run.name} {what}", where=str(self._folder), fix="use an older checkpoint")
            self._left[run.name][run.first : run.first + run.blocks] = bytes(run.blocks)


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


Check = Callable[[Path], list[str]]
"""Lists what is wrong with the files of a checkpoint, empty if it is sound: `quick_check` or `full_check`."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises `DamagedCheckpoint` if it is missing or changed."""
    try:
        raw = (folder / MANIFEST).read_bytes()
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


def quick_check(folder: Path) -> list[str]:
    """List what is wrong by names and sizes, reading only the manifest."""
    return [f"{name} {what}" for name, what in _visible_damage(folder)[1].items()]


def full_check(folder: Path) -> list[str]:
    """List what is wrong in any byte of any file. Reads everything, with several threads."""
    files, wrong = _visible_damage(folder)
    wrong |= differences(folder, {name: file for name, file in files.items() if name not in wrong})
    return [f"{name} {what}" for name, what in wrong.items()]


def _visible_damage(folder: Path) -> tuple[Mapping[str, FileSum], dict[str, str]]:
    """The files that should exist, and name -> what is wrong by names and sizes."""
    try:
        files = read_manifest(folder).files
    except DamagedCheckpoint as error:
        return {}, {MANIFEST: error.what.removeprefix(f"{MANIFEST} ")}
    wrong = {name: what for name, file in files.items() if (what := _size_wrong(folder, name, file.nbytes))}
    try:
        weights = sorted(path.name for path in folder.iterdir() if path.name.endswith(_WEIGHTS))
    except OSError as error:
        return files, {**wrong, ".": f"cannot be read ({error.strerror or error})"}
    unknown = "was not there when the checkpoint was written"  # and a loader might take it for the model's
    return files, wrong | {name: unknown for name in weights if name not in files}


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
