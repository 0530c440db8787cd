"""Prices collectives: seconds for bytes over the links between devices and machines, or through shared host memory.

`Policy.delivery` says which of the two. All ranks do the same at the same time, so one of them is priced. As in NCCL,
an all-gather is a ring and an all-to-all sends from each rank to each other. Left out: that rings differ in their
places in a machine.
"""

from __future__ import annotations

from math import inf

from megatrain.errors import PlanError
from megatrain.schedule import Op
from megatrain.spec import Hardware

SUM_PASSES = 4
"""Times that what ranks send of a gradient is read or written where it is summed: for the largest magnitude, and as a
term, with the sum before and behind it."""


MEETING_SECONDS = 2e-4
"""In which the ranks of a machine wait for each other, by messages of a byte; assumed."""


def shared_seconds(op: Op, bandwidth: float) -> float:
    """Of a collective in shared host memory, with the bandwidth of a rank's threads there: ranks meet, and a REDUCE
    begins and ends with that."""
    return MEETING_SECONDS if op.kind == "BARRIER" else 2 * MEETING_SECONDS + shared_sum_nbytes(op) / bandwidth


def shared_sum_nbytes(op: Op) -> float:
    """Read and written by a rank that adds up its part of what all ranks have of a shard, as much as one has of all."""
    return float(sum(each.stop - each.start for each in (op.reads[0], op.writes[0])))


def gather_seconds(hardware: Hardware, ranks: int, nbytes: float) -> float:
    """Seconds in which each of the ranks has a whole of so many bytes, of which each brings a part. In a ring, as NCCL
    does it, all but one's own part comes over every link on the way, those between machines among them."""
    received = nbytes * (ranks - 1) / ranks
    return _linked_seconds(hardware, ranks, received, received)


def reduce_seconds(hardware: Hardware, ranks: int, nbytes: float) -> float:
    """Seconds in which each of the ranks sends to every other a part of so many bytes: an all-to-all."""
    here, part = hardware.sharing_ranks, nbytes / ranks
    return _linked_seconds(hardware, ranks, (here - 1) * part, here * (ranks - here) * part)


def _linked_seconds(hardware: Hardware, ranks: int, nbytes: float, outside: float) -> float:
    """Seconds of a collective that takes so many bytes over the link of each device and `outside` between machines."""
    here = hardware.sharing_ranks
    links = ((nbytes, hardware.link_bandwidth, here > 1), (outside, hardware.node_bandwidth, ranks > here))
    used = [(moved, rate) for moved, rate, is_used in links if is_used]
    if not used or not all(rate for _, rate in used):
        what = "has no figure for the link between the devices of several ranks"
        raise PlanError(what, where=f"hardware {hardware.name}", fix="plan for one rank")
    return (hardware.link_seconds or 0.0) + max(moved / rate for moved, rate in used if rate)


def link_shares(hardware: Hardware) -> dict[str, float]:
    """Way of the bus -> share of its own speed that it, and the link, has while both are in use: collectives that go
    over the bus want it beside copies, each as much as it has alone."""
    link = hardware.link_bandwidth
    if hardware.link_route == "direct" or hardware.sharing_ranks == 1 or link is None or link == inf:
        return {}
    ways = {"fetch": hardware.fetch_bandwidth, "grad": hardware.grad_bandwidth}
    return {way: bandwidth / (bandwidth + link) for way, bandwidth in ways.items() if bandwidth < inf}


def through_host_nbytes(hardware: Hardware, ranks: int, op: Op) -> float:
    """Bytes of host memory that a collective writes and reads for each rank, on the way to others of its machine."""
    (whole,) = op.reads if op.kind == "REDUCE" else op.writes
    senders = (hardware.sharing_ranks if op.kind == "REDUCE" else ranks) - 1 if hardware.sharing_ranks > 1 else 0
    return 2.0 * (whole.stop - whole.start) * senders / ranks
