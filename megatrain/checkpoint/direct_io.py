"""Writes files sequentially with direct I/O, computing a checksum of each block on the way.

Data is copied into an aligned buffer; a thread checksums and writes each full one. So the caller's memory is free
at once, and copies, checksums and writes overlap. With few cores, direct writes are three times as fast as writes
through the page cache (measured: 1.5 against 0.5 GB/s on two) and do not take host memory from others;
preallocated space makes them another fifth faster. Both are skipped if a file system refuses. Files are not synced
here, but once per folder (`system.atomic`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from megatrain.checkpoint import manifest
from megatrain.checkpoint.manifest import FileSum, block_sum, file_sum

SECTOR = 4096
"""Alignment of direct writes, in bytes."""
_WRITERS = 4
"""Threads that checksum and write."""


class DirectWriter:
    """Writes files into `folder`; `sums` has the checksums of closed ones, by name relative to the folder.

    Uses a buffer of `manifest.BLOCK_NBYTES` per thread and open file. Not thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        self.sums: dict[str, FileSum] = {}
        self._folder = folder
        self._threads = ThreadPoolExecutor(_WRITERS, thread_name_prefix="checkpoint")
        self._free: SimpleQueue[mmap.mmap] = SimpleQueue()
        for _ in range(_WRITERS):
            self._free.put(mmap.mmap(-1, manifest.BLOCK_NBYTES))

    def open(self, path: Path, nbytes: int) -> DirectFile:
        """Create a file at `path`, inside the folder, with space for `nbytes`. Raises `OSError`."""
        name = path.relative_to(self._folder).as_posix()

        def closed(file: FileSum) -> None:
            self.sums[name] = file

        return DirectFile(path, nbytes, self._threads, self._free, closed)

    def __enter__(self) -> DirectWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()


class DirectFile:
    """An append-only file. Errors of its threads are raised as `OSError` by a later call or by `close`."""

    def __init__(
        self,
        path: Path,
        nbytes: int,
        threads: ThreadPoolExecutor,
        free: SimpleQueue[mmap.mmap],
        when_closed: Callable[[FileSum], None],
    ) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _set_direct(self._file, getattr(os, "O_DIRECT", 0))
            allocate(self._file, nbytes)
        except OSError:
            os.close(self._file)
            raise
        self._threads, self._free, self._when_closed = threads, free, when_closed
        self._buffer: mmap.mmap | None = mmap.mmap(
            -1, manifest.BLOCK_NBYTES
        )  # with it, open files cannot starve others
        self._nbytes = 0
        self._under_way: deque[Future[int]] = deque()
        self._sums: list[int] = []
        self._failed = self._closed = False

    def write(self, data: memoryview | bytes) -> None:
        """Append `data`; its memory may be reused after the call."""
        rest = np.frombuffer(data, np.uint8)
        while rest.size:
            if self._buffer is None:
                self._buffer = self._free.get()
            filled = self._nbytes % manifest.BLOCK_NBYTES
            part = rest[: manifest.BLOCK_NBYTES - filled]
            np.frombuffer(self._buffer, np.uint8)[filled : filled + part.size] = part
            self._nbytes += part.size
            rest = rest[part.size :]
            if self._nbytes % manifest.BLOCK_NBYTES == 0:
                self._send(manifest.BLOCK_NBYTES)

    def seek(self, position: int) -> None:
        """Only to the end of the file; raises `ValueError` for any other position."""
        if position != self._nbytes:
            raise ValueError(f"byte {position} of a file that is written front to back, and has {self._nbytes}")

    def close(self) -> None:
        """Wait until everything is written. Does not raise a failure again that was raised before."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._failed:
                if rest := self._nbytes % manifest.BLOCK_NBYTES:
                    self._send(rest)
                self._wait_for_all_but(0)
                os.ftruncate(self._file, self._nbytes)  # the last write was padded to a whole sector
                self._when_closed(file_sum(self._nbytes, self._sums))
        finally:
            wait(self._under_way)
            if self._buffer is None:
                self._free.get()  # frees as many buffers as the file added
            self._buffer = None
            os.close(self._file)

    def _send(self, nbytes: int) -> None:
        """Pass the buffer, filled with this many bytes, to a thread."""
        assert self._buffer is not None
        buffer, self._buffer = self._buffer, None
        self._under_way.append(self._threads.submit(self._put, buffer, nbytes, self._nbytes - nbytes))
        self._wait_for_all_but(_WRITERS)

    def _wait_for_all_but(self, blocks: int) -> None:
        """Wait until at most this many blocks are in progress."""
        while len(self._under_way) > blocks:
            try:
                self._sums.append(self._under_way.popleft().result())
            except OSError:
                self._failed = True
                raise

    def _put(self, buffer: mmap.mmap, nbytes: int, start: int) -> int:
        """Write the first bytes of a buffer, release it, and return their checksum."""
        try:
            memory = np.frombuffer(buffer, np.uint8)
            end = -(-nbytes // SECTOR) * SECTOR
            memory[nbytes:end] = 0
            write_all(self._file, memoryview(buffer)[:end], start)
            return block_sum(memory, nbytes)
        finally:
            self._free.put(buffer)


def allocate(file: int, nbytes: int) -> None:
    """Preallocate space if the file system can, so that a full disk is found now. Raises `OSError` if it is full."""
    if not nbytes or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def write_all(file: int, data: memoryview, start: int) -> None:
    """Write `data` at byte `start`; switches to the page cache if the file system refuses direct writes."""
    refused = False
    while data:
        try:
            written = os.pwrite(file, data, start)
        except OSError as error:
            if error.errno != errno.EINVAL or refused:
                raise
            refused = True
            _set_direct(file, 0)
            continue
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data, start = data[written:], start + written


def _set_direct(file: int, flag: int) -> None:
    """Switch direct writes (`O_DIRECT`) on or off (0), if the file system allows."""
    others = fcntl.fcntl(file, fcntl.F_GETFL) & ~getattr(os, "O_DIRECT", 0)
    with contextlib.suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, others | flag)
