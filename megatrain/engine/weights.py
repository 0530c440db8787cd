"""Binds a unit's parameters as views of one flat buffer for a call, and lets autograd save them by name.

A tensor that autograd saves and that lies in the flat buffer is not kept: its place is (`names_weights`), and it is
taken from wherever the unit's weights are when the backward pass asks. So a kept graph holds no slot, and the slot
may be overwritten between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.schedule import Schedule, Use
from megatrain.schedule.contents import Gradient, Weights
from megatrain.spec import ModelSpec, UnitSpec
from megatrain.spec.layout import Layout, layout_of

Need = Callable[[int, int], None]
"""Told of the elements [start, stop) of a unit's weights that are about to be read."""


def _nothing(start: int, stop: int) -> None:
    return


@dataclass(slots=True)
class Bound:
    """A unit's weights in one flat buffer. `flat` may be exchanged: the unit has been fetched to another slot."""

    flat: Tensor
    """Elements of the compute dtype, [layout.size]."""
    need: Need = _nothing
    """Called before autograd takes a saved weight."""

    def extent(self, tensor: Tensor) -> tuple[int, int] | None:
        """The elements [start, stop) among which a tensor lies; `None` for one that is elsewhere, or empty."""
        if not tensor.numel() or not self._covers(tensor):
            return None
        if tensor.dtype != self.flat.dtype:
            return 0, self.flat.numel()
        start = int(tensor.storage_offset()) - int(self.flat.storage_offset())
        return start, start + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))

    def holds(self, tensor: Tensor) -> bool:
        return tensor.dtype == self.flat.dtype and self._covers(tensor)

    def _covers(self, tensor: Tensor) -> bool:
        """Whether a tensor begins in the flat buffer. Beside it in memory, others may lie."""
        if tensor.untyped_storage().data_ptr() != self.flat.untyped_storage().data_ptr():
            return False
        begin = self.flat.storage_offset() * self.flat.itemsize
        return begin <= tensor.storage_offset() * tensor.itemsize < begin + self.flat.nbytes


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a saved weight lies, relative to the start of the unit."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class UnitBinder:
    """Makes the name -> view mapping of one unit. `prefix` is cut off the parameter names."""

    def __init__(self, unit: UnitSpec, prefix: str = "") -> None:
        layout = layout_of(unit)
        self.full_names = [field.name for field in layout.fields]
        self.names = [name.removeprefix(prefix) for name in self.full_names]
        self._trains = [param.trainable for param in unit.params]
        self._views = [(field.shape, contiguous_strides(field.shape), field.start) for field in layout.fields]

    def bind(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `flat`, each in its parameter's shape."""
        base = flat.storage_offset()
        return {
            name: torch.as_strided(flat, shape, strides, base + start)
            for name, (shape, strides, start) in zip(self.names, self._views, strict=True)
        }

    def leaves(self, flat: Tensor) -> dict[str, Tensor]:
        """The same as autograd leaves; frozen parameters need no gradient."""
        views = self.bind(flat)
        for view, trains in zip(views.values(), self._trains, strict=True):
            view.requires_grad_(trains)
        return views

    def trained(self, leaves: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Full name and leaf of the parameters that get a gradient."""
        triples = zip(self.full_names, leaves.values(), self._trains, strict=True)
        return [(name, leaf) for name, leaf, trains in triples if trains]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(strides)


def names_weights(bound: Bound) -> AbstractContextManager[object]:
    """While active, autograd saves weights of `bound` as places, not as tensors."""

    def pack(tensor: Tensor) -> Tensor | _Place:
        if not bound.holds(tensor):
            return tensor.detach()  # else a node that saves its own output would keep itself alive
        offset = int(tensor.storage_offset()) - int(bound.flat.storage_offset())
        return _Place(offset, tensor.shape, tensor.stride())

    def unpack(saved: Tensor | _Place) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        place = torch.as_strided(bound.flat, saved.shape, saved.stride, bound.flat.storage_offset() + saved.offset)
        if (extent := bound.extent(place)) is not None:
            bound.need(*extent)
        return place

    hooks: Callable[..., AbstractContextManager[object]] = torch.autograd.graph.saved_tensors_hooks
    return hooks(pack, unpack)


# Names of places ------------------------------------------------------------------------------------------------------
#
# Which unit and parameter lie at a byte of a buffer, in words, for errors of the tiers below.
#
# They know bytes and contents only.


IN_PARTS = (Use.PINNED_STAGING, Use.READ_AHEAD, Use.UPDATE_SLOTS)
"""Buffers that hold parts of units."""


def place_of(
    spec: ModelSpec,
    layouts: Sequence[Layout],
    running: Schedule | None,
    buffer: str,
    start: int,
    content: object,
    nbytes: int = 2,
) -> str:
    """The unit, and for weights and gradients the parameter, that lie at byte `start` of a buffer. nbytes: of an
    element of weights."""
    unit: int | None = getattr(content, "unit", None)
    if unit is None:
        return buffer
    known = None if running is None else running.buffers[buffer]
    if not isinstance(content, Weights | Gradient) or running is None or known is None or known.use in IN_PARTS:
        return spec.units[unit].name
    layout = layouts[unit] if isinstance(content, Weights) else layouts[unit].trained
    if layout.ranks > 1 and (known.tier != "device" or known.use in (Use.WEIGHTS, Use.GRADIENTS)):
        return spec.units[unit].name  # a rank's own parts, of which only it knows the places
    begin, end = running.extent(buffer, content)
    return _named(spec, layout, unit, (start - begin) // ((end - begin) // layout.size))


def _named(spec: ModelSpec, layout: Layout, unit: int, element: int) -> str:
    inside = (field.name for field in layout.fields if field.start <= element < field.stop)
    return f"unit {spec.units[unit].name}, {next(inside, 'between parameters')}"
