"""The manifest of a checkpoint: every file with its size and checksums, and what tells whether they still hold.

`manifest.json` is written last, and protects itself: its last field is the SHA-256 of all before it, and its text must
be exactly what its content is written as, so no byte of it can change unseen. `quick_check` looks at names and sizes,
`full_check` reads everything. Files that a manifest does not know are passed over, but for those that a loader might
take for the model's weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatrain.checkpoint.sums import FileSum, differences
from megatrain.errors import DamagedCheckpoint
from megatrain.files import lies_within, parsed_json, read_bytes

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
