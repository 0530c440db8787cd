"""State that lives on the disk passes through host memory: READ and WRITE ops, put into a schedule that lacks them.

The builder writes ops as if all state lay in host memory, under names that stand for no memory. `stage` walks them in
program order and gives each such name a staging buffer when it is needed: of several, the one whose content is needed
again last (Belady 1966). A READ stands as early as its buffer allows, so the read stream runs as far ahead as there are
buffers; a WRITE stands right behind the op that changed the state, so a buffer that is taken over has nothing to lose.
What must wait for what follows from the declared ranges, as for every op. It leaves out how many buffers there are
(the policy) and how bytes get to the disk (`memory.disk`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatrain.schedule.ops import Access, Op


@dataclass(frozen=True, slots=True)
class Staged:
    """A part of a unit's state on the disk: its region and bytes, what it holds before the step, and its buffers."""

    unit: int
    region: str
    nbytes: int
    content: str
    slots: tuple[str, ...]


def stage(ops: Sequence[Op], staged: Mapping[str, Staged]) -> list[Op]:
    """`ops` with every access of a name in `staged` led to a staging buffer, and READ and WRITE ops where needed."""
    return _Staging(ops, staged).ops() if staged else list(ops)


class _Staging:
    def __init__(self, ops: Sequence[Op], staged: Mapping[str, Staged]) -> None:
        self._ops, self._staged = ops, staged
        self._uses: dict[str, list[int]] = defaultdict(list)
        for index, op in enumerate(ops):
            for name in self._names(op):
                self._uses[name].append(index)
        self._content = {name: part.content for name, part in staged.items()}
        self._holds: dict[str, str] = {}
        """Buffer -> the name whose bytes it has."""
        self._last_use: dict[str, int] = {}
        self._earliest = 0
        self._before: dict[int, list[Op]] = defaultdict(list)
        self._after: dict[int, list[Op]] = defaultdict(list)

    def ops(self) -> list[Op]:
        placed = [self._place(index, op) for index, op in enumerate(self._ops)]
        return [op for i, each in enumerate(placed) for op in (*self._before[i], each, *self._after[i])]

    def _names(self, op: Op) -> list[str]:
        """The staged names of an op, each once, in the order in which it mentions them."""
        return list(dict.fromkeys(a.buffer for a in (*op.reads, *op.writes) if a.buffer in self._staged))

    def _place(self, index: int, op: Op) -> Op:
        names = self._names(op)
        if not names:
            return op
        slots = {name: slot for slot, name in self._holds.items() if name in names}
        for name in names:
            if name not in slots:
                slots[name] = self._read(index, name, taken=set(slots.values()))
        for slot in slots.values():
            self._last_use[slot] = index
        for access in op.writes:
            if access.buffer in slots:
                self._content[access.buffer] = access.content
                self._after[index].append(self._copy("WRITE", access.buffer, slots[access.buffer]))
        reads, writes = ([self._led(access, slots) for access in side] for side in (op.reads, op.writes))
        return replace(op, reads=tuple(reads), writes=tuple(writes))

    def _read(self, index: int, name: str, taken: set[str]) -> str:
        """Choose a buffer for `name`, and have it filled before the op at `index`, as early as can be."""
        free = [slot for slot in self._staged[name].slots if slot not in taken]
        slot = max(free, key=lambda slot: (self._next_use(slot, index), -self._last_use.get(slot, -1)))
        self._earliest = max(self._earliest, self._last_use.get(slot, -1) + 1)
        self._holds[slot] = name
        self._before[self._earliest].append(self._copy("READ", name, slot))
        return slot

    def _copy(self, kind: str, name: str, slot: str) -> Op:
        part = self._staged[name]
        on_disk = Access(part.region, 0, part.nbytes, self._content[name])
        in_host = Access(slot, 0, part.nbytes, self._content[name])
        if kind == "READ":
            return Op("READ", "read", part.unit, reads=(on_disk,), writes=(in_host,))
        return Op("WRITE", "write", part.unit, reads=(in_host,), writes=(on_disk,))

    def _next_use(self, slot: str, now: int) -> float:
        """The next op that needs what the buffer holds; infinite for nothing, and for what is done with."""
        uses = self._uses[self._holds[slot]] if slot in self._holds else []
        following = bisect_right(uses, now)
        return uses[following] if following < len(uses) else float("inf")

    def _led(self, access: Access, slots: Mapping[str, str]) -> Access:
        return replace(access, buffer=slots[access.buffer]) if access.buffer in slots else access
