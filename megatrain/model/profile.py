"""What a layer takes beside its weights, found by running it on zeros: attention arithmetic, and what autograd keeps.

No formula per architecture could be right for all of them, and one run of each kind of layer at two short lengths
tells both numbers: kept bytes are linear in tokens, plus a part that grows with tokens x length where a kernel keeps
its scores. The zeros take no memory worth naming. Left out: what a kernel needs for its own time only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatrain.spec import LayerProfile

LENGTHS = (8, 16)
"""Tokens of the two runs."""

MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)

Run = Callable[[int], tuple[Tensor, Iterable[Tensor]]]
"""Runs the layer on so many tokens with gradients; its output, and tensors that do not count: weights, arguments."""


def profile_layer(layer: nn.Module, run: Run) -> LayerProfile:
    """Profile of one layer from two runs, one per length of `LENGTHS`."""
    kept = []
    with _Attention() as attention:
        for length in LENGTHS:
            kept.append(kept_nbytes(run, length))
    (short, long), (less, more) = LENGTHS, kept
    by_length = max(0.0, (more / long - less / short) / (long - short))
    return LayerProfile(
        attention_flops=attention.flops / len(LENGTHS),
        window=window_of(layer),
        kept_nbytes=less / short - by_length * short,
        kept_nbytes_by_length=by_length,
    )


class _Attention(TorchFunctionMode):
    """Counts operations of attention per token and position, of the fused function and of products of scores."""

    flops: float = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            query, value = args[0], args[2] if len(args) > 2 else (kwargs or {})["value"]
            self.flops += 2.0 * query.shape[1] * (query.shape[-1] + value.shape[-1])
        output = func(*args, **(kwargs or {}))
        if func in MATMULS and output.dim() == 4 and output.shape[-2] in LENGTHS:
            self.flops += 2.0 * output.numel() * args[0].shape[-1] / output.shape[-2] ** 2
        return output


def kept_nbytes(run: Run, length: int) -> int:
    """Bytes that autograd keeps for the backward pass of one run, each storage once."""
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no storage is freed and its address used again

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    with _hooks(pack):
        output, others = run(length)
    for tensor in others:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    del output
    return sum(kept.values())


@contextmanager
def _hooks(pack: Callable[[Tensor], Tensor]) -> Iterator[None]:
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    with torch.enable_grad(), hooks(pack, lambda tensor: tensor):
        yield


def window_of(layer: nn.Module) -> int | None:
    """Positions that the layer attends to at most, if one of its modules says so."""
    windows = [getattr(module, "sliding_window", None) for module in layer.modules()]
    return next((window for window in windows if isinstance(window, int) and window > 0), None)
