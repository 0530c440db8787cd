"""Lock files: one run at a time in a folder, one process at a time that makes a cache entry."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain.errors import ConfigError, DataError

# One process at a cache entry -----------------------------------------------------------------------------------------
#
# One process at a time makes a cache entry; whoever wants the same one waits, and finds it made.
#
# Two runs that start together would otherwise do the work twice, and the second would replace an entry that the first
# has begun to use. The lock is the kernel's and ends with its process, so a run that was killed blocks nobody. Left
# out: file systems without locks, on which all go ahead, as they would without this.


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


# One run in a folder --------------------------------------------------------------------------------------------------
#
# One run at a time in a folder: two would write over each other's checkpoints, metrics and status.
#
# A lock of the system on the folder itself, so nothing is written for it, and it is gone with the process whatever ends
# that. It binds processes on one machine, and those on several where the file system passes locks on; one that knows
# none is done without. It leaves out folders that are only read, such as that of a run from which another branches off.


class Claim:
    """The folders that this run works in, for the length of a `with` block."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}

    def take(self, folder: Path) -> None:
        """Claim a folder, if there is one; again is fine. Raises `ConfigError` where another run works in it."""
        place = folder.resolve()
        if place in self._held or not place.is_dir():
            return
        try:
            descriptor = os.open(place, os.O_RDONLY)
        except OSError:
            return  # whoever writes there will hear why not
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            fix = "wait until it has ended, or set output.folder=NEW"
            raise ConfigError("another run is at work here", where=str(folder), fix=fix) from error
        except OSError:
            os.close(descriptor)  # a file system without locks
            return
        self._held[place] = descriptor

    def make(self, folder: Path) -> None:
        """Make a folder unless it is there, and claim it. Raises `ConfigError`."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what, fix = f"cannot be made ({error.strerror or error})", "choose another output.folder"
            raise ConfigError(what, where=str(folder), fix=fix) from error
        self.take(folder)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._held.values():
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that has inherited it keeps nothing
            os.close(descriptor)
        self._held.clear()
