"""The protocol that the engine speaks to a device. It fits on one screen on purpose.

A stream is a queue: work runs in the order of submission, each piece after the events it waits for. Everything that
touches streamed memory happens inside submitted work. A failure inside work makes its event a failed one; whatever
waits for it does not run and fails too, and the next `wait` or `synchronize` in the foreground raises `StreamFailed`
with the original exception as its cause. So a failure surfaces, once, and nothing hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Work = Callable[[], None]


class Event(Protocol):
    """A point in a stream: the end of one piece of work."""

    def wait(self) -> None:
        """Block the foreground until the work is done. Raises `StreamFailed` when it, or what it needed, failed."""


class Stream(Protocol):
    """A first-in first-out queue of work."""

    def submit(self, name: str, work: Work, waits: Sequence[Event] = ()) -> Event:
        """Queue `work` behind all earlier work of this stream and behind `waits`. `name` is for errors and traces."""


class Device(Protocol):
    """Where layers are computed, with the memory beside it."""

    name: str
    torch_device: torch.device
    shares_memory: bool
    """Whether compute reads host memory directly, so that a slot can be the host memory itself."""

    def stream(self, name: str) -> Stream:
        """The stream of that name; the same one at every call."""

    def allocate(self, nbytes: int, owner: str) -> torch.Tensor:
        """Device memory, uint8[nbytes], uninitialised. Raises `OutOfDeviceMemory`."""

    def allocate_host(self, nbytes: int, owner: str) -> torch.Tensor:
        """Zeroed host memory, uint8[nbytes], page-locked where the device gains from it."""

    def seed(self, value: int) -> None:
        """Make everything random that the next work draws on this device a function of `value`."""

    def free_nbytes(self) -> int:
        """Device memory that a new allocation can have. Undefined where memory is shared with the host."""

    def stalled_seconds(self) -> float:
        """Time that compute has spent waiting for events since the last call."""

    def synchronize(self) -> None:
        """Wait for all streams. Raises `StreamFailed` for the first failure since the last call."""

    def close(self) -> None:
        """Stop the workers and give the memory back. The device is unusable afterwards."""
