"""Pinned staging buffers: how weights on the disk or in files are copied to the device.

Each shard is read into a pinned buffer, by a READ that `disk_staging` inserts, and copied to the device from it.
`is_pinned` says which host memory is page-locked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatrain.schedule.ops import Access, Buffer
from megatrain.schedule.passes.disk_staging import Staged
from megatrain.schedule.passes.state_buffers import weight_staging_names
from megatrain.spec import Policy, Transfer


def is_pinned(buffer: Buffer, transfer: Transfer) -> bool:
    """Whether a buffer is page-locked: host memory that copies to or from the device use."""
    return transfer == "pinned" and buffer.tier == "host" and buffer.crosses


def pinned_nbytes(buffers: Iterable[Buffer], transfer: Transfer) -> int:
    """Bytes of host memory that a schedule with these buffers page-locks."""
    return sum(buffer.nbytes for buffer in buffers if buffer.arena and is_pinned(buffer, transfer))


class PinnedStaging:
    """The pinned staging buffers of one schedule. on_drive: as in `StateBuffers`."""

    def __init__(self, policy: Policy, on_drive: Mapping[str, Sequence[Access]]) -> None:
        self._slots, self._on_drive = weight_staging_names(policy), on_drive
        self.from_drive: dict[str, Staged] = {}
        """Placeholder names for shards of weights from the disk or from files."""

    def at(self, unit: int, shard: int, home: Access) -> Access:
        """Where a copy to the device reads what belongs in `home`: there, or in a staging buffer."""
        if not (sources := self._sources(home)):
            return home
        nbytes, name = home.stop - home.start, f"{home.buffer}/shard{shard}"
        self.from_drive[name] = Staged(
            unit, sources[-1].buffer, nbytes, home.content, self._slots, shard=shard, sources=sources
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
