"""Ops and schedules, as values.

An op is one thing on one stream. It declares every byte range that it reads and writes, and for each the *content* it
expects or leaves there (`contents`). From the ranges `deps` derives all waits;
from the contents `check` proves that no slot is overwritten while still needed. There is no other source of
synchronisation, so an undeclared access is the one way to be wrong, and the simulated device hunts for it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from megatrain.schedule.contents import Content, Gradient, Weights
from megatrain.spec import Part, Tier

Copy = Literal["READ", "WRITE", "FETCH", "GRAD", "OFFLOAD", "RELOAD", "PACK", "UNPACK"]
Call = Literal["FORWARD", "LOSS", "BACKWARD"]
Collective = Literal["GATHER", "REDUCE", "BARRIER"]
Kind = Copy | Call | Collective | Literal["PLACE", "NORM", "UPDATE"]
Stream = Literal["compute", "fetch", "grad", "host", "read", "write", "pack", "unpack", "link", "shared"]
"""`fetch` is the bus to the device and `grad` the bus from it, whatever is copied: each direction moves one thing at a
time, in the order of the schedule. `link` is what joins the devices of several ranks: one stream, so that their
collectives come in one order. `shared` is the same for what they do in the memory of the machine that they share."""

STREAMS: tuple[Stream, ...] = get_args(Stream)
COPIES: tuple[Kind, ...] = (*get_args(Copy), "PLACE")
CALLS: tuple[Call, ...] = get_args(Call)
"""What runs code of the model, on the compute stream."""
COLLECTIVES: tuple[Kind, ...] = get_args(Collective)
"""What all ranks do together."""
LINKS: tuple[Stream, ...] = ("link", "shared")
"""Of which a schedule of several ranks has one, for all that they do together."""


class Use(StrEnum):
    """What a buffer is for. The value is what users read."""

    WEIGHTS = "weights"
    OPTIMIZER_STATE = "optimizer state"
    GRADIENTS = "gradients"
    PARTIAL_GRADIENTS = "partial gradients"
    RESIDENT_COPY = "resident weights"
    """Weights on the device whose truth is in host memory."""
    NORMS = "norms"
    DISK_STAGING = "disk staging"
    PINNED_STAGING = "pinned staging"
    CHECKPOINT = "checkpoint"
    WEIGHT_SLOTS = "weight slots"
    READ_AHEAD = "read-ahead"
    GRADIENT_SLOTS = "gradient slots"
    GRADIENT_CASTS = "gradient casts"
    REDUCED_GRADIENTS = "reduced gradients"
    """Own parts of gradients, on their way from the link to the bus."""
    LINK_STAGING = "link staging"
    """What other ranks have sent of a gradient."""
    SHARED_GRADIENTS = "shared gradients"
    """A rank's sums, where the other ranks of its machine find them."""
    UPDATE_SLOTS = "update slots"
    UPDATE_WORKSPACE = "update workspace"
    LANDED_GRADIENTS = "landed gradients"
    """Gradients that are used as they land."""
    OFFLOAD_SLOTS = "offload slots"
    OFFLOADED_INPUTS = "offloaded inputs"
    OFFLOADED_OUTPUTS = "offloaded outputs"
    ARGUMENTS = "arguments of layers"
    INPUTS = "inputs of layers"
    RECOMPUTED_INPUTS = "recomputed inputs"
    INPUT_GRADIENTS = "gradients of inputs"
    GRAPHS = "graphs of layers"
    SAVED_OUTPUTS = "saved outputs"
    ROUTER_LOGITS = "router logits"
    FORWARD_WORKSPACE = "forward workspace"
    LOSS_WORKSPACE = "loss workspace"
    BACKWARD_WORKSPACE = "backward workspace"


class Peer(NamedTuple):
    """Memory of another rank of this machine: whose it is, and what that rank calls it."""

    rank: int
    name: str


class Buffer(NamedTuple):
    """Memory of one tier, under a name that tells buffers apart and that nobody takes apart."""

    name: str
    tier: Tier | Literal["peer"]
    """That of a `peer` is in host memory, and counts there for the rank whose it is."""
    nbytes: int
    use: Use
    initial: Content | None = None
    """What it holds before the step, if anything."""
    arena: bool = True
    """Whether it lives all the time, and not from the first to the last op that mentions it."""
    part: Part | None = None
    """The part of units' state that lies there or passes through."""
    unit: int | None = None
    """The unit whose own it is; `None` where units take turns."""
    crosses: bool = True
    """Of host memory: whether anything is copied from it to the device, or back."""
    frozen_nbytes: int = 0
    """Of frozen weights at its end: no step changes them, so they are valid for any version of the bytes before."""
    peer: Peer | None = None

    @property
    def is_state(self) -> bool:
        """Whether it holds masters or moments, and no copy of them."""
        own = self.part is not None and self.part is not Part.GRADIENTS and self.unit is not None
        return own and self.use is not Use.RESIDENT_COPY


def declare(buffers: dict[str, Buffer], buffer: Buffer) -> str:
    """Enter a buffer, or make the one of that name as large. Returns the name."""
    known = buffers.get(buffer.name)
    if known is None or known.nbytes < buffer.nbytes:
        buffers[buffer.name] = buffer
    return buffer.name


def nbytes_by_use(buffers: Iterable[Buffer]) -> dict[tuple[str, str], int]:
    """(tier, use) -> bytes of the arena buffers, but for those of peers, by tier, largest first."""
    totals: dict[tuple[str, str], int] = defaultdict(int)
    for buffer in buffers:
        if buffer.arena and buffer.peer is None:
            totals[buffer.tier, buffer.use.value] += buffer.nbytes
    return dict(sorted(totals.items(), key=lambda item: (item[0][0], -item[1])))


class Access(NamedTuple):
    """Bytes [start, stop) of a buffer, and the content an op expects there (a read) or leaves there (a write)."""

    buffer: str
    start: int
    stop: int
    content: Content

    def overlaps(self, other: Access) -> bool:
        return self.buffer == other.buffer and self.start < other.stop and other.start < self.stop


class Op(NamedTuple):
    """One thing on one stream. `unit` is always given; `micro` and `shard` where they apply, else -1.

    The `shard` of a compute op is its phase, where a call is cut into phases (`phases`).
    """

    kind: Kind
    stream: Stream
    unit: int
    micro: int = -1
    shard: int = -1
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    share: float = 1.0
    """Of what the whole call costs, where this is a phase of one."""

    @property
    def name(self) -> str:
        """Short text form: `BACKWARD u3 m0`, `FETCH u3 s1`."""
        micro = f" m{self.micro}" if self.micro >= 0 else ""
        shard = f" s{self.shard}" if self.shard >= 0 else ""
        return f"{self.kind} u{self.unit}{micro}{shard}"

    @property
    def nbytes(self) -> int:
        """Of a copy, what crosses the bus or reaches the disk, which is what it writes first; 0 of any other op."""
        copied = self.writes[: len(self.reads)] if self.kind in COPIES else ()
        return sum([access.stop - access.start for access in copied])

    @property
    def form(self) -> tuple[object, ...]:
        """What of a collective is the same on all ranks: where its bytes lie may differ."""
        read, wrote = (sum(access.stop - access.start for access in side) for side in (self.reads, self.writes))
        return self.kind, self.unit, self.shard, read, wrote


@dataclass(frozen=True)
class Schedule:
    """Ops in an order in which running them one by one is right, and for each the ops it must wait for.

    `waits[i]` lists earlier ops on *other* streams that op i waits for; within a stream, order is first in first out.
    `units` names the units, for display and for errors.
    """

    ops: tuple[Op, ...]
    buffers: dict[str, Buffer]
    units: tuple[str, ...]
    waits: tuple[tuple[int, ...], ...] = field(default=())

    def arena_nbytes(self, tier: Tier) -> int:
        """Bytes of the tier that are held whether or not an op is running."""
        return sum(buffer.nbytes for buffer in self.buffers.values() if buffer.arena and buffer.tier == tier)

    def peak_nbytes(self, tier: Tier) -> int:
        """Largest sum of arenas and of those transient buffers that are alive, in schedule order."""
        change = [0] * (len(self.ops) + 1)
        for name, (first, last) in self.lifetimes.items():
            buffer = self.buffers[name]
            if buffer.tier == tier:
                change[first] += buffer.nbytes
                change[last + 1] -= buffer.nbytes
        return self.arena_nbytes(tier) + max(accumulate(change))

    @property
    def collectives(self) -> list[Op]:
        """What its rank does together with others, in order."""
        return [op for op in self.ops if op.kind in COLLECTIVES]

    @cached_property
    def digest(self) -> str:
        """The same of two schedules whose collectives agree: 16 hexadecimal digits."""
        forms = "\n".join(str(op.form) for op in self.collectives)
        return hashlib.blake2b(forms.encode(), digest_size=8).hexdigest()

    @cached_property
    def lifetimes(self) -> dict[str, tuple[int, int]]:
        """Transient buffer -> the first and the last op that mentions it; it exists from the one to the other."""
        transient = {name for name, buffer in self.buffers.items() if not buffer.arena}
        first, last = dict[str, int](), dict[str, int]()
        for index, op in enumerate(self.ops):
            for accesses in (op.reads, op.writes):
                for name, _, _, _ in accesses:
                    if name in transient:
                        first.setdefault(name, index)
                        last[name] = index
        return {name: (begin, last[name]) for name, begin in first.items()}

    @cached_property
    def ended(self) -> dict[int, list[Access]]:
        """`id` of an op -> its accesses of transient buffers that no later op mentions, one for each."""
        found: dict[int, list[Access]] = defaultdict(list)
        for name, (_, last) in self.lifetimes.items():
            op = self.ops[last]
            found[id(op)].append(next(access for access in (*op.reads, *op.writes) if access.buffer == name))
        return found

    @cached_property
    def takes_home(self) -> dict[tuple[int, int], Op]:
        """Unit that is updated on the device, piece by piece, and number of a piece -> the copy home of what its update
        has left."""
        leaving = (op for op in self.ops if op.kind == "OFFLOAD" and isinstance(op.reads[0].content, Weights))
        return {(op.unit, op.shard): op for op in leaving}

    def extent(self, buffer: str, content: Content) -> tuple[int, int]:
        """Where accesses of this content begin and end in a buffer; partial sums count as the sum."""
        accesses = [access for op in self.ops for access in (*op.reads, *op.writes) if access.buffer == buffer]
        there = [each for each in accesses if _summed(each.content) == _summed(content)]
        return min(each.start for each in there), max(each.stop for each in there)


def _summed(content: Content) -> Content:
    return Gradient(content.unit, content.version) if isinstance(content, Gradient) else content
