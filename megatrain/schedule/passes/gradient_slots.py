"""Where gradients are summed on the device: slots that the layers pass through, and in the same memory the ends.

The gradient of the head is complete and on its way out when the top layer begins its own, and that of the prologue
begins when the lowest layer's is. So neither needs memory beside the slots of the layers: one buffer serves all. The
ends lie at its end and leave from their first byte on, and the top layer takes the first slot, which is free at once or
first. Where the head is tied to the prologue, its share waits for the prologue's turn, so both have buffers of their
own. What waits for what follows from the ranges. Left out: sums in a gradient's home, in memory that the device shares
(`build`).
"""

from __future__ import annotations

from megatrain.schedule.contents import Gradient
from megatrain.schedule.ops import Access, Buffer
from megatrain.spec import ModelSpec, Numerics, Policy, Work
from megatrain.spec.layout import layout_of

LOSS_PARTIAL_SUMS = 2
"""The head's gradient is summed over token chunks, so it always counts as more than one term."""


class Sums:
    """Names the memory of gradients under way, and enters its buffers into `buffers`."""

    def __init__(
        self, model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, buffers: dict[str, Buffer]
    ) -> None:
        self._model, self._numerics, self._policy = model, numerics, policy
        self._work, self._buffers = work, buffers
        self._slots = max(1, min(policy.grad_slots, len(model.layers)))
        units = range(len(model.units))
        self._each = [accumulator_nbytes(model, numerics, work, unit) for unit in units]
        """Of each unit, the bytes per parameter of its sum."""
        self._nbytes = [0 if self.at_home(unit) else self._whole(unit) for unit in units]
        """Of each unit that passes through."""
        self._layers = max((self._nbytes[layer] for layer in model.layers), default=0)

    def _whole(self, unit: int) -> int:
        return layout_of(self._model.units[unit]).trained.size * self._each[unit]

    def at_home(self, unit: int) -> bool:
        """Whether the sum is formed where the gradient stays: in shared memory, where the dtypes agree."""
        return self._policy.shares_memory and self._each[unit] == self._numerics.grad_nbytes

    def place(self, unit: int) -> Access:
        """The bytes of a unit's sum; its content is for the caller to name."""
        kind, nbytes = self._model.units[unit].kind, self._nbytes[unit]
        layers = self._layers
        beside = self._model.tied and kind != "layer"
        name = f"device/grads/{kind if beside else 'slots'}"
        ends = nbytes if beside else 0 if self._model.tied else max(self._nbytes[0], self._nbytes[-1])
        total = ends if beside else max(self._slots * layers, ends)
        self._buffers.setdefault(name, Buffer(name, "device", total, "grads"))
        start = (self._model.epilogue - 1 - unit) % self._slots * layers if kind == "layer" else total - nbytes
        return Access(name, start, start + nbytes, Gradient(unit))


def accumulator_nbytes(model: ModelSpec, numerics: Numerics, work: Work, unit: int) -> int:
    """Bytes per parameter of the device-side gradient sum of a unit."""
    through_head = unit == model.epilogue or (unit == 0 and model.tied)
    terms = round(work.micro_batches * work.repeats)
    return numerics.accumulator_nbytes(max(terms, LOSS_PARTIAL_SUMS if through_head else 1))
