"""`linear` and `embedding` as autograd functions that write weight gradients straight into their sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from megatrain.engine.gradient_sums import UnitSum
from megatrain.model import is_wrapped

# Arguments of a call --------------------------------------------------------------------------------------------------
#
# What a call of `linear` or `embedding` asks for, given by place, by name or by default.


_OF_EMBEDDING = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
"""Behind ids and table, in order."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The options of `torch.nn.functional.embedding`."""

    padding: int
    """The id whose row gets no gradient, or -1."""
    renorms: bool
    """Whether rows are changed when they are looked up."""
    by_frequency: bool
    sparse: bool


def bias_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The bias of a `linear`."""
    bias: Tensor | None = args[2] if len(args) > 2 else kwargs.get("bias")
    return bias


def lookup_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Lookup:
    """The options of an `embedding`."""
    given = {**dict(zip(_OF_EMBEDDING, args[2:], strict=False)), **kwargs}
    padding = given.get("padding_idx")
    return Lookup(
        -1 if padding is None else padding % len(args[1]),
        given.get("max_norm") is not None,
        bool(given.get("scale_grad_by_freq")),
        bool(given.get("sparse")),
    )


# Gradients in place ---------------------------------------------------------------------------------------------------
#
# Gradients of weights, formed where they are summed.
#
# Autograd makes the gradient of a weight in memory of its own, and it is then copied to the unit's sum: for each weight
# as much fresh memory again, and three passes over it. Where compute and sum share memory and a dtype, the two
# functions that nearly all large weights go through, `linear` and `embedding`, are therefore run as functions of our
# own: forward the library's, backward the same products as autograd's, written into the sum if nothing is there yet. An
# embedding whose sum has been begun (a tied head's) is added to it in the rows that were looked up. So each bit is
# autograd's, but for the sign of a zero that zero is added to.
#
# What autograd is given is the sum itself, a view of it; what it makes of that with other terms of the same weight is
# right, wherever it puts it (`UnitSum.add`). Left out: a `linear` with a bias, what else weights go through, and later
# micro-batches and chunks of tokens, whose terms are products of their own to be added, as everywhere.


class GradientDestination:
    """Where the gradients of a call's weights will be summed, which is known when the backward pass begins."""

    def __init__(self, total: UnitSum | None = None) -> None:
        self.total = total

    def product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """The gradient `left` @ `right` of a weight, in the sum if it is the first term."""
        view = self._of(name, left.dtype)
        if view is None or self.total is None or self.total.begun(name):
            return left @ right
        self.total.claim(name)
        return torch.mm(left, right, out=view)

    def rows(self, name: str, gradient: Tensor, ids: Tensor, count: int, padding: int) -> Tensor:
        """The gradient of a table [count, width] that was looked up at `ids` int64[...], added to the sum in place;
        `padding` is an id that has none, or -1."""
        of_table: Any = torch.ops.aten.embedding_dense_backward
        view = self._of(name, gradient.dtype)
        if view is None or self.total is None:
            dense: Tensor = of_table(gradient, ids, count, padding, False)
            return dense
        found, places = ids.reshape(-1).unique(return_inverse=True)
        few = of_table(gradient.reshape(len(places), -1), places, len(found), -1, False)
        few[found == padding] = 0
        if not self.total.begun(name):
            view.zero_()
        self.total.claim(name)
        return view.index_add_(0, found, few)

    def _of(self, name: str, dtype: torch.dtype) -> Tensor | None:
        return None if self.total is None else self.total.writable(name, dtype)


class GradientsInPlace(TorchFunctionMode):
    """While active, on this thread: `linear` and `embedding` with one of these weights have their gradient formed in
    `target`. `weights` are the leaves with their full names."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], target: GradientDestination) -> None:
        super().__init__()
        self._names = {id(leaf): name for name, leaf in weights if leaf.dim() == 2}
        self._target = target

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = self._names.get(id(args[1])) if func in _IN_PLACE and len(args) > 1 else None
        if name is None or not torch.is_grad_enabled() or any(map(is_wrapped, args)):
            return func(*args, **kwargs)
        return _IN_PLACE[func](name, self._target, args, kwargs)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str, target: GradientDestination) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.target = name, target
        # Within a function of our own torch takes no view for a weight that trains, and where rows do not lie behind
        # each other it would compute one product for each sample then, which is another op and rounds otherwise.
        flat = x.reshape(-1, x.shape[-1])
        found: Tensor = torch.ops.aten._unsafe_view(functional.linear(flat, weight), [*x.shape[:-1], len(weight)])
        return found  # no view of another tensor to autograd, so that a model may change it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat, rows = gradient.reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])
        of_weight = ctx.target.product(ctx.name, flat.t(), rows)  # first, as autograd forms it
        for_x = (flat @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return for_x, of_weight, None, None


def _linear(name: str, target: GradientDestination, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if bias_of(args, kwargs) is not None:
        return functional.linear(*args, **kwargs)
    return _Linear.apply(*args[:2], name, target)  # type: ignore[no-untyped-call]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, name: str, target: GradientDestination) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.count, ctx.padding, ctx.name, ctx.target = len(weight), padding, name, target
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        return None, ctx.target.rows(ctx.name, gradient, ids, ctx.count, ctx.padding), None, None, None


def _embedding(name: str, target: GradientDestination, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    of = lookup_of(args, kwargs)
    if of.renorms or of.by_frequency or of.sparse:
        return functional.embedding(*args, **kwargs)
    return _Embedding.apply(*args[:2], of.padding, name, target)  # type: ignore[no-untyped-call]


_IN_PLACE: Mapping[Any, Any] = {functional.linear: _linear, functional.embedding: _embedding}
