"""Buffers that live between steps: the parts of each unit's state in their tiers, and what they pass through.

A unit has weights, low bits and moments, and a gradient if that waits for the norm. Each part is in the tier of its
placement (`spec.Placement`). On the disk it has a region, and passes by pieces (`pieces`) through a staging ring, which
is slots in host memory, when it is updated. Weights on a drive, which is the disk or the model's own files, reach a
device with memory of its own by shards, through other staging buffers; in shared memory, where compute reads them, they
pass by unit. `StateBuffers` names all of it for a schedule; `state_nbytes` adds up the same bytes without names, since
a plan search needs them thousands of times. `gradients` decides where gradients are summed and land.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Literal, NamedTuple

from megatrain.schedule.contents import CONTENT_OF, USED, Content, Norm, Weights
from megatrain.schedule.ops import Access, Buffer, Use, declare
from megatrain.schedule.passes.disk_staging import Staged
from megatrain.schedule.passes.pieces import (
    LOW_BITS_NBYTES,
    PIECE_NBYTES,
    SLOTS,
    STATE_NBYTES,
    Array,
    Piece,
    arrays_of,
    cuts_of,
    disk_pieces,
    ends_of,
    groups_of,
    largest_disk_pieces,
    merged,
    most_alive,
    own_groups,
)
from megatrain.spec import IN_HOST, ModelSpec, Numerics, Part, Placement, Policy, Precision, Tier, UpdateTime
from megatrain.spec.hardware import SECTOR, whole_sectors
from megatrain.spec.layout import SAVED_AT_ONCE, Layout, MatrixGroup, Ownership, Shard, layout_of
from megatrain.spec.model import UnitKind

HOST_ONLY = (Part.LOW_BITS, Part.MOMENTS)
"""Parts that only updates use, so they do not cross the bus if the host updates."""

MOST_SHARDS = 16
"""Shards of a unit that pass through host memory; larger units have larger ones."""

RING = "host/piece_slots"
"""Slots in host memory through which pieces of state on the disk pass, whatever they hold."""

NORMS = "host/norms"
"""Buffer of float64 sums of squares, one per unit."""

MOMENTS_ON_DISK = Placement(moments="disk")
"""With it a rank may need more slots of directions than with all state in host memory."""

USE_OF = {
    Part.WEIGHTS: Use.WEIGHTS,
    Part.LOW_BITS: Use.OPTIMIZER_STATE,
    Part.MOMENTS: Use.OPTIMIZER_STATE,
    Part.GRADIENTS: Use.GRADIENTS,
}

Pending = Literal["none", "all"]
"""Whether all units have a pending update of the last step, or none."""


class SizedPart(NamedTuple):
    """A part of a unit's state, with its bytes and tier, and whether the device has a copy too (with several
    ranks, of all ranks' parts)."""

    part: Part
    nbytes: int
    tier: Tier
    copied: bool = False


def parts_of(layout: Layout, numerics: Numerics, policy: Policy, placement: Placement) -> tuple[SizedPart, ...]:
    """The non-empty parts of a unit between steps; with several ranks, one rank's share.

    If weights are in files, those held in host memory before them are a part like any other.
    """
    sizes = layout.own_size, layout.trained.own_size, sum(layout.own_state_sizes), layout.files_start
    return _parts_of(*sizes, numerics, policy.update, placement)


def reads_files(layout: Layout, placement: Placement) -> bool:
    """Whether weights of a unit are read from files."""
    return placement.weights == "file" and layout.files_start < layout.size


@lru_cache(maxsize=4096)
def _parts_of(
    numel: int,
    trained: int,
    in_state: int,
    files_start: int,
    numerics: Numerics,
    update: UpdateTime,
    placement: Placement,
) -> tuple[SizedPart, ...]:
    """in_state: numbers that the optimizer keeps."""
    if placement.weights == "file":
        in_host, rest = replace(placement, weights="host"), (numel - files_start) * numerics.weight_nbytes
        kept = _parts_of(min(numel, files_start), trained, in_state, numel, numerics, update, in_host)
        return (*kept, SizedPart(Part.WEIGHTS, rest, "file")) if rest > 0 else kept
    sizes = {
        Part.WEIGHTS: numel * numerics.weight_nbytes,
        Part.LOW_BITS: trained * (0 if numerics.precision == "fp32" else LOW_BITS_NBYTES),  # frozen ones have none
        Part.MOMENTS: STATE_NBYTES * in_state,
        Part.GRADIENTS: 0 if update == "during_backward" else trained * numerics.grad_nbytes,
    }
    tiers = {part: placement.tier(part) for part in sizes}
    return tuple(
        SizedPart(part, nbytes, tiers[part], copied=part is Part.WEIGHTS and tiers[part] != placement.weights)
        for part, nbytes in sizes.items()
        if nbytes
    )


def state_name(tier: Tier, part: Part, unit: int) -> str:
    """The buffer of a part of a unit's state in a tier."""
    return f"{tier}/{part}/{unit}"


def whole_name(unit: int) -> str:
    """Name of the buffer with all weights of a unit, some of them in files, that compute in host memory reads."""
    return f"host/whole_weights/{unit}"


def staging_name(model: ModelSpec, unit: int, part: Part, number: int = 0) -> str:
    """A host buffer through which a part of a unit passes from the disk; as for slots, the ends share one."""
    kind = model.units[unit].kind
    return f"host/disk_staging/{part}/{f'layer{number}' if kind == 'layer' else kind if model.tied else 'ends'}"


def staging_names(model: ModelSpec, policy: Policy, unit: int, part: Part) -> list[str]:
    """Names of the staging buffers through which a part of a unit passes."""
    if model.units[unit].kind != "layer":
        return [staging_name(model, unit, part)]
    count = min(policy.disk_staging_slots, len(model.layers))
    return [staging_name(model, unit, part, number) for number in range(count)]


def state_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy) -> dict[str, int]:
    """Tier -> bytes of all units' state between steps, including staging buffers and the staging ring."""
    totals: dict[str, int] = {"device": 0, "host": 8 * len(model.units), "disk": 0, "file": 0}
    stages: dict[str, int] = {}
    ring = directions = width = 0
    for first, placement, count in units_alike(model, policy):
        layout = layout_of(model.units[first])
        if layout.matrices_start < layout.trained.size:
            slots, nbytes = _direction_slots(layout.trained, model, numerics, policy, placement)
            directions, width = max(directions, slots), max(width, nbytes)
        ring = max(ring, ring_slot_nbytes(layout.trained, numerics, policy, placement))
        for part in parts_of(layout, numerics, policy, placement):
            totals[part.tier] += count * part.nbytes
            totals["device"] += count * part.nbytes * part.copied * model.ranks
            for name, nbytes in _stages(model, numerics, policy, first, part):
                stages[name] = max(stages.get(name, 0), nbytes)
    totals["host"] += sum(stages.values()) + ring_slots(model, numerics, policy) * ring
    totals["host"] += directions * width
    if policy.delivery == "shared":
        totals["host"] += prod(whole_matrices_slots(model, policy))
    return totals


def staged_whole(policy: Policy) -> tuple[Part, ...]:
    """Parts of which all that a unit has on the disk is in a staging buffer while it is used: its weights only where
    compute reads them there."""
    return (Part.WEIGHTS,) if policy.shares_memory else ()


def staged_arrays(trained: Layout, numerics: Numerics, policy: Policy, placement: Placement) -> tuple[Array, ...]:
    """The arrays of a unit that move through the staging ring during its update: what is on the disk and not staged
    whole, and gradients that are used as they land beside it."""
    if placement.on_device or not trained.size:
        return ()
    *state, gradient = arrays_of(trained, numerics)
    whole = staged_whole(policy)
    arrays = tuple(array for array in state if array.part not in whole and placement.tier(array.part) == "disk")
    waits = policy.update == "next_forward"
    joins = placement.gradients == "disk" if waits else bool(arrays) and not policy.shares_memory
    return (*arrays, gradient) if joins else arrays


def fills_slot(layout: Layout, policy: Policy, placement: Placement) -> bool:
    """Whether a pending update of a unit with weights on the disk also copies them to their slot on the device.

    It does not if some of them are frozen or belong to other ranks, or if there is one slot for layers: the update
    would then start when nothing computes.
    """
    is_passing = placement.weights == "disk" and not policy.shares_memory
    return is_passing and layout.ranks == 1 and policy.layer_slots > 1 and layout.trained.size == layout.size > 0


def ring_slots(model: ModelSpec, numerics: Numerics, policy: Policy) -> int:
    """The slots of the staging ring: `SLOTS`, or `Policy.disk_staging_slots` if no unit has more than one piece."""
    layouts = (
        layout_of(model.units[unit]).trained for unit, placement, _ in units_alike(model, policy) if placement.uses_disk
    )
    several = any(len(disk_pieces(trained, numerics, policy)) > 1 for trained in layouts)
    return SLOTS if several else policy.disk_staging_slots


def ring_slot_nbytes(trained: Layout, numerics: Numerics, policy: Policy, placement: Placement) -> int:
    """Bytes of a slot of the staging ring that holds any piece of a unit."""
    if not (arrays := staged_arrays(trained, numerics, policy, placement)):
        return 0
    nbytes = [
        sum(whole_sectors(array.nbytes_in(piece)) + SECTOR * (array.part is Part.WEIGHTS) for array in arrays)
        for piece in largest_disk_pieces(trained, numerics, policy)
    ]
    return max(nbytes)


def gradient_write_pieces(trained: Layout, numerics: Numerics, policy: Policy, placement: Placement) -> Sequence[Piece]:
    """The pieces in which a gradient leaves for the disk: as many of those of updates together as a slot holds."""
    pieces = disk_pieces(trained, numerics, policy)
    largest = max(stop - start for start, stop in pieces) * numerics.grad_nbytes
    together = ring_slot_nbytes(trained, numerics, policy, placement) // whole_sectors(largest)
    return merged(pieces, -(-len(pieces) // together))


def pieces_in_steps(
    trained: Layout, groups: Sequence[Piece], numerics: Numerics, policy: Policy, placement: Placement
) -> Sequence[Piece]:
    """The pieces in which a unit with such matrices is updated: those that pass through host memory; or what is
    updated by elements, and one for each group. groups: as `own_groups` returns them."""
    if staged_arrays(trained, numerics, policy, placement):
        return disk_pieces(trained, numerics, policy)
    by_elements = [(0, trained.own_matrices_start)] if trained.own_matrices_start else []
    return [*by_elements, *((start, stop) for start, stop in groups if start < stop)]


def direction_slots(model: ModelSpec, numerics: Numerics, policy: Policy) -> tuple[int, int]:
    """Number and bytes of the slots of directions in host memory, as many as any rank needs; (0, 0) if there are none.

    Ranks that share memory map each other's slots once, so there are enough for any placement that the run may adopt.
    """
    count = nbytes = 0
    for unit, placement, _ in units_alike(model, policy):
        slots = _direction_slots(layout_of(model.units[unit]).trained, model, numerics, policy, placement)
        count, nbytes = max(count, slots[0]), max(nbytes, slots[1])
    return count, nbytes


def _direction_slots(
    trained: Layout, model: ModelSpec, numerics: Numerics, policy: Policy, placement: Placement
) -> tuple[int, int]:
    if placement.on_device or trained.matrices_start >= trained.size:
        return 0, 0
    count, widest, is_mapped = 0, 0, model.ranks > 1 and policy.delivery == "shared"
    placements = (IN_HOST, MOMENTS_ON_DISK) if is_mapped else (placement,)
    for owned, placement in product(Ownership.of(0, numerics, policy).all_ranks(trained), placements):
        groups = own_groups(trained, model, owned)
        pieces = pieces_in_steps(trained, groups, numerics, policy, placement)
        ends = ends_of(trained, model, owned, alike=bool(staged_arrays(trained, numerics, policy, placement)))
        count = max(count, most_alive(pieces, groups, ends, groups_ahead(policy)))
        widest = max(widest, *(stop - start for start, stop in groups))
    return count, widest * model.newton_schulz.nbytes


DIRECTION_SLOTS = 2
"""Slots for directions that are made orthogonal elsewhere, on the device or by other ranks: one is filled while the
other is made orthogonal or leaves."""


def directions_name(tier: Tier, number: int) -> str:
    """Name of a slot for the direction of a group, or of a rank's part of it."""
    return f"{tier}/directions/{number}"


def whole_matrices_name(tier: Tier, number: int) -> str:
    """Name of a slot for the matrices of a group that a rank makes orthogonal for all ranks."""
    return f"{tier}/whole_matrices/{number % DIRECTION_SLOTS}"


def largest_share(group: MatrixGroup, model: ModelSpec) -> int:
    """Bytes of the most matrices of a group that any rank makes orthogonal."""
    return max(share.stop - share.start for share in group.shares(model.ranks)) * model.newton_schulz.nbytes


def whole_matrices_slots(model: ModelSpec, policy: Policy) -> tuple[int, int]:
    """Number and bytes of the slots of matrices that a rank makes orthogonal for all; (0, 0) if there are none."""
    count = widest = 0
    for unit, _, alike in units_alike(model, policy) if model.ranks > 1 else ():
        groups = groups_of(layout_of(model.units[unit]).trained, model)
        count += alike * len(groups)
        widest = max([widest, *(largest_share(group, model) for group in groups)])
    return min(count, DIRECTION_SLOTS), widest


def groups_ahead(policy: Policy) -> int:
    """How many groups MOMENTUM is ahead of APPLY, beside the one that both are about."""
    return 0 if policy.shares_memory else 1


def _stages(
    model: ModelSpec, numerics: Numerics, policy: Policy, unit: int, part: SizedPart
) -> Iterator[tuple[str, int]]:
    """(name, bytes) of the host buffers through which a part passes from the drive."""
    if part.tier not in ("disk", "file"):
        return
    layout, weight_nbytes = layout_of(model.units[unit]), numerics.weight_nbytes
    if part.part is Part.WEIGHTS and not policy.shares_memory:
        shards = weight_shards(layout, model.units[unit].kind, numerics, policy, part.tier)
        first = layout.files_start if part.tier == "file" else 0
        largest = max(shard.stop - shard.start for shard in shards if shard.stop > first)
        yield from ((name, largest * weight_nbytes // layout.ranks) for name in weight_staging_names(policy))
    elif part.part in staged_whole(policy):
        whole = layout.size * weight_nbytes if part.tier == "file" else part.nbytes
        yield from ((name, whole) for name in staging_names(model, policy, unit, part.part))


def weight_staging_names(policy: Policy) -> tuple[str, ...]:
    """Host buffers through which shards of weights pass from the disk or from files to the device."""
    return tuple(f"host/weight_staging/{number}" for number in range(policy.pinned_staging_slots))


def changed_nbytes(layout: Layout, numerics: Numerics, sized: SizedPart) -> int:
    """Bytes from the start of a part that updates change, rounded up to a sector, where a write can end.

    Frozen weights come after that.
    """
    if sized.part is not Part.WEIGHTS:
        return sized.nbytes
    return min(sized.nbytes, whole_sectors(layout.trained.own_size * numerics.weight_nbytes))


def weight_shards(layout: Layout, kind: UnitKind, numerics: Numerics, policy: Policy, tier: Tier) -> tuple[Shard, ...]:
    """The shards in which a unit's weights reach the device from `tier`: no larger than the read-ahead, if they use it.

    From a drive they pass through host memory, so they are smaller, unless each would be a phase of a call, or several
    ranks own a part of each.
    """
    nbytes = policy.shard_nbytes
    if policy.read_ahead_nbytes and kind == "layer":
        nbytes = min(nbytes, policy.read_ahead_nbytes)
    if tier in ("disk", "file") and policy.wait_for == "unit" and layout.ranks == 1:
        nbytes = min(nbytes, max(PIECE_NBYTES, layout.size * numerics.weight_nbytes // MOST_SHARDS))
    return layout.shards(max(1, nbytes // numerics.weight_nbytes))


def units_alike(model: ModelSpec, policy: Policy) -> list[tuple[int, Placement, int]]:
    """(one of them, its placement, their number) for each group of units with equal kind, size and placement.

    Equal placements that are different objects may form separate groups.
    """
    kinds = _kinds(model)
    if not policy.placements:
        return [(unit, IN_HOST, count) for unit, count in Counter(kinds).items()]
    placements = policy.placements_of(model)
    of = {id(placement): placement for placement in placements}
    counts = Counter(zip(kinds, map(id, placements), strict=True))
    return [(unit, of[place], count) for (unit, place), count in counts.items()]


@lru_cache(maxsize=64)
def _kinds(model: ModelSpec) -> tuple[int, ...]:
    """Find the first unit that is like each unit: of the same kind and size, and with a backward pass if it has one."""
    first: dict[tuple[object, ...], int] = {}
    kinds = []
    for unit, spec in enumerate(model.units):
        layout = layout_of(spec)
        sizes = layout.size, layout.trained.size, layout.files_start, layout.own_spans, layout.state_sizes
        matrices = tuple((param.shape, param.matrices) for param in spec.params if param.matrices)
        key = spec.kind, *sizes, matrices, model.has_backward(unit)
        kinds.append(first.setdefault(key, unit))
    return tuple(kinds)


def spare_nbytes(model: ModelSpec, unit: int, precision: Precision, away: Collection[Part], *, in_files: bool) -> int:
    """Host memory through which a save reads the float32 state of a unit: none for what is in host memory so.

    away: its parts that are not in host memory; in_files: whether weights are read from files.
    """
    layout = layout_of(model.units[unit])
    saved = layout.files_start if model.base_apart and layout.ranks == 1 else layout.own_size
    is_in_place = precision == "fp32" and Part.WEIGHTS not in away and not (in_files and saved > layout.files_start)
    largest = max(0 if is_in_place else saved, max(layout.own_state_sizes, default=0) if Part.MOMENTS in away else 0)
    return 4 * min(largest, SAVED_AT_ONCE)


def save_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy) -> int:
    """Host memory that saves during training need: that of the most demanding unit (`spare_nbytes`)."""
    sizes = []
    for unit, placement, _ in units_alike(model, policy):
        away = [part for part in Part if placement.tier(part) not in ("host", "file")]
        in_files = reads_files(layout_of(model.units[unit]), placement)
        sizes.append(spare_nbytes(model, unit, numerics.precision, away, in_files=in_files))
    return max(sizes)


class StateBuffers:
    """Adds the buffers of a model's state to `buffers`, for one schedule.

    `staged`: placeholder names for state on the disk. `on_drive`: the name for all weights of a unit of which the last
    are on the disk or in files -> where they are.
    """

    def __init__(
        self,
        model: ModelSpec,
        numerics: Numerics,
        policy: Policy,
        pending: Pending,
        buffers: dict[str, Buffer],
        staged: dict[str, Staged],
        on_drive: dict[str, tuple[Access, ...]],
    ) -> None:
        self._model, self._numerics, self._policy = model, numerics, policy
        self._buffers, self._staged, self._on_drive = buffers, staged, on_drive
        self._streamed = policy.updates_streamed(model)
        old = "old" if pending == "all" else ""
        self._staged_arrays: dict[tuple[int, Placement], Sequence[Array]] = {}
        for unit, spec in enumerate(model.units):
            version = old if layout_of(spec).trained.size else ""
            for part in self.of(unit):
                waits = part.part is not Part.GRADIENTS or pending == "all"
                self._declare(unit, part, CONTENT_OF[part.part](unit, version) if waits else None)
        self._declare_ring()
        declare(buffers, Buffer(NORMS, "host", 8 * len(model.units), Use.NORMS, crosses=False))

    def _declare_ring(self) -> None:
        """Add the slots through which pieces pass, if any do. They are pinned if gradients or weights cross the bus."""
        staged = [self.staged_arrays(unit) for unit in range(len(self._model.units))]
        crossing = any(array.part not in HOST_ONLY for arrays in staged for array in arrays)
        crosses = crossing and not self._policy.shares_memory
        self.ring_slots = ring_slots(self._model, self._numerics, self._policy)
        for unit, spec in enumerate(self._model.units):
            place = self._policy.placement(unit)
            nbytes = ring_slot_nbytes(layout_of(spec).trained, self._numerics, self._policy, place)
            for number in range(self.ring_slots if nbytes else 0):
                name = f"{RING}/{number}"
                declare(self._buffers, Buffer(name, "host", nbytes, Use.DISK_STAGING, crosses=crosses))

    def of(self, unit: int) -> Sequence[SizedPart]:
        """The parts of a unit."""
        layout = layout_of(self._model.units[unit])
        return parts_of(layout, self._numerics, self._policy, self._policy.placement(unit))

    def staged_arrays(self, unit: int) -> Sequence[Array]:
        """See `staged_arrays`. Like units share the object."""
        layout, placement = layout_of(self._model.units[unit]), self._policy.placement(unit)
        key = id(layout), placement
        if key not in self._staged_arrays:
            self._staged_arrays[key] = staged_arrays(layout.trained, self._numerics, self._policy, placement)
        return self._staged_arrays[key]

    def weights_stop(self, unit: int, tier: Tier) -> int:
        """The end of the bytes of a unit's weights, out of files, that an update writes in a tier."""
        weights = next(part for part in self.of(unit) if part.part is Part.WEIGHTS and part.tier != "file")
        layout = layout_of(self._model.units[unit])
        return changed_nbytes(layout, self._numerics, weights) if tier == "disk" else weights.nbytes

    def norm(self, unit: int) -> Access:
        """Where a unit's sum of squares is, one float64."""
        return Access(NORMS, 8 * unit, 8 * unit + 8, Norm(unit))

    def _declare(self, unit: int, sized: SizedPart, content: Content | None) -> None:
        """Add the memory of a part, in its tier."""
        if sized.tier == "file":
            return self._declare_in_file(unit, sized)
        part, nbytes, tier, copied = sized
        kept = nbytes - changed_nbytes(layout_of(self._model.units[unit]), self._numerics, sized)
        crosses = part not in HOST_ONLY or unit in self._streamed
        name = state_name(tier, part, unit)
        use = USE_OF[part]
        buffer = Buffer(name, tier, nbytes, use, content, part=part, unit=unit, crosses=crosses, frozen_nbytes=kept)
        if tier == "disk":
            buffer = buffer._replace(cuts=self._cuts(unit, part))
        declare(self._buffers, buffer)
        if copied:
            name = state_name("device", part, unit)
            whole = nbytes * self._model.ranks
            declare(self._buffers, Buffer(name, "device", whole, Use.RESIDENT_COPY, part=part, unit=unit))
        if tier == "disk" and part is Part.WEIGHTS and not self._policy.shares_memory:
            self._on_drive[state_name("host", part, unit)] = (Access(buffer.name, 0, nbytes, Weights(unit)),)
        elif tier == "disk" and part in staged_whole(self._policy):
            slots = tuple(staging_names(self._model, self._policy, unit, part))
            staged = Staged(unit, buffer.name, nbytes, content or USED, slots, frozen_nbytes=kept)
            self._staged[state_name("host", part, unit)] = staged
        self._declare_stages(unit, sized)

    def _cuts(self, unit: int, part: Part) -> tuple[int, ...]:
        """The bytes of a part on the disk at which blocks begin: where pieces and, if they are read, shards do."""
        layout, numerics, policy = layout_of(self._model.units[unit]), self._numerics, self._policy
        cuts = cuts_of(part, layout.trained, numerics, policy)
        if part in staged_whole(policy) or part is not Part.WEIGHTS:
            return cuts
        shards = weight_shards(layout, self._model.units[unit].kind, numerics, policy, "disk")
        return tuple(sorted({*cuts, *(shard.start * numerics.weight_nbytes // layout.ranks for shard in shards)}))

    def _declare_stages(self, unit: int, sized: SizedPart) -> None:
        for name, nbytes in _stages(self._model, self._numerics, self._policy, unit, sized):
            crosses = sized.part not in HOST_ONLY
            declare(self._buffers, Buffer(name, "host", nbytes, Use.DISK_STAGING, part=sized.part, crosses=crosses))

    def _declare_in_file(self, unit: int, sized: SizedPart) -> None:
        """Add a unit's weights in files, which fit any version, after its weights in host memory."""
        part, nbytes, content = Part.WEIGHTS, sized.nbytes, Weights(unit)
        self._declare_stages(unit, sized)
        name, held = state_name("file", part, unit), layout_of(self._model.units[unit]).files_start
        declare(self._buffers, Buffer(name, "file", nbytes, Use.WEIGHTS, content, part=part, unit=unit))
        held *= self._numerics.weight_nbytes
        in_host = (Access(state_name("host", part, unit), 0, held, content),) if held else ()
        sources = (*in_host, Access(name, 0, nbytes, content))
        self._on_drive[state_name("host", part, unit)] = sources
        if self._policy.shares_memory:
            slots = tuple(staging_names(self._model, self._policy, unit, part))
            self._staged[whole_name(unit)] = Staged(unit, name, held + nbytes, content, slots, sources=sources)
