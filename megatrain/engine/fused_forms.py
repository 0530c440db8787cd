"""Chooses how the fused functions of layers (`model.fused`) are computed on a device.

On a CPU that are the loops of `fused_cpu`. On a GPU they are Triton's kernels, once these have been compared with the
reference forms; where Triton is missing, fails or rounds too much, layers keep the library's code, which is told in one
line. A kernel that fails later, for a width that was not tried, say, is replaced by its reference form.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatrain.device import Device
from megatrain.device.triton_kernels import load_if_correct
from megatrain.engine import fused_cpu
from megatrain.errors import typed_line
from megatrain.model import PortedModel
from megatrain.model.fuse_layers import fuse_layers, unfuse_layers
from megatrain.model.fused import ACTIVATIONS, HALVES, LIBRARY, NEIGHBOURS, NORM_FORMULAS, NORM_ROWS, ONCE, REFERENCES

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest error that counts as rounding: the norm of the difference over that of the result."""

_log = logging.getLogger(__name__)
_failed: set[tuple[str, tuple[int, ...]]] = set()
"""(name of an op, widths of its tensors) that Triton cannot run."""


def use_fused_functions(ported: PortedModel, device: Device) -> None:
    """Fuse what can be fused in the model's layers, if the device can run it.

    The first call for a GPU compiles and synchronizes, so call it when the device is idle.
    """
    fused_cpu.register()
    with device.alongside():
        runs = device.torch_device.type == "cpu" or _runs_on_gpu(device.torch_device)
    (fuse_layers if runs else unfuse_layers)(ported)


@cache
def _runs_on_gpu(device: torch.device) -> bool:
    """Whether the fused functions run there; registers Triton's kernels if nothing else is registered."""
    if has_gpu_kernels():
        return True
    kernels, why = load_if_correct(lambda: import_module("megatrain.engine.fused_triton"), device, agrees)
    if kernels is None:
        _log.warning("layers on %s keep the library's kernels: %s", device, why)
        return False
    for name, reference in REFERENCES.items():
        LIBRARY.impl(name, _guarded(name, getattr(kernels, name), reference), "CUDA")
    return True


def has_gpu_kernels() -> bool:
    """Whether the ops have kernels for a GPU."""
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    return all(known(f"megatrain::{name}", "CUDA") for name in REFERENCES)


def _guarded(name: str, form: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """A form of an op that is replaced by the reference once it has failed for tensors of these widths."""

    def call(*args: Any) -> Any:
        if _failed and _key(name, args) in _failed:
            return reference(*args)
        try:
            return form(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _log.warning("%s uses single torch operations: Triton failed (%s)", name, typed_line(error))
            _failed.add(_key(name, args))
            return reference(*args)

    return call


def _key(name: str, args: Sequence[Any]) -> tuple[str, tuple[int, ...]]:
    return name, tuple(each.shape[-1] for each in args if isinstance(each, Tensor) and each.dim())


# Comparing ------------------------------------------------------------------------------------------------------------


def agrees(kernels: Any, device: torch.device) -> bool:
    """Whether the forms of the ops in `kernels` give what the reference forms do, up to rounding, in both dtypes."""
    for dtype, bound in BOUNDS.items():
        for name, args in calls(dtype, device):
            found, expected = getattr(kernels, name)(*args), REFERENCES[name](*args)
            pairs = [(found, expected)] if isinstance(found, Tensor) else zip(found, expected, strict=True)
            for one, other in pairs:
                same = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
                wide = other.double()
                if not same or not bool((one.double() - wide).norm() <= bound * wide.norm()):
                    return False
    return True


def calls(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(name of an op, arguments) that bring every branch of every form."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).to(device, dtype)

    for width, groups, norm in (
        (8, 1, "norm(x) * weight"),
        (1030, 1, "norm(x) * weight"),
        (72, 3, "norm(x) * (1 + weight)"),
        (72, 1, "norm(x) * weight * silu(gate)"),
        (8, 1, "norm(x) * weight * sigmoid(gate)"),
        (72, 3, "norm(x * silu(gate)) * weight"),
    ):
        x, gradient, gate = (draw(2, NORM_ROWS - 3, 2, width + more).transpose(1, 2) for more in (0, 0, 5))
        wide = x.float() if NORM_FORMULAS[norm].gates_input else x
        factors = None if width == 8 else draw(width), gate[..., :width] if NORM_FORMULAS[norm].activation else None
        _, scale = REFERENCES["rms_norm"](wide, *factors, norm, 1e-2, groups)
        yield "rms_norm", (wide, *factors, norm, 1e-2, groups)
        for trains in (factors[0] is not None, False):
            yield "rms_norm_backward", (gradient.to(wide.dtype), wide, scale, *factors, norm, trains)
    for width in (8, 1030):
        yield "sum_parts", (draw(70, width).float(), draw(width))
    clipped = ("quick_gelu", 2.0, 1.0), ("silu", 2.0, 0.0)
    for rule in (*((activation, math.inf, 0.0) for activation in ACTIVATIONS), *clipped):
        gate, up, gradient = 3 * draw(3, 1030), 3 * draw(3, 1030), draw(3, 1030)
        for first, second in ((gate, up), (torch.cat([gate, up], -1), None)):
            yield "gated", (first, second, *rule)
            yield "gated_backward", (gradient, first, second, *rule)
    x = draw(2, 5, 3, 24)
    for heads, rows, angles, pairs in (
        (1, 2, 24, (HALVES, HALVES, HALVES)),
        (2, 1, 24, (NEIGHBOURS, NEIGHBOURS, NEIGHBOURS)),
        (1, 1, 10, (NEIGHBOURS, HALVES, HALVES)),
        (1, 1, 12, (HALVES, HALVES, ONCE)),
        (2, 2, 5, (NEIGHBOURS, HALVES, ONCE)),
    ):
        turned = x if heads == 2 else x.transpose(1, 2)
        for inverse, k in ((False, turned.narrow(heads, 1, 2)), (True, turned.narrow(heads, 1, 2)), (False, None)):
            angle = [draw(rows, 5, 2 * angles)[..., :angles] for _ in range(2)]
            angle = [each.float() for each in angle] if k is None else angle
            yield "rotary", (turned, k, *angle, heads, pairs, inverse)
