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
    sound: Tensor | None = None,
) -> None:
    """One AdamW step in place on a unit.

    parts: `hi`, `low` (in bf16) and `moments` (m, then v), uint8 on the device. gradient: flat, bfloat16 or float32,
    as long as what trains. segments: (start, stop, decays) in elements. sound: a bool on the device; where it is false
    nothing changes, which the host need not know.
    """
    trained = gradient.numel()
    moments = parts["moments"].view(torch.float32)
    m, v = moments[:trained], moments[trained : 2 * trained]
    for start, stop, decays in segments:
        for begin in range(start, stop, CHUNK):
            part = slice(begin, min(begin + CHUNK, stop))
            keep = float(scalars.decay) if decays else 1.0
            kind, halves = (torch.float32, ["hi"]) if precision == "fp32" else (torch.int16, ["hi", "low"])
            weight = [parts[half].view(kind)[part] for half in halves]
            before = [(each, each.clone()) for each in (m[part], v[part], *weight)] if sound is not None else []
            change = _change(m[part], v[part], gradient[part].to(torch.float32), scalars)
            if precision == "fp32":
                weight[0].mul_(keep).sub_(change)
            else:
                hi, low = weight
                split_to(join(hi, low).mul_(keep).sub_(change), hi, low)
            for each, was in before:
                assert sound is not None
                torch.where(sound, each, was, out=each)


def sum_of_squares_on_device(gradient: Tensor) -> Tensor:
    """The sum of squares of a flat gradient: each square exact in float64, their sum rounded in the device's order.
    A float64 scalar on the device."""
    total = torch.zeros((), dtype=torch.float64, device=gradient.device)
    for begin in range(0, gradient.numel(), CHUNK):
        total += gradient[begin : begin + CHUNK].to(torch.float64).square_().sum()
    return total


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
