"""Pinned staging buffers: how weights and gradients are copied to and from host memory that is not pinned.

A driver copies memory that is not page-locked through a buffer of its own, and holds up whoever asked. Where the system
lets a process lock less than its weights and gradients take, they stay pageable: a host thread packs each shard into a
pinned buffer, from which it is copied to the device; a shard of a gradient is copied into one, and unpacked from there.
What lives on the disk passes through buffers of its own, and a gradient that is used as it lands through a few; those
are pinned themselves. PACK and UNPACK are ops like any others, put in by `disk_staging`, each way on a stream of its
own. Left out: which way is taken (the policy, chosen by `plan.refinements`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatrain.schedule.contents import Gradient
from megatrain.schedule.ops import Access, Buffer, Use, declare
from megatrain.schedule.passes.disk_staging import Route, Staged
from megatrain.schedule.passes.state_buffers import file_staging_names
from megatrain.spec import Part, Policy, Transfer

PACKING = Route(("PACK", "pack"), ("UNPACK", "unpack"))


def is_pinned(buffer: Buffer, transfer: Transfer) -> bool:
    """Whether a buffer is page-locked: host memory that copies to or from the device touch."""
    crosses = buffer.tier == "host" and buffer.crosses
    return crosses and (transfer == "pinned" or (transfer == "staged" and buffer.unit is None))


def pinned_nbytes(buffers: Iterable[Buffer], transfer: Transfer) -> int:
    """Bytes of host memory that a schedule with these buffers page-locks."""
    return sum(buffer.nbytes for buffer in buffers if buffer.arena and is_pinned(buffer, transfer))


class PinnedStaging:
    """The pinned staging buffers of one schedule. Enters them into `buffers`; what passes through is in `staged`, and
    in `from_files` what does on its way from the model's files."""

    def __init__(
        self,
        policy: Policy,
        buffers: dict[str, Buffer],
        on_disk: Mapping[str, Staged],
        in_files: Mapping[str, Sequence[Access]],
    ) -> None:
        self._policy, self._buffers, self._on_disk, self._in_files = policy, buffers, on_disk, in_files
        self.staged: dict[str, Staged] = {}
        self.from_files: dict[str, Staged] = {}

    def at(self, stream: str, unit: int, shard: int, home: Access) -> Access:
        """Where a copy on `stream` finds or leaves what is to be in `home`: there, or in a staging buffer."""
        if sources := self._sources(home):
            return self._from_file(unit, shard, home, sources)
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

    def _sources(self, home: Access) -> tuple[Access, ...]:
        """Where weights are of which the last ones at least lie in a file; nothing for what is in host memory."""
        found, start = [], 0
        for source in self._in_files.get(home.buffer, ()):
            first, last = max(home.start, start), min(home.stop, start + source.stop)
            if first < last:
                found.append(source._replace(start=first - start, stop=last - start))
            start += source.stop
        return tuple(found) if found and found[-1].buffer != home.buffer else ()

    def _from_file(self, unit: int, shard: int, home: Access, sources: tuple[Access, ...]) -> Access:
        nbytes, slots = home.stop - home.start, file_staging_names(self._policy)
        for slot in slots:
            declare(self._buffers, Buffer(slot, "host", nbytes, Use.DISK_STAGING, part=Part.WEIGHTS))
        name, region = f"{home.buffer}/shard{shard}", sources[-1].buffer
        staged = Staged(unit, region, nbytes, home.content, slots, shard=shard, sources=sources)
        self.from_files[name] = staged
        return Access(name, 0, nbytes, home.content)
