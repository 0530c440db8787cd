"""Weight slots: the reusable device buffers that streamed weights are copied into, and where each begins and ends.

A unit passes through a slot whole: parameters are views at fixed offsets of one buffer, so nothing fragments and no
model code knows. Layers have slots of their own, and so have the ends: one for both, or, where the head is tied to the
prologue and needs it, one each. What stays on the device has a slot that is its own.

A read-ahead (`Policy.read_ahead_nbytes`) is for those who are short of memory: then all slots lie in one buffer, the
*ring*, as large as the largest, and each overwrites what lies where it comes. An embedding and a head are often larger
than a layer, so the weights of a model take one unit and the read-ahead. What it costs is that the first layer waits
for the embedding's end, the head for the top layer's, and the top layer is fetched twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatrain.schedule.contents import Content, Weights
from megatrain.schedule.ops import Access, Buffer, Use, declare
from megatrain.schedule.passes.state_buffers import state_name
from megatrain.spec import ModelSpec, Numerics, Part, Policy
from megatrain.spec.layout import Layout

RING = "device/weight_slots/ring"
IN_SLOT = "(a slot)"
"""Stands for the buffer of weights, which `Weights.unit` names, until their visit has a slot."""


class Span(NamedTuple):
    """Bytes [start, stop) of a buffer."""

    buffer: str
    start: int
    stop: int


@dataclass
class WeightSlots:
    """The slots of one schedule. Enters the buffers of those that are asked for into `buffers`."""

    model: ModelSpec
    numerics: Numerics
    policy: Policy
    layouts: Sequence[Layout]
    buffers: dict[str, Buffer]
    _spans: dict[str, Span] = field(default_factory=dict, init=False)
    """Slot -> where it is."""
    _sharing: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list), init=False)
    """Buffer -> the slots in it."""
    _of: dict[int, list[str]] = field(default_factory=dict, init=False)

    def of(self, unit: int) -> list[str]:
        """Names of the slots that a unit may use."""
        if unit not in self._of:
            self._of[unit] = self._declared(unit)
        return self._of[unit]

    def access(self, slot: str, start: int, stop: int, content: Content) -> Access:
        """Bytes [start, stop) of a slot that has been asked for."""
        span = self._spans[slot]
        return Access(span.buffer, span.start + start, span.start + stop, content)

    def unplaced(self, unit: int) -> Access:
        """The whole of a unit's weights, in a slot that is not chosen yet."""
        return Access(IN_SLOT, 0, self._nbytes(unit), Weights(unit))

    def over(self, slot: str) -> list[str]:
        """The slots that share memory with one, itself among them."""
        span = self._spans[slot]
        return [each for each in self._sharing[span.buffer] if self._overlap(self._spans[each], span)]

    def stays(self, unit: int) -> bool:
        """Whether all its weights are on the device from one visit to the next."""
        placement = self.policy.placement(unit)
        return placement.weights == "device" and (self.layouts[unit].ranks == 1 or not placement.on_device)

    def updated_there(self, unit: int) -> bool:
        """Whether they are updated where compute finds them. Of several ranks each has a part of them alone."""
        return self.stays(unit) and self.policy.placement(unit).on_device

    @property
    def in_ring(self) -> bool:
        """Whether all of them lie in one buffer."""
        return self.policy.read_ahead_nbytes > 0

    def again_for_head(self) -> bool:
        """Whether the prologue, which a tied head needs, has made room for the layers by then."""
        return self.in_ring and self.model.tied and not self.policy.shares_memory and not self.stays(0)

    def _declared(self, unit: int) -> list[str]:
        if self.stays(unit):
            name = state_name("device", Part.WEIGHTS, unit)
            self._spans[name] = Span(name, 0, self._nbytes(unit))
            self._sharing[name].append(name)
            return [name]
        if self.model.units[unit].kind == "layer":
            users = list(self.model.layers)
            names = [f"layer{number}" for number in range(min(self.policy.layer_slots, len(users)))]
        else:
            users = [unit] if self.model.tied else [0, self.model.epilogue]
            names = [self.model.units[unit].kind if self.model.tied else "ends"]
        nbytes = max(self._nbytes(user) for user in users if not self.stays(user))
        behind = self._nbytes(0) if self.again_for_head() and unit == self.model.epilogue else 0
        return [self._declare(f"device/weight_slots/{name}", behind, nbytes) for name in names]

    def _declare(self, slot: str, start: int, nbytes: int) -> str:
        buffer = RING if self.in_ring else slot
        if slot not in self._spans:
            self._sharing[buffer].append(slot)
        self._spans[slot] = Span(buffer, start, start + nbytes)
        declare(self.buffers, Buffer(buffer, "device", start + nbytes, Use.WEIGHT_SLOTS, part=Part.WEIGHTS))
        return slot

    def _nbytes(self, unit: int) -> int:
        return self.layouts[unit].size * self.numerics.weight_nbytes

    @staticmethod
    def _overlap(one: Span, other: Span) -> bool:
        return one.start < other.stop and other.start < one.stop
