"""Steps the optimizer on the device, for a unit or a piece of one: by torch operations or, for AdamW, Triton.

Torch operations run in chunks that stay in the device's cache. Every operation rounds once, in the order of the pass on
the host, and none is fused with its neighbour, so if the device divides with correct rounding the result equals the
host's. If Triton can run, adjacent parameters with equal decay are updated by one kernel (`device_adamw_triton`), after
it has been compared with them bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megatrain.device import Device
from megatrain.device.triton_kernels import MISSING, load_if_correct
from megatrain.optim import AdamW, AdamWScalars, StateArrays, StepScalars
from megatrain.optim.kernels import Segment
from megatrain.spec import Part
from megatrain.spec.layout import align

CHUNK = 1 << 20
"""Elements per chunk; temporaries take 32 bytes each."""

TRIED = 5000
"""Elements for testing the kernel: several blocks, not a multiple of one."""

_log = logging.getLogger(__name__)


def arrays_in(parts: Mapping[Part, Sequence[Tensor]], numel: int) -> StateArrays[Tensor]:
    """The state of so many trained elements in the memory of its parts, uint8, on the host or the device.

    parts: weights, moments in the order of `Optimizer.STATE`, and, if masters are split, low bits.
    """
    moments = tuple([moment[: 4 * numel].view(torch.float32) for moment in parts[Part.MOMENTS]])
    (weights,), low = parts[Part.WEIGHTS], parts.get(Part.LOW_BITS)
    if low is None:
        return StateArrays(weights[: 4 * numel].view(torch.float32), None, moments)
    hi, lo = (half[: 2 * numel].view(torch.int16) for half in (weights, *low))
    return StateArrays(hi, lo, moments)


def update_on_device(
    state: StateArrays[Tensor],
    gradient: Tensor,
    scalars: StepScalars,
    segments: Sequence[Segment],
    flag: Tensor | None = None,
    kernels: Any = None,
) -> None:
    """The twin of `optim.update_on_host`: one step in place on a unit or a piece.

    gradient: flat, bfloat16 or float32, one value per trained element. segments: (start, stop, decays) in elements.
    flag: a bool on the device; if false nothing changes. kernels: see `kernels_for`.
    """
    is_fused = kernels is not None and isinstance(scalars, AdamWScalars)
    update = kernels.adamw if is_fused else update_by_operations
    for start, stop, decays in _joined(segments):
        part = slice(start, stop)
        update(state.part(part), gradient[part], scalars, flag, decays=bool(decays))


def sum_of_squares_on_device(gradient: Tensor, kernels: Any = None) -> Tensor:
    """The sum of squares of a flat gradient, a float64 scalar on the device: exact squares, added in the device's
    order."""
    if kernels is not None:
        squares: Tensor = kernels.sum_of_squares(gradient)
        return squares
    total = torch.zeros((), dtype=torch.float64, device=gradient.device)
    for begin in range(0, gradient.numel(), CHUNK):
        total += gradient[begin : begin + CHUNK].to(torch.float64).square_().sum()
    return total


def update_by_operations(
    state: StateArrays[Tensor], gradient: Tensor, scalars: StepScalars, flag: Tensor | None, *, decays: bool
) -> None:
    """One step in place on state of n elements. flag: None means true."""
    keep = float(scalars.decay) if decays else 1.0
    for begin in range(0, gradient.numel(), CHUNK):
        elements = slice(begin, begin + CHUNK)
        part = state.part(elements)
        before = [(array, array.clone()) for array in (*part.moments, *part.masters)] if flag is not None else []
        scaled = gradient[elements].to(torch.float32) * float(scalars.grad_scale)
        change = scalars.change(part.moments, scaled)
        if part.lo is None:
            part.hi.mul_(keep).sub_(change)
        else:
            split_to(join(part.hi, part.lo).mul_(keep).sub_(change), part.hi, part.lo)
        for array, old in before:
            assert flag is not None
            torch.where(flag, array, old, out=array)


def _joined(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Merge adjacent segments with equal decay: the gaps hold zeros, which an update by zero gradients leaves
    zero."""
    last: Segment | None = None
    for start, stop, decays in segments:
        if last is not None and align(last[1]) == start and last[2] == decays:
            last = last[0], stop, decays
        else:
            if last is not None:
                yield last
            last = start, stop, decays
    if last is not None:
        yield last


def kernels_for(device: Device) -> Any:
    """`device_adamw_triton` if Triton runs on this device and matches the torch operations bit for bit; else None.

    The first call for a device compiles and synchronizes, so call it when the device is idle.
    """
    with device.alongside():
        return _kernels(device.torch_device)


@cache
def _kernels(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    kernels, why = load_if_correct(lambda: import_module("megatrain.train.device_adamw_triton"), device, agrees)
    if why and why != MISSING:
        _log.warning("AdamW on %s uses single torch operations: %s", device, why)
    return kernels


def agrees(kernels: Any, device: torch.device) -> bool:
    """Whether kernels match the torch operations bit for bit, and sums of squares up to rounding.

    Tried for whole and split masters, gradients of both dtypes, and with a true, a false and no flag.
    """
    plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "generator": torch.Generator().manual_seed(0)}
    magnitude = 10.0 ** (torch.rand(TRIED, **plain) * 60 - 38)
    gradient = (torch.randn(TRIED, **plain) * magnitude).to(device)
    masters, *factors = torch.randn(1 + len(AdamW.STATE), TRIED, **plain).to(device)
    flags = [torch.tensor(flag, device=device) for flag in (True, False)]
    cases = product((0.3, 0.9), (*flags, None), (gradient, gradient.to(torch.bfloat16)), (True, False))
    for beta, flag, grad, split in cases:
        scalars = AdamW(betas=(beta, 0.99), weight_decay=0.1).scalars(lr=1e-2, step=3, grad_scale=0.7)
        results = []
        for update in (kernels.adamw, update_by_operations):
            m, v = factors[0] * gradient, (factors[1] * gradient).square()
            state = StateArrays(masters.clone(), None, (m, v))
            if split:
                hi, low = (torch.empty(TRIED, dtype=torch.int16, device=device) for _ in range(2))
                split_to(masters, hi, low)
                state = StateArrays(hi, low, (m, v))
            update(state, grad, scalars, flag, decays=not split)
            results.append([array.view(torch.uint8) for array in (*state.masters, *state.moments)])
        if not all(torch.equal(one, other) for one, other in zip(*results, strict=True)):
            return False
    summed = masters, factors[0].bfloat16()
    sums = [(kernels.sum_of_squares(values), values.double().square().sum()) for values in summed]
    return all(bool(torch.isclose(squares, exact, rtol=1e-12)) for squares, exact in sums)


def join(hi: Tensor, low: Tensor) -> Tensor:
    """Join bfloat16 bits and low bits (both int16) into float32 masters. Inverse of `split_to`."""
    bits, below = hi.to(torch.int32), low.to(torch.int32).bitwise_and_(0xFFFF)
    return bits.sub_(below >> 15).bitwise_left_shift_(16).bitwise_or_(below).view(torch.float32)


def split_to(master: Tensor, hi: Tensor, low: Tensor) -> None:
    """Split float32 masters into halves, the upper rounded to nearest, ties away from zero (`optim.split_master`)."""
    bits = master.view(torch.int32)
    low.copy_(bits)  # the conversion keeps the lower 16 bits
    hi.copy_(bits.add(0x8000).bitwise_right_shift_(16))
