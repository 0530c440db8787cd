"""Yields the tensors to be written to a model's files in pieces, so that no large one is held whole.

Files hold whole tensors, in the names and layout of the library, which may cut and join parameters (fused experts,
say). Where each element comes from is known without memory for it (`model.moved_elements`), so however large a tensor,
at most `SAVED_AT_ONCE` elements of it are in memory. Parameters from which a conversion computes values (none of the
library's do) are read whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.errors import ExportError
from megatrain.model import MovedElements, Written, WrittenTensor, groups
from megatrain.spec import ParamSpec
from megatrain.spec.layout import SAVED_AT_ONCE

Values = NDArray[np.float32]
ReadRange = Callable[[str, int, int], Iterable[tuple[int, Values]]]
"""Called with (name, start, stop), reads elements [start, stop) of a parameter: all of them, or what a rank owns.
It yields pairs of a first element and the values from there on, which are valid until the next pair is asked for."""


class TensorPiece(NamedTuple):
    """Values of a tensor in row-major order from element `at` on, not yet rounded to its dtype."""

    tensor: WrittenTensor
    at: int
    values: Tensor
    is_parameter: bool = True
    """Whether they come from parameters, and are not a buffer's."""


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
            for group in groups(moved.runs(result), SAVED_AT_ONCE):
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
