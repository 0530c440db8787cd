"""A folder that appears whole or not at all, and goes whole.

It is written beside its place, under a hidden name that holds the process id, forced to the disk, and renamed; one that
is to go is renamed to such a name before it is deleted. What a killed process has left is put right by the next one
with the same target: half folders are deleted, and a folder that was moved aside when its successor did not get there
is put back. A reader may find no folder between two renames, never half of one. Two machines that share a file system
must not write to the same target at the same time: a process id says nothing about the other machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LEFT = re.compile(r"\.(.+)\.(\d+)\.(part|old|gone)", re.DOTALL)
"""The hidden names: of the target, of the process, and whether it is half there, moved aside, or to be deleted."""


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Lend an empty folder; at the end of the block it takes the place of `target`, with all that is in it.

    What dead processes have left is cleaned up first. If the block or the move fails, whatever was at `target` is there
    as before, and nothing is left beside it, not even parents that had to be made. `target` is absolute. Raises
    `OSError` for what the file system refuses.
    """
    staging, aside = (target.with_name(f".{target.name}.{os.getpid()}.{kind}") for kind in ("part", "old"))
    missing = [parent for parent in target.parents if not parent.exists()]
    arrived = False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        put_right(target)
        staging.mkdir()
        yield staging
        _force_to_disk(staging)
        if target.exists():
            target.rename(aside)
        staging.rename(target)
        try:
            for parent in (target.parent, *(parent.parent for parent in missing)):
                sync(parent)  # what names the folder
        except OSError:
            target.rename(staging)
            raise
        arrived = True
    finally:
        if aside.exists() and not target.exists():
            aside.rename(target)
        for leftover in (staging, aside):
            _remove(leftover)
        if not arrived:
            for parent in missing:  # the innermost first
                with contextlib.suppress(OSError):
                    parent.rmdir()


def vanish(target: Path) -> None:
    """Delete a folder that nobody will see half-deleted; of a link to one, the link.

    Raises `OSError` for what the file system refuses.
    """
    going = target.with_name(f".{target.name}.{os.getpid()}.gone")
    target.rename(going)
    sync(target.parent)
    if going.is_symlink():
        going.unlink()
    else:
        shutil.rmtree(going)


def put_right(target: Path) -> None:
    """Clean up what processes that no longer run have left of their writing to `target`. Failures are passed over."""
    for path, kind, name in _left_in(target.parent):
        if name == target.name:
            _settle(path, kind, target)


def put_all_right(folder: Path) -> None:
    """As `put_right`, for every target in `folder`. To be called before any thread of this process writes there."""
    for path, kind, name in _left_in(folder):
        _settle(path, kind, folder / name)


def finish_vanishing(folder: Path) -> None:
    """Delete what processes that no longer run, or failures in this one, have left of folders that were to vanish."""
    for path, kind, name in _left_in(folder):
        if kind == "gone":
            _settle(path, kind, folder / name)


def _left_in(folder: Path) -> list[tuple[Path, str, str]]:
    """What others than living processes have left in `folder`: path, kind, and the name of the target."""
    found: list[tuple[Path, str, str]] = []
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            match = _LEFT.fullmatch(path.name)
            if match is not None and not _runs_elsewhere(int(match[2])):
                found.append((path, match[3], match[1]))
    return found


def _settle(path: Path, kind: str, target: Path) -> None:
    if kind == "old" and not target.exists():
        with contextlib.suppress(OSError):
            path.rename(target)
    else:
        _remove(path)


def _remove(path: Path) -> None:
    """Delete a folder, or a link to one, as far as the file system lets us."""
    if path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _runs_elsewhere(process: int) -> bool:
    """Whether that id is of another process which runs now. One that bears our own id was of a process before us."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _force_to_disk(folder: Path) -> None:
    """Force every file, and the folder itself, to the disk before a rename makes them visible."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Force a file, or what a folder names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
