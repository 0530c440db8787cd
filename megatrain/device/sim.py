"""A simulated accelerator that is more hostile than any real one, to find synchronization bugs in tests.

Arithmetic is the CPU's; everything around it is hostile.

* *Order.* Nothing runs when it is submitted. When the main thread waits, a seeded adversary repeatedly picks one stream
  among those whose next work has all its events. It has temperaments: `uniform`; `starve` (one stream runs only when
  nothing else can); `late` (copies run only when nothing else can); `eager` (the last submitted goes first, so
  overwrites come as early as the events allow). The same seed gives the same run.
* *Races* are found by happens-before (`RaceDetector`), even if the values are right.
* *Memory* is separate and has a capacity. It all reads as NaN, except the bytes that an op declares to read, while it
  runs; what it declares to write is kept. An op that touches anything else is caught.
* *Failures* are injected as told (`faults`). A hang becomes a report of which work waits for what.
* *Time* is virtual. With a `cost` for each task, events tell when their work would have run, slowed down by concurrent
  use of host memory, the bus or the drive (`contention`).
"""

from __future__ import annotations

import errno
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatrain.device.base import Event, HostMemory, Interval, LentBuffers, OnTheHost, Span, Stream, Task, Work
from megatrain.device.worker import as_foreground_error, raise_first
from megatrain.errors import BrokenPromise, Deadlock, DeviceError, MegaTrainError, OutOfDeviceMemory, RaceDetected
from megatrain.formatting import amount, at_least, at_most
from megatrain.spec.contention import NO_CONTENTION, Contention, StreamClock, TimedTask

POISON = 0xFF
"""Value of every byte of device memory that no op holds: NaN in bfloat16 and float32."""

Temperament = Literal["uniform", "starve", "late", "eager"]
TEMPERAMENTS: tuple[Temperament, ...] = ("uniform", "starve", "late", "eager")
COPIES = ("fetch", "grad")
EAGERNESS = 0.9
"""How often the eager adversary takes the last submitted work; always would make all seeds equal."""


@dataclass(slots=True, eq=False)
class SimEvent:
    """The end of one piece of simulated work."""

    device: SimDevice
    name: str
    done: bool = False
    failure: MegaTrainError | None = None
    clock: Clock = field(default_factory=dict)
    piece: TimedTask = field(default_factory=lambda: TimedTask("", 0.0, began=0.0, ended=0.0))
    """Interval on the virtual clock."""

    def wait(self) -> None:
        self.device.run_until(self)
        if self.failure is not None:
            raise self.failure

    def interval(self) -> Interval:
        self.device.virtual.run(self.piece)
        return self.piece.began, self.piece.ended


@dataclass(slots=True)
class _Item:
    task: Task
    work: Work
    waits: tuple[SimEvent, ...]
    event: SimEvent
    number: int
    foreground: Clock


@dataclass(slots=True, eq=False)
class SimStream:
    """A queue from which the adversary takes work."""

    name: str
    device: SimDevice
    queue: deque[_Item] = field(default_factory=deque)
    failure: MegaTrainError | None = None
    hangs: bool = False
    clock: Clock = field(default_factory=dict)
    ran: int = 0

    def submit(self, task: Task, work: Work, waits: Sequence[Event] = ()) -> SimEvent:
        ours = tuple(wait for wait in waits if isinstance(wait, SimEvent))
        event = SimEvent(self.device, task.name, piece=self.device.timed_piece(self.name, task, ours))
        self.queue.append(_Item(task, work, ours, event, next(self.device.numbers), self.device.foreground))
        return event

    def ready(self) -> bool:
        return bool(self.queue) and not self.hangs and all(event.done for event in self.queue[0].waits)


def _undeclared_host_write(task: Task, held: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> str:
    """Names a host buffer that changed outside what the task declares to write, if there is one."""
    for name, old in before.items():
        for span in task.writes:
            if span.buffer == name:
                old[span.start : span.stop] = held[name][span.start : span.stop]
        if not _same(old, held[name]):
            return f"changes {name} outside what it declares to write"
    return ""


def _same(left: Tensor, right: Tensor) -> bool:
    """Bytewise equality; numpy is ten times as fast as torch here."""
    return np.array_equal(left.numpy(), right.numpy())


class SimHostMemory(HostMemory):
    """Ordinary tensors. What is freed or discarded is poisoned. lockable_nbytes: `None` for no limit."""

    def __init__(self, device: str, lockable_nbytes: int | None) -> None:
        self._device, self.lockable_nbytes = device, lockable_nbytes
        self.locked: dict[int, int] = {}
        """Address -> bytes of page-locked memory."""

    def allocate(self, nbytes: int, owner: str) -> Tensor:
        memory = self.allocate_pageable(nbytes, owner)
        self.page_lock(memory, owner)
        return memory

    def allocate_pageable(self, nbytes: int, owner: str) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def page_lock(self, memory: Tensor, owner: str) -> None:
        nbytes = memory.numel()
        after = sum(self.locked.values()) + nbytes
        if self.lockable_nbytes is not None and after > self.lockable_nbytes:
            what = f"with {owner}, {at_least(after)} are page-locked, and {at_most(self.lockable_nbytes)} are allowed"
            raise DeviceError(what, where=self._device, fix="use a policy with transfer='pageable'")
        self.locked[memory.data_ptr()] = nbytes

    def free(self, memory: Tensor, owner: str) -> None:
        self.locked.pop(memory.data_ptr(), None)
        memory.fill_(POISON)

    def discard(self, memory: Tensor) -> bool:
        memory.fill_(POISON)
        return False


class SimDevice(OnTheHost):
    """See `base.Device`.

    seed: determines the adversary's temperament and choices. capacity: bytes of device memory, `None` for no limit.
    lockable: bytes of host memory that may be page-locked, `None` for no limit. faults: failures to inject. cost: task
    -> seconds alone on the virtual clock; contention: resources that its streams share.
    """

    shares_memory = False
    timed = True

    def __init__(
        self,
        seed: int = 0,
        *,
        capacity: int | None = None,
        lockable: int | None = None,
        temperament: Temperament | None = None,
        faults: Sequence[Fault] = (),
        cost: Callable[[Task], float] | None = None,
        contention: Contention = NO_CONTENTION,
    ) -> None:
        self.name = f"sim:{seed}"
        self.capacity, self.faults, self.cost = capacity, list(faults), cost
        self.host = SimHostMemory(self.name, lockable)
        self.temperament = temperament or TEMPERAMENTS[seed % len(TEMPERAMENTS)]
        self.order: list[str] = []
        """Names of the work run so far, in the adversary's order."""
        self.foreground: Clock = {}
        """What the main thread has waited for so far."""
        self.now = 0.0
        """The main thread's virtual time in seconds."""
        self.virtual = StreamClock(contention)
        self._contention = contention
        self._timed: list[TimedTask] = []
        """Work on the compute stream since the last call of `stalled_seconds`."""
        self._random = random.Random(seed)
        self._starved = self._random.choice(("compute", "host", *COPIES))
        self._streams: dict[str, SimStream] = {}
        self._owners: dict[str, int] = {}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._races = RaceDetector()
        self.numbers = count()
        """Numbers of the pieces of work, in the order of submission."""
        self._damage_from: float | None = None
        self._failures: list[MegaTrainError] = []
        """Failures in order, without duplicates."""
        self._met: Counter[Fault] = Counter()
        """How often a fault's op has occurred since the fault was set."""
        self._closed = False

    def stream(self, name: str) -> Stream:
        if self._closed:
            raise DeviceError("the device is closed", where=self.name)
        return self._streams.setdefault(name, SimStream(name, self))

    # Memory ---------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, owner: str) -> Tensor:
        used = sum(self._owners.values())
        if self.capacity is not None and used + nbytes > self.capacity:
            table = ", ".join(f"{name} {amount(size)}" for name, size in self._owners.items()) or "nothing"
            raise OutOfDeviceMemory(
                f"{at_least(nbytes)} for {owner} do not fit in {at_most(self.capacity)} of device memory",
                where=self.name,
                fix=f"it holds: {table}",
            )
        self._owners[owner] = self._owners.get(owner, 0) + nbytes
        visible, kept = (torch.full((nbytes,), POISON, dtype=torch.uint8) for _ in range(2))
        self._kept[visible.data_ptr()] = visible, kept
        return visible

    def free(self, memory: Tensor, owner: str) -> None:
        """Free device memory; whoever still reads it sees NaN."""
        visible, _ = self._kept.pop(memory.data_ptr())
        visible.fill_(POISON)
        self._owners[owner] -= visible.numel()

    def tidy(self) -> None:
        return

    @contextmanager
    def lend(self, task: Task, memory: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """What the task declares to read becomes visible, what it declares to write is kept, then all is NaN
        again."""
        held = LentBuffers(task, memory)
        ours = {name: self._kept[tensor.data_ptr()] for name, tensor in held.items() if tensor.data_ptr() in self._kept}
        host_before = {name: tensor.clone() for name, tensor in held.items() if name not in ours}
        for span in task.reads:
            if span.buffer in ours:
                visible, kept = ours[span.buffer]
                visible[span.start : span.stop] = kept[span.start : span.stop]
        try:
            yield held
            if self._damage_from is not None:
                self._damage(task, held)
        except BaseException:
            self._take_back(task, ours)
            raise
        broken = self._take_back(task, ours) or _undeclared_host_write(task, held, host_before)
        if broken:
            raise BrokenPromise(broken, where=task.name)

    def _damage(self, task: Task, held: Mapping[str, Tensor]) -> None:
        """Corrupt what a failing copy has written, from some point on."""
        assert self._damage_from is not None
        for span in task.writes:
            if span.buffer in held:
                start = span.start + int(self._damage_from * (span.stop - span.start))
                held[span.buffer][start : span.stop] = POISON

    def _take_back(self, task: Task, ours: Mapping[str, tuple[Tensor, Tensor]]) -> str:
        """Keep what the task declares to write, and reset all device memory to NaN. Returns what else has changed."""
        broken = ""
        for span in task.writes:
            if span.buffer in ours:
                visible, kept = ours[span.buffer]
                kept[span.start : span.stop] = visible[span.start : span.stop]
        for span in task.reads:
            if span.buffer in ours:
                visible, kept = ours[span.buffer]
                if not _same(visible[span.start : span.stop], kept[span.start : span.stop]):
                    broken = f"changes {span.buffer}, which it declares only to read"
        for span in (*task.reads, *task.writes):
            if span.buffer in ours:
                ours[span.buffer][0][span.start : span.stop] = POISON
        for visible, _ in self._kept.values():
            if visible.numel() and visible.numpy().min() != POISON:  # the largest byte, so all are
                visible.fill_(POISON)
                broken = broken or "writes device memory that it does not declare"
        return broken

    def free_nbytes(self) -> int:
        return (1 << 62) if self.capacity is None else self.capacity - sum(self._owners.values())

    # Time and chance ------------------------------------------------------------------------------------------------

    def stalled_seconds(self) -> float:
        done, self._timed = self._timed, []
        for piece in done:
            self.virtual.run(piece)
        return sum(piece.stalled for piece in done)

    def timed_piece(self, stream: str, task: Task, waits: Sequence[SimEvent]) -> TimedTask:
        """A task on the virtual clock, submitted now."""
        seconds = self.cost(task) if self.cost else 0.0
        before = [event.piece for event in waits]
        piece = TimedTask(stream, seconds, self._contention.dram_nbytes(task), before, self.now)
        self.virtual.submit(piece)
        if stream == "compute":
            self._timed.append(piece)
        return piece

    # Running --------------------------------------------------------------------------------------------------------

    def run_until(self, event: SimEvent) -> None:
        """Let the adversary run work until `event` is done. Raises `Deadlock` if it never can be."""
        while not event.done:
            self._run_one()
        self.foreground = joined((self.foreground, event.clock))
        self.now = max(self.now, self.virtual.run(event.piece))

    def synchronize(self) -> None:
        while any(stream.queue for stream in self._streams.values()):
            self._run_one()
        self.foreground = joined(stream.clock for stream in self._streams.values())
        self.now = max(self.now, self.virtual.run())
        self._races.forget()
        failures, self._failures = self._failures, []
        for stream in self._streams.values():
            stream.failure = None
        raise_first(failures)

    def close(self) -> None:
        self._closed = True
        self._streams.clear()
        self._owners.clear()
        self._kept.clear()
        self.host.locked.clear()

    def _run_one(self) -> None:
        ready = [stream for stream in self._streams.values() if stream.ready()]
        if not ready:
            raise self._deadlock()
        stream = self._choose(ready)
        item = stream.queue[0]
        doomed = stream.failure or next((wait.failure for wait in item.waits if wait.failure), None)
        fault = None if doomed else self._fault_for(item.task.name)
        if fault is not None and fault.kind == "hang":
            stream.hangs = True
            return
        stream.queue.popleft()
        self.order.append(item.task.name)
        self._run(stream, item, fault, doomed)

    def _fault_for(self, name: str) -> Fault | None:
        """The fault that strikes now, removed from the list."""
        for fault in self.faults:
            if fault.at == name:
                self._met[fault] += 1
            if fault.at == len(self.order) or (fault.at == name and self._met[fault] > fault.after):
                self.faults.remove(fault)
                del self._met[fault]
                return fault
        return None

    def _run(self, stream: SimStream, item: _Item, fault: Fault | None, failed: MegaTrainError | None) -> None:
        event = item.event
        before = joined((stream.clock, item.foreground, *(wait.clock for wait in item.waits)))
        impatient: BaseException | None = None
        if failed is None:
            try:
                self._races.watch(item.task, stream.name, stream.ran + 1, before)
                if fault is None:
                    item.work()
                else:
                    self._strike(fault, item)
            except BaseException as error:
                failed = as_foreground_error(error, item.task.name, stream.name)
                if isinstance(error, Exception):
                    self._failures.append(failed)
                else:
                    impatient = error  # Ctrl-C, which belongs to the main thread
        stream.ran += 1
        stream.failure = event.failure = failed
        stream.clock = event.clock = {**before, stream.name: stream.ran}
        event.done = True
        if impatient is not None:
            raise impatient

    def _strike(self, fault: Fault, item: _Item) -> None:
        """Apply a fault. Work that changes bytes in place (updates) fails before it begins, and damages nothing."""
        read = {span.buffer for span in item.task.reads}
        in_place = any(span.buffer in read for span in item.task.writes)
        self._damage_from = {"copy": 0.0, "short": 0.5}.get(fault.kind)
        try:
            fail("raise" if in_place and self._damage_from is not None else fault.kind, item.task.name, item.work)
        finally:
            self._damage_from = None

    def _choose(self, ready: list[SimStream]) -> SimStream:
        match self.temperament:
            case "uniform":
                return self._random.choice(ready)
            case "starve":
                return self._random.choice([s for s in ready if s.name != self._starved] or ready)
            case "late":
                return self._random.choice([s for s in ready if s.name not in COPIES] or ready)
            case "eager":
                latest = max(ready, key=lambda stream: stream.queue[0].number)
                return latest if self._random.random() < EAGERNESS else self._random.choice(ready)

    def _deadlock(self) -> Deadlock:
        """Describe which work waits for what, drop everything queued, and be ready for new work."""
        lines = []
        for stream in self._streams.values():
            if not stream.queue:
                continue
            head = stream.queue[0]
            missing = [event.name for event in head.waits if not event.done]
            what = "never ends" if stream.hangs else f"waits for {', '.join(missing)}"
            lines.append(f"{head.task.name} on stream {stream.name} {what}")
        causes = "".join(f"; before that: {failure}" for failure in self._failures)
        self.now = self.virtual.run()
        report = Deadlock(f"deadlock: {'; '.join(lines) or 'nothing is queued'}{causes}", where=self.name)
        for stream in self._streams.values():
            stream.hangs = False
            while stream.queue:
                item = stream.queue.popleft()
                item.event.done, item.event.failure = True, report
        return report


# Failures on demand ---------------------------------------------------------------------------------------------------
#
# Faults to inject into the simulated device: the kind of failure, and the op.


FaultKind = Literal["raise", "copy", "memory", "read", "short", "hang"]
KINDS: tuple[FaultKind, ...] = ("raise", "copy", "memory", "read", "short", "hang")


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure.

    kind: `raise` (the worker raises before doing anything), `memory` (out of device memory), `read` (an I/O error
    before anything arrives), `copy` (everything arrives, but damaged, which is detected), `short` (only a part
    arrives), `hang` (the work never ends).
    at: the name of an op (`FETCH u3 s0`), or its number in order of execution, counted from 0.
    after: for an op that occurs several times (a fetch in forward and backward), how often to let it pass first.
    """

    kind: FaultKind
    at: str | int
    after: int = 0


def fail(kind: FaultKind, name: str, work: Callable[[], None]) -> None:
    """Run `work` as far as the fault allows, and raise what it would raise. The device damages what was written."""
    match kind:
        case "raise":
            raise RuntimeError(f"injected: {name} raises")
        case "memory":
            raise OutOfDeviceMemory(f"injected: no device memory for {name}", where="sim")
        case "read":
            raise OSError(errno.EIO, f"injected: {name} cannot read")
        case "copy":
            work()
            raise OSError(errno.EIO, f"injected: the copy of {name} arrived damaged")
        case "short":
            work()
            raise OSError(errno.EIO, f"injected: {name} transferred only a part")
        case "hang":
            raise AssertionError("a hang is never run")


# Races ----------------------------------------------------------------------------------------------------------------

Clock = dict[str, int]
"""Stream -> number of its pieces of work known to have finished."""


def joined(clocks: Iterable[Clock]) -> Clock:
    """The smallest clock that covers all of `clocks`."""
    result: Clock = {}
    for clock in clocks:
        for stream, number in clock.items():
            if result.get(stream, 0) < number:
                result[stream] = number
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
    """Records accesses and reports the first race: two accesses of the same bytes, one of them a write, that nothing
    orders, whichever ran first and whatever the result. So one run finds every missing wait between its ops.

    Every piece of work has a vector clock: for each stream, how much of it is known to have finished before the work
    began (Lamport 1978; Mattern 1989; per access as in FastTrack, Flanagan and Freund 2009). Order comes from a
    stream's queue, from the events that work waits for, and from what the main thread had waited for at submission.
    """

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
