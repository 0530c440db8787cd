"""Triton kernels for AdamW and the gradient norm of a unit on a GPU. Imported only if Triton can run.

The arithmetic is that of `device_update`, operation by operation: `div_rn` and `sqrt_rn` round correctly, and
kernels are launched without contraction (`enable_fp_fusion=False`), so products and sums round separately.
`device_update` compares both before it uses these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatrain.optim import AdamWScalars, StateArrays

BLOCK = 1024
"""Elements per program."""


@triton.jit
def _as_float32(values):
    """Convert float32, or bfloat16 as uint16 bits, to float32, subnormals included."""
    if values.dtype == tl.uint16:
        return (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return values


@triton.jit
def _adamw(
    hi,
    low,
    m,
    v,
    gradient,
    flag,
    numel,
    keep,
    step_size,
    root_scale,
    eps,
    share,
    b2,
    rest2,
    grad_scale,
    NEAR: tl.constexpr,
    SPLIT: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """m becomes m + share * (g - m) if NEAR, else g + share * (g - m), as in `torch.lerp`. `low` is used if SPLIT,
    `flag` if CHECKED."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    last = numel
    if CHECKED:
        last = tl.where(tl.load(flag) != 0, numel, 0)
    inside = place < last
    g = _as_float32(tl.load(gradient + place, mask=inside, other=0)) * grad_scale
    old_m = tl.load(m + place, mask=inside, other=0.0)
    way = (g - old_m) * share
    new_m = old_m + way if NEAR else way + g
    new_v = tl.load(v + place, mask=inside, other=0.0) * b2 + (g * rest2) * g
    change = tl.div_rn(new_m * step_size, tl.sqrt_rn(new_v) * root_scale + eps)
    if SPLIT:
        below = tl.load(low + place, mask=inside, other=0).to(tl.uint32)
        bits = ((tl.load(hi + place, mask=inside, other=0).to(tl.uint32) - (below >> 15)) << 16) | below
        bits = (bits.to(tl.float32, bitcast=True) * keep - change).to(tl.uint32, bitcast=True)
        tl.store(low + place, bits.to(tl.uint16), mask=inside)
        tl.store(hi + place, ((bits + 0x8000) >> 16).to(tl.uint16), mask=inside)
    else:
        tl.store(hi + place, tl.load(hi + place, mask=inside, other=0.0) * keep - change, mask=inside)
    tl.store(m + place, new_m, mask=inside)
    tl.store(v + place, new_v, mask=inside)


@triton.jit
def _squares(gradient, sums, numel, BLOCK: tl.constexpr):
    """The sum of squares of each block, in float64."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = _as_float32(tl.load(gradient + place, mask=place < numel, other=0)).to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(wide * wide))


def adamw(
    state: StateArrays[Tensor], gradient: Tensor, scalars: AdamWScalars, flag: Tensor | None, *, decays: bool
) -> None:
    """One AdamW step in place, on the current stream of the current device, on state of n elements.

    gradient: bfloat16[n] or float32[n]. flag: a bool; if false nothing changes. Raises `ValueError` for other dtypes
    or lengths, with which the kernel would write out of bounds.
    """
    (m, v), low = state.moments, state.lo
    kind = torch.float32 if low is None else torch.int16
    expected = [*((half, kind) for half in state.masters), (m, torch.float32), (v, torch.float32)]
    if any((array.dtype, array.shape) != (dtype, gradient.shape) for array, dtype in expected):
        raise ValueError("tensors of one update differ in length, or have a wrong dtype")
    near = bool(scalars.rest1 < 0.5)
    unused = m  # placeholder for arguments that the kernel does not read
    hi, below = (state.hi, unused) if low is None else (state.hi.view(torch.uint16), low.view(torch.uint16))
    _adamw[(triton.cdiv(gradient.numel(), BLOCK),)](
        hi,
        below,
        m,
        v,
        _bits(gradient),
        unused if flag is None else flag.view(torch.uint8),
        gradient.numel(),
        float(scalars.decay) if decays else 1.0,
        float(scalars.step_size),
        float(scalars.root_scale),
        float(scalars.eps),
        float(scalars.rest1) if near else float(scalars.rest1) - 1,
        float(scalars.b2),
        float(scalars.rest2),
        float(scalars.grad_scale),
        NEAR=near,
        SPLIT=low is not None,
        CHECKED=flag is not None,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


def sum_of_squares(gradient: Tensor) -> Tensor:
    """The sum of squares of bfloat16[n] or float32[n], added in float64 in a fixed order: a float64 scalar."""
    blocks = triton.cdiv(gradient.numel(), BLOCK)
    sums = torch.empty(blocks, dtype=torch.float64, device=gradient.device)
    if blocks:
        _squares[(blocks,)](_bits(gradient), sums, gradient.numel(), BLOCK=BLOCK, enable_fp_fusion=False)
    return sums.sum()


def _bits(gradient: Tensor) -> Tensor:
    return gradient.view(torch.uint16) if gradient.dtype == torch.bfloat16 else gradient
