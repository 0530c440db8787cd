"""The pool: every arena buffer that schedules name, allocated once, and reached only through leases.

A lease covers the buffers of one op for as long as it runs: acquire, use, release. The pool counts them, so a leak is a
number that is not zero. Buffers only ever change between steps, when a new schedule needs larger ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from megatrain.device import Device
from megatrain.errors import DeviceError
from megatrain.memory.ledger import Ledger
from megatrain.schedule import Buffer, Op

STATE = ("host/hi/", "host/state/")
"""Buffers that hold more than passes through."""

Held = Mapping[str, Tensor]
"""Buffer name -> uint8[nbytes], for the time of one lease."""


class Pool:
    """Buffers by name, on one device and the host beside it."""

    def __init__(self, device: Device, ledger: Ledger) -> None:
        self.device, self.ledger = device, ledger
        self._memory: dict[str, Tensor] = {}
        self._buffers: dict[str, Buffer] = {}
        self._leases = 0
        self._lock = threading.Lock()

    def provide(self, buffers: Iterable[Buffer]) -> None:
        """Make sure that all arena buffers exist and are large enough. Raises `DoesNotFit` before allocating any.

        A buffer that grows loses its content, so only slots may; the state's size never changes. When an allocation
        fails, what has been allocated stays, and the next call tries again.
        """
        missing = [b for b in buffers if b.arena and (b.name not in self._memory or self._size(b.name) < b.nbytes)]
        if missing and self._leases:
            raise DeviceError(f"{self._leases} leases are out while buffers change", where="memory pool")
        self.ledger.require(missing)
        for buffer in missing:
            self._give_back(buffer.name)
            allocate = self.device.allocate if buffer.tier == "device" else self.device.allocate_host
            self._memory[buffer.name] = allocate(buffer.nbytes, buffer.owner)
            self._buffers[buffer.name] = buffer
            self.ledger.enter(buffer)

    def memory(self, name: str) -> Tensor:
        """A whole host buffer between steps, uint8[nbytes]: for loading, reading and writing the state."""
        if not name.startswith("host/"):
            raise DeviceError(f"{name} is only reached through a lease", where="memory pool")
        return self._memory[name]

    @contextmanager
    def lease(self, op: Op) -> Iterator[Held]:
        """The arena buffers that `op` declares, until the end of the block."""
        with self._lock:
            self._leases += 1
        try:
            with self.device.lend(op, self._memory) as held:
                yield held
        finally:
            with self._lock:
                self._leases -= 1

    @property
    def leases(self) -> int:
        """Leases that are out now; zero between steps."""
        return self._leases

    def keep_state(self) -> None:
        """Give back everything but the state: slots are provided again, at the size that the next schedule wants."""
        for name in list(self._buffers):
            if not name.startswith(STATE):
                self._give_back(name)

    def release(self) -> None:
        """Give all memory back."""
        for name in list(self._buffers):
            self._give_back(name)

    def _give_back(self, name: str) -> None:
        """Let go of the buffer of that name, if there is one: for good, or before its larger successor is allocated."""
        buffer = self._buffers.pop(name, None)
        if buffer is None:
            return
        free = self.device.free if buffer.tier == "device" else self.device.free_host
        free(self._memory.pop(name), buffer.owner)
        self.ledger.strike(name)

    def _size(self, name: str) -> int:
        return self._memory[name].numel()
