"""The schedules of one engine: built and proven at the first need, kept, and their memory provided each time.

Ops depend on the number of micro-batches, not on their sizes, so schedules are kept by number; where inputs of layers
are offloaded, for micro-batches as large as any so far. The activation plan may be left to the work of each step;
nothing that a step computes depends on it.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Literal

from megatrain.device import Device
from megatrain.errors import DoesNotFit, PlanError
from megatrain.memory import Disk, Store
from megatrain.plan import available_host_nbytes, fit_activations, nearest_that_fits
from megatrain.schedule import Schedule, build_flush, build_forward, build_step, check
from megatrain.spec import ROUNDED_BY_ROWS, ModelSpec, Policy, Precision, Work

FREE = (
    *(
        "weight_slots",
        "read_ahead_nbytes",
        "grad_slots",
        "shard_nbytes",
        "homes",
        "stage_slots",
        "slabs",
    ),
    *("activations", "activation_rows", "offload_slots", "recompute_slots", "host_threads", "gates"),
)
"""Fields of a policy that no number depends on, and that may change between steps; by rows fewer."""

Kind = Literal["step", "pending step", "forward", "flush"]
Key = tuple[Kind, int, Policy]
"""What is run, over how many micro-batches, by which policy."""


class Schedules:
    """What an engine walks, by kind of run and number of micro-batches. `policy` is that of the last one asked for."""

    def __init__(self, store: Store, policy: Policy, device: Device, *, fits_activations: bool) -> None:
        self.spec, self.policy = store.model, policy
        self.known: dict[Key, Schedule] = {}
        self._work: dict[Key, Work] = {}
        """What each has been built for."""
        self._store, self._pool, self._device = store, store.pool, device
        self._fits_activations = fits_activations
        self._is_scattered = False
        """Whether state may lie elsewhere than `policy` says, since it could not be moved back."""

    def get(self, kind: Kind, work: Work) -> Schedule:
        """The schedule for this kind of run over this work, its memory allocated and all state in its place.

        Raises `DoesNotFit`, before anything is allocated, with the nearest policy that would fit, and `DiskError`.
        """
        self._store.settle()
        self._gather()
        if self._fits_activations and kind in ("step", "pending step"):
            self.policy = fit_activations(self.spec, self.policy, work, self._memory_for_activations)
        key: Key = kind, work.micro_batches, self.policy
        built = self._work.get(key)
        wanted = built or work
        if self.policy.offloads:
            wanted = _larger(wanted, work)
        if wanted != built:
            schedule = _build(kind, self.spec, self.policy, wanted)
            check(schedule)
            self.known[key], self._work[key] = schedule, wanted
        try:
            self._pool.provide(self.known[key].buffers.values())
        except DoesNotFit as error:
            ledger = self._pool.ledger
            saves = ledger.table().get(("host", "checkpoint"), 0)  # of no schedule, and there all the same
            left = {tier: budget - (saves if tier == "host" else 0) for tier, budget in ledger.budgets.items()}
            error.fix = f"{error.fix}; {nearest_that_fits(self.spec, self.policy, work, left)}"
            raise
        return self.known[key]

    def adopt(self, policy: Policy) -> None:
        """Another policy from now on, whose memory is provided with its first schedule; the old slots are given back.

        Raises `PlanError` for a difference that would change numbers, and what a tier refuses; the old one then holds.
        """
        for field in fields(Policy):
            before, after = getattr(self.policy, field.name), getattr(policy, field.name)
            by_rows = field.name in ROUNDED_BY_ROWS and "rows" in (self.policy.gates, policy.gates)
            if before != after and (field.name not in FREE or by_rows):
                raise PlanError(f"cannot be changed under way ({before} to {after})", where=f"policy.{field.name}")
        self._store.settle()
        self._pool.keep_state()
        self._is_scattered = True
        try:
            self._store.move(policy)
        except BaseException:
            self._gather()
            raise
        self._is_scattered = False
        self.policy, self._fits_activations = policy, False

    def _gather(self) -> None:
        """Bring all state to where the policy has it; a schedule would take what it does not find there for new, and
        begin it with zeros. Raises what a tier refuses, and the next call tries again."""
        if self._is_scattered:
            self._store.move(self.policy)
            self._is_scattered = False

    def clear(self) -> None:
        """Forget all of them."""
        self.known.clear()
        self._work.clear()

    @cached_property
    def _memory_for_activations(self) -> int:
        """Bytes that were free once the state had been allocated."""
        return available_host_nbytes() if self.policy.shares_memory else self._device.free_nbytes()


def budgets(policy: Policy, device: Device, disk: Disk | None = None) -> dict[str, int]:
    """Bytes by tier: what the policy allows, else what the machine has now."""
    device_nbytes, host_nbytes = policy.device_budget_nbytes, policy.host_budget_nbytes
    found = {"host": available_host_nbytes() if host_nbytes is None else host_nbytes}
    if device_nbytes is not None:
        found["device"] = device_nbytes
    elif not device.shares_memory:
        found["device"] = device.free_nbytes()
    if policy.disk_budget_nbytes is not None:
        found["disk"] = policy.disk_budget_nbytes
    elif disk is not None:
        found["disk"] = disk.free_nbytes()
    return found


def _larger(left: Work, right: Work) -> Work:
    """Micro-batches as large as those of either."""
    tokens = tuple(max(pair) for pair in zip(left.tokens, right.tokens, strict=True))
    return Work(tokens, left.length if left.length == right.length else None, rows=right.rows)


def _build(kind: Kind, spec: ModelSpec, policy: Policy, work: Work) -> Schedule:
    match kind:
        case "flush":
            return build_flush(spec, policy)
        case "forward":
            return build_forward(spec, policy, work)
        case "step":
            return build_step(spec, policy, work)
        case "pending step":
            return build_step(spec, policy, work, pending="all")


def refuse_contradictions(policy: Policy, precision: Precision, max_grad_norm: float | None, device: Device) -> None:
    """Raise `PlanError` for a policy that the other arguments rule out, or that only describes another system."""
    if policy.precision != precision:
        raise PlanError(
            f"precision is {precision!r} but the policy's is {policy.precision!r}", where="policy.precision"
        )
    if policy.update == "after_backward" or policy.masters == "whole":
        raise PlanError("describes another system, for comparison", where="policy", fix="use update='next_forward'")
    if policy.update == "during_backward" and max_grad_norm is not None:
        raise PlanError(
            "an exact global norm is known only after the backward pass",
            where="policy.update",
            fix="use update='next_forward', or max_grad_norm=None",
        )
    if policy.shares_memory and not device.shares_memory:
        raise PlanError(f"{device.name} does not compute in host memory", where="policy.shares_memory")
