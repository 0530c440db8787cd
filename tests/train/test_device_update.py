"""The update of a unit that lives on the device, element by element beside the pass on the host."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from megatrain.optim import AdamW, Lion, Optimizer, StateArrays, update_on_host
from megatrain.optim.split_master import join, split
from megatrain.spec import Part, Precision
from megatrain.train import device_update
from megatrain.train.device_update import CHUNK, arrays_in, update_on_device

SIZE = CHUNK + 4321  # more than one chunk, and no round number


def state(precision: Precision) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Arrays of a unit and a gradient of all magnitudes: zeros, subnormal numbers, and what overflows."""
    draw = np.random.default_rng(3)
    grad = (draw.standard_normal(SIZE) * 10.0 ** draw.uniform(-30, 3, SIZE)).astype(np.float32)
    with np.errstate(over="ignore"):
        grad[::97] *= np.float32(1e18) * np.geomspace(1, 1e20, grad[::97].size).astype(np.float32)
    grad[~np.isfinite(grad)] = 3e38
    grad[::101] = 0
    with np.errstate(over="ignore"):
        m, v = (grad * draw.uniform(-2, 2, SIZE)).astype(np.float32), np.square(grad * 0.3).astype(np.float32)
    m[~np.isfinite(m)] = -3e38
    master = draw.standard_normal(SIZE).astype(np.float32)
    if precision == "fp32":
        return {"hi": master, "m": m, "v": v}, grad
    hi, lo = split(master)
    rounded = torch.from_numpy(grad).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return {"hi": hi, "lo": lo, "m": m, "v": v}, rounded


def places(values: np.ndarray) -> np.ndarray:
    """The number of each float32 in the row of all of them, so that neighbours differ by one."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@pytest.mark.parametrize(
    "optimizer",
    [*(AdamW(betas=betas, weight_decay=0.1) for betas in ((0.9, 0.999), (0.3, 0.9))), Lion(weight_decay=0.1)],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_device_updates_match_the_host_within_one_rounding(
    device: str, precision: Precision, optimizer: Optimizer
) -> None:
    """Masters differ by one float32 number at most after an update from the same state, moments by none."""
    arrays, grad = state(precision)
    scalars = optimizer.scalars(lr=1e-2, step=3)
    segments = [(0, SIZE // 3, True), (SIZE // 3, SIZE, False)]
    moments = [torch.from_numpy(arrays[name].copy()).to(device) for name in optimizer.STATE]
    there = {
        Part.WEIGHTS: [torch.from_numpy(arrays["hi"].view(np.uint8).copy()).to(device)],
        Part.MOMENTS: [moment.view(torch.uint8) for moment in moments],
    }
    gradient = torch.from_numpy(grad.view(np.int16) if precision == "bf16" else grad).to(device)
    if precision == "bf16":
        there[Part.LOW_BITS] = [torch.from_numpy(arrays["lo"].view(np.uint8).copy()).to(device)]
        gradient = gradient.view(torch.bfloat16)
    update_on_device(arrays_in(there, SIZE), gradient, scalars, segments)
    state_on_host = StateArrays(arrays["hi"], arrays.get("lo"), tuple(arrays[name] for name in optimizer.STATE))
    update_on_host(state_on_host, grad, scalars, segments)
    if precision == "fp32":
        expected, found = arrays["hi"], there[Part.WEIGHTS][0].cpu().view(torch.float32).numpy()
    else:
        halves = (there[part][0].cpu().numpy().view(np.uint16) for part in (Part.WEIGHTS, Part.LOW_BITS))
        expected, found = join(arrays["hi"], arrays["lo"]), join(*halves)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(found), ~numbers)
    assert numbers.all() == (optimizer.NAME == "lion")  # for AdamW an infinite m over an infinite v is among them
    apart = np.abs(places(found) - places(expected))[numbers].max()
    assert apart <= (0 if device == "cpu" else 1)
    for moment, name in zip(moments, optimizer.STATE, strict=True):
        assert np.array_equal(moment.cpu().numpy(), arrays[name], equal_nan=True)


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_gpu_that_an_installed_triton_does_not_support_is_named(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: is_installed)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert device_update._kernels.__wrapped__(torch.device("cuda", 0)) is None
    warning = "AdamW on cuda:0 uses single torch operations: Triton does not support this device"
    assert [record.message for record in caplog.records] == ([warning] if is_installed else [])
