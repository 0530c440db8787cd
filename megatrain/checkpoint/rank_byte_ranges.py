"""Maps a rank's share of each unit to byte ranges in a checkpoint's files.

Files hold whole tensors, while a rank owns pieces of the flat buffers that the tensors come from (`spec.layout`).
Most tensors are parameters unchanged. If the library converts a parameter (fused experts, say), the same
conversion runs once on element numbers instead of values, for one of each kind of unit: the result shows where
each element goes. A conversion that does more than move elements has no such map.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.checkpoint.range_writer import ByteRange
from megatrain.checkpoint.safetensors_writer import Shard
from megatrain.checkpoint.save import PlannedCheckpoint, moments_of
from megatrain.model import WrittenTensor
from megatrain.optim import HostArrays
from megatrain.spec.layout import Layout, Ownership

MOST_NUMBERED = 1 << 31
"""Largest unit whose elements can be numbered in 32 bits, the width of a value."""


class Run(NamedTuple):
    """Elements [start, stop) of a unit that are contiguous in a tensor of the files, from its element `at` on."""

    at: int
    start: int
    stop: int


class _Moved(Exception):
    """The conversion does more than move elements."""


class RankByteRanges:
    """The byte ranges of what one rank owns in one planned checkpoint, computed on demand."""

    def __init__(self, planned: PlannedCheckpoint, layouts: Sequence[Layout], owned: Ownership) -> None:
        self.planned = planned
        self._layouts, self._owned = layouts, owned
        self._weights = {name: shard for shard in planned.weights for name in shard.starts}
        self._moments = {name: shard for shard in planned.moments for name in shard.starts}
        self._alike: dict[object, list[list[Run]]] = {}

    @cached_property
    def are_known(self) -> bool:
        """Whether every element has exactly one place.

        Finding out takes 1.25 times the memory of the largest converted unit in float32.
        """
        try:
            for unit in self.planned.order:
                for _ in self._runs(unit):
                    pass
        except _Moved:
            return False
        return True

    def of_unit(self, unit: int, state: HostArrays) -> Iterator[ByteRange]:
        """What the rank writes of a unit: its share of the state in float32, plus on rank 0 tensors that are not
        parameters."""
        layout = self._layouts[unit]
        for tensor, runs in self._runs(unit):
            if isinstance(runs, Tensor):
                if self._owned.rank == 0:
                    values = runs.to(tensor.dtype).contiguous().view(-1).numpy()
                    yield _placed(self._weights, tensor.name, 0, values)
                continue
            for at, start, stop in runs:
                for piece in self._owned.within(layout, start, stop):
                    yield _placed(self._weights, tensor.name, at + piece.start - start, state.hi[piece.own])
        for field, param in zip(layout.trained.fields, self.planned.spec.units[unit].params, strict=False):
            for piece in self._owned.within(layout, field.start, field.stop):
                for tensor, moment in zip(moments_of(param), state.moments, strict=True):
                    yield _placed(self._moments, tensor.name, piece.start - field.start, moment[piece.own])

    def _runs(self, unit: int) -> Iterator[tuple[WrittenTensor, list[Run] | Tensor]]:
        """The tensors of a unit, each with its runs, or its value if it is not a parameter's."""
        layout, params = self._layouts[unit], self.planned.spec.units[unit].params
        writes = self.planned.written.writes
        fields = {param.name: layout.by_name[param.name] for param in params if writes(param.name)}
        empty = {name: torch.empty(field.shape, device="meta") for name, field in fields.items()}
        tensors = self.planned.written.tensors(unit, empty)
        whole = {id(value): fields[name] for name, value in empty.items()}
        converted = [value for value in tensors.values() if value.is_meta and id(value) not in whole]
        moved = iter(self._moved(unit, list(empty), tensors) if converted else ())
        planned = {tensor.name: tensor for tensor in self.planned.tensors_of(unit)}
        for name, value in tensors.items():
            if not value.is_meta:
                yield planned[name], value
            elif (field := whole.get(id(value))) is not None:
                yield planned[name], [Run(0, field.start, field.stop)]
            else:
                yield planned[name], next(moved)

    def _moved(self, unit: int, names: list[str], tensors: dict[str, Tensor]) -> list[list[Run]]:
        """The runs of each converted tensor, in order."""
        layout = self._layouts[unit]
        given = tuple(layout.by_name[name] for name in names)
        made = tuple((_alike(name), tuple(value.shape)) for name, value in tensors.items())
        key = tuple((_alike(field.name), field.start, field.shape) for field in given), made
        if key in self._alike:
            return self._alike[key]
        if layout.size > MOST_NUMBERED:
            raise _Moved
        numbers = torch.arange(layout.size, dtype=torch.int32).view(torch.float32)
        params = {field.name: numbers[field.start : field.stop].view(field.shape) for field in given}
        converted = self.planned.written.tensors(unit, params)
        is_plain = {id(value) for value in params.values()}
        seen, runs, count = np.zeros(layout.size, bool), list[list[Run]](), 0
        for name, value in converted.items():
            if not tensors[name].is_meta:
                continue
            at = value.reshape(-1).view(torch.int32).numpy()
            if at.size and (value.dtype != torch.float32 or at.min() < 0 or at.max() >= layout.size):
                raise _Moved
            seen[at] = True
            count += at.size
            if id(value) not in is_plain:
                runs.append(_runs_of(at))
        if not np.count_nonzero(seen) == count == sum(field.stop - field.start for field in given):
            raise _Moved
        self._alike[key] = runs
        return runs


def _runs_of(numbers: NDArray[np.int32]) -> list[Run]:
    """Runs of consecutive numbers."""
    ends = [*(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), numbers.size]
    starts = [0, *ends[:-1]]
    first = numbers[starts].tolist() if numbers.size else []
    return [Run(at, number, number + end - at) for at, end, number in zip(starts, ends, first, strict=False)]


def _placed(shards: dict[str, Shard], name: str, element: int, values: NDArray[np.generic]) -> ByteRange:
    shard = shards[name]
    return ByteRange(shard.name, shard.starts[name] + element * values.itemsize, values.view(np.uint8))


def _alike(name: str) -> str:
    return re.sub(r"\d+", "0", name)
