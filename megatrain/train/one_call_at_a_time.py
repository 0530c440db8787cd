"""One call of an engine at a time, in the process that made it, until it is closed; any other is refused in words.

An engine has one state, one set of slots and one sequence of steps, so two calls beside each other would compute with
halves of both. The second one is refused rather than queued: which of two steps comes first changes all numbers after
them, and a call from inside another, from a loss function say, would wait for itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from megatrain.device.worker import OwningProcess
from megatrain.errors import DeviceError

P = ParamSpec("P")
R = TypeVar("R")

WHERE = "engine"


class Turn:
    """Who is using an engine."""

    def __init__(self) -> None:
        self.process = OwningProcess()
        self.is_closed = False
        self._lock = threading.Lock()
        self._under_way = ""

    @contextmanager
    def of(self, call: str) -> Iterator[None]:
        """In the block the engine is in this call. Raises `DeviceError` while it is in another, in a forked child, and
        once it is closed."""
        self.process.refuse_elsewhere(WHERE)
        if self.is_closed:
            raise DeviceError("the engine is closed", where=WHERE, fix="make a new one with Engine.from_model")
        if not self._lock.acquire(blocking=False):
            what = f"{call} was called while {self._under_way or 'another call'} was under way"
            fix = "call it when the other has returned; several threads take turns by a lock of their own"
            raise DeviceError(what, where=WHERE, fix=fix)
        self._under_way = call
        try:
            yield
        finally:
            self._under_way = ""
            self._lock.release()


class TakesTurns(Protocol):
    """What has a `Turn`."""

    _turn: Turn


S = TypeVar("S", bound=TakesTurns)


def one_at_a_time(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that is a call of its own; inside, the engine uses what is not decorated."""

    @functools.wraps(method)
    def called(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turn.of(method.__name__):
            return method(self, *args, **kwargs)

    return called
