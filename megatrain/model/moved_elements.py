"""Finds the source of each element that a conversion of checkpoint weights returns, without allocating them.

The library's conversions between a model's parameters and a checkpoint's tensors cut, join and transpose. Run on
tensors without storage, each result is a view of a parameter or of a copy whose parts are known in turn. So a save
reads what a tensor of the files holds range by range, however large the parameter, and never asks what the model is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.model.skeleton import storage_of

aten = torch.ops.aten


NEAR = 1 << 16
"""The largest gap between two runs, in elements, that is read with them, so that one read is enough for both."""


class Run(NamedTuple):
    """Elements of a parameter that follow each other in a result: `length` of them from `start` on, every `step`-th."""

    name: str
    start: int
    length: int
    step: int


class _Joined(NamedTuple):
    """A contiguous copy of tensors, joined along a dimension of its shape."""

    parts: Sequence[Tensor]
    dim: int
    shape: tuple[int, ...]


class MovedElements(TorchDispatchMode):
    """In the block, follows the elements of parameters on the meta device; `runs` and `are_known` may be asked after.

    parameters: by name, contiguous.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {storage_of(tensor): name for name, tensor in parameters.items()}
        self._joined: dict[int, _Joined | None] = {}
        """Storage -> what was copied into it; `None` if it was computed or changed."""
        self._alive: list[Tensor] = [*parameters.values()]
        """Tensors whose storages are keys, which must stay theirs."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        results = result if isinstance(result, (list, tuple)) else [result]
        for tensor in (value for value in results if isinstance(value, Tensor) and value.is_meta):
            storage = storage_of(tensor)
            if op._schema.is_mutable:
                self._joined[storage] = None
            elif storage not in self._names and storage not in self._joined:
                self._joined[storage] = _what_was_copied(op, args, kwargs or {}, tensor)
                self._alive.append(tensor)
        return result

    def are_known(self, tensor: Tensor) -> bool:
        """Whether all elements of a result were moved, and none computed."""
        storage = storage_of(tensor)
        if storage not in self._joined:
            return storage in self._names
        joined = self._joined[storage]
        return joined is not None and all(map(self.are_known, joined.parts))

    def runs(self, tensor: Tensor, first: int = 0, last: int | None = None) -> Iterator[Run]:
        """Where elements [first, last) of a result in row-major order come from, in order; by default all of them."""
        storage = storage_of(tensor)
        joined = self._joined.get(storage)
        for start, count, step in _strided(tensor, first, tensor.numel() if last is None else last):
            if joined is None:
                yield Run(self._names[storage], start, count, step)
            elif step == 1:
                yield from self._copied(joined, start, start + count)
            else:
                for place in range(start, start + count * step, step):
                    yield from self._copied(joined, place, place + 1)

    def _copied(self, joined: _Joined, first: int, last: int) -> Iterator[Run]:
        """Where elements [first, last) of a copy come from."""
        row, inner = prod(joined.shape[joined.dim :]), prod(joined.shape[joined.dim + 1 :])
        for number in range(first // row, -(-last // row)):
            start = number * row
            for part in joined.parts:
                width = part.shape[joined.dim] * inner
                begin, end = max(first, start), min(last, start + width)
                if begin < end:
                    yield from self.runs(part, number * width + begin - start, number * width + end - start)
                start += width


def _what_was_copied(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> _Joined | None:
    """What an operation has copied into its result; `None` if it does more than copy."""
    parts: Sequence[Tensor] = ()
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if op is aten.clone.default:
        parts, dim = [args[0]], 0
    elif op is aten.cat.default:
        parts = [part for part in args[0] if part.numel()]
        dim %= result.dim()
    elif op is aten.stack.default:
        dim %= result.dim()
        parts = [part.unsqueeze(dim) for part in args[0]]
    is_plain = result.is_contiguous() and all(part.is_meta and part.dtype == result.dtype for part in parts)
    return _Joined([part.detach() for part in parts], dim, tuple(result.shape)) if parts and is_plain else None


def _strided(tensor: Tensor, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """(start, count, step) of elements [first, last) of a view in its storage, in row-major order."""
    if first >= last:
        return
    sizes = [(1, 1)]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and sizes[-1][1] == size * stride:
            sizes[-1] = sizes[-1][0] * size, stride
        elif size > 1:
            sizes.append((size, stride))
    count, step = sizes.pop()
    for row in range(first // count, -(-last // count)):
        start, rest = int(tensor.storage_offset()), row
        for size, stride in reversed(sizes):
            rest, place = divmod(rest, size)
            start += place * stride
        begin, end = max(first - row * count, 0), min(last - row * count, count)
        yield start + begin * step, end - begin, step


# What is read at once -------------------------------------------------------------------------------------------------


@dataclass
class RunGroup:
    """Runs of one parameter that lie close to each other, with their places in a tensor of the files."""

    name: str
    start: int
    stop: int
    """The elements between which they all are."""
    runs: list[tuple[int, Run]] = field(default_factory=list)

    def takes(self, run: Run, most: int) -> bool:
        """Whether a run is near enough to be read with the others, in about `most` elements from end to end."""
        length = max(self.stop, _end(run)) - min(self.start, run.start)
        is_near = run.name == self.name and length <= self.stop - self.start + run.length + NEAR
        return is_near and (length <= most or self._continues(run, most))

    def _continues(self, run: Run, most: int) -> bool:
        """Whether the runs and this one are the columns of a parameter with more than `most` elements."""
        first = self.runs[0][1]
        is_alike = run[2:] == first[2:] and 0 <= run.start - first.start < run.step
        return is_alike and self.stop - self.start > most >= 2 * run.step

    def add(self, at: int, run: Run) -> None:
        """Add a run, whose first element has place `at` in the tensor."""
        self.start, self.stop = min(self.start, run.start), max(self.stop, _end(run))
        self.runs.append((at, run))

    def within(self, first: int, values: NDArray[np.float32]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Pairs of a place in the tensor and the values from there on, taken out of `values`.

        values: float32[elements], those of the parameter from element `first` on.
        """
        last = first + values.size
        for at, run in self.runs:
            begin = max(0, -(-(first - run.start) // run.step))
            end = min(run.length, -(-(last - run.start) // run.step))
            if begin < end:
                start = run.start + begin * run.step - first
                yield at + begin, values[start : start + (end - begin - 1) * run.step + 1 : run.step]


def groups(runs: Iterator[Run], most: int) -> Iterator[RunGroup]:
    """Runs that are read together, of about `most` elements from end to end, in the order of the tensor."""
    group: RunGroup | None = None
    at = 0
    for run in runs:
        if group is not None and not group.takes(run, most):
            yield from _cut(group, most)
            group = None
        group = group or RunGroup(run.name, run.start, _end(run))
        group.add(at, run)
        at += run.length
    if group is not None:
        yield from _cut(group, most)


def _cut(group: RunGroup, most: int) -> Iterator[RunGroup]:
    """A group as it is, or, where it is one long run, or transposes a large parameter, its parts."""
    if group.stop - group.start <= most:
        yield group
        return
    first = group.runs[0][1]
    rows = max(1, (most - max(run.start - first.start for _, run in group.runs)) // first.step)
    for begin in range(0, first.length, rows):
        part, count = RunGroup(group.name, group.stop, group.start), min(rows, first.length - begin)
        for at, run in group.runs:
            part.add(at + begin, Run(run.name, run.start + begin * run.step, count, run.step))
        yield part


def _end(run: Run) -> int:
    return run.start + (run.length - 1) * run.step + 1
