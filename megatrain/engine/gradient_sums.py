"""Sums a unit's gradients over micro-batches on the device, then hands them to the optimizer.

A `UnitSum` is the flat buffer in which a unit's gradient adds up over micro-batches and token chunks. What no term
reached is an explicit zero, as are the gaps between parameters, so offsets never shift and a norm over the whole
buffer is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatrain.spec import Part
from megatrain.spec.layout import Layout


class GradSink(Protocol):
    """Receives finished gradients. Called on the host stream, one unit at a time."""

    not_finite: dict[int, list[str]]
    """Of several ranks: unit -> parameters of which this rank's part of the step's gradient is not finite, where they
    are known."""
    how: dict[str, object]
    """Of several ranks: what gradients are used with, which all must have alike."""

    def norm(self, unit: int, gradient: Tensor, loss: Tensor | None) -> None:
        """A unit's gradient has landed: flat tensor [layout.trained.size], bfloat16 or float32, on the host or, for a
        unit that is updated there, on the device, where the step's `loss` is, too. On the host the loss has been found
        to be finite.

        Raises `NonFinite`, of a unit on the device perhaps later.
        """

    def update(
        self, unit: int, gradient: Tensor, parts: Mapping[Part, Tensor], elements: tuple[int, int] | None = None
    ) -> None:
        """The time to use a unit's gradient, which may be that of the last step.

        `parts` are masters and moments of the unit, uint8, where the gradient is: on host or device. elements: where a
        unit is updated in pieces, on the device, those [start, stop) that gradient and parts are of; each piece comes
        behind those before it.
        """


def of_parameters(names: Sequence[str]) -> str:
    """What a line about a gradient says of its parameters."""
    more = f" and {len(names) - 1:,} more" if names[1:] else ""
    return f" for {names[0]}{more}" if names else ""


class UnitSum:
    """The gradient of what trains in one unit, under construction in `flat` [layout.size] of the trained layout.

    before: the sum so far, which has been copied here.
    """

    def __init__(self, layout: Layout, flat: Tensor, before: UnitSum | None = None) -> None:
        self._place = flat.data_ptr()
        self._views = {field.name: flat[field.start : field.stop].view(field.shape) for field in layout.fields}
        self._reached: set[str] = set(before._reached) if before else set()
        self._claimed: set[str] = set()
        """Parameters of which the backward pass under way has written into its view, and hands in the view itself."""
        for start, stop in layout.gaps:
            flat[start:stop].zero_()

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a term of the gradient of parameter `name`; of a claimed one it is the sum with all terms so far."""
        view = self._views[name]
        if name in self._claimed:
            self._claimed.discard(name)
            if gradient.data_ptr() != view.data_ptr():  # autograd has added something else to it
                view.copy_(gradient)
        elif name in self._reached:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self._reached.add(name)

    def lies_in(self, flat: Tensor) -> bool:
        """Whether that is where it is under construction."""
        return self._place == flat.data_ptr()

    def writable(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Where a term of this dtype may be written or added by whoever claims it: a view of its own, which autograd
        can take as it is. `None` for a dtype that is not the sum's, and once it has been claimed."""
        view = self._views[name]
        return view.view_as(view) if name not in self._claimed and view.dtype == dtype else None

    def claim(self, name: str) -> None:
        """The next that is added under this name is the sum itself, with a new term in it."""
        self._claimed.add(name)

    def begun(self, name: str) -> bool:
        """Whether there is a term in the sum."""
        return name in self._reached

    def close(self) -> None:
        """All terms are in: what none reached is zero."""
        for name, view in self._views.items():
            if name not in self._reached:
                view.zero_()


Finished = Callable[[str], None]
"""Told of a parameter whose gradient from one backward pass has been added up."""


def send_to_sum(leaves: Iterable[tuple[str, Tensor]], total: UnitSum, finished: Finished = lambda name: None) -> None:
    """Have each leaf's gradient added to `total` the moment it is complete, and forgotten."""
    for name, leaf in leaves:
        leaf.register_post_accumulate_grad_hook(_Sender(name, total, finished))


class _Sender:
    __slots__ = ("finished", "name", "total")

    def __init__(self, name: str, total: UnitSum, finished: Finished) -> None:
        self.name, self.total, self.finished = name, total, finished

    @torch.no_grad()
    def __call__(self, leaf: Tensor) -> None:
        if leaf.grad is None:  # a part in chunks does not use it, so it is not reached
            return
        self.total.add(self.name, leaf.grad)
        leaf.grad = None
        self.finished(self.name)
