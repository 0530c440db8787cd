"""Stopping a run from outside: Ctrl-C or SIGTERM asks for a stop after the step under way, a second one leaves at once.

A handler only takes note, because a step cut in the middle is a step lost. Where a machine is taken away so many
seconds after the signal, a step may be longer than that: with a deadline, what is under way when the time for a last
checkpoint has come is interrupted (`OutOfTime`), as a step that has not begun. That is raised only where ops run, never
in the lines around them that count a step, report it or move state. It leaves out what happens then: the loop asks
`requested` between steps.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\nstopping after this step; once more to leave at once, without saving\n"
SOONEST = 0.01
"""Seconds after the signal at which an interrupt may come."""


class OutOfTime(KeyboardInterrupt):
    """The deadline leaves no time for what is under way."""


class StopSignals:
    """In a `with` block, the first of `SIGNALS` sets `requested`; the next one does what it always did.

    deadline_seconds: after the first signal, all must be over. needs_seconds: what is to follow the step will take so
    long. Only the main thread of a process may handle signals, so only it may enter the block.
    """

    def __init__(self, deadline_seconds: float | None = None, needs_seconds: Callable[[], float] = lambda: 0.0) -> None:
        self.requested = False
        self.deadline_seconds = deadline_seconds
        self._needs_seconds = needs_seconds
        self._requested_at = 0.0
        self._armed = self._due = self._inside = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """In the block, what runs in a `region` is broken off when the deadline asks for it."""
        if self.deadline_seconds is None or not hasattr(signal, "SIGALRM"):
            yield
            return
        before = signal.signal(signal.SIGALRM, self._interrupt)
        self._armed = True
        if self.requested:
            self._set_alarm()
        try:
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Raises `OutOfTime` in the block, or as it begins, where the time is over; nowhere else is it raised."""
        self._inside = True
        try:
            if self._armed and self._due:
                raise OutOfTime
            yield
        finally:
            self._inside = False

    def remaining_seconds(self) -> float | None:
        """Until the deadline, none below 0; `None` where there is none, or no signal has come."""
        if self.deadline_seconds is None or not self.requested:
            return None
        return max(0.0, self._requested_at + self.deadline_seconds - time.monotonic())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested, self._requested_at = True, time.monotonic()
        self._restore()
        os.write(2, NOTICE)  # not `print`: the signal may have interrupted one
        if self._armed:
            self._set_alarm()

    def _set_alarm(self) -> None:
        remaining = self.remaining_seconds()
        if remaining is not None:
            signal.setitimer(signal.ITIMER_REAL, max(SOONEST, remaining - self._needs_seconds()))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._due = True
        if self._armed and self._inside:
            raise OutOfTime

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
