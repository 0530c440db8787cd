"""Products with a matrix of which only the first rows have come: row block by row block, each behind its gate.

Three functions of torch are computed so, which nearly all models' large matrices go through: `linear`, whose rows are
outputs, `embedding`, whose rows are looked up, and the grouped product, whose rows are experts. An embedding has the
same bits as in one piece; a product of a block may be rounded otherwise than these rows of the whole. Experts are
products of their own: on the cpu they have the same bits, of other devices that is not known. Backward everything is
there, and is one product again.

Left out: matrices that are stored the other way around (`Conv1D`, as GPT-2 has). Their rows are inputs, so a block
would give a partial sum, which bfloat16 rounds once for each; and GPT-2's largest, 20 MB in its largest model, are
smaller than the shards that they would be cut into. Experts that are gathered token by token (`batched_mm`) need all
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.engine.arguments import bias_of, lookup_of

Blocks = Iterator[tuple[int, int, Tensor]]
"""Rows [start, stop) that have come when they are given, all of them in turn, and where they lie."""

ByRows = Callable[[Blocks, Sequence[Any], Mapping[str, Any]], Tensor]
"""(blocks, arguments) -> what the function returns."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: Blocks) -> Tensor:
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        for start, stop, rows in blocks:
            part = None if bias is None else bias[start:stop]
            out[..., start:stop] = functional.linear(x, rows, part)
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, weight.shape[0])
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        return (
            (flat @ weight).view(x.shape) if for_x else None,
            flat.t() @ x.reshape(-1, weight.shape[1]) if for_weight else None,
            flat.sum(0) if for_bias else None,
            None,
        )


def _linear(blocks: Blocks, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    found: Tensor = _Linear.apply(*args[:2], bias_of(args, kwargs), blocks)  # type: ignore[no-untyped-call]
    return found


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, by_frequency: bool, blocks: Blocks) -> Tensor:
        out = weight.new_empty(*ids.shape, weight.shape[1])
        for start, stop, rows in blocks:
            within = ((ids >= start) & (ids < stop)).unsqueeze(-1)
            local = ids - start  # an id below the first row or above the last is an error, as in one piece
            local = local.clamp(min=0) if start else local
            local = local.clamp(max=stop - start - 1) if stop < len(weight) else local
            torch.where(within, functional.embedding(local, rows), out, out=out)
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding, ctx.by_frequency = weight.shape[0], padding, by_frequency
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        found = torch.ops.aten.embedding_dense_backward(gradient, ids, ctx.rows, ctx.padding, ctx.by_frequency)
        return None, found, None, None, None


def _embedding(blocks: Blocks, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    of = lookup_of(args, kwargs)
    found: Tensor = _Embedding.apply(*args[:2], of.padding, of.by_frequency, blocks)  # type: ignore[no-untyped-call]
    return found


class _Grouped(torch.autograd.Function):
    """Tokens by experts, sorted: x [tokens, in], weight [experts, in, out], ends [experts] of each one's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, blocks: Blocks) -> Tensor:
        out = x.new_empty(x.shape[0], weight.shape[2])
        places = [0, *ends.tolist()]  # a device waits here once; which tokens are whose is known nowhere else
        for start, stop, rows in blocks:
            first, last = places[start], places[stop]
            if first < last:
                out[first:last] = torch._grouped_mm(x[first:last], rows, offs=ends[start:stop] - first)
        out[places[-1] :] = 0.0
        ctx.save_for_backward(x, weight, ends)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """As autograd's own, in the memory order of the weight."""
        x, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        for_x, for_weight, _, _ = ctx.needs_input_grad
        found = None
        if for_weight and weight.is_contiguous():
            found = torch._grouped_mm(x.t(), gradient, offs=ends)
        elif for_weight:
            found = torch._grouped_mm(gradient.t(), x, offs=ends).transpose(-2, -1)
        return torch._grouped_mm(gradient, weight.transpose(-2, -1), offs=ends) if for_x else None, found, None, None


def _grouped(blocks: Blocks, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    found: Tensor = _Grouped.apply(*args[:2], _ends(args, kwargs), blocks)  # type: ignore[no-untyped-call]
    return found


def _ends(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[2] if len(args) > 2 else kwargs.get("offs")


def _is_plain(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a grouped product is of tokens by experts and nothing else: no bias, and no other dtype."""
    ends, rest = _ends(args, kwargs), (*args[3:], kwargs.get("bias"), kwargs.get("out_dtype"))
    plain = isinstance(ends, Tensor) and ends.dim() == 1 and all(each is None for each in rest)
    return plain and args[0].dim() == 2 and args[1].dim() == 3 and len(ends) == len(args[1])


BY_ROWS: Mapping[Any, ByRows] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    torch._grouped_mm: _grouped,  # which `functional.grouped_mm` calls
}
"""Functions whose second argument may come row by row."""


def may_split(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the rows of the second argument may come one by one in this call of a function, if they lie in order."""
    if func not in BY_ROWS or len(args) < 2 or not all(isinstance(each, Tensor) for each in args[:2]):
        return False
    if BY_ROWS[func] is _grouped:
        return _is_plain(args, kwargs)
    return args[1].dim() == 2 and not (func is functional.embedding and lookup_of(args, kwargs).renorms)


def splits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The second argument as a matrix whose rows may come one by one in this call of a function, if they may; an expert
    is a row."""
    if not may_split(func, args, kwargs):
        return None
    weight: Tensor = args[1]
    stored = weight if weight.dim() == 2 or weight.is_contiguous() else weight.transpose(-2, -1)
    return stored.flatten(1) if stored.is_contiguous() else None
