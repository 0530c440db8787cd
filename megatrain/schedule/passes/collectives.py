"""Collectives: what several ranks do together, put into a schedule that knows of one.

Each rank owns a part of every shard (`spec.layout`), and holds the state of that part alone. The builder writes a
FETCH from there to the place of the shard in a slot, and a GRAD from a shard of the sum to there. Here such a FETCH is
led to the own part of that place, and a GATHER behind it brings in the parts of the other ranks; and in front of such a
GRAD, a REDUCE sends to each rank its part of this rank's sum, adds up in float32, in the order of the ranks, what has
come for the own part, and rounds it once. All that the ranks do together is on one stream, in the order of the
schedule, so no two ranks wait for each other in two places; `check_world` proves it of a schedule of each.

Sums that wait between rounds stay on their rank. Left out: how bytes get to other ranks (`dist`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatrain.errors import PlanError
from megatrain.schedule.contents import USED, Gradient, OwnGradient, OwnWeights, Weights
from megatrain.schedule.ops import Access, Buffer, Op, Use, declare
from megatrain.spec import Part, Policy

REDUCED_SLOTS = 2
"""Device buffers for own parts of gradients: one leaves while the next is summed."""


@dataclass
class Collectives:
    """Those of one schedule, for one rank of several. Enters the buffers that they need into `buffers`."""

    ranks: int
    rank: int
    buffers: dict[str, Buffer]
    _reduced: int = field(default=0, init=False)

    def among(self, ops: Sequence[Op]) -> list[Op]:
        """The ops with collectives among them; with one rank as they are."""
        if self.ranks == 1:
            return list(ops)
        found: list[Op] = []
        for op in ops:
            if op.kind == "FETCH":
                found += self._gathered(op)
            elif op.kind == "GRAD" and op.reads[0].content == Gradient(op.unit):
                found += self._summed(op)
            else:
                found.append(op)
        return found

    def _gathered(self, op: Op) -> list[Op]:
        """A shard of weights: the own part over the bus, and the whole over the link."""
        (shard,) = op.writes
        assert isinstance(shard.content, Weights)
        own = self._own(shard)._replace(content=OwnWeights(op.unit))
        fetch = op._replace(writes=(own,))
        return [fetch, Op("GATHER", "link", op.unit, shard=op.shard, reads=(own,), writes=(shard,))]

    def _summed(self, op: Op) -> list[Op]:
        """A shard of a gradient: the sum over ranks of the own part, and its way home."""
        (shard,), (home,) = op.reads, op.writes
        nbytes = home.stop - home.start
        slot = f"device/reduced_gradients/{self._reduced % REDUCED_SLOTS}"
        self._reduced += 1
        declare(self.buffers, Buffer(slot, "device", nbytes, Use.REDUCED_GRADIENTS, part=Part.GRADIENTS))
        staging = Buffer("device/link_staging", "device", shard.stop - shard.start, Use.LINK_STAGING)
        received = Access(declare(self.buffers, staging), 0, staging.nbytes, USED)
        own = Access(slot, 0, nbytes, OwnGradient(op.unit, op.shard))
        reduce = Op("REDUCE", "link", op.unit, shard=op.shard, reads=(shard,), writes=(own, received))
        return [reduce, op._replace(reads=(own,))]

    def _own(self, shard: Access) -> Access:
        each = (shard.stop - shard.start) // self.ranks
        return shard._replace(start=shard.start + self.rank * each, stop=shard.start + (self.rank + 1) * each)


def refuse_what_ranks_lack(policy: Policy, ranks: int) -> None:
    """Raise `PlanError` for a policy by which several ranks cannot train together, or not yet."""
    if ranks == 1:
        return
    placed = any(placement.weights == "device" for placement in policy.placements)
    lacking = {
        "shares_memory": (policy.shares_memory, "weights that are gathered pass through slots", "false"),
        "read_ahead_nbytes": (policy.read_ahead_nbytes > 0, "there is no read-ahead of gathered weights yet", "0"),
        "placements": (placed, "state on the device is not shared by ranks yet", "host or disk"),
        "streamed_updates": (policy.streamed_updates > 0, "updates of own parts are not streamed yet", "0"),
        "update": (
            policy.update == "during_backward",
            "whether a step is applied is decided by all ranks at its end",
            "next_forward",
        ),
    }
    for name, (lacks, why, fix) in lacking.items():
        if lacks:
            raise PlanError(f"with several ranks {why}", where=f"policy.{name}", fix=f"use {fix}")
