"""Gradients: the device slots in which micro-batches accumulate them, and the copies that move them to host memory.

The gradient of the head is complete and on its way out when the top layer begins its own, and that of the prologue
begins when the lowest layer's is. So neither needs memory beside the slots of the layers: one buffer serves all. The
ends lie at its end and leave from their first byte on, and the top layer takes the first slot, which is free at once or
first. Where the head is tied to the prologue, its share waits for the prologue's turn, so both have buffers of their
own. On a device that computes in host memory, a gradient of the right dtype is summed where it stays.

A gradient leaves shard by shard. It waits for the norm in a buffer of its own (`state_buffers`); one that is used as it
lands passes through a few that units take turns in. Where a step has rounds, the sum of a round is set aside, and
taken up again in the next, which adds to it: terms are summed in the same order as in one round. Left out: updates
(`build`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megatrain.schedule.contents import USED, Gradient
from megatrain.schedule.ops import Access, Buffer, Op, Stream, Use, declare
from megatrain.schedule.passes.pinned_staging import PinnedStaging
from megatrain.schedule.passes.state_buffers import state_name
from megatrain.spec import ModelSpec, Numerics, Part, Policy, Tier, Work
from megatrain.spec.layout import Shard, layout_of

LOSS_PARTIAL_SUMS = 2
"""The head's gradient is summed over token chunks, so it always counts as more than one term."""


class Gradients:
    """Names the memory of a step's gradients, and enters its buffers into `buffers`."""

    def __init__(
        self,
        model: ModelSpec,
        numerics: Numerics,
        policy: Policy,
        work: Work,
        buffers: dict[str, Buffer],
        pinned_staging: PinnedStaging,
    ) -> None:
        self._model, self._numerics, self._policy = model, numerics, policy
        self._work, self._buffers, self._pinned_staging = work, buffers, pinned_staging
        self._slots = max(1, min(policy.grad_slots, len(model.layers)))
        units = range(len(model.units))
        self._trained = [layout_of(unit).trained for unit in model.units]
        self._each = [accumulator_nbytes(model, numerics, work, unit) for unit in units]
        """Of each unit, the bytes per parameter of its sum."""
        self._nbytes = [0 if self._at_home(unit) else self._trained[unit].size * self._each[unit] for unit in units]
        """Of each unit that passes through."""
        self.on_device = [policy.placement(unit).on_device for unit in units]
        """Of each unit, whether its update finds the gradient on the device."""
        for unit in policy.updates_streamed(model) if policy.update == "during_backward" else ():
            self.on_device[unit] = True
        self._layers = max((self._nbytes[layer] for layer in model.layers), default=0)
        self._terms = [0] * len(model.units)

    def is_whole(self, unit: int) -> bool:
        """Whether all terms of its gradient have been added."""
        return self._terms[unit] == self._work.micro_batches * (2 if unit == 0 and self._model.tied else 1)

    def add(self, unit: int, reads: list[Access], writes: list[Access]) -> None:
        """One more call adds to the gradient of `unit`: it reads the sum so far, and writes the next."""
        place = self.sum(unit)
        if self._terms[unit]:
            reads.append(place._replace(content=Gradient(unit, terms=self._terms[unit])))
        self._terms[unit] += 1
        terms = None if self.is_whole(unit) else self._terms[unit]
        writes.append(place._replace(content=Gradient(unit, terms=terms)))

    def sum(self, unit: int) -> Access:
        """Where the gradient of a unit is summed: in a slot, or where it stays."""
        if self._at_home(unit):
            return self.landed(unit)
        kind, nbytes, tied = self._model.units[unit].kind, self._nbytes[unit], self._model.tied
        beside = tied and kind != "layer"
        ends = nbytes if beside else 0 if tied else max(self._nbytes[0], self._nbytes[-1])
        total = ends if beside else max(self._slots * self._layers, ends)
        name = f"device/gradient_slots/{kind if beside else 'all'}"
        declare(self._buffers, Buffer(name, "device", total, Use.GRADIENT_SLOTS))
        above = self._model.epilogue - 1 - unit
        start = above % self._slots * self._layers if kind == "layer" else total - nbytes
        return Access(name, start, start + nbytes, Gradient(unit))

    def landed(self, unit: int, version: str = "") -> Access:
        """Where the update finds the gradient of a unit."""
        nbytes = self._trained[unit].own_size * self._numerics.grad_nbytes
        if self._used_in_slot(unit):
            return self.sum(unit)._replace(content=Gradient(unit, version))
        tier: Tier = "device" if self.on_device[unit] else "host"
        waits = self._policy.update != "during_backward"
        name = state_name(tier, Part.GRADIENTS, unit) if waits else self._in_turns(unit, tier)
        return Access(name, 0, nbytes, Gradient(unit, version))

    def save_partial(self, unit: int) -> list[Op]:
        """The copies of a sum, as far as it has come in this round, to where it waits for the next."""
        return self._between_rounds(unit, "GRAD")

    def restore_partial(self, unit: int) -> list[Op]:
        """The copies back of a sum that an earlier round has begun."""
        return self._between_rounds(unit, "RELOAD")

    def _between_rounds(self, unit: int, kind: Literal["GRAD", "RELOAD"]) -> list[Op]:
        waits = self._policy.update != "during_backward" and self._policy.placement(unit).gradients != "disk"
        stays = self._at_home(unit) and waits
        if stays or not self._trained[unit].size:
            return []
        content = Gradient(unit, terms=self._terms[unit])
        total, each = self.sum(unit)._replace(content=content), self._each[unit]
        tier: Tier = "device" if self._policy.placement(unit).on_device else "host"
        size = total.stop - total.start
        own = Buffer(f"{tier}/gradient_sums/{unit}", tier, size, Use.PARTIAL_GRADIENTS, part=Part.GRADIENTS, unit=unit)
        name = declare(self._buffers, own)
        stream: Stream = "grad" if kind == "GRAD" else "fetch"
        ops = []
        for shard in self._shards(unit):
            start, stop = shard.start * each, shard.stop * each
            inside = total._replace(start=total.start + start, stop=total.start + stop)
            outside = self._pinned_staging.at("sums", unit, shard.index, Access(name, start, stop, content))
            read, write = (inside, outside) if kind == "GRAD" else (outside, inside)
            ops.append(Op(kind, stream, unit, shard=shard.index, reads=(read,), writes=(write,)))
        return ops

    def leave(self, unit: int) -> list[Op]:
        """The copies of a complete gradient to where the update finds it: none where it is there already."""
        total, landed, ranks = self.sum(unit), self.landed(unit), self._trained[unit].ranks
        if total.buffer == landed.buffer:
            return []
        each, out = self._each[unit], self._numerics.grad_nbytes
        crosses = not (self._policy.shares_memory or self.on_device[unit])
        ops = []
        for shard in self._shards(unit):
            read = total._replace(start=total.start + shard.start * each, stop=total.start + shard.stop * each)
            write = landed._replace(start=shard.start * out // ranks, stop=shard.stop * out // ranks)  # the own part
            writes = [self._pinned_staging.at("grad", unit, shard.index, write)]
            if each != out and crosses and ranks == 1:
                writes.append(self._cast(write.stop - write.start))
            ops.append(Op("GRAD", "grad", unit, shard=shard.index, reads=(read,), writes=tuple(writes)))
        return ops

    def _shards(self, unit: int) -> Sequence[Shard]:
        """How its gradient is cut; with several ranks as its weights are, since what is owned of both is the same."""
        ranks, weight = self._trained[unit].ranks, self._numerics.weight_nbytes
        nbytes = self._each[unit] if ranks == 1 else weight
        return self._trained[unit].shards(max(1, self._policy.shard_nbytes // nbytes))

    def _at_home(self, unit: int) -> bool:
        """Whether the sum is formed where the gradient stays: in shared memory, where the dtypes agree."""
        return self._policy.shares_memory and self._each[unit] == self._numerics.grad_nbytes

    def _used_in_slot(self, unit: int) -> bool:
        """Whether a streamed update finds the gradient in the slot where it was summed, which no other rank adds to."""
        streamed = self.on_device[unit] and not self._policy.placement(unit).on_device
        return streamed and self._model.ranks == 1 and self._each[unit] == self._numerics.grad_nbytes

    def _in_turns(self, unit: int, tier: Tier) -> str:
        """The buffer of a gradient that is used as it lands: layers have a few, the ends one."""
        is_layer, tied, kind = self._model.units[unit].kind == "layer", self._model.tied, self._model.units[unit].kind
        users = self._model.layers if is_layer else [unit] if tied else [0, self._model.epilogue]
        number = unit % min(self._policy.grad_slots, len(users)) if is_layer else ""
        nbytes = max(self._trained[user].own_size for user in users) * self._numerics.grad_nbytes
        name = f"{tier}/landed_gradients/{kind if is_layer or tied else 'ends'}{number}"
        return declare(self._buffers, Buffer(name, tier, nbytes, Use.LANDED_GRADIENTS, part=Part.GRADIENTS))

    def _cast(self, nbytes: int) -> Access:
        """Where a shard of a gradient takes the dtype that crosses the bus, on the device."""
        name = declare(self._buffers, Buffer("device/cast", "device", nbytes, Use.GRADIENT_CASTS))
        return Access(name, 0, nbytes, USED)


def accumulator_nbytes(model: ModelSpec, numerics: Numerics, work: Work, unit: int) -> int:
    """Bytes per parameter of the device-side gradient sum of a unit. Several ranks send each other float32."""
    through_head = unit == model.epilogue or (unit == 0 and model.tied)
    terms = round(work.micro_batches * work.repeats)
    return numerics.accumulator_nbytes(max(terms, LOSS_PARTIAL_SUMS if through_head else 1, model.ranks))
