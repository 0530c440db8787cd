"""A folder that appears whole or not at all.

It is written beside its place, under a hidden name that holds the process id, forced to the disk, and renamed. What a
killed process has left is put right by the next one with the same target: half folders are deleted, and a folder that
was moved aside when its successor did not get there is put back. A reader may find no folder between two renames, never
half of one. Two machines that share a file system must not write to the same target at the same time: a process id
says nothing about the other machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
        arrived = True
    finally:
        if aside.exists() and not target.exists():
            aside.rename(target)
        for leftover in (staging, aside):
            shutil.rmtree(leftover, ignore_errors=True)
        if not arrived:
            for parent in missing:  # the innermost first
                with contextlib.suppress(OSError):
                    parent.rmdir()


def put_right(target: Path) -> None:
    """Clean up what processes that no longer run have left of their writing to `target`. Failures are passed over."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(\d+)\.(part|old)")
    with contextlib.suppress(OSError):
        for path in list(target.parent.iterdir()):
            match = pattern.fullmatch(path.name)
            if match is None or _runs_elsewhere(int(match[1])):
                continue
            if match[2] == "old" and not target.exists():
                path.rename(target)
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
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
