"""Pinned staging buffers: how weights and gradients are copied to and from host memory that is not pinned.

A driver copies memory that is not page-locked through a buffer of its own, and holds up whoever asked. Where the system
lets a process lock less than its weights and gradients take, they stay pageable: a host thread packs each shard into a
pinned buffer, from which it is copied to the device; a shard of a gradient is copied into one, and unpacked from there.
What lives on the disk passes through buffers of its own, and a gradient that is used as it lands through a few; those
are pinned themselves. PACK and UNPACK are ops like any others, put in by `disk_staging`, each way on a stream of its
own. Left out: which way is taken (the policy, chosen by `plan.refinements`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatrain.schedule.contents import Gradient
from megatrain.schedule.ops import Access, Buffer, Use, declare
from megatrain.schedule.passes.disk_staging import Route, Staged
from megatrain.spec import Policy, Transfer

PACKING = Route(("PACK", "pack"), ("UNPACK", "unpack"))


def is_pinned(buffer: Buffer, transfer: Transfer) -> bool:
    """Whether a buffer is page-locked: host memory that copies to or from the device touch."""
    crosses = buffer.tier == "host" and buffer.crosses
    return crosses and (transfer == "pinned" or (transfer == "staged" and buffer.unit is None))


def pinned_nbytes(buffers: Iterable[Buffer], transfer: Transfer) -> int:
    """Bytes of host memory that a schedule with these buffers page-locks."""
    return sum(buffer.nbytes for buffer in buffers if buffer.arena and is_pinned(buffer, transfer))


class PinnedStaging:
    """The pinned staging buffers of one schedule. Enters them into `buffers`; what passes through is in `staged`."""

    def __init__(self, policy: Policy, buffers: dict[str, Buffer], on_disk: Mapping[str, Staged]) -> None:
        self._policy, self._buffers, self._on_disk = policy, buffers, on_disk
        self.staged: dict[str, Staged] = {}

    def at(self, stream: str, unit: int, shard: int, home: Access) -> Access:
        """Where a copy on `stream` finds or leaves what is to be in `home`: there, or in a staging buffer."""
        if self._policy.transfer != "staged" or home.buffer in self._on_disk:
            return home
        buffer = self._buffers[home.buffer]
        if buffer.tier != "host" or is_pinned(buffer, "staged"):
            return home
        nbytes = home.stop - home.start
        slots = tuple(f"host/pinned_staging/{stream}{number}" for number in range(self._policy.pinned_staging_slots))
        for slot in slots:
            declare(self._buffers, Buffer(slot, "host", nbytes, Use.PINNED_STAGING))
        name = f"{home.buffer}/shard{shard}"
        if isinstance(home.content, Gradient) and home.content.terms is not None:
            name += f"~{home.content.terms}"  # of each round another
        self.staged[name] = Staged(
            unit, home.buffer, nbytes, home.content, slots, route=PACKING, start=home.start, shard=shard
        )
        return Access(name, 0, nbytes, home.content)
