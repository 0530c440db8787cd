"""A `Hardware` description of this machine: as `megatrain probe` measured it, or else a rough one.

`megatrain plan` and a run use the same description: the last probe's file, if there is one; else the built-in machine
with this GPU; else measured matrix products and assumed rates. Torch is needed only to measure. Careful measurements
are in `probe`, other machines in `plan.machines`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.errors import PlanError
from megatrain.formatting import counted
from megatrain.plan import available_host_nbytes, available_threads, load_hardware
from megatrain.plan.cost import optimizer_bandwidth
from megatrain.plan.host_resources import processor_name
from megatrain.plan.machines import machine_of_device
from megatrain.spec import Hardware, Precision

if TYPE_CHECKING:
    from megatrain.device import Device

PROBED = Path("~/.cache/megatrain/hardware.json")
"""Default output file of `megatrain probe`."""

THREAD_BANDWIDTH, MOST_BANDWIDTH = 8e9, 6e10
"""Assumed memory bandwidth of an unprobed host, in bytes per second: of one thread, and of all."""

BUS_BANDWIDTH = 1e10
"""Assumed bandwidth of an unknown bus and of device memory, in bytes per second."""


def probed_machine() -> Hardware | None:
    """The result of the last `megatrain probe`; `None` if there was none.

    Raises `PlanError` for a file that cannot be read, rather than plan for the wrong machine.
    """
    path = Path(os.path.expanduser(PROBED))
    if not os.path.exists(path):  # also false in an inaccessible home folder
        return None
    try:
        return load_hardware(path)
    except PlanError as error:
        fix = "run `megatrain probe` again, or remove the file"
        raise PlanError(error.what, where=error.where, fix=fix) from error


def this_machine(device: Device, precision: Precision, hardware: str | None = None) -> Hardware:
    """Describe `device` and its host, with the memory that is free now.

    hardware: a probe's file or a built-in machine's name; `None`: the last probe, if it was of this kind of device.
    Raises `PlanError` for an unknown name or a malformed file.
    """
    if hardware is not None:
        known = load_hardware(hardware)
    else:
        probed = probed_machine()
        is_of_its_kind = probed is not None and probed.shares_memory == device.shares_memory
        known = probed if probed and is_of_its_kind else described_machine(device) or _rough(device, precision)
    host = available_host_nbytes()
    nbytes = host if device.shares_memory else device.free_nbytes()
    lockable = known.pinnable_nbytes if device.host.lockable_nbytes is None else device.host.lockable_nbytes
    now = {"host_nbytes": host, "device_nbytes": nbytes, "pinnable_nbytes": lockable}
    return replace(known, shares_memory=device.shares_memory, **now)  # type: ignore[arg-type]


def described_machine(device: Device) -> Hardware | None:
    """The built-in machine with this device, if there is one."""
    model = str(getattr(device, "model", ""))
    known = machine_of_device(model)
    return known and _with_threads(replace(known, name=f"{model}, not probed"), available_threads())


def _with_threads(known: Hardware, threads: int) -> Hardware:
    """A described machine with an optimizer pass on no more threads than there are here."""
    if not known.optimizer_bandwidth or threads >= known.optimizer_bandwidth[-1][0]:
        return known
    source = dict(known.sources)["optimizer_bandwidth"]
    sources = dict(known.sources) | {"host_bandwidth": f"{source}, {counted(threads, 'thread')} here"}
    rate = optimizer_bandwidth(known, threads)
    rows = (*(row for row in known.optimizer_bandwidth if row[0] < threads), (threads, rate))
    return replace(known, host_bandwidth=rate, optimizer_bandwidth=rows, sources=tuple(sources.items()))


def _rough(device: Device, precision: Precision) -> Hardware:
    """Describe a device by measured matrix products and assumed rates."""
    from megatrain.device import matmul_flops
    from megatrain.engine import DTYPES

    threads, nbytes = available_threads(), available_host_nbytes()
    flops = flops_fp32 = matmul_flops(device, DTYPES[precision])
    if device.shares_memory and precision == "bf16":
        flops_fp32 = matmul_flops(device, DTYPES["fp32"])  # for a warning where bfloat16 has no instructions
    host_bandwidth = min(threads * THREAD_BANDWIDTH, MOST_BANDWIDTH)
    bus = host_bandwidth / 2 if device.shares_memory else BUS_BANDWIDTH
    cpu = f"{counted(threads, 'thread')} of {processor_name()}"
    assumed = "assumed until `megatrain probe` measures it"
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
        flops_fp32=flops_fp32,
        device_bandwidth=host_bandwidth if device.shares_memory else BUS_BANDWIDTH,
        sources=(("flops", f"measured: large products in {precision}"), *((rate, assumed) for rate in rates)),
    )
