"""Sums a unit's gradients over micro-batches on the device, then hands them to the optimizer.

A `GradientAccumulator` fills the flat buffer in which a unit's gradient is summed over micro-batches and token chunks.
Parameters without a gradient and the gaps between parameters are explicit zeros, so offsets never shift and a norm over
the whole buffer is right. Their receiver learns which parameters these are, since they are not updated. A unit has one
accumulator for all steps, since the hooks of its leaves, which stay as long as its slot does, refer to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megatrain.engine.weights import contiguous_strides
from megatrain.schedule.passes.pieces import Piece
from megatrain.spec import Part
from megatrain.spec.layout import Layout, MatrixGroup


class GradientReceiver(Protocol):
    """Receives complete gradients. Called on the host stream, one unit at a time."""

    @property
    def not_finite(self) -> Mapping[int, Sequence[str]]:
        """Unit -> parameters whose gradient is not finite, as far as this rank's part of it shows. Used with several
        ranks."""

    @property
    def settings(self) -> Mapping[str, object]:
        """What the optimizer uses gradients with (learning rate, clipping, ...). With several ranks it must be the same
        on each."""

    def absent(self, unit: int, names: Sequence[str]) -> None:
        """These trained parameters of a unit got no gradient from any micro-batch of this rank: what autograd leaves at
        `None`. Called when the unit's sum is complete, on the thread that computes, before `norm`."""

    def present(self, unit: int, flags: Tensor, flags_on_host: Tensor) -> None:
        """With several ranks that update during the backward pass: whether each trained parameter of a unit, in the
        layout's order, got a gradient on any rank. Before `update`.

        flags: uint8[parameters] where the update runs; flags_on_host: valid once the unit's gradient is there.
        """

    def norm(self, unit: int, gradient: Tensor, loss: Tensor | None, elements: Piece | None = None) -> None:
        """A unit's gradient is complete: flat tensor [layout.trained.size], bfloat16 or float32. It is on the host, and
        the step's loss is known to be finite; or, for a unit updated on the device, it is there, as is `loss`.
        elements: if it comes in pieces, in order, those of this one.

        Raises `NonFinite`, perhaps later if the unit is on the device.
        """

    def update(
        self, unit: int, gradient: Tensor, parts: Mapping[Part, Sequence[Tensor]], elements: Piece | None = None
    ) -> None:
        """Update a unit with its gradient, which may be that of the previous step.

        parts: the arrays of masters and moments, uint8, on the host or device, where the gradient is. elements: if a
        unit is updated in pieces, the elements [start, stop) that `gradient` and `parts` have; pieces are updated in
        order.
        """

    def momentum(
        self,
        unit: int,
        gradient: Tensor,
        moments: Sequence[Tensor],
        directions: Sequence[tuple[Piece, Tensor]],
        elements: Piece,
    ) -> None:
        """The first of three steps that update matrices whole: take the gradient of these elements into their momentum,
        uint8, and write their directions, flat: pairs (elements, direction)."""

    def orthogonalize(self, unit: int, group: MatrixGroup, direction: Tensor) -> None:
        """The second: make the matrices of a group orthogonal, in the memory of their direction, flat."""

    def apply(
        self,
        unit: int,
        directions: Sequence[tuple[Piece, Tensor]],
        parts: Mapping[Part, Sequence[Tensor]],
        elements: Piece,
    ) -> None:
        """The third: change masters by these directions. parts: as of `update`."""


def for_parameters(names: Sequence[str]) -> str:
    """The end of a message about a gradient: " for NAME and 3 more", or nothing without names."""
    more = f" and {len(names) - 1:,} more" if names[1:] else ""
    return f" for {names[0]}{more}" if names else ""


class SumBuffer:
    """The flat buffer [layout.size] in which the gradient of a unit is summed, and each parameter's view of it."""

    def __init__(self, layout: Layout, flat: Tensor) -> None:
        base = flat.storage_offset()
        self.views = {
            field.name: flat.as_strided(field.shape, contiguous_strides(field.shape), base + field.start)
            for field in layout.fields
        }
        self.gaps = [flat[start:stop] for start, stop in layout.gaps]


ELEMENTS_AT_ONCE = 1 << 20


def _add(total: Tensor, term: Tensor) -> None:
    """Add a term to a total of the same shape, which is contiguous. On a CPU, PyTorch first makes a copy of the whole
    term in the total's dtype, more than anything else that a step allocates if the term is an output layer's."""
    if total.dtype == term.dtype or not total.is_cpu:
        total.add_(term)
        return
    for part, more in zip(
        total.view(-1).split(ELEMENTS_AT_ONCE), term.reshape(-1).split(ELEMENTS_AT_ONCE), strict=True
    ):
        part.add_(more)


OnComplete = Callable[[str], None]
"""Called with a parameter's name when its gradient from one backward pass has been added."""


class GradientAccumulator:
    """Sums the gradients of a unit's trained parameters, in step after step."""

    def __init__(self) -> None:
        self.memory: SumBuffer | None = None
        """Where the sum is; `None` between steps."""
        self._views: Mapping[str, Tensor] = {}
        self._started: dict[str, bool] = {}
        """Parameters with at least one term."""
        self._claimed: set[str] = set()
        """Parameters whose view the running backward pass has written to; autograd will pass it to `accumulate`."""
        self.on_complete: OnComplete | None = None

    def sum_in(self, memory: SumBuffer) -> None:
        """Sum here from now on. If terms have been added elsewhere, their sum has been copied here."""
        if memory is not self.memory:
            self.memory, self._views = memory, memory.views
            for gap in memory.gaps:
                gap.zero_()

    def accumulate(self, name: str, leaf: Tensor) -> None:
        """Add a leaf's gradient to that of parameter `name`, and free it. For a claimed parameter it is the sum so far.

        A hook, which autograd calls with grad mode off.
        """
        gradient = leaf.grad
        if gradient is None:  # in a part that runs in chunks, a chunk may not use it
            return
        view = self._views[name]
        if name in self._claimed:
            self._claimed.discard(name)
            if gradient.data_ptr() != view.data_ptr():  # autograd has added another term to it
                view.copy_(gradient)
        elif name in self._started:
            _add(view, gradient)
        else:
            view.copy_(gradient)
        self._started[name] = True
        leaf.grad = None
        if self.on_complete is not None:
            self.on_complete(name)

    def register_hooks(self, leaves: Iterable[tuple[str, Tensor]]) -> None:
        """Have each leaf's gradient added as soon as autograd has it."""
        for name, leaf in leaves:
            leaf.register_post_accumulate_grad_hook(partial(self.accumulate, name))

    def view_to_write(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """A new view of a parameter's sum, which the caller may write a term to or add one to if it claims the
        parameter, and may return to autograd as a gradient. `None` before there is a sum, for a dtype other than the
        sum's, or if the parameter is claimed already."""
        view = self._views.get(name)
        if view is None or view.dtype != dtype or name in self._claimed:
            return None
        return view.view_as(view)

    def claim(self, name: str) -> None:
        """The next gradient taken under this name will be the sum itself, new term included."""
        self._claimed.add(name)

    def has_term(self, name: str) -> bool:
        """Whether anything has been added to a parameter's gradient."""
        return name in self._started

    def finish(self) -> list[str]:
        """All terms have been added: set the gradients of parameters without one to zero, and return their names."""
        absent = [name for name in self._views if name not in self._started]
        for name in absent:
            self._views[name].zero_()
        self.memory, self._views, self._started = None, {}, {}
        return absent
