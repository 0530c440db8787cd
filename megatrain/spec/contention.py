"""Models how concurrent streams slow each other down through host memory bandwidth, the bus and the drive.

Streams are first in, first out. A task starts when its stream is free and its waits are over. If running tasks need
more bytes per second than host memory provides, all that use it slow down by the same factor. Each direction of the
bus, and reading and writing a drive, runs at a fraction of its speed while the other is in use; so does a direction of
the bus that collectives use. The two streams that compute on the device share it equally. `StreamClock` keeps virtual
time for `schedule.replay` and the simulated device; it is here because neither of their rooms may import the other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

OPPOSITE = {"fetch": "grad", "grad": "fetch", "read": "write", "write": "read"}
"""Pairs of streams that share a bus or a drive."""


@dataclass(frozen=True, slots=True)
class Contention:
    """host_dram_bandwidth: bytes per second of host memory, read plus written; dram_nbytes: task -> bytes that it
    reads and writes there. duplex: stream -> fraction of its speed while the other direction is in use. linked:
    stream -> the same while `link` is in use, which is then slowed equally."""

    host_dram_bandwidth: float = inf
    dram_nbytes: Callable[[Any], float] = lambda task: 0.0
    duplex: Mapping[str, float] = field(default_factory=dict)
    linked: Mapping[str, float] = field(default_factory=dict)


NO_CONTENTION = Contention()
"""No shared resources."""


@dataclass(slots=True, eq=False)
class TimedTask:
    """A task on a stream. seconds: its duration alone. dram_nbytes: bytes read and written in host memory."""

    stream: str
    seconds: float
    dram_nbytes: float = 0.0
    waits: Sequence[TimedTask] = ()
    submitted: float = 0.0
    began: float = inf
    ended: float = inf
    """End time; `inf` until it has ended."""
    stalled: float = 0.0
    """Seconds for which its stream was idle, waiting for it, since it was submitted."""
    dram_rate: float = 0.0
    """While it runs: bytes per second of host memory that it would use alone."""
    due: float = inf
    """While it runs: when it ends if its speed stays."""
    speed: float = 1.0
    """Relative to running alone."""
    _since: float = 0.0
    _left: float = 0.0
    """Seconds alone that remained when its speed last changed."""

    def begin(self, now: float) -> None:
        self.began = self._since = now
        self._left = self.seconds
        self.due = now + self.seconds
        self.dram_rate = self.dram_nbytes / self.seconds if self.seconds else 0.0

    def go_on(self, now: float, speed: float) -> None:
        """Change its speed."""
        self._left = max(0.0, self._left - (now - self._since) * self.speed)
        self._since, self.speed = now, speed
        self.due = now + self._left / speed


class StreamClock:
    """Virtual time of tasks on streams that share resources."""

    def __init__(self, contention: Contention, now: float = 0.0) -> None:
        self._dram, self._duplex, self._linked = contention.host_dram_bandwidth, contention.duplex, contention.linked
        self._queues: dict[str, deque[TimedTask]] = defaultdict(deque)
        self._under_way: dict[str, TimedTask] = {}
        """Running task of each busy stream."""
        self._free: dict[str, float] = {}
        self._blocked: dict[int, list[str]] = {}
        """`id` of an unfinished task -> idle streams whose first task waits for it."""
        self._idle: set[str] = set()
        """Streams that may be able to start a task."""
        self._known_speeds: dict[tuple[str, ...], dict[str, float]] = {}
        """Busy streams -> `_beside_each_other`."""
        self._now = now

    def submit(self, piece: TimedTask) -> None:
        """Add a task to its stream's queue. The tasks that it waits for must have been submitted."""
        queue = self._queues[piece.stream]
        queue.append(piece)
        if len(queue) == 1:
            self._idle.add(piece.stream)

    def run(self, until: TimedTask | None = None) -> float:
        """Advance until this task, or every task, has ended; returns the time then, in seconds."""
        while until is None or until.ended == inf:
            later = self._start()
            if not self._under_way:
                if later == inf:
                    break  # nothing left, or the rest waits for tasks never submitted
                self._now = later
                continue
            self._advance(later)
        return self._now if until is None else until.ended

    def _start(self) -> float:
        """Start what can start now; returns the submission time of the next task."""
        later = inf
        for stream in sorted(self._idle) if len(self._idle) > 1 else [*self._idle]:
            piece = self._queues[stream][0]
            ready = piece.submitted
            for awaited in piece.waits:
                ended = awaited.ended
                if ended == inf:
                    self._blocked.setdefault(id(awaited), []).append(stream)
                    break
                if ended > ready:
                    ready = ended
            else:
                if piece.submitted > self._now:
                    later = min(later, piece.submitted)
                    continue
                free = self._free.get(stream, 0.0)
                idle_from = free if free > piece.submitted else piece.submitted
                piece.stalled = ready - idle_from if ready > idle_from else 0.0
                piece.begin(self._now)
                self._under_way[stream] = piece
            self._idle.discard(stream)
        return later

    def _advance(self, latest: float) -> None:
        """Advance to the next end of a task, or to `latest`."""
        busy, blocked = self._under_way, self._blocked
        for stream, speed in self._speeds().items():
            piece = busy[stream]
            if speed != piece.speed:
                piece.go_on(self._now, speed)
            if piece.due < latest:
                latest = piece.due
        self._now = latest
        for stream, piece in [(stream, piece) for stream, piece in busy.items() if piece.due <= latest]:
            piece.ended = self._free[stream] = latest
            piece.waits = ()  # frees finished tasks
            del busy[stream]
            queue = self._queues[stream]
            queue.popleft()
            if queue:
                self._idle.add(stream)
            if id(piece) in blocked:
                self._idle.update(blocked.pop(id(piece)))

    def _speeds(self) -> dict[str, float]:
        """Speed of each busy stream, relative to running alone."""
        busy = self._under_way
        key = tuple(busy)
        if key not in self._known_speeds:
            self._known_speeds[key] = self._beside_each_other(busy)
        speeds = self._known_speeds[key]
        wanted = 0.0
        for stream, speed in speeds.items():
            wanted += busy[stream].dram_rate * speed
        if wanted <= self._dram:
            return speeds
        share = self._dram / wanted
        return {stream: speed * share if busy[stream].dram_rate else speed for stream, speed in speeds.items()}

    def _beside_each_other(self, busy: Collection[str]) -> dict[str, float]:
        """The same without host memory: for streams of one device, which share its bus, its link and a drive."""
        speeds = dict.fromkeys(busy, 1.0)
        for stream, share in self._duplex.items():
            if stream in busy and OPPOSITE.get(stream) in busy:
                speeds[stream] = share
        if "products" in busy and "compute" in busy:
            speeds["products"] = speeds["compute"] = 0.5  # what both compute takes as long as one after the other
        if self._linked and "link" in busy:
            for stream, share in self._linked.items():
                if stream in busy:
                    speeds[stream] *= share
                    speeds["link"] = min(speeds["link"], share)
        return speeds
