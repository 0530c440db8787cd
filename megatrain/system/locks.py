"""Locks: one run at a time per folder, and one process at a time per cache entry."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain.errors import ConfigError, DataError

# One process at a cache entry -----------------------------------------------------------------------------------------
#
# A process that wants an entry which another is creating waits for it. Otherwise two runs that start together would do
# the work twice, and the second would replace an entry that the first already uses. The kernel releases the lock when
# its process ends, so a killed run blocks nobody. On file systems without locks nobody waits.


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Locks the cache entry `path` during the block. Raises `DataError` if the folder is not writable."""
    lock = path.with_suffix(".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = _held(lock)
    except OSError as error:
        fix = "free some space, or set another data.cache"
        raise DataError(f"cannot be written ({error.strerror or error})", where=str(path), fix=fix) from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # before it is released: see `_held`
        os.close(held)


def _held(lock: Path) -> int:
    """Descriptor of the locked file `lock`. Tries again if the file was removed while waiting for it."""
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


# One run in a folder --------------------------------------------------------------------------------------------------
#
# Two runs in a folder would overwrite each other's checkpoints, metrics and status. The lock is the system's, on the
# folder itself: nothing is written for it, and it ends with the process. It works across machines if the file system
# supports that; file systems without locks are not protected. Folders that are only read are not locked.


class Claim:
    """Locks on the folders that this run writes to, for the length of a `with` block."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}

    def take(self, folder: Path) -> None:
        """Lock a folder if it exists; may be repeated. Raises `ConfigError` if another run has locked it."""
        place = folder.resolve()
        if place in self._held or not place.is_dir():
            return
        try:
            descriptor = os.open(place, os.O_RDONLY)
        except OSError:
            return  # writing there will raise the error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            fix = "wait until it has ended, or set output.folder=NEW"
            raise ConfigError("another run is using this folder", where=str(folder), fix=fix) from error
        except OSError:
            os.close(descriptor)  # a file system without locks
            return
        self._held[place] = descriptor

    def make(self, folder: Path) -> None:
        """Create a folder if necessary, and lock it. Raises `ConfigError` if that fails."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what, fix = f"cannot be created ({error.strerror or error})", "choose another output.folder"
            raise ConfigError(what, where=str(folder), fix=fix) from error
        self.take(folder)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._held.values():
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also releases it for children that inherited it
            os.close(descriptor)
        self._held.clear()
