"""The cpu as a device: compute in the foreground, host work on a worker thread, one memory for both.

Matrix products already use every core, so compute and fetches run at once where they are submitted; the `host` stream
(the optimizer pass) has a thread, and so have `read` and `write` (the disk), what ranks do together, and gradients on
their way home, which wait for other ranks while compute goes on. Since compute reads host memory, a policy
with `shares_memory` needs no fetch at all. It leaves out memory nodes and page-locking, which mean nothing to a cpu.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from megatrain.device import host_memory
from megatrain.device.base import Event, Interval, OnTheHost, Stream, Task, Work, declared
from megatrain.device.host_memory import mapped
from megatrain.device.worker import WorkerStream, as_foreground_error, close_workers, raise_first, worker_of
from megatrain.errors import DeviceError

MOST_KEPT = 1 << 20
"""Bytes below which a discarded buffer is kept: letting go of it costs more than it is worth."""
ALIGNMENT = 64
"""Of memory in bytes: that of torch's own, which kernels may round by."""


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The end of work that ran when it was submitted."""

    began: float
    ended: float

    def wait(self) -> None:
        return

    def interval(self) -> Interval:
        return self.began, self.ended


class InlineStream:
    """Runs work at once, after blocking for its waits. A failure is raised right there."""

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


class CpuDevice(OnTheHost):
    """See `base.Device`."""

    name = "cpu"
    shares_memory = True
    lockable_nbytes: int | None = None
    timed = True  # always: two readings of a clock cost nothing here

    def __init__(self) -> None:
        self._inline = {name: InlineStream(name) for name in ("compute", "fetch")}
        self._workers = {"host": WorkerStream("host")}
        """Streams with a thread: host work, and the others once there is any of theirs."""
        self._closed = False
        self._mappings: dict[int, mmap.mmap] = {}
        self._finalizer = weakref.finalize(self, close_workers, self._workers)  # one that is dropped leaves no thread
        self._keeping: weakref.finalize[..., object] | None = None
        """Lets go of what has been kept of freed memory, once there are steps that take it again."""

    def stream(self, name: str) -> Stream:
        if self._closed:
            raise DeviceError("the device is closed", where="cpu")
        return self._inline.get(name) or worker_of(self._workers, name)

    def allocate(self, nbytes: int, owner: str) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def free(self, memory: torch.Tensor, owner: str) -> None:
        return

    def allocate_host(self, nbytes: int, owner: str) -> torch.Tensor:
        mapping, memory = mapped(nbytes)
        self._mappings[memory.data_ptr()] = mapping
        return memory

    def allocate_pageable(self, nbytes: int, owner: str) -> torch.Tensor:
        return self.allocate_host(nbytes, owner)

    def free_host(self, memory: torch.Tensor, owner: str) -> None:
        self._mappings.pop(memory.data_ptr(), None)

    def discard(self, memory: torch.Tensor) -> bool:
        return memory.numel() >= MOST_KEPT

    def allocate_again(self, nbytes: int, owner: str) -> torch.Tensor:
        """From the C library, where graphs lie too: what a graph has left takes a gradient, and the other way around.

        Not by way of torch: asked for aligned memory, the C library does not fill the hole that the same size has left.
        """
        block = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -block.ctypes.data % ALIGNMENT
        return torch.from_numpy(block[start : start + nbytes])

    def tidy(self) -> None:
        host_memory.trim()
        if self._keeping is None:  # not sooner: what loading a model frees is of no use to a step
            host_memory.keep_freed()
            self._keeping = weakref.finalize(self, host_memory.let_go)

    def lend(
        self, task: Task, memory: Mapping[str, torch.Tensor]
    ) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        return nullcontext(declared(task, memory))

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
            self._mappings.clear()
            if self._keeping is not None:
                self._keeping()
