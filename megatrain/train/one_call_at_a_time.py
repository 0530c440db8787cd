"""Allows one engine call at a time, in the process that made it, until it is closed; all others raise an error.

An engine has one state, one set of slots and one sequence of steps, which concurrent calls would mix up. A second
call is refused, not queued: the order of two steps affects all later numbers, and a call from inside another (from
a loss function, say) would wait for itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, NoReturn, ParamSpec, SupportsIndex, TypeVar

from megatrain.device.worker import OwningProcess
from megatrain.errors import DeviceError
from megatrain.model.skeleton import on_the_cpu

P = ParamSpec("P")
R = TypeVar("R")

WHERE = "engine"


class Turn:
    def __init__(self) -> None:
        self.process = OwningProcess()
        self.is_closed = False
        self._lock = threading.Lock()
        self._under_way = ""

    @contextmanager
    def of(self, call: str) -> Iterator[None]:
        """In the block the engine executes this call. Raises `DeviceError` during another call, in a forked child,
        or if closed."""
        self.process.refuse_elsewhere(WHERE)
        if self.is_closed:
            raise DeviceError("the engine is closed", where=WHERE, fix="make a new one with Engine.from_model")
        if not self._lock.acquire(blocking=False):
            what = f"{call} was called while {self._under_way or 'another call'} was running"
            fix = "call it after the other has returned; threads need a lock to take turns"
            raise DeviceError(what, where=WHERE, fix=fix)
        self._under_way = call
        try:
            with on_the_cpu():  # whatever the caller's default device is
                yield
        finally:
            self._under_way = ""
            self._lock.release()


class TakesTurns:
    """Has a `Turn`, and is neither copied nor pickled, since a copy would not take turns with the original."""

    _turn: Turn

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        fix = "write its weights with save_pretrained, or a checkpoint with save"
        raise DeviceError("cannot be copied or pickled", where=WHERE, fix=fix)


S = TypeVar("S", bound=TakesTurns)


def one_at_a_time(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a method that must not run during another call; internally the engine uses undecorated methods."""

    @functools.wraps(method)
    def called(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turn.of(method.__name__):
            return method(self, *args, **kwargs)

    return called
