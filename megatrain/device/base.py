"""The protocol between the engine and a device. Deliberately small.

A stream is a queue: work runs in the order of submission, each piece after the events that it waits for.
Everything that touches streamed memory happens in submitted work, within the byte ranges that its task declares. A
failure makes the work's event fail; whatever waits for it is skipped and fails too, and the next `wait` or
`synchronize` on the main thread raises it: our own errors unchanged, others as `StreamFailed` with the original as
cause. So a failure surfaces once, and nothing hangs.
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
"""Start and end, in seconds since an origin common to all streams of a device."""


class Span(Protocol):
    """Bytes [start, stop) of a named buffer, and their content."""

    @property
    def buffer(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def content(self) -> object: ...


class Task(Protocol):
    """What a device knows about a piece of work: its name, reads and writes. An op is one."""

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
    """The end of one piece of work on a stream."""

    def wait(self) -> None:
        """Block the calling thread until the work is done. Raises the failure of the work, or of what it needed."""

    def interval(self) -> Interval:
        """When the work ran. Available once the device is idle, and only if it was `timed`."""


class Stream(Protocol):
    """A first-in first-out queue of work."""

    def submit(self, task: Task, work: Work, waits: Sequence[Event] = ()) -> Event:
        """Queue `work` behind all earlier work of this stream and behind `waits`."""


class HostMemory(Protocol):
    """The host memory that a device uses. Every allocation is uint8[nbytes]; `owner` names its use in messages.

    What is written here suits a device that locks nothing and keeps what is discarded.
    """

    lockable_nbytes: int | None = None
    """How much may be page-locked, if the device knows it in advance."""

    def allocate(self, nbytes: int, owner: str) -> torch.Tensor:
        """Zeroed memory, page-locked if the device benefits.

        Raises `DeviceError` if that would exceed `lockable_nbytes`.
        """

    def allocate_pageable(self, nbytes: int, owner: str) -> torch.Tensor:
        """Zeroed memory that is rarely or never copied to or from the device."""
        return self.allocate(nbytes, owner)

    def page_lock(self, memory: torch.Tensor, owner: str) -> None:
        """Page-lock pageable memory in place, since it will be copied to and from the device (see `allocate`)."""
        return

    def adopt(self, mapping: mmap.mmap, memory: torch.Tensor, owner: str, *, pinned: bool) -> None:
        """Treat memory over a mapping made elsewhere as if it had been allocated here."""
        return

    def free(self, memory: torch.Tensor, owner: str) -> None:
        """Free memory that was allocated by, or passed to, one of the above."""

    def discard(self, memory: torch.Tensor) -> bool:
        """The content of this memory is no longer needed. Returns whether it should be freed until the next write
        (`reallocate`)."""
        return False

    def reallocate(self, nbytes: int, owner: str) -> torch.Tensor:
        """Uninitialised memory to replace what `discard` said to free."""
        return self.allocate(nbytes, owner)


@runtime_checkable
class Device(Protocol):
    """Where layers are computed, and the host memory that it uses."""

    name: str
    torch_device: torch.device
    shares_memory: bool
    """Whether compute reads host memory directly, so that host memory itself can serve as a slot."""
    timed: bool
    """Whether events record times. Set it before submitting."""

    @property
    def host(self) -> HostMemory:
        """The host memory that it uses."""

    def stream(self, name: str) -> Stream:
        """The stream with that name; always the same one."""

    def allocate(self, nbytes: int, owner: str) -> torch.Tensor:
        """Device memory, uint8[nbytes], uninitialised. Raises `OutOfDeviceMemory`."""

    def free(self, memory: torch.Tensor, owner: str) -> None:
        """Free device memory from `allocate`, which no work uses any more."""

    def staged(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the tensors on the host, in one page-locked block if possible, so that copies to the device do
        not block."""

    def landing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Within work: a host copy of a small tensor, valid once this work is done."""

    def tidy(self) -> None:
        """Called when it is convenient to return memory freed by layers to the system; takes some milliseconds."""

    def lend(
        self, task: Task, memory: Mapping[str, torch.Tensor]
    ) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """In the block, the buffers of `memory` (name -> uint8 tensor) that `task` declares."""

    def alongside(self) -> AbstractContextManager[object]:
        """In the block, the calling thread computes where the `compute` stream does, taking turns with it."""

    def seed(self, value: int) -> None:
        """Seed all random numbers drawn by later work on this device with `value`."""

    def free_nbytes(self) -> int:
        """Device memory available for a new allocation. Undefined if memory is shared with the host."""

    def stalled_seconds(self) -> float:
        """Seconds for which compute has waited for events since the last call."""

    def exact_float32(self) -> AbstractContextManager[None]:
        """In the block, float32 products and convolutions are exact float32, on every thread (no TF32)."""

    def preserved_random_state(self) -> AbstractContextManager[None]:
        """Restore the random state of host and device when leaving the block."""

    def synchronize(self) -> None:
        """Wait for all streams. Raises the first failure since the last call."""

    def close(self) -> None:
        """Stop the workers and free the memory. The device is unusable afterwards."""


class OnTheHost:
    """The behaviour common to all devices whose memory is host memory."""

    torch_device = torch.device("cpu")

    def staged(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(tensors)

    def landing(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def alongside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)

    def exact_float32(self) -> AbstractContextManager[None]:
        return nullcontext()

    def preserved_random_state(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[])


class LentBuffers(dict[str, torch.Tensor]):
    """`Device.lend` where memory needs no preparation: the buffers that a task declares, and a context of them."""

    __slots__ = ()

    def __init__(self, task: Task, memory: Mapping[str, torch.Tensor]) -> None:
        for span in (*task.reads, *task.writes):
            if span.buffer in memory:
                self[span.buffer] = memory[span.buffer]

    def __enter__(self) -> dict[str, torch.Tensor]:
        return self

    def __exit__(self, *failure: object) -> None:
        return


@contextmanager
def timed(device: Device) -> Iterator[None]:
    """In the block, events record times, counted from its start unless they are recorded anyway."""
    before = device.timed
    if not before:
        device.timed = True
    try:
        yield
    finally:
        if not before:
            device.timed = False
