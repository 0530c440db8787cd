"""Chooses how the fused functions of layers (`model.fused`) are computed on a device."""

from __future__ import annotations

from megatrain.device import Device
from megatrain.engine import fused_cpu
from megatrain.model import PortedModel
from megatrain.model.fuse_layers import fuse_layers


def use_fused_functions(ported: PortedModel, device: Device) -> None:
    """Fuse what can be fused in the model's layers, and register the fastest forms that the device runs."""
    fused_cpu.register()
    fuse_layers(ported)
