"""Stand-ins for CUDA's attention kernel, to measure memory on a CPU: they save the same tensors for backward.

PyTorch's fused CPU attention needs queries, keys and values of one width and no dropout. For other models (DeepSeek's
queries and keys are wider than its values) a CPU materialises the scores of all positions, while CUDA runs its
memory-efficient kernel. Inside `DeviceAttention` that kernel's op returns zeros on a CPU, with the shapes, strides
and saved tensors it has on CUDA. ROCm is left out: its kernel needs one width too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatrain.model.mapped_tensors import lazy_zeros

ATTENTION = nn.functional.scaled_dot_product_attention
ALIGNMENT = 16
"""The kernel needs rows of a head, in bytes, to be a multiple of this."""


class DeviceAttention(TorchFunctionMode):
    """Inside the block, attention that CUDA fuses and a CPU does not returns zeros by CUDA's memory-efficient op.

    calls: how many calls did so.
    """

    opened = 0
    """Blocks that are open; outside of them the op raises on a CPU, as without this module."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __enter__(self) -> Self:
        DeviceAttention.opened += 1
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        DeviceAttention.opened -= 1
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        output = _as_on_cuda(*args, **(kwargs or {})) if func is ATTENTION else None
        self.calls += output is not None
        return func(*args, **(kwargs or {})) if output is None else output


def _as_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Zeros, by the op that CUDA would run; `None` if a CPU runs the same kernel. Takes PyTorch's own arguments."""
    if not _only_cuda_fuses(query, key, value, dropout_p):
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


def _only_cuda_fuses(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether CUDA's memory-efficient kernel supports these tensors and the CPU's fused one does not."""
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
    if not DeviceAttention.opened:
        raise NotImplementedError("aten::_scaled_dot_product_efficient_attention has no kernel for the CPU")
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
    """Zeros [batch, heads, length, width], stored token by token."""
    batch, heads, length, _ = like.shape
    return lazy_zeros((batch, length, heads, width), like.dtype).transpose(1, 2)


_KERNELS = torch.library.Library("aten", "IMPL")
_KERNELS.impl("_scaled_dot_product_efficient_attention", _forward, "CPU")
_KERNELS.impl("_scaled_dot_product_efficient_attention_backward", _backward, "CPU")
