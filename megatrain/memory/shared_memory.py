"""Host memory that the ranks of one machine share: each owns its buffers, and maps the other ranks' buffers.

A rank's buffers lie one behind the other in a file without a name (`device.host_memory`), which is gone with the last
process that maps it, whatever ends that. Who is on another machine, or may not open it, is told at once, on all ranks.
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
"""Of a buffer in bytes: of vector loads, and no two share a cache line."""

_File = tuple[int, int, tuple[int, int]]
"""A rank's process, its descriptor there, and the identity of the file."""


class SharedMemory:
    """Buffers of all ranks, in the memory of their machine.

    sizes: name -> bytes, of the buffers that every rank has; none where nothing is shared. pinned: whether they are
    page-locked. All ranks must make it. Raises `PlanError` for ranks of several machines, and `DeviceError` where the
    system does not let them share.
    """

    @classmethod
    def of(cls, model: ModelSpec, numerics: Numerics, policy: Policy, device: Device, world: World) -> SharedMemory:
        """What the schedules of a model share by a policy."""
        return cls(shared_nbytes(model, numerics, policy), device, world, pinned=policy.transfer == "pinned")

    def __init__(self, sizes: Mapping[str, int], device: Device, world: World = ALONE, *, pinned: bool = True) -> None:
        self._device, self._rank = device, world.rank
        self._memory: dict[tuple[int, str], Tensor] = {}
        self._mapped: list[Tensor] = []
        if not sizes:
            return
        if len(set(world.exchange("machines", machine_id()))) > 1:
            what = "the ranks are on several machines, which share no memory"
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
            self._device.adopt(mapping, memory, "shared memory", pinned=pinned)
            self._mapped.append(memory)
            start = 0
            for name, nbytes in sizes.items():
                self._memory[rank, name] = memory[start : start + nbytes]
                start += _aligned(nbytes)

    def get(self, buffer: Buffer) -> Tensor | None:
        """The memory of a buffer, uint8[nbytes], where it is shared."""
        rank, name = buffer.peer or (self._rank, buffer.name)
        memory = self._memory.get((rank, name))
        return None if memory is None else memory[: buffer.nbytes]

    def close(self) -> None:
        """Nothing touches it any more."""
        self._memory.clear()
        while self._mapped:
            self._device.free_host(self._mapped.pop(), "shared memory")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
