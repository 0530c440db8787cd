"""Schedules Muon's update of whole matrices: MOMENTUM, ORTHOGONALIZE and APPLY, and the buffers between them.

An optimizer such as Muon moves a matrix in a direction that depends on all of it. Only directions are whole; everything
else is updated piece by piece, wherever it is:

    MOMENTUM        a piece: reads gradient and momentum, changes the momentum, and writes its part of the direction
    ORTHOGONALIZE   a group of whole matrices: makes their directions orthogonal, in place, on the device
    APPLY           a piece: reads the direction, and changes the weights and their low bits

If the state is not on the device, MOMENTUM and APPLY run on the host. Directions cross the bus and come back, with less
than a quarter of the bytes of all of the state. While one group is on the device, the host prepares the next. A piece
of state on the disk may reach into several groups.

Of several ranks each has a part of every matrix. Each makes some matrices of a group orthogonal, whole and for all
ranks (`MatrixGroup.shares`): an ALLTOALL sends it their parts, another sends them back. So a matrix is made orthogonal
once in the world, and a rank sends and receives twice its part of the directions, where to gather them would take as
many times that as there are ranks. Parts are sent over the link, between devices; with shared delivery, ranks read them
in each other's host memory, and matrices cross the bus whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from megatrain.schedule.contents import RETURNED, SENT, Direction, Scratch
from megatrain.schedule.ops import Access, Buffer, Op, Stream, Use, declare
from megatrain.schedule.passes.collectives import LINK_STAGING, peer
from megatrain.schedule.passes.pieces import Piece, Turn, ends_of, groups_of, in_steps, own_groups, within_groups
from megatrain.schedule.passes.state_buffers import (
    DIRECTION_SLOTS,
    direction_slots,
    directions_name,
    groups_ahead,
    largest_share,
    staged_arrays,
    whole_matrices_name,
    whole_matrices_slots,
)
from megatrain.spec import ModelSpec, Numerics, Policy, Tier
from megatrain.spec.layout import Matrices, MatrixGroup, Ownership, layout_of


def elements_of(groups: Sequence[Piece], access: Access, nbytes: int) -> Piece:
    """The elements of a unit, of those that a rank owns, whose direction an access is about. groups: as `own_groups`
    returns them; nbytes: of an element of a direction."""
    assert isinstance(access.content, Direction)
    first, _ = groups[access.content.group]
    return first + access.start // nbytes, first + access.stop // nbytes


def workspace_numel(stack: Matrices) -> int:
    """Elements of the workspace in which matrices of one shape are made orthogonal, one after the other: two products
    as wide as the smaller side, and the next iterate (`train.torch_muon`)."""
    least = min(stack.rows, stack.columns)
    return 2 * least * least + stack.rows * stack.columns


Inner = Callable[[Sequence[Access]], list[Op]]
"""What is done with the direction of a group, or with some matrices of it, while it is elsewhere. It is one access, or
none if a rank has no part in it."""


class Directions:
    """Gives the directions of one schedule, of one rank, their slots, which it adds to `buffers`."""

    def __init__(
        self, model: ModelSpec, numerics: Numerics, policy: Policy, buffers: dict[str, Buffer], rank: int
    ) -> None:
        self._model, self._policy, self._buffers, self._rank = model, policy, buffers, rank
        self._numerics = numerics
        self._owned = Ownership.of(rank, numerics, policy)
        self._nbytes = model.newton_schulz.nbytes
        self._host_slots, self._host_nbytes = direction_slots(model, numerics, policy)
        _, self._whole_nbytes = whole_matrices_slots(model, policy)
        self._turns: dict[Tier, int] = {"host": 0, "device": 0}
        """Groups so far that began in a tier, which take turns in its slots."""
        self._made = 0
        """Groups so far that were made orthogonal elsewhere, on the device or by other ranks."""

    def groups(self, unit: int) -> Sequence[Piece]:
        """The elements of each group of a unit that this rank owns; empty if it has no matrices that are updated
        whole."""
        return own_groups(layout_of(self._model.units[unit]).trained, self._model, self._owned)

    def order(self, unit: int, pieces: Sequence[Piece]) -> Iterator[Turn]:
        """See `in_steps`. Once it has ended, the slots of the unit are given up."""
        trained, tier = layout_of(self._model.units[unit]).trained, self._tier(unit)
        alike = bool(staged_arrays(trained, self._numerics, self._policy, self._policy.placement(unit)))
        ends = ends_of(trained, self._model, self._owned, alike=alike)
        yield from in_steps(
            pieces, trained.own_matrices_start, ends, 0 if tier == "device" else groups_ahead(self._policy)
        )
        self._turns[tier] += len(ends)

    def of(self, unit: int, piece: Piece, *, orthogonal: bool) -> list[Access]:
        """Where MOMENTUM leaves the direction of a piece, and APPLY reads it."""
        inside = within_groups(self.groups(unit), piece)
        return [self._at(unit, number, elements, orthogonal=orthogonal) for number, elements in inside]

    def made_orthogonal(self, unit: int, number: int) -> list[Op]:
        """ORTHOGONALIZE of a group, with the copies there and back if its direction crosses the bus, and with what
        other ranks send and get."""
        start, stop = self.groups(unit)[number]
        part = [self._at(unit, number, (start, stop), orthogonal=False)] if start < stop else []
        crosses = self._tier(unit) == "host" and not self._policy.shares_memory
        stream: Stream = "products" if crosses else "compute" if self._tier(unit) == "device" else "host"
        inner: Inner = partial(self._orthogonalize, stream, unit, number)
        copied = partial(self._crossing, unit, number) if crosses else (lambda accesses, within: within(accesses))
        self._made += crosses or self._model.ranks > 1
        if self._model.ranks == 1:
            return copied(part, inner)
        if self._policy.delivery == "shared":
            return self._over_ranks("shared", unit, number, part, lambda whole: copied(whole, inner))
        return copied(part, lambda here: self._over_ranks("link", unit, number, here, inner))

    def _crossing(self, unit: int, number: int, home: Sequence[Access], inner: Inner) -> list[Op]:
        """A direction in host memory, if there is one, comes to the device and goes back."""
        if not home:
            return inner(home)
        (before,) = home
        nbytes = self._widest(unit, number) if self._policy.delivery == "gather" else self._longest(unit, number)
        slot = f"device/direction_slots/{self._made % DIRECTION_SLOTS}"
        declare(self._buffers, Buffer(slot, "device", nbytes, Use.DIRECTIONS))
        here = Access(slot, 0, before.stop - before.start, before.content)
        after = Direction(unit, number, orthogonal=True)
        return [
            Op("RELOAD", "fetch", unit, shard=number, reads=(before,), writes=(here,)),
            *inner([here]),
            Op("OFFLOAD", "grad", unit, shard=number, reads=(here.holding(after),), writes=(before.holding(after),)),
        ]

    def _over_ranks(self, stream: Stream, unit: int, number: int, part: Sequence[Access], inner: Inner) -> list[Op]:
        """All ranks send the parts of matrices to those that make them orthogonal, which send them back."""
        tier: Tier = "host" if stream == "shared" else "device"
        share = self._group(unit, number).shares(self._model.ranks)[self._rank]
        name, longest = whole_matrices_name(tier, self._made), self._longest(unit, number)
        declare(self._buffers, Buffer(name, tier, self._whole_nbytes, Use.DIRECTIONS))
        before, after = Direction(unit, number), Direction(unit, number, orthogonal=True)
        whole = [Access(name, 0, (share.stop - share.start) * self._nbytes, before)] if share.stacks else []
        slot = self._at(unit, number, (0, 0), orthogonal=False).buffer
        sent = tuple(part), (*whole, *self._passing(stream, slot, longest, SENT))
        made, taken = ([each.holding(after) for each in side] for side in (whole, part))
        returned = tuple(made), (*taken, *self._passing(stream, name, longest, RETURNED))
        first, last = (
            Op("ALLTOALL", stream, unit, shard=number, reads=reads, writes=writes) for reads, writes in (sent, returned)
        )
        return [first, *inner(whole), last]

    def _passing(self, stream: Stream, slot: str, longest: int, content: Scratch) -> list[Access]:
        """What an ALLTOALL uses besides: memory on the device; or the slots of the other ranks that it reads."""
        if stream == "link":
            staging = Buffer(LINK_STAGING, "device", longest, Use.LINK_STAGING)
            return [Access(declare(self._buffers, staging), 0, longest, content)]
        others = (rank for rank in range(self._model.ranks) if rank != self._rank)
        return [Access(peer(self._buffers, rank, slot), 0, self._buffers[slot].nbytes, content) for rank in others]

    def _orthogonalize(self, stream: Stream, unit: int, number: int, places: Sequence[Access]) -> list[Op]:
        tier: Tier = "host" if stream == "host" else "device"
        nbytes = self._nbytes * max(workspace_numel(stack) for stack in self._group(unit, number).stacks)
        ops = []
        for place in places:
            name = f"{tier}/direction_workspace/{stream}"
            beside = Buffer(name, tier, nbytes, Use.UPDATE_WORKSPACE, arena=False, crosses=False)
            workspace = Access(declare(self._buffers, beside), 0, nbytes, Scratch("direction"))
            writes = place.holding(Direction(unit, number, orthogonal=True)), workspace
            ops.append(Op("ORTHOGONALIZE", stream, unit, shard=number, reads=(place,), writes=writes))
        return ops

    def _group(self, unit: int, number: int) -> MatrixGroup:
        return groups_of(layout_of(self._model.units[unit]).trained, self._model)[number]

    def _tier(self, unit: int) -> Tier:
        return "device" if self._policy.placement(unit).on_device else "host"

    def _widest(self, unit: int, number: int) -> int:
        """Bytes of a group's direction that any rank has."""
        trained = layout_of(self._model.units[unit]).trained
        of_ranks = (own_groups(trained, self._model, owned)[number] for owned in self._owned.all_ranks(trained))
        return max(stop - start for start, stop in of_ranks) * self._nbytes

    def _longest(self, unit: int, number: int) -> int:
        """Bytes of the matrices of a group that any rank makes orthogonal."""
        return largest_share(self._group(unit, number), self._model)

    def _at(self, unit: int, number: int, elements: Piece, *, orthogonal: bool) -> Access:
        """Where these elements of a group's direction are before it crosses the bus, or after it has come back."""
        (first, _), tier = self.groups(unit)[number], self._tier(unit)
        slots = 1 if tier == "device" else self._host_slots
        name = directions_name(tier, (self._turns[tier] + number) % slots)
        crosses = tier == "host" and not self._policy.shares_memory
        whole = self._host_nbytes if tier == "host" else self._widest(unit, number)
        declare(self._buffers, Buffer(name, tier, whole, Use.DIRECTIONS, crosses=crosses))
        start, stop = ((element - first) * self._nbytes for element in elements)
        return Access(name, start, stop, Direction(unit, number, orthogonal))
