"""Products with a matrix of which only the first rows have come: row block by row block, each behind its gate.

Two functions of torch are computed so, which nearly all models' large matrices go through: `linear`, whose rows are
outputs, and `embedding`, whose rows are looked up. An embedding has the same bits as in one piece; a product of a block
may be rounded otherwise than the same rows of the whole. Backward everything is there, and is one product again.
Left out: matrices that are stored the other way around (GPT-2's), and grouped products of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Blocks = Iterator[tuple[int, int]]
"""Rows [start, stop) that have come when they are given, all of them in turn."""

ByRows = Callable[[Blocks, Sequence[Any], Mapping[str, Any]], Tensor]
"""(blocks, arguments) -> what the function returns."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: Blocks) -> Tensor:
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        for start, stop in blocks:
            part = None if bias is None else bias[start:stop]
            out[..., start:stop] = functional.linear(x, weight[start:stop], part)
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
    x, weight, bias = (*args, *([None] if len(args) < 3 else []))[:3]
    found: Tensor = _Linear.apply(x, weight, kwargs.get("bias", bias), blocks)  # type: ignore[no-untyped-call]
    return found


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, by_frequency: bool, blocks: Blocks) -> Tensor:
        out = weight.new_empty(*ids.shape, weight.shape[1])
        for start, stop in blocks:
            within = ((ids >= start) & (ids < stop)).unsqueeze(-1)
            local = (ids - start).clamp(0, stop - start - 1)
            torch.where(within, functional.embedding(local, weight[start:stop]), out, out=out)
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding, ctx.by_frequency = weight.shape[0], padding, by_frequency
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        found = torch.ops.aten.embedding_dense_backward(gradient, ids, ctx.rows, ctx.padding, ctx.by_frequency)
        return None, found, None, None, None


def _embedding(blocks: Blocks, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    ids, weight = args[:2]
    padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
    by_frequency = args[5] if len(args) > 5 else kwargs.get("scale_grad_by_freq", False)
    place = -1 if padding is None else padding % weight.shape[0]
    found: Tensor = _Embedding.apply(ids, weight, place, by_frequency, blocks)  # type: ignore[no-untyped-call]
    return found


def _renorms(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an embedding changes its table when it is looked up."""
    return (args[3] if len(args) > 3 else kwargs.get("max_norm")) is not None


BY_ROWS: Mapping[Any, ByRows] = {functional.linear: _linear, functional.embedding: _embedding}
"""Functions whose second argument may come row by row."""


def splits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The matrix that may come row by row in this call of a function, if there is one."""
    if func not in BY_ROWS or len(args) < 2 or (_renorms(args, kwargs) and func is functional.embedding):
        return None
    weight = args[1]
    fits = isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_contiguous()
    return weight if fits and all(isinstance(each, Tensor) for each in args[:2]) else None
