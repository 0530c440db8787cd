"""An NVIDIA (or, through the same calls, AMD) GPU as a device. The only home of `torch.cuda`.

Each stream of a schedule is a CUDA stream. Compute work is submitted by the foreground, which runs ahead of the GPU;
the copy streams each have a thread that submits for them, because a copy may have to wait for the host (an optimizer
update) and the foreground must not. The `host` stream is a plain worker. An event that joins them says when work has
been *submitted* (so that a CUDA event exists) and when it is *done*.

No streamed buffer comes from the caching allocator's free lists while in use, and each is written by one stream at a
time under derived waits, so `record_stream` is needed nowhere. What layers allocate while they compute lives and dies
on the compute stream.

Host memory is an exact-size anonymous mapping, page-locked with `cudaHostRegister`: PyTorch's pinned allocator rounds
up to powers of two. Where locking is refused the mapping is used pageable, and `unpinned_nbytes` says how much.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from megatrain.device.base import Event, Stream, Work
from megatrain.device.worker import HostEvent, WorkerStream, as_foreground_error
from megatrain.errors import DeviceError, MegaTrainError, OutOfDeviceMemory

TIMED = 4096
"""Stall intervals kept between two calls of `stalled_seconds`; later ones go uncounted."""


class CudaEvent:
    """The end of work on a CUDA stream; `submitted` is over once the CUDA event has been recorded."""

    def __init__(self, submitted: HostEvent) -> None:
        self.submitted = submitted
        self.recorded: torch.cuda.Event | None = None

    def wait(self) -> None:
        self.submitted.wait()
        assert self.recorded is not None
        self.recorded.synchronize()

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait on the GPU, the host only until the event has been recorded."""
        self.submitted.wait()
        assert self.recorded is not None
        stream.wait_event(self.recorded)


def _order_behind(stream: torch.cuda.Stream, waits: Sequence[Event]) -> None:
    for event in waits:
        if isinstance(event, CudaEvent):
            event.wait_on(stream)
        else:
            event.wait()


class ComputeStream:
    """Work is submitted by the foreground at once; kernels queue on the GPU."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self.stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def submit(self, name: str, work: Work, waits: Sequence[Event] = ()) -> CudaEvent:
        event = CudaEvent(HostEvent(name))
        try:
            with torch.cuda.stream(self._stream):
                self._wait(waits)
                work()
                event.recorded = self._stream.record_event()
        except Exception as failure:
            error = as_foreground_error(failure, name, "compute")
            event.submitted.finish(error)
            if error is failure:
                raise
            raise error from failure
        event.submitted.finish()
        return event

    def _wait(self, waits: Sequence[Event]) -> None:
        if not waits:
            return
        if len(self.stalls) >= TIMED:
            _order_behind(self._stream, waits)
            return
        before = self._stream.record_event(torch.cuda.Event(enable_timing=True))
        _order_behind(self._stream, waits)
        self.stalls.append((before, self._stream.record_event(torch.cuda.Event(enable_timing=True))))


class CopyStream:
    """A CUDA stream with a thread that submits to it, so that only this stream waits when the host is late."""

    def __init__(self, name: str, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._worker = WorkerStream(name)

    def submit(self, name: str, work: Work, waits: Sequence[Event] = ()) -> CudaEvent:
        event = CudaEvent(HostEvent(name))

        def run() -> None:
            with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
                _order_behind(self._stream, waits)
                work()
                event.recorded = self._stream.record_event()

        event.submitted = self._worker.submit(name, run)
        return event

    def drain(self) -> MegaTrainError | None:
        failure = self._worker.drain()
        self._stream.synchronize()
        return failure

    def close(self) -> None:
        self._worker.close()


class CudaDevice:
    """See `base.Device`."""

    shares_memory = False

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        if not torch.cuda.is_available():
            raise DeviceError("PyTorch finds no CUDA device", where=self.name, fix="use cpu, or check the driver")
        if index >= torch.cuda.device_count():
            raise DeviceError(
                f"there are {torch.cuda.device_count()} CUDA devices", where=self.name, fix="use a lower index"
            )
        self.torch_device = torch.device("cuda", index)
        self.unpinned_nbytes = 0
        self._compute = ComputeStream(torch.cuda.Stream(self.torch_device))
        self._copies = {name: CopyStream(name, torch.cuda.Stream(self.torch_device)) for name in ("fetch", "grad")}
        self._host = WorkerStream("host")
        self._mappings: list[tuple[mmap.mmap, torch.Tensor, bool]] = []
        self._closed = False

    def stream(self, name: str) -> Stream:
        if self._closed:
            raise DeviceError("the device is closed", where=self.name)
        if name == "compute":
            return self._compute
        return self._copies.get(name, self._host)

    def allocate(self, nbytes: int, owner: str) -> torch.Tensor:
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free = self.free_nbytes()
            raise OutOfDeviceMemory(
                f"{nbytes:,} bytes for {owner} do not fit into {free:,} free bytes",
                where=self.name,
                fix="use fewer slots, smaller micro-batches, or a smaller model",
            ) from error
        torch.cuda.synchronize(self.torch_device)  # the block may have belonged to another stream
        return memory

    def allocate_host(self, nbytes: int, owner: str) -> torch.Tensor:
        mapping = mmap.mmap(-1, max(nbytes, 1))
        memory = torch.frombuffer(mapping, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
        pinned = nbytes > 0 and int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0)) == 0
        if not pinned:
            self.unpinned_nbytes += nbytes
        self._mappings.append((mapping, memory, pinned))
        return memory

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)
        with torch.cuda.device(self.torch_device):
            torch.cuda.manual_seed(value)

    def free_nbytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return int(free + cached)

    def stalled_seconds(self) -> float:
        seconds = float(sum(before.elapsed_time(after) for before, after in self._compute.stalls)) / 1e3
        self._compute.stalls.clear()
        return seconds

    def synchronize(self) -> None:
        failures = [self._host.drain(), *(copies.drain() for copies in self._copies.values())]
        torch.cuda.synchronize(self.torch_device)
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        torch.cuda.synchronize(self.torch_device)
        self._host.close()
        for copies in self._copies.values():
            copies.close()
        for _, memory, pinned in self._mappings:
            if pinned:
                torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self._mappings.clear()
