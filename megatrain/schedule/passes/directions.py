"""Directions of matrices that are updated whole: their slots, and the order of the three steps of such an update.

An optimizer such as Muon moves a matrix in a direction that depends on all of it. Only directions are whole; everything
else is updated piece by piece, wherever it is:

    MOMENTUM        a piece: reads gradient and momentum, changes the momentum, and writes its part of the direction
    ORTHOGONALIZE   a group of whole matrices: makes their directions orthogonal, in place, on the device
    APPLY           a piece: reads the direction, and changes the weights and their low bits

If the state is not on the device, MOMENTUM and APPLY run on the host, and directions cross the bus and come back, which
is less than a quarter of what all of the state would move. While one group is on the device, the host prepares the next.
A piece of state on the disk may reach into several groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from megatrain.schedule.contents import Direction, Scratch
from megatrain.schedule.ops import Access, Buffer, Op, Stream, Use, declare
from megatrain.schedule.passes.pieces import Piece, disk_pieces
from megatrain.schedule.passes.state_buffers import passing, units_alike
from megatrain.spec import ModelSpec, Numerics, Placement, Policy, Tier
from megatrain.spec.layout import Layout, Matrices, MatrixGroup, layout_of

GROUP_NBYTES = 64 << 20
"""Bytes of the directions of a group, enough for the full speed of the bus; a larger matrix is a group by itself."""

DEVICE_SLOTS = 2
"""Slots on the device for directions that cross the bus: one is filled while the other is made orthogonal or leaves."""

Turn = tuple[Literal["MOMENTUM", "ORTHOGONALIZE", "APPLY"], int]
"""A step of an update, and the number of its piece or group."""


def groups_of(trained: Layout, model: ModelSpec) -> Sequence[MatrixGroup]:
    """The groups of matrices of a unit that are made orthogonal one after the other, whatever the policy is."""
    return trained.matrix_groups(GROUP_NBYTES // model.newton_schulz.nbytes)


def pieces_in_steps(
    trained: Layout, model: ModelSpec, numerics: Numerics, policy: Policy, placement: Placement
) -> Sequence[Piece]:
    """The pieces in which a unit with such matrices is updated: those that pass through host memory; or what is
    updated by elements, and one for each group."""
    if passing(trained, numerics, policy, placement):
        return disk_pieces(trained, numerics, policy)
    by_elements = [(0, trained.matrices_start)] if trained.matrices_start else []
    return [*by_elements, *((group.start, group.stop) for group in groups_of(trained, model))]


def host_directions_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy) -> tuple[int, int]:
    """Number and bytes of the slots of directions in host memory; (0, 0) if there are none."""
    count = nbytes = 0
    for unit, placement, _ in units_alike(model, policy):
        trained = layout_of(model.units[unit]).trained
        if trained.matrices_start < trained.size and not placement.on_device:
            groups, pieces = groups_of(trained, model), pieces_in_steps(trained, model, numerics, policy, placement)
            count = max(count, _most_alive(pieces, groups, _lag(policy)))
            nbytes = max(nbytes, *(group.stop - group.start for group in groups))
    return count, nbytes * model.newton_schulz.nbytes


def _lag(policy: Policy) -> int:
    """How many groups MOMENTUM is ahead of APPLY, beside the one that both are about."""
    return 0 if policy.shares_memory else 1


def in_order(pieces: Sequence[Piece], groups: Sequence[MatrixGroup], lag: int) -> Iterator[Turn]:
    """The steps of an update of these pieces, of which the first may be updated by elements, in an order in which they
    may run one by one."""
    first = next((number for number, (_, stop) in enumerate(pieces) if stop > groups[0].start), len(pieces))
    begun = applied = first
    for number, group in enumerate(groups):
        while begun < len(pieces) and pieces[begun][0] < group.stop:
            yield "MOMENTUM", begun
            begun += 1
        yield "ORTHOGONALIZE", number
        ready = len(groups) if number == len(groups) - 1 else number + 1 - lag
        while applied < begun and ready and pieces[applied][1] <= groups[ready - 1].stop:
            yield "APPLY", applied
            applied += 1


def _most_alive(pieces: Sequence[Piece], groups: Sequence[MatrixGroup], lag: int) -> int:
    """The most groups at a time whose directions are written and not yet applied."""
    most, alive = 0, set[int]()
    for step, number in in_order(pieces, groups, lag):
        if step == "MOMENTUM":
            alive.update(index for index, _ in _inside(groups, pieces[number]))
            most = max(most, len(alive))
        elif step == "APPLY":
            alive -= {index for index, (_, stop) in _inside(groups, pieces[number]) if stop == groups[index].stop}
    return most


def _inside(groups: Sequence[MatrixGroup], piece: Piece) -> Iterator[tuple[int, Piece]]:
    """(number of a group, elements of the piece in it) of the groups into which a piece reaches."""
    for number, group in enumerate(groups):
        start, stop = max(group.start, piece[0]), min(group.stop, piece[1])
        if start < stop:
            yield number, (start, stop)


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
        self._host_slots, _ = host_directions_nbytes(model, numerics, policy)
        self._turns: dict[Tier, int] = {"host": 0, "device": 0}
        """Groups so far that began in a tier, which take turns in its slots."""
        self._crossed = 0
        """Groups so far that crossed the bus."""

    def groups(self, unit: int) -> Sequence[MatrixGroup]:
        """The groups of a unit; empty if it has no matrices that are updated whole."""
        return groups_of(layout_of(self._model.units[unit]).trained, self._model)

    def order(self, unit: int, pieces: Sequence[Piece]) -> Iterator[Turn]:
        """See `in_order`. Once it has ended, the slots of the unit are given up."""
        groups, tier = self.groups(unit), self._tier(unit)
        yield from in_order(pieces, groups, 0 if tier == "device" else _lag(self._policy))
        self._turns[tier] += len(groups)

    def of(self, unit: int, piece: Piece, *, orthogonal: bool) -> list[Access]:
        """Where MOMENTUM leaves the direction of a piece, and APPLY reads it."""
        inside = _inside(self.groups(unit), piece)
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
        there = before._replace(buffer=slot)
        return [
            Op("RELOAD", "fetch", unit, shard=number, reads=(before,), writes=(there,)),
            self._orthogonalize("products", unit, number, there),
            Op("OFFLOAD", "grad", unit, shard=number, reads=(there.holding(after.content),), writes=(after,)),
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
        whole = (group.stop - group.start) * self._nbytes
        declare(self._buffers, Buffer(name, tier, whole, Use.DIRECTIONS, crosses=crosses))
        start, stop = ((element - group.start) * self._nbytes for element in elements)
        return Access(name, start, stop, Direction(unit, number, orthogonal))
