"""Streamed updates: a layer's state in host memory is copied to the device, updated there and written back.

Host updates are limited by the memory bandwidth that host threads reach. Copies reach more, and both at once still
more, so some layers (`Policy.streamed_updates`) are updated on the device, in pieces: RELOAD copies weights, low bits
and moments into a slot, UPDATE changes them there, OFFLOAD takes them home. A few pieces are in progress at a time.
UPDATE runs on the stream of copies home, where it takes a small part of the copies' time, so neither compute nor
another stream has to wait for it.

If updates wait for the norm, gradients wait in host memory, and each piece brings its own part along. PLACE then
copies the fresh weights into the slot from which the layer's forward reads them, which saves a fetch. If updates
come during the backward pass, the gradient is used where it was summed, and never leaves. What an UPDATE has left
in a slot is not lost if copying it home fails (`memory.pool`). `spec.Policy` selects the layers, `build` and
`prefetch` place the ops.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.schedule.contents import USED, Content, LowBits, Moments, Scratch, Weights
from megatrain.schedule.ops import Access, Buffer, Op, Use, declare
from megatrain.schedule.passes.gradients import Gradients
from megatrain.schedule.passes.state_buffers import MOMENTS_NBYTES, StateBuffers, state_name
from megatrain.spec import ModelSpec, Numerics, Part, Policy
from megatrain.spec.layout import ALIGNMENT, layout_of

PIECE_NBYTES, MOST_PIECES = 64 << 20, 64
"""Bytes per RELOAD and per slot, enough for full bus speed, and the number of pieces above which a layer gets larger
ones, since each costs a thread some time; none is larger than a shard."""

LEAST_NUMEL = 1 << 10
"""Minimum size of a piece, however small shards are; a multiple of `ALIGNMENT`."""

SLOTS = 3
"""Slots: one is filled while another is updated or leaves; the third absorbs delays."""

CHUNK, CHUNK_NBYTES = 1 << 20, 32
"""Without a fused kernel: elements of a piece updated at a time, and workspace bytes per element
(`train.device_adamw`)."""

LOW_BITS_NBYTES = 2
HALF_OF_MOMENTS_NBYTES = MOMENTS_NBYTES // 2


def piece_of(size: int, numerics: Numerics, policy: Policy, number: int) -> tuple[int, int]:
    """Elements [start, stop) of a piece, out of the `size` trained elements of a unit that a rank owns."""
    element_nbytes = numerics.weight_nbytes + MOMENTS_NBYTES
    element_nbytes += 0 if numerics.precision == "fp32" else LOW_BITS_NBYTES
    element_nbytes += numerics.grad_nbytes if policy.update == "next_forward" else 0
    nbytes = min(policy.shard_nbytes, max(PIECE_NBYTES, size * element_nbytes // MOST_PIECES))
    numel = max(LEAST_NUMEL, nbytes // element_nbytes // ALIGNMENT * ALIGNMENT)
    return number * numel, min(size, (number + 1) * numel)


class StreamedUpdates:
    """Makes the streamed updates of one schedule. Adds their slots to `buffers`."""

    def __init__(
        self,
        model: ModelSpec,
        numerics: Numerics,
        policy: Policy,
        buffers: dict[str, Buffer],
        gradients: Gradients,
        state: StateBuffers,
    ) -> None:
        self.units = policy.updates_streamed(model)
        self._model, self._numerics, self._policy = model, numerics, policy
        self._buffers, self._gradients, self._state = buffers, gradients, state
        self._pieces = 0
        """Number of pieces so far; they take turns in the slots."""

    def ops(self, unit: int, before: str, after: str, place: Access | None = None) -> list[Op]:
        """The update of a unit from version `before` to `after`. place: where fresh weights are needed on the
        device, if anywhere."""
        size = layout_of(self._model.units[unit]).trained.own_size
        ops: list[Op] = []
        stop = number = 0
        while stop < size:
            start, stop = piece_of(size, self._numerics, self._policy, number)
            slot = f"device/update_slots/{self._pieces % SLOTS}"
            old, new = (self._homes(unit, start, stop, version) for version in (before, after))
            gradient = self._gradient(unit, start, stop, before)
            if not self._gradients.on_device[unit]:
                old.append(gradient)
            here, fresh = _one_behind_the_other(slot, old), _one_behind_the_other(slot, new)
            declare(self._buffers, Buffer(slot, "device", here[-1].stop, Use.UPDATE_SLOTS))
            ops.append(Op("RELOAD", "fetch", unit, shard=number, reads=tuple(old), writes=tuple(here)))
            gradient = gradient if self._gradients.on_device[unit] else here[-1]
            ops.append(self._update(unit, number, gradient, here[: len(new)], fresh, (stop - start) / size))
            if place is not None:
                weight_nbytes = self._numerics.weight_nbytes
                target = place.between(place.start + start * weight_nbytes, place.start + stop * weight_nbytes)
                ops.append(Op("PLACE", "grad", unit, shard=number, reads=(fresh[0],), writes=(target,)))
            ops.append(Op("OFFLOAD", "grad", unit, shard=number, reads=tuple(fresh), writes=tuple(new)))
            self._pieces, number = self._pieces + 1, number + 1
        return ops

    def _update(
        self, unit: int, number: int, gradient: Access, here: Sequence[Access], fresh: Sequence[Access], share: float
    ) -> Op:
        """UPDATE of one piece, in place, with its share of the whole update's price."""
        reads, writes = ([*state[:-2], state[-2].between(state[-2].start, state[-1].stop)] for state in (here, fresh))
        elements = (gradient.stop - gradient.start) // self._numerics.grad_nbytes
        workspace = CHUNK_NBYTES * min(CHUNK, elements)
        beside = Buffer("device/update_workspace", "device", workspace, Use.UPDATE_WORKSPACE, arena=False)
        writes += [gradient.holding(USED)]
        writes += [Access(declare(self._buffers, beside), 0, workspace, Scratch("update"))]
        norm = [] if here[0].content == Weights(unit, "old") else [self._state.norm(unit)]
        return Op(
            "UPDATE", "grad", unit, shard=number, reads=(gradient, *reads, *norm), writes=tuple(writes), share=share
        )

    def _homes(self, unit: int, start: int, stop: int, version: str) -> list[Access]:
        """Where elements [start, stop) of each part of a unit's state are in host memory; m and v separately."""
        size, half = layout_of(self._model.units[unit]).trained.own_size, HALF_OF_MOMENTS_NBYTES
        places: list[tuple[Part, Content, int, int]] = [
            (Part.WEIGHTS, Weights(unit, version), self._numerics.weight_nbytes, 0)
        ]
        if self._numerics.precision != "fp32":
            places.append((Part.LOW_BITS, LowBits(unit, version), LOW_BITS_NBYTES, 0))
        places += [(Part.MOMENTS, Moments(unit, version), half, at) for at in (0, half * size)]
        return [
            Access(state_name("host", part, unit), at + start * element_nbytes, at + stop * element_nbytes, content)
            for part, content, element_nbytes, at in places
        ]

    def _gradient(self, unit: int, start: int, stop: int, version: str) -> Access:
        """Where elements [start, stop) of a unit's gradient wait for its update."""
        whole, grad_nbytes = self._gradients.landed(unit, version), self._numerics.grad_nbytes
        return whole.between(whole.start + start * grad_nbytes, whole.start + stop * grad_nbytes)


def _one_behind_the_other(slot: str, homes: Sequence[Access]) -> list[Access]:
    """The contents of these homes, one after the other in a slot."""
    contents: list[Access] = []
    for home in homes:
        start = contents[-1].stop if contents else 0
        contents.append(Access(slot, start, start + home.stop - home.start, home.content))
    return contents
