"""Prices collectives: seconds for bytes over the links between devices and machines, or through shared host memory.

`Policy.delivery` says which of the two. All ranks do the same at the same time, so prices are for one of them. As in
NCCL, an all-gather is a ring, and an all-to-all sends from each rank to each other rank. That different rings may use
different links of a machine is not modelled.
"""

from __future__ import annotations

from math import inf

from megatrain.errors import PlanError
from megatrain.schedule import Op
from megatrain.schedule.passes.pieces import groups_of
from megatrain.schedule.passes.state_buffers import largest_share
from megatrain.spec import Hardware, ModelSpec
from megatrain.spec.layout import layout_of

SUM_PASSES = 4
"""Times that received gradients are read or written where they are summed: once to find the largest magnitude, and
three times to add them (term, and sum before and after)."""


BARRIER_SECONDS = 2e-4
"""Duration of a barrier of the ranks of a machine, by messages of one byte; assumed."""


def collective_nbytes(op: Op, model: ModelSpec) -> int:
    """Bytes of what is gathered or summed, or those of the most matrices that a rank sends to the others or gets."""
    if op.kind == "ALLTOALL":
        return largest_share(groups_of(layout_of(model.units[op.unit]).trained, model)[op.shard], model)
    (whole,) = op.reads if op.kind == "REDUCE" else op.writes
    return whole.stop - whole.start


def shared_seconds(op: Op, model: ModelSpec, bandwidth: float) -> float:
    """Seconds of a collective in shared host memory; all but a BARRIER have a barrier before and after.

    bandwidth: bytes per second of one rank's threads in host memory.
    """
    barriers = 1 if op.kind == "BARRIER" else 2
    return barriers * BARRIER_SECONDS + touched_in_host_nbytes(op, model) / bandwidth


def touched_in_host_nbytes(op: Op, model: ModelSpec) -> float:
    """Bytes that one rank reads and writes in shared host memory to sum its part of a shard over all ranks, or to copy
    matrices from them."""
    if op.kind == "BARRIER":
        return 0.0
    if op.kind == "ALLTOALL":
        return 2.0 * collective_nbytes(op, model)
    return float(sum(each.stop - each.start for each in (op.reads[0], op.writes[0])))


def gather_seconds(hardware: Hardware, ranks: int, nbytes: float) -> float:
    """Seconds of an all-gather after which each rank has `nbytes`.

    In a ring, everything but a rank's own part crosses each link, and so each link between machines.
    """
    received = nbytes * (ranks - 1) / ranks
    return _linked_seconds(hardware, ranks, received, received)


def reduce_seconds(hardware: Hardware, ranks: int, nbytes: float) -> float:
    """Seconds of an all-to-all of `nbytes` per rank, of which each rank sends an equal part to each other."""
    here, part = hardware.sharing_ranks, nbytes / ranks
    return _linked_seconds(hardware, ranks, (here - 1) * part, here * (ranks - here) * part)


def _linked_seconds(hardware: Hardware, ranks: int, nbytes: float, outside: float) -> float:
    """Seconds of a collective that moves `nbytes` over the link of each device and `outside` bytes between machines."""
    here = hardware.sharing_ranks
    links = ((nbytes, hardware.link_bandwidth, here > 1), (outside, hardware.node_bandwidth, ranks > here))
    used = [(moved, rate) for moved, rate, is_used in links if is_used]
    if not used or not all(rate for _, rate in used):
        what = "the bandwidth between devices of several ranks is unknown"
        raise PlanError(what, where=f"hardware {hardware.name}", fix="plan for one rank")
    return (hardware.link_seconds or 0.0) + max(moved / rate for moved, rate in used if rate)


def link_shares(hardware: Hardware) -> dict[str, float]:
    """Direction of the bus -> fraction of its speed that it and the link have while both are in use.

    Collectives that go over the bus compete with copies; each gets a share in proportion to its speed alone.
    """
    link = hardware.link_bandwidth
    if hardware.link_route == "direct" or hardware.sharing_ranks == 1 or link is None or link == inf:
        return {}
    directions = {"fetch": hardware.fetch_bandwidth, "grad": hardware.grad_bandwidth}
    return {name: bandwidth / (bandwidth + link) for name, bandwidth in directions.items() if bandwidth < inf}


def through_host_nbytes(hardware: Hardware, model: ModelSpec, op: Op) -> float:
    """Bytes that a collective reads and writes in host memory for each rank, if its link goes through it."""
    here, ranks = hardware.sharing_ranks, model.ranks
    senders = (ranks if op.kind == "GATHER" else here) - 1 if here > 1 else 0
    return 2.0 * collective_nbytes(op, model) * senders / ranks
