"""How fast the machine is while a step runs: small known jobs beside its ops, and beside the probe.

A shared machine may be half as fast for seconds or minutes, with nothing of it that a process could see, and a step
takes longer than such times. `Paced` is a cpu on which two reference jobs run behind ops of the compute stream, outside
of what is measured: a matrix product, and a pass over memory, which a busy neighbour slows by less. `Pace` tells by
them how much slower the machine was than while it was probed. While host work is under way no reference runs, since
what the two take from each other is part of a step. Left out: that other jobs may slow by a little more or less.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Callable, Sequence
from statistics import fmean, median

import torch
from torch import Tensor

from megatrain.device.base import Event, Stream, Task, Work
from megatrain.device.cpu import CpuDevice, DoneEvent, InlineStream
from megatrain.schedule import Timeline

PRODUCT, PASS = (256, 1024, 1024), (512, 2048)
"""[m, k] x [k, n] of a product, and the shape that a gated activation passes over: some milliseconds each."""
EVERY = 0.04
"""Seconds from one sample to the next, at the least."""
NEAREST = 5
"""Samples that tell the speed at one moment."""

Shares = Callable[[Task], float]
"""The part of an op's time that is spent in products."""


class Pace:
    """Samples of both references, and how they compare with those taken before `set_out`."""

    def __init__(self) -> None:
        (m, k, n), (gate, up, gated) = PRODUCT, torch.ones(3, *PASS)
        x, weight, out = torch.ones(m, k), torch.ones(n, k), torch.ones(m, n)
        self._jobs: tuple[Callable[[], Tensor], ...] = (  # without new memory, which may cost more or less than it
            lambda: torch.mm(x, weight.t(), out=out),
            lambda: torch.mul(torch.sigmoid(gate, out=gated), up, out=gated),
        )
        self._usual = (1.0, 1.0)
        self.resting = False
        """While it is, nothing is sampled."""
        self.clear()

    def clear(self) -> None:
        """A new step begins."""
        self._when: list[float] = []
        self._seconds: list[tuple[float, ...]] = []
        self.ops: list[tuple[Task, float, float]] = []
        """Ops of the compute stream, and when each began and ended."""
        self.spent = 0.0
        """Seconds that references took."""

    def set_out(self) -> None:
        """What has been sampled so far is what the next samples are compared with."""
        product, passing = (fmean(_middle(values)) for values in zip(*self._seconds, strict=True))
        self._usual = product, passing
        self.clear()

    @torch.no_grad()
    def sample(self) -> None:
        """Run the references, unless they ran just now."""
        entered = time.perf_counter()
        if self.resting or (self._when and entered - self._when[-1] < EVERY):
            return
        seconds = []
        for job in self._jobs:
            job()  # what the op has left in the caches gives way
            began = time.perf_counter()
            job()
            seconds.append(time.perf_counter() - began)
        self._seconds.append(tuple(seconds))
        self._when.append(time.perf_counter())
        self.spent += self._when[-1] - entered

    def slowdown(self, shares: Shares) -> float:
        """How much slower than before `set_out` the machine was, over the ops since `clear`."""
        spent = [(end - start, self._at((start + end) / 2, shares(task))) for task, start, end in self.ops]
        return sum(seconds for seconds, _ in spent) / sum(seconds / slower for seconds, slower in spent)

    def _at(self, moment: float, share: float) -> float:
        first = max(0, bisect(self._when, moment) - (NEAREST + 1) // 2)
        near = self._seconds[first : first + NEAREST]
        product, passing = (float(median(values)) for values in zip(*near, strict=True))
        return share * product / self._usual[0] + (1 - share) * passing / self._usual[1]


class Paced(CpuDevice):
    """A cpu on which `pace` is sampled behind ops of the compute stream, as long as the host stream is idle."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._host = _Watched(super().stream("host"))
        self._compute = _Sampled("compute", pace, self._host)

    def stream(self, name: str) -> Stream:
        found = super().stream(name)  # refuses where the device is closed
        if name == "host":
            return self._host
        return self._compute if name == "compute" else found


class _Watched:
    """A stream of which it is known whether it has anything to do."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._last: Event | None = None

    @property
    def idle(self) -> bool:
        return self._last is None or self._last.interval()[1] > 0

    def submit(self, task: Task, work: Work, waits: Sequence[Event] = ()) -> Event:
        self._last = self._stream.submit(task, work, waits)
        return self._last


class _Sampled(InlineStream):
    def __init__(self, name: str, pace: Pace, host: _Watched) -> None:
        super().__init__(name)
        self._pace, self._host = pace, host

    def submit(self, task: Task, work: Work, waits: Sequence[Event] = ()) -> DoneEvent:
        done = super().submit(task, work, waits)
        self._pace.ops.append((task, *done.interval()))
        if self._host.idle:
            self._pace.sample()
        return done


def at_the_probes_speed(timeline: Timeline, slowdown: float) -> Timeline:
    """The timeline of a machine that is not slowed down."""
    starts, ends = (tuple(when / slowdown for when in times) for times in (timeline.starts, timeline.ends))
    return Timeline(timeline.schedule, starts, ends)


def _middle(values: Sequence[float]) -> list[float]:
    """The middle half."""
    aside = len(values) // 4
    return sorted(values)[aside : len(values) - aside]
