"""A limit of time for code that others have written and that may never end: a chat template, a model's structure.

`Deadline` is asked by code of ours that comes by often enough. Where none does, `within` has a watching thread raise an
exception in the thread that works for too long, again and again until it has left. It arrives between two instructions
of Python, so it ends any loop of Python code and no single call into C.

Time is the processor's, of the working thread alone: a machine that is busy with something else, or asleep, does not
count. (Where a system cannot tell that of another thread, it is the clock's.) Left out: limits of memory, and code that
only waits.
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
    """A call has taken the time that it was given. The text says how much that was."""


class Deadline:
    """So many seconds of work of this thread, from now on."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._until = seconds, time.thread_time() + seconds

    def check(self) -> None:
        """Raise `OutOfTime` where they are over."""
        if time.thread_time() >= self._until:
            raise OutOfTime(_said(self._seconds))


def _said(seconds: float) -> str:
    return f"not done after {seconds:g} seconds of work"


class _Stop(BaseException):
    """What is raised in the thread. Not an `Exception`, so that what is stopped does not handle it by chance."""


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
        """Have `_Stop` raised there between two instructions, in place of one that has not been raised yet."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(_Stop))

    def receive(self) -> None:
        """In the thread: wait for the last one. To take it back instead leaves the interpreter looking for it at every
        call, and Python 3.11 then never returns from the first call that a profiler, debugger or coverage traces."""
        try:
            self.raise_in_thread()
            while True:
                pass
        except _Stop:
            return


class _Watcher:
    """Looks at the running calls from a thread of its own, which begins with the first of them and never ends."""

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
                        call.raise_in_thread()  # what arrives in a callback of the interpreter's is lost
            time.sleep(1 / LOOKS_PER_SECOND)


_watcher = _Watcher()


def _forget() -> None:
    """In a forked child, which has no thread but the one that forked."""
    global _watcher
    _watcher = _Watcher()


os.register_at_fork(after_in_child=_forget)


def within(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns. Raises `OutOfTime` where it takes more than so many seconds of this thread's processor time.

    It may take a little longer until that is noticed. What `call` raises is passed on.
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
        if not running.stopped:  # meant for a call around this one
            raise
        raise OutOfTime(_said(seconds)) from None
