"""Weight slots: the reusable device buffers into which streamed weights are copied.

A unit is in a slot as a whole: parameters are views at fixed offsets of one buffer, so nothing fragments and model
code does not notice. Layers have their own slots; the ends (prologue and epilogue) share one, or have one each if the
head is tied to the prologue and needs it. Units that stay on the device have slots of their own.

A read-ahead (`Policy.read_ahead_nbytes`) is for tight memory: all slots then overlap in one buffer, as
large as the largest. Embedding and head are often larger than a layer, so a model's weights take one unit plus the
read-ahead. In return the first layer waits for the end of the embedding, the head for that of the top layer, and
the top layer is fetched twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatrain.schedule.contents import Content, Weights
from megatrain.schedule.ops import Access, Buffer, Use, declare
from megatrain.schedule.passes.state_buffers import state_name
from megatrain.spec import ModelSpec, Numerics, Part, Policy
from megatrain.spec.layout import Layout

ONE_BUFFER = "device/weight_slots/all"
IN_SLOT = "(a slot)"
"""Placeholder for the slot of weights (of `Weights.unit`) until their visit has one."""


class Span(NamedTuple):
    """Bytes [start, stop) of a buffer."""

    buffer: str
    start: int
    stop: int


@dataclass
class WeightSlots:
    """The slots of one schedule. Adds the buffers of requested slots to `buffers`."""

    model: ModelSpec
    numerics: Numerics
    policy: Policy
    layouts: Sequence[Layout]
    buffers: dict[str, Buffer]
    _spans: dict[str, Span] = field(default_factory=dict, init=False)
    """Slot -> its span."""
    _sharing: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list), init=False)
    """Buffer -> the slots in it."""
    _of: dict[int, list[str]] = field(default_factory=dict, init=False)

    def of(self, unit: int) -> list[str]:
        """Names of the slots that a unit may use."""
        if unit not in self._of:
            self._of[unit] = self._declared(unit)
        return self._of[unit]

    def access(self, slot: str, start: int, stop: int, content: Content) -> Access:
        """Bytes [start, stop) of a requested slot."""
        span = self._spans[slot]
        return Access(span.buffer, span.start + start, span.start + stop, content)

    def unplaced(self, unit: int) -> Access:
        """All of a unit's weights, in a slot that is not chosen yet."""
        return Access(IN_SLOT, 0, self._nbytes(unit), Weights(unit))

    def over(self, slot: str) -> list[str]:
        """The slots that share memory with this one, including itself."""
        span = self._spans[slot]
        return [other for other in self._sharing[span.buffer] if self._overlap(self._spans[other], span)]

    def stays(self, unit: int) -> bool:
        """Whether all its weights stay on the device between visits."""
        placement = self.policy.placement(unit)
        return placement.weights == "device" and (self.layouts[unit].ranks == 1 or not placement.on_device)

    def updated_there(self, unit: int) -> bool:
        """Whether they are updated where compute reads them. With several ranks each has only its part."""
        return self.stays(unit) and self.policy.placement(unit).on_device

    @property
    def in_one_buffer(self) -> bool:
        """Whether all slots are in one buffer."""
        return self.policy.read_ahead_nbytes > 0

    def again_for_head(self) -> bool:
        """Whether the prologue, which a tied head needs, has been overwritten by then."""
        return self.in_one_buffer and self.model.tied and not self.policy.shares_memory and not self.stays(0)

    def _declared(self, unit: int) -> list[str]:
        if self.stays(unit):
            name = state_name("device", Part.WEIGHTS, unit)
            self._spans[name] = Span(name, 0, self._nbytes(unit))
            self._sharing[name].append(name)
            return [name]
        if self.model.units[unit].kind == "layer":
            names = [f"layer{number}" for number in range(min(self.policy.layer_slots, len(self.model.layers)))]
            nbytes = self._largest_layer
        else:
            users = [unit] if self.model.tied else [0, self.model.epilogue]
            names = [self.model.units[unit].kind if self.model.tied else "ends"]
            nbytes = max(self._nbytes(user) for user in users if not self.stays(user))
        behind = self._nbytes(0) if self.again_for_head() and unit == self.model.epilogue else 0
        return [self._declare(f"device/weight_slots/{name}", behind, nbytes) for name in names]

    @cached_property
    def _largest_layer(self) -> int:
        """Bytes of the largest layer that uses a slot."""
        return max(self._nbytes(layer) for layer in self.model.streamed if not self.stays(layer))

    def _declare(self, slot: str, start: int, nbytes: int) -> str:
        buffer = ONE_BUFFER if self.in_one_buffer else slot
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
