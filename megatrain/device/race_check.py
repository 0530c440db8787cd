"""Detects data races by happens-before over byte ranges.

Every piece of work has a vector clock: for each stream, how much of it is known to have finished before the work
began (Lamport 1978; Mattern 1989; per access as in FastTrack, Flanagan and Freund 2009). Order comes from a
stream's queue, from the events that work waits for, and from what the main thread had waited for at submission.
Two accesses of the same bytes, one of them a write, that no clock orders are a race, whichever ran first and
whatever the result. So one run finds every missing wait between the ops that it ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from megatrain.device.base import Span, Task
from megatrain.errors import RaceDetected

Clock = dict[str, int]
"""Stream -> number of its pieces of work known to have finished."""


def joined(clocks: Iterable[Clock]) -> Clock:
    """The smallest clock that covers all of `clocks`."""
    result: Clock = {}
    for clock in clocks:
        for stream, count in clock.items():
            if result.get(stream, 0) < count:
                result[stream] = count
    return result


@dataclass(frozen=True, slots=True)
class _Access:
    """A past access, by work number `count` of a stream."""

    span: Span
    writes: bool
    stream: str
    count: int
    task: Task


class RaceDetector:
    """Records accesses and reports the first race."""

    def __init__(self) -> None:
        self._seen: dict[str, list[_Access]] = defaultdict(list)

    def watch(self, task: Task, stream: str, count: int, before: Clock) -> None:
        """`task` runs as work number `count` of `stream`, after everything that `before` covers.

        Raises `RaceDetected` for the first conflict with an access that is not covered.
        """
        for spans, writes in ((task.reads, False), (task.writes, True)):
            for span in spans:
                for earlier in self._seen[span.buffer]:
                    conflict = writes or earlier.writes
                    if conflict and _overlap(span, earlier.span) and before.get(earlier.stream, 0) < earlier.count:
                        raise _report(task, stream, span, writes, earlier)
        for span in task.writes:
            kept = [access for access in self._seen[span.buffer] if not _covers(span, access.span)]
            self._seen[span.buffer] = [*kept, _Access(span, True, stream, count, task)]
        for span in task.reads:
            self._seen[span.buffer].append(_Access(span, False, stream, count, task))

    def forget(self) -> None:
        """Everything so far happened before everything to come, since the device is idle."""
        self._seen.clear()


def _overlap(left: Span, right: Span) -> bool:
    return left.start < right.stop and right.start < left.stop


def _covers(left: Span, right: Span) -> bool:
    return left.start <= right.start and right.stop <= left.stop


def _report(task: Task, stream: str, span: Span, writes: bool, earlier: _Access) -> RaceDetected:
    start, stop = max(span.start, earlier.span.start), min(span.stop, earlier.span.stop)
    verbs = ["writes" if writing else "reads" for writing in (earlier.writes, writes)]
    return RaceDetected(
        f"{earlier.task.name} on stream {earlier.stream} {verbs[0]} and {task.name} on stream {stream} {verbs[1]} "
        f"bytes [{start}:{stop}] of {span.buffer}, and nothing orders them",
        buffer=span.buffer,
        start=start,
        stop=stop,
        content=span.content,
        tasks=(earlier.task, task),
    )
