"""Which units' state lives where: as little on the disk as memory asks for, the coldest first.

What the step touches least often goes to the disk first: moments, then low bits, then weights, those of the layers
before those of the ends. Layers with a home of their own are spread evenly over the depth, so that the disk and the
bus are busy throughout. Spare device memory keeps weights, or whole layers with their optimizer state, by eighths of
the layers: a fixed grid, so that more memory only ever adds to the choices. Left out: how good a choice is (`search`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from megatrain.schedule.build import Builder
from megatrain.spec import IN_HOST, Home, ModelSpec, Policy, Work

EIGHTHS = 8
"""Parts of the layers by which the device's spare memory is filled."""

ON_DEVICE = Home("device", "device", "device")

FIELDS = ("moments", "low_bits", "weights")
"""Of a `Home`, from the coldest."""


def state_nbytes(model: ModelSpec, policy: Policy) -> dict[str, int]:
    """Tier -> bytes of all units' state between steps, with the buffers that it passes through on its way from disk."""
    return dict(_state_nbytes(model, _state_policy(policy)))


def _state_policy(policy: Policy) -> Policy:
    """The policy without what does not matter for the place of state."""
    return replace(policy, loss_chunk_tokens=1, shard_nbytes=1 << 40, activations="recompute", host_threads=0)


@lru_cache(maxsize=4096)
def _state_nbytes(model: ModelSpec, policy: Policy) -> tuple[tuple[str, int], ...]:
    totals = {"device": 0, "host": 0, "disk": 0}
    for buffer in Builder(model, policy, Work((1,)), "none", trains=True).buffers.values():
        totals[buffer.tier] += buffer.nbytes
    return tuple(totals.items())


def to_disk(model: ModelSpec, policy: Policy, host_nbytes: int) -> Policy | None:
    """The policy with as little state on the disk as brings that in host memory down to `host_nbytes`.

    Slots and activations are not counted. What the policy has on the device stays there. `None` where nothing that
    lives on the disk is enough.
    """
    for homes in _colder(model, policy):
        if state_nbytes(model, replace(policy, homes=homes))["host"] <= host_nbytes:
            return replace(policy, homes=homes)
    return None


def _colder(model: ModelSpec, policy: Policy) -> Iterator[tuple[Home, ...]]:
    """Homes from all in host memory to all on the disk, one layer's part after the other."""
    start = list(policy.homes or (IN_HOST,) * len(model.units))
    yield tuple(start)
    ends = [0, model.epilogue]
    for field in FIELDS:
        if field == "low_bits" and policy.precision == "fp32":
            continue
        for among in (list(model.layers), ends):
            free = [unit for unit in among if not start[unit].on_device]
            for count in range(1, len(free) + 1):
                homes = list(start)
                for unit in spread(free, count):
                    homes[unit] = _on_disk(homes[unit], field)
                yield tuple(homes)
            for unit in free:
                start[unit] = _on_disk(start[unit], field)


def _on_disk(home: Home, field: str) -> Home:
    """Weights that stay on the device keep their copy in host memory, from which they are updated."""
    if field == "weights" and home.weights == "device":
        return home
    return Home(*("disk" if name == field else getattr(home, name) for name in ("weights", "low_bits", "moments")))


def spread(units: Sequence[int], count: int) -> list[int]:
    """`count` of the units, evenly over their length."""
    total = len(units)
    return [units[place] for place in range(total) if (place + 1) * count // total > place * count // total]


def residents(model: ModelSpec, whole: int, kept: int) -> tuple[Home, ...]:
    """Homes with `whole` eighths of the layers on the device, and the weights of `kept` eighths of the others.

    The ends follow the last eighth.
    """
    homes = [IN_HOST] * len(model.units)
    layers = list(model.layers)
    chosen = spread(layers, -(-whole * len(layers) // EIGHTHS)) if whole else []
    others = [unit for unit in layers if unit not in chosen]
    for unit in chosen:
        homes[unit] = ON_DEVICE
    for unit in spread(others, -(-kept * len(others) // EIGHTHS)) if kept and others else []:
        homes[unit] = Home("device")
    if EIGHTHS in (whole, kept):
        homes[0] = homes[-1] = ON_DEVICE if whole == EIGHTHS else Home("device")
    return tuple(homes)


def grid() -> Iterator[tuple[int, int]]:
    """Pairs of eighths, of whole layers and of kept weights, that are worth a look."""
    return ((whole, kept) for whole, kept in product(range(EIGHTHS + 1), repeat=2) if whole or kept)


def thinned(homes: Sequence[Home], model: ModelSpec, shallow: ModelSpec) -> tuple[Home, ...]:
    """Homes for a version of the model with fewer layers, in about the same shares: each as likely among as many."""
    if not homes:
        return ()
    layers = sorted((homes[unit] for unit in model.layers), key=_order)
    count = len(shallow.layers)
    picked = [layers[min(len(layers) - 1, (2 * place + 1) * len(layers) // (2 * count))] for place in range(count)]
    placed: list[Home] = [IN_HOST] * count
    free = list(range(count))
    for home in dict.fromkeys(picked):
        for place in spread(free, picked.count(home)):
            placed[place] = home
        free = [place for place in free if placed[place] is IN_HOST]
    return (homes[0], *placed, homes[-1])


def _order(home: Home) -> tuple[str, ...]:
    return home.weights, home.low_bits, home.moments
