"""Gradients: the device slots in which micro-batches accumulate them, and the copies that move them to host memory.

The head's gradient is complete and leaving when the top layer starts its own, and the prologue's starts when the
lowest layer's is complete. So neither needs memory besides the layers' slots: one buffer serves all. The ends (head,
prologue) are at its end and leave from their first byte on; the top layer takes the first slot, which is free first.
If the head is tied to the prologue, its share waits for the prologue's turn, so both have buffers of their own. On a
device that computes in host memory, a gradient of the right dtype is summed in its final place.

A gradient leaves shard by shard. It waits for the norm in its own buffer (`state_buffers`); if it is used as it
lands, it passes through a few shared buffers; on its way to the disk, or beside state that comes from there, it passes
through the staging ring (`updates`). With rounds, the sum of one round is set aside and continued in the
next, so terms are summed in the same order as in a single round. Updates are made in `build`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from megatrain.schedule.contents import USED, Gradient
from megatrain.schedule.ops import Access, Buffer, Op, Stream, Use, declare
from megatrain.schedule.passes.pieces import Piece
from megatrain.schedule.passes.state_buffers import state_name
from megatrain.spec import ModelSpec, Numerics, Part, Policy, Tier, Work
from megatrain.spec.layout import Shard, layout_of

LOSS_PARTIAL_SUMS = 2
"""Terms of the head's gradient, which is summed over token chunks: always more than one."""


class Gradients:
    """Assigns the memory of a step's gradients, and adds its buffers to `buffers`."""

    def __init__(
        self,
        model: ModelSpec,
        numerics: Numerics,
        policy: Policy,
        work: Work,
        buffers: dict[str, Buffer],
    ) -> None:
        self._model, self._numerics, self._policy = model, numerics, policy
        self._work, self._buffers = work, buffers
        self._slots = max(1, min(policy.grad_slots, len(model.layers)))
        units = range(len(model.units))
        self._trained = [layout_of(unit).trained for unit in model.units]
        self._each = [accumulator_nbytes(model, numerics, work, unit) for unit in units]
        """For each unit, bytes per parameter of its sum."""
        self._nbytes = [0 if self._at_home(unit) else self._trained[unit].size * self._each[unit] for unit in units]
        """For each unit whose gradient passes through."""
        self.on_device = [policy.placement(unit).on_device for unit in units]
        """For each unit, whether its update reads the gradient on the device."""
        for unit in policy.updates_streamed(model) if policy.update == "during_backward" else ():
            self.on_device[unit] = True
        self._layers = max((self._nbytes[layer] for layer in model.streamed), default=0)
        self._terms = [0] * len(model.units)
        self._sums: dict[int, Access] = {}
        """Unit -> where its gradient is summed."""

    def is_whole(self, unit: int) -> bool:
        """Whether all terms of a unit's gradient have been added."""
        return self._terms[unit] == self._work.micro_batches * (2 if unit == 0 and self._model.tied else 1)

    def add(self, unit: int, reads: list[Access], writes: list[Access]) -> None:
        """Another call adds to the gradient of `unit`: it reads the sum so far, and writes the next."""
        place = self.sum(unit)
        if self._terms[unit]:
            reads.append(place.holding(Gradient(unit, terms=self._terms[unit])))
        self._terms[unit] += 1
        terms = None if self.is_whole(unit) else self._terms[unit]
        writes.append(place.holding(Gradient(unit, terms=terms)))

    def sum(self, unit: int) -> Access:
        """Where a unit's gradient is summed: in a slot, or in its final place."""
        if unit not in self._sums:
            self._sums[unit] = self._place_of_sum(unit)
        return self._sums[unit]

    def _place_of_sum(self, unit: int) -> Access:
        if self._at_home(unit):
            return self.landed(unit)
        kind, nbytes, tied = self._model.units[unit].kind, self._nbytes[unit], self._model.tied
        beside = tied and kind != "layer"
        ends = nbytes if beside else 0 if tied else max(self._nbytes[0], self._nbytes[self._model.epilogue])
        total = ends if beside else max(self._slots * self._layers, ends)
        name = f"device/gradient_slots/{kind if beside else 'all'}"
        declare(self._buffers, Buffer(name, "device", total, Use.GRADIENT_SLOTS))
        above = self._model.epilogue - 1 - unit
        if unit in self._model.encoder:  # after all of these
            above = len(self._model.layers) + self._model.encoder[-1] - unit
        start = above % self._slots * self._layers if kind == "layer" else total - nbytes
        return Access(name, start, start + nbytes, Gradient(unit))

    def landed(self, unit: int, version: str = "") -> Access:
        """Where a unit's update reads its gradient."""
        nbytes = self._trained[unit].own_size * self._numerics.grad_nbytes
        if self._used_in_slot(unit):
            return self.sum(unit).holding(Gradient(unit, version))
        tier: Tier = "device" if self.on_device[unit] else "host"
        waits = self._policy.update != "during_backward"
        name = state_name(tier, Part.GRADIENTS, unit) if waits else self._in_turns(unit, tier)
        return Access(name, 0, nbytes, Gradient(unit, version))

    def save_partial(self, unit: int) -> list[Op]:
        """Copies that set aside this round's sum for the next round."""
        return self._between_rounds(unit, "GRAD")

    def restore_partial(self, unit: int) -> list[Op]:
        """Copies that bring back the sum of earlier rounds."""
        return self._between_rounds(unit, "RELOAD")

    def _between_rounds(self, unit: int, kind: Literal["GRAD", "RELOAD"]) -> list[Op]:
        waits = self._policy.update != "during_backward" and self._policy.placement(unit).gradients != "disk"
        stays = self._at_home(unit) and waits
        if stays or not self._trained[unit].size:
            return []
        content = Gradient(unit, terms=self._terms[unit])
        total, sum_nbytes = self.sum(unit).holding(content), self._each[unit]
        tier: Tier = "device" if self._policy.placement(unit).on_device else "host"
        size = total.stop - total.start
        waiting = Buffer(
            f"{tier}/gradient_sums/{unit}", tier, size, Use.PARTIAL_GRADIENTS, part=Part.GRADIENTS, unit=unit
        )
        name = declare(self._buffers, waiting)
        stream: Stream = "grad" if kind == "GRAD" else "fetch"
        ops = []
        for shard in self._shards(unit):
            start, stop = shard.start * sum_nbytes, shard.stop * sum_nbytes
            inside = total.between(total.start + start, total.start + stop)
            outside = Access(name, start, stop, content)
            read, write = (inside, outside) if kind == "GRAD" else (outside, inside)
            ops.append(Op(kind, stream, unit, shard=shard.index, reads=(read,), writes=(write,)))
        return ops

    def leave(self, unit: int) -> list[Op]:
        """Copies of a complete gradient to where the update reads it; none if it is there already."""
        landed = self.landed(unit)
        return [] if self.sum(unit).buffer == landed.buffer else self._copies(unit, self._shards(unit), landed)

    def leave_in_piece(self, unit: int, number: int, piece: Piece, place: Access) -> list[Op]:
        """Copies of a piece of a complete gradient, this rank's, to a slot."""
        (start, stop), trained = piece, self._trained[unit]
        if trained.ranks == 1:
            most = max(1, self._policy.shard_nbytes // self._each[unit])
            shards = [Shard(number, begin, min(stop, begin + most)) for begin in range(start, stop, most)]
        else:
            shards = [shard for shard in self._shards(unit) if start <= shard.start // trained.ranks < stop]
        return self._copies(unit, shards, place, start)

    def _copies(self, unit: int, shards: Sequence[Shard], landed: Access, first: int = 0) -> list[Op]:
        """Copies of shards of a gradient to `landed`, which begins with this rank's element `first`."""
        total, ranks = self.sum(unit), self._trained[unit].ranks
        sum_nbytes, out = self._each[unit], self._numerics.grad_nbytes
        crosses = not (self._policy.shares_memory or self.on_device[unit])
        ops = []
        base = landed.start - first * out
        for shard in shards:
            read = total.between(total.start + shard.start * sum_nbytes, total.start + shard.stop * sum_nbytes)
            write = landed.between(base + shard.start * out // ranks, base + shard.stop * out // ranks)  # this rank's
            writes = [write]
            if sum_nbytes != out and crosses and ranks == 1:
                writes.append(self._cast(write.stop - write.start))
            ops.append(Op("GRAD", "grad", unit, shard=shard.index, reads=(read,), writes=tuple(writes)))
        return ops

    def _shards(self, unit: int) -> Sequence[Shard]:
        """The shards of its gradient; with several ranks those of its weights, so that a rank owns the same part
        of both."""
        ranks, weight = self._trained[unit].ranks, self._numerics.weight_nbytes
        nbytes = self._each[unit] if ranks == 1 else weight
        return self._trained[unit].shards(max(1, self._policy.shard_nbytes // nbytes))

    def _at_home(self, unit: int) -> bool:
        """Whether the sum is formed in its final place: in shared memory, if the dtypes agree."""
        to_disk = self._policy.update != "during_backward" and self._policy.placement(unit).gradients == "disk"
        return self._policy.shares_memory and self._each[unit] == self._numerics.grad_nbytes and not to_disk

    def _used_in_slot(self, unit: int) -> bool:
        """Whether a streamed update reads the gradient in its slot, to which no other rank adds."""
        streamed = self.on_device[unit] and not self._policy.placement(unit).on_device
        return streamed and self._model.ranks == 1 and self._each[unit] == self._numerics.grad_nbytes

    def _in_turns(self, unit: int, tier: Tier) -> str:
        """A shared buffer for a gradient that is used as it lands: layers have a few, the ends one."""
        is_layer, tied, kind = self._model.units[unit].kind == "layer", self._model.tied, self._model.units[unit].kind
        number = unit % self._slots if is_layer else ""
        ends = [unit] if tied else [0, self._model.epilogue]
        size = self._largest_layer if is_layer else max(self._trained[user].own_size for user in ends)
        nbytes = size * self._numerics.grad_nbytes
        name = f"{tier}/landed_gradients/{kind if is_layer or tied else 'ends'}{number}"
        return declare(self._buffers, Buffer(name, tier, nbytes, Use.LANDED_GRADIENTS, part=Part.GRADIENTS))

    @cached_property
    def _largest_layer(self) -> int:
        """Trained elements of the largest layer that this rank owns."""
        return max(self._trained[layer].own_size for layer in self._model.streamed)

    def _cast(self, nbytes: int) -> Access:
        """Device buffer in which a shard of a gradient is cast to the dtype that crosses the bus."""
        name = declare(self._buffers, Buffer("device/cast", "device", nbytes, Use.GRADIENT_CASTS))
        return Access(name, 0, nbytes, USED)


def accumulator_nbytes(model: ModelSpec, numerics: Numerics, work: Work, unit: int) -> int:
    """Bytes per parameter of a unit's gradient sum on the device. Ranks exchange float32."""
    through_head = unit == model.epilogue or (unit == 0 and model.tied)
    terms = round(work.micro_batches * work.repeats)
    return numerics.accumulator_nbytes(max(terms, LOSS_PARTIAL_SUMS if through_head else 1, model.ranks))
