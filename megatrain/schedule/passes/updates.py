"""Makes the ops that update units: whole and in place, or in pieces that pass through slots.

State on the disk passes through host memory: READ fills a slot with a piece of what is on the disk, UPDATE changes it
there and the rest of the piece in place, WRITE takes it home. A few pieces are in progress at a time.

*Streamed updates* pass state in host memory through the device. Host updates are limited by the memory bandwidth that
host threads reach. Copies reach more, and both at once still more, so some layers (`Policy.streamed_updates`) are
updated on the device: RELOAD copies a piece of all state into a slot, and OFFLOAD takes it home. UPDATE runs on the
stream of copies home, where it takes a small part of the copies' time, so neither compute nor another stream has to
wait for it. If updates wait for the norm, gradients wait in host memory, and each piece brings its own part along.
PLACE then copies the fresh weights into the slot from which the layer's forward reads them, which saves a fetch. If
updates come during the backward pass, the gradient is used where it was summed, and never leaves.

What an UPDATE has left in a slot is not lost if taking it home fails (`memory.pool`). `spec.Policy` selects the units
that are streamed, `build` and `prefetch` place the ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from megatrain.schedule.contents import CONTENT_OF, USED, Gradient, Scratch
from megatrain.schedule.ops import CALLS, Access, Buffer, Kind, Op, Stream, Use, declare
from megatrain.schedule.passes.directions import Directions
from megatrain.schedule.passes.gradients import Gradients
from megatrain.schedule.passes.pieces import (
    MOST_PIECES,
    SLOTS,
    Array,
    Piece,
    arrays_of,
    disk_pieces,
    merged,
    merged_within,
    streamed_pieces,
    touched_nbytes,
)
from megatrain.schedule.passes.state_buffers import (
    RING,
    StateBuffers,
    gradient_write_pieces,
    pieces_in_steps,
    state_name,
)
from megatrain.spec import ModelSpec, Numerics, Part, Policy, Tier
from megatrain.spec.hardware import SECTOR
from megatrain.spec.layout import layout_of

CHUNK, CHUNK_NBYTES = 1 << 20, 32
"""Without a fused kernel: elements of a piece updated at a time on a device, and workspace bytes per element
(`train.device_update`)."""


class PieceRoute(NamedTuple):
    """How pieces reach their update: kind and stream of the copies in, of those out, and of those of fresh weights to
    the slot on the device; the stream of the update; the tier where the state is; and the prefix of names of slots."""

    inward: tuple[Kind, Stream]
    outward: tuple[Kind, Stream]
    place: tuple[Kind, Stream]
    update: Stream
    home: Tier
    slots: str
    alignment: int
    """Of an array in a slot, in bytes."""


STREAMED = PieceRoute(
    ("RELOAD", "fetch"), ("OFFLOAD", "grad"), ("PLACE", "grad"), "grad", "host", "device/update_slots", 1
)
THROUGH_HOST = PieceRoute(("READ", "read"), ("WRITE", "write"), ("FETCH", "fetch"), "host", "disk", RING, SECTOR)
ON_DEVICE = THROUGH_HOST._replace(update="compute", home="device")
"""Nothing passes through slots."""

PARTS_OF: dict[str, tuple[Part, ...]] = {
    "UPDATE": tuple(Part),
    "MOMENTUM": (Part.MOMENTS, Part.GRADIENTS),
    "APPLY": (Part.WEIGHTS, Part.LOW_BITS),
}
"""Step of an update -> the parts of state that it reads or changes."""


class Updates:
    """Makes the updates of one schedule. Adds the slots of streamed updates to `buffers`."""

    def __init__(
        self,
        model: ModelSpec,
        numerics: Numerics,
        policy: Policy,
        buffers: dict[str, Buffer],
        gradients: Gradients,
        state: StateBuffers,
        rank: int = 0,
    ) -> None:
        self.streamed = policy.updates_streamed(model)
        """Units that are updated on the device with their state in host memory."""
        self._model, self._numerics, self._policy = model, numerics, policy
        self._buffers, self._gradients, self._state = buffers, gradients, state
        self.most_pieces = 2 * MOST_PIECES
        """The most pieces in which a unit's state on the disk moves. If a caller sets fewer than `disk_pieces` gives,
        the schedule can be replayed, but not executed."""
        self._turns = {STREAMED: 0, THROUGH_HOST: 0}
        """Route -> number of its pieces so far, which take turns in its slots."""
        self._directions = Directions(model, numerics, policy, buffers, rank)

    def ops(self, unit: int, before: str, after: str, place: Access | None = None) -> list[Op]:
        """The update of a unit from version `before` to `after`. place: where fresh weights are needed on the
        device, if anywhere."""
        trained = layout_of(self._model.units[unit]).trained
        if self._directions.groups(unit):
            return self._ops_in_steps(unit, (before, after), place)
        if unit in self.streamed:
            pieces, route = streamed_pieces(trained, self._numerics, self._policy), STREAMED
        elif self._state.staged_arrays(unit):
            pieces, route = self._disk_pieces(unit), THROUGH_HOST
        else:
            arrays = arrays_of(trained, self._numerics)
            tier = self._tier(unit)
            old, new = (
                [self._home(unit, array, (0, trained.own_size), version, tier) for array in arrays]
                for version in (before, after)
            )
            return [self._update("compute" if tier == "device" else "host", unit, -1, old, new[:-1])]
        ops: list[Op] = []
        for number, piece in enumerate(pieces):
            ops += self._piece(route, unit, number, piece, (before, after), place)
        return ops

    def fetches_for(self, unit: int) -> bool:
        """Whether the update of a unit with state in host memory uses the bus to the device."""
        return not self._policy.shares_memory and bool(self._directions.groups(unit))

    def _ops_in_steps(self, unit: int, versions: tuple[str, str], place: Access | None) -> list[Op]:
        """The update of a unit with matrices that are updated whole (`directions`)."""
        trained = layout_of(self._model.units[unit]).trained
        route = ON_DEVICE if self._tier(unit) == "device" else THROUGH_HOST
        placement, groups = self._policy.placement(unit), self._directions.groups(unit)
        pieces = pieces_in_steps(trained, groups, self._numerics, self._policy, placement)
        if len(pieces) > self.most_pieces:
            pieces = merged_within(pieces, [0, *(start for start, _ in groups)])
        ops: list[Op] = []
        for number, piece in enumerate(pieces):
            if piece[1] <= trained.own_matrices_start:
                ops += self._piece(route, unit, number, piece, versions, place)
        for step, number in self._directions.order(unit, pieces):
            if step == "ORTHOGONALIZE":
                ops += self._directions.made_orthogonal(unit, number)
            else:
                ops += self._piece(route, unit, number, pieces[number], versions, place, step)
        return ops

    def _piece(
        self,
        route: PieceRoute,
        unit: int,
        number: int,
        piece: Piece,
        versions: tuple[str, str],
        place: Access | None,
        step: Literal["UPDATE", "MOMENTUM", "APPLY"] = "UPDATE",
    ) -> list[Op]:
        """A piece comes to a slot, is updated, and goes home; its arrays that do not pass are updated in place."""
        trained, staged = layout_of(self._model.units[unit]).trained, self._arrays_in_slots(unit)
        all_arrays = arrays_of(trained, self._numerics)
        arrays = [array for array in all_arrays if array.size > piece[0] and array.part in PARTS_OF[step]]
        moved = [index for index, array in enumerate(arrays) if array in staged]
        slot, tier = self._next_slot(route) if moved else "", self._tier(unit)
        old, new = (
            [self._home(unit, array, piece, version, route.home if array in staged else tier) for array in arrays]
            for version in versions
        )
        here, stop = list(old), 0
        for index in moved:
            start = -(-stop // route.alignment) * route.alignment
            stop = start + old[index].stop - old[index].start
            here[index] = Access(slot, start, stop, old[index].content)
        if route is STREAMED:
            declare(self._buffers, Buffer(slot, "device", stop, Use.UPDATE_SLOTS))
        fresh = [access.holding(home.content) for access, home in zip(here, new, strict=True)]
        gradient = len(arrays) - 1 if arrays[-1].part is Part.GRADIENTS else len(arrays)
        lands = route is THROUGH_HOST and versions[0] == "" and gradient in moved
        coming = moved[:-1] if lands else moved
        homes, places = (tuple(accesses[index] for index in coming) for accesses in (old, here))
        ops = [Op(*route.inward, unit, shard=number, reads=homes, writes=places)] if coming else []
        ops += self._landed(unit, number, piece, here[-1]) if lands else []
        if step == "UPDATE":
            share = touched_nbytes(arrays, piece) / touched_nbytes(all_arrays, (0, trained.own_size))
            ops.append(self._update(route.update, unit, number, here, fresh[:-1], share))
        elif step == "MOMENTUM":
            ops.append(self._momentum(route.update, unit, number, piece, here, fresh[:-1]))
        else:
            ops.append(self._apply(route.update, unit, number, piece, here, fresh))
        if place is not None and step != "MOMENTUM":
            nbytes = arrays[0].nbytes
            target = place.between(place.start + piece[0] * nbytes, place.start + piece[1] * nbytes)
            ops.append(Op(*route.place, unit, shard=number, reads=(fresh[0],), writes=(target,)))
        changed = [index for index in moved if index != gradient]
        places, homes = (tuple(accesses[index] for index in changed) for accesses in (fresh, new))
        return [*ops, Op(*route.outward, unit, shard=number, reads=places, writes=homes)] if changed else ops

    def gradient_out(self, unit: int) -> list[Op]:
        """What follows a complete gradient: copies to where its update reads it, its norm, and the update if that does
        not wait for all norms."""
        staged, waits = self._state.staged_arrays(unit), self._policy.update != "during_backward"
        if not staged or staged[-1].part is not Part.GRADIENTS:
            stream: Stream = "grad" if self._gradients.on_device[unit] else "host"
            norm = Op("NORM", stream, unit, reads=(self._gradients.landed(unit),), writes=(self._state.norm(unit),))
            return [*self._gradients.leave(unit), norm, *([] if waits else self.ops(unit, "", "new"))]
        if not waits:
            return self.ops(unit, "", "new")
        ops: list[Op] = []
        trained, placement = layout_of(self._model.units[unit]).trained, self._policy.placement(unit)
        pieces = gradient_write_pieces(trained, self._numerics, self._policy, placement)
        for number, piece in enumerate(merged(pieces, self.most_pieces)):
            home = self._home(unit, staged[-1], piece, "", "disk")
            here = Access(self._next_slot(THROUGH_HOST), 0, home.stop - home.start, home.content)
            ops += self._landed(unit, number, piece, here)
            ops.append(Op("WRITE", "write", unit, shard=number, reads=(here,), writes=(home,)))
        return ops

    def _disk_pieces(self, unit: int) -> Sequence[Piece]:
        trained = layout_of(self._model.units[unit]).trained
        return merged(disk_pieces(trained, self._numerics, self._policy), self.most_pieces)

    def _landed(self, unit: int, number: int, piece: Piece, place: Access) -> list[Op]:
        """A piece of a complete gradient comes to its slot, and its squares are summed."""
        norm = Op("NORM", "host", unit, shard=number, reads=(place,), writes=(self._state.norm(unit),))
        return [*self._gradients.leave_in_piece(unit, number, piece, place), norm]

    def _next_slot(self, route: PieceRoute) -> str:
        self._turns[route] += 1
        count = SLOTS if route is STREAMED else self._state.ring_slots
        return f"{route.slots}/{self._turns[route] % count}"

    def _arrays_in_slots(self, unit: int) -> Sequence[Array]:
        """The arrays of a unit that pass through slots."""
        if unit not in self.streamed:
            return self._state.staged_arrays(unit)
        arrays = arrays_of(layout_of(self._model.units[unit]).trained, self._numerics)
        return arrays[:-1] if self._gradients.on_device[unit] else arrays

    def _update(
        self, stream: Stream, unit: int, number: int, old: Sequence[Access], new: Sequence[Access], share: float = 1.0
    ) -> Op:
        """UPDATE of a unit, or of a piece with its share of the whole update's price. old: where its arrays are, the
        gradient last; new: what it leaves of the state."""
        *state, gradient = old
        reads, writes = [gradient, *state], [*new, self._freed(unit, gradient)]
        if stream == "grad":
            elements = (gradient.stop - gradient.start) // self._numerics.grad_nbytes
            workspace = CHUNK_NBYTES * min(CHUNK, elements)
            beside = Buffer("device/update_workspace", "device", workspace, Use.UPDATE_WORKSPACE, arena=False)
            writes.append(Access(declare(self._buffers, beside), 0, workspace, Scratch("update")))
        if gradient.content == Gradient(unit):  # of this step, not of the last
            reads.append(self._state.norm(unit))
        return Op("UPDATE", stream, unit, shard=number, reads=tuple(reads), writes=tuple(writes), share=share)

    def _momentum(
        self, stream: Stream, unit: int, number: int, piece: Piece, old: Sequence[Access], new: Sequence[Access]
    ) -> Op:
        """MOMENTUM of a piece; accesses as in `_update`. A gradient in memory is freed once it cannot be needed again
        after an interruption: at once during the backward pass, else behind the last APPLY."""
        *state, gradient = old
        reads, writes = [gradient, *state], [*new, *self._directions.of(unit, piece, orthogonal=False)]
        is_new = gradient.content == Gradient(unit)
        if is_new:
            reads.append(self._state.norm(unit))
        if is_new or gradient.buffer.startswith(RING):
            writes.append(self._freed(unit, gradient))
        return Op("MOMENTUM", stream, unit, shard=number, reads=tuple(reads), writes=tuple(writes))

    def _apply(
        self, stream: Stream, unit: int, number: int, piece: Piece, old: Sequence[Access], new: Sequence[Access]
    ) -> Op:
        """APPLY of a piece. old, new: where its weights and low bits are, before and after."""
        trained, writes = layout_of(self._model.units[unit]).trained, [*new]
        reads = [*self._directions.of(unit, piece, orthogonal=True), *old]
        waited = self._policy.update != "during_backward" and self._policy.placement(unit).gradients != "disk"
        if piece[1] == trained.own_size and waited:
            writes.append(self._gradients.landed(unit).holding(USED))
        return Op("APPLY", stream, unit, shard=number, reads=tuple(reads), writes=tuple(writes))

    def _freed(self, unit: int, gradient: Access) -> Access:
        """What is free once a part of a gradient has been used: with its last part, all of its memory."""
        if not gradient.buffer.startswith((RING, STREAMED.slots)):
            landed = self._gradients.landed(unit)
            gradient = landed if gradient.stop == landed.stop else gradient
        return gradient.holding(USED)

    def _tier(self, unit: int) -> Tier:
        """Where state is that passes through no slots."""
        return "device" if self._policy.placement(unit).on_device else "host"

    def _home(self, unit: int, array: Array, piece: Piece, version: str, tier: Tier) -> Access:
        """Where a piece of an array is between steps, or waits for the update. The last piece has the frozen weights,
        too, as far as its tier writes them: so each part has one version."""
        start, stop = [array.start + min(element, array.size) * array.nbytes for element in piece]
        if array.part is Part.GRADIENTS and tier != "disk":
            landed = self._gradients.landed(unit, version)
            return landed.between(landed.start + start, landed.start + stop)
        if array.part is Part.WEIGHTS and piece[1] == layout_of(self._model.units[unit]).trained.own_size:
            stop = self._state.weights_stop(unit, tier)
        return Access(state_name(tier, array.part, unit), start, stop, CONTENT_OF[array.part](unit, version))


def with_early_reads(ops: Sequence[Op]) -> list[Op]:
    """The ops with each READ of a piece as soon as its slot is free, so that the disk works ahead of the updates."""
    if not any(op.kind == "READ" for op in ops):
        return list(ops)
    before: dict[int, list[Op]] = defaultdict(list)
    free: dict[str, int] = {}
    earliest = 0
    for index, op in enumerate(ops):
        if op.kind in CALLS:
            continue
        slots = {access.buffer for access in (*op.reads, *op.writes) if access.buffer.startswith(RING)}
        if op.kind == "READ" and slots:
            earliest = max([earliest, *(free.get(slot, 0) for slot in slots)])
            before[earliest].append(op)
        free.update(dict.fromkeys(slots, index + 1))
    placed: list[Op] = []
    for index, op in enumerate(ops):
        placed += before[index]
        if op.kind != "READ" or not op.writes[0].buffer.startswith(RING):
            placed.append(op)
    return placed
