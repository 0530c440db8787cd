"""Muon's steps by torch operations: beside the passes on the host, and beside `torch.optim.Muon`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz as zeropower
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatrain.optim import (
    AdamW,
    MomentumArrays,
    Muon,
    StateArrays,
    apply_on_host,
    join,
    matrix_shape,
    momentum_on_host,
    orthogonalize_flops,
    split,
    update_on_host,
)
from megatrain.schedule.passes.directions import workspace_numel
from megatrain.spec import layout
from megatrain.spec.layout import Matrices
from megatrain.train.torch_muon import apply_on_device, momentum_on_device, orthogonalize
from tests.optim.test_muon import DTYPES, SEGMENTS, numbers

SHAPES = [(32, 48), (48, 32), (64, 64), (17, 33), (1, 40), (40, 1), (200, 96)]
STEPS = 20


def on_device(array: np.ndarray) -> Tensor:
    """A copy, with bfloat16 for its bits."""
    copied = torch.from_numpy(array.copy().view(np.int16) if array.dtype == np.uint16 else array.copy())
    return copied.view(torch.bfloat16) if array.dtype == np.uint16 else copied


def same(tensor: Tensor, array: np.ndarray) -> bool:
    other = on_device(array)
    return bool(torch.equal(tensor.isnan(), other.isnan())) and bool(
        torch.equal(tensor.nan_to_num(nan=0.5), other.nan_to_num(nan=0.5))
    )


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.95, 0.3])
@pytest.mark.parametrize("of_gradient", DTYPES)
@pytest.mark.parametrize("of_direction", DTYPES)
def test_momentum_equals_the_pass_on_the_host(
    of_gradient: type, of_direction: type, momentum: float, nesterov: bool
) -> None:
    scalars = Muon(momentum=momentum).matrix_scalars(lr=1e-3, grad_scale=0.37)
    host = MomentumArrays(numbers(1), numbers(2, of_gradient), numbers(3, of_direction))
    device = MomentumArrays(*map(on_device, (host.momenta, host.gradient, host.direction)))
    momentum_on_host(host, scalars, SEGMENTS, nesterov=nesterov)
    momentum_on_device(device, scalars, SEGMENTS, nesterov=nesterov, flag=torch.tensor(True))
    assert same(device.momenta, host.momenta)
    assert same(device.direction, host.direction)
    before = device.momenta.clone()
    momentum_on_device(device, scalars, SEGMENTS, nesterov=nesterov, flag=torch.tensor(False))
    assert torch.equal(before.view(torch.int32), device.momenta.view(torch.int32))


@pytest.mark.parametrize("of_direction", DTYPES)
@pytest.mark.parametrize("halves", [True, False])
def test_masters_move_as_by_the_pass_on_the_host(of_direction: type, halves: bool) -> None:
    scalars, rates = Muon().matrix_scalars(lr=0.02), np.array([0.02, 0.3], np.float32)
    direction, weight = numbers(2, of_direction), numbers(1)
    masters = split(weight) if halves else (weight,)
    moved = tuple(torch.from_numpy(each.copy().view(np.int16) if halves else each.copy()) for each in masters)
    before = [each.clone() for each in moved]
    apply_on_device(moved, on_device(direction), scalars.keep, rates, SEGMENTS, flag=torch.tensor(False))
    assert all(
        torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in zip(moved, before, strict=True)
    )
    apply_on_host(masters, direction, scalars.keep, rates, SEGMENTS)
    apply_on_device(moved, on_device(direction), scalars.keep, rates, SEGMENTS, flag=torch.tensor(True))
    if halves:
        joined = join(*(each.numpy().view(np.uint16) for each in moved))
        assert same(torch.from_numpy(joined), join(*masters))
    else:
        assert same(moved[0], weight)


def plain(matrix: Tensor, muon: Muon) -> Tensor:
    """Newton-Schulz as `torch.optim.Muon` writes it, in the dtype of the matrix."""
    a, b, c = muon.ns_coefficients
    x = matrix.clone().T if matrix.shape[0] > matrix.shape[1] else matrix.clone()
    x = x / x.norm().clamp(min=muon.eps)
    for _ in range(muon.ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("steps", [0, 1, 4, 5])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_stack_of_matrices_becomes_orthogonal_one_by_one_with_torchs_bits(
    rows: int, columns: int, steps: int
) -> None:
    muon, draw = Muon(ns_steps=steps), torch.Generator().manual_seed(rows)
    stack = torch.randn(3, rows, columns, generator=draw) * torch.tensor([1e-3, 1.0, 1e4]).view(3, 1, 1)
    stack[1, 0, 0] = 0
    bf16, fp32 = stack.bfloat16().flatten(), stack.flatten().clone()
    orthogonalize(bf16, (3, rows, columns), muon)
    orthogonalize(fp32, (3, rows, columns), muon)
    for place, matrix in enumerate(stack):
        expected = zeropower(matrix, muon.ns_coefficients, steps, muon.eps)
        assert torch.equal(bf16.view(3, rows, columns)[place], expected)
        assert torch.equal(fp32.view(3, rows, columns)[place], plain(matrix, muon))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_in_blocks_equal_whole_ones_to_rounding(
    rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two and more blocks, the last of which may be smaller, and as many operations as are told."""
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
    whole, blocks = matrix.flatten().clone(), matrix.flatten().clone()
    orthogonalize(whole, (1, rows, columns), Muon())
    monkeypatch.setattr(layout, "SYMMETRIC_ROWS", 32)
    with FlopCounterMode(display=False) as counter:
        orthogonalize(blocks, (1, rows, columns), Muon())
    assert counter.get_total_flops() == orthogonalize_flops(1, rows, columns, 5)
    apart = (blocks.float() - whole.float()).norm() / whole.float().norm()
    assert apart < (0.01 if dtype == torch.bfloat16 else 1e-5)
    size = min(rows, columns)
    full = 10 * (2 * size * size * max(rows, columns) + size**3)
    assert counter.get_total_flops() < (0.9 * full if size >= 64 else full + 1)


def test_singular_values_come_close_to_one_and_zeros_stay() -> None:
    direction = torch.cat((torch.randn(24 * 40, generator=torch.Generator().manual_seed(0)), torch.zeros(24 * 40)))
    orthogonalize(direction, (2, 24, 40), Muon())
    values = torch.linalg.svdvals(direction[: 24 * 40].view(24, 40))
    assert 0.5 < values.min() < values.max() < 1.3
    assert not direction[24 * 40 :].any()


class Allocating(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, but for a norm's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        given = {each.untyped_storage()._cdata for each in (*args, *kwargs.values()) if isinstance(each, Tensor)}
        if isinstance(out, Tensor) and out.numel() > 1 and out.untyped_storage()._cdata not in given:
            self.nbytes += out.untyped_storage().nbytes()
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_and_operations_are_those_that_are_told(dtype: torch.dtype) -> None:
    direction = torch.randn(2 * 48 * 32).to(dtype)
    with FlopCounterMode(display=False) as counter, Allocating() as allocating:
        orthogonalize(direction, (2, 48, 32), Muon())
    assert counter.get_total_flops() == orthogonalize_flops(2, 48, 32, 5)
    assert allocating.nbytes == dtype.itemsize * workspace_numel(Matrices(0, 1, 48, 32))


@pytest.mark.parametrize("newton_schulz", ["bf16", "fp32"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_twenty_steps_equal_torchs_optimizers(newton_schulz: str, nesterov: bool, adjust: str) -> None:
    """Two matrices, one of them tall, and a vector, with their masters split; the vector is AdamW's."""
    rest = AdamW(lr=3e-4)
    muon = Muon(lr=0.02, adjust_lr_fn=adjust, nesterov=nesterov, newton_schulz=newton_schulz, adamw=rest)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(5)
    shapes = [(24, 40), (40, 24), (40,)]
    stock = [torch.nn.Parameter(torch.randn(*shape, generator=draw)) for shape in shapes]
    halves = [split(parameter.detach().numpy().reshape(-1).copy()) for parameter in stock]
    momenta = [np.zeros(each[0].size, np.float32) for each in halves]
    second = np.zeros(40, np.float32)
    if newton_schulz == "bf16":
        theirs = torch.optim.Muon(stock[:2], lr=0.02, adjust_lr_fn=adjust, nesterov=nesterov)
    adamw = torch.optim.AdamW(stock[2:], lr=3e-4)
    buffers = [torch.zeros_like(parameter) for parameter in stock[:2]]
    for step in range(1, STEPS + 1):
        for parameter in stock:
            parameter.grad = torch.randn(parameter.shape, generator=draw) * 0.1
        grads = [parameter.grad.numpy().reshape(-1).copy() for parameter in stock if parameter.grad is not None]
        adamw.step()
        if newton_schulz == "bf16":
            theirs.step()
        else:
            with torch.no_grad():
                for parameter, buffer in zip(stock, buffers, strict=False):
                    assert parameter.grad is not None
                    buffer.lerp_(parameter.grad, 1 - 0.95)
                    direction = plain(parameter.grad.lerp(buffer, 0.95) if nesterov else buffer, muon)
                    adjusted = float(muon.rate(0.02, *parameter.shape))
                    parameter.mul_(1 - 0.02 * 0.1).add_(direction, alpha=-adjusted)
        scalars = muon.matrix_scalars(lr=0.02)
        for place, shape in enumerate(shapes[:2]):
            to_be = np.empty(momenta[place].size, np.uint16 if newton_schulz == "bf16" else np.float32)
            everything = [(0, to_be.size, True)]
            arrays = MomentumArrays(momenta[place], grads[place], to_be)
            momentum_on_host(arrays, scalars, everything, nesterov=nesterov)
            flat = torch.from_numpy(to_be.view(np.int16) if newton_schulz == "bf16" else to_be)
            orthogonalize(flat.view(torch.bfloat16) if newton_schulz == "bf16" else flat, (1, *shape), muon)
            rates = np.array([muon.rate(0.02, *matrix_shape(shape, 1))])
            apply_on_host(halves[place], to_be, scalars.keep, rates, [(0, to_be.size, 0)])
        (of_rest,) = muon.scalars_by_group(lr=0.02, step=step)
        update_on_host(StateArrays(*halves[2], (momenta[2], second)), grads[2], of_rest, [(0, 40, True)])
    length = math.sqrt(STEPS) * 0.02
    for parameter, (hi, lo) in zip(stock, halves, strict=True):
        apart = np.abs(join(hi, lo) - parameter.detach().numpy().reshape(-1)).max()
        assert apart < (1e-6 if newton_schulz == "fp32" else 2e-3 * length), apart
