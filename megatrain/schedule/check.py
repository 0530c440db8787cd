"""Proves a schedule correct before it runs.

`check` walks the ops in order and tracks the content of every byte. It proves that

* every read finds the content that it expects: written, and not overwritten since;
* every gradient leaves once: each byte reaches its home exactly once, and is used by at most one update;
* every sum of gradients of a side value is read by the next unit that adds to it, or by the one that takes it;
* every direction of matrices is used, and every update is complete: a step leaves no part of a unit's state in two
  versions;
* the waits order every conflicting pair of ops, whatever the streams do;
* no backward pass runs between the phases of another: on a GPU autograd has one thread per device, which would be
  inside the other pass;
* no tier exceeds its capacity.

A violation raises `ScheduleError`, printing the ops around the offending one, which is marked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

from megatrain.errors import ScheduleError
from megatrain.formatting import at_least, at_most
from megatrain.schedule.contents import Content, Direction, Gradient, SideGradient
from megatrain.schedule.deps import unordered
from megatrain.schedule.ops import Access, Op, Schedule, UpdateStep, Use, show_schedule
from megatrain.schedule.passes.phases import calls_in
from megatrain.spec import Tier

BACKWARD = ("LOSS", "BACKWARD")
"""Ops that run a backward pass."""
LEAVING = ("GRAD", "REDUCE", "WRITE")
"""Ops that may move a gradient to its home."""


PASSED = (Use.PARTIAL_GRADIENTS, Use.REDUCED_GRADIENTS, Use.SHARED_GRADIENTS, Use.DISK_STAGING)
"""Uses of buffers through which a gradient passes on its way home."""


def check(schedule: Schedule, capacity: Mapping[Tier, int] | None = None) -> None:
    """Prove the schedule correct, or raise `ScheduleError`. `capacity`: tier -> bytes; missing tiers are
    unlimited."""
    _check_phases(schedule)
    _check_contents(schedule)
    _check_gradients(schedule)
    for earlier, later in unordered(schedule):
        raise _refusal(schedule, later, f"no wait orders this after op {earlier} ({schedule.ops[earlier].name})")
    for tier, nbytes in (capacity or {}).items():
        peak = schedule.peak_nbytes(tier)
        if peak > nbytes:
            raise ScheduleError(
                f"{tier} memory peaks at {at_least(peak)}", where="schedule", fix=f"its capacity is {at_most(nbytes)}"
            )


def _check_phases(schedule: Schedule) -> None:
    for places in calls_in(schedule.ops):
        first = schedule.ops[places[0]]
        for index in range(places[0] + 1, places[-1]) if first.kind in BACKWARD else ():
            if schedule.ops[index].kind in BACKWARD and index not in places:
                raise _refusal(schedule, index, f"goes backward between the phases of {first.name}")


@dataclass(slots=True)
class _Region:
    start: int
    stop: int
    content: Content


class _Contents:
    """The content of every byte of every buffer at one point of the schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._buffers = schedule.buffers
        self._regions: dict[str, list[_Region]] = {
            name: [] if buffer.initial is None else [_Region(0, buffer.nbytes, buffer.initial)]
            for name, buffer in schedule.buffers.items()
        }

    def mismatch(self, read: Access) -> Content | str | None:
        """What a read finds instead of its expected content; `None` if it is right."""
        covered = read.start
        for region in sorted(self._regions[read.buffer], key=lambda r: r.start):
            if region.stop <= read.start or region.start >= read.stop:
                continue
            if region.content != read.content:
                return region.content
            if region.start > covered:
                return "bytes never written"
            covered = max(covered, region.stop)
        return None if covered >= read.stop else "bytes never written"

    def of(self, buffer: str) -> set[Content]:
        """All contents of a buffer."""
        return {region.content for region in self._regions[buffer]}

    def write(self, access: Access) -> None:
        """Frozen bytes after those that steps change take the version of the write that ends there: they are the same
        in each. Adjacent bytes with one content are one region, so a buffer has few."""
        buffer = self._buffers[access.buffer]
        if access.stop == buffer.nbytes - buffer.frozen_nbytes:
            access = access._replace(stop=buffer.nbytes)
        kept = []
        for region in self._regions[access.buffer]:
            if region.content == access.content and region.stop == access.start:
                access = access._replace(start=region.start)
                continue
            if region.start < access.start:
                kept.append(_Region(region.start, min(region.stop, access.start), region.content))
            if region.stop > access.stop:
                kept.append(_Region(max(region.start, access.stop), region.stop, region.content))
        kept.append(_Region(access.start, access.stop, access.content))
        self._regions[access.buffer] = kept


def _check_contents(schedule: Schedule) -> None:
    contents, unread = _Contents(schedule), dict[Content, int]()
    for index, op in enumerate(schedule.ops):
        for access in (*op.reads, *op.writes):
            if access.buffer not in schedule.buffers:
                raise _refusal(schedule, index, f"{access.buffer} is not a buffer of this schedule")
            if not 0 <= access.start < access.stop <= schedule.buffers[access.buffer].nbytes:
                raise _refusal(schedule, index, f"{access.buffer}[{access.start}:{access.stop}] is out of bounds")
        for read in op.reads:
            actual = contents.mismatch(read)
            if actual is not None:
                raise _refusal(schedule, index, f"reads {read.content} from {read.buffer} but finds {actual}")
            unread.pop(read.content, None)
        for write in op.writes:
            contents.write(write)
            if isinstance(write.content, SideGradient | Direction):
                unread[write.content] = index
    for content, index in unread.items():
        raise _refusal(schedule, index, f"writes {content}, which nothing reads")
    for buffer in schedule.buffers.values():
        left = contents.of(buffer.name) if buffer.is_state else set()
        if len(left) > 1:
            what = f"{buffer.name} is left with {' and '.join(sorted(map(str, left)))}"
            raise ScheduleError(what, where="schedule")


def _check_gradients(schedule: Schedule) -> None:
    """Each unit with a backward delivers its whole gradient once, and is normed and updated at most once."""
    ops = schedule.ops
    summed = [access for op in ops if op.stream == "compute" for access in op.writes]
    trained = {
        access.content.unit for access in summed if isinstance(access.content, Gradient) and access.content.is_whole
    }
    for kind in ("NORM", *get_args(UpdateStep)):
        for (unit, piece), count in Counter((op.unit, op.shard) for op in ops if op.kind == kind).items():
            if count > 1:
                what = f"{kind} of unit {unit}{f', piece {piece}' if piece >= 0 else ''}"
                raise _refusal(schedule, _last(ops, kind, unit), f"{what} happens {count} times")
    leaving: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for index, op in enumerate(ops):
        if op.kind in LEAVING and isinstance(op.writes[0].content, Gradient):
            place, start, stop, _ = op.writes[0]
            if schedule.buffers[place].use not in PASSED:
                leaving[op.unit].append((start, stop, index))
    normed = {op.unit for op in ops if op.kind == "NORM"}
    for unit in sorted(trained):
        copied = sorted(leaving[unit])
        for (_, stop, _), (start, _, index) in pairwise(copied):
            if start != stop:
                fault = "twice" if start < stop else "with a gap"
                raise _refusal(schedule, index, f"the gradient of unit {unit} leaves {fault}")
        if unit not in normed:
            raise ScheduleError(f"the gradient of unit {unit} never leaves", where="schedule")
    steps = (op for op in ops if op.kind in ("UPDATE", "MOMENTUM"))
    updated = {op.unit for op in steps if op.reads[0].content == Gradient(op.unit)}
    if updated and updated != trained:
        raise ScheduleError(f"units {sorted(trained - updated)} are trained but not updated", where="schedule")


def _last(ops: tuple[Op, ...], kind: str, unit: int) -> int:
    return max(i for i, op in enumerate(ops) if op.kind == kind and op.unit == unit)


def _refusal(schedule: Schedule, index: int, what: str) -> ScheduleError:
    table = show_schedule(schedule, index - 4, index + 3, {index: what})
    return ScheduleError(f"op {index} ({schedule.ops[index].name}): {what}\n{table}", where="schedule")
