"""Devices: streams, events and memory behind one small protocol, `base.Device`.

`open_device("cpu" | "cuda:0" | "sim:SEED")` is the only way to get one.
"""

from megatrain.device.base import Device, Errand, Event, timed
from megatrain.device.open import open_device
from megatrain.device.probe import matmul_flops

__all__ = ["Device", "Errand", "Event", "matmul_flops", "open_device", "timed"]
