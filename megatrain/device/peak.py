"""The measured peak of a device: how fast it multiplies large matrices, measured once for each open device.

What plans a run and what runs it both ask, and get one number.
"""

from __future__ import annotations

import time
from weakref import WeakKeyDictionary

import torch

from megatrain.device.base import Device

SIZES = {"cpu": 2048, "cuda": 8192}
ROUNDS, LEAST_ROUNDS, SECONDS = 20, 2, 0.5
"""Products that are timed: fewer where a device is so slow that they would take longer than that."""

_MEASURED: WeakKeyDictionary[Device, dict[torch.dtype, float]] = WeakKeyDictionary()


def matmul_flops(device: Device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a square product of random matrices; the best of a few rounds.

    Measured at the first call for a device and a dtype, and remembered for as long as the device is there.
    """
    measured = _MEASURED.setdefault(device, {})
    if dtype not in measured:
        measured[dtype] = _best_of_a_few(device, dtype)
    return measured[dtype]


def _best_of_a_few(device: Device, dtype: torch.dtype) -> float:
    size = SIZES[device.torch_device.type]
    left, right = (torch.randn(size, size, device=device.torch_device).to(dtype) for _ in range(2))
    best, started = float("inf"), time.perf_counter()
    for done in range(ROUNDS):
        began = time.perf_counter()
        if done >= LEAST_ROUNDS and began - started > SECONDS:
            break
        (left @ right)[0, 0].item()
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best
