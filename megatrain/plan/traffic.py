"""What homes of their own add to the work of each stream, and what they save, as seconds of a step.

Plain sums of bytes over bandwidths, compared with all state in host memory: enough to tell which homes are worth a
replay. Left out: whether the streams overlap, which only a replay knows.
"""

from __future__ import annotations

from collections import Counter
from math import inf

from megatrain.layout import layout_of
from megatrain.plan.cost import update_nbytes
from megatrain.plan.rates import bus_bandwidths, disk_bandwidths, optimizer_bandwidth, packing_bandwidth
from megatrain.schedule.state import MOMENTS_NBYTES
from megatrain.spec import Hardware, ModelSpec, Policy

LOW_BITS_NBYTES = 2


def home_seconds(model: ModelSpec, policy: Policy, hardware: Hardware) -> tuple[dict[str, float], dict[str, float]]:
    """Stream -> seconds that the policy's homes add to it, negative where they save some; those behind the forward."""
    found, late = Counter[str](), Counter[str]()
    for index in range(len(model.units)):
        for stream, seconds in _of_unit(model, policy, hardware, index).items():
            found[stream] += seconds  # type: ignore[assignment]
        for stream, seconds in _of_disk_late(model, policy, hardware, index).items():
            late[stream] += seconds  # type: ignore[assignment]
    half = {"fetch": 0.5, "grad": 1.0, **({} if policy.update == "next_forward" else {"host": 1.0, "compute": 1.0})}
    return dict(found), {**late, **{stream: share * found.get(stream, 0.0) for stream, share in half.items()}}


def _of_unit(model: ModelSpec, policy: Policy, hardware: Hardware, index: int) -> dict[str, float]:
    home, layout = policy.home(index), layout_of(model.units[index])
    weights, trained = layout.size * policy.weight_nbytes, layout.trained.size
    visits = 2 if index in model.layers and index >= model.lowest_trained else 1
    fetches = visits + int(index == 0 and model.tied and policy.read_ahead_nbytes > 0)  # for the head, from one read
    fetching, leaving = bus_bandwidths(hardware, policy.transit)
    packing = packing_bandwidth(hardware) if policy.transit == "slabs" else inf
    if home.on_device:
        touched = update_nbytes(layout, policy)
        return {
            "fetch": -fetches * weights / fetching,
            "pack": -fetches * weights / packing,
            "grad": -trained * policy.grad_nbytes / leaving,
            "unpack": -trained * policy.grad_nbytes / packing,
            "host": -touched / optimizer_bandwidth(hardware, policy.host_threads),
            "compute": touched / (hardware.device_bandwidth or inf),
        }
    saved = -(fetches - 1) * weights if home.weights == "device" else 0
    packed = -fetches * weights if home.weights == "disk" else saved  # staging buffers are page-locked
    unpacked = -trained * policy.grad_nbytes if home.gradients == "disk" else 0
    reads = writes = 0
    if home.moments == "disk":
        reads, writes = MOMENTS_NBYTES * trained, MOMENTS_NBYTES * trained
    if home.low_bits == "disk" and policy.precision == "bf16":
        reads, writes = reads + LOW_BITS_NBYTES * trained, writes + LOW_BITS_NBYTES * trained
    if home.gradients == "disk" and policy.update != "during_backward":
        reads, writes = reads + trained * policy.grad_nbytes, writes + trained * policy.grad_nbytes
    if home.weights == "disk":
        reads, writes = reads + visits * weights, writes + trained * policy.weight_nbytes
    reading, writing = disk_bandwidths(hardware)
    return {
        "fetch": saved / fetching,
        "pack": packed / packing,
        "unpack": unpacked / packing,
        "read": reads / reading,
        "write": writes / writing,
    }


def _of_disk_late(model: ModelSpec, policy: Policy, hardware: Hardware, index: int) -> dict[str, float]:
    """Of what a unit's homes have the disk do, what it does from the loss on."""
    home, layout = policy.home(index), layout_of(model.units[index])
    again = index in model.layers and index >= model.lowest_trained and home.weights == "disk"
    reading, writing = disk_bandwidths(hardware)
    weights = layout.size * policy.weight_nbytes / reading if again else 0.0
    if policy.update == "during_backward":
        all_of_it = _of_unit(model, policy, hardware, index)
        once = layout.size * policy.weight_nbytes / reading if home.weights == "disk" else 0.0
        return {"read": all_of_it.get("read", 0.0) - once, "write": all_of_it.get("write", 0.0)}
    gradients = layout.trained.size * policy.grad_nbytes / writing if home.gradients == "disk" else 0.0
    return {"read": weights, "write": gradients}
