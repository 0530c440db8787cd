"""An NVIDIA (or, through the same calls, AMD) GPU as a device. The only module that uses `torch.cuda`.

Each stream of a schedule is a CUDA stream. The main thread submits compute work and runs ahead of the GPU; each copy
stream has a thread that submits to it, because a copy may have to wait for the host (an optimizer update), which must
not block the main thread. The `host` stream is a plain worker. Events combine both: they know when work has been
*submitted* (so that a CUDA event exists) and when it is *done*.

Streamed buffers are not recycled by the caching allocator while in use, and derived waits order all accesses, so
`record_stream` is never needed. What layers allocate while computing lives and dies on the compute stream.

Host memory is an anonymous mapping of the exact size. What crosses the bus is page-locked with `cudaHostRegister`
(PyTorch's pinned allocator rounds up to powers of two); what only the host uses is not. If locking is refused the
mapping is used pageable.
"""

from __future__ import annotations

import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import accumulate
from typing import Any

import torch

from megatrain.device.base import Event, HostMemory, Interval, LentBuffers, Stream, Task, Work
from megatrain.device.host_memory import keep_from_children, mapped
from megatrain.device.worker import (
    HostEvent,
    OwningProcess,
    WorkerStream,
    as_foreground_error,
    close_workers,
    raise_first,
    worker_of,
)
from megatrain.errors import DeviceError, MegaTrainError, OutOfDeviceMemory
from megatrain.formatting import at_least, at_most

COPIES = ("fetch", "grad")
LATE = ("link", "products")
"""Streams that few runs use, of collectives between devices and of directions; each has its thread once used."""
ALIGNMENT = 64
"""Alignment of staged tensors in bytes."""


HostMapping = tuple[mmap.mmap, torch.Tensor, bool]
"""(mapping, the tensor over it, whether it is page-locked)."""


class EventPool:
    """CUDA events that are reused once the device is idle, so that steps create none.

    Only the thread that submits work synchronizes the device, so by then every event taken has been recorded and
    its work is done. A later wait for an old event returns at once, or waits for more than necessary.
    """

    def __init__(self) -> None:
        self._free: dict[bool, deque[torch.cuda.Event]] = {True: deque(), False: deque()}
        self._used: deque[tuple[bool, torch.cuda.Event]] = deque()

    def take(self, *, times: bool = False) -> torch.cuda.Event:
        """An event that waits without spinning, or one that records `times`; from any thread."""
        try:
            event = self._free[times].popleft()
        except IndexError:
            event = torch.cuda.Event(enable_timing=times, blocking=not times)
        self._used.append((times, event))
        return event

    def at_rest(self) -> None:
        """All work recorded in events is done."""
        while self._used:
            times, event = self._used.popleft()
            self._free[times].append(event)


class CudaEvent:
    """The end of work on a CUDA stream; `submitted` ends once the CUDA events have been recorded."""

    def __init__(self, submitted: HostEvent, origin: torch.cuda.Event | None, pool: EventPool) -> None:
        self.submitted, self._pool = submitted, pool
        self.began: torch.cuda.Event | None = None
        self.ended: torch.cuda.Event | None = None
        self._origin = origin

    def run(self, stream: torch.cuda.Stream, work: Work) -> None:
        """Queue `work` on `stream` between two events; the first only if times are recorded."""
        if self._origin is None:
            work()
            self.ended = stream.record_event(self._pool.take())
            return
        self.began = stream.record_event(torch.cuda.Event(enable_timing=True))  # not from the pool: it is read later
        work()
        self.ended = stream.record_event(torch.cuda.Event(enable_timing=True, blocking=True))

    def wait(self) -> None:
        self.submitted.wait()
        assert self.ended is not None
        self.ended.synchronize()

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait on the GPU; the host waits only until the event has been recorded."""
        self.submitted.wait()
        assert self.ended is not None
        stream.wait_event(self.ended)

    def interval(self) -> Interval:
        if self._origin is None or self.began is None or self.ended is None:
            raise DeviceError("times were not recorded", where=f"op {self.submitted.task.name}", fix="set device.timed")
        return self._origin.elapsed_time(self.began) / 1e3, self._origin.elapsed_time(self.ended) / 1e3


def _order_behind(stream: torch.cuda.Stream, waits: Sequence[Event]) -> None:
    for event in waits:
        if isinstance(event, CudaEvent):
            event.wait_on(stream)
        else:
            event.wait()


class ComputeStream:
    """The main thread submits work immediately; kernels queue on the GPU."""

    def __init__(self, stream: torch.cuda.Stream, pool: EventPool) -> None:
        self.origin: torch.cuda.Event | None = None
        self._stream = stream
        self._pool = pool
        self._thread = threading.local()
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stalled_seconds = 0.0

    def submit(self, task: Task, work: Work, waits: Sequence[Event] = ()) -> CudaEvent:
        event = CudaEvent(HostEvent(task), self.origin, self._pool)
        try:
            with self.as_current():
                self._wait(waits)
                event.run(self._stream, work)
                self._refuse_another_stream(task)
        except Exception as failure:
            error = as_foreground_error(failure, task.name, "compute")
            event.submitted.finish(error)
            if error is failure:
                raise
            raise error from failure
        event.submitted.finish()
        return event

    def as_current(self) -> AbstractContextManager[None]:
        """In the block, this thread's work goes to this stream. Costs as much as a small op, and nothing if nested."""
        return nullcontext() if getattr(self._thread, "is_current", False) else self._make_current()

    @contextmanager
    def _make_current(self) -> Iterator[None]:
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._thread.is_current = True
            try:
                yield
            finally:
                self._thread.is_current = False

    def _refuse_another_stream(self, task: Task) -> None:
        """Raise `DeviceError` if user code has made another stream current, which nothing orders behind this one."""
        if torch.cuda.current_stream(self._stream.device) != self._stream:
            what = "the model's code or the loss function changed the current CUDA stream and did not change it back"
            raise DeviceError(what, where=f"op {task.name}", fix="use `with torch.cuda.stream(...)` there")

    def _wait(self, waits: Sequence[Event]) -> None:
        if not waits:
            return
        before = self._stream.record_event(self._pool.take(times=True))
        _order_behind(self._stream, waits)
        self._stalls.append((before, self._stream.record_event(self._pool.take(times=True))))

    def at_rest(self) -> None:
        """Convert stalls to seconds before their events are reused."""
        for before, after in self._stalls:
            self._stalled_seconds += before.elapsed_time(after) / 1e3
        self._stalls.clear()

    def stalled_seconds(self) -> float:
        """Seconds of stalls since the last call, up to when the device was last idle."""
        seconds, self._stalled_seconds = self._stalled_seconds, 0.0
        return seconds


class CopyStream:
    """A CUDA stream with a thread that submits to it, so that only this stream waits if the host is late."""

    def __init__(self, name: str, stream: torch.cuda.Stream, pool: EventPool) -> None:
        self.origin: torch.cuda.Event | None = None
        self._stream, self._pool = stream, pool
        self._worker, self._is_current = WorkerStream(name), False

    def submit(self, task: Task, work: Work, waits: Sequence[Event] = ()) -> CudaEvent:
        event = CudaEvent(HostEvent(task), self.origin, self._pool)

        def run() -> None:
            if not self._is_current:  # for all that this thread will submit
                torch.cuda.set_device(self._stream.device)
                torch.cuda.set_stream(self._stream)
                self._is_current = True
            _order_behind(self._stream, waits)
            event.run(self._stream, work)

        event.submitted = self._worker.submit(task, run)
        return event

    def drain(self) -> MegaTrainError | None:
        return self._worker.drain()

    def close(self) -> None:
        self._worker.close()


class CudaHostMemory(HostMemory):
    """Mappings that are page-locked in place.

    How much may be locked is not known in advance: drivers lock more or less than the system's limit; the probe tries.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mappings: dict[int, HostMapping] = {}

    def allocate(self, nbytes: int, owner: str) -> torch.Tensor:
        memory = self.allocate_pageable(nbytes, owner)
        memory.zero_()  # with all threads: the driver creates pages one by one, which takes minutes
        self.page_lock(memory, owner)
        return memory

    def allocate_pageable(self, nbytes: int, owner: str) -> torch.Tensor:
        mapping, memory = mapped(nbytes)
        self._mappings[memory.data_ptr()] = mapping, memory, False
        return memory

    def page_lock(self, memory: torch.Tensor, owner: str) -> None:
        mapping, _, _ = self._mappings[memory.data_ptr()]
        pinned = memory.numel() > 0 and self._pin(memory)
        if pinned:
            keep_from_children(mapping)
        self._mappings[memory.data_ptr()] = mapping, memory, pinned

    def adopt(self, mapping: mmap.mmap, memory: torch.Tensor, owner: str, *, pinned: bool) -> None:
        self._mappings[memory.data_ptr()] = mapping, memory, False
        if pinned:
            self.page_lock(memory, owner)

    def free(self, memory: torch.Tensor, owner: str) -> None:
        torch.cuda.synchronize(self._device)  # no copy is running
        mapping = self._mappings.pop(memory.data_ptr(), None)
        if mapping is not None:
            _unpin(memory, mapping[2])

    def clear(self) -> None:
        """Unlock all of it. No copy is running."""
        for _, memory, pinned in self._mappings.values():
            _unpin(memory, pinned)
        self._mappings.clear()

    def _pin(self, memory: torch.Tensor) -> bool:
        """Page-lock memory; if that is refused (by a limit on locked memory, say) it is used pageable."""
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
            return True
        try:  # the runtime would report the refusal again at the next launch
            torch.empty(1, device=self._device).fill_(0)
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            torch.cuda.synchronize(self._device)
        return False


class CudaDevice:
    """See `base.Device`."""

    shares_memory = False
    lend = LentBuffers

    def __init__(self, index: int | None = None) -> None:
        """index: by default PyTorch's current device."""
        self.name = "cuda" if index is None else f"cuda:{index}"
        if not torch.cuda.is_available():
            raise DeviceError("PyTorch finds no CUDA device", where=self.name, fix="use cpu, or check the driver")
        index = torch.cuda.current_device() if index is None else index
        self.name = f"cuda:{index}"
        if index >= torch.cuda.device_count():
            raise DeviceError(
                f"there are {torch.cuda.device_count()} CUDA devices", where=self.name, fix="use a lower index"
            )
        self._index, self.torch_device = index, torch.device("cuda", index)
        self.model: str = torch.cuda.get_device_name(self.torch_device)
        """The driver's name for it."""
        self._events = EventPool()
        compute, *others = self._new_streams(1 + len(COPIES))
        self._compute = ComputeStream(compute, self._events)
        self._copies = {
            name: CopyStream(name, stream, self._events) for name, stream in zip(COPIES, others, strict=True)
        }
        self._workers = {"host": WorkerStream("host")}
        self.host = CudaHostMemory(self.torch_device)
        self._closed = False
        self._process = OwningProcess()
        self._finalizer = weakref.finalize(
            self, _shut, self._process, self._workers, self._copies, self.host, self.torch_device
        )

    def _new_streams(self, count: int) -> list[torch.cuda.Stream]:
        """The first of a process create its CUDA context, which takes device memory."""
        try:
            return [torch.cuda.Stream(self.torch_device) for _ in range(count)]
        except RuntimeError as error:
            what = f"cannot be used: {str(error).splitlines()[0]}"
            kind = OutOfDeviceMemory if "out of memory" in what else DeviceError
            raise kind(what, where=self.name, fix="run `nvidia-smi` to see what else uses it") from error

    @property
    def timed(self) -> bool:
        """Times count from now, on every stream; host streams read the host's clock at the same moment."""
        return self._compute.origin is not None

    @timed.setter
    def timed(self, value: bool) -> None:
        """Times count from now, on every stream; host streams read the host's clock at the same moment."""
        origin = None
        if value:
            torch.cuda.synchronize(self.torch_device)
            origin = torch.cuda.Event(enable_timing=True)
            origin.record(torch.cuda.current_stream(self.torch_device))
            origin.synchronize()
        for worker in self._workers.values():
            worker.origin = time.perf_counter() if value else 0.0
        self._compute.origin = origin
        for copies in self._copies.values():
            copies.origin = origin

    def stream(self, name: str) -> Stream:
        if self._closed:
            raise DeviceError("the device is closed", where=self.name)
        self._process.refuse_elsewhere("the device")
        if name == "compute":
            return self._compute
        if name in LATE and name not in self._copies:
            self._copies[name] = CopyStream(name, torch.cuda.Stream(self.torch_device), self._events)
            self._copies[name].origin = self._compute.origin
        return self._copies.get(name) or worker_of(self._workers, name)

    # Memory ---------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, owner: str) -> torch.Tensor:
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(
                f"{at_least(nbytes)} for {owner} do not fit into the {at_most(self.free_nbytes())} that are free",
                where=self.name,
                fix="use fewer slots, smaller micro-batches, or a smaller model",
            ) from error
        torch.cuda.synchronize(self.torch_device)  # the block may have belonged to another stream
        return memory

    def free(self, memory: torch.Tensor, owner: str) -> None:
        torch.cuda.synchronize(self.torch_device)  # then nothing uses it, and the caching allocator may reuse it

    def staged(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not tensors:
            return []
        starts = [0, *accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)]
        with torch.cuda.device(self.torch_device):  # whose driver locks the memory
            try:
                memory = torch.empty(starts[-1], dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError:  # a limit on locked memory; copies then block
                return list(tensors)
            copies = [
                memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                for start, tensor in zip(starts, tensors, strict=False)
            ]
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def landing(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def tidy(self) -> None:
        return  # the caching allocator keeps what it has

    def free_nbytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return int(free + cached)

    def alongside(self) -> AbstractContextManager[None]:
        return self._compute.as_current()

    # Chance and time ------------------------------------------------------------------------------------------------

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)
        torch.cuda.default_generators[self._index].manual_seed(value)

    @contextmanager
    def exact_float32(self) -> Iterator[None]:
        switches: list[tuple[Any, str]] = [(torch.backends.cudnn, "allow_tf32")]  # true by default
        try:
            matmul = torch.get_float32_matmul_precision()
            before: list[Any] = [getattr(*switch) for switch in switches]
            exact: Any = False
        except RuntimeError:  # the user has set the newer names, after which torch refuses the older ones
            cudnn: Any = torch.backends.cudnn
            kinds = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
            switches = [(kind, "fp32_precision") for kind in kinds]
            matmul, before, exact = "", [getattr(*switch) for switch in switches], "ieee"
        try:
            if matmul:
                torch.set_float32_matmul_precision("highest")
            for switch in switches:
                setattr(*switch, exact)
            yield
        finally:
            if matmul:
                torch.set_float32_matmul_precision(matmul)
            for switch, was in zip(switches, before, strict=True):
                setattr(*switch, was)

    @contextmanager
    def preserved_random_state(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[self.torch_device]):
            yield

    def stalled_seconds(self) -> float:
        return self._compute.stalled_seconds()

    def synchronize(self) -> None:
        streams: list[WorkerStream | CopyStream] = [*self._workers.values(), *self._copies.values()]
        failures = [stream.drain() for stream in streams]
        try:
            torch.cuda.synchronize(self.torch_device)
            self._compute.at_rest()
            self._events.at_rest()
        except RuntimeError as failure:  # an asynchronous GPU error
            failures.append(as_foreground_error(failure, "on the GPU", self.name))
        raise_first(failures)

    def close(self) -> None:
        self._closed = True
        self._finalizer()


def gpu_of(local_rank: int) -> tuple[str, str]:
    """(device name for `open_device`, unique id on the machine) of the GPU of the local rank.

    If a launcher shows each process only its own GPU, all of them are cuda:0, so the id tells them apart.
    """
    count = torch.cuda.device_count()
    index = 0 if count == 1 else local_rank
    if index >= count:
        return f"cuda:{index}", f"the absent one of number {index}"  # opening it raises the error
    properties = torch.cuda.get_device_properties(index)
    return f"cuda:{index}", str(getattr(properties, "uuid", index))


def _shut(
    process: OwningProcess,
    workers: dict[str, WorkerStream],
    copies: dict[str, CopyStream],
    host: CudaHostMemory,
    device: torch.device,
) -> None:
    """Stop the threads, synchronize the GPU, and only then unlock memory; also for a dropped device.

    A forked child has none of these, and must not call the driver.
    """
    if process.is_elsewhere:
        return
    close_workers(workers)
    for stream in copies.values():
        stream.close()
    with suppress(RuntimeError):  # a broken GPU; its memory must be unlocked anyway
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # tens of megabytes for each stream, which would stay
    host.clear()


def _unpin(memory: torch.Tensor, pinned: bool) -> None:
    if pinned:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
