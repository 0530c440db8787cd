"""From a device's name to a device."""

from __future__ import annotations

import torch

from megatrain.device.base import Device
from megatrain.device.cpu import CpuDevice
from megatrain.device.sim import SimDevice
from megatrain.errors import DeviceError
from megatrain.spec.fields import shown


def open_device(name: str | torch.device) -> Device:
    """Open `cpu`, `cuda` (the current one), `cuda:N`, `sim` or `sim:SEED`, or what a `torch.device` names.

    Raises `DeviceError` for an unknown or absent device.
    """
    kind, _, index = str(name).partition(":") if isinstance(name, str | torch.device) else ("", "", "")
    known = kind in ("cpu", "cuda", "sim") and (not index or (index.isascii() and index.isdigit()))
    if not known or (kind == "cpu" and index.strip("0")):
        raise DeviceError(f"{shown(name)} is not a device", where="device", fix="use cpu, cuda:0 or sim:SEED")
    if kind == "cpu":
        return CpuDevice()
    if kind == "sim":
        return SimDevice(seed=int(index or 0))
    from megatrain.device.cuda import CudaDevice

    return CudaDevice(int(index) if index else None)
