"""The CPU as a device: computes on the main thread, runs host work on worker threads, with one memory for both.

Matrix products already use every core, so compute and fetches run immediately when submitted. The `host` stream
(the optimizer pass) has a thread, and so have `read` and `write` (the disk), collectives, and gradients on their
way home, which wait for other ranks while compute continues. Since compute reads host memory, a policy with
`shares_memory` needs no fetches. Page-locking is not used.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatrain.device import host_memory
from megatrain.device.base import Event, HostMemory, Interval, LentBuffers, OnTheHost, Stream, Task, Work
from megatrain.device.host_memory import mapped
from megatrain.device.worker import (
    OwningProcess,
    WorkerStream,
    as_foreground_error,
    close_workers,
    raise_first,
    worker_of,
)
from megatrain.errors import DeviceError

MOST_KEPT = 1 << 20
"""Smaller discarded buffers (in bytes) are kept: freeing them is not worth it."""
ALIGNMENT = 64
"""Alignment in bytes, as torch's own, on which rounding in kernels may depend."""


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The end of work that ran during submission."""

    began: float
    ended: float

    def wait(self) -> None:
        return

    def interval(self) -> Interval:
        return self.began, self.ended


class InlineStream:
    """Runs work immediately, after blocking for its waits. Failures are raised right there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stalled_seconds = 0.0

    def submit(self, task: Task, work: Work, waits: Sequence[Event] = ()) -> DoneEvent:
        called = began = time.perf_counter()
        if waits:
            for event in waits:
                event.wait()
            began = time.perf_counter()
            self.stalled_seconds += began - called
        try:
            work()
        except Exception as failure:
            error = as_foreground_error(failure, task.name, self.name)
            if error is failure:
                raise
            raise error from failure
        return DoneEvent(began, time.perf_counter())


class CpuHostMemory(HostMemory):
    """Mappings of the exact size. What is discarded is freed, so that graphs can use it."""

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}
        """Address -> the mapping there."""

    def allocate(self, nbytes: int, owner: str) -> torch.Tensor:
        mapping, memory = mapped(nbytes)
        self._mappings[memory.data_ptr()] = mapping
        return memory

    def free(self, memory: torch.Tensor, owner: str) -> None:
        self._mappings.pop(memory.data_ptr(), None)

    def discard(self, memory: torch.Tensor) -> bool:
        return memory.numel() >= MOST_KEPT

    def reallocate(self, nbytes: int, owner: str) -> torch.Tensor:
        """From the C library, which also holds graphs, so that gradients reuse the memory of graphs and vice versa.

        Not through torch: for aligned requests, the C library does not reuse a hole of the same size.
        """
        block = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -block.ctypes.data % ALIGNMENT
        return torch.from_numpy(block[start : start + nbytes])

    def clear(self) -> None:
        """Let go of all of it."""
        self._mappings.clear()


class CpuDevice(OnTheHost):
    """See `base.Device`."""

    name = "cpu"
    shares_memory = True
    timed = True  # always: reading a clock twice costs nothing here
    lend = LentBuffers

    def __init__(self) -> None:
        self._inline = {name: InlineStream(name) for name in ("compute", "fetch")}
        self._workers = {"host": WorkerStream("host")}
        """Streams with a thread: `host`, and others once used."""
        self._closed = False
        self._process = OwningProcess()
        self.host = CpuHostMemory()
        self._finalizer = weakref.finalize(self, close_workers, self._workers)  # a dropped device leaves no thread
        self._keeping: weakref.finalize[..., object] | None = None
        """Releases kept freed memory; set once steps reuse it."""

    def stream(self, name: str) -> Stream:
        if self._closed:
            raise DeviceError("the device is closed", where="cpu")
        self._process.refuse_elsewhere("the device")
        return self._inline.get(name) or worker_of(self._workers, name)

    def allocate(self, nbytes: int, owner: str) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def free(self, memory: torch.Tensor, owner: str) -> None:
        return

    def tidy(self) -> None:
        host_memory.trim()
        if self._keeping is None:  # not sooner: steps cannot reuse what loading a model frees
            host_memory.keep_freed()
            self._keeping = weakref.finalize(self, host_memory.let_go)

    def free_nbytes(self) -> int:
        raise DeviceError("has no memory of its own", where="cpu")

    def stalled_seconds(self) -> float:
        seconds = sum(stream.stalled_seconds for stream in self._inline.values())
        for stream in self._inline.values():
            stream.stalled_seconds = 0.0
        return seconds

    def synchronize(self) -> None:
        if not self._closed:
            raise_first([worker.drain() for worker in list(self._workers.values())])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._finalizer()
            self.host.clear()
            if self._keeping is not None:
                self._keeping()
