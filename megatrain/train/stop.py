"""Stops a run on Ctrl-C, SIGTERM or a hangup: the first signal asks for a stop after the current step, the second exits
at once. (Not a second hangup: a closed terminal may send several. Under `nohup` all are ignored.)

The handler only takes note, because an interrupted step is lost. If a machine will be taken away a fixed time
after the signal, a step may take too long: with a deadline, it is interrupted (`OutOfTime`) when a last checkpoint
must begin, and counts as not started. That is raised only while ops run, never in code around them that counts a
step, reports it or moves state. The loop checks `requested` between steps.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTICE = b"\nstopping after this step; once more to leave at once, without saving\n"
SOONEST = 0.01
"""Earliest interrupt after the signal, in seconds."""


class OutOfTime(KeyboardInterrupt):
    """The deadline leaves no time to complete what is running."""


class StopSignals:
    """In a `with` block, the first of `SIGNALS` sets `requested`; the next one does what it always did.

    deadline_seconds: time after the first signal by which all must be over. needs_seconds: duration of what must follow
    the step. Only the main thread of a process may handle signals, so only it may enter the block.
    """

    def __init__(self, deadline_seconds: float | None = None, needs_seconds: Callable[[], float] = lambda: 0.0) -> None:
        self.requested = False
        self.deadline_seconds = deadline_seconds
        self._needs_seconds = needs_seconds
        self._requested_at = 0.0
        self._armed = self._due = self._inside = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        heard = SIGNALS if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else SIGNALS[:2]
        self._previous = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore(self._previous)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """In the block, the deadline may interrupt what runs in a `region`."""
        if self.deadline_seconds is None:
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
        """In the block, and as it begins, `OutOfTime` is raised when time is up; nowhere else."""
        self._inside = True
        try:
            if self._armed and self._due:
                raise OutOfTime
            yield
        finally:
            self._inside = False

    def remaining_seconds(self) -> float | None:
        """Seconds until the deadline, at least 0; `None` without a deadline or before the first signal."""
        if self.deadline_seconds is None or not self.requested:
            return None
        return max(0.0, self._requested_at + self.deadline_seconds - time.monotonic())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:  # another hangup
            return
        self.requested, self._requested_at = True, time.monotonic()
        self._restore(self._previous.keys() - {signal.SIGHUP})
        with suppress(OSError):  # the terminal may be gone
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

    def _restore(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            signal.signal(number, self._previous[number])
