"""Predicts a schedule's duration by simulating its ops with given prices.

Streams are first in, first out; an op starts when its stream is free and its waits are over, and is slowed down by
concurrent use of host memory, the bus or the drive (`spec.contention`). Nothing else is modelled, so any difference
from the executor is a bug in one of the two. Prices come from `plan.cost`, or from measurements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from megatrain.schedule.ops import LINKS, STREAMS, Op, Schedule, Stream
from megatrain.spec import Tier
from megatrain.spec.contention import NO_CONTENTION, Contention, StreamClock, TimedTask

DISK_STREAMS: tuple[Stream, ...] = ("read", "write")
"""Streams with a processor of their own."""
RARE_STREAMS: tuple[Stream, ...] = (*DISK_STREAMS, *LINKS, "products")
"""Streams that a trace shows only if they have work."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The start and end of each op, in seconds from the start of the step."""

    schedule: Schedule
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return max(self.ends, default=0.0)

    def busy_seconds(self, stream: Stream) -> float:
        return sum(
            end - start
            for op, start, end in zip(self.schedule.ops, self.starts, self.ends, strict=True)
            if op.stream == stream
        )

    def utilisation(self, stream: Stream) -> float:
        """Share of the step in which the stream has work."""
        return self.busy_seconds(stream) / self.seconds if self.seconds else 0.0

    def stall_seconds(self) -> float:
        """Seconds of the step in which compute waits."""
        return self.seconds - self.busy_seconds("compute")

    def peak_nbytes(self, tier: Tier) -> int:
        """Arenas plus the largest sum of transient buffers alive at one time."""
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        for op, start, end in zip(self.schedule.ops, self.starts, self.ends, strict=True):
            for access in (*op.reads, *op.writes):
                first[access.buffer] = min(start, first.get(access.buffer, start))
                last[access.buffer] = max(end, last.get(access.buffer, end))
        changes = []
        for name, begin in first.items():
            buffer = self.schedule.buffers[name]
            if not buffer.arena and buffer.tier == tier:
                changes += [(begin, buffer.nbytes), (last[name], -buffer.nbytes)]
        alive = peak = 0
        for _, change in sorted(changes, key=lambda c: (c[0], c[1])):
            alive += change
            peak = max(peak, alive)
        return self.schedule.arena_nbytes(tier) + peak

    def trace_events(self, step: int = 0, origin_seconds: float = 0.0) -> list[dict[str, Any]]:
        """The timeline as Chrome trace events: one complete event per op, one row per stream.

        Source: the Trace Event Format of Chrome's about:tracing, which Perfetto reads too.
        """
        return [
            {
                "name": op.name,
                "cat": op.kind,
                "ph": "X",
                "pid": 0,
                "tid": STREAMS.index(op.stream),
                "ts": round((origin_seconds + start) * 1e6, 3),
                "dur": round((end - start) * 1e6, 3),
                "args": {
                    "unit": self.schedule.units[op.unit],
                    "number": op.unit,
                    "micro": op.micro,
                    "shard": op.shard,
                    "step": step,
                    "nbytes": op.nbytes,
                },
            }
            for op, start, end in zip(self.schedule.ops, self.starts, self.ends, strict=True)
        ]

    def show(self, width: int = 100) -> str:
        """A text chart: one row per stream, one column per `seconds / width`, `#` while the stream is busy."""
        rows = []
        busy = {op.stream for op in self.schedule.ops}
        for stream in (stream for stream in STREAMS if stream in busy or stream not in RARE_STREAMS):
            cells = ["."] * width
            for op, start, end in zip(self.schedule.ops, self.starts, self.ends, strict=True):
                if op.stream == stream and end > start:
                    for cell in range(
                        int(start / self.seconds * width), min(width, int(end / self.seconds * width) + 1)
                    ):
                        cells[cell] = "#"
            rows.append(f"{stream:<8} {''.join(cells)} {self.utilisation(stream):4.0%}")
        return "\n".join(rows)


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Several steps in sequence, as an object for `json.dump` that Perfetto and chrome://tracing open."""
    busy = {op.stream for timeline in timelines for op in timeline.schedule.ops}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": stream}}
        for tid, stream in enumerate(STREAMS)
        if stream in busy or stream not in RARE_STREAMS
    ]
    origin = 0.0
    for step, timeline in enumerate(timelines):
        events += timeline.trace_events(step, origin)
        origin += timeline.seconds
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def replay(
    schedule: Schedule,
    cost: Callable[[Op], float],
    contention: Contention = NO_CONTENTION,
    *,
    one_processor: bool = False,
) -> Timeline:
    """Simulate the schedule with `cost`: op -> seconds that it takes alone.

    `one_processor`: all streams except the disk's share the same cores, so overlap gains nothing, as on a CPU.
    """
    seconds = [cost(op) for op in schedule.ops]
    if one_processor:
        return _on_one_processor(schedule, seconds)
    if contention is NO_CONTENTION:
        return _undisturbed(schedule, seconds)
    return replay_priced(schedule, seconds, [contention.dram_nbytes(op) for op in schedule.ops], contention)


def replay_priced(
    schedule: Schedule, seconds: Sequence[float], dram_nbytes: Sequence[float], contention: Contention
) -> Timeline:
    """`replay` with shared resources, given each op's seconds alone and its bytes of host memory traffic."""
    clock, pieces = StreamClock(contention), list[TimedTask]()
    for op, alone, moved, waits in zip(schedule.ops, seconds, dram_nbytes, schedule.waits, strict=True):
        pieces.append(TimedTask(op.stream, alone, moved, [pieces[wait] for wait in waits]))
        clock.submit(pieces[-1])
    clock.run()
    return Timeline(schedule, tuple([piece.began for piece in pieces]), tuple([piece.ended for piece in pieces]))


def _undisturbed(schedule: Schedule, seconds: Sequence[float]) -> Timeline:
    """If no stream slows down another, each op starts when its predecessors have ended."""
    starts: list[float] = []
    ends: list[float] = []
    free: dict[str, float] = dict.fromkeys(STREAMS, 0.0)
    for op, alone, waits in zip(schedule.ops, seconds, schedule.waits, strict=True):
        start = max((ends[earlier] for earlier in waits), default=0.0)
        start = max(start, free[op.stream])
        starts.append(start)
        free[op.stream] = start + alone
        ends.append(start + alone)
    return Timeline(schedule, tuple(starts), tuple(ends))


def _on_one_processor(schedule: Schedule, seconds: Sequence[float]) -> Timeline:
    """Of the ops that are next on their streams, the processor takes the one that may start first. So it does not wait
    for the drive while another stream has work."""
    starts, ends = [0.0] * len(schedule.ops), [inf] * len(schedule.ops)
    queues: dict[str, deque[int]] = {}
    for index, op in enumerate(schedule.ops):
        queues.setdefault(op.stream, deque()).append(index)
    workers = {stream: stream if stream in DISK_STREAMS else "processor" for stream in queues}
    free = dict.fromkeys(workers.values(), 0.0)
    ready: dict[str, float] = {}
    """Stream -> when its next op has nothing more to wait for; without an entry, some of that has not been timed."""
    for _ in schedule.ops:
        for stream, queue in queues.items():
            if queue and stream not in ready:
                when = max((ends[earlier] for earlier in schedule.waits[queue[0]]), default=0.0)
                if when < inf:
                    ready[stream] = when
        stream = min(ready, key=lambda each: (max(ready[each], free[workers[each]]), queues[each][0]))
        index, worker = queues[stream].popleft(), workers[stream]
        starts[index] = max(ready.pop(stream), free[worker])
        free[worker] = ends[index] = starts[index] + seconds[index]
    return Timeline(schedule, tuple(starts), tuple(ends))
