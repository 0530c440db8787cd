"""Ops of the optimizer pass: the norm of a gradient, and the update of a unit or of a piece of it."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from megatrain.engine.context import OpContext
from megatrain.engine.reports import finite_loss
from megatrain.engine.step_state import DTYPE_OF_NBYTES, StepState, bytes_of
from megatrain.memory import Lease
from megatrain.schedule import Op
from megatrain.schedule.contents import PART_OF
from megatrain.schedule.passes.pieces import Piece, disk_pieces, streamed_pieces
from megatrain.spec import Part


def norm(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """NORM: hand a complete gradient, or a piece of one, to its receiver, before that is updated with it."""
    assert step.receiver is not None
    if op.stream == "host" and not step.loss_is_finite and context.world.size == 1:  # several ranks check at the end
        finite_loss(step)  # before any gradient of this step is used
        step.loss_is_finite = True
    elements = _elements(context, op) if op.shard >= 0 else None
    step.receiver.norm(op.unit, _gradient_of(context, op, lease), step.loss, elements)


def update(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """UPDATE: let the receiver of gradients update a unit, or a piece of it, with its gradient."""
    assert step.receiver is not None
    parts = defaultdict[Part, list[Tensor]](list)
    for access in op.writes:
        if (part := PART_OF.get(type(access.content))) is not None:
            parts[part].append(bytes_of(lease, access))
    elements = _elements(context, op) if op.shard >= 0 else None
    step.receiver.update(op.unit, _gradient_of(context, op, lease), parts, elements)
    context.pool.unsaved.changed(op, lease, step.schedule.takes_home.get((op.unit, op.shard)))
    buffer, trained = step.schedule.buffers[op.reads[0].buffer], context.layouts[op.unit].trained
    is_last = elements is None or elements[1] == trained.own_size
    if is_last and buffer.tier == "host" and buffer.unit == op.unit:  # not shared with units whose gradient may follow
        context.pool.discard(buffer.name)


def _elements(context: OpContext, op: Op) -> Piece:
    """The piece of a unit that an op is about."""
    cut = disk_pieces if op.stream == "host" else streamed_pieces
    return cut(context.layouts[op.unit].trained, context.numerics, context.policy)[op.shard]


def _gradient_of(context: OpContext, op: Op, lease: Lease) -> Tensor:
    """The flat gradient that a NORM or UPDATE reads."""
    return bytes_of(lease, op.reads[0]).view(DTYPE_OF_NBYTES[context.numerics.grad_nbytes])
