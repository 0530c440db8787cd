"""The pool: allocates every arena buffer that schedules name, once, and hands buffers out only through leases.

A lease covers an op's buffers while it runs: acquire, use, release. The pool counts leases, so a leak shows as a
nonzero count. Buffers change only between steps, when a new schedule needs larger ones.

Buffers on the disk are regions of its files. READ and WRITE move them to and from staging buffers. What an update
has left in a staging buffer is *unsaved* until its WRITE succeeds: after a failure nothing is lost, since
`UnsavedState.save` writes it again. The same holds for what an update on the device has left in a slot, until it
has been copied home.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from megatrain.device import Device, Errand
from megatrain.device.base import LentBuffers, Task
from megatrain.errors import DeviceError, PlanError
from megatrain.memory.disk import Disk
from megatrain.memory.io_queue import Bytes
from megatrain.memory.ledger import Ledger
from megatrain.memory.model_files import ModelFiles
from megatrain.memory.shared_memory import SharedMemory
from megatrain.schedule import USED, Access, Buffer, Op, Use
from megatrain.schedule.contents import Scratch
from megatrain.schedule.passes.pinned_staging import is_pinned
from megatrain.schedule.passes.state_buffers import state_name
from megatrain.spec import Transfer

Lease = Mapping[str, Tensor]
"""The memory that an op has leased: buffer name -> uint8[nbytes]. Valid during the lease."""


class Pool:
    """Buffers by name, on a device, in host memory, and on the disk.

    units: names for messages. transfer: which host memory is page-locked. shared: host memory shared with other ranks.
    files: the model's files, if frozen weights are read from them.
    """

    def __init__(
        self,
        device: Device,
        ledger: Ledger,
        disk: Disk | None = None,
        units: Sequence[str] = (),
        transfer: Transfer = "pinned",
        shared: SharedMemory | None = None,
        files: ModelFiles | None = None,
    ) -> None:
        self.device, self.ledger, self._disk, self.units, self._transit = device, ledger, disk, list(units), transfer
        self._shared = SharedMemory({}, device) if shared is None else shared
        self.files = files
        self._memory: dict[str, Tensor] = {}
        self.views = defaultdict[str, dict[Hashable, Any]](dict)
        """What ops have made of a buffer's memory, by its name, for as long as it has that memory."""
        self._of_peers: dict[str, Tensor] = {}
        """Other ranks' memory, which is not the device's to lease."""
        self.buffers: dict[str, Buffer] = {}
        """The arena buffers, by name."""
        self.unsaved = UnsavedState(self)
        self._absent: set[str] = set()
        """Buffers whose memory is freed until the next write."""
        self._leases = 0
        self._lock = threading.Lock()

    def provide(self, buffers: Iterable[Buffer]) -> None:
        """Allocate all arena buffers that do not exist or are too small. Raises `DoesNotFit` before allocating any.

        A buffer that grows, or a region of another size, loses its content; the state's size never changes. State that
        will pass through the device is page-locked in place. If an allocation fails, earlier ones stay, and the next
        call continues.
        """
        known = self.buffers
        buffers = [b for b in buffers if b.arena and (b.name not in known or known[b.name] != b)]
        missing = [
            buffer
            for buffer in buffers
            if buffer.name not in known
            or known[buffer.name].nbytes < buffer.nbytes
            or (buffer.tier == "disk" and known[buffer.name].nbytes != buffer.nbytes)  # regions are written whole
        ]
        if missing and self._leases:
            raise DeviceError(f"{self._leases} leases are in use while buffers change", where="memory pool")
        if missing:
            self.ledger.require(missing)
        for buffer in missing:
            self._allocate(buffer)
        for buffer in buffers:
            before = known[buffer.name]
            unlike = buffer.crosses != before.crosses or buffer.unit != before.unit
            if unlike and is_pinned(buffer, self._transit) and not is_pinned(before, self._transit):
                self.device.host.page_lock(self._memory[buffer.name], buffer.use)
                self.buffers[buffer.name] = buffer

    def _allocate(self, buffer: Buffer) -> None:
        self.free(buffer.name)
        if buffer.tier == "disk":
            sized = {buffer.name: (buffer.nbytes, self.label(buffer))}
            self.disk.provide(sized, cuts={buffer.name: buffer.cuts})
        elif (memory := self._shared.get(buffer)) is not None:
            (self._memory if buffer.peer is None else self._of_peers)[buffer.name] = memory
        elif buffer.tier != "file":  # files take no memory
            pinned, host = is_pinned(buffer, self._transit), self.device.host
            allocate_on_host = host.allocate if pinned else host.allocate_pageable
            allocate = self.device.allocate if buffer.tier == "device" else allocate_on_host
            self._memory[buffer.name] = allocate(buffer.nbytes, buffer.use)
        self.buffers[buffer.name] = buffer
        if buffer.peer is None and buffer.tier != "file":
            self.ledger.enter(buffer)
        if buffer.tier == "device" and buffer.is_state:
            name, whole = buffer.name, Access(buffer.name, 0, buffer.nbytes, Scratch(buffer.name))
            task = Errand(f"zeros of {name}", writes=(whole,))  # like new buffers of the other tiers
            self.run(task, lambda lease: lease[name].zero_())

    def memory(self, name: str) -> Tensor:
        """A whole host buffer between steps, uint8[nbytes], to load, read or write state."""
        if self.buffers[name].tier != "host":
            raise DeviceError(f"{name} can only be used through a lease", where="memory pool")
        return self._memory[name]

    @property
    def leases(self) -> int:
        """Leases in use now; zero between steps."""
        return self._leases

    def keep_state(self) -> None:
        """Free everything but the state, none of which may be unsaved; slots are provided again in the size that the
        next schedule needs."""
        for name in list(self.buffers):
            if not self.buffers[name].is_state:
                self.free(name)

    def discard(self, name: str) -> None:
        """A host buffer's content is no longer needed. Free its memory until the next write, if the buffer allows
        that.

        It is freed when the current leases on it end, and still counts in the ledger.
        """
        with self._lock:
            if self.device.host.discard(self._memory[name]):
                self.views.pop(name, None)
                self.device.host.free(self._memory.pop(name), self.buffers[name].use)
                self._absent.add(name)

    def _bring_back(self, name: str) -> None:
        buffer = self.buffers[name]
        self._memory[name] = self.device.host.reallocate(buffer.nbytes, buffer.use)
        self._absent.discard(name)

    # Between steps --------------------------------------------------------------------------------------------------

    def run(self, task: Task, work: Callable[[Lease], object], stream: str = "fetch") -> None:
        """Run `work` on a stream, with the memory that `task` declares, and wait until it is done."""

        def leased() -> None:
            with self.device.lend(task, self._memory) as lease:
                work(lease)

        self.device.stream(stream).submit(task, leased)
        self.device.synchronize()

    @property
    def disk(self) -> Disk:
        """The disk tier. Raises `PlanError` if there is none."""
        if self._disk is None:
            raise PlanError(
                "uses the disk, but no folder is given",
                where="policy",
                fix="give a folder as `disk`",
            )
        return self._disk

    def label(self, buffer: Buffer) -> str:
        """The name of a region of the disk in messages."""
        unit = buffer.unit if buffer.unit is not None else -1
        what = buffer.part.label if buffer.part else buffer.use
        return f"{what} of {self.units[unit] if 0 <= unit < len(self.units) else f'unit {unit}'}"

    def release(self) -> None:
        """Free all memory, and close the model's files."""
        for name in list(self.buffers):
            self.free(name)
        self._shared.close()
        if self.files is not None:
            self.files.close()

    def free(self, name: str) -> None:
        """Free the buffer with that name, if any: for good, or before its larger successor is allocated."""
        buffer = self.buffers.pop(name, None)
        if buffer is None:
            return
        self.views.pop(name, None)
        if buffer.tier == "disk":
            self.unsaved.forget(name)
            self.disk.forget(name)
        elif self._shared.get(buffer) is not None:
            (self._memory if buffer.peer is None else self._of_peers).pop(name, None)
        elif buffer.tier != "file":
            free = self.device.free if buffer.tier == "device" else self.device.host.free
            if name not in self._absent:
                free(self._memory.pop(name), buffer.use)
            self._absent.discard(name)
        self.ledger.strike(name)

    def rename(self, buffer: Buffer, after: Buffer) -> None:
        """Give a buffer in host memory the name and purpose of another of its size."""
        self.ledger.strike(buffer.name)
        self.views.pop(buffer.name, None)
        del self.buffers[buffer.name]
        self._memory[after.name], self.buffers[after.name] = self._memory.pop(buffer.name), after
        self.ledger.enter(after)


class LeasedBuffers:
    """In the block, the arena buffers that an op declares. A class, since a generator costs three times the calls of
    functions, for each op."""

    __slots__ = ("_lent", "_op", "_pool")

    def __init__(self, pool: Pool, op: Op) -> None:
        self._pool, self._op = pool, op

    def __enter__(self) -> Lease:
        pool, op = self._pool, self._op
        with pool._lock:
            if pool._absent:
                for name in {access.buffer for access in op.writes} & pool._absent:
                    pool._bring_back(name)
            self._lent = lent = pool.device.lend(op, pool._memory)
            lease = lent if type(lent) is LentBuffers else lent.__enter__()
            pool._leases += 1
        return {**lease, **LentBuffers(op, pool._of_peers)} if pool._of_peers else lease

    def __exit__(self, *failure: Any) -> None:
        try:
            if type(self._lent) is not LentBuffers:
                self._lent.__exit__(*failure)
        finally:
            with self._pool._lock:
                self._pool._leases -= 1


class UnsavedState:
    """What a failed step may have left where the next would not look for it.

    An update leaves state in a staging buffer until its WRITE succeeds, and in a slot on the device until an op has
    copied it home.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._staged: dict[tuple[str, int], Bytes] = {}
        """(region of the disk, first byte there) -> unsaved bytes in a staging buffer."""
        self._in_slots: dict[str, Op] = {}
        """Slot on the device -> the op that copies home the state that an update changed in it."""

    def changed(self, op: Op, lease: Lease, homewards: Op | None = None) -> None:
        """An UPDATE has changed what it writes to staging buffers, or to a slot of which the op `homewards` takes what
        it reads home."""
        if homewards is not None and homewards.kind != "WRITE":
            self._in_slots[homewards.reads[0].buffer] = homewards
            return
        for here, home in zip(homewards.reads, homewards.writes, strict=True) if homewards is not None else ():
            self.keep(home.buffer, lease[here.buffer][here.start : here.stop].numpy(), home.start)
        for access in op.writes:
            buffer = self._pool.buffers[access.buffer]
            if buffer.use is Use.DISK_STAGING and buffer.part and access.content != USED:
                region = state_name("disk", buffer.part, op.unit)
                stop = min(access.stop, self._pool.buffers[region].cuts[-1])  # frozen weights follow
                self.keep(region, lease[access.buffer][access.start : stop].numpy(), access.start)

    def keep(self, region: str, memory: Bytes, start: int) -> None:
        """These bytes of a region of the disk are only in `memory` until they are written."""
        self._staged[region, start] = memory

    def forget(self, region: str) -> None:
        """The region is no longer needed."""
        self._staged = {at: memory for at, memory in self._staged.items() if at[0] != region}

    def write(self, ranges: Sequence[tuple[str, Bytes, int]]) -> None:
        """Write (region of the disk, memory, first byte there) together. Raises `DiskError`; what was unsaved then
        stays so."""
        self._pool.disk.write_together(ranges)
        for region, memory, start in ranges:
            for name, first in list(self._staged):
                if name == region and start <= first < start + memory.nbytes:
                    self._staged.pop((name, first), None)

    def overwritten(self, op: Op) -> None:
        """The slots that the op writes have been copied home, since the op waited for that."""
        for access in op.writes:
            self._in_slots.pop(access.buffer, None)

    def slots_are_home(self) -> None:
        """All ops of a schedule have succeeded."""
        self._in_slots.clear()

    def save(self) -> None:
        """Write all of it. Raises `DiskError`; what is still unsaved stays so."""
        for slot, op in list(self._in_slots.items()):
            self._pool.run(op, partial(_copy_as, op), op.stream)
            del self._in_slots[slot]
        for (region, start), memory in list(self._staged.items()):
            self.write([(region, memory, start)])


def _copy_as(op: Op, lease: Lease) -> None:
    for read, write in zip(op.reads, op.writes, strict=True):
        lease[write.buffer][write.start : write.stop].copy_(lease[read.buffer][read.start : read.stop])
