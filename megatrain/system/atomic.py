"""Create, replace and delete folders atomically.

A folder is written next to its target under a hidden name that contains the process id, synced to disk, and renamed; it
is deleted by renaming it first. Leftovers of a killed process are cleaned up by the next process with the same target:
partial folders are deleted, and a folder that was moved aside but not replaced is restored. A reader may find no folder
between two renames, but never a partial one.

Overlayfs, which containers lie on, renames no folder of an image (EXDEV). Such a folder is deleted where it lies, after
its replacement is complete, so a reader may then find part of it; what a killed process left, the next one finishes.

Two machines must not write to the same target on a shared file system at
the same time, because process ids are per machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LEFT = re.compile(r"\.(.+)\.(\d+)\.(part|old|gone|new|going)", re.DOTALL)
"""Hidden names: the target's name, the process id, and the state: partial, moved aside, to be deleted, complete while
the target is being deleted, or a sign that it is."""


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Yields an empty folder to fill; it replaces `target` (an absolute path) when the block ends.

    Leftovers of dead processes are cleaned up first. If the block or the rename fails, `target` stays as it was and
    nothing is left next to it, not even newly created parents. Raises `OSError` if the file system refuses.
    """
    staging, aside, new = (_beside(target, kind) for kind in ("part", "old", "new"))
    missing = [parent for parent in target.parents if not parent.exists()]
    arrived = False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        put_right(target)
        staging.mkdir()
        yield staging
        _force_to_disk(staging)
        if target.exists() and not _move(target, aside):
            staging.rename(new)
            _delete_in_place(target)
            staging = new
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
            if leftover != new:  # what is complete, while the target may not be, is left to the next process
                _remove(leftover)
        if not arrived:
            for parent in missing:  # the innermost first
                with contextlib.suppress(OSError):
                    parent.rmdir()


def vanish(target: Path) -> None:
    """Delete a folder so that nobody sees it partly deleted; of a link only the link is deleted.

    Raises `OSError` if the file system refuses.
    """
    gone = _beside(target, "gone")
    if not _move(target, gone):
        sign = _beside(target, "going")
        sign.mkdir(exist_ok=True)
        sync(target.parent)
        _delete_in_place(target)
        sign.rmdir()
        return
    sync(target.parent)
    if gone.is_symlink():
        gone.unlink()
    else:
        shutil.rmtree(gone)


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
        if kind in ("gone", "going"):
            _settle(path, kind, folder / name)


def _left_in(folder: Path) -> list[tuple[Path, str, str]]:
    """Leftovers in `folder` of processes that no longer run: path, kind, and name of the target."""
    leftovers: list[tuple[Path, str, str]] = []
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            match = _LEFT.fullmatch(path.name)
            if match is not None and not _runs_elsewhere(int(match[2])):
                leftovers.append((path, match[3], match[1]))
    return leftovers


def _settle(path: Path, kind: str, target: Path) -> None:
    if kind in ("new", "going"):
        _remove(target)
    if kind in ("old", "new") and not target.exists():
        with contextlib.suppress(OSError):
            path.rename(target)
    elif kind not in ("new", "going") or not target.exists():
        _remove(path)


def _beside(target: Path, state: str) -> Path:
    """The hidden name of this process for a folder in a state (see `_LEFT`)."""
    return target.with_name(f".{target.name}.{os.getpid()}.{state}")


def _move(folder: Path, to: Path) -> bool:
    """Rename a folder; `False` if overlayfs refuses because it lies in an image. Raises `OSError` for mount points."""
    try:
        folder.rename(to)
    except OSError as error:
        if error.errno != errno.EXDEV or folder.is_symlink() or folder.is_mount():
            raise
        return False
    return True


def _delete_in_place(folder: Path) -> None:
    shutil.rmtree(folder)
    sync(folder.parent)


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
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
