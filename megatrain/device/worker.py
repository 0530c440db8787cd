"""A stream that runs its work on a thread: host work on every device, and copies if they need one.

The thread survives failures. It marks the event as failed and skips all later work in the queue, which may rely on
the failed work by order alone, until the main thread collects the failure with `drain`.

A fork does not copy threads: in a forked child nothing would take work from the queue. So a stream knows its
process (`OwningProcess`), refuses work in any other, and has nothing to stop there.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence

import torch

from megatrain.device.base import Errand, Event, Interval, Task, Work
from megatrain.errors import DeviceError, MegaTrainError, OutOfDeviceMemory, StreamFailed, typed_line


class OwningProcess:
    """The process that made something which its forked children cannot use: threads, files, a device's memory."""

    def __init__(self) -> None:
        self.number = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """Whether the caller is in another process, a forked child."""
        return os.getpid() != self.number

    def refuse_elsewhere(self, where: str) -> None:
        """Raise `DeviceError` in a forked child."""
        if self.is_elsewhere:
            what = f"belongs to process {self.number}; this process, {os.getpid()}, is a fork of it without its threads"
            raise DeviceError(what, where=where, fix="create the engine in the process that uses it")


class HostEvent:
    """The end of one piece of work on a host thread."""

    __slots__ = ("_running", "began", "ended", "failure", "task")

    def __init__(self, task: Task) -> None:
        self.task, self.began, self.ended = task, 0.0, 0.0
        self.failure: MegaTrainError | None = None
        self._running = threading.Lock()  # a `threading.Event` takes a thread through ten times the calls
        self._running.acquire()

    def interval(self) -> Interval:
        return self.began, self.ended

    def finish(self, failure: MegaTrainError | None = None) -> None:
        self.failure = failure
        self._running.release()

    def settle(self) -> None:
        """Block until the work is over, successful or not."""
        with self._running:
            pass

    def wait(self) -> None:
        self.settle()
        if self.failure is not None:
            raise self.failure


def as_foreground_error(failure: BaseException, op: str, stream: str) -> MegaTrainError:
    """A failure as the main thread raises it: our own errors unchanged, others with their op and stream."""
    if isinstance(failure, MegaTrainError):
        return failure
    if isinstance(failure, torch.OutOfMemoryError):
        error: MegaTrainError = OutOfDeviceMemory(
            f"device memory ran out in op {op}",
            where=f"stream {stream}",
            fix="use smaller micro-batches, or activations='recompute'",
        )
        error.__cause__ = failure
        return error
    error = StreamFailed(typed_line(failure), where=f"op {op} on stream {stream}")
    error.__cause__ = failure
    return error


def raise_first(failures: Sequence[MegaTrainError | None]) -> None:
    """Raise the first failure of several streams, with the others as notes."""
    raised = [failure for failure in failures if failure is not None]
    for other in raised[1:]:
        if other is not raised[0]:
            raised[0].add_note(f"and also: {other}")
    if raised:
        raise raised[0]


def worker_of(workers: dict[str, WorkerStream], name: str) -> WorkerStream:
    """The worker with that name, started on the first call; its times count from the same origin as `host`'s."""
    if name not in workers:
        workers[name] = WorkerStream(name)
        workers[name].origin = workers["host"].origin
    return workers[name]


def close_workers(workers: dict[str, WorkerStream]) -> None:
    """Stop the threads once each has finished its queue."""
    for worker in workers.values():
        worker.close()


def _nothing() -> None:
    return


class WorkerStream:
    """A queue and a daemon thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.origin = 0.0
        """Origin of event times, on the host's clock."""
        self._queue: queue.SimpleQueue[tuple[HostEvent, Work, Sequence[Event]] | None] = queue.SimpleQueue()
        self._failure: MegaTrainError | None = None
        self._closed = False
        self._process = OwningProcess()
        self._thread = threading.Thread(target=self._run, name=f"megatrain-{name}", daemon=True)
        self._thread.start()

    def submit(self, task: Task, work: Work, waits: Sequence[Event] = ()) -> HostEvent:
        if self._closed:
            raise DeviceError("the device is closed", where=f"op {task.name}")
        event = HostEvent(task)
        self._queue.put((event, work, waits))
        return event

    def drain(self) -> MegaTrainError | None:
        """Wait for everything submitted so far. Returns the first failure since the last call, and clears it."""
        if not self._closed:
            self._process.refuse_elsewhere("the device")
            marker = HostEvent(Errand("drain"))
            self._queue.put((marker, _nothing, ()))
            marker.settle()
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        if not self._closed and not self._process.is_elsewhere:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # grad mode is per thread, and on at first
        while (item := self._queue.get()) is not None:
            event, work, waits = item
            if self._failure is None:
                try:
                    for earlier in waits:
                        earlier.wait()
                    event.began = time.perf_counter() - self.origin
                    work()
                    event.ended = time.perf_counter() - self.origin
                except BaseException as failure:  # a worker must outlive any failure, KeyboardInterrupt included
                    self._failure = as_foreground_error(failure, event.task.name, self.name)
            event.finish(self._failure)
            del item, event, work, waits  # a finished closure must not keep tensors alive until the next
