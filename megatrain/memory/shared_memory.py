"""Host memory shared by the ranks of one machine: each rank owns its buffers and maps those of the others.

A rank's buffers are consecutive in a nameless file (`device.host_memory`), which disappears with the last process
that maps it, however that ends. If a rank is on another machine or may not open a file, all ranks raise at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch import Tensor

from megatrain.device import Device
from megatrain.device.host_memory import anonymous_file, identity_of, machine_id, mapped_file
from megatrain.dist import ALONE, World
from megatrain.errors import PlanError
from megatrain.schedule import Buffer
from megatrain.schedule.passes.collectives import shared_nbytes
from megatrain.spec import ModelSpec, Numerics, Policy

ALIGNMENT = 64
"""Alignment of buffers in bytes: enough for vector loads, and no two share a cache line."""

_File = tuple[int, int, tuple[int, int]]
"""(process id of a rank, its file descriptor there, identity of the file)."""


class SharedMemory:
    """The shared buffers of all ranks on one machine.

    sizes: name -> bytes of the buffers that every rank has; empty if nothing is shared. pinned: whether they are
    page-locked. All ranks must construct it. Raises `PlanError` for ranks on several machines, and `DeviceError`
    if the system does not allow sharing.
    """

    @classmethod
    def of(cls, model: ModelSpec, numerics: Numerics, policy: Policy, device: Device, world: World) -> SharedMemory:
        """The shared memory that a model's schedules need under a policy."""
        return cls(shared_nbytes(model, numerics, policy), device, world, pinned=policy.transfer == "pinned")

    def __init__(self, sizes: Mapping[str, int], device: Device, world: World = ALONE, *, pinned: bool = True) -> None:
        self._device, self._rank = device, world.rank
        self._memory: dict[tuple[int, str], Tensor] = {}
        self._mapped: list[Tensor] = []
        if not sizes:
            return
        if len(set(world.exchange("machines", machine_id()))) > 1:
            what = "the ranks are on several machines, which cannot share memory"
            raise PlanError(what, where="policy.delivery", fix="use gather")
        files: list[int] = []
        total = sum(map(_aligned, sizes.values()))

        def make() -> _File:
            files.append(anonymous_file(total))
            return os.getpid(), files[0], identity_of(files[0])

        try:
            there = world.agree("memory to share", make)
            world.agree("shared memory", lambda: self._map(sizes, there, total, pinned=pinned))
        except BaseException:
            self.close()
            raise
        finally:
            for file in files:
                os.close(file)

    def _map(self, sizes: Mapping[str, int], there: Sequence[_File], total: int, *, pinned: bool) -> None:
        for rank, (process, file, identity) in enumerate(there):
            mapping, memory = mapped_file(process, file, identity, total)
            self._device.host.adopt(mapping, memory, "shared memory", pinned=pinned)
            self._mapped.append(memory)
            start = 0
            for name, nbytes in sizes.items():
                self._memory[rank, name] = memory[start : start + nbytes]
                start += _aligned(nbytes)

    def get(self, buffer: Buffer) -> Tensor | None:
        """The shared memory of a buffer, uint8[nbytes]; `None` if it is not shared."""
        rank, name = buffer.peer or (self._rank, buffer.name)
        memory = self._memory.get((rank, name))
        return None if memory is None else memory[: buffer.nbytes]

    def close(self) -> None:
        """Unmap; nothing may use it any more."""
        self._memory.clear()
        while self._mapped:
            self._device.host.free(self._mapped.pop(), "shared memory")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
