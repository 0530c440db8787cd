"""Runs a layer's call so that it can pause at weights that are still being copied, and resume when they arrive.

A call that the schedule has cut into phases (`schedule.passes.phases`) runs on its own thread, which alternates with
the thread that runs ops: each phase is an op, and runs until the call needs something that only a later phase declares.
So to every device, the simulated one included, a phase is work like any other, and starts when the waits of its op are
over. The call pauses where it is about to read a weight that no phase so far has declared, and where it has completed a
shard of the gradient; the ops say which phase declares what. If a call cannot continue because something else has
failed, it ends with an exception at the point where it is paused.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.weights import BoundWeights, UnitWeights
from megatrain.errors import ScheduleError
from megatrain.memory import Lease
from megatrain.model import Uses
from megatrain.schedule import Access, Op, Schedule, calls_in, whole
from megatrain.schedule.contents import Content, Gradient, Weights
from megatrain.spec.layout import Layout

Alongside = Callable[[], AbstractContextManager[object]]
"""In its block, the thread computes on the stream of the thread that runs ops (`Device.alongside`)."""


Run = Callable[[Op, Lease, "PausePoints"], None]
"""The code of a call, given the op that has the accesses of all phases."""


@contextmanager
def default_torch_modes(device_type: str) -> Iterator[None]:
    """In its block, torch's modes around a step (autocast, inference mode, grad mode) are off."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device_type, enabled=False):
        yield


def _nothing_to_run(op: Op, lease: Lease, phases: PausePoints) -> None:
    """The code of a call that has ended."""


class _Cancelled(BaseException):
    """Ends the code of a call that cannot continue. Never leaves `ResumableCall`."""


class PausePoints:
    """What the code of a call reports as it runs, so that it can be paused there. This base class never pauses: it is
    for calls that run in one piece."""

    def waiting_for(self, flat: Tensor) -> AbstractContextManager[object]:
        """While active, on this thread: each read of `flat`, the unit's own weights, waits until they have arrived."""
        return nullcontext()

    def before_read(self, start: int, stop: int) -> None:
        """Elements [start, stop) of the unit's own weights are about to be read."""

    def before_gradients(self) -> None:
        """Gradients are about to be accumulated."""

    def gradient_complete(self, name: str) -> None:
        """The gradient of a parameter is complete."""

    def enter_last_phase(self) -> None:
        """What follows uses memory that only the last phase declares."""


NO_PAUSES = PausePoints()


class ResumableCall(PausePoints):
    """One call, cut into phases. `run` is its code, `layout` that of its unit."""

    def __init__(self, phases: Sequence[Op], layout: Layout, alongside: Alongside, run: Run) -> None:
        self._op, self._alongside, self._run = whole(phases), alongside, run
        self._layout, self._lease = layout, dict[str, Tensor]()
        self._phase, self._last = -1, len(phases) - 1
        self._arrived = _declared_ranges([op.reads for op in phases], Weights(phases[0].unit), layout.size)
        """Elements of the weights that each phase may read."""
        self._first_gradient_phase = next(
            (i for i, op in enumerate(phases) if any(_is_gradient(a) for a in op.writes)), 0
        )
        trained = layout.trained
        self._completed_by = [
            {
                field.name
                for start, stop in ranges
                for field in trained.fields
                if field.start < stop and start < field.stop
            }
            for ranges in _declared_ranges([op.writes for op in phases], Gradient(phases[0].unit), trained.size)
        ]
        """Parameters whose gradients each phase completes; may be empty."""
        self._complete: set[str] = set()
        self._resume: SimpleQueue[None] = SimpleQueue()
        """Lets the call continue."""
        self._paused: SimpleQueue[None] = SimpleQueue()
        """Tells the thread that runs ops that the call is paused or over."""
        self._thread: threading.Thread | None = None
        self._ended = self._cancelled = False
        self._failure: BaseException | None = None

    # On the thread that runs ops ------------------------------------------------------------------------------------

    def run_phase(self, op: Op, lease: Lease) -> None:
        """Run the next phase, `op`: the call continues until it needs a later one, or ends. Raises what its code
        raises."""
        self._phase += 1
        self._lease.update(lease)
        if self._thread is None:
            context = contextvars.copy_context()
            arguments = (self._work, torch.get_num_threads())
            thread = threading.Thread(target=context.run, args=arguments, name="megatrain-call", daemon=True)
            thread.start()  # fails if the system has no threads left
            self._thread = thread
        elif self._ended:
            return
        self._resume.put(None)
        try:
            self._paused.get()
        except BaseException:  # Ctrl-C while the call is running
            self.cancel()
            raise
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def cancel(self) -> None:
        """End the call, if it has not ended. When this returns, none of its code is running, and it refers to nothing.

        Otherwise it would keep itself alive, and everything the step has left, until Python next collects cycles.
        """
        self._cancelled = True
        self._resume.put(None)
        if self._thread is not None:
            self._thread.join()
        self._lease.clear()
        self._run = _nothing_to_run

    # On the call's own thread ---------------------------------------------------------------------------------------

    def _work(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # counts for the calling thread only; a new one starts with the default
        self._resume.get()
        try:
            with self._alongside():
                if not self._cancelled:
                    self._run(self._op, self._lease, self)
        except _Cancelled:
            pass
        except BaseException as failure:
            self._failure = failure
        finally:
            self._ended = True
            self._paused.put(None)

    def waiting_for(self, flat: Tensor) -> AbstractContextManager[object]:
        return _ReadWatcher(self, BoundWeights(UnitWeights(flat)))

    def has_arrived(self, start: int, stop: int, phase: int | None = None) -> bool:
        """Whether elements [start, stop) of the weights may be read in a phase, by default in the current one."""
        arrived = self._arrived[self._phase if phase is None else phase]
        return any(first <= start and stop <= last for first, last in arrived)

    def before_read(self, start: int, stop: int) -> None:
        self.before_reads([(start, stop)])

    def before_reads(self, ranges: Sequence[tuple[int, int]]) -> None:
        """All of these elements are about to be read together. Raises `ScheduleError` if the schedule has released some
        of them already, since other weights take their place."""
        later = range(self._phase, self._last + 1)
        phase = next((phase for phase in later if all(self.has_arrived(*elements, phase) for elements in ranges)), None)
        if phase is None:
            start, stop = next((elements for elements in ranges if not self.has_arrived(*elements)), ranges[0])
            what = f"{self._parameter_at(start, stop)} is read again after its memory was released"
            fix = "use policy.read_ahead_nbytes=0, or policy.wait_for=unit"
            raise ScheduleError(what, where=self._op.name, fix=fix)
        self._wait_for_phase(phase)

    def _parameter_at(self, start: int, stop: int) -> str:
        inside = (field.name for field in self._layout.fields if field.start < stop and start < field.stop)
        return next(inside, "a weight")

    def before_gradients(self) -> None:
        self._wait_for_phase(self._first_gradient_phase)

    def gradient_complete(self, name: str) -> None:
        self._complete.add(name)
        while self._phase < self._last and (due := self._completed_by[self._phase]) and due <= self._complete:
            self._wait_for_phase(self._phase + 1)

    def enter_last_phase(self) -> None:
        self._wait_for_phase(self._last)

    def _wait_for_phase(self, phase: int) -> None:
        """Pause until `phase` has begun. Autograd may call this on a thread of its own, for which the call waits."""
        while self._phase < phase or self._cancelled:
            if self._cancelled:
                raise _Cancelled
            self._paused.put(None)
            self._resume.get()


class _ReadWatcher(Uses):
    """Makes a call wait for the weights in `bound` that a torch function is about to read."""

    def __init__(self, call: ResumableCall, bound: BoundWeights) -> None:
        super().__init__(self._on_read)
        self._call, self._bound = call, bound

    def _on_read(self, func: Any, tensors: Sequence[Tensor]) -> None:
        extents = [extent for tensor in tensors if (extent := self._bound.extent(tensor)) is not None]
        if extents:
            self._call.before_reads(extents)


def resumable_calls(
    schedule: Schedule, layouts: Sequence[Layout], alongside: Alongside, run: Run
) -> dict[int, ResumableCall]:
    """Place of each phase's op in the schedule -> its call, of the calls that the schedule has cut into phases."""
    calls: dict[int, ResumableCall] = {}
    for places in calls_in(schedule.ops):
        phases = [schedule.ops[place] for place in places]
        calls |= dict.fromkeys(places, ResumableCall(phases, layouts[phases[0].unit], alongside, run))
    return calls


@contextmanager
def cancelled_on_exit(calls: Mapping[int, ResumableCall]) -> Iterator[None]:
    """Cancel all calls when the block ends; those that have ended are left as they are."""
    try:
        yield
    finally:
        for call in calls.values():
            call.cancel()


def _declared_ranges(phases: Sequence[Sequence[Access]], content: Content, size: int) -> list[list[tuple[int, int]]]:
    """Find the ranges of elements [start, stop) that each phase declares with this content, in a buffer of `size`."""
    by_phase = [
        [(access.start, access.stop) for access in accesses if access.content == content] for accesses in phases
    ]
    begin = min((start for ranges in by_phase for start, _ in ranges), default=0)
    nbytes = (max((stop for ranges in by_phase for _, stop in ranges), default=0) - begin) // max(size, 1)
    return [[((start - begin) // nbytes, (stop - begin) // nbytes) for start, stop in ranges] for ranges in by_phase]


def _is_gradient(access: Access) -> bool:
    return isinstance(access.content, Gradient)
