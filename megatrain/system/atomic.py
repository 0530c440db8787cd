"""Create, replace and delete folders atomically.

A folder is written next to its target under a hidden name that contains the process id, synced to disk, and renamed; it
is deleted by renaming it first. Leftovers of a killed process are cleaned up by the next process with the same target:
partial folders are deleted, and a folder that was moved aside but not replaced is restored. A reader may find no folder
between two renames, but never a partial one. Two machines must not write to the same target on a shared file system at
the same time, because process ids are per machine.
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
"""Hidden names: the target's name, the process id, and the state: partial, moved aside, or to be deleted."""


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Yields an empty folder to fill; it replaces `target` (an absolute path) when the block ends.

    Leftovers of dead processes are cleaned up first. If the block or the rename fails, `target` stays as it was and
    nothing is left next to it, not even newly created parents. Raises `OSError` if the file system refuses.
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
                sync(parent)  # the directory entry of the folder
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
    """Delete a folder so that nobody sees it partly deleted; of a link only the link is deleted.

    Raises `OSError` if the file system refuses.
    """
    going = target.with_name(f".{target.name}.{os.getpid()}.gone")
    target.rename(going)
    sync(target.parent)
    if going.is_symlink():
        going.unlink()
    else:
        shutil.rmtree(going)


def put_right(target: Path) -> None:
    """Clean up what dead processes left of their writes to `target`. Failures are ignored."""
    for path, kind, name in _left_in(target.parent):
        if name == target.name:
            _settle(path, kind, target)


def put_all_right(folder: Path) -> None:
    """`put_right` for every target in `folder`. Call it before any thread of this process writes there."""
    for path, kind, name in _left_in(folder):
        _settle(path, kind, folder / name)


def finish_vanishing(folder: Path) -> None:
    """Delete folders whose deletion dead processes, or errors in this one, left unfinished."""
    for path, kind, name in _left_in(folder):
        if kind == "gone":
            _settle(path, kind, folder / name)


def _left_in(folder: Path) -> list[tuple[Path, str, str]]:
    """Leftovers in `folder` of processes that no longer run: path, kind, and name of the target."""
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
    """Delete a folder, or a link to one, as far as possible."""
    if path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _runs_elsewhere(process: int) -> bool:
    """Whether the id belongs to another running process. Our own id in a name is from an earlier process."""
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
    """Sync every file and the folder to disk, before a rename makes them visible."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Sync a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
