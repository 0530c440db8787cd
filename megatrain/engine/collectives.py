"""Ops that all ranks do together: assembling weights, adding gradients up, waiting for one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.engine.context import OpContext
from megatrain.engine.step_state import DTYPE_OF_NBYTES, StepState, bytes_of
from megatrain.memory import Lease
from megatrain.schedule import Access, Op
from megatrain.schedule.contents import RETURNED, Direction
from megatrain.schedule.passes.pieces import groups_of
from megatrain.spec.layout import Layout, MatrixGroup, Ownership


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


class _Places(NamedTuple):
    """Where the elements of a group of matrices are: in the parts that ranks own of it, and in the shares of whole
    matrices that they make orthogonal. In bytes."""

    trained: Layout
    group: MatrixGroup
    nbytes: int
    """Of an element."""

    def owned(self, rank: Ownership, share: MatrixGroup) -> tuple[int, int]:
        """Start and stop of what a rank owns of a share, in its part of the group."""
        first, start, stop = (rank.before(self.trained, at) for at in (self.group.start, share.start, share.stop))
        return (start - first) * self.nbytes, (stop - first) * self.nbytes

    def shared(self, rank: Ownership, part: Tensor, share: MatrixGroup, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What a rank owns of a share, piece by piece: in `part`, which has nothing else, and in the whole share."""
        pieces, at = [], 0
        for start, stop, _ in rank.within(self.trained, share.start, share.stop):
            first, size = (start - share.start) * self.nbytes, (stop - start) * self.nbytes
            pieces.append((part[at : at + size], whole[first : first + size]))
            at += size
        return pieces


def all_to_all(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """ALLTOALL: send this rank's parts of matrices to the ranks that make them orthogonal, or these matrices back."""
    trained, world = context.layouts[op.unit].trained, context.world
    group, ranks = groups_of(trained, context.spec)[op.shard], context.owned.all_ranks(trained)
    places, shares = _Places(trained, group, context.spec.newton_schulz.nbytes), group.shares(world.size)
    me, share = ranks[world.rank], shares[world.rank]
    given, made, beside = ([bytes_of(lease, access) for access in side] for side in _sides(op))
    is_back = op.writes[-1].content == RETURNED
    mine, whole = (side[0] if side else beside[0][:0] for side in ((made, given) if is_back else (given, made)))
    if op.stream == "shared":
        beside.insert(world.rank, whole if is_back else mine)
        world.meet()
        for rank, rank_share, memory in zip(ranks, shares, beside, strict=True):
            if is_back:
                _copy(places.shared(me, mine[slice(*places.owned(me, rank_share))], rank_share, memory), back=True)
            else:
                _copy(places.shared(rank, memory[slice(*places.owned(rank, share))], share, whole))
        world.meet()
        return
    come = [stop - start for start, stop in (places.owned(rank, share) for rank in ranks)]
    go = [stop - start for start, stop in (places.owned(me, rank_share) for rank_share in shares)]
    staging = beside[0][: sum(come)]
    pieces = [
        piece
        for rank, part in zip(ranks, staging.split(come), strict=True)
        for piece in places.shared(rank, part, share, whole)
    ]
    if is_back:
        _copy(pieces, back=True)
        world.all_to_all(mine, staging, go, come)
    else:
        world.all_to_all(staging, mine, come, go)
        _copy(pieces)


def _sides(op: Op) -> tuple[Sequence[Access], ...]:
    """What an ALLTOALL reads and writes of directions, and what it uses beside them."""
    made = [access for access in op.writes if type(access.content) is Direction]
    return op.reads, made, op.writes[len(made) :]


def _copy(pieces: Sequence[tuple[Tensor, Tensor]], *, back: bool = False) -> None:
    """Copy parts to their places in matrices, or back."""
    for part, whole in pieces:
        (part if back else whole).copy_(whole if back else part)


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
