"""The error for a path that is not there, with the nearest name that is.

It has a file of its own because sources, token files and tokenizer folders all need it. It leaves out
everything else that can be wrong with a path.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from megatrain.errors import DataError


def nearest_path(path: Path) -> Path | None:
    """The existing path most like `path`: a neighbour, similar in name, of the first part that is missing."""
    folder, name = _first_missing(path)
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    similar = difflib.get_close_matches(name, names, n=1)
    return folder / similar[0] if similar else None


def missing(path: Path) -> DataError:
    """The error to raise for `path`, which does not exist."""
    folder, name = _first_missing(path)
    nearest = nearest_path(path)
    fix = f"did you mean {nearest}?" if nearest else f"{folder} holds nothing called {name!r}"
    return DataError("no such file or folder", where=str(path), fix=fix)


def _first_missing(path: Path) -> tuple[Path, str]:
    absolute = path.expanduser().absolute()
    folder, name = absolute.parent, absolute.name
    while not folder.exists() and folder != folder.parent:
        folder, name = folder.parent, folder.name
    return folder, name
