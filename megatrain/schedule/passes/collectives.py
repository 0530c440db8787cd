"""Adds collectives to a schedule that was built for one rank.

Each rank owns a part of every shard (`spec.layout`), and holds the state of that part only. The builder writes a
FETCH from there to the shard's place in a slot, and a GRAD from a shard of the sum to there. The policy's `delivery`
decides how a shard is assembled, and how sums are added over ranks.

`gather`: the FETCH only fills this rank's part of the slot, and a GATHER after it collects the other ranks' parts.
Before a GRAD, a REDUCE sends each rank its part of this rank's sum, adds what has arrived for this rank's part in
float32, in rank order, and rounds once. For a unit whose state is on the device only these two remain: its part is
gathered from where it is updated, and reduced to where its update reads it.

`shared`: the ranks of one machine map each other's weights. A FETCH reads every rank's part in place, after a BARRIER
if an update of this step has changed the unit. A GRAD copies the sum, still in float32, to memory that the others
map, and a REDUCE adds up this rank's part there, as above.

All collectives are on one stream, in schedule order, so ranks cannot deadlock; `check_world` proves it. All ranks
meet between two schedules (`engine.streamer`), so initial contents are there for all. Sums that wait between rounds
stay on their rank. Bytes are transferred by `dist`, memory is shared by `memory.shared_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatrain.errors import PlanError
from megatrain.schedule.contents import USED, Gradient, OwnGradient, OwnWeights, RankGradient, Weights
from megatrain.schedule.ops import Access, Buffer, Op, Peer, Use, declare
from megatrain.schedule.passes.state_buffers import (
    direction_slots,
    directions_name,
    state_name,
    whole_matrices_name,
    whole_matrices_slots,
)
from megatrain.spec import ModelSpec, Numerics, Part, Policy
from megatrain.spec.layout import layout_of

REDUCED_SLOTS = 2
"""Device buffers for this rank's parts of gradients: one leaves while the next is summed."""

SHARED_SLOTS = 2
"""Host buffers for a rank's sums: one is filled while the other is being reduced."""

LINK_STAGING = "device/link_staging"
"""Buffer for what has come from other ranks, or goes to them, until it is put in its place."""

SUM_NBYTES = 4
"""Bytes per element: ranks exchange float32."""


@dataclass
class Collectives:
    """The collectives of one schedule, for one of several ranks. Adds the buffers that they need to `buffers`."""

    ranks: int
    rank: int
    buffers: dict[str, Buffer]
    shared: bool = False
    _reduced: int = field(default=0, init=False)
    _changed: set[str] = field(default_factory=set, init=False)
    """This rank's weights that were updated since the last barrier."""

    def among(self, ops: Sequence[Op]) -> list[Op]:
        """The ops with collectives inserted; unchanged for one rank."""
        if self.ranks == 1:
            return list(ops)
        complete: list[Op] = []
        for op in ops:
            if op.kind == "FETCH":
                complete += self._fetched_whole(op) if self.shared else self._gathered(op)
            elif op.kind == "GRAD" and op.reads[0].content == Gradient(op.unit):
                complete += self._summed_in_host(op) if self.shared else self._summed(op)
            else:
                self._changed |= {access.buffer for access in op.writes if isinstance(access.content, Weights)}
                complete.append(op)
        return complete

    # Over the link --------------------------------------------------------------------------------------------------

    def _gathered(self, op: Op) -> list[Op]:
        """A shard of weights: this rank's part over the bus, unless on the device, and the rest over the link."""
        (home,), (shard,) = op.reads, op.writes
        assert isinstance(shard.content, Weights)
        if self._on_device(home):
            return [Op("GATHER", "link", op.unit, shard=op.shard, reads=(home,), writes=(shard,))]
        part = self._part(shard, self.rank)._replace(content=OwnWeights(op.unit))
        fetch = op._replace(writes=(part,))
        return [fetch, Op("GATHER", "link", op.unit, shard=op.shard, reads=(part,), writes=(shard,))]

    def _summed(self, op: Op) -> list[Op]:
        """A shard of a gradient: reduce this rank's part, and copy it home unless it is used there."""
        (shard,), (home,) = op.reads, op.writes
        nbytes = home.stop - home.start
        staging = Buffer(LINK_STAGING, "device", shard.stop - shard.start, Use.LINK_STAGING)
        received = Access(declare(self.buffers, staging), 0, staging.nbytes, USED)
        reduce = Op("REDUCE", "link", op.unit, shard=op.shard, reads=(shard,), writes=(home, received))
        if self._on_device(home):
            return [reduce]
        slot = f"device/reduced_gradients/{self._turn(REDUCED_SLOTS)}"
        declare(self.buffers, Buffer(slot, "device", nbytes, Use.REDUCED_GRADIENTS, part=Part.GRADIENTS))
        part = Access(slot, 0, nbytes, OwnGradient(op.unit, op.shard))
        return [reduce._replace(writes=(part, received)), op._replace(reads=(part,))]

    def _on_device(self, place: Access) -> bool:
        """Whether this rank's part is there. A name without memory stands for host memory."""
        known = self.buffers.get(place.buffer)
        return known is not None and known.tier == "device"

    # In the host's memory -------------------------------------------------------------------------------------------

    def _fetched_whole(self, op: Op) -> list[Op]:
        """A shard of weights: each rank's part, read where that rank has it."""
        (home,), (shard,) = op.reads, op.writes
        sources = tuple(home._replace(buffer=self._of(rank, home.buffer)) for rank in range(self.ranks))
        fetch = op._replace(reads=sources, writes=tuple(self._part(shard, rank) for rank in range(self.ranks)))
        return [*self._met(op.unit, home.buffer), fetch]

    def _met(self, unit: int, name: str) -> list[Op]:
        """A barrier, if this rank has updated its part since the last one."""
        if name not in self._changed:
            return []
        self._changed.discard(name)
        updated = Access(name, 0, self.buffers[name].nbytes, Weights(unit))
        others = tuple(updated._replace(buffer=self._of(rank, name)) for rank in range(self.ranks) if rank != self.rank)
        return [Op("BARRIER", "shared", unit, reads=(updated,), writes=others)]

    def _summed_in_host(self, op: Op) -> list[Op]:
        """A shard of a gradient: copy this rank's sum to shared memory, and reduce its part there."""
        (shard,), (home,) = op.reads, op.writes
        nbytes, slot = shard.stop - shard.start, sums_name(self._turn(SHARED_SLOTS))
        declare(self.buffers, Buffer(slot, "host", nbytes, Use.SHARED_GRADIENTS, part=Part.GRADIENTS))
        mine = Access(slot, 0, nbytes, RankGradient(op.unit, op.shard))
        others = (self._of(rank, slot) for rank in range(self.ranks) if rank != self.rank)
        heard = tuple(Access(name, 0, nbytes, USED) for name in others)
        reduce = Op("REDUCE", "shared", op.unit, shard=op.shard, reads=(mine,), writes=(home, *heard))
        return [op._replace(writes=(mine,)), reduce]

    def _of(self, rank: int, name: str) -> str:
        """This rank's name for `rank`'s buffer `name`."""
        return name if rank == self.rank else peer(self.buffers, rank, name)

    def _turn(self, slots: int) -> int:
        self._reduced += 1
        return (self._reduced - 1) % slots

    def _part(self, shard: Access, rank: int) -> Access:
        nbytes = (shard.stop - shard.start) // self.ranks
        return shard._replace(start=shard.start + rank * nbytes, stop=shard.start + (rank + 1) * nbytes)


def peer_name(rank: int, name: str) -> str:
    """The name by which other ranks know buffer `name` of `rank`."""
    return f"peer/{rank}/{name}"


def peer(buffers: dict[str, Buffer], rank: int, name: str) -> str:
    """Add a buffer of another rank, of the size of this rank's. Returns its name here."""
    there = buffers[name]._replace(name=peer_name(rank, name), tier="peer", part=None, peer=Peer(rank, name))
    return declare(buffers, there)


def sums_name(number: int) -> str:
    """Name of a buffer for a rank's sums that others read."""
    return f"host/shared_gradients/{number}"


def shared_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy) -> dict[str, int]:
    """Name -> bytes of a rank's buffers that others map; empty if nothing is shared."""
    if model.ranks == 1 or policy.delivery != "shared":
        return {}
    weight_nbytes, layouts = numerics.weight_nbytes, [layout_of(unit) for unit in model.units]
    sizes = {
        state_name("host", Part.WEIGHTS, unit): layout.own_size * weight_nbytes
        for unit, layout in enumerate(layouts)
        if layout.size
    }
    shards = (
        shard for layout in layouts for shard in layout.trained.shards(max(1, policy.shard_nbytes // weight_nbytes))
    )
    largest = max((SUM_NBYTES * (shard.stop - shard.start) for shard in shards), default=0)
    sizes |= {sums_name(number): largest for number in range(SHARED_SLOTS) if largest}
    count, longest = whole_matrices_slots(model, policy)
    sizes |= {whole_matrices_name("host", number): longest for number in range(count)}
    count, widest = direction_slots(model, numerics, policy)
    return sizes | {directions_name("host", number): widest for number in range(count)}


def refuse_what_ranks_lack(policy: Policy, ranks: int) -> None:
    """Raise `PlanError` for a policy that several ranks cannot use, or not yet."""
    if ranks == 1:
        return
    in_files = any(placement.weights == "file" for placement in policy.placements)
    shared = policy.delivery == "shared"
    away = {"on the device": any(placement.on_device for placement in policy.placements)}
    away["on the disk"] = any(placement.weights == "disk" for placement in policy.placements)
    lacking = {
        "shares_memory": (policy.shares_memory, "weights are assembled in slots", "false"),
        "read_ahead_nbytes": (policy.read_ahead_nbytes > 0, "there is no read-ahead of gathered weights yet", "0"),
        "placements": (in_files, "weights in files cannot be shared by ranks yet", "host, disk or device"),
        "delivery": (
            shared and any(away.values()),
            f"weights {' and '.join(where for where, are in away.items() if are)} are not in memory that ranks share",
            "gather",
        ),
    }
    for name, (lacks, why, fix) in lacking.items():
        if lacks:
            raise PlanError(f"with several ranks {why}", where=f"policy.{name}", fix=f"use {fix}")
