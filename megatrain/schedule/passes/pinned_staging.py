"""Pinned staging buffers: how weights and gradients are copied to and from host memory that is not pinned.

A driver copies pageable memory through a buffer of its own, and blocks the caller. If a process may lock less
memory than its weights and gradients take, they stay pageable: a host thread packs each shard into a pinned
buffer, from which it is copied to the device; a gradient shard is copied into one, and unpacked from there. Gradients
on the disk, and those that are used as they land, pass through buffers of their own, which are pinned instead.
Weights on the disk or in files are read into such a buffer, shard by shard, even if all memory may be pinned.
PACK and UNPACK are ordinary ops inserted by `disk_staging`, each direction on its own stream. The policy says
whether this is used (`plan.refinements`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatrain.schedule.contents import Gradient
from megatrain.schedule.ops import Access, Buffer, Use, declare
from megatrain.schedule.passes.disk_staging import Route, Staged
from megatrain.schedule.passes.state_buffers import weight_staging_names
from megatrain.spec import Policy, Transfer

PACKING = Route(("PACK", "pack"), ("UNPACK", "unpack"))


def is_pinned(buffer: Buffer, transfer: Transfer) -> bool:
    """Whether a buffer is page-locked: host memory that copies to or from the device use."""
    crosses = buffer.tier == "host" and buffer.crosses
    return crosses and (transfer == "pinned" or (transfer == "staged" and buffer.unit is None))


def pinned_nbytes(buffers: Iterable[Buffer], transfer: Transfer) -> int:
    """Bytes of host memory that a schedule with these buffers page-locks."""
    return sum(buffer.nbytes for buffer in buffers if buffer.arena and is_pinned(buffer, transfer))


class PinnedStaging:
    """The pinned staging buffers of one schedule, added to `buffers`.

    on_disk: state on the disk that passes through buffers of its own, which are pinned; on_drive: as in `StateBuffers`.
    `staged` is what passes through from host memory or to it, `from_drive` what does so from the disk or from files.
    """

    def __init__(
        self,
        policy: Policy,
        buffers: dict[str, Buffer],
        on_disk: Mapping[str, Staged],
        on_drive: Mapping[str, Sequence[Access]],
    ) -> None:
        self._policy, self._buffers, self._on_disk, self._on_drive = policy, buffers, on_disk, on_drive
        self.staged: dict[str, Staged] = {}
        self.from_drive: dict[str, Staged] = {}

    def at(self, stream: str, unit: int, shard: int, home: Access) -> Access:
        """Where a copy on `stream` reads or writes what belongs in `home`: there, or in a staging buffer."""
        if sources := self._sources(home):
            return self._from_drive(unit, shard, home, sources)
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
            name += f"~{home.content.terms}"  # different in each round
        self.staged[name] = Staged(
            unit, home.buffer, nbytes, home.content, slots, route=PACKING, start=home.start, shard=shard
        )
        return Access(name, 0, nbytes, home.content)

    def _sources(self, home: Access) -> tuple[Access, ...]:
        """The sources of weights of which at least the last ones are on a drive; empty for weights in host memory."""
        sources, start = [], 0
        for source in self._on_drive.get(home.buffer, ()):
            first, last = max(home.start, start), min(home.stop, start + source.stop)
            if first < last:
                sources.append(source._replace(start=first - start, stop=last - start))
            start += source.stop
        return tuple(sources) if sources and sources[-1].buffer != home.buffer else ()

    def _from_drive(self, unit: int, shard: int, home: Access, sources: tuple[Access, ...]) -> Access:
        nbytes, slots = home.stop - home.start, weight_staging_names(self._policy)
        name, region = f"{home.buffer}/shard{shard}", sources[-1].buffer
        staged = Staged(unit, region, nbytes, home.content, slots, shard=shard, sources=sources)
        self.from_drive[name] = staged
        return Access(name, 0, nbytes, home.content)
