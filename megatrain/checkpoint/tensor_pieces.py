"""Yields the tensors of a model's files piece by piece, as they are converted from parameters that are read by ranges.

Files hold whole tensors, in the names and layout of the library, which may cut and join parameters (fused experts,
say). Where each element comes from is known without memory for it (`model.moved_elements`), so however large a tensor,
at most `SAVED_AT_ONCE` elements of it are in memory. Parameters from which a conversion computes values (none of the
library's do) are read whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.errors import ExportError
from megatrain.model import MovedElements, Run, Written, WrittenTensor
from megatrain.spec import ParamSpec
from megatrain.spec.layout import SAVED_AT_ONCE

NEAR = 1 << 16
"""Elements between two runs that are read rather than left out, so that one read is enough for both."""

Values = NDArray[np.float32]
ReadRange = Callable[[str, int, int], Iterable[tuple[int, Values]]]
"""Reads elements [start, stop) of a parameter, given as (name, start, stop): pairs of a first element and the values
from there on, which are valid until the next is asked for; all of the range, or what a rank owns of it."""


class TensorPiece(NamedTuple):
    """Values of a tensor in row-major order from element `at` on, not yet rounded to its dtype."""

    tensor: WrittenTensor
    at: int
    values: Tensor
    is_parameter: bool = True
    """Whether they come from parameters, and are not a buffer's."""


@dataclass
class _Together:
    """Runs of one parameter that lie close to each other, with their places in a tensor of the files."""

    name: str
    start: int
    stop: int
    """The elements between which they all are."""
    runs: list[tuple[int, Run]] = field(default_factory=list)

    def takes(self, run: Run, most: int) -> bool:
        length = max(self.stop, _end(run)) - min(self.start, run.start)
        is_near = run.name == self.name and length <= self.stop - self.start + run.length + NEAR
        return is_near and (length <= most or self._continues(run, most))

    def _continues(self, run: Run, most: int) -> bool:
        """Whether the runs and this one are the columns of a parameter with more than `most` elements."""
        first = self.runs[0][1]
        is_alike = run[2:] == first[2:] and 0 <= run.start - first.start < run.step
        return is_alike and self.stop - self.start > most >= 2 * run.step

    def add(self, at: int, run: Run) -> None:
        self.start, self.stop = min(self.start, run.start), max(self.stop, _end(run))
        self.runs.append((at, run))

    def within(self, first: int, values: Values) -> Iterator[tuple[int, Values]]:
        """The values that belong to the runs, with their places, of those of the elements from `first` on."""
        last = first + values.size
        for at, run in self.runs:
            begin = max(0, -(-(first - run.start) // run.step))
            end = min(run.length, -(-(last - run.start) // run.step))
            if begin < end:
                start = run.start + begin * run.step - first
                yield at + begin, values[start : start + (end - begin - 1) * run.step + 1 : run.step]


def tensor_pieces(
    written: Written, unit: int, tensors: Iterable[WrittenTensor], read: ReadRange
) -> Iterator[TensorPiece]:
    """These tensors of a unit piece by piece, in order, with at most `SAVED_AT_ONCE` elements at a time.

    Raises `ExportError` if a conversion gives other shapes than those that were planned.
    """
    results, moved = _moved(written, unit)
    computed: dict[str, Tensor] = {}
    for tensor in tensors:
        result = results[tensor.name]
        if tuple(result.shape) != tensor.shape:
            raise ExportError(f"tensor {tensor.name} is {list(result.shape)}, not {list(tensor.shape)} as planned")
        if not result.is_meta:
            yield TensorPiece(tensor, 0, result.reshape(-1), is_parameter=False)
        elif not result.numel():
            yield TensorPiece(tensor, 0, torch.empty(0))
        elif moved.are_known(result):
            for group in _groups(moved.runs(result), SAVED_AT_ONCE):
                for first, values in read(group.name, group.start, group.stop):
                    for at, part in group.within(first, values):
                        yield TensorPiece(tensor, at, torch.from_numpy(part))
        else:
            computed = computed or written.tensors(unit, _whole(_params(written, unit), read))
            yield TensorPiece(tensor, 0, computed.pop(tensor.name).reshape(-1))


def are_moved(written: Written, unit: int) -> bool:
    """Whether the conversions of a unit's parameters only move their elements, and compute none."""
    results, moved = _moved(written, unit)
    return all(not result.is_meta or moved.are_known(result) for result in results.values())


def _moved(written: Written, unit: int) -> tuple[Mapping[str, Tensor], MovedElements]:
    """A unit's tensors as they are made from parameters without storage, and where their elements come from."""
    empty = {param.name: torch.empty(param.shape, device="meta") for param in _params(written, unit)}
    with MovedElements(empty) as moved:
        return written.tensors(unit, empty), moved


def _params(written: Written, unit: int) -> list[ParamSpec]:
    """The parameters of a unit that are written."""
    return [param for param in written.spec.units[unit].params if written.writes(param.name)]


def _whole(params: Iterable[ParamSpec], read: ReadRange) -> dict[str, Tensor]:
    """Copies of the parameters."""
    whole = {param.name: torch.empty(param.shape) for param in params}
    for name, value in whole.items():
        flat = value.view(-1).numpy()
        for start in range(0, flat.size, SAVED_AT_ONCE):
            for first, values in read(name, start, min(start + SAVED_AT_ONCE, flat.size)):
                flat[first : first + values.size] = values
    return whole


def _groups(runs: Iterator[Run], most: int) -> Iterator[_Together]:
    """Runs that are read together, of about `most` elements from end to end, in the order of the tensor."""
    group: _Together | None = None
    at = 0
    for run in runs:
        if group is not None and not group.takes(run, most):
            yield from _cut(group, most)
            group = None
        group = group or _Together(run.name, run.start, _end(run))
        group.add(at, run)
        at += run.length
    if group is not None:
        yield from _cut(group, most)


def _cut(group: _Together, most: int) -> Iterator[_Together]:
    """A group as it is, or, where it is one long run, or transposes a large parameter, its parts."""
    if group.stop - group.start <= most:
        yield group
        return
    first = group.runs[0][1]
    rows = max(1, (most - max(run.start - first.start for _, run in group.runs)) // first.step)
    for begin in range(0, first.length, rows):
        part, count = _Together(group.name, group.stop, group.start), min(rows, first.length - begin)
        for at, run in group.runs:
            part.add(at + begin, Run(run.name, run.start + begin * run.step, count, run.step))
        yield part


def _end(run: Run) -> int:
    return run.start + (run.length - 1) * run.step + 1
