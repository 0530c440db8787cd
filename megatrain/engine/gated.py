"""Runs the code of one call in phases: on until it comes to what is not there yet, and on again when it is.

A call that the schedule has cut into phases (`schedule.phases`) runs on a thread of its own, in strict turns with the
thread that runs ops: each op of the call is one turn. So a phase is work like any other to every device, the simulated
one included, and its gate is whatever its op waits for. The code gives the turn back where a weight is about to be read
that no phase so far has declared, or where a shard of the gradient has just been completed; what is declared when is
read off the ops.

A call that cannot go on, since something else has failed, is unwound by an exception at its gate.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.layout import Layout
from megatrain.memory import Held
from megatrain.model import Uses
from megatrain.schedule import Access, Op, whole

Turns = Callable[[], AbstractContextManager[object]]
"""What the thread of a call does its work in: the device's own, such as its stream of kernels."""


class Unwound(BaseException):
    """Leaves the code of a call that cannot go on; never escapes `Call`."""


class Gates(Protocol):
    """What the code of a call meets on its way."""

    def around(self, flat: Tensor) -> AbstractContextManager[object]:
        """While active, on this thread: nothing in `flat`, the unit's own weights, is read before it has arrived."""

    def need(self, start: int, stop: int) -> None:
        """Elements [start, stop) of the unit's own weights are about to be read."""

    def add(self) -> None:
        """Gradients are about to be added up."""

    def finished(self, name: str) -> None:
        """The gradient of a parameter is complete."""

    def end(self) -> None:
        """What is left to do needs everything."""


class OpenGates:
    """Those of a call in one piece."""

    def around(self, flat: Tensor) -> AbstractContextManager[object]:
        return nullcontext()

    def need(self, start: int, stop: int) -> None:
        return

    def add(self) -> None:
        return

    def finished(self, name: str) -> None:
        return

    def end(self) -> None:
        return


OPEN = OpenGates()


class Call:
    """One call in phases. `run(op, held, gates)` is its code, given the whole op; `layout` is its unit's."""

    def __init__(
        self, phases: Sequence[Op], layout: Layout, turns: Turns, run: Callable[[Op, Held, Gates], None]
    ) -> None:
        self._op, self._turns, self._run = whole(phases), turns, run
        self._held: dict[str, Tensor] = {}
        self._phase, self._last = -1, len(phases) - 1
        self._arrived = [_extents(op.reads, f"w{op.unit}", self._op.reads, layout.size) for op in phases]
        trained = layout.trained
        complete = [_extents(op.writes, f"g{op.unit}", self._op.writes, trained.size) for op in phases]
        self._adds_from = next((i for i, op in enumerate(phases) if _adds(op)), 0)
        self._leaves = [
            (phase, {field.name for field in trained.fields if field.start < stop and start < field.stop})
            for phase, extents in enumerate(complete)
            for start, stop in extents
        ]
        """(phase, the parameters that must be finished before it ends), in order."""
        self._finished: set[str] = set()
        self._mine, self._theirs = threading.Lock(), threading.Lock()
        """Locked but for the moment in which the turn goes to the code, or back."""
        self._mine.acquire()
        self._theirs.acquire()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._unwinding = False

    # The thread that runs ops ---------------------------------------------------------------------------------------

    def turn(self, held: Held) -> None:
        """The next phase: the code goes on until it needs a later one, or ends. Raises what it raises."""
        self._phase += 1
        self._held.update(held)
        if self._thread is None:
            context = contextvars.copy_context()
            self._thread = threading.Thread(target=context.run, args=(self._work,), name="megatrain-call", daemon=True)
            self._thread.start()
        elif not self._thread.is_alive():
            return
        self._mine.release()
        try:
            self._theirs.acquire()
        except BaseException:  # Ctrl-C, while the code is at work
            self.unwind()
            raise
        if self._phase == self._last:
            self._thread.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def unwind(self) -> None:
        """End a call that has begun and will not be gone on with; it has left the device when this returns."""
        self._unwinding = True
        if self._thread is not None and self._thread.is_alive():
            self._mine.release()
            self._thread.join()

    # The thread of the call -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        self._mine.acquire()
        try:
            with self._turns():
                self._run(self._op, self._held, self)
        except Unwound:
            pass
        except BaseException as failure:
            self._failure = failure
        finally:
            self._theirs.release()

    def _reach(self, phase: int) -> None:
        """Give the turn back until `phase` has begun."""
        while self._phase < phase:
            self._theirs.release()
            self._mine.acquire()
            if self._unwinding:
                raise Unwound
''' + '' if False else '')
