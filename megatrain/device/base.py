"""The protocol that the engine speaks to a device. It fits on two screens on purpose.

A stream is a queue: work runs in the order of submission, each piece after the events it waits for. Everything that
touches streamed memory happens inside submitted work, and only within the byte ranges that its task declares. A failure
inside work makes its event a failed one; whatever waits for it does not run and fails too, and the next `wait` or
`synchronize` in the foreground raises it: errors of ours as they are, others as `StreamFailed` with the original as the
cause. So a failure surfaces, once, and nothing hangs.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

Work = Callable[[], None]
Interval = tuple[float, float]
"""Start and end, in seconds from an origin that all streams of a device share."""


class Span(Protocol):
    """Bytes [start, stop) of a named buffer, and what they hold."""

    @property
    def buffer(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def content(self) -> object: ...


class Task(Protocol):
    """What a device is told of a piece of work: its name, and what it reads and writes. An op is one."""

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> Sequence[Span]: ...
    @property
    def writes(self) -> Sequence[Span]: ...


@dataclass(frozen=True, slots=True)
class Errand:
    """A task outside any schedule."""

    name: str
    reads: Sequence[Span] = ()
    writes: Sequence[Span] = ()


class Event(Protocol):
    """A point in a stream: the end of one piece of work."""

    def wait(self) -> None:
        """Block the foreground until the work is done. Raises what it, or what it needed, failed with."""

    def interval(self) -> Interval:
        """When the work ran. Only after the device has come to rest, and only if it was `timed`."""


class Stream(Protocol):
    """A first-in first-out queue of work."""

    def submit(self, task: Task, work: Work, waits: Sequence[Event] = ()) -> Event:
        """Queue `work` behind all earlier work of this stream and behind `waits`."""


@runtime_checkable
class Device(Protocol):
    """Where layers are computed, with the memory beside it."""

    name: str
    torch_device: torch.device
    shares_memory: bool
    """Whether compute reads host memory directly, so that a slot can be the host memory itself."""
    lockable_nbytes: int | None
    """Host memory that may be page-locked, where the device knows it before it has tried."""
    timed: bool
    """Whether events can tell when their work ran. Set it before submitting."""

    def stream(self, name: str) -> Stream:
        """The stream of that name; the same one at every call."""

    def allocate(self, nbytes: int, owner: str) -> torch.Tensor:
        """Device memory, uint8[nbytes], uninitialised. Raises `OutOfDeviceMemory`."""

    def free(self, memory: torch.Tensor, owner: str) -> None:
        """Device memory that `allocate` returned is given back; no work uses it any more."""

    def allocate_host(self, nbytes: int, owner: str) -> torch.Tensor:
        """Zeroed host memory, uint8[nbytes], page-locked where the device gains from it.

        Raises `DeviceError` where that would be more than `lockable_nbytes`.
        """

    def allocate_pageable(self, nbytes: int, owner: str) -> torch.Tensor:
        """Zeroed host memory, uint8[nbytes], that nothing is copied to or from the device, but now and then."""

    def page_lock(self, memory: torch.Tensor, owner: str) -> None:
        """Pageable host memory is copied to and from the device from now on: as `allocate_host`, with its content."""

    def adopt(self, mapping: mmap.mmap, memory: torch.Tensor, owner: str, *, pinned: bool) -> None:
        """Host memory over a mapping that others have made is this device's as if it had allocated it."""

    def free_host(self, memory: torch.Tensor, owner: str) -> None:
        """Host memory that one of the three has returned, or been given, is given back."""

    def discard(self, memory: torch.Tensor) -> bool:
        """What this host memory holds is not needed any more. Whether it had better be freed until something is
        written there again (`allocate_again`)."""

    def allocate_again(self, nbytes: int, owner: str) -> torch.Tensor:
        """Host memory in place of what had better be freed, uint8[nbytes], uninitialised."""

    def staged(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same values on the host, from where a copy to the device holds up nobody: in one piece of page-locked
        memory, where there is such a thing."""

    def landing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Within work: a few numbers on the host, which are there once this work is done."""

    def tidy(self) -> None:
        """A good moment to give memory that layers have freed back to the system; costs some milliseconds."""

    def lend(
        self, task: Task, memory: Mapping[str, torch.Tensor]
    ) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """The buffers that `task` declares, out of `memory` (name -> uint8 tensor), for the time that it runs."""

    def alongside(self) -> AbstractContextManager[object]:
        """In the block, the calling thread computes where the `compute` stream does, in turns with it."""

    def seed(self, value: int) -> None:
        """Make everything random that the next work draws on this device a function of `value`."""

    def free_nbytes(self) -> int:
        """Device memory that a new allocation can have. Undefined where memory is shared with the host."""

    def stalled_seconds(self) -> float:
        """Time that compute has spent waiting for events since the last call."""

    def exact_float32(self) -> AbstractContextManager[None]:
        """In the block, products and convolutions of float32 numbers are that, on every thread (no TF32)."""

    def preserved_random_state(self) -> AbstractContextManager[None]:
        """On leaving the block, random state is what it was on entering, on the host and on the device."""

    def synchronize(self) -> None:
        """Wait for all streams. Raises `StreamFailed` for the first failure since the last call."""

    def close(self) -> None:
        """Stop the workers and give the memory back. The device is unusable afterwards."""


class OnTheHost:
    """What is the same on every device whose memory is host memory."""

    torch_device = torch.device("cpu")

    def staged(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(tensors)

    def landing(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def page_lock(self, memory: torch.Tensor, owner: str) -> None:
        return

    def adopt(self, mapping: mmap.mmap, memory: torch.Tensor, owner: str, *, pinned: bool) -> None:
        return

    def alongside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)

    def exact_float32(self) -> AbstractContextManager[None]:
        return nullcontext()

    def preserved_random_state(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[])


def declared(task: Task, memory: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The buffers of `memory` that `task` declares."""
    names = {span.buffer for span in (*task.reads, *task.writes)}
    return {name: memory[name] for name in names if name in memory}


@contextmanager
def timed(device: Device) -> Iterator[None]:
    """In the block, events tell when their work ran; times count from its start where they are not taken anyway."""
    before = device.timed
    if not before:
        device.timed = True
    try:
        yield
    finally:
        if not before:
            device.timed = False
