"""Ops, buffers and schedules, as values and as text.

An op is one piece of work on one stream. It declares every byte range that it reads or writes, with the *content* that
it expects or leaves there (`contents`). `deps` derives all waits from the ranges; `check` proves from the contents that
no slot is overwritten while needed. There is no other synchronisation, so the only possible mistake is an undeclared
access, and the simulated device hunts for those.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from megatrain.schedule.contents import Content, Gradient, LowBits, Moments, Weights
from megatrain.spec import Part, Tier

Copy = Literal["READ", "WRITE", "FETCH", "GRAD", "OFFLOAD", "RELOAD"]
Call = Literal["FORWARD", "LOSS", "BACKWARD"]
Collective = Literal["GATHER", "REDUCE", "BARRIER", "ALLTOALL"]
UpdateStep = Literal["UPDATE", "MOMENTUM", "ORTHOGONALIZE", "APPLY"]
Kind = Copy | Call | Collective | UpdateStep | Literal["PLACE", "NORM"]
Stream = Literal["compute", "fetch", "grad", "host", "read", "write", "link", "shared", "products"]
"""`fetch` is the bus to the device and `grad` the bus from it, whatever is copied: each direction does one copy at a
time, in schedule order. `link` connects the devices of several ranks: one stream, so that their collectives are in one
order. `shared` is the same for operations in host memory that they share. `products` makes directions of matrices
orthogonal on the device, beside `compute`."""

STREAMS: tuple[Stream, ...] = get_args(Stream)
COPIES: tuple[Kind, ...] = (*get_args(Copy), "PLACE")
CALLS: tuple[Call, ...] = get_args(Call)
"""Ops that run model code, on the compute stream."""
COLLECTIVES: tuple[Kind, ...] = get_args(Collective)
"""Ops that all ranks do together."""
LINKS: tuple[Stream, ...] = ("link", "shared")
"""Streams of collectives; a schedule of several ranks uses one of them."""


class Use(StrEnum):
    """The purpose of a buffer. Users see the value."""

    WEIGHTS = "weights"
    OPTIMIZER_STATE = "optimizer state"
    GRADIENTS = "gradients"
    PARTIAL_GRADIENTS = "partial gradients"
    RESIDENT_COPY = "resident weights"
    """Device copies of weights whose masters are in host memory."""
    NORMS = "norms"
    DISK_STAGING = "disk staging"
    CHECKPOINT = "checkpoint"
    WEIGHT_SLOTS = "weight slots"
    READ_AHEAD = "read-ahead"
    GRADIENT_SLOTS = "gradient slots"
    GRADIENT_CASTS = "gradient casts"
    REDUCED_GRADIENTS = "reduced gradients"
    """This rank's parts of gradients, between link and bus."""
    LINK_STAGING = "link staging"
    """Parts of a gradient received from other ranks."""
    SHARED_GRADIENTS = "shared gradients"
    """A rank's sums that other ranks of its machine read."""
    UPDATE_SLOTS = "update slots"
    UPDATE_WORKSPACE = "update workspace"
    DIRECTIONS = "directions"
    """In which matrices that are updated whole are moved."""
    LANDED_GRADIENTS = "landed gradients"
    """Gradients that are used as they land."""
    OFFLOAD_SLOTS = "offload slots"
    OFFLOADED_INPUTS = "offloaded inputs"
    OFFLOADED_OUTPUTS = "offloaded outputs"
    OFFLOADED_SIDES = "offloaded side values"
    ARGUMENTS = "arguments of layers"
    INPUTS = "inputs of layers"
    RECOMPUTED_INPUTS = "recomputed inputs"
    INPUT_GRADIENTS = "gradients of inputs"
    GRAPHS = "graphs of layers"
    SAVED_OUTPUTS = "saved outputs"
    ROUTER_LOGITS = "router logits"
    SIDE_VALUES = "side values"
    """What units pass to later layers besides the hidden state."""
    SIDE_GRADIENTS = "gradients of side values"
    FORWARD_WORKSPACE = "forward workspace"
    LOSS_WORKSPACE = "loss workspace"
    BACKWARD_WORKSPACE = "backward workspace"


class Peer(NamedTuple):
    """Memory of another rank on this machine: the rank, and its name of the buffer."""

    rank: int
    name: str


class Buffer(NamedTuple):
    """Memory in one tier, identified by an opaque name."""

    name: str
    tier: Tier | Literal["peer"]
    """A `peer`'s buffer is in host memory, and counted by its owner."""
    nbytes: int
    use: Use
    initial: Content | None = None
    """Its content before the step, if any."""
    arena: bool = True
    """Whether it exists all the time, rather than from the first to the last op that mentions it."""
    part: Part | None = None
    """The part of units' state that is in it or passes through."""
    unit: int | None = None
    """The unit that it belongs to; `None` if units take turns."""
    crosses: bool = True
    """For host memory: whether copies to or from the device use it."""
    frozen_nbytes: int = 0
    """Bytes of frozen weights at its end: no step changes them, so they fit any version of the bytes before."""
    peer: Peer | None = None
    cuts: tuple[int, ...] = ()
    """On the disk: bytes at which writes may begin or end."""

    @property
    def is_state(self) -> bool:
        """Whether it holds masters or moments rather than copies of them."""
        of_one_unit = self.part is not None and self.part is not Part.GRADIENTS and self.unit is not None
        return of_one_unit and self.use is not Use.RESIDENT_COPY


def declare(buffers: dict[str, Buffer], buffer: Buffer) -> str:
    """Add a buffer, or enlarge the one with that name. Returns the name."""
    known = buffers.get(buffer.name)
    if known is None or known.nbytes < buffer.nbytes:
        buffers[buffer.name] = buffer
    return buffer.name


def nbytes_by_use(buffers: Iterable[Buffer]) -> dict[tuple[str, str], int]:
    """(tier, use) -> bytes of the arena buffers, except peers', by tier, largest first."""
    totals: dict[tuple[str, str], int] = defaultdict(int)
    for buffer in buffers:
        if buffer.arena and buffer.peer is None:
            totals[buffer.tier, buffer.use.value] += buffer.nbytes
    return dict(sorted(totals.items(), key=lambda item: (item[0][0], -item[1])))


class Access(NamedTuple):
    """Bytes [start, stop) of a buffer, and the content an op expects there (read) or leaves there (write)."""

    buffer: str
    start: int
    stop: int
    content: Content

    def overlaps(self, other: Access) -> bool:
        return self.buffer == other.buffer and self.start < other.stop and other.start < self.stop

    def between(self, start: int, stop: int) -> Access:
        """Bytes [start, stop) with the same content. Quicker than `_replace`: a schedule has tens of thousands."""
        return Access(self.buffer, start, stop, self.content)

    def holding(self, content: Content) -> Access:
        """The same bytes with another content."""
        return Access(self.buffer, self.start, self.stop, content)


class Op(NamedTuple):
    """One piece of work on one stream. `unit` is always set; `micro` and `shard` if they apply, else -1.

    For compute ops `shard` is the phase, if the call is split into phases (`phases`).
    """

    kind: Kind
    stream: Stream
    unit: int
    micro: int = -1
    shard: int = -1
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    share: float = 1.0
    """A phase's share of the whole call's cost."""

    @property
    def name(self) -> str:
        """Short form: `BACKWARD u3 m0`, `FETCH u3 s1`."""
        micro = f" m{self.micro}" if self.micro >= 0 else ""
        shard = f" s{self.shard}" if self.shard >= 0 else ""
        return f"{self.kind} u{self.unit}{micro}{shard}"

    @property
    def nbytes(self) -> int:
        """The bytes of a copy that cross the bus or reach the disk: those of its first write. 0 for other ops."""
        if self.kind not in COPIES:
            return 0
        _, start, stop, _ = self.writes[0]
        return stop - start if len(self.reads) == 1 else sum([w.stop - w.start for w in self.writes[: len(self.reads)]])

    @property
    def form(self) -> tuple[object, ...]:
        """What must be the same on all ranks for a collective; the location of its bytes may differ."""
        if self.kind == "ALLTOALL":  # of parts that differ
            return self.kind, self.unit, self.shard, str(self.writes[-1].content)
        read, wrote = (sum(access.stop - access.start for access in side) for side in (self.reads, self.writes))
        return self.kind, self.unit, self.shard, read, wrote

    @property
    def is_within_device(self) -> bool:
        """Whether it is a copy that crosses no bus, such as that of a gradient to state on the device."""
        return self.reads[0].buffer.startswith("device/") and self.writes[0].buffer.startswith("device/")


@dataclass(frozen=True)
class Schedule:
    """Ops in an order in which they may run one by one, and for each the ops that it must wait for.

    `waits[i]` lists earlier ops on *other* streams that op i waits for; streams are first in, first out. `units`
    names the units for display and errors.
    """

    ops: tuple[Op, ...]
    buffers: dict[str, Buffer]
    units: tuple[str, ...]
    waits: tuple[tuple[int, ...], ...] = field(default=())

    def arena_nbytes(self, tier: Tier) -> int:
        """Bytes of the tier that are held whether or not ops run."""
        return sum(buffer.nbytes for buffer in self.buffers.values() if buffer.arena and buffer.tier == tier)

    def peak_nbytes(self, tier: Tier) -> int:
        """Arenas plus the largest sum of live transient buffers, in schedule order."""
        change = [0] * (len(self.ops) + 1)
        for name, (first, last) in self.lifetimes.items():
            buffer = self.buffers[name]
            if buffer.tier == tier:
                change[first] += buffer.nbytes
                change[last + 1] -= buffer.nbytes
        return self.arena_nbytes(tier) + max(accumulate(change))

    def resized(self, buffers: Mapping[str, Buffer]) -> Schedule:
        """The same ops with some of its buffers larger or smaller, to be replayed: what ops access stays as it is."""
        other = replace(self, buffers={**self.buffers, **buffers})
        other.__dict__["lifetimes"] = self.lifetimes
        return other

    @property
    def collectives(self) -> list[Op]:
        """Its collectives, in order."""
        return [op for op in self.ops if op.kind in COLLECTIVES]

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits, equal for schedules whose collectives match."""
        forms = "\n".join(str(op.form) for op in self.collectives)
        return hashlib.blake2b(forms.encode(), digest_size=8).hexdigest()

    @cached_property
    def lifetimes(self) -> dict[str, tuple[int, int]]:
        """Transient buffer -> the first and last op that mention it, between which it exists."""
        transient = {name for name, buffer in self.buffers.items() if not buffer.arena}
        first, last = dict[str, int](), dict[str, int]()
        for index, op in enumerate(self.ops):
            for accesses in (op.reads, op.writes):
                for name, _, _, _ in accesses:
                    if name in transient:
                        if name not in first:
                            first[name] = index
                        last[name] = index
        return {name: (begin, last[name]) for name, begin in first.items()}

    @cached_property
    def ended(self) -> list[list[Access]]:
        """For each op, one access of each transient buffer that it mentions and no later op does."""
        ended: list[list[Access]] = [[] for _ in self.ops]
        for name, (_, last) in self.lifetimes.items():
            op = self.ops[last]
            ended[last].append(next(access for access in (*op.reads, *op.writes) if access.buffer == name))
        return ended

    @cached_property
    def streams(self) -> list[Stream]:
        """The streams of its ops, in order of first use."""
        return list(dict.fromkeys(op.stream for op in self.ops))

    @cached_property
    def reduces(self) -> Counter[int]:
        """Unit -> number of its REDUCE ops."""
        return Counter(op.unit for op in self.ops if op.kind == "REDUCE")

    @cached_property
    def takes_home(self) -> dict[tuple[Kind, int, int], Op]:
        """(kind, unit, number of a piece) of a step of an update in pieces -> the op that takes home from its slot what
        that has changed."""
        last: dict[tuple[int, int], Kind] = {}
        homewards: dict[tuple[Kind, int, int], Op] = {}
        for op in self.ops:
            piece = op.unit, op.shard
            if op.shard < 0:
                continue
            if op.kind in ("UPDATE", "MOMENTUM", "APPLY"):
                last[piece] = op.kind
            elif op.kind in ("OFFLOAD", "WRITE") and isinstance(op.reads[0].content, Weights | LowBits | Moments):
                homewards[(last[piece], *piece)] = op
        return homewards

    def extent(self, buffer: str, content: Content) -> tuple[int, int]:
        """Start and stop of all accesses of this content in a buffer; partial sums count as the sum."""
        accesses = [access for op in self.ops for access in (*op.reads, *op.writes) if access.buffer == buffer]
        alike = [access for access in accesses if _summed(access.content) == _summed(content)]
        return min(access.start for access in alike), max(access.stop for access in alike)


def _summed(content: Content) -> Content:
    return Gradient(content.unit, content.version) if isinstance(content, Gradient) else content


def show_access(access: Access) -> str:
    """`device/layer0[0:4096]=w3`"""
    return f"{access.buffer}[{access.start}:{access.stop}]={access.content}"


def show_op(op: Op) -> str:
    """`fetch    FETCH u3 s0         r host/hi/3[0:4096]=w3  w device/layer0[0:4096]=w3`"""
    columns = [f"r {' '.join(map(show_access, op.reads))}"] if op.reads else []
    columns += [f"w {' '.join(map(show_access, op.writes))}"] if op.writes else []
    return f"{op.stream:<8} {op.name:<18} {'  '.join(columns)}"


def show_schedule(
    schedule: Schedule, start: int = 0, stop: int | None = None, marks: Mapping[int, str] | None = None
) -> str:
    """Ops [start, stop) as a table, each with its number and waits; `marks`: op number -> a note below it."""
    lines = []
    stop = len(schedule.ops) if stop is None else min(stop, len(schedule.ops))
    for index in range(max(0, start), stop):
        waits = schedule.waits[index] if schedule.waits else ()
        after = f"  after {','.join(map(str, waits))}" if waits else ""
        lines.append(f"{index:>6}  {show_op(schedule.ops[index])}{after}")
        if marks and index in marks:
            lines.append(f"{'':>6}  ^^^^^^^^ {marks[index]}")
    return "\n".join(lines)
