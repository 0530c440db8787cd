"""The machine at hand, as plans see it: what `megatrain probe` has found here, or else a rough description.

`megatrain plan` and a run plan for the same machine: that of the file that the last probe has left, where there is one;
else the described machine that has this GPU; else one measured product, and rates that are assumed. No torch is needed
as long as nothing is measured. It leaves out measuring with care (`probe`) and machines elsewhere (`plan.machines`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.errors import PlanError
from megatrain.plan import available_host_nbytes, available_threads, load_hardware
from megatrain.plan.host_resources import processor_name
from megatrain.plan.machines import machine_of_device
from megatrain.spec import Hardware, Precision

if TYPE_CHECKING:
    from megatrain.device import Device

PROBED = Path("~/.cache/megatrain/hardware.json")
"""Where `megatrain probe` leaves its file, unless told otherwise."""

THREAD_BANDWIDTH, MOST_BANDWIDTH = 8e9, 6e10
"""Of a host that nobody has probed: bytes per second of a thread, and of all of them."""

BUS_BANDWIDTH = 1e10
"""Bytes per second of a bus of which nothing is known, and of the memory behind it."""


def probed_machine() -> Hardware | None:
    """What the last `megatrain probe` found, `None` where there was none.

    Raises `PlanError` for a file that cannot be read: a plan for another machine would be worse than none.
    """
    path = Path(os.path.expanduser(PROBED))
    if not os.path.exists(path):  # false too in a home that may not be entered
        return None
    try:
        return load_hardware(path)
    except PlanError as error:
        fix = "run `megatrain probe` again, or remove the file"
        raise PlanError(error.what, where=error.where, fix=fix) from error


def this_machine(device: Device, precision: Precision, hardware: str | None = None) -> Hardware:
    """`device` and its host, with the memory that is free now.

    hardware: a probe's file, or a described machine's name. Without it, a probe of another kind of device is passed
    over. Raises `PlanError` for a name or a file that is wrong.
    """
    if hardware is not None:
        known = load_hardware(hardware)
    else:
        probed = probed_machine()
        is_of_its_kind = probed is not None and probed.shares_memory == device.shares_memory
        known = probed if probed and is_of_its_kind else described_machine(device) or _rough(device, precision)
    host = available_host_nbytes()
    nbytes = host if device.shares_memory else device.free_nbytes()
    lockable = known.pinnable_nbytes if device.lockable_nbytes is None else device.lockable_nbytes
    now = {"host_nbytes": host, "device_nbytes": nbytes, "pinnable_nbytes": lockable}
    return replace(known, shares_memory=device.shares_memory, **now)  # type: ignore[arg-type]


def described_machine(device: Device) -> Hardware | None:
    """The machine of the library that has this device, if there is one."""
    model = str(getattr(device, "model", ""))
    known = machine_of_device(model)
    return known and replace(known, name=f"{model}, not probed")


def _rough(device: Device, precision: Precision) -> Hardware:
    """A device by one measured product, with rates that are assumed."""
    from megatrain.device import matmul_flops
    from megatrain.engine import DTYPES

    threads, nbytes = available_threads(), available_host_nbytes()
    flops = matmul_flops(device, DTYPES[precision])
    host_bandwidth = min(threads * THREAD_BANDWIDTH, MOST_BANDWIDTH)
    bus = host_bandwidth / 2 if device.shares_memory else BUS_BANDWIDTH
    cpu = f"{threads} threads of {processor_name()}"
    assumed = "assumed; `megatrain probe` measures it"
    rates = ("fetch_bandwidth", "grad_bandwidth", "host_bandwidth", "device_bandwidth")
    return Hardware(
        name=f"{cpu if device.shares_memory else getattr(device, 'model', device.name)}, not probed",
        device_nbytes=nbytes,
        host_nbytes=nbytes,
        fetch_bandwidth=bus,
        grad_bandwidth=bus,
        flops=flops,
        host_bandwidth=host_bandwidth,
        shares_memory=device.shares_memory,
        flops_fp32=flops,
        device_bandwidth=host_bandwidth if device.shares_memory else BUS_BANDWIDTH,
        sources=(("flops", f"measured: one large product in {precision}"), *((rate, assumed) for rate in rates)),
    )
