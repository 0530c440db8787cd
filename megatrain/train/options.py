"""What every way to make an engine takes, and the policy that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

from megatrain.device import Device
from megatrain.errors import PlanError
from megatrain.memory import Disk
from megatrain.optim import AdamW
from megatrain.plan import available_threads, choose_policy
from megatrain.spec import Policy, Precision
from megatrain.train.schedules import refuse_contradictions


class EngineOptions(TypedDict, total=False):
    """Keyword arguments that every way to make an engine takes; `Engine.from_model` explains them."""

    device: str | Device
    precision: Precision
    optimizer: AdamW | None
    max_grad_norm: float | None
    policy: Policy | Literal["auto"]
    seed: int
    verify: bool
    disk: Sequence[str | Path] | Disk


def policy_of(options: EngineOptions, device: Device) -> Policy:
    """The policy that is given, if it agrees with the other options, or the usual one for the device.

    Raises `PlanError` for one that contradicts them.
    """
    policy, precision = options.get("policy", "auto"), options.get("precision", "bf16")
    max_grad_norm = options.get("max_grad_norm", 1.0)
    if policy == "auto":
        return choose_policy(
            precision,
            shares_memory=device.shares_memory,
            clips=max_grad_norm is not None,
            host_threads=available_threads(),
        )
    refuse_contradictions(policy, precision, max_grad_norm, device)
    return policy


def disk_of(options: EngineOptions, policy: Policy) -> Disk | None:
    """The files for state on the disk, where the policy puts any there. Raises `PlanError`, `DiskError`."""
    folders = options.get("disk", ())
    if isinstance(folders, Disk):
        return folders
    if not folders:
        if any("disk" in (home.weights, home.low_bits, home.moments) for home in policy.homes):
            raise PlanError("puts state on the disk", where="policy.homes", fix="give folders for it as `disk`")
        return None
    return Disk([Path(folder).expanduser() for folder in folders])
