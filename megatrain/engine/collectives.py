"""Ops that all ranks do together: assembling weights, adding gradients up, waiting for one another."""

from __future__ import annotations

import torch

from megatrain.engine.context import OpContext
from megatrain.engine.step_state import DTYPE_OF_NBYTES, StepState, bytes_of
from megatrain.memory import Lease
from megatrain.schedule import Op


def gather(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """GATHER: assemble a shard of weights from the parts that the ranks own."""
    (part,), (whole,) = op.reads, op.writes
    context.world.gather(bytes_of(lease, whole), bytes_of(lease, part))


def barrier(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """BARRIER: wait until all ranks have updated their parts of a unit."""
    context.world.meet()


def reduce(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """REDUCE: sum over ranks this rank's part of a shard of a gradient, to the dtype that crosses the bus."""
    (terms,), (part, *others) = op.reads, op.writes
    target = bytes_of(lease, part).view(DTYPE_OF_NBYTES[context.numerics.grad_nbytes])
    sent, *received = (bytes_of(lease, access).view(torch.float32) for access in (terms, *others))
    if op.stream == "shared":
        context.world.meet()
        received.insert(context.world.rank, sent)
        largest = context.world.reduce_there(target, received)
        context.world.meet()
    else:
        largest = context.device.landing(context.world.reduce(target, received[0], sent))
    step.largest.setdefault(op.unit, []).append(largest)
    if context.policy.update == "during_backward" and len(step.largest[op.unit]) == step.schedule.reduces[op.unit]:
        _tell_present(context, step, op)


def _tell_present(context: OpContext, step: StepState, op: Op) -> None:
    """Tell the receiver which of a unit's parameters got a gradient on any rank. Called after the unit's last REDUCE,
    on its stream."""
    names = [field.name for field in context.layouts[op.unit].trained.fields]
    mine = torch.tensor([name not in step.absent[op.unit] for name in names], dtype=torch.uint8)
    if op.stream == "shared":
        flags = on_host = context.world.together(mine).amax(dim=0)
    else:
        (sent,) = context.device.staged([mine])
        device = context.device.torch_device
        whole = torch.empty(context.world.size, len(names), dtype=torch.uint8, device=device)
        context.world.gather(whole.view(-1), sent.to(device, non_blocking=True))
        flags = whole.amax(dim=0)
        on_host = context.device.landing(flags)
    assert step.receiver is not None
    step.receiver.present(op.unit, flags, on_host)
