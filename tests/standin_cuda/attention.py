"""The fused attention kernels that PyTorch picks on a GPU, computed by its CPU kernel.

`csrc/kernels.cpp` chooses as PyTorch does: flash attention for half precision without a mask, otherwise the
memory-efficient one. What each saves for its backward is what the real one saves, the random state included: on the
device for flash attention, and in host memory, not initialised, for the memory-efficient one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_libraries: list[Any] = []  # a library's kernels are there for as long as it is


def install() -> None:
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in {
        "flash_attention": _flash,
        "flash_attention_backward": _flash_backward,
        "efficient_attention": _efficient,
        "efficient_attention_backward": _efficient_backward,
    }.items():
        library.impl(f"_scaled_dot_product_{name}", kernel, "CUDA")
    _libraries.append(library)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = _forward(q, _spread(k, q), _spread(v, q), 0.0, is_causal, scale=scale)
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    return out, lse, None, None, q.shape[2], k.shape[2], seed, unused, torch.empty(0, dtype=q.dtype, device=q.device)


def _flash_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_q: Any,
    cum_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _require_one_device(q, gradient, k, v, out, lse, seed)
    of_q, of_k, of_v = _backward(gradient, q, _spread(k, q), _spread(v, q), out, lse, 0.0, is_causal, scale=scale)
    return of_q, _gather(of_k, k), _gather(of_v, v)


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    if bias is not None:
        _require_one_device(q, bias)
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = _forward(q, k, _widened(v, q), 0.0, is_causal, attn_mask=bias, scale=scale)
    seed, offset = torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)  # in host memory, as there
    return out[..., : v.shape[-1]], lse, seed, offset


def _efficient_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    mask: Any,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    _require_one_device(q, gradient, k, v, out, lse)
    if seed.device.type != "cpu":
        raise RuntimeError(
            "memory-efficient attention saved its random state in host memory, and got it back elsewhere"
        )
    some = bias is not None and bias.numel() > 0
    full = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]) if bias is not None and some else None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = [_widened(each, q) for each in (gradient, q, k, v, out)]
    of_q, of_k, of_v = _backward(*wide, lse, 0.0, is_causal, attn_mask=full, scale=scale)
    return of_q, of_k, of_v[..., : v.shape[-1]], None


def _spread(keys: Tensor, q: Tensor) -> Tensor:
    """Keys or values [batch, heads, length, width], repeated for the queries that share them."""
    return keys if keys.shape[1] == q.shape[1] else keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)


def _gather(gradient: Tensor, keys: Tensor) -> Tensor:
    """The inverse: the gradients of repeated keys or values, summed."""
    return gradient if gradient.shape == keys.shape else gradient.unflatten(1, (keys.shape[1], -1)).sum(2)


def _widened(tensor: Tensor, q: Tensor) -> Tensor:
    """Zeros behind each head of values that is narrower than those of the queries, which the CPU's kernel does not
    take."""
    return tensor if tensor.shape[-1] == q.shape[-1] else pad(tensor, (0, q.shape[-1] - tensor.shape[-1]))


def _require_one_device(q: Tensor, *others: Tensor) -> None:
    for each in others:
        if each.device != q.device:
            what = f"Expected all tensors to be on the same device: {each.device} and {q.device} (attention)"
            raise RuntimeError(what)
