"""Slow and plain twins of fast functions: what they must give, bit for bit or to rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatrain.optim import MatrixScalars, MomentumArrays, StepScalars
from megatrain.optim.kernels import F32, U16, Segment


def bf16_to_f32(bits: U16) -> F32:
    """Convert bfloat16 `bits` to float32; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def reference_update(
    weight: F32, m: F32, v: F32, grad: U16 | F32, scalars: StepScalars, segments: Sequence[Segment]
) -> None:
    """`update_on_host` of float32 masters: one rounding per line, in the order of the fused pass."""
    for start, stop, decays in segments:
        part = slice(start, stop)
        g = bf16_to_f32(grad[part].view(np.uint16)) if grad.dtype == np.uint16 else grad[part]
        with np.errstate(all="ignore"):  # overflow and underflow are valid results, as in the fused pass
            g = g * scalars.grad_scale
            way = g - m[part]
            if scalars.rest1 < np.float32(0.5):
                m[part] = m[part] + scalars.rest1 * way
            else:
                m[part] = g + (scalars.rest1 - np.float32(1)) * way
            kept_v = scalars.b2 * v[part]
            new_v = scalars.rest2 * g
            new_v = new_v * g
            v[part] = kept_v + new_v
            root = np.sqrt(v[part])
            root = root * scalars.root_scale
            root = root + scalars.eps
            change = scalars.step_size * m[part]
            change = change / root
            kept_weight = weight[part] * (scalars.decay if decays else np.float32(1))
            weight[part] = kept_weight - change


def reference_update_split(
    hi: U16, lo: U16, m: F32, v: F32, grad: U16 | F32, scalars: StepScalars, segments: Sequence[Segment]
) -> None:
    """`update_on_host` of split masters: join, update, split."""
    weight = reference_join(hi, lo)
    reference_update(weight, m, v, grad, scalars, segments)
    hi[:], lo[:] = reference_split(weight)


def reference_momentum(
    arrays: MomentumArrays[np.ndarray], scalars: MatrixScalars, segments: Sequence[Segment], *, nesterov: bool
) -> None:
    """`momentum_on_host`: one rounding per line."""
    for start, stop, moves in segments:
        part = slice(start, stop)
        m, grad = arrays.momenta[part], arrays.gradient[part]
        g = bf16_to_f32(grad) if grad.dtype == np.uint16 else grad
        with np.errstate(all="ignore"):
            g = g * scalars.grad_scale
            if moves:
                m[:] = reference_lerp(m, g, scalars.rest)
            d = reference_lerp(g, m, scalars.momentum) if nesterov else m
        arrays.direction[part] = f32_to_bf16(d) if arrays.direction.dtype == np.uint16 else d


def reference_lerp(start: F32, end: F32, weight: np.float32) -> F32:
    """`torch.lerp`: one rounding per line."""
    way = end - start
    if weight < np.float32(0.5):
        way = weight * way
        return start + way
    rest = weight - np.float32(1)
    way = rest * way
    return end + way


def reference_apply(
    weight: F32, direction: U16 | F32, keep: np.float32, rates: F32, segments: Sequence[Segment]
) -> None:
    """`apply_on_host` of float32 masters: one rounding per line."""
    for start, stop, index in segments:
        part = slice(start, stop)
        d = bf16_to_f32(direction[part]) if direction.dtype == np.uint16 else direction[part]
        with np.errstate(all="ignore"):
            change = rates[index] * d
            kept = weight[part] * keep
            weight[part] = kept - change


def reference_split(master: F32) -> tuple[U16, U16]:
    """`split`."""
    u = master.view(np.uint32)
    hi = (u + np.uint32(0x8000)) >> np.uint32(16)
    lo = u & np.uint32(0xFFFF)
    return hi.astype(np.uint16), lo.astype(np.uint16)


def reference_join(hi: U16, lo: U16) -> F32:
    """`join`."""
    carry = lo >> np.uint16(15)
    upper = (hi - carry).astype(np.uint32)  # modulo 2**16
    return ((upper << np.uint32(16)) | lo).view(np.float32)


def f32_to_bf16(x: F32) -> U16:
    """Round `x` to bfloat16 bits, ties to even and every NaN to 0x7fc0, as torch does."""
    u = x.view(np.uint32)
    odd = (u >> np.uint32(16)) & np.uint32(1)
    rounded = ((u + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def reference_sum_of_squares(grad: U16 | F32) -> float:
    """`sum_of_squares`."""
    values = bf16_to_f32(grad.view(np.uint16)) if grad.dtype == np.uint16 else grad
    return math.fsum(np.square(values.astype(np.float64)))


def reference_reduce(terms: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """`World.reduce`: the `own` of each rank. terms: of each rank, float32[ranks * n]."""
    each = len(terms[0]) // len(terms)
    found = []
    for rank in range(len(terms)):
        values = []
        for place in range(rank * each, (rank + 1) * each):
            total = terms[0][place]
            for other in terms[1:]:
                total = total + other[place]
            values.append(total)
        found.append(torch.stack(values).to(dtype))
    return found


def reference_cross_entropy(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`cross_entropy`: autograd through `torch.nn.functional.cross_entropy` on float32 logits."""
    leaf = logits.detach().float().requires_grad_()
    with torch.enable_grad():
        loss = torch.nn.functional.cross_entropy(leaf, targets, reduction="sum")
        (gradient,) = torch.autograd.grad(loss * scale, leaf)
    return loss.detach().double(), gradient.to(logits.dtype)
