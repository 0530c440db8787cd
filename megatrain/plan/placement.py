"""Assigns each unit's state to device, host, disk or files: spills only what does not fit, least frequently used first.

First, frozen weights that are also in the model's own files are read from there, since nothing has to be written for
that. Then the parts that a step uses least often go to the disk: moments, low bits, waiting gradients, and last the
weights; each part first of the layers, then of prologue and epilogue. Spilled layers are spread evenly over the depth,
which keeps the disk and the bus busy during the whole step.

Spare device memory holds weights, or the whole state of layers, in sixteenths of the layers. The grid is fixed, so
that more memory only adds choices. `search` uses the device where that is faster, and `place_state` where host memory
and disk are full.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

from megatrain.schedule.passes.state_buffers import save_nbytes, state_nbytes
from megatrain.spec import IN_HOST, ModelSpec, Numerics, Placement, Policy, StateTier
from megatrain.spec.layout import layout_of

PARTS = 16
"""State is put on the device in steps of this fraction of the layers, a sixteenth."""

ON_DEVICE = Placement("device", "device", "device")
WEIGHTS_ON_DEVICE = Placement("device")

FIELDS = ("files", "moments", "low_bits", "gradients", "weights")
"""Order in which state is spilled: weights to the model's files, then fields of `Placement` to the disk."""


@lru_cache(maxsize=1024)
def state_policy(policy: Policy) -> Policy:
    """The policy with defaults for all fields that do not affect the size of state, to serve as a cache key."""
    return replace(
        policy,
        activations="recompute",
        activations_by_layer=(),
        micro_batches_per_round=0,
        grad_slots=1,
        offload_slots=1,
        host_threads=0,
        recompute_slots=None,
        streamed_updates=0.0,
        weight_slots=min(policy.weight_slots, 2),  # `fills_slot` asks whether there is more than one
    )


@lru_cache(maxsize=64)
def state_numerics(numerics: Numerics) -> Numerics:
    """As `state_policy`, for the numerics."""
    return replace(numerics, loss_chunk_tokens=1, mlp_chunk_tokens=0)


def host_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy, saves: bool) -> int:
    """Bytes of host memory for the state between steps, and if `saves` for checkpoints written during training."""
    return _sizes(model, numerics, policy, saves)[0]


@lru_cache(maxsize=1 << 14)
def _sizes(
    model: ModelSpec, numerics: Numerics, policy: Policy, saves: bool, placements: tuple[Placement, ...] | None = None
) -> tuple[int, int]:
    """(bytes of host memory, bytes of the disk). placements: used in place of the policy's, if given."""
    policy = policy if placements is None else replace(policy, placements=placements)
    nbytes = state_nbytes(model, numerics, policy)
    return nbytes["host"] + (save_nbytes(model, numerics, policy) if saves else 0), nbytes["disk"]


def spill(
    model: ModelSpec, numerics: Numerics, policy: Policy, room: int, *, saves: bool = False, disk: bool = True
) -> Policy:
    """The policy with just enough state on the disk that the rest takes at most `room` bytes of host memory; if nothing
    is enough, the one that takes the least.

    Slots and activations are not counted. State that the policy has on the device stays there. Parts are spilled in the
    order of `FIELDS`, once from all units and once from the layers alone: the staging buffers that prologue and
    epilogue need in host memory, for the step and for checkpoints, may be as large as what spilling them frees. Without
    a disk, only weights that are in the model's files are.
    """
    if host_nbytes(model, numerics, policy, saves) <= room:
        return policy
    layers, ends = list(model.streamed), [0, model.epilogue]
    fields = _spillable_fields(model, numerics, policy, disk)
    tried = [
        each
        for among in ((layers, ends), (layers,))
        for each in _spill_in_order(model, numerics, policy, room, saves, [*product(fields, among)])
    ]
    if fitting := [each for each in tried if each.in_host <= room]:
        return replace(policy, placements=min(fitting, key=lambda each: each.on_disk).placements)
    least = min(tried, key=lambda each: each.in_host, default=None)
    if least is None or host_nbytes(model, numerics, policy, saves) <= least.in_host:
        return policy
    return replace(policy, placements=least.placements)


class _Spilled(NamedTuple):
    """Placements, and the bytes of state in host memory and on the disk."""

    placements: tuple[Placement, ...]
    in_host: int
    on_disk: int


def _spill_in_order(
    model: ModelSpec, numerics: Numerics, policy: Policy, room: int, saves: bool, order: Sequence[tuple[str, list[int]]]
) -> Iterator[_Spilled]:
    """The policy's placements after each further (field, units) is spilled, until they fit. The last is spilled only
    from as many units as necessary."""
    bare = replace(policy, placements=())

    def spilled(count: int) -> _Spilled:
        chosen = _spill_some(placements, free, field, count)
        return _Spilled(chosen, *_sizes(model, numerics, bare, saves, chosen))

    placements = policy.placements or (IN_HOST,) * len(model.units)
    for field, units in order:
        free = [unit for unit in units if _may_spill(model, unit, placements[unit], field)]
        every = spilled(len(free))
        if every.in_host <= room:
            low, high = 1, len(free)  # the fewest units with which it fits
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if spilled(middle).in_host <= room else (middle + 1, high)
            yield spilled(low)
            return
        yield every
        placements = every.placements


def place_state(
    model: ModelSpec,
    numerics: Numerics,
    policy: Policy,
    room: int,
    disk_room: int,
    max_sixteenths: int,
    *,
    saves: bool = False,
) -> Policy:
    """The policy with its state in at most `room` bytes of host memory and `disk_room` of disk.

    As little as possible is spilled to the disk, and to the model's files. If that is not enough, the fewest sixteenths
    of the layers are put on the device. If even `max_sixteenths` are not enough, the result has so many on the device,
    and takes the least host memory.
    """

    def placed(layer_parts: int) -> Policy:
        start = replace(policy, placements=resident_placements(model, layer_parts, 0)) if layer_parts else policy
        return spill(model, numerics, start, room, saves=saves, disk=disk_room > 0)

    def fits(placed_policy: Policy) -> bool:
        in_host, on_disk = _sizes(model, numerics, placed_policy, saves)
        return in_host <= room and on_disk <= disk_room

    if fits(usual := placed(0)):
        return usual
    return placed(
        min(max_sixteenths, 1 + bisect_left(range(1, max_sixteenths + 1), True, key=lambda parts: fits(placed(parts))))
    )


def _spill_some(placements: Sequence[Placement], free: Sequence[int], field: str, count: int) -> tuple[Placement, ...]:
    """Placements with one field of `count` of the `free` units spilled."""
    changed = list(placements)
    for unit in spread(free, count):
        changed[unit] = _spilled(changed[unit], field)
    return tuple(changed)


def _may_spill(model: ModelSpec, unit: int, placement: Placement, field: str) -> bool:
    """Whether this field of a unit's placement may be spilled."""
    if field == "files":
        layout = layout_of(model.units[unit])
        return placement.weights == "host" and layout.files_start < layout.size
    return not placement.on_device


def _spillable_fields(model: ModelSpec, numerics: Numerics, policy: Policy, disk: bool) -> tuple[str, ...]:
    """The entries of `FIELDS` that exist under this policy and may be spilled, to the disk only if there is one."""
    absent = set() if model.ranks == 1 else {"files"}
    absent |= set() if disk else {*FIELDS} - {"files"}
    absent |= {"low_bits"} if numerics.precision == "fp32" else set()
    if policy.update == "during_backward":
        absent.add("gradients")
    if model.ranks > 1 and policy.delivery == "shared":
        absent.add("weights")  # other ranks read them in host memory
    return tuple(field for field in FIELDS if field not in absent)


@cache
def _spilled(placement: Placement, field: str) -> Placement:
    """The placement with one field spilled. Weights stay in host memory if the device has a copy of them, since they
    are updated there, and so do the trained ones of a unit whose other weights are in files."""
    if field == "files":
        return replace(placement, weights="file")
    if field == "weights" and placement.weights in ("device", "file"):
        return placement
    tiers: dict[str, StateTier] = {field: "disk"}
    return replace(placement, **tiers)


def spread(units: Sequence[int], count: int) -> list[int]:
    """`count` of the units, evenly spaced."""
    total = len(units)
    return [units[place] for place in range(total) if (place + 1) * count // total > place * count // total]


@lru_cache(maxsize=1024)
def resident_placements(model: ModelSpec, layer_parts: int, weight_parts: int) -> tuple[Placement, ...]:
    """Placements with the whole state of `layer_parts` sixteenths of the layers on the device, and only the weights of
    `weight_parts` sixteenths of the others.

    Prologue and epilogue are on the device if all layers are.
    """
    placements = [IN_HOST] * len(model.units)
    layers = list(model.streamed)
    chosen = spread(layers, -(-layer_parts * len(layers) // PARTS)) if layer_parts else []
    others = [unit for unit in layers if unit not in chosen]
    for unit in chosen:
        placements[unit] = ON_DEVICE
    for unit in spread(others, -(-weight_parts * len(others) // PARTS)) if weight_parts and others else []:
        placements[unit] = WEIGHTS_ON_DEVICE
    if PARTS in (layer_parts, weight_parts):
        placements[0] = placements[model.epilogue] = ON_DEVICE if layer_parts == PARTS else WEIGHTS_ON_DEVICE
    return tuple(placements)
