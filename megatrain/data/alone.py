"""One process at a time makes a cache entry; whoever wants the same one waits, and finds it made.

Two runs that start together would otherwise do the work twice, and the second would replace an entry that the first has
begun to use. The lock is the kernel's and ends with its process, so a run that was killed blocks nobody. Left out: file
systems without locks, on which all go ahead, as they would without this.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain.errors import DataError


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Holds the cache entry `path` for as long as the block runs. Raises `DataError` where the folder refuses files."""
    lock = path.with_suffix(".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = _held(lock)
    except OSError as error:
        fix = "free some space, or choose another folder"
        raise DataError(f"cannot be written ({error.strerror or error})", where=str(path), fix=fix) from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # before it is given free: see below
        os.close(held)


def _held(lock: Path) -> int:
    """The descriptor of the file `lock`, locked. A file that was removed while this waited is none: try again."""
    while True:
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), lock.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
