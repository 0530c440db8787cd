"""What lives a tier further away passes through buffers: copies there and back, put into a schedule that lacks them.

The builder writes ops as if everything lay where it is used, under names that stand for no memory. `stage` walks them
in program order and gives each such name a buffer when it is needed: of several, the one whose content is needed again
last (Belady 1966). A copy in stands as early as its buffer allows, but behind what writes its source, so its stream
runs as far ahead as there are buffers; a copy out stands right behind the op that changed the bytes, so a buffer that
is taken over has nothing to lose. What must wait for what follows from the declared ranges, as for every op. State on
the disk passes through host memory by READ and WRITE; offloaded inputs of layers pass through the device by RELOAD and
OFFLOAD (`recompute`); shards of pageable memory pass through page-locked memory by PACK and UNPACK (`pinned_staging`).
It leaves out how many buffers there are (the policy) and how bytes get to the disk (`memory.disk`).
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
    """The kind and the stream of copies in, and of copies out."""

    inward: tuple[Kind, Stream]
    outward: tuple[Kind, Stream]


DISK = Route(("READ", "read"), ("WRITE", "write"))


@dataclass(frozen=True, slots=True)
class Staged:
    """What is kept elsewhere: its region there, its bytes, what they are before the step, and the buffers for them."""

    unit: int
    region: str
    nbytes: int
    content: Content
    slots: tuple[str, ...]
    micro: int = -1
    route: Route = DISK
    start: int = 0
    """Where they begin in the region."""
    frozen_nbytes: int = 0
    """Of them, at the end: no op changes those, and copies out leave them where they are."""
    shard: int = -1
    sources: tuple[Access, ...] = ()
    """Where they are, one behind the other, if that is in several places; then no op changes them here."""


def stage(ops: Sequence[Op], staged: Mapping[str, Staged]) -> list[Op]:
    """`ops` with every access of a name in `staged` led to one of its buffers, and copies where they are needed.

    The names of one call take one route.
    """
    return _Staging(ops, staged).ops() if staged else list(ops)


class _Staging:
    def __init__(self, ops: Sequence[Op], staged: Mapping[str, Staged]) -> None:
        self._ops, self._staged = ops, staged
        self._uses: dict[str, list[int]] = defaultdict(list)
        self._changes: dict[str, set[int]] = defaultdict(set)
        """Name -> the ops that write it."""
        self._names = [self._names_of(op) for op in ops]
        """Of each op, those that are staged, each once, in the order in which it mentions them."""
        for index, op in enumerate(ops):
            for name in self._names[index]:
                self._uses[name].append(index)
            for access in op.writes if self._names[index] else ():
                self._changes[access.buffer].add(index)
        self._content = {name: part.content for name, part in staged.items()}
        self._holds: dict[str, str] = {}
        """Buffer -> the name whose bytes it has."""
        self._last_use: dict[str, int] = {}
        self._last_write: dict[str, int] = {}
        self._earliest = 0
        self._before: dict[int, list[Op]] = defaultdict(list)
        self._after: dict[int, list[Op]] = defaultdict(list)

    def ops(self) -> list[Op]:
        placed = [self._place(index, op) for index, op in enumerate(self._ops)]
        return [op for i, each in enumerate(placed) for op in (*self._before[i], each, *self._after[i])]

    def _names_of(self, op: Op) -> list[str]:
        staged = self._staged
        names = [access.buffer for access in op.reads if access.buffer in staged]
        names += [access.buffer for access in op.writes if access.buffer in staged]
        return list(dict.fromkeys(names)) if len(names) > 1 else names

    def _place(self, index: int, op: Op) -> Op:
        for access in op.writes:
            self._last_write[access.buffer] = index
        names = self._names[index]
        if not names:
            return op
        slots = {name: slot for slot, name in self._holds.items() if name in names}
        read = {access.buffer for access in op.reads}
        for name in names:
            if name not in slots:
                slots[name] = slot = self._choose(index, name, taken=set(slots.values()))
                if name in read:  # else its first content comes with this op
                    self._before[self._earliest].append(self._copy(name, slot, inward=True))
        for slot in slots.values():
            self._last_use[slot] = index
        for access in op.writes:
            if access.buffer in slots:
                self._content[access.buffer] = access.content
                if access.content != USED and self._is_whole(access.buffer, index):
                    self._after[index].append(self._copy(access.buffer, slots[access.buffer], inward=False))
        reads, writes = ([self._led(access, slots) for access in side] for side in (op.reads, op.writes))
        return op._replace(reads=tuple(reads), writes=tuple(writes))

    def _is_whole(self, name: str, now: int) -> bool:
        """Whether the op at `now` is the last of those that write the name one after the other."""
        uses = self._uses[name]
        following = bisect_right(uses, now)
        return following == len(uses) or uses[following] not in self._changes[name]

    def _choose(self, index: int, name: str, taken: set[str]) -> str:
        """A buffer for `name` from the op at `index` on; `_earliest` is then where it may be filled."""
        free = [slot for slot in self._staged[name].slots if slot not in taken]
        slot = max(free, key=lambda slot: (self._next_use(slot, index), -self._last_use.get(slot, -1)))
        places = [self._staged[name].region, *(source.buffer for source in self._staged[name].sources)]
        written = max(self._last_write.get(place, -1) for place in places)  # by an op that is here already
        self._earliest = max(self._earliest, self._last_use.get(slot, -1) + 1, written + 1)
        self._holds[slot] = name
        return slot

    def _copy(self, name: str, slot: str, *, inward: bool) -> Op:
        part = self._staged[name]
        nbytes = part.nbytes if inward else part.nbytes - part.frozen_nbytes
        there = Access(part.region, part.start, part.start + nbytes, self._content[name])
        here = Access(slot, 0, nbytes, self._content[name])
        kind, stream = part.route.inward if inward else part.route.outward
        if inward:
            return Op(kind, stream, part.unit, part.micro, part.shard, reads=part.sources or (there,), writes=(here,))
        return Op(kind, stream, part.unit, part.micro, part.shard, reads=(here,), writes=(there,))

    def _next_use(self, slot: str, now: int) -> float:
        """The next op that needs what the buffer holds; infinite for nothing, and for what is done with."""
        uses = self._uses[self._holds[slot]] if slot in self._holds else []
        following = bisect_right(uses, now)
        return uses[following] if following < len(uses) else float("inf")

    def _led(self, access: Access, slots: Mapping[str, str]) -> Access:
        return access._replace(buffer=slots[access.buffer]) if access.buffer in slots else access
