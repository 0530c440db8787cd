"""A simulated accelerator: cpu arithmetic behind separate memory and streams that run as late and as mixed as they may.

Nothing runs when it is submitted. When the foreground waits, a seeded adversary picks, again and again, one stream
among those whose next work has all its events, until what is waited for is done. So every order that the events allow
can happen and a seed fixes which one does: a missing wait turns into a wrong number on some seed. Device memory is
separate from the host's, filled with NaN when allocated, and has a capacity.

It leaves out time: bandwidths and a virtual clock belong to `schedule.replay`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatrain.device.base import Event, Stream, Work
from megatrain.device.worker import as_foreground_error
from megatrain.errors import DeviceError, MegaTrainError, OutOfDeviceMemory

POISON = 0xFF
"""Every byte of fresh device memory: NaN in bfloat16 and in float32."""


@dataclass(slots=True, eq=False)
class SimEvent:
    """The end of one piece of simulated work."""

    device: SimDevice
    done: bool = False
    failure: MegaTrainError | None = None

    def wait(self) -> None:
        self.device.run_until(self)
        if self.failure is not None:
            raise self.failure


@dataclass(slots=True)
class _Item:
    name: str
    work: Work
    waits: tuple[SimEvent, ...]
    event: SimEvent


@dataclass(slots=True, eq=False)
class SimStream:
    """A queue that the adversary empties."""

    name: str
    device: SimDevice
    queue: deque[_Item] = field(default_factory=deque)
    failure: MegaTrainError | None = None

    def submit(self, name: str, work: Work, waits: Sequence[Event] = ()) -> SimEvent:
        event = SimEvent(self.device)
        self.queue.append(_Item(name, work, tuple(w for w in waits if isinstance(w, SimEvent)), event))
        return event

    def ready(self) -> bool:
        return bool(self.queue) and all(event.done for event in self.queue[0].waits)

    def run_one(self) -> None:
        item = self.queue.popleft()
        failed = self.failure or next((event.failure for event in item.waits if event.failure), None)
        if failed is None:
            try:
                item.work()
            except Exception as error:
                failed = as_foreground_error(error, item.name, self.name)
        self.failure = failed
        item.event.failure = failed
        item.event.done = True


class SimDevice:
    """See `base.Device`. `capacity` is the device memory in bytes; `None` is unlimited."""

    shares_memory = False

    def __init__(self, seed: int = 0, capacity: int | None = None) -> None:
        self.name = f"sim:{seed}"
        self.torch_device = torch.device("cpu")
        self.capacity = capacity
        self.order: list[str] = []
        """Names of the work run so far, in the order that the adversary chose."""
        self._adversary = random.Random(seed)
        self._streams: dict[str, SimStream] = {}
        self._owners: dict[str, int] = {}

    def stream(self, name: str) -> Stream:
        return self._streams.setdefault(name, SimStream(name, self))

    def allocate(self, nbytes: int, owner: str) -> torch.Tensor:
        used = sum(self._owners.values())
        if self.capacity is not None and used + nbytes > self.capacity:
            table = ", ".join(f"{name} {size:,}" for name, size in self._owners.items()) or "nothing"
            raise OutOfDeviceMemory(
                f"{nbytes:,} bytes for {owner} do not fit in {self.capacity:,} bytes of device memory",
                where=self.name,
                fix=f"it holds: {table}",
            )
        self._owners[owner] = self._owners.get(owner, 0) + nbytes
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def allocate_host(self, nbytes: int, owner: str) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)

    def free_nbytes(self) -> int:
        return (1 << 62) if self.capacity is None else self.capacity - sum(self._owners.values())

    def stalled_seconds(self) -> float:
        return 0.0

    def run_until(self, event: SimEvent) -> None:
        """Let the adversary run work until `event` is done."""
        while not event.done:
            self._run_one()

    def synchronize(self) -> None:
        while any(stream.queue for stream in self._streams.values()):
            self._run_one()
        failures = [stream.failure for stream in self._streams.values() if stream.failure]
        for stream in self._streams.values():
            stream.failure = None
        if failures:
            raise failures[0]

    def close(self) -> None:
        self._streams.clear()
        self._owners.clear()

    def _run_one(self) -> None:
        ready = [stream for stream in self._streams.values() if stream.ready()]
        if not ready:
            heads = "; ".join(f"{s.name} waits before {s.queue[0].name}" for s in self._streams.values() if s.queue)
            raise DeviceError(f"deadlock: {heads or 'nothing is queued'}", where=self.name)
        stream = self._adversary.choice(ready)
        self.order.append(stream.queue[0].name)
        stream.run_one()
