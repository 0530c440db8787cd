"""Failures on demand, for the simulated device: what goes wrong, and at which op."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatrain.errors import OutOfDeviceMemory

FaultKind = Literal["raise", "copy", "memory", "read", "short", "hang"]
KINDS: tuple[FaultKind, ...] = ("raise", "copy", "memory", "read", "short", "hang")


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure.

    kind: `raise` (the worker raises before it does anything), `memory` (the device is out of memory), `read` (an
    input/output error before anything arrived), `copy` (everything arrived but was damaged on the way, and that is
    noticed), `short` (only a part arrived), `hang` (the work never ends).
    at: the name of an op (`FETCH u3 s0`), or a number in the order of execution, counted from 0.
    after: of an op that comes up several times (a fetch in forward and backward), how often it is let pass.
    """

    kind: FaultKind
    at: str | int
    after: int = 0


def fail(kind: FaultKind, name: str, work: Callable[[], None]) -> None:
    """Run `work` as far as the fault lets it, and raise what it would raise. The device damages what was written."""
    match kind:
        case "raise":
            raise RuntimeError(f"injected: {name} raises")
        case "memory":
            raise OutOfDeviceMemory(f"injected: no device memory for {name}", where="sim")
        case "read":
            raise OSError(errno.EIO, f"injected: {name} cannot read")
        case "copy":
            work()
            raise OSError(errno.EIO, f"injected: the copy of {name} arrived damaged")
        case "short":
            work()
            raise OSError(errno.EIO, f"injected: {name} transferred only a part")
        case "hang":
            raise AssertionError("a hang is never run")
