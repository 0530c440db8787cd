"""Ops of the optimizer pass: the norm of a gradient, and the update of a unit or of a piece of it, in one step or, with
matrices that are updated whole, in three."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from megatrain.engine.context import OpContext
from megatrain.engine.reports import finite_loss
from megatrain.engine.step_state import DTYPE_OF_NBYTES, StepState, bytes_of
from megatrain.memory import Lease
from megatrain.schedule import USED, Access, Op
from megatrain.schedule.contents import PART_OF, Direction, Moments
from megatrain.schedule.passes.directions import elements_of
from megatrain.schedule.passes.pieces import Piece, disk_pieces, groups_of, own_groups, streamed_pieces
from megatrain.schedule.passes.state_buffers import gradient_write_pieces, pieces_in_steps
from megatrain.spec import Part


def norm(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """NORM: hand a complete gradient, or a piece of one, to its receiver, before that is updated with it."""
    assert step.receiver is not None
    if op.stream == "host" and not step.loss_is_finite and context.world.size == 1:  # several ranks check at the end
        finite_loss(step)  # before any gradient of this step is used
        step.loss_is_finite = True
    elements = _elements(context, op) if op.shard >= 0 else None
    step.receiver.norm(op.unit, _gradient_of(context, op, lease), step.loss, elements)


def momentum(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """MOMENTUM: let the receiver of gradients change the momentum of a piece, and write its direction."""
    assert step.receiver is not None
    moments = [bytes_of(lease, access) for access in op.writes if type(access.content) is Moments]
    elements, directions = _elements(context, op), _directions(context, op.writes, lease)
    step.receiver.momentum(op.unit, _gradient_of(context, op, lease), moments, directions, elements)
    _changed(context, step, op, lease)


def orthogonalize(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """ORTHOGONALIZE: let the receiver of gradients make the direction of a group of matrices orthogonal."""
    assert step.receiver is not None
    direction = bytes_of(lease, op.reads[0]).view(DTYPE_OF_NBYTES[context.spec.newton_schulz.nbytes])
    group = groups_of(context.layouts[op.unit].trained, context.spec)[op.shard]
    step.receiver.orthogonalize(op.unit, group.shares(context.world.size)[context.world.rank], direction)


def apply(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """APPLY: let the receiver of gradients change the weights of a piece by its direction."""
    assert step.receiver is not None
    elements, directions = _elements(context, op), _directions(context, op.reads, lease)
    step.receiver.apply(op.unit, directions, _parts(op, lease), elements)
    _changed(context, step, op, lease)
    for access in op.writes:
        if access.content == USED:
            _discard(context, step, op, access.buffer)


def update(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """UPDATE: let the receiver of gradients update a unit, or a piece of it, with its gradient."""
    assert step.receiver is not None
    elements = _elements(context, op) if op.shard >= 0 else None
    step.receiver.update(op.unit, _gradient_of(context, op, lease), _parts(op, lease), elements)
    _changed(context, step, op, lease)
    if elements is None or elements[1] == context.layouts[op.unit].trained.own_size:
        _discard(context, step, op, op.reads[0].buffer)


def _parts(op: Op, lease: Lease) -> Mapping[Part, Sequence[Tensor]]:
    """The arrays of masters and moments that an op changes."""
    parts = defaultdict[Part, list[Tensor]](list)
    for access in op.writes:
        if (part := PART_OF.get(type(access.content))) is not None:
            parts[part].append(bytes_of(lease, access))
    return parts


def _changed(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """Note what is lost unless it is taken home."""
    context.pool.unsaved.changed(op, lease, step.schedule.takes_home.get((op.kind, op.unit, op.shard)))


def _discard(context: OpContext, step: StepState, op: Op, name: str) -> None:
    """A gradient has been used up: free its memory, unless it is shared with units whose gradient may follow."""
    buffer = step.schedule.buffers[name]
    if buffer.tier == "host" and buffer.unit == op.unit:
        context.pool.discard(name)


def _directions(context: OpContext, accesses: Sequence[Access], lease: Lease) -> list[tuple[Piece, Tensor]]:
    """(elements, flat direction) of the directions that an op reads or writes."""
    nbytes, directions = context.spec.newton_schulz.nbytes, list[tuple[Piece, Tensor]]()
    for access in accesses:
        if type(access.content) is Direction:
            groups = own_groups(context.layouts[access.content.unit].trained, context.spec, context.owned)
            values = bytes_of(lease, access).view(DTYPE_OF_NBYTES[nbytes])
            directions.append((elements_of(groups, access, nbytes), values))
    return directions


def _elements(context: OpContext, op: Op) -> Piece:
    """The piece of a unit that an op is about."""
    trained, numerics, policy = context.layouts[op.unit].trained, context.numerics, context.policy
    if op.kind == "NORM" and policy.update == "next_forward":
        return gradient_write_pieces(trained, numerics, policy, policy.placement(op.unit))[op.shard]
    if trained.matrices_start < trained.size and op.kind != "NORM":
        groups = own_groups(trained, context.spec, context.owned)
        return pieces_in_steps(trained, groups, numerics, policy, policy.placement(op.unit))[op.shard]
    cut = disk_pieces if op.stream == "host" else streamed_pieces
    return cut(trained, numerics, policy)[op.shard]


def _gradient_of(context: OpContext, op: Op, lease: Lease) -> Tensor:
    """The flat gradient that a NORM or UPDATE reads."""
    return bytes_of(lease, op.reads[0]).view(DTYPE_OF_NBYTES[context.numerics.grad_nbytes])
