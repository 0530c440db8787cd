"""Planning a run before it starts: this machine, the run's question, and the plan again once times are measured.

The machine is what `megatrain probe` found, with the memory that is free now; without a probe, the described machine
that has this device, or a rough description from one measured product. What a run then measures corrects the prices
(`Replanner`), and a better plan is taken up between two steps. It changes no result: only what no number depends on
may differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.device import Device, matmul_flops
from megatrain.engine import DTYPES
from megatrain.errors import MegaTrainError
from megatrain.plan import (
    Plan,
    available_host_nbytes,
    calibrate,
    examine,
    find_plan,
    load_hardware,
    op_seconds,
)
from megatrain.plan.machines import machine_of_device
from megatrain.spec import Hardware, Policy, Precision
from megatrain.train.engine import Engine
from megatrain.train.events import Replanned

PROBED = Path("~/.cache/megatrain/hardware.json")

ROUGH_BANDWIDTH = 1e10
"""Bytes per second of a memory or a bus of which nothing is known."""

WORTH_IT = 0.03
"""Predicted gain below which a plan is not exchanged for another."""


def this_machine(device: Device, precision: Precision, hardware: str | None = None) -> Hardware:
    """This machine with the memory that is free now. `hardware`: a probe's file or a described machine's name.

    Raises `PlanError` for a name or file that is wrong.
    """
    if hardware is not None:
        known: Hardware | None = load_hardware(hardware)
    else:
        known = _probed(device) or machine_of_device(str(getattr(device, "model", "")))
    host = available_host_nbytes()
    if known is None:
        flops = matmul_flops(device, DTYPES[precision])
        known = Hardware(
            "this machine, roughly",
            device_nbytes=host,
            host_nbytes=host,
            fetch_bandwidth=ROUGH_BANDWIDTH,
            grad_bandwidth=ROUGH_BANDWIDTH,
            flops=flops,
            host_bandwidth=ROUGH_BANDWIDTH,
            flops_fp32=flops,
            device_bandwidth=ROUGH_BANDWIDTH,
        )
    nbytes = host if device.shares_memory else device.free_nbytes()
    return replace(known, host_nbytes=host, device_nbytes=nbytes, shares_memory=device.shares_memory)


def _probed(device: Device) -> Hardware | None:
    """What the last probe saved, if it was of a device of this kind."""
    path = PROBED.expanduser()
    if not path.is_file():
        return None
    try:
        found = load_hardware(path)
    except MegaTrainError:  # of another version: as if there were none
        return None
    return found if found.shares_memory == device.shares_memory else None


@dataclass
class Replanner:
    """Compares measured op times with the plan's prices, once, and takes up a plan that is better by them."""

    engine: Engine
    plan: Plan

    def __call__(self, step: int) -> Replanned | None:
        """To be called after a step. What has been changed, or `None`."""
        timeline = self.engine.timeline
        if timeline is None:
            return None
        question, policy, work = self.plan.question, self.engine.policy, self.plan.work
        price = op_seconds(question.model, policy, work, question.hardware)
        fixed = {"micro_batch": self.plan.micro_batch, "loss_chunk_tokens": policy.loss_chunk_tokens}
        measured = replace(
            question,
            calibration=calibrate(question.model, timeline, price),
            pinned={**question.pinned, **fixed},
        )
        now = examine(measured, policy, self.plan.micro_batch)
        better = find_plan(measured)
        gain = 1 - better.seconds / now.seconds
        if gain < WORTH_IT:
            return None
        self.engine.adopt(replace(better.policy, host_threads=policy.host_threads))
        return Replanned(step, now.seconds, better.seconds, _changes(policy, better.policy))


def _changes(before: Policy, after: Policy) -> str:
    names = ("activations", "weight_slots", "grad_slots", "shard_nbytes")
    changed = [name for name in names if getattr(before, name) != getattr(after, name)]
    return ", ".join(f"{name} {getattr(before, name)} -> {getattr(after, name)}" for name in changed)
