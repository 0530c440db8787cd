"""Measure the bandwidth between ranks by a few timed all-to-alls, if the hardware description has no figure for it.

Gradients are summed by all-to-alls, which are most of a step's traffic. All-gathers are not timed. Collectives are
assumed to use the bus unless they are faster than it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megatrain.dist import World
from megatrain.spec import Hardware

if TYPE_CHECKING:
    from megatrain.device import Device

NBYTES: Mapping[str, int] = {"cuda": 256 << 20, "cpu": 16 << 20}
"""Device type -> bytes that each rank sends, including to itself: about a float32 shard, and less where CPUs copy."""

FEW_NBYTES = 4096
"""Small size, for the fixed cost of a collective, in bytes per part."""

TIMES = 3


def with_links(hardware: Hardware, world: World, device: Device, here: int) -> Hardware:
    """`hardware` with measured link bandwidths. Collective; `here` ranks are on each machine."""
    size = world.size
    part = NBYTES.get(device.torch_device.type, NBYTES["cpu"]) // size
    few, many = (_seconds(world, device, nbytes) for nbytes in (FEW_NBYTES, part))
    carrying = max(many - few, 0.01 * many)
    found: dict[str, Any] = {"link_bandwidth": max(1, here - 1) * part / carrying, "link_seconds": few}
    found["node_bandwidth"] = here * (size - here) * part / carrying if size > here else None
    told = "measured: an all-to-all among the ranks of this run"
    own = max(1, here - 1) * part / carrying > hardware.fetch_bandwidth
    route = "links of its own, which are quicker than the bus" if own else "the bus, which is quicker than the link"
    sources = dict(hardware.sources) | dict.fromkeys(found, told) | {"link_route": f"assumed: {route}"}
    return replace(hardware, **found, link_route="direct" if own else "bus", sources=tuple(sources.items()))


def _seconds(world: World, device: Device, nbytes: int) -> float:
    """Seconds of an all-to-all of `nbytes` from each rank to each: the best of several, on the slowest rank."""
    assert world.device is not None
    sent, received = (torch.zeros(world.size * nbytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2))
    taken = []
    for _ in range(1 + TIMES):  # the first opens connections
        world.exchange("timing the link", nbytes)
        device.synchronize()
        begin = time.perf_counter()
        world.device.all_to_all(received, sent)
        device.synchronize()
        taken.append(time.perf_counter() - begin)
    return max(world.exchange("the link's seconds", min(taken[1:])))
