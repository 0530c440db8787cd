"""Collectives: what several ranks do together, put into a schedule that knows of one.

Each rank owns a part of every shard (`spec.layout`), and holds the state of that part alone. The builder writes a
FETCH from there to the place of the shard in a slot, and a GRAD from a shard of the sum to there. How a shard becomes
whole, and a sum that of all ranks, is the policy's `delivery`.

`gather`: a FETCH is led to the own part of its place, and a GATHER behind it brings in the parts of the other ranks;
and in front of a GRAD, a REDUCE sends to each rank its part of this rank's sum, adds up in float32, in the order of the
ranks, what has come for the own part, and rounds it once. Of a unit whose state is on the device there are these two
alone: the own part is gathered from where it is updated, and summed where its update finds it.

`shared`: the ranks of one machine map each other's weights. A FETCH reads every rank's part where it lies, behind a
BARRIER where an update of this step has changed the unit: then all have updated their part. A GRAD brings the sum,
still in float32, to memory that the others map, and a REDUCE adds up the own part there, as above.

All that the ranks do together is on one stream, in the order of the schedule, so no two ranks wait for each other in
two places; `check_world` proves it of a schedule of each. Between two schedules all ranks meet (`engine.ops`), so what
one begins with is there for all. Sums that wait between rounds stay on their rank. Left out: how bytes get to other
ranks (`dist`), and how memory does (`memory.shared_memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatrain.errors import PlanError
from megatrain.schedule.contents import USED, Gradient, OwnGradient, OwnWeights, RankGradient, Weights
from megatrain.schedule.ops import Access, Buffer, Op, Peer, Use, declare
from megatrain.schedule.passes.state_buffers import state_name
from megatrain.spec import ModelSpec, Numerics, Part, Policy
from megatrain.spec.layout import layout_of

REDUCED_SLOTS = 2
"""Device buffers for own parts of gradients: one leaves while the next is summed."""

SHARED_SLOTS = 2
"""Host buffers for a rank's sums: one is filled while the other is added to what the others have."""

SUM_NBYTES = 4
"""Per element: several ranks send each other float32."""


@dataclass
class Collectives:
    """Those of one schedule, for one rank of several. Enters the buffers that they need into `buffers`."""

    ranks: int
    rank: int
    buffers: dict[str, Buffer]
    shared: bool = False
    _reduced: int = field(default=0, init=False)
    _changed: set[str] = field(default_factory=set, init=False)
    """Own weights that have been updated, and all ranks have not met since."""

    def among(self, ops: Sequence[Op]) -> list[Op]:
        """The ops with collectives among them; with one rank as they are."""
        if self.ranks == 1:
            return list(ops)
        found: list[Op] = []
        for op in ops:
            if op.kind == "FETCH":
                found += self._fetched_whole(op) if self.shared else self._gathered(op)
            elif op.kind == "GRAD" and op.reads[0].content == Gradient(op.unit):
                found += self._summed_in_host(op) if self.shared else self._summed(op)
            else:
                self._changed |= {access.buffer for access in op.writes if isinstance(access.content, Weights)}
                found.append(op)
        return found

    # Over the link --------------------------------------------------------------------------------------------------

    def _gathered(self, op: Op) -> list[Op]:
        """A shard of weights: the own part over the bus, unless it lives on the device, and the whole over the link."""
        (home,), (shard,) = op.reads, op.writes
        assert isinstance(shard.content, Weights)
        if self._on_device(home):
            return [Op("GATHER", "link", op.unit, shard=op.shard, reads=(home,), writes=(shard,))]
        own = self._part(shard, self.rank)._replace(content=OwnWeights(op.unit))
        fetch = op._replace(writes=(own,))
        return [fetch, Op("GATHER", "link", op.unit, shard=op.shard, reads=(own,), writes=(shard,))]

    def _summed(self, op: Op) -> list[Op]:
        """A shard of a gradient: the sum over ranks of the own part, and its way home, unless it is wanted there."""
        (shard,), (home,) = op.reads, op.writes
        nbytes = home.stop - home.start
        staging = Buffer("device/link_staging", "device", shard.stop - shard.start, Use.LINK_STAGING)
        received = Access(declare(self.buffers, staging), 0, staging.nbytes, USED)
        reduce = Op("REDUCE", "link", op.unit, shard=op.shard, reads=(shard,), writes=(home, received))
        if self._on_device(home):
            return [reduce]
        slot = f"device/reduced_gradients/{self._turn(REDUCED_SLOTS)}"
        declare(self.buffers, Buffer(slot, "device", nbytes, Use.REDUCED_GRADIENTS, part=Part.GRADIENTS))
        own = Access(slot, 0, nbytes, OwnGradient(op.unit, op.shard))
        return [reduce._replace(writes=(own, received)), op._replace(reads=(own,))]

    def _on_device(self, place: Access) -> bool:
        """Whether it is there that this rank has its part. A name without memory stands for some of the host's."""
        known = self.buffers.get(place.buffer)
        return known is not None and known.tier == "device"

    # In the host's memory -------------------------------------------------------------------------------------------

    def _fetched_whole(self, op: Op) -> list[Op]:
        """A shard of weights: each rank's part from where that rank has it."""
        (home,), (shard,) = op.reads, op.writes
        sources = tuple(home._replace(buffer=self._of(rank, home.buffer)) for rank in range(self.ranks))
        fetch = op._replace(reads=sources, writes=tuple(self._part(shard, rank) for rank in range(self.ranks)))
        return [*self._met(op.unit, home.buffer), fetch]

    def _met(self, unit: int, name: str) -> list[Op]:
        """All ranks have updated their parts, where this one has."""
        if name not in self._changed:
            return []
        self._changed.discard(name)
        own = Access(name, 0, self.buffers[name].nbytes, Weights(unit))
        others = tuple(own._replace(buffer=self._of(rank, name)) for rank in range(self.ranks) if rank != self.rank)
        return [Op("BARRIER", "shared", unit, reads=(own,), writes=others)]

    def _summed_in_host(self, op: Op) -> list[Op]:
        """A shard of a gradient: this rank's sum to where others find it, and the sum over ranks of the own part."""
        (shard,), (home,) = op.reads, op.writes
        nbytes, slot = shard.stop - shard.start, sums_name(self._turn(SHARED_SLOTS))
        declare(self.buffers, Buffer(slot, "host", nbytes, Use.SHARED_GRADIENTS, part=Part.GRADIENTS))
        mine = Access(slot, 0, nbytes, RankGradient(op.unit, op.shard))
        others = (self._of(rank, slot) for rank in range(self.ranks) if rank != self.rank)
        heard = tuple(Access(name, 0, nbytes, USED) for name in others)
        reduce = Op("REDUCE", "shared", op.unit, shard=op.shard, reads=(mine,), writes=(home, *heard))
        return [op._replace(writes=(mine,)), reduce]

    def _of(self, rank: int, name: str) -> str:
        """What this rank calls a buffer that it has, too, of `rank`."""
        if rank == self.rank:
            return name
        own, there = self.buffers[name], peer_name(rank, name)
        declare(self.buffers, own._replace(name=there, tier="peer", part=None, peer=Peer(rank, name)))
        return there

    def _turn(self, slots: int) -> int:
        self._reduced += 1
        return (self._reduced - 1) % slots

    def _part(self, shard: Access, rank: int) -> Access:
        each = (shard.stop - shard.start) // self.ranks
        return shard._replace(start=shard.start + rank * each, stop=shard.start + (rank + 1) * each)


def peer_name(rank: int, name: str) -> str:
    """What another rank calls the buffer `name` of `rank`."""
    return f"peer/{rank}/{name}"


def sums_name(number: int) -> str:
    """One of the buffers for a rank's sums that others read."""
    return f"host/shared_gradients/{number}"


def shared_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy) -> dict[str, int]:
    """Buffers of a rank that others map, and their bytes: none where nothing is shared."""
    if model.ranks == 1 or policy.delivery != "shared":
        return {}
    each, layouts = numerics.weight_nbytes, [layout_of(unit) for unit in model.units]
    found = {
        state_name("host", Part.WEIGHTS, unit): layout.own_size * each
        for unit, layout in enumerate(layouts)
        if layout.size
    }
    shards = (shard for layout in layouts for shard in layout.trained.shards(max(1, policy.shard_nbytes // each)))
    largest = max((SUM_NBYTES * (shard.stop - shard.start) for shard in shards), default=0)
    return found | {sums_name(number): largest for number in range(SHARED_SLOTS) if largest}


def refuse_what_ranks_lack(policy: Policy, ranks: int) -> None:
    """Raise `PlanError` for a policy by which several ranks cannot train together, or not yet."""
    if ranks == 1:
        return
    in_files = any(placement.weights == "file" for placement in policy.placements)
    shared = policy.delivery == "shared"
    away = {"on the device": any(each.on_device for each in policy.placements)}
    away["on the disk"] = any(each.weights == "disk" for each in policy.placements)
    lacking = {
        "shares_memory": (policy.shares_memory, "weights are put together in slots", "false"),
        "read_ahead_nbytes": (policy.read_ahead_nbytes > 0, "there is no read-ahead of gathered weights yet", "0"),
        "placements": (in_files, "weights in files are not shared by ranks yet", "host, disk or device"),
        "transfer": (
            shared and policy.transfer == "staged",
            "weights are fetched from where each rank has them",
            "pinned or pageable, or delivery gather",
        ),
        "delivery": (
            shared and any(away.values()),
            f"weights {' and '.join(where for where, are in away.items() if are)} are in no memory that ranks share",
            "gather",
        ),
    }
    for name, (lacks, why, fix) in lacking.items():
        if lacks:
            raise PlanError(f"with several ranks {why}", where=f"policy.{name}", fix=f"use {fix}")
