"""Time limits for foreign code that may never end, such as a chat template or a model's constructor.

Our own code can check a `Deadline` regularly. For other code, `within` has a watcher thread raise an exception in the
working thread, repeatedly until it leaves the call. The exception arrives between two Python instructions, so it ends
any loop in Python but not a single call into C.

The limit is on the working thread's CPU time, so a busy or sleeping machine does not count (on systems that cannot
measure another thread's CPU time it is on wall-clock time). Memory and code that only waits are not limited.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOKS_PER_SECOND = 10


class OutOfTime(Exception):
    """A call exceeded its time limit; the message names the limit."""


class Deadline:
    """A limit on the seconds of CPU time of this thread from now on."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._until = seconds, time.thread_time() + seconds

    def check(self) -> None:
        """Raise `OutOfTime` if the time is used up."""
        if time.thread_time() >= self._until:
            raise OutOfTime(_said(self._seconds))


def _said(seconds: float) -> str:
    return f"not finished after {seconds:g} seconds of CPU time"


class _Stop(BaseException):
    """Raised in the working thread. Not an `Exception`, so that the code to be stopped does not catch it."""


class _Running:
    """A call under way in this thread."""

    def __init__(self, seconds: float) -> None:
        self.thread = threading.get_ident()
        find = getattr(time, "pthread_getcpuclockid", None)
        self._clock: int | None = find(self.thread) if find else None
        self._until = self._now() + seconds
        self.stopped = False

    def _now(self) -> float:
        return time.monotonic() if self._clock is None else time.clock_gettime(self._clock)

    def is_late(self) -> bool:
        return self._now() >= self._until

    def raise_in_thread(self) -> None:
        """Raise `_Stop` in the thread at its next instruction; replaces one that is still pending."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(_Stop))

    def receive(self) -> None:
        """In the thread: wait for the pending exception. Cancelling it instead makes Python 3.11 hang in the first
        call that a profiler, debugger or coverage traces."""
        try:
            self.raise_in_thread()
            while True:
                pass
        except _Stop:
            return


class _Watcher:
    """Watches the running calls from a daemon thread, which starts with the first call."""

    def __init__(self) -> None:
        self._running: set[_Running] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, call: _Running) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="time limit", daemon=True)
                self._thread.start()
            self._running.add(call)
            self._changed.notify()

    def remove(self, call: _Running) -> None:
        with self._changed:
            self._running.discard(call)
        if call.stopped:
            call.receive()

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running)
                for call in self._running:
                    if call.is_late():
                        call.stopped = True
                        call.raise_in_thread()  # repeated, because one raised in an interpreter callback is lost
            time.sleep(1 / LOOKS_PER_SECOND)


_watcher = _Watcher()


def _forget() -> None:
    """Start afresh in a forked child, which has no watcher thread."""
    global _watcher
    _watcher = _Watcher()


os.register_at_fork(after_in_child=_forget)


def within(seconds: float, call: Callable[[], T]) -> T:
    """Run `call` and return its result. Raises `OutOfTime` soon after it exceeds `seconds` of this thread's CPU time.

    Exceptions of `call` are passed on.
    """
    running = _Running(seconds)
    try:
        try:
            _watcher.add(running)
            return call()
        finally:
            _watcher.remove(running)
    except _Stop:
        while True:
            try:
                _watcher.remove(running)
                break
            except _Stop:
                continue
        if not running.stopped:  # it was for an outer call of `within`
            raise
        raise OutOfTime(_said(seconds)) from None
