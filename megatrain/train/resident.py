"""AdamW for units whose whole state is on the device: the arithmetic of `optim.adamw`, one torch operation each.

Every operation rounds once, in the order of `reference_update`, and none is contracted with its neighbour (no `addcmul`
or `alpha=`), so where the device divides with correct rounding the result is that of the pass on the host, bit for bit.
The root is taken in float64 and rounded, which is the correctly rounded one (Figueroa 1995); float32 roots of math
libraries are often not. It goes through a unit in chunks that stay in the device's cache, so that memory is read and
written about once. Left out: a single kernel for all of it, which would save launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatrain.optim import StepScalars
from megatrain.spec import Precision

CHUNK = 1 << 20
"""Elements; temporaries take eight times four bytes each."""


def update_on_device(
    parts: Mapping[str, Tensor],
    gradient: Tensor,
    precision: Precision,
    scalars: StepScalars,
    segments: Sequence[tuple[int, int, bool]],
) -> None:
    """One AdamW step in place on a unit.

    parts: `hi`, `low` (in bf16) and `moments` (m, then v), uint8 on the device. gradient: flat, bfloat16 or float32,
    as long as what trains. segments: (start, stop, decays) in elements.
    """
    trained = gradient.numel()
    moments = parts["moments"].view(torch.float32)
    m, v = moments[:trained], moments[trained : 2 * trained]
    for start, stop, decays in segments:
        for begin in range(start, stop, CHUNK):
            part = slice(begin, min(begin + CHUNK, stop))
            keep = float(scalars.decay) if decays else 1.0
            change = _change(m[part], v[part], gradient[part].to(torch.float32), scalars)
            if precision == "fp32":
                weight = parts["hi"].view(torch.float32)[part]
                weight.mul_(keep).sub_(change)
            else:
                hi, low = parts["hi"].view(torch.int16)[part], parts["low"].view(torch.int16)[part]
                split_to(join(hi, low).mul_(keep).sub_(change), hi, low)


def sum_of_squares_on_device(gradient: Tensor) -> float:
    """The sum of squares of a flat gradient: each square exact in float64, their sum rounded in the device's order."""
    total = torch.zeros((), dtype=torch.float64, device=gradient.device)
    for begin in range(0, gradient.numel(), CHUNK):
        total += gradient[begin : begin + CHUNK].to(torch.float64).square_().sum()
    return float(total.item())


def join(hi: Tensor, low: Tensor) -> Tensor:
    """The float32 masters of bfloat16 bits and low bits (both int16): float32. Inverse of `split_to`."""
    bits, below = hi.to(torch.int32), low.to(torch.int32).bitwise_and_(0xFFFF)
    return bits.sub_(below >> 15).bitwise_left_shift_(16).bitwise_or_(below).view(torch.float32)


def split_to(master: Tensor, hi: Tensor, low: Tensor) -> None:
    """Write the halves of float32 masters, the upper one rounded to nearest, ties away from zero (`optim.split`)."""
    bits = master.view(torch.int32)
    low.copy_(bits)  # the conversion keeps the lower 16 bits
    hi.copy_(bits.add(0x8000).bitwise_right_shift_(16))


def _change(m: Tensor, v: Tensor, gradient: Tensor, scalars: StepScalars) -> Tensor:
    """Update the moments in place; the step, scaled by the learning rate."""
    g = gradient * float(scalars.grad_scale)
    way = g - m
    if scalars.rest1 < 0.5:
        m.add_(way.mul_(float(scalars.rest1)))
    else:
        m.copy_(way.mul_(float(scalars.rest1) - 1).add_(g))
    del way
    v.mul_(float(scalars.b2)).add_((g * float(scalars.rest2)).mul_(g))
    root = v.to(torch.float64).sqrt_().to(torch.float32).mul_(float(scalars.root_scale)).add_(float(scalars.eps))
    return (m * float(scalars.step_size)).div_(root)
