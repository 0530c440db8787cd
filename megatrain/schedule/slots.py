"""Where weights lie on the device while they pass through: slots by name, and the bytes that each stands for.

Layers have slots of their own, and so have the ends: one for both, or, where the head is tied to the prologue and needs
it, one each. A read-ahead (`Policy.read_ahead_nbytes`) is for those who are short of memory: then all of them lie in
one buffer, the *ring*, as large as the largest, and each overwrites what lies where it comes. An embedding and a head
are often larger than a layer, so the weights of a model take one unit and the read-ahead. What it costs is that the
first layer waits for the embedding's end, the head for the top layer's, and the top layer is fetched twice.

Left out: which unit is in which slot when (`fetches`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatrain.layout import Layout
from megatrain.schedule.ops import Access, Buffer
from megatrain.spec import ModelSpec, Policy

RING = "device/weights/ring"


@dataclass
class Slots:
    """The slots of one schedule. Enters the buffers of those that are asked for into `buffers`."""

    model: ModelSpec
    policy: Policy
    layouts: Sequence[Layout]
    buffers: dict[str, Buffer]
    _spans: dict[str, tuple[str, int, int]] = field(default_factory=dict, init=False)
    """Slot -> its buffer, and its bytes [start, stop) there."""
    _named: dict[int, list[str]] = field(default_factory=dict, init=False)

    def of(self, unit: int) -> list[str]:
        """Names of the slots that a unit may use; what stays on the device has one that is its own."""
        if unit not in self._named:
            self._named[unit] = self._declared(unit)
        return self._named[unit]

    def _declared(self, unit: int) -> list[str]:
        if self._stays(unit):
            name = f"device/hi/{unit}"
            self._spans[name] = name, 0, self._nbytes(unit)
            return [name]
        if self.model.units[unit].kind == "layer":
            users = list(self.model.layers)
            names = [f"layer{k}" for k in range(min(self.policy.layer_slots, len(users)))]
        else:
            users = [unit] if self.model.tied else [0, self.model.epilogue]
            names = [self.model.units[unit].kind if self.model.tied else "ends"]
        nbytes = max(self._nbytes(user) for user in users if not self._stays(user))
        behind = self._nbytes(0) if self.again_for_head() and unit == self.model.epilogue else 0
        return [self._declare(f"device/weights/{name}", behind, nbytes) for name in names]

    @property
    def in_ring(self) -> bool:
        """Whether all of them lie in one buffer."""
        return self.policy.read_ahead_nbytes > 0

    def again_for_head(self) -> bool:
        """Whether the prologue, which a tied head needs, has made room for the layers by then."""
        return self.in_ring and self.model.tied and not self.policy.shares_memory and not self._stays(0)

    def access(self, slot: str, start: int, stop: int, content: str) -> Access:
        """Bytes [start, stop) of a slot that has been asked for."""
        buffer, begin, _ = self._spans[slot]
        return Access(buffer, begin + start, begin + stop, content)

    def over(self, slot: str) -> list[str]:
        """The slots that share memory with one, itself among them."""
        buffer, start, stop = self._spans[slot]
        others = self._spans.items()
        return [name for name, (of, first, last) in others if of == buffer and first < stop and start < last]

    def _declare(self, slot: str, start: int, nbytes: int) -> str:
        buffer = RING if self.in_ring else slot
        self._spans[slot] = buffer, start, start + nbytes
        known = self.buffers.get(buffer)
        if known is None or known.nbytes < start + nbytes:
            self.buffers[buffer] = Buffer(buffer, "device", start + nbytes, "weights")
        return slot

    def _stays(self, unit: int) -> bool:
        return self.policy.home(unit).weights == "device"

    def _nbytes(self, unit: int) -> int:
        return self.layouts[unit].size * self.policy.weight_nbytes
