"""`Hardware`: a machine's capacities and speeds, with measured rates.

Rates are rows, stored in files, between which the planner interpolates (`plan.cost`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from megatrain.spec.numerics import Precision
from megatrain.spec.validate_fields import Bounds

LinkRoute = Literal["direct", "bus", "host"]
"""How devices of one machine are connected: by direct links, the bus, or the bus and host memory."""

ProductKind = Literal["output", "input gradient", "weight gradient"]
"""What a matrix product of a linear layer computes, of inputs x, weight w and the outputs' gradient g:

* output: x @ w.T, [tokens, inputs] x [inputs, outputs]
* input gradient: g @ w, [tokens, outputs] x [outputs, inputs]
* weight gradient: g.T @ x, [outputs, tokens] x [tokens, inputs]

Each reads its operands in another order, and a library may be slow at one of them."""

PRODUCT_KINDS: tuple[ProductKind, ...] = get_args(ProductKind)

Capacity = Annotated[int, Bounds(1 << 20, 1e18)]
Room = Annotated[int, Bounds(0, 1e18)]
Bandwidth = Annotated[float, Bounds(1e5, 1e15)]
Flops = Annotated[float, Bounds(1e6, 1e18)]
Seconds = Annotated[float, Bounds(1e-9, 1.0)]
Count = Annotated[int, Bounds(1, 1 << 24)]
Depth = Annotated[int, Bounds(1, 4096)]
Block = Annotated[int, Bounds(512, 1 << 30)]
"""What a file may say. Sums and quotients of such values do not overflow."""

SECTOR = 4096
"""Alignment of direct I/O in bytes, in memory and in files, sufficient for every known drive."""

BLOCK_NBYTES = 4 << 20
"""Bytes of a request to the disk, enough for the full speed of every known drive."""


def whole_sectors(nbytes: int) -> int:
    """`nbytes` rounded up to whole sectors."""
    return -(-nbytes // SECTOR) * SECTOR


@dataclass(frozen=True, slots=True)
class ProductRate:
    """Speed of a matrix product [m, k] x [k, n], in FLOPs per second (2 m k n FLOPs in total)."""

    precision: Precision
    m: Count
    k: Count
    n: Count
    flops: Flops
    kind: ProductKind = "output"


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """Speed of causal attention over sequences of `length`, in necessary FLOPs per second.

    Forward takes 2 x length x head size FLOPs for each token and head (half of the full square), backward twice that.
    """

    precision: Precision
    length: Count
    head_size: Count
    forward_flops: Flops
    backward_flops: Flops


@dataclass(frozen=True, slots=True)
class ElementwiseRate:
    """Speed of a layer apart from products and attention: bytes kept by autograd per second, for each direction.

    Seconds are linear from nothing through the measured layers, and beyond the largest.
    """

    precision: Precision
    forward_bandwidth: Bandwidth
    backward_bandwidth: Bandwidth
    nbytes: Annotated[int, Bounds(1, 1e18)] = 1
    """Bytes that autograd kept of the layer that was measured. With one row of a precision, time scales with bytes."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine as the planner and `replay` see it. Rates are per second; capacities are free bytes.

    `None` or empty means unknown; `plan.cost` uses what is known.
    """

    name: str
    device_nbytes: Capacity
    host_nbytes: Capacity
    fetch_bandwidth: Bandwidth
    """Host to device, bytes per second, with no other traffic."""
    grad_bandwidth: Bandwidth
    """Device to host, bytes per second, with no other traffic."""
    flops: Flops
    """FLOPs per second of a large bf16 matrix product; also of fp32 if that is unknown."""
    host_bandwidth: Bandwidth
    """Bytes per second, read plus written, of the optimizer pass in host memory with all threads."""
    host_dram_bandwidth: Bandwidth | None = None
    """Bytes per second, read plus written, of host memory, shared by copies, optimizer and disk."""
    shares_memory: bool = False
    """The device computes in host memory; fetch and grad bandwidths are those of copies within it."""
    slots_in_host: bool = False
    """As above, for several ranks, each of which still has weight slots."""
    divided_memory: bool = False
    """`device_nbytes` and `host_nbytes` are two parts of one memory (DGX Spark), and their sizes a choice."""
    flops_fp32: Flops | None = None
    peak_flops: Flops | None = None
    """The manufacturer's dense bf16 FLOPs per second; `flops` is what is achieved."""
    peak_flops_fp32: Flops | None = None
    products: tuple[ProductRate, ...] = ()
    attention: tuple[AttentionRate, ...] = ()
    device_bandwidth: Bandwidth | None = None
    """Bytes per second, read plus written, of a copy within device memory."""
    elementwise: tuple[ElementwiseRate, ...] = ()
    fresh_bandwidth: Bandwidth | None = None
    """Bytes per second at which the system provides fresh pages of host memory; relevant if the device computes in host
    memory."""
    launch_seconds: Seconds | None = None
    """Seconds of the smallest op in a long sequence."""
    duplex_fetch_bandwidth: Bandwidth | None = None
    """As `fetch_bandwidth`, with gradients leaving at `duplex_grad_bandwidth`."""
    duplex_grad_bandwidth: Bandwidth | None = None
    pageable_fetch_bandwidth: Bandwidth | None = None
    """As `fetch_bandwidth`, from pageable memory."""
    pageable_grad_bandwidth: Bandwidth | None = None
    optimizer_bandwidth: tuple[tuple[Count, Bandwidth], ...] = ()
    """(number of threads, `host_bandwidth` with them), ascending."""
    norm_bandwidth: Bandwidth | None = None
    """Bytes per second of gradients read for their norm, with all threads."""
    host_copy_bandwidth: Bandwidth | None = None
    """Bytes per second that one thread copies in host memory, counted once."""
    disk_nbytes: Room | None = None
    disk_read_bandwidth: Bandwidth | None = None
    disk_write_bandwidth: Bandwidth | None = None
    disk_duplex_read_bandwidth: Bandwidth | None = None
    """As `disk_read_bandwidth`, with concurrent writes at `disk_duplex_write_bandwidth`."""
    disk_duplex_write_bandwidth: Bandwidth | None = None
    disk_block_nbytes: Block | None = None
    """Block size and depth of the two disk bandwidths."""
    disk_depth: Depth | None = None
    disk_endurance_nbytes: Capacity | None = None
    """The drive's endurance: bytes that may be written in its life (TBW)."""
    pinnable_nbytes: Room | None = None
    """Host memory that may be page-locked; 0 if refused."""
    devices: Depth = 1
    """Devices of this kind in the machine. They share host memory, its rates, and the drive."""
    shared_bus_bandwidth: Bandwidth | None = None
    """Bytes per second, each way, of all devices' buses together, if less than their sum."""
    link_bandwidth: Bandwidth | None = None
    """Bytes per second that a device sends within its machine in a collective while receiving as much."""
    link_route: LinkRoute = "direct"
    link_seconds: Seconds | None = None
    """Fixed seconds per collective."""
    node_bandwidth: Bandwidth | None = None
    """Bytes per second that a machine sends to others over all adapters while receiving as much."""
    sharing_ranks: int = 1
    """Number of ranks that divide the machine: figures of shared resources are one rank's part."""
    sources: tuple[tuple[str, str], ...] = ()
    """Field -> source of its figure: a datasheet, a measurement, an assumption."""

    @property
    def capacities(self) -> dict[str, int]:
        """Tier -> bytes of the machine; 0 for a disk that is not there."""
        return {"device": self.device_nbytes, "host": self.host_nbytes, "disk": self.disk_nbytes or 0}

    @property
    def computes_in_host_memory(self) -> bool:
        """Whether nothing crosses a bus, as on a cpu."""
        return self.shares_memory or self.slots_in_host

    def scaled(self, rates: Iterable[str], factor: float) -> Hardware:
        """The same machine with `factor` times the rates in these fields, of which those unknown stay so. A field may
        be a table of rates."""
        return replace(self, **{name: _scaled(getattr(self, name), factor) for name in rates})


def _scaled(rate: Any, factor: float) -> Any:
    if isinstance(rate, tuple):
        return tuple(_scaled_row(row, factor) for row in rate)
    return None if rate is None else factor * rate


def _scaled_row(row: Any, factor: float) -> Any:
    if isinstance(row, tuple):  # (threads, rate)
        return row[0], factor * row[1]
    rates = [name for name in row.__slots__ if name.endswith(("flops", "bandwidth"))]
    return replace(row, **{name: factor * getattr(row, name) for name in rates})
