"""`linear` and `embedding` as autograd functions that write weight gradients straight into their sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode

from megatrain.engine.gradient_accumulation import GradientAccumulator
from megatrain.model import is_wrapped

# Gradients in place ---------------------------------------------------------------------------------------------------
#
# Autograd puts the gradient of a weight into fresh memory, from where it is copied to the unit's sum: that is as much
# memory again for each weight, and three passes over it. So where compute and sum share memory and a dtype, the two
# functions that nearly all large weights go through, `linear` and `embedding`, are replaced by autograd functions with
# the same forward, whose backward computes the same products as autograd's but writes them into the sum if it is still
# empty. The gradient of an embedding is added to a sum that is not (that of a tied head) in the rows looked up. So each
# bit is autograd's, except for the sign of a zero to which zero is added.
#
# As the gradient, autograd gets a view of the sum itself. Whatever it then does with other terms of the same weight is
# right, wherever it puts the result (`GradientAccumulator.take`). Not covered: `linear` with a bias, other functions of
# weights, and later micro-batches and chunks of tokens, whose terms are computed apart and added, as everywhere.


def _product(total: GradientAccumulator, name: str, left: Tensor, right: Tensor) -> Tensor:
    """The gradient `left` @ `right` of a weight; written into its sum if it is the first term."""
    view = total.view_to_write(name, left.dtype)
    if view is None or total.has_term(name):
        return left @ right
    total.claim(name)
    return torch.mm(left, right, out=view)


def _rows(total: GradientAccumulator, name: str, gradient: Tensor, ids: Tensor, count: int, padding: int) -> Tensor:
    """The gradient of an embedding weight [count, width] whose rows were looked up at `ids` int64[...]; added to its
    sum in place. `padding` is the id whose row gets no gradient, or -1."""
    embedding_backward: Any = torch.ops.aten.embedding_dense_backward
    view = total.view_to_write(name, gradient.dtype)
    if view is None:
        dense: Tensor = embedding_backward(gradient, ids, count, padding, False)
        return dense
    unique, positions = ids.reshape(-1).unique(return_inverse=True)
    rows = embedding_backward(gradient.reshape(len(positions), -1), positions, len(unique), -1, False)
    rows[unique == padding] = 0
    if not total.has_term(name):
        view.zero_()
    total.claim(name)
    return view.index_add_(0, unique, rows)


class GradientsInPlace(TorchFunctionMode):
    """While active, on this thread: `linear` and `embedding` compute the gradients of these weights in `total`, which
    begins no sooner than the backward pass.

    weights: full names and leaves. Empty ones (an MLP of no width) have no gradient to write.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], total: GradientAccumulator) -> None:
        super().__init__()
        self._names = {id(leaf): name for name, leaf in weights if leaf.dim() == 2 and leaf.numel()}
        self._total = total

    def __exit__(self, *_: object) -> None:
        """Leave the stack of modes as it was before, also after Ctrl-C in the middle of torch's own pop or push."""
        while self in _get_current_function_mode_stack():
            _pop_mode()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = self._names.get(id(args[1])) if func in _REPLACEMENTS and len(args) > 1 else None
        if name is None or not torch.is_grad_enabled() or any(map(is_wrapped, args)):
            return func(*args, **kwargs)
        return _REPLACEMENTS[func](name, self._total, args, kwargs)


class _LinearInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str, total: GradientAccumulator) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.total = name, total
        # Inside an autograd function torch does not flatten an input that is not contiguous if the weight requires a
        # gradient: it computes one product per sample, which is another op and rounds differently. So flatten it here.
        flat = x.reshape(-1, x.shape[-1])
        out: Tensor = torch.ops.aten._unsafe_view(functional.linear(flat, weight), [*x.shape[:-1], len(weight)])
        return out  # for autograd not a view of another tensor, so the model may change it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat, rows = gradient.reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])
        grad_weight = _product(ctx.total, ctx.name, flat.t(), rows)  # first, as in autograd's own order
        grad_x = (flat @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return grad_x, grad_weight, None, None


def _linear(name: str, total: GradientAccumulator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if (args[2] if len(args) > 2 else kwargs.get("bias")) is not None:
        return functional.linear(*args, **kwargs)
    return _LinearInPlace.apply(*args[:2], name, total)  # type: ignore[no-untyped-call]


EMBEDDING_OPTIONS = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
"""The arguments of `torch.nn.functional.embedding` behind ids and weight, in order."""


class _EmbeddingInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, name: str, total: GradientAccumulator) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.count, ctx.padding, ctx.name, ctx.total = len(weight), padding, name, total
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        return None, _rows(ctx.total, ctx.name, gradient, ids, ctx.count, ctx.padding), None, None, None


def _embedding(name: str, total: GradientAccumulator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    options = {**dict(zip(EMBEDDING_OPTIONS, args[2:], strict=False)), **kwargs}
    if options.get("max_norm") is not None or options.get("scale_grad_by_freq") or options.get("sparse"):
        return functional.embedding(*args, **kwargs)
    padding = options.get("padding_idx")
    at = -1 if padding is None else padding % len(args[1])
    return _EmbeddingInPlace.apply(*args[:2], at, name, total)  # type: ignore[no-untyped-call]


_REPLACEMENTS: Mapping[Any, Any] = {functional.linear: _linear, functional.embedding: _embedding}


@contextmanager
def graph_without_tensors() -> Iterator[None]:
    """In the block, autograd builds graphs that keep no tensor: they tell what needs a gradient, and have none."""

    def nothing(_: object) -> None:
        return None

    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    with torch.enable_grad(), hooks(nothing, nothing):
        yield
