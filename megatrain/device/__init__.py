"""Devices: streams, events and memory behind one small protocol, `base.Device`.

`open_device("cpu" | "cuda:0" | "sim:SEED")` is the only way to get one.
"""

from __future__ import annotations

import torch

from megatrain.device.base import Device, Errand, Event, timed
from megatrain.device.cpu import CpuDevice
from megatrain.device.probe import matmul_flops
from megatrain.device.sim import SimDevice
from megatrain.spec.device_name import parse_device


def open_device(name: str | torch.device) -> Device:
    """Open `cpu`, `cuda` (the current GPU), `cuda:N`, `sim` or `sim:SEED`, or the device of a `torch.device`.

    Raises `DeviceError` for an unknown or missing device.
    """
    kind, number = parse_device(str(name) if isinstance(name, torch.device) else name)
    if kind == "cpu":
        return CpuDevice()
    if kind == "sim":
        return SimDevice(seed=number or 0)
    from megatrain.device.cuda import CudaDevice

    return CudaDevice(number)


__all__ = ["Device", "Errand", "Event", "matmul_flops", "open_device", "timed"]
