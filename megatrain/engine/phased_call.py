"""Runs a layer's call resumably: it pauses at weights that are still being copied and continues when they arrive."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.weights import Bound
from megatrain.errors import ScheduleError
from megatrain.memory import Held
from megatrain.model import Uses
from megatrain.schedule import Access, Op, Schedule, calls_in, whole
from megatrain.schedule.contents import Content, Gradient, Weights
from megatrain.spec.layout import Layout

# A call that the schedule has cut into phases (`schedule.passes.phases`) runs on a thread of its own, in strict turns
# with the thread that runs ops: each op of the call is one turn. So a phase is work like any other to every device, the
# simulated one included, and its gate is whatever its op waits for. The code gives the turn back where a weight is
# about to be read that no phase so far has declared, or where a shard of the gradient has just been completed; what is
# declared when is read off the ops. A call that cannot go on, since something else has failed, is unwound by an
# exception at its gate.


Alongside = Callable[[], AbstractContextManager[object]]
"""In its block, the thread computes where the foreground does (`Device.alongside`)."""


Run = Callable[[Op, Held, "Phases"], None]
"""The code of a call, given the whole op."""


@contextmanager
def undisturbed(device_type: str) -> Iterator[None]:
    """In its block, none of what surrounds a step (autocast, inference mode) counts."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device_type, enabled=False):
        yield


def _over(op: Op, held: Held, phases: Phases) -> None:
    """The code of a call that has ended."""


class Unwound(BaseException):
    """Leaves the code of a call that cannot go on; never escapes `Call`."""


class Phases:
    """What the code of a call meets on its way. These are open: those of a call in one piece."""

    def around(self, flat: Tensor) -> AbstractContextManager[object]:
        """While active, on this thread: nothing of `flat`, the unit's own weights, is read before it has arrived."""
        return nullcontext()

    def need(self, start: int, stop: int) -> None:
        """Elements [start, stop) of the unit's own weights are about to be read."""

    def add(self) -> None:
        """Gradients are about to be added up."""

    def finished(self, name: str) -> None:
        """The gradient of a parameter is complete."""

    def end(self) -> None:
        """What is left to do is what the last phase declares."""


OPEN = Phases()


class Call(Phases):
    """One call in phases. `run` is its code; `layout` is its unit's."""

    def __init__(self, phases: Sequence[Op], layout: Layout, alongside: Alongside, run: Run) -> None:
        self._op, self._alongside, self._run = whole(phases), alongside, run
        self._layout, self._held = layout, dict[str, Tensor]()
        self._phase, self._last = -1, len(phases) - 1
        self._arrived = _declared([op.reads for op in phases], Weights(phases[0].unit), layout.size)
        """Elements of the weights that each phase may read."""
        self._adds_from = next((i for i, op in enumerate(phases) if any(_is_gradient(a) for a in op.writes)), 0)
        trained = layout.trained
        self._completes = [
            {
                field.name
                for start, stop in ranges
                for field in trained.fields
                if field.start < stop and start < field.stop
            }
            for ranges in _declared([op.writes for op in phases], Gradient(phases[0].unit), trained.size)
        ]
        """Parameters that must be finished by the end of each phase, if it completes any."""
        self._finished: set[str] = set()
        self._mine: SimpleQueue[None] = SimpleQueue()
        self._theirs: SimpleQueue[None] = SimpleQueue()
        """The turn goes to the code by the one, and back by the other."""
        self._thread: threading.Thread | None = None
        self._ended = self._unwinding = False
        self._failure: BaseException | None = None

    # The thread that runs ops ---------------------------------------------------------------------------------------

    def turn(self, held: Held) -> None:
        """The next phase: the code goes on until it needs a later one, or ends. Raises what it raises."""
        self._phase += 1
        self._held.update(held)
        if self._thread is None:
            context = contextvars.copy_context()
            arguments = (self._work, torch.get_num_threads())
            thread = threading.Thread(target=context.run, args=arguments, name="megatrain-call", daemon=True)
            thread.start()  # the system may lend no more of them
            self._thread = thread
        elif self._ended:
            return
        self._mine.put(None)
        try:
            self._theirs.get()
        except BaseException:  # Ctrl-C, while the code is at work
            self.unwind()
            raise
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def unwind(self) -> None:
        """End a call that will not be gone on with; nothing of it is at work when this returns, and it holds nothing.

        Else it would be held, with all that the step has left, until Python next looks for cycles.
        """
        self._unwinding = True
        self._mine.put(None)
        if self._thread is not None:
            self._thread.join()
        self._held.clear()
        self._run = _over

    # The thread of the call -----------------------------------------------------------------------------------------

    def _work(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # it counts for the calling thread; a new one has the environment's
        self._mine.get()
        try:
            with self._alongside():
                if not self._unwinding:
                    self._run(self._op, self._held, self)
        except Unwound:
            pass
        except BaseException as failure:
            self._failure = failure
        finally:
            self._ended = True
            self._theirs.put(None)

    def around(self, flat: Tensor) -> AbstractContextManager[object]:
        return _Meeting(self, Bound(flat))

    def has(self, start: int, stop: int, phase: int | None = None) -> bool:
        """Whether elements [start, stop) of the weights may be read in a phase: this one, if no other is given."""
        arrived = self._arrived[self._phase if phase is None else phase]
        return any(first <= start and stop <= last for first, last in arrived)

    def need(self, start: int, stop: int) -> None:
        self.need_all([(start, stop)])

    def need_all(self, ranges: Sequence[tuple[int, int]]) -> None:
        """All of these are about to be read together. Raises `ScheduleError` for weights that the schedule has given up
        by now: others come into their place."""
        later = range(self._phase, self._last + 1)
        phase = next((phase for phase in later if all(self.has(*each, phase) for each in ranges)), None)
        if phase is None:
            start, stop = next((each for each in ranges if not self.has(*each)), ranges[0])
            what = f"{self._named(start, stop)} is read once more after the layer had gone on from it"
            fix = "use policy.read_ahead_nbytes=0, or policy.wait_for=unit"
            raise ScheduleError(what, where=self._op.name, fix=fix)
        self._reach(phase)

    def _named(self, start: int, stop: int) -> str:
        inside = (field.name for field in self._layout.fields if field.start < stop and start < field.stop)
        return next(inside, "its weights")

    def add(self) -> None:
        self._reach(self._adds_from)

    def finished(self, name: str) -> None:
        self._finished.add(name)
        while self._phase < self._last and (due := self._completes[self._phase]) and due <= self._finished:
            self._reach(self._phase + 1)

    def end(self) -> None:
        self._reach(self._last)

    def _reach(self, phase: int) -> None:
        """Give the turn back until `phase` has begun. On whatever thread autograd calls this, the call's own waits."""
        while self._phase < phase or self._unwinding:
            if self._unwinding:
                raise Unwound
            self._theirs.put(None)
            self._mine.get()


class _Meeting(Uses):
    """Goes from phase to phase of a call wherever a function reads weights of `bound`."""

    def __init__(self, call: Call, bound: Bound) -> None:
        super().__init__(self._meet)
        self._call, self._bound = call, bound

    def _meet(self, func: Any, tensors: Sequence[Tensor]) -> None:
        extents = [extent for tensor in tensors if (extent := self._bound.extent(tensor)) is not None]
        if extents:
            self._call.need_all(extents)


def calls_of(
    schedule: Schedule,
    layouts: Sequence[Layout],
    alongside: Alongside,
    run: Run,
) -> dict[int, Call]:
    """The calls of a schedule that are in phases, by the `id` of each phase's op."""
    found: dict[int, Call] = {}
    for phases in calls_in(schedule.ops):
        found |= dict.fromkeys(map(id, phases), Call(phases, layouts[phases[0].unit], alongside, run))
    return found


@contextmanager
def unwinding(calls: Mapping[int, Call]) -> Iterator[None]:
    """On leaving the block, no call is under way."""
    try:
        yield
    finally:
        for call in calls.values():
            call.unwind()


def _declared(phases: Sequence[Sequence[Access]], content: Content, size: int) -> list[list[tuple[int, int]]]:
    """Of each phase, the elements of a buffer of `size` that it declares to have this content."""
    found = [[(each.start, each.stop) for each in accesses if each.content == content] for accesses in phases]
    begin = min((start for ranges in found for start, _ in ranges), default=0)
    each = (max((stop for ranges in found for _, stop in ranges), default=0) - begin) // max(size, 1)
    return [[((start - begin) // each, (stop - begin) // each) for start, stop in ranges] for ranges in found]


def _is_gradient(access: Access) -> bool:
    return isinstance(access.content, Gradient)
