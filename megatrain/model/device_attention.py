"""Attention as an accelerator runs it, in measurements on a cpu.

PyTorch's fused attention for a cpu takes heads of one width and no dropout; where a model has others (latent attention
has wider queries and keys than values), a cpu makes the scores of all positions. CUDA has a kernel that takes them, the
memory-efficient one. Here its op gives zeros on a cpu, in the forms and with the saved tensors that it has there. Left
out: ROCm, whose kernel wants one width too, and makes the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatrain.model.mapped_tensors import lazy_zeros

ATTENTION = nn.functional.scaled_dot_product_attention
ALIGNMENT = 16
"""Bytes that a head's row must be a multiple of."""


class DeviceAttention(TorchFunctionMode):
    """In the block, attention for which a cpu has no fused kernel, but CUDA has, gives zeros by the op of that one.

    calls: how many did so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        output = _on_a_device(*args, **(kwargs or {})) if func is ATTENTION else None
        self.calls += output is not None
        return func(*args, **(kwargs or {})) if output is None else output


def _on_a_device(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """What attention gives there; `None` where the two run alike, and the arguments are those of PyTorch's function."""
    if not _on_cuda_alone(query, key, value, dropout_p):
        return None
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), float("-inf"))
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    wanted = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    output: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, wanted, dropout_p, is_causal, scale=scale
    )[0]
    return output


def _on_cuda_alone(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether CUDA's memory-efficient kernel takes them, and a cpu's fused one does not."""
    fused = query.shape[-1] == value.shape[-1] and not dropout
    rows = [each.shape[-1] * each.element_size() for each in (query, value)]
    return (
        not fused
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and query.dim() == 4
        and query.shape[-1] == key.shape[-1]
        and not any(nbytes % ALIGNMENT for nbytes in rows)
    )


# Kernels that compute nothing -----------------------------------------------------------------------------------------


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    for_backward: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    sums = lazy_zeros((batch, heads, length if for_backward else 0), torch.float32)
    seed, offset = (torch.zeros((), dtype=torch.int64) for _ in range(2))
    return _by_tokens(query, value.shape[-1]), sums, seed, offset


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Tensor | None, ...]:
    bias, wanted = rest[0], rest[6]
    grads = [_by_tokens(each, each.shape[-1]) for each in (query, key, value)]
    of_bias = torch.zeros_like(bias) if wanted[3] and bias is not None else None
    return *(grad if wants else None for grad, wants in zip(grads, wanted, strict=False)), of_bias


def _by_tokens(like: Tensor, width: int) -> Tensor:
    """Zeros of as many heads and tokens, which lie token by token."""
    batch, heads, length, _ = like.shape
    return lazy_zeros((batch, length, heads, width), like.dtype).transpose(1, 2)


_KERNELS = torch.library.Library("aten", "IMPL")
_KERNELS.impl("_scaled_dot_product_efficient_attention", _forward, "CPU")
_KERNELS.impl("_scaled_dot_product_efficient_attention_backward", _backward, "CPU")
