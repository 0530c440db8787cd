"""An engine's schedules: built and checked on first use, cached, with their memory allocated on each use.

Ops depend on the number of micro-batches, not on their sizes, so schedules are cached by number; if layer inputs
are offloaded, for micro-batches as large as the largest so far. The activation plan may be chosen for the work of
each step; results do not depend on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import zip_longest
from typing import Literal

from megatrain.device import Device
from megatrain.dist import ALONE, World
from megatrain.errors import DoesNotFit, PlanError
from megatrain.formatting import at_least, at_most
from megatrain.memory import Disk, Store
from megatrain.model import PortedModel
from megatrain.plan import available_host_nbytes, fit_activations, images_nbytes, nearest_that_fits
from megatrain.schedule import Schedule, build_flush, build_forward, build_step, check
from megatrain.spec import Growth, Limits, ModelSpec, Numerics, Policy, Work

FIXED = ("update", "transfer", "shares_memory")
"""Policy fields that cannot change, since state, device memory and the optimizer depend on them."""

OWNING = ("shard_nbytes", "delivery")
"""Policy fields that decide what each rank owns, and where."""

Kind = Literal["step", "pending step", "forward", "flush"]
Key = tuple[Kind, int, bool, Policy]
"""(kind of run, number of micro-batches, whether they bring more than text, policy)."""


class Schedules:
    """The schedules by kind of run and number of micro-batches. `policy` is that of the last one requested."""

    def __init__(
        self,
        ported: PortedModel,
        store: Store,
        numerics: Numerics,
        policy: Policy,
        device: Device,
        world: World = ALONE,
        *,
        fits_activations: bool,
    ) -> None:
        self._ported, self._numerics, self.policy = ported, numerics, policy
        self.known: dict[Key, Schedule] = {}
        self._work: dict[Key, Work] = {}
        """The work that each was built for."""
        self._store, self._pool, self._device, self._world = store, store.pool, device, world
        self.fits_activations = fits_activations
        self._memory_for_activations = self._free_nbytes if fits_activations else 0
        """Bytes that were free on each rank after the state was allocated."""
        self._most_values = 0.0
        """Values of the images of a micro-batch that are known to fit."""
        self._is_scattered = False
        """Whether state may not be where `policy` says, since it could not be moved back."""

    def get(self, kind: Kind, work: Work) -> Schedule:
        """The schedule for this kind of run and work, with its memory allocated and all state in place.

        Raises `DoesNotFit`, before allocating anything, with the nearest policy that would fit, and `DiskError`.
        """
        self._store.settle()
        self._gather()
        if self.fits_activations and kind in ("step", "pending step"):
            self.policy = self._fitted(self._memory_for_activations, self._widest(work))
        key: Key = kind, work.micro_batches, work.beyond_text, self.policy
        built = self._work.get(key)
        wanted = built or work
        if self.policy.offloads_in(self._ported.structure):
            wanted = _larger(wanted, work)
        if wanted != built:
            # Slots of outputs and side values have the measured size; without a measurement they would hold nothing.
            unmeasured = any(side.size == Growth() for side in self._ported.structure.sides)
            measures = self.policy.offloads_outputs or (self.policy.offloads and unmeasured)
            spec = self._ported.spec if measures else self._ported.known
            schedule = _build(kind, spec, self._numerics, self.policy, wanted, self._world.rank)
            check(schedule)
            self.known[key], self._work[key] = schedule, wanted
        try:
            self._pool.provide(self.known[key].buffers.values())
        except DoesNotFit as error:
            ledger = self._pool.ledger
            saves = ledger.table().get(("host", "checkpoint"), 0)  # not part of any schedule, but allocated
            left = {tier: budget - (saves if tier == "host" else 0) for tier, budget in ledger.budgets.items()}
            error.fix = (
                f"{error.fix}; {nearest_that_fits(self._ported.structure, self._numerics, self.policy, work, left)}"
            )
            raise
        if self.fits_activations and kind in ("step", "pending step"):
            self._refuse_images(self._widest(work))
        return self.known[key]

    def _refuse_images(self, work: Work) -> None:
        """Raise `DoesNotFit` if images take more than is free beside all slots: whoever gave no policy had no plan that
        says so. Asked once for images of that many values."""
        if work.values_per_token * max(work.tokens) <= self._most_values:
            return
        needed = images_nbytes(self._ported.spec, self._numerics, self.policy, work)
        free, tier = self._free_nbytes, "host" if self._device.shares_memory else "device"
        if not needed:
            said = "what its images take is not known in advance: its code does not run on zeros in their place"
            logging.getLogger(__name__).warning("%s: %s", self._ported.structure.name, said)
        if needed > free:
            raise DoesNotFit(
                f"the images of a micro-batch take {at_least(needed)} in their encoder, and {at_most(free)} are free",
                where=tier,
                fix="use fewer rows in a micro-batch, or fewer or smaller images in a row",
                needed={tier: needed},
            )
        self._most_values = work.values_per_token * max(work.tokens)

    def adopt(self, policy: Policy, *, fits_activations: bool = False) -> None:
        """Use another policy from now on; its memory is allocated with its first schedule, and the old slots are
        freed.

        Raises `PlanError` for a change that is not possible, and the tier's error if one refuses; the old policy
        then stays.
        """
        for name in (*FIXED, *(OWNING if self._world.size > 1 else ())):
            before, after = getattr(self.policy, name), getattr(policy, name)
            if before != after:
                raise PlanError(f"cannot change during training ({before} to {after})", where=f"policy.{name}")
        refuse_no_files(policy, self._ported.structure)
        self._store.settle()
        self._pool.keep_state()
        self._is_scattered = True
        try:
            self._store.move(policy)
        except BaseException:
            self._gather()
            raise
        self._is_scattered = False
        self.policy, self.fits_activations = policy, fits_activations

    def _gather(self) -> None:
        """Move all state to where the policy places it; a schedule would take missing state for new, and zero it.

        Raises the tier's error; the next call tries again.
        """
        if self._is_scattered:
            self._store.move(self.policy)
            self._is_scattered = False

    def clear(self) -> None:
        self.known.clear()
        self._work.clear()

    def _fitted(self, free_nbytes: int, work: Work) -> Policy:
        """Layers' memory is measured for it."""
        return fit_activations(self._ported.spec, self._numerics, self.policy, work, free_nbytes)

    @property
    def _free_nbytes(self) -> int:
        """Bytes that are free now on each rank for activations."""
        shared = self._device.shares_memory
        free = available_host_nbytes() // self._world.size if shared else self._device.free_nbytes()
        return min(self._world.exchange("free memory", free))

    def _widest(self, work: Work) -> Work:
        """The largest micro-batches of any rank, so that all plan alike."""
        told = self._world.exchange("work", (work.tokens, work.length))
        if len(told) == 1:
            return work
        return reduce(_larger, [replace(work, tokens=tuple(tokens), length=length) for tokens, length in told])


def budgets(limits: Limits, device: Device, disk: Disk | None = None) -> dict[str, int]:
    """Bytes by tier: within the limits, else what the machine has now."""
    available: dict[str, Callable[[], int]] = {"host": available_host_nbytes}
    if not device.shares_memory:
        available["device"] = device.free_nbytes
    if disk is not None:
        available["disk"] = disk.free_nbytes
    given = {tier: nbytes for tier in ("host", "device", "disk") if (nbytes := limits.of(tier)) is not None}
    return given | {tier: free() for tier, free in available.items() if tier not in given}


def _larger(left: Work, right: Work) -> Work:
    """Micro-batches at least as large as those of either."""
    tokens = tuple(max(pair) for pair in zip_longest(left.tokens, right.tokens, fillvalue=0))
    length = left.length if left.length == right.length else None
    return replace(
        right, tokens=tokens, length=length, values_per_token=max(left.values_per_token, right.values_per_token)
    )


def _build(kind: Kind, spec: ModelSpec, numerics: Numerics, policy: Policy, work: Work, rank: int) -> Schedule:
    match kind:
        case "flush":
            return build_flush(spec, numerics, policy, rank=rank)
        case "forward":
            return build_forward(spec, numerics, policy, work, rank=rank)
        case "step":
            return build_step(spec, numerics, policy, work, rank=rank)
        case "pending step":
            return build_step(spec, numerics, policy, work, pending="all", rank=rank)


def refuse_no_files(policy: Policy, spec: ModelSpec) -> None:
    """Raise `PlanError` if the policy reads weights from files, and none can be read."""
    if not any(placement.weights == "file" for placement in policy.placements):
        return
    if not any(param.file_backed for unit in spec.units for param in unit.params):
        what = "the model's files hold no frozen weights in the precision of training"
        raise PlanError(f"reads weights from files, but {what}", where="policy.placements", fix="use host or disk")


def refuse_contradictions(policy: Policy, max_grad_norm: float | None, device: Device) -> None:
    """Raise `PlanError` if the policy contradicts the other arguments."""
    if policy.update == "during_backward" and max_grad_norm is not None:
        raise PlanError(
            "an exact global norm is known only after the backward pass",
            where="policy.update",
            fix="use update='next_forward', or max_grad_norm=None",
        )
    if policy.shares_memory and not device.shares_memory:
        raise PlanError(f"{device.name} does not compute in host memory", where="policy.shares_memory")
