"""From a device's name to a device."""

from __future__ import annotations

from megatrain.device.base import Device
from megatrain.device.cpu import CpuDevice
from megatrain.device.sim import SimDevice
from megatrain.errors import DeviceError


def open_device(name: str) -> Device:
    """Open `cpu`, `cuda`, `cuda:N`, `sim` or `sim:SEED`. Raises `DeviceError` for an unknown or absent device."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "sim") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise DeviceError(f"{name!r} is not a device", where="device", fix="use cpu, cuda:0 or sim:SEED")
    if kind == "cpu":
        return CpuDevice()
    if kind == "sim":
        return SimDevice(seed=int(index or 0))
    from megatrain.device.cuda import CudaDevice

    return CudaDevice(int(index or 0))
