"""Failures of the disk tier: makes the system call of one request fail.

A request is the transfer of one block. Only the system call is replaced, so everything around it (continued
transfers, checksums, errors, the state left behind) is the real code.
"""

from __future__ import annotations

import errno
import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatrain.memory.scratch_files import Call, Calls, Direction

DiskFaultKind = Literal["read", "write", "short", "full", "flip", "slow"]
DISK_FAULTS: tuple[DiskFaultKind, ...] = ("read", "write", "short", "full", "flip", "slow")


@dataclass(frozen=True, slots=True)
class DiskFault:
    """One failure of one request, once.

    kind: `read` and `write` (an I/O error before anything moved), `short` (half of it, then nothing), `full` (no space
    left on the device), `flip` (one bit changes in transit), `slow` (`seconds` of delay).
    at: the name of a region, or the number of a request in its direction, counted from 0.
    on: the direction, for kinds that do not imply it.
    after: number of requests of that region to let pass first.
    """

    kind: DiskFaultKind
    at: str | int
    on: Direction = "read"
    after: int = 0
    seconds: float = 0.05

    @property
    def direction(self) -> Direction:
        match self.kind:
            case "read":
                return "read"
            case "write" | "full":
                return "write"
            case _:
                return self.on


def failing(*faults: DiskFault) -> Calls:
    """The system calls of a `Disk` on which these faults happen."""
    return _FaultPlan(faults).call


def failing_later(*faults: DiskFault) -> tuple[Calls, threading.Event]:
    """As `failing`, from when the event is set: not while a model is loaded, say."""
    faulty, is_armed = failing(*faults), threading.Event()

    def calls(direction: Direction, region: str, call: Call) -> Call:
        return faulty(direction, region, call) if is_armed.is_set() else call

    return calls, is_armed


class _FaultPlan:
    """Counts requests and decides which of them fail."""

    def __init__(self, faults: Sequence[DiskFault]) -> None:
        self._left = list(faults)
        self._requests: dict[tuple[Direction, str | None], int] = {}
        self._lock = threading.Lock()

    def call(self, direction: Direction, region: str, call: Call) -> Call:
        """The system call for the region's next request: `call`, or a faulty one."""
        if not self._left:
            return call
        with self._lock:
            number, of_region = (self._count(direction, name) for name in (None, region))
            for fault in self._left:
                now = number if isinstance(fault.at, int) else (region, of_region)
                due = fault.at if isinstance(fault.at, int) else (fault.at, fault.after)
                if due == now and fault.direction == direction:
                    self._left.remove(fault)
                    return _faulty(fault, call)
        return call

    def _count(self, direction: Direction, region: str | None) -> int:
        """Number of requests before this one, of that region, or of any if None."""
        number = self._requests.get((direction, region), 0)
        self._requests[direction, region] = number + 1
        return number


def _faulty(fault: DiskFault, call: Call) -> Call:
    match fault.kind:
        case "read" | "write":
            return _failing(OSError(errno.EIO, f"injected: {fault.kind} error"))
        case "full":
            return _failing(OSError(errno.ENOSPC, "injected: no space left on device"))
        case "short":
            return _Short(call)
        case "flip" if fault.direction == "read":
            return _flipped_read(call)
        case "flip":
            return _flipped_write(call)
        case "slow":
            return _slow(call, fault.seconds)


def _failing(error: OSError) -> Call:
    def fail(file: int, views: Sequence[memoryview], place: int, flags: int) -> int:
        raise error

    return fail


def _slow(call: Call, seconds: float) -> Call:
    def wait(file: int, views: Sequence[memoryview], place: int, flags: int) -> int:
        time.sleep(seconds)
        return call(file, views, place, flags)

    return wait


class _Short:
    """Transfers half of the first view, and nothing on later calls."""

    def __init__(self, call: Call) -> None:
        self._call, self._asked = call, False

    def __call__(self, file: int, views: Sequence[memoryview], place: int, flags: int) -> int:
        half = len(views[0]) // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        if self._asked or not half:
            return 0
        self._asked = True
        return self._call(file, [views[0][:half]], place, flags)


def _flipped_read(call: Call) -> Call:
    def flip(file: int, views: Sequence[memoryview], place: int, flags: int) -> int:
        done = call(file, views, place, flags)
        views[0][0] ^= 1
        return done

    return flip


def _flipped_write(call: Call) -> Call:
    def flip(file: int, views: Sequence[memoryview], place: int, flags: int) -> int:
        damaged = memoryview(mmap.mmap(-1, sum(len(view) for view in views)))  # page-aligned, for direct I/O
        damaged[:] = np.concatenate(views).data
        damaged[0] ^= 1
        return call(file, [damaged], place, flags)

    return flip
