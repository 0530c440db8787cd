"""Binds a unit's parameters as views of one flat buffer for a call, and lets autograd save them by name.

If autograd saves a tensor that is part of the flat buffer, only its place there is kept (`save_weights_by_name`). The
backward pass reads it from wherever the unit's weights are by then. So a kept graph does not keep a slot, which may be
overwritten between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from megatrain.schedule import Schedule, Use
from megatrain.schedule.contents import Gradient, Weights
from megatrain.spec import ModelSpec, UnitSpec
from megatrain.spec.layout import Layout, layout_of

BeforeRead = Callable[[int, int], None]
"""Called with the elements [start, stop) of a unit's weights that are about to be read."""


_Place = tuple[int, torch.Size, tuple[int, ...]]
"""A view of a unit's weights: its offset in elements from the start of the unit, its shape and its strides."""


@dataclass(frozen=True, slots=True)
class UnitLeaves:
    """A unit's parameters in one buffer as autograd leaves, whose gradients the unit's accumulator takes."""

    by_name: dict[str, Tensor]
    trained: list[tuple[str, Tensor]]
    """Full name and leaf of each trained parameter."""
    in_place: AbstractContextManager[object]
    """In the block, gradients of weights are computed in their sums, if compute and sums share memory."""


@dataclass(slots=True)
class UnitWeights:
    """A unit's weights in one buffer, and views of them, which serve every call that finds the unit there."""

    flat: Tensor
    """Elements of the compute dtype, [layout.size]."""
    parameters: dict[str, Tensor] | None = None
    """Views without gradients, by name."""
    leaves: UnitLeaves | None = None
    saved: dict[_Place, Tensor] = field(default_factory=dict)
    """Views that autograd has saved by their place."""


@dataclass(slots=True)
class BoundWeights:
    """The weights of a call. They are replaced when the unit has been fetched to another slot."""

    weights: UnitWeights
    before_read: BeforeRead | None = None
    """Called before autograd reads a saved weight."""

    @property
    def flat(self) -> Tensor:
        """Elements of the compute dtype, [layout.size]."""
        return self.weights.flat

    def extent(self, tensor: Tensor) -> tuple[int, int] | None:
        """The elements [start, stop) that a tensor spans; all for a view in another dtype, `None` for a tensor that is
        elsewhere or empty."""
        if not tensor.numel() or not self._starts_inside(tensor):
            return None
        if tensor.dtype != self.flat.dtype:
            return 0, self.flat.numel()
        start = (tensor.data_ptr() - self.flat.data_ptr()) // tensor.itemsize
        return start, start + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))

    def _starts_inside(self, tensor: Tensor) -> bool:
        """Whether a tensor begins inside `flat`, whose storage may have other buffers too."""
        begin = self.flat.data_ptr()
        return begin <= tensor.data_ptr() < begin + self.flat.nbytes


class UnitBinder:
    """Creates the parameters of one unit as views of its flat weights. `prefix` is removed from their names."""

    def __init__(self, unit: UnitSpec, prefix: str = "") -> None:
        layout = layout_of(unit)
        self.full_names = [field.name for field in layout.fields]
        self.names = [name.removeprefix(prefix) for name in self.full_names]
        self._trains = [param.trainable for param in unit.params]
        self._views = [(field.shape, contiguous_strides(field.shape), field.start) for field in layout.fields]

    def bind(self, flat: Tensor) -> dict[str, Tensor]:
        """Name -> view of `flat` in the parameter's shape."""
        base = flat.storage_offset()
        return {
            name: torch.as_strided(flat, shape, strides, base + start)
            for name, (shape, strides, start) in zip(self.names, self._views, strict=True)
        }

    def leaves(self, flat: Tensor) -> dict[str, Tensor]:
        """Name -> view of `flat` in the parameter's shape, an autograd leaf; those of trained parameters require a
        gradient."""
        views = self.bind(flat)
        for view, trains in zip(views.values(), self._trains, strict=True):
            view.requires_grad_(trains)
        return views

    def trained(self, leaves: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Full name and leaf of each trained parameter."""
        triples = zip(self.full_names, leaves.values(), self._trains, strict=True)
        return [(name, leaf) for name, leaf, trains in triples if trains]


@cache
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(strides)


def save_weights_by_name(bound: BoundWeights, *, watched: bool = False) -> AbstractContextManager[object]:
    """While active, autograd saves views of the bound weights by their place there, not as tensors.

    watched: whether a function mode looks out for reads of weights. Saving reads no element, but an `autograd.Function`
    in Python saves where modes see it.
    """
    flat = bound.weights.flat
    begin, nbytes, dtype, itemsize = flat.data_ptr(), flat.nbytes, flat.dtype, flat.itemsize

    def pack(tensor: Tensor) -> Tensor | _Place:
        if tensor.dtype != dtype or not 0 <= (offset := tensor.data_ptr() - begin) < nbytes:
            return tensor.data  # not the tensor: a node that saves its own output would keep itself alive
        return offset // itemsize, tensor.shape, tensor.stride()

    def pack_unseen(tensor: Tensor) -> Tensor | _Place:
        with torch._C.DisableTorchFunction():
            return pack(tensor)

    def unpack(saved: Tensor | _Place) -> Tensor:
        if type(saved) is not tuple:
            return saved  # type: ignore[return-value]
        weights = bound.weights
        try:
            view = weights.saved[saved]
        except KeyError:
            offset, shape, strides = saved
            view = torch.as_strided(weights.flat, shape, strides, weights.flat.storage_offset() + offset)
            weights.saved[saved] = view
        if bound.before_read is not None and (extent := bound.extent(view)) is not None:
            bound.before_read(*extent)
        return view

    hooks: Callable[..., AbstractContextManager[object]] = torch.autograd.graph.saved_tensors_hooks
    return hooks(pack_unseen if watched else pack, unpack)


# Places in messages ---------------------------------------------------------------------------------------------------
#
# Which unit and parameter are at a byte of a buffer, for error messages of rooms that know bytes and contents only.


HOLD_PARTS = (Use.READ_AHEAD, Use.UPDATE_SLOTS)
"""Buffers with parts of units only."""


def describe_place(
    spec: ModelSpec,
    layouts: Sequence[Layout],
    running: Schedule | None,
    buffer: str,
    start: int,
    content: object,
    nbytes: int = 2,
) -> str:
    """The unit at byte `start` of a buffer, and for weights and gradients the parameter. nbytes: of one weight."""
    unit: int | None = getattr(content, "unit", None)
    if unit is None:
        return buffer
    known = None if running is None else running.buffers[buffer]
    if not isinstance(content, Weights | Gradient) or running is None or known is None or known.use in HOLD_PARTS:
        return spec.units[unit].name
    layout = layouts[unit] if isinstance(content, Weights) else layouts[unit].trained
    if layout.ranks > 1 and (known.tier != "device" or known.use in (Use.WEIGHTS, Use.GRADIENTS)):
        return spec.units[unit].name  # one rank's parts of the unit, in an order that is not that of `layout`
    begin, end = running.extent(buffer, content)
    return _describe_element(spec, layout, unit, (start - begin) // ((end - begin) // layout.size))


def _describe_element(spec: ModelSpec, layout: Layout, unit: int, element: int) -> str:
    inside = (field.name for field in layout.fields if field.start <= element < field.stop)
    return f"unit {spec.units[unit].name}, {next(inside, 'between parameters')}"
