"""Inserts copies through staging buffers for contents that are one tier further away than where ops use them.

The builder writes ops as if everything were where it is used, with placeholder names. `stage` walks them in
program order and gives each name a buffer when needed: the one whose content is needed again last (Belady, 1966), or
for shards the one unused longest. A copy in is placed as early as its buffer allows, but after the last write of its
source, so its stream runs as far ahead as there are buffers; a copy out comes right after the op that changed the
bytes, so reusing a buffer loses nothing. Waits follow from declared ranges, as for every op. State on the disk goes
through host memory by READ and WRITE; offloaded activations go through the device by RELOAD and OFFLOAD (`recompute`).
The policy sets the number of buffers; `memory.disk` does the I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.schedule.contents import USED, Content
from megatrain.schedule.ops import Access, Kind, Op, Stream


@dataclass(frozen=True, slots=True)
class Route:
    """Kind and stream of copies in, and of copies out."""

    inward: tuple[Kind, Stream]
    outward: tuple[Kind, Stream]


DISK = Route(("READ", "read"), ("WRITE", "write"))


@dataclass(frozen=True, slots=True)
class Staged:
    """A staged content: its region, its bytes, its content before the step, and its buffers."""

    unit: int
    region: str
    nbytes: int
    content: Content
    slots: tuple[str, ...]
    micro: int = -1
    route: Route = DISK
    frozen_nbytes: int = 0
    """Bytes at the end that no op changes, and that copies out omit."""
    shard: int = -1
    sources: tuple[Access, ...] = ()
    """Its consecutive sources, if it has several; then no op changes it here."""
    copies_each: bool = False
    """Whether every change is copied out, not only the last of several in a row: its slot may change in between."""


def stage(ops: Sequence[Op], staged: Mapping[str, Staged]) -> list[Op]:
    """Redirect every access of a name in `staged` to one of its buffers, and insert the necessary copies.

    All names of one call use one route.
    """
    return _Staging(ops, staged).ops() if staged else list(ops)


class _Staging:
    def __init__(self, ops: Sequence[Op], staged: Mapping[str, Staged]) -> None:
        self._ops, self._staged = ops, staged
        self._uses: dict[str, list[int]] = defaultdict(list)
        self._changes: dict[str, set[int]] = defaultdict(set)
        """Name -> indices of the ops that write it."""
        self._names = self._staged_names()
        """For each op, the staged names that it mentions, in order and without duplicates."""
        for index, op in enumerate(ops):
            for name in self._names[index]:
                self._uses[name].append(index)
            for access in op.writes if self._names[index] else ():
                self._changes[access.buffer].add(index)
        self._content = {name: part.content for name, part in staged.items()}
        self._holds: dict[str, str] = {}
        """Buffer -> the name whose bytes it holds."""
        self._where: dict[str, str] = {}
        """The reverse: name -> buffer."""
        self._last_use: dict[str, int] = {}
        self._last_write: dict[str, int] = {}
        self._last_copy_out = -1
        """The last of those that are among the ops."""
        self._earliest = 0
        self._before: dict[int, list[Op]] = defaultdict(list)
        self._after: dict[int, list[Op]] = defaultdict(list)

    def ops(self) -> list[Op]:
        placed: list[Op] = []
        for index, op in enumerate(self._ops):
            for access in op.writes:
                self._last_write[access.buffer] = index
            self._last_copy_out = index if op.kind == DISK.outward[0] else self._last_copy_out
            placed.append(self._place(index, op) if self._names[index] else op)
        ordered: list[Op] = []
        for index, op in enumerate(placed):
            ordered += self._before[index]
            ordered.append(op)
            ordered += self._after[index]
        return ordered

    def _staged_names(self) -> list[list[str]]:
        staged, names_of_ops = self._staged, list[list[str]]()
        for op in self._ops:
            names: list[str] = []
            for access in (*op.reads, *op.writes):
                if access.buffer in staged and access.buffer not in names:
                    names.append(access.buffer)
            names_of_ops.append(names)
        return names_of_ops

    def _place(self, index: int, op: Op) -> Op:
        names = self._names[index]
        slots = {name: self._where[name] for name in names if name in self._where}
        read = {access.buffer for access in op.reads}
        for name in names:
            if name not in slots:
                slots[name] = slot = self._choose(index, name, in_use=set(slots.values()))
                if name in read:  # otherwise this op gives it its first content
                    self._before[self._earliest].append(self._copy(name, slot, inward=True))
        for slot in slots.values():
            self._last_use[slot] = index
        for access in op.writes:
            if access.buffer in slots:
                self._content[access.buffer] = access.content
                if access.content != USED and self._is_whole(access.buffer, index):
                    self._after[index].append(self._copy(access.buffer, slots[access.buffer], inward=False))
        reads, writes = (
            tuple([Access(slots[access[0]], *access[1:]) if access[0] in slots else access for access in accesses])
            for accesses in (op.reads, op.writes)
        )
        return Op(op.kind, op.stream, op.unit, op.micro, op.shard, reads, writes, op.share)

    def _is_whole(self, name: str, now: int) -> bool:
        """Whether the op at `now` is the last in a run of ops that write the name, or all of them are copied out."""
        if self._staged[name].copies_each:
            return True
        uses = self._uses[name]
        following = bisect_right(uses, now)
        return following == len(uses) or uses[following] not in self._changes[name]

    def _choose(self, index: int, name: str, in_use: set[str]) -> str:
        """A buffer for `name` from op `index` on; sets `_earliest` to where it may be filled."""
        free = [slot for slot in self._staged[name].slots if slot not in in_use]
        slot = max(free, key=lambda slot: (self._next_use(slot, index), -self._last_use.get(slot, -1)))
        places = [self._staged[name].region, *(source.buffer for source in self._staged[name].sources)]
        written = max(self._last_write.get(place, -1) for place in places)  # by an op that is already placed
        behind = max(written, self._last_copy_out) if written >= 0 else -1  # or it would hold up what need not wait
        self._earliest = max(self._earliest, self._last_use.get(slot, -1) + 1, behind + 1)
        self._where.pop(self._holds.get(slot, name), None)
        self._holds[slot], self._where[name] = name, slot
        return slot

    def _copy(self, name: str, slot: str, *, inward: bool) -> Op:
        part = self._staged[name]
        nbytes = part.nbytes if inward else part.nbytes - part.frozen_nbytes
        outside = Access(part.region, 0, nbytes, self._content[name])
        here = Access(slot, 0, nbytes, self._content[name])
        kind, stream = part.route.inward if inward else part.route.outward
        if inward:
            return Op(kind, stream, part.unit, part.micro, part.shard, reads=part.sources or (outside,), writes=(here,))
        return Op(kind, stream, part.unit, part.micro, part.shard, reads=(here,), writes=(outside,))

    def _next_use(self, slot: str, now: int) -> float:
        """The next op that needs the buffer's content; infinite if there is none, and for shards.

        All passes use the shards of a unit in the same order. Keeping those that the next pass needs first would leave
        one buffer for all others, and copies into it and out of it would take turns.
        """
        held = self._holds.get(slot)
        uses = self._uses[held] if held is not None and self._staged[held].shard < 0 else []
        following = bisect_right(uses, now)
        return uses[following] if following < len(uses) else float("inf")
