"""Calls whose weights pass through less device memory than their unit takes (`schedule.passing`).

Two parameters of such a unit may lie in one place, one after the other, so a place does not tell which of them a tensor
is. Each therefore has a storage of its own over the memory where it lies or will lie: one made by DLPack, which shares
memory between tensors that share nothing else, on every device. Views keep the storage, so a tensor is told by that,
and elements of the unit stand for it as in every other call. What has been given up is refused by what the schedule
says, never looked for where it was.

A matrix whose rows come apart lies nowhere whole. Its parameter is a stand-in of one row of NaN, right in shape, dtype
and device; `linear`, `embedding` and grouped products are given its rows as they come, anything else that would read
it is refused before it does. Left out: gradients, for there is no backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.dlpack import from_dlpack

from megatrain import spec
from megatrain.engine.gated import Alongside, Call, Run
from megatrain.engine.rows import BY_ROWS, Blocks, may_split
from megatrain.engine.weights import UnitBinder
from megatrain.errors import ScheduleError
from megatrain.layout import Field, Layout
from megatrain.model import Uses, is_wrapped, tensors_in
from megatrain.schedule import RING, Op, Schedule, calls_in, passing_place


@dataclass(frozen=True, slots=True)
class _Span:
    """Elements [start, stop) of the call's weights that lie together from byte `at` of the ring on."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class _Known:
    """What a storage is: a parameter, whose first element is `start` among the call's."""

    name: str
    start: int
    tensor: Tensor
    stands_in: bool


class PassingCall(Call):
    """A call whose weights pass. Elements count over the units that it uses, its own first.

    layouts: of all units. Raises `ScheduleError` where the schedule brings a parameter that the call cannot find.
    """

    def __init__(
        self,
        phases: Sequence[Op],
        layouts: Sequence[Layout],
        dtype: torch.dtype,
        alongside: Alongside,
        run: Run,
        by_rows: frozenset[Any],
    ) -> None:
        unit = phases[0].unit
        come = {place[0] for op in phases for access in op.reads if (place := passing_place(access.content))}
        self.units: dict[int, int] = {}
        """Unit -> where its elements begin among the call's."""
        begin = 0
        for each in sorted(come, key=lambda each: each != unit):
            self.units[each] = begin
            begin += layouts[each].size
        self._layouts, self._dtype = layouts, dtype
        self._spans: list[list[_Span]] = []
        """What each phase may read."""
        self._known: dict[int, _Known] = {}
        """A storage's identity -> what lies there."""
        super().__init__(phases, layouts[unit], alongside, run, by_rows)

    def _arriving(self, phases: Sequence[Op]) -> list[list[tuple[int, int]]]:
        for op in phases:
            spans: list[_Span] = []
            for access in op.reads:
                if (place := passing_place(access.content)) is None:
                    continue
                start = self.units[place[0]] + place[1] // self._dtype.itemsize
                stop = start + (access.stop - access.start) // self._dtype.itemsize
                last = spans[-1] if spans else None
                if (
                    last
                    and last.stop == start
                    and last.at + (start - last.start) * self._dtype.itemsize == access.start
                ):
                    spans[-1] = _Span(last.start, stop, last.at)
                else:
                    spans.append(_Span(start, stop, access.start))
            self._spans.append(spans)
        return [[(span.start, span.stop) for span in spans] for spans in self._spans]

    # The thread of the call -----------------------------------------------------------------------------------------

    def weights(self, unit: int) -> dict[str, Tensor]:
        """By full name, each parameter of a unit that the call may use, whether it has come or not."""
        found = {}
        for field in self._layouts[unit].fields:
            start = self.units[unit] + field.start
            stop = self.units[unit] + field.stop
            spans = [span for phase in self._spans for span in phase if span.start < stop and start < span.stop]
            if not spans:
                continue  # another unit's, of which this one borrows others
            whole = next((span for span in spans if span.start <= start and stop <= span.stop), None)
            tensor = self._standing_in(field) if whole is None else self._lying(whole, start, stop).view(field.shape)
            found[field.name] = tensor
            self._known[tensor.untyped_storage()._cdata] = _Known(field.name, start, tensor, whole is None)
        return found

    def named(self, unit: int, binder: UnitBinder) -> dict[str, Tensor]:
        """The same by the names of a binder."""
        found = self.weights(unit)
        return {name: found[full] for name, full in zip(binder.names, binder.full_names, strict=True) if full in found}

    def _lying(self, span: _Span, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a span, in a storage of their own."""
        found: Tensor = from_dlpack(self._memory(span, start, stop))
        return found

    def _memory(self, span: _Span, start: int, stop: int) -> Tensor:
        begin = span.at + (start - span.start) * self._dtype.itemsize
        return self._held[RING][begin : begin + (stop - start) * self._dtype.itemsize].view(self._dtype).data

    def _standing_in(self, field: Field) -> Tensor:
        """NaN that takes a row's memory at the most; strides tell whether a matrix of experts has been transposed."""
        *others, last = field.shape[1:]
        values = torch.full((last,), torch.nan, dtype=self._dtype, device=self._held[RING].device)
        return values.as_strided(field.shape, (*([0] * (1 + len(others))), 1))

    @property
    def is_head(self) -> bool:
        return self._op.kind == "LOSS"

    def meeting(self) -> AbstractContextManager[object]:
        """While active, on this thread: no weight is read before it has come, or after it has been given up."""
        return _Meeting(self, self._by_rows)

    def known(self, tensor: Tensor) -> _Known | None:
        """The parameter that a tensor is, or a part of."""
        return self._known.get(tensor.untyped_storage()._cdata)

    def meet(self, tensors: Sequence[Tensor]) -> None:
        """All of these are about to be read. Raises `ScheduleError` for what has been given up, or lies nowhere."""
        found = [(tensor, known) for tensor in tensors if tensor.numel() and (known := self.known(tensor))]
        for _, known in found:
            if known.stands_in:
                what = f"{known.name} comes row by row, and is read in another way"
                raise ScheduleError(what, where=self._op.name, fix="use policy.gates=shard, or policy.forward_nbytes=0")
        if found:
            self.need_all([_extent(tensor, known) for tensor, known in found])

    def rows(self, known: _Known, *, turned: bool) -> Blocks:
        """The rows of a matrix that comes so, each where it lies; an expert is a row. turned: as the model has turned
        experts. Raises `ScheduleError` where they do not come (again)."""
        count, *shape = known.tensor.shape
        width, done = known.tensor.numel() // count, 0
        for phase in range(self._phase, self._last + 1):
            start = known.start + done * width
            span = next((span for span in self._spans[phase] if span.start <= start < span.stop), None)
            if span is None:
                continue
            self._reach(phase)
            stop = min(count, (span.stop - known.start) // width)
            block = self._memory(span, start, known.start + stop * width).view(stop - done, *shape)
            yield done, stop, block.transpose(-2, -1) if turned else block
            done = stop
            if done == count:
                return
        raise self._gone(known.start + done * width, known.start + count * width)

    def _gone(self, start: int, stop: int) -> ScheduleError:
        what = f"{self._named(start, stop)} is read once more after the call had gone on from it"
        return ScheduleError(what, where=self._op.name, fix="use policy.forward_nbytes=0")

    def _named(self, start: int, stop: int) -> str:
        for unit, begin in self.units.items():
            for field in self._layouts[unit].fields:
                if begin + field.start < stop and start < begin + field.stop:
                    return field.name
        return "its weights"

    def unwind(self) -> None:
        super().unwind()
        self._known.clear()


class _Meeting(Uses):
    """Goes through the gates of a call wherever a function reads weights."""

    def __init__(self, call: PassingCall, by_rows: frozenset[Any]) -> None:
        super().__init__(lambda func, tensors: call.meet(tensors))
        self._call, self._by_rows = call, by_rows

    def compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        known = self._apart(func, args, kwargs)
        if known is None:
            return super().compute(func, args, kwargs)
        self._call.meet([each for each in tensors_in((args[0], *args[2:], kwargs))])
        if func is functional.embedding and self._call.is_head:
            return args[1].new_zeros(*args[0].shape, args[1].shape[1])  # its prologue's, which is dropped
        turned = args[1].stride() != known.tensor.stride()
        return BY_ROWS[func](self._call.rows(known, turned=turned), args, kwargs)

    def _apart(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Known | None:
        """The second argument, where it is all of a matrix that comes by rows, and the function can take it so."""
        if func not in self._by_rows or any(map(is_wrapped, args)) or not may_split(func, args, kwargs):
            return None
        known = self._call.known(args[1])
        if known is None or not known.stands_in:
            return None
        forms = [known.tensor, *([known.tensor.transpose(-2, -1)] if known.tensor.dim() == 3 else [])]
        same = any((args[1].shape, args[1].stride()) == (form.shape, form.stride()) for form in forms)
        return known if same else None


def _extent(tensor: Tensor, known: _Known) -> tuple[int, int]:
    """The elements of the call's weights among which a tensor lies that is a part of a parameter."""
    if tensor.dtype != known.tensor.dtype:
        return known.start, known.start + known.tensor.numel()
    start = known.start + int(tensor.storage_offset())
    return start, start + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def calls_of(
    schedule: Schedule,
    layouts: Sequence[Layout],
    dtype: torch.dtype,
    alongside: Alongside,
    run: Run,
    gates: spec.Gates,
) -> dict[int, Call]:
    """The calls of a schedule that are in phases, by the `id` of each phase's op. dtype: that of weights."""
    found: dict[int, Call] = {}
    for phases in calls_in(schedule.ops):
        counts_products = any(access.content.startswith("c") for op in phases for access in (*op.reads, *op.writes))
        by_rows = frozenset(BY_ROWS if gates == "rows" and not counts_products else ())
        if any(passing_place(access.content) for access in phases[0].reads):
            call: Call = PassingCall(phases, layouts, dtype, alongside, run, by_rows)
        else:
            call = Call(phases, layouts[phases[0].unit], alongside, run, by_rows)
        found |= dict.fromkeys(map(id, phases), call)
    return found
