"""Measures the bandwidth between ranks by a few timed all-to-alls, where the hardware has no figure for it.

It is what gradients are summed by, and most of what collectives of a step move. Left out: how quick an all-gather is
besides, and what collectives go over, which is assumed to be the bus unless they are quicker.
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
"""Type of device -> bytes that each rank sends, its own part included: about a shard in float32, and less where
processors copy them."""

FEW_NBYTES = 4096
"""Of each part, for what a collective takes beyond its bytes."""

TIMES = 3


def with_links(hardware: Hardware, world: World, device: Device, here: int) -> Hardware:
    """The machine with the rates that are measured now. All ranks call it; `here` of them are on each machine."""
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
    """Of one in which each rank sends so many bytes to each, at the best of some; as the slowest rank sees it."""
    assert world.device is not None
    sent, received = (torch.zeros(world.size * nbytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2))
    taken = []
    for _ in range(1 + TIMES):  # the first makes connections
        world.exchange("timing the link", nbytes)
        device.synchronize()
        begin = time.perf_counter()
        world.device.all_to_all(received, sent)
        device.synchronize()
        taken.append(time.perf_counter() - begin)
    return max(world.exchange("the link's seconds", min(taken[1:])))
