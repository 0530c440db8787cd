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

from megatrain.schedule.ops import STREAMS, Op, Schedule

Clock = list[int]
"""For each of `STREAMS` the index of its last op known to have finished, -1 for none."""

PLACES = {stream: place for place, stream in enumerate(STREAMS)}
"""Stream -> its place in a clock."""

_Record = tuple[int, int, int, int, bool]
"""Bytes [start, stop) touched by an op, with its index, the place of its stream, and whether it wrote."""


class Conflicts:
    """Records which op touched which bytes, and finds the conflicts of a new op."""

    def __init__(self) -> None:
        self._records: dict[str, list[_Record]] = defaultdict(list)

    def add(self, index: int, op: Op) -> list[int]:
        """Record the accesses of `op`; returns for each other stream the last op that conflicts with it, or -1.

        A write hides what it covers, since its own conflicts order it after that. A read hides earlier covered
        reads of its own stream: whatever follows it follows them too.
        """
        last_conflict = [-1] * len(STREAMS)
        place, known = PLACES[op.stream], self._records
        for buffer, start, stop, _ in op.reads:
            records = known[buffer]
            hides = False
            for first, last, earlier, of, wrote in records:
                if first < stop and start < last:
                    if wrote:
                        if last_conflict[of] < earlier:
                            last_conflict[of] = earlier
                    elif of == place and start <= first and last <= stop:
                        hides = True
            if hides:
                records[:] = [
                    record
                    for record in records
                    if record[4] or record[3] != place or record[0] < start or stop < record[1]
                ]
            records.append((start, stop, index, place, False))
        for buffer, start, stop, _ in op.writes:
            records = known[buffer]
            hides = False
            for first, last, earlier, of, _ in records:
                if first < stop and start < last:
                    if last_conflict[of] < earlier:
                        last_conflict[of] = earlier
                    hides = hides or (start <= first and last <= stop)
            if hides:
                records[:] = [record for record in records if record[0] < start or stop < record[1]]
            records.append((start, stop, index, place, True))
        last_conflict[place] = -1
        return last_conflict


def conflicts(ops: Sequence[Op]) -> list[list[int]]:
    """Find, for each op and each other stream, the last op there that it must follow, or -1. Together with the order of
    each stream these imply all others."""
    seen = Conflicts()
    return [seen.add(index, op) for index, op in enumerate(ops)]


def derive_waits(schedule: Schedule) -> Schedule:
    """The same schedule with `waits` filled in."""
    places = [PLACES[op.stream] for op in schedule.ops]
    clocks: list[Clock] = []
    ends: list[Clock] = [[-1] * len(STREAMS) for _ in STREAMS]  # of each stream, once its last op has finished
    waits: list[tuple[int, ...]] = []
    for index, needed in enumerate(conflicts(schedule.ops)):
        clock = ends[places[index]]
        chosen = []
        missing = [earlier for earlier, finished in zip(needed, clock, strict=True) if finished < earlier]
        for earlier in sorted(missing, reverse=True) if len(missing) > 1 else missing:
            if clock[places[earlier]] < earlier:
                chosen.append(earlier)
                clock = joined(clock, clocks[earlier])
                clock[places[earlier]] = earlier
        clocks.append(clock)
        waits.append(tuple(chosen[::-1]))
        ends[places[index]] = clock[:]
        ends[places[index]][places[index]] = index
    return replace(schedule, waits=tuple(waits))


def joined(clock: Clock, other: Clock) -> Clock:
    """A clock that covers what either covers."""
    return [one if one > another else another for one, another in zip(clock, other, strict=True)]


def unordered(schedule: Schedule) -> Iterable[tuple[int, int]]:
    """Pairs (earlier, later) of conflicting ops that this schedule's waits do not order; for each later op, the last
    such op of each stream."""
    places = [PLACES[op.stream] for op in schedule.ops]
    clocks: list[Clock] = []
    last_of_stream = [-1] * len(STREAMS)
    for index, needed in enumerate(conflicts(schedule.ops)):
        clock = [-1] * len(STREAMS)
        for earlier in (*schedule.waits[index], last_of_stream[places[index]]):
            if earlier >= 0:
                clock = joined(clock, clocks[earlier])
                clock[places[earlier]] = max(clock[places[earlier]], earlier)
        clocks.append(clock)
        last_of_stream[places[index]] = index
        missing = [earlier for earlier, finished in zip(needed, clock, strict=True) if finished < earlier]
        yield from ((earlier, index) for earlier in sorted(missing))
