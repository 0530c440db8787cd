"""Directions of matrices that are updated whole: their slots, and the order of the three steps of such an update.

An optimizer such as Muon moves a matrix in a direction that depends on all of it. Only directions are whole; everything
else is updated piece by piece, wherever it is:

    MOMENTUM        a piece: reads gradient and momentum, changes the momentum, and writes its part of the direction
    ORTHOGONALIZE   a group of whole matrices: makes their directions orthogonal, in place, on the device
    APPLY           a piece: reads the direction, and changes the weights and their low bits

If the state is not on the device, MOMENTUM and APPLY run on the host. Directions cross the bus and come back, with less
than a quarter of the bytes of all of the state. While one group is on the device, the host prepares the next. A piece
of state on the disk may reach into several groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatrain.schedule.contents import Direction, Scratch
from megatrain.schedule.ops import Access, Buffer, Op, Stream, Use, declare
from megatrain.schedule.passes.pieces import Piece, Turn, groups_of, in_steps, within_groups
from megatrain.schedule.passes.state_buffers import direction_slots, groups_ahead
from megatrain.spec import ModelSpec, Numerics, Policy, Tier
from megatrain.spec.layout import Matrices, MatrixGroup, layout_of

DEVICE_SLOTS = 2
"""Slots on the device for directions that cross the bus: one is filled while the other is made orthogonal or leaves."""


def elements_of(groups: Sequence[MatrixGroup], access: Access, nbytes: int) -> Piece:
    """The elements of a unit whose direction an access is about. nbytes: of an element of a direction."""
    assert isinstance(access.content, Direction)
    first = groups[access.content.group].start
    return first + access.start // nbytes, first + access.stop // nbytes


def workspace_numel(stack: Matrices) -> int:
    """Elements of the workspace in which matrices of one shape are made orthogonal, one after the other: two products
    as wide as the smaller side, and the next iterate (`train.device_muon`)."""
    least = min(stack.rows, stack.columns)
    return 2 * least * least + stack.rows * stack.columns


class Directions:
    """Gives the directions of one schedule their slots, which it adds to `buffers`."""

    def __init__(self, model: ModelSpec, numerics: Numerics, policy: Policy, buffers: dict[str, Buffer]) -> None:
        self._model, self._policy, self._buffers = model, policy, buffers
        self._nbytes = model.newton_schulz.nbytes
        self._host_slots, self._host_nbytes = direction_slots(model, numerics, policy)
        self._turns: dict[Tier, int] = {"host": 0, "device": 0}
        """Groups so far that began in a tier, which take turns in its slots."""
        self._crossed = 0
        """Groups so far that crossed the bus."""

    def groups(self, unit: int) -> Sequence[MatrixGroup]:
        """The groups of a unit; empty if it has no matrices that are updated whole."""
        return groups_of(layout_of(self._model.units[unit]).trained, self._model)

    def order(self, unit: int, pieces: Sequence[Piece]) -> Iterator[Turn]:
        """See `in_steps`. Once it has ended, the slots of the unit are given up."""
        groups, tier = self.groups(unit), self._tier(unit)
        yield from in_steps(pieces, groups, 0 if tier == "device" else groups_ahead(self._policy))
        self._turns[tier] += len(groups)

    def of(self, unit: int, piece: Piece, *, orthogonal: bool) -> list[Access]:
        """Where MOMENTUM leaves the direction of a piece, and APPLY reads it."""
        inside = within_groups(self.groups(unit), piece)
        return [self._at(unit, number, elements, orthogonal=orthogonal) for number, elements in inside]

    def made_orthogonal(self, unit: int, number: int) -> list[Op]:
        """ORTHOGONALIZE of a group, with the copies there and back if its direction crosses the bus."""
        group = self.groups(unit)[number]
        before, after = (
            self._at(unit, number, (group.start, group.stop), orthogonal=orthogonal) for orthogonal in (False, True)
        )
        if self._tier(unit) == "device" or self._policy.shares_memory:
            return [self._orthogonalize("compute" if self._tier(unit) == "device" else "host", unit, number, before)]
        slot = f"device/direction_slots/{self._crossed % DEVICE_SLOTS}"
        self._crossed += 1
        declare(self._buffers, Buffer(slot, "device", before.stop, Use.DIRECTIONS))
        crossed = before._replace(buffer=slot)
        return [
            Op("RELOAD", "fetch", unit, shard=number, reads=(before,), writes=(crossed,)),
            self._orthogonalize("products", unit, number, crossed),
            Op("OFFLOAD", "grad", unit, shard=number, reads=(crossed.holding(after.content),), writes=(after,)),
        ]

    def _orthogonalize(self, stream: Stream, unit: int, number: int, place: Access) -> Op:
        tier: Tier = "host" if stream == "host" else "device"
        nbytes = self._nbytes * max(workspace_numel(stack) for stack in self.groups(unit)[number].stacks)
        name = f"{tier}/direction_workspace/{stream}"
        beside = Buffer(name, tier, nbytes, Use.UPDATE_WORKSPACE, arena=False, crosses=False)
        workspace = Access(declare(self._buffers, beside), 0, nbytes, Scratch("direction"))
        writes = place.holding(Direction(unit, number, orthogonal=True)), workspace
        return Op("ORTHOGONALIZE", stream, unit, shard=number, reads=(place,), writes=writes)

    def _tier(self, unit: int) -> Tier:
        return "device" if self._policy.placement(unit).on_device else "host"

    def _at(self, unit: int, number: int, elements: Piece, *, orthogonal: bool) -> Access:
        """Where these elements of a group's direction are before it crosses the bus, or after it has come back."""
        group, tier = self.groups(unit)[number], self._tier(unit)
        slots = 1 if tier == "device" else self._host_slots
        name = f"{tier}/directions/{(self._turns[tier] + number) % slots}"
        crosses = tier == "host" and not self._policy.shares_memory
        whole = self._host_nbytes if tier == "host" else (group.stop - group.start) * self._nbytes
        declare(self._buffers, Buffer(name, tier, whole, Use.DIRECTIONS, crosses=crosses))
        start, stop = ((element - group.start) * self._nbytes for element in elements)
        return Access(name, start, stop, Direction(unit, number, orthogonal))
