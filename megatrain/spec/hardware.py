"""`Hardware`: what a machine holds and how fast it moves and computes, with the rates that were measured on it.

Rates are rows that files hold and the planner interpolates between (`plan.cost`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatrain.spec.numerics import Precision

LinkRoute = Literal["direct", "bus", "host"]
"""What devices of one machine reach each other over: links of their own, the bus, or the bus and host memory."""

SECTOR = 4096
"""Bytes. Direct transfers begin and end at multiples of it, in memory and in files, on every drive known to us."""


def whole_sectors(nbytes: int) -> int:
    """The bytes of the sectors that so many bytes take."""
    return -(-nbytes // SECTOR) * SECTOR


@dataclass(frozen=True, slots=True)
class ProductRate:
    """How fast a product [m, k] x [k, n] runs: its 2 m k n floating-point operations per second."""

    precision: Precision
    m: int
    k: int
    n: int
    flops: float


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """How fast causal attention over sequences of `length` runs, in the operations that it needs, per second.

    Forward 2 x length x head size for each token and head (half of the full square), backward twice that.
    """

    precision: Precision
    length: int
    head_size: int
    forward_flops: float
    backward_flops: float


@dataclass(frozen=True, slots=True)
class ElementwiseRate:
    """How fast a layer goes besides products and attention: bytes that autograd keeps of it, per second of each way."""

    precision: Precision
    forward_bandwidth: float
    backward_bandwidth: float


@dataclass(frozen=True, slots=True)
class DiskRate:
    """Bytes per second of reads and writes of `block_nbytes` each, `depth` of them under way at any time."""

    block_nbytes: int
    depth: int
    read_bandwidth: float
    write_bandwidth: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine as the planner and `replay` see it. Rates are per second; capacities are in bytes, and free.

    What is `None` or empty is not known, and `plan.cost` answers from what is.
    """

    name: str
    device_nbytes: int
    host_nbytes: int
    fetch_bandwidth: float
    """Host to device, bytes per second, with nothing else on the way."""
    grad_bandwidth: float
    """Device to host, bytes per second, with nothing else on the way."""
    flops: float
    """Floating-point operations per second of a large matrix product in bf16; in fp32 too, if no other is known."""
    host_bandwidth: float
    """Bytes per second, read plus written, of the optimizer pass in host memory, on all threads."""
    host_dram_bandwidth: float | None = None
    """Bytes per second, read plus written, of host memory, which copies, the optimizer and the disk share."""
    shares_memory: bool = False
    """The device computes in host memory; the fetch and grad bandwidths are then those of a copy within it."""
    slots_in_host: bool = False
    """So it does for several ranks, each with weight slots there all the same."""
    flops_fp32: float | None = None
    peak_flops: float | None = None
    """What the maker states for bf16, dense; `flops` is what is achieved of it."""
    peak_flops_fp32: float | None = None
    products: tuple[ProductRate, ...] = ()
    attention: tuple[AttentionRate, ...] = ()
    device_bandwidth: float | None = None
    """Bytes per second, read plus written, of a copy within device memory."""
    elementwise: tuple[ElementwiseRate, ...] = ()
    elementwise_bandwidth: float | None = None
    """The same of the forward alone, in whatever precision, where `elementwise` has no row."""
    fresh_bandwidth: float | None = None
    """Bytes per second of host memory that is touched for the first time since it was allocated: what the system takes
    to hand out its pages. It counts where the device computes in host memory."""
    launch_seconds: float | None = None
    """What the smallest op costs when many follow each other."""
    duplex_fetch_bandwidth: float | None = None
    """As `fetch_bandwidth`, while gradients leave at `duplex_grad_bandwidth`."""
    duplex_grad_bandwidth: float | None = None
    pageable_fetch_bandwidth: float | None = None
    """As `fetch_bandwidth`, from memory that is not page-locked."""
    pageable_grad_bandwidth: float | None = None
    optimizer_bandwidth: tuple[tuple[int, float], ...] = ()
    """Pairs of a thread count, ascending, and `host_bandwidth` with so many."""
    norm_bandwidth: float | None = None
    """Bytes per second of gradients, read for their norm on all threads."""
    host_copy_bandwidth: float | None = None
    """Bytes per second that one thread copies within host memory, each counted once."""
    disk_nbytes: int | None = None
    disk_read_bandwidth: float | None = None
    disk_write_bandwidth: float | None = None
    disk_duplex_read_bandwidth: float | None = None
    """As `disk_read_bandwidth`, while `disk_duplex_write_bandwidth` is written."""
    disk_duplex_write_bandwidth: float | None = None
    disk_block_nbytes: int | None = None
    """The block and the depth that the two disk bandwidths are for."""
    disk_depth: int | None = None
    disk_rates: tuple[DiskRate, ...] = ()
    disk_endurance_nbytes: int | None = None
    """Bytes that may be written to the drive in its life (its TBW)."""
    pinnable_nbytes: int | None = None
    """Host memory that may be page-locked; 0 where that is refused."""
    devices: int = 1
    """Devices of this kind in the machine. Host memory, its rates and the drive are what they share."""
    shared_bus_bandwidth: float | None = None
    """Bytes per second, each way, of the buses of all devices together, where that is less than the sum of theirs."""
    link_bandwidth: float | None = None
    """Bytes per second that a device sends to the others of its machine in a collective, while it receives as much."""
    link_route: LinkRoute = "direct"
    link_seconds: float | None = None
    """What a collective takes beyond its bytes."""
    node_bandwidth: float | None = None
    """Bytes per second that a machine sends to others over all its adapters, while it receives as much."""
    sharing_ranks: int = 1
    """Ranks among which the machine is divided: of what devices share, the figures are one rank's part."""
    sources: tuple[tuple[str, str], ...] = ()
    """Field -> where its figure is from: a datasheet, a measurement, an assumption."""
