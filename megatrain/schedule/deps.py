"""Derives the waits between streams from what ops read and write.

Two accesses of overlapping bytes conflict if at least one writes. A conflict between streams needs a wait unless
one already follows from the order within a stream or from other waits. Each op has a vector clock (per stream, the
last op known to be finished before it starts; Lamport 1978, Mattern 1989), and a wait is emitted only if the clock
does not cover it, latest first, so no wait is redundant: removing any one leaves a race.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatrain.schedule.ops import Op, Schedule, Stream

Clock = dict[str, int]
"""Stream -> index of its last op known to have finished; missing means none."""

_Record = tuple[int, int, int, Stream, bool]
"""Bytes [start, stop) touched by an op, with its index and stream, and whether it wrote."""


class Conflicts:
    """Records which op touched which bytes, and finds the conflicts of a new op."""

    def __init__(self) -> None:
        self._records: dict[str, list[_Record]] = defaultdict(list)

    def add(self, index: int, op: Op) -> set[int]:
        """Record the accesses of `op`; returns the indices of earlier ops that conflict with it.

        A write hides what it covers, since its own conflicts order it after that. A read hides earlier covered
        reads of its own stream: whatever follows it follows them too.
        """
        found: set[int] = set()
        stream, known = op.stream, self._records
        for buffer, start, stop, _ in op.reads:
            records = known[buffer]
            hides = False
            for first, last, earlier, of, wrote in [each for each in records if each[0] < stop and start < each[1]]:
                if wrote:
                    found.add(earlier)
                elif of == stream and start <= first and last <= stop:
                    hides = True
            if hides:
                records[:] = [
                    each for each in records if each[4] or each[3] != stream or each[0] < start or stop < each[1]
                ]
            records.append((start, stop, index, stream, False))
        for buffer, start, stop, _ in op.writes:
            records = known[buffer]
            if touched := [each for each in records if each[0] < stop and start < each[1]]:
                found.update([each[2] for each in touched])
                records[:] = [each for each in records if each[0] < start or stop < each[1]]
            records.append((start, stop, index, stream, True))
        found.discard(index)
        return found


def conflicts(ops: Sequence[Op]) -> list[set[int]]:
    """For each op the earlier ops that it must follow, on any stream; together with stream order they imply all
    others."""
    seen = Conflicts()
    return [seen.add(index, op) for index, op in enumerate(ops)]


def derive_waits(schedule: Schedule) -> Schedule:
    """The same schedule with `waits` filled in."""
    streams = [op.stream for op in schedule.ops]
    clocks: list[Clock] = []
    last_of_stream: dict[str, int] = {}
    waits: list[tuple[int, ...]] = []
    for index, needed in enumerate(conflicts(schedule.ops)):
        stream = streams[index]
        previous = last_of_stream.get(stream)
        clock: Clock = {} if previous is None else {**clocks[previous], stream: previous}
        chosen = []
        missing = [earlier for earlier in needed if clock.get(streams[earlier], -1) < earlier]
        for earlier in sorted(missing, reverse=True):
            if clock.get(streams[earlier], -1) < earlier:
                chosen.append(earlier)
                join(clock, clocks[earlier])
                clock[streams[earlier]] = earlier
        clocks.append(clock)
        waits.append(tuple(chosen[::-1]))
        last_of_stream[stream] = index
    return replace(schedule, waits=tuple(waits))


def join(clock: Clock, other: Clock) -> None:
    """Make `clock` cover everything that `other` covers."""
    for stream, index in other.items():
        if clock.get(stream, -1) < index:
            clock[stream] = index


def unordered(schedule: Schedule) -> Iterable[tuple[int, int]]:
    """Pairs (earlier, later) of conflicting ops that this schedule's waits do not order."""
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
