"""Waits between streams, derived from what ops read and write.

Two accesses of overlapping bytes conflict when at least one writes. A conflict between streams needs a wait unless
one already follows from the order inside a stream or from other waits. Each op carries a vector clock (per stream:
the last op known to be finished before it starts; Lamport 1978, Mattern 1989), and a wait is emitted only when the
clock does not cover it, latest first, so no wait is redundant: removing any one of them leaves a race.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatrain.schedule.ops import Op, Schedule

Clock = dict[str, int]
"""Stream -> index of the last op of that stream known to have finished; absent means none."""


@dataclass(slots=True)
class _Record:
    start: int
    stop: int
    index: int
    stream: str
    writes: bool


class Conflicts:
    """Remembers who touched which bytes, and tells with whom a new op conflicts."""

    def __init__(self) -> None:
        self._records: dict[str, list[_Record]] = defaultdict(list)

    def before(self, op: Op) -> set[int]:
        """Indices of earlier ops whose accesses conflict with those of `op`."""
        found: set[int] = set()
        for accesses, writes in ((op.reads, False), (op.writes, True)):
            for access in accesses:
                start, stop = access.start, access.stop
                for record in self._records[access.buffer]:
                    if (writes or record.writes) and record.start < stop and start < record.stop:
                        found.add(record.index)
        return found

    def add(self, index: int, op: Op) -> None:
        """Record the accesses of `op`. A write hides what it covers: its own conflicts order it after those.

        A read hides earlier reads of its own stream that it covers: whoever follows it follows them too.
        """
        for access in op.writes:
            start, stop = access.start, access.stop
            kept = [r for r in self._records[access.buffer] if r.start < start or stop < r.stop]
            kept.append(_Record(start, stop, index, op.stream, True))
            self._records[access.buffer] = kept
        for access in op.reads:
            start, stop, stream = access.start, access.stop, op.stream
            kept = [
                r
                for r in self._records[access.buffer]
                if r.writes or r.stream != stream or r.start < start or stop < r.stop
            ]
            kept.append(_Record(start, stop, index, stream, False))
            self._records[access.buffer] = kept


def conflicts(ops: Sequence[Op]) -> list[set[int]]:
    """For each op the earlier ops it must follow, on whatever stream.

    Enough of them, with the order inside streams, to imply all others.
    """
    seen = Conflicts()
    result = []
    for index, op in enumerate(ops):
        result.append(seen.before(op))
        seen.add(index, op)
    return result


def derive_waits(schedule: Schedule) -> Schedule:
    """The same schedule with `waits` filled in."""
    ops = schedule.ops
    clocks: list[Clock] = []
    last_of_stream: dict[str, int] = {}
    waits: list[tuple[int, ...]] = []
    for index, needed in enumerate(conflicts(ops)):
        stream = ops[index].stream
        clock: Clock = {}
        previous = last_of_stream.get(stream)
        if previous is not None:
            join(clock, clocks[previous])
            clock[stream] = previous
        chosen = []
        for earlier in sorted(needed, reverse=True):
            if clock.get(ops[earlier].stream, -1) < earlier:
                chosen.append(earlier)
                join(clock, clocks[earlier])
                clock[ops[earlier].stream] = earlier
        clocks.append(clock)
        waits.append(tuple(sorted(chosen)))
        last_of_stream[stream] = index
    return replace(schedule, waits=tuple(waits))


def join(clock: Clock, other: Clock) -> None:
    """Make `clock` cover everything that `other` covers."""
    for stream, index in other.items():
        if clock.get(stream, -1) < index:
            clock[stream] = index


def unordered(schedule: Schedule) -> Iterable[tuple[int, int]]:
    """Pairs (earlier, later) of conflicting ops that the waits of this schedule leave without an order."""
    clocks: list[Clock] = []
    last_of_stream: dict[str, int] = {}
    for index, needed in enumerate(conflicts(schedule.ops)):
        stream = schedule.ops[index].stream
        clock: Clock = {}
        for earlier in (*schedule.waits[index], last_of_stream.get(stream, -1)):
            if earlier >= 0:
                join(clock, clocks[earlier])
                earlier_stream = schedule.ops[earlier].stream
                clock[earlier_stream] = max(clock.get(earlier_stream, -1), earlier)
        clocks.append(clock)
        last_of_stream[stream] = index
        for earlier in sorted(needed):
            if clock.get(schedule.ops[earlier].stream, -1) < earlier:
                yield earlier, index
