"""Assigns each unit's state to device, host, disk or files: spills only what does not fit, least frequently used first.

Frozen weights that lie in the model's own files are read there before anything goes to the disk: nothing is written
for that. What the step touches least often goes to the disk first: moments, low bits, waiting gradients, then weights,
those of the layers before those of the ends. Layers that are placed otherwise are spread evenly over the depth, so that
the disk and the bus are busy throughout. Spare device memory keeps weights, or whole layers with their optimizer state,
by sixteenths of the layers: a fixed grid, so that more memory only adds to the choices. It does so where that is
quicker, which `search` decides, and where host memory and disk have no more room.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import product

from megatrain.schedule.passes.state_buffers import save_nbytes, state_nbytes
from megatrain.spec import IN_HOST, ModelSpec, Numerics, Placement, Policy, StateTier
from megatrain.spec.layout import layout_of

PARTS = 16
"""Parts of the layers by which the device's spare memory is filled."""

ON_DEVICE = Placement("device", "device", "device")

FIELDS = ("files", "moments", "low_bits", "gradients", "weights")
"""Of a `Placement`, from the coldest, behind weights that stay in their files."""


@dataclass(frozen=True, slots=True)
class Homes:
    """Where state may go that host memory has no room for."""

    disk: bool = True
    files: bool = True


ANYWHERE = Homes()


def state_policy(policy: Policy) -> Policy:
    """The policy without what does not matter for the place of state, so that sizes of one are known of others."""
    return replace(
        policy,
        activations="recompute",
        activations_by_layer=(),
        micro_batches_per_round=0,
        grad_slots=1,
        offload_slots=1,
        host_threads=0,
    )


def state_numerics(numerics: Numerics) -> Numerics:
    """The same of what decides numbers."""
    return replace(numerics, loss_chunk_tokens=1, mlp_chunk_tokens=0)


def host_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy, saves: bool) -> int:
    """Host memory of the state between steps, and with `saves` of what checkpoints beside steps take."""
    return _sizes(model, numerics, policy, saves)[0]


@lru_cache(maxsize=1 << 14)
def _sizes(
    model: ModelSpec,
    numerics: Numerics,
    policy: Policy,
    saves: bool,
    placements: tuple[Placement, ...] | None = None,
) -> tuple[int, int]:
    """Bytes of host memory, and of the disk; with other placements than the policy's, where they are given."""
    policy = policy if placements is None else replace(policy, placements=placements)
    taken = state_nbytes(model, numerics, policy)
    return taken["host"] + (save_nbytes(model, numerics, policy) if saves else 0), taken["disk"]


def to_disk(model: ModelSpec, numerics: Numerics, policy: Policy, room: int, *, saves: bool = False) -> Policy | None:
    """The policy with as little state on the disk as brings that in host memory down to `room` bytes.

    Slots and activations are not counted. What the policy has on the device stays there. `None` where nothing that
    lives on the disk is enough.
    """
    found = needed(model, numerics, policy, room, saves=saves)
    return found if host_nbytes(model, numerics, found, saves) <= room else None


def needed(
    model: ModelSpec, numerics: Numerics, policy: Policy, room: int, *, saves: bool = False, homes: Homes = ANYWHERE
) -> Policy:
    """As `to_disk`; where nothing is enough, what takes least host memory.

    homes: where state may go besides.

    Parts go in order, the coldest first: of the layers and of the ends, or of the layers alone. For what is at the ends
    may take as much where it passes through host memory, for the step and for a save, as it frees.
    """
    if host_nbytes(model, numerics, policy, saves) <= room:
        return policy
    layers, ends = list(model.layers), [0, model.epilogue]
    tried = [
        each
        for among in ((layers, ends), (layers,))
        for each in _along(model, numerics, policy, room, saves, among, homes)
    ]
    fitting = [each for each in tried if host_nbytes(model, numerics, each, saves) <= room]
    if fitting:
        return min(fitting, key=lambda each: _sizes(model, numerics, each, saves)[1])
    return min((policy, *tried), key=lambda each: host_nbytes(model, numerics, each, saves))


def _along(
    model: ModelSpec,
    numerics: Numerics,
    policy: Policy,
    room: int,
    saves: bool,
    among: Sequence[list[int]],
    homes: Homes,
) -> Iterator[Policy]:
    """One part of one of these groups of units after the other goes to the disk, and the last that is enough as far as
    it must."""

    def fits(placements: Sequence[Placement]) -> bool:
        return _sizes(model, numerics, policy, saves, tuple(placements))[0] <= room

    placements = list(policy.placements or (IN_HOST,) * len(model.units))
    for field, units in product(_fields(model, numerics, policy, homes), among):
        free = [unit for unit in units if _may_move(model, unit, placements[unit], field)]
        some = partial(_with_some, placements, free, field)
        if fits(some(len(free))):
            yield replace(policy, placements=tuple(_fewest(some, fits, len(free))))
            return
        placements = some(len(free))
        yield replace(policy, placements=tuple(placements))


def place_state(
    model: ModelSpec,
    numerics: Numerics,
    policy: Policy,
    room: int,
    disk_room: int,
    max_sixteenths: int,
    *,
    saves: bool = False,
    files: bool = True,
) -> Policy:
    """The policy with its state in `room` bytes of host memory and `disk_room` of disk, or where `files` says so in the
    model's files: as little as possible there, and where all are full, the fewest sixteenths of the layers on the
    device. Where `max_sixteenths` of them are not enough, with as many, and what takes least host memory."""

    def placed(whole: int) -> Policy:
        start = replace(policy, placements=residents(model, whole, 0)) if whole else policy
        return needed(model, numerics, start, room, saves=saves, homes=Homes(disk_room > 0, files))

    def fits(found: Policy) -> bool:
        in_host, on_disk = _sizes(model, numerics, found, saves)
        return in_host <= room and on_disk <= disk_room

    if fits(found := placed(0)):
        return found
    return placed(
        min(max_sixteenths, 1 + bisect_left(range(1, max_sixteenths + 1), True, key=lambda whole: fits(placed(whole))))
    )


def with_more_on_disk(
    model: ModelSpec, numerics: Numerics, policy: Policy, steps: int, *, saves: bool = False, homes: Homes = ANYWHERE
) -> list[Policy]:
    """The policy with more of what it has in host memory on the drive: a fixed grid of so many steps up to all of it.

    What that frees may pay for what layers keep. None for a policy that has nothing there: it lacks no memory.
    """
    if not any(placement.uses_drive for placement in policy.placements):
        return []
    policies = replace(policy, placements=()), policy, needed(model, numerics, policy, 0, saves=saves, homes=homes)
    whole, there, least = (host_nbytes(model, numerics, each, saves) for each in policies)
    rooms = [whole - (whole - least) * step // steps for step in range(1, steps + 1)]
    return [needed(model, numerics, policy, room, saves=saves, homes=homes) for room in rooms if room < there]


def all_on_disk(model: ModelSpec, numerics: Numerics, policy: Policy) -> Policy:
    """The policy with all that may leave the host's memory on the disk, or in files."""
    placements = list(policy.placements or (IN_HOST,) * len(model.units))
    for field in _fields(model, numerics, policy, ANYWHERE):
        placements = [
            _moved(placement, field) if _may_move(model, unit, placement, field) else placement
            for unit, placement in enumerate(placements)
        ]
    return replace(policy, placements=tuple(placements))


def _fewest(
    some: Callable[[int], list[Placement]], fits: Callable[[Sequence[Placement]], bool], most: int
) -> list[Placement]:
    """`some` of the smallest number up to `most` that fits, as `most` does."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(some(middle)) else (middle + 1, high)
    return some(low)


def _with_some(placements: Sequence[Placement], free: Sequence[int], field: str, count: int) -> list[Placement]:
    """Placements with that part of `count` of the free units on the disk, or in files."""
    chosen = set(spread(free, count))
    return [_moved(placement, field) if unit in chosen else placement for unit, placement in enumerate(placements)]


def _may_move(model: ModelSpec, unit: int, placement: Placement, field: str) -> bool:
    """Whether a part of a unit may leave host memory for where its field leads."""
    if field == "files":
        layout = layout_of(model.units[unit])
        return placement.weights == "host" and layout.files_start < layout.size
    return not placement.on_device


def _fields(model: ModelSpec, numerics: Numerics, policy: Policy, homes: Homes) -> tuple[str, ...]:
    """Those that the policy has at all."""
    if not homes.disk:
        return ("files",) if homes.files and model.ranks == 1 else ()
    absent = set() if homes.files and model.ranks == 1 else {"files"}
    absent |= {"low_bits"} if numerics.precision == "fp32" else set()
    if policy.update == "during_backward":
        absent.add("gradients")
    if model.ranks > 1 and policy.delivery == "shared":
        absent.add("weights")  # which others read where they lie
    return tuple(field for field in FIELDS if field not in absent)


@cache
def _moved(placement: Placement, field: str) -> Placement:
    """Weights that stay on the device keep their copy in host memory, from which they are updated; what trains beside
    weights in files stays there too."""
    if field == "files":
        return replace(placement, weights="file")
    if field == "weights" and placement.weights in ("device", "file"):
        return placement
    tiers: dict[str, StateTier] = {field: "disk"}
    return replace(placement, **tiers)


def spread(units: Sequence[int], count: int) -> list[int]:
    """`count` of the units, evenly over their length."""
    total = len(units)
    return [units[place] for place in range(total) if (place + 1) * count // total > place * count // total]


def residents(model: ModelSpec, whole: int, kept: int) -> tuple[Placement, ...]:
    """`whole` sixteenths of the layers on the device, and the weights alone of `kept` sixteenths of the others.

    The ends follow the last sixteenth.
    """
    placements = [IN_HOST] * len(model.units)
    layers = list(model.layers)
    chosen = spread(layers, -(-whole * len(layers) // PARTS)) if whole else []
    others = [unit for unit in layers if unit not in chosen]
    for unit in chosen:
        placements[unit] = ON_DEVICE
    for unit in spread(others, -(-kept * len(others) // PARTS)) if kept and others else []:
        placements[unit] = Placement("device")
    if PARTS in (whole, kept):
        placements[0] = placements[-1] = ON_DEVICE if whole == PARTS else Placement("device")
    return tuple(placements)
