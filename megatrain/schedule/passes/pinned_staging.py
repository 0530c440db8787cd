"""What may not be page-locked whole crosses the bus through a few page-locked buffers: slabs.

A driver copies memory that is not page-locked through a buffer of its own, and holds up whoever asked. Where the system
lets a process lock less than its weights and gradients take, they stay pageable: a host thread packs each shard into a
slab, from which it is copied to the device; a shard of a gradient is copied into a slab, and unpacked from there. What
lives on the disk passes through staging buffers, and a gradient that is used as it lands through a ring; both are few,
are page-locked themselves, and need no slab. PACK and UNPACK are ops like any others, put in by `disk_staging`, each
way on a stream of its own. It leaves out which way is taken (the policy, chosen by `plan.refinements`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatrain.schedule.ops import Access, Buffer
from megatrain.schedule.passes.disk_staging import Route, Staged
from megatrain.spec import Policy, Transit

SLABS = Route(("PACK", "pack"), ("UNPACK", "unpack"))
HOST_ONLY = {"low", "moments", "norms", "checkpoint"}
"""Parts that only the optimizer uses, in host memory, and what a save makes there."""
WHOLE = {"hi", "grad"}
"""Parts that have a buffer for each unit, whatever their number."""


def is_locked(name: str, transit: Transit) -> bool:
    """Whether the buffer of that name is page-locked: host memory that copies to or from the device touch."""
    tier, part, *rest = name.split("/")
    if tier != "host" or transit == "pageable" or not HOST_ONLY.isdisjoint((part, *rest)):
        return False
    return transit == "locked" or not (part in WHOLE and rest[0].isdigit())


def locked_nbytes(buffers: Iterable[Buffer], transit: Transit) -> int:
    """Bytes of host memory that a schedule with these buffers page-locks."""
    return sum(buffer.nbytes for buffer in buffers if buffer.arena and is_locked(buffer.name, transit))


class Slabs:
    """The slabs of one schedule. Enters them into `buffers`; what passes through them is in `staged`."""

    def __init__(self, policy: Policy, buffers: dict[str, Buffer], elsewhere: Mapping[str, Staged]) -> None:
        self._policy, self._buffers, self._elsewhere = policy, buffers, elsewhere
        self.staged: dict[str, Staged] = {}

    def at(self, stream: str, unit: int, shard: int, home: Access) -> Access:
        """Where a copy on `stream` finds or leaves what is to be in `home`: there, or in a slab.

        `elsewhere` names what is no memory but stands for a region of the disk.
        """
        pageable = home.buffer.startswith("host/") and not is_locked(home.buffer, "slabs")
        if self._policy.transit != "slabs" or home.buffer in self._elsewhere or not pageable:
            return home
        nbytes = home.stop - home.start
        slots = tuple(f"host/slab/{stream}{k}" for k in range(self._policy.slabs))
        for slot in slots:
            known = self._buffers.get(slot)
            self._buffers[slot] = Buffer(slot, "host", max(nbytes, known.nbytes if known else 0), "slabs")
        name = f"slab/{home.buffer.removeprefix('host/')}/{shard}"
        self.staged[name] = Staged(
            unit, home.buffer, nbytes, home.content, slots, route=SLABS, start=home.start, shard=shard
        )
        return Access(name, 0, nbytes, home.content)
