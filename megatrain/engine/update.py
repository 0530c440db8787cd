"""Ops of the optimizer pass: the norm of a gradient, and the update of a unit or of a piece of it."""

from __future__ import annotations

from torch import Tensor

from megatrain.engine.context import OpContext
from megatrain.engine.reports import finite_loss
from megatrain.engine.step_state import DTYPE_OF_NBYTES, StepState, bytes_of
from megatrain.memory import Lease
from megatrain.schedule import Op
from megatrain.schedule.contents import PART_OF
from megatrain.schedule.passes.streamed_updates import piece_of


def norm(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """NORM: hand a complete gradient to its receiver, before anything is updated with it."""
    assert step.receiver is not None
    if op.stream == "host" and not step.loss_is_finite and context.world.size == 1:  # several ranks check at the end
        finite_loss(step)  # before any gradient of this step is used
        step.loss_is_finite = True
    step.receiver.norm(op.unit, _gradient_of(context, op, lease), step.loss)


def update(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """UPDATE: let the receiver of gradients update a unit, or a piece of it, with its gradient."""
    assert step.receiver is not None
    parts = {
        part: bytes_of(lease, access) for access in op.writes if (part := PART_OF.get(type(access.content))) is not None
    }
    gradient = _gradient_of(context, op, lease)
    if op.shard >= 0:
        size = context.layouts[op.unit].trained.own_size
        step.receiver.update(op.unit, gradient, parts, piece_of(size, context.numerics, context.policy, op.shard))
        context.pool.unsaved.changed_in_slots(step.schedule.takes_home[op.unit, op.shard])
        return
    step.receiver.update(op.unit, gradient, parts)
    context.pool.unsaved.changed(op, lease)
    buffer = step.schedule.buffers[op.reads[0].buffer]
    if buffer.tier == "host" and buffer.unit == op.unit:  # not shared with units whose gradient may follow
        context.pool.discard(buffer.name)


def _gradient_of(context: OpContext, op: Op, lease: Lease) -> Tensor:
    """The flat gradient that a NORM or UPDATE reads."""
    return bytes_of(lease, op.reads[0]).view(DTYPE_OF_NBYTES[context.numerics.grad_nbytes])
