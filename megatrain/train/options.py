"""What every way to make an engine takes, and the policy that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypedDict

from megatrain.device import Device
from megatrain.errors import DoesNotFit, PlanError
from megatrain.memory import Disk
from megatrain.model import require_compiler
from megatrain.optim import AdamW
from megatrain.plan import available_host_nbytes, available_threads, choose_policy, memory_table
from megatrain.plan.homes import to_disk
from megatrain.plan.locks import fit_transit
from megatrain.schedule.state import state_nbytes
from megatrain.spec import IN_HOST, ModelSpec, Policy, Precision, Work
from megatrain.train.schedules import refuse_contradictions

SHARDS_THAT_PASS = 8
"""Shards of weights that there is room for at one time, where they pass through little memory: the more, the sooner the
next ones are on their way, and the smaller."""


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
    forward_nbytes: int
    """`Policy.forward_nbytes` of the usual policy, by rows; a policy that is given has its own."""


def policy_of(options: EngineOptions, device: Device, spec: ModelSpec) -> Policy:
    """The policy that is given, if it agrees with the other options, or the usual one for the device.

    With folders for the disk, and no homes given, as little state goes there as the host's budget asks for; and the
    usual one page-locks no more than the device says it may. Raises `PlanError` for a policy that contradicts the other
    options, and `DoesNotFit`.
    """
    policy = _placed(options, device, spec)
    if options.get("policy", "auto") == "auto" and device.lockable_nbytes is not None:
        return fit_transit(spec, policy, device.lockable_nbytes)
    return policy


def _placed(options: EngineOptions, device: Device, spec: ModelSpec) -> Policy:
    """The policy with as little state on the disk as the host's budget asks for, where there is a choice."""
    policy = _without_homes(options, device)
    if policy.compile:
        require_compiler(device.torch_device)
    if not options.get("disk") or policy.homes:
        return policy
    budget = available_host_nbytes() if policy.host_budget_nbytes is None else policy.host_budget_nbytes
    room = budget - _beside_state(spec, policy)
    placed = to_disk(spec, policy, room)
    if placed is None:
        least = "even with all of the model's state on the disk"
        raise DoesNotFit(f"needs more than {budget:,} bytes of host memory {least}", where="policy.host_budget_nbytes")
    return policy if all(home == IN_HOST for home in placed.homes) else placed


def _beside_state(spec: ModelSpec, policy: Policy) -> int:
    """Host memory of the slots that gradients and, where memory is shared, weights pass through."""
    table = memory_table(spec, policy, Work((1, 1)))  # sums of several micro-batches are the wider ones
    tiers = ("host", "device") if policy.shares_memory else ("host",)
    state = state_nbytes(spec, policy)
    return sum(nbytes for (tier, _), nbytes in table.items() if tier in tiers) - sum(state[tier] for tier in tiers)


def _without_homes(options: EngineOptions, device: Device) -> Policy:
    policy, precision = options.get("policy", "auto"), options.get("precision", "bf16")
    max_grad_norm = options.get("max_grad_norm", 1.0)
    if policy == "auto":
        usual = choose_policy(
            precision,
            shares_memory=device.shares_memory,
            clips=max_grad_norm is not None,
            host_threads=available_threads(),
        )
        passing = options.get("forward_nbytes", 0)
        shard = min(usual.shard_nbytes, max(1, passing // SHARDS_THAT_PASS))
        return replace(usual, gates="rows", forward_nbytes=passing, shard_nbytes=shard) if passing else usual
    if options.get("forward_nbytes"):
        raise PlanError("is the policy's own where one is given", where="forward_nbytes", fix="give it in the policy")
    refuse_contradictions(policy, precision, max_grad_norm, device)
    return policy


def disk_of(options: EngineOptions, policy: Policy) -> Disk | None:
    """The files for state on the disk, where the policy puts any there. Raises `PlanError`, `DiskError`."""
    folders = options.get("disk", ())
    if isinstance(folders, Disk):
        return folders
    if not folders:
        if any(home.uses_disk for home in policy.homes):
            raise PlanError("puts state on the disk", where="policy.homes", fix="give folders for it as `disk`")
        return None
    return Disk([Path(folder).expanduser() for folder in folders])
