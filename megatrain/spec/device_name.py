"""Parses device names, without torch. `device.open_device` finds out whether this machine has the device."""

from __future__ import annotations

from typing import Literal, cast

from megatrain.errors import DeviceError
from megatrain.spec.validate_fields import shown

DeviceKind = Literal["cpu", "cuda", "sim"]

UNSUPPORTED = {
    "mps": "use cpu; there is no backend for Apple GPUs",
    "xpu": "use cpu; there is no backend for Intel GPUs",
    "rocm": "use cuda:0, PyTorch's name for AMD GPUs",
    "hip": "use cuda:0, PyTorch's name for AMD GPUs",
}
"""Devices of PyTorch that MegaTrain does not support, with what to do instead."""


def parse_device(name: object) -> tuple[DeviceKind, int | None]:
    """(kind, number or None) of a device name: `cpu`, `cuda`, `cuda:N`, `sim` or `sim:SEED`.

    Raises `DeviceError` for any other name, and for anything but text.
    """
    kind, _, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    known = kind in ("cpu", "cuda", "sim") and (not index or (index.isascii() and index.isdigit()))
    if kind in UNSUPPORTED:
        raise DeviceError(f"{shown(name)} is not supported", where="device", fix=UNSUPPORTED[kind])
    if not known or (kind == "cpu" and index.strip("0")):
        raise DeviceError(f"{shown(name)} is not a device", where="device", fix="use cpu, cuda:0 or sim:SEED")
    return cast(DeviceKind, kind), int(index) if index else None
