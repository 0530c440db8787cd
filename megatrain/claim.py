"""One run at a time in a folder: two would write over each other's checkpoints, metrics and status.

A lock of the system on the folder itself, so nothing is written for it, and it is gone with the process whatever ends
that. It binds processes on one machine, and those on several where the file system passes locks on; one that knows
none is done without. It leaves out folders that are only read, such as that of a run from which another branches off.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from megatrain.errors import ConfigError


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
