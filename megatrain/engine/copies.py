"""Ops that move bytes between disk and host memory and between host and device."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import torch

from megatrain.engine.context import OpContext
from megatrain.engine.step_state import StepState, bytes_of
from megatrain.memory import Lease
from megatrain.memory.disk import Range
from megatrain.schedule import Op


def read(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """READ: fill host memory from regions of the disk, or one buffer from host memory and, for the rest, the model's
    files.

    Ranges of the disk come together, in one queue: fewer waits for a last block. Raises `DiskError`.
    """
    pool, targets = context.pool, op.writes
    ranges: list[Range] = []
    if len(op.reads) > len(targets):
        (slot,) = targets
        ends = accumulate((source.stop - source.start for source in op.reads), initial=slot.start)
        targets = tuple(slot.between(start, stop) for start, stop in pairwise(ends))
    for source, place in zip(op.reads, targets, strict=True):
        target = bytes_of(lease, place)
        if source.buffer in lease:
            np.copyto(target.numpy(), bytes_of(lease, source).numpy())
        elif (buffer := step.schedule.buffers[source.buffer]).tier == "file":
            assert pool.files is not None
            pool.files.read(source.buffer, source.start, target, pool.label(buffer))
        else:
            ranges.append((source.buffer, target, source.start))
    if ranges:
        pool.disk.read_together(ranges)


def write(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """WRITE: write host memory to regions of the disk, all together, as READ does. Raises `DiskError`."""
    places = zip(op.reads, op.writes, strict=True)
    context.pool.unsaved.write(
        [(region.buffer, bytes_of(lease, source).numpy(), region.start) for source, region in places]
    )


def copy(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """FETCH copies a shard of weights to its slot, or to a buffer read ahead, from which PLACE copies it there. GRAD
    copies a shard of gradients to where the optimizer reads it; if that has another dtype, it is first cast on the
    device. OFFLOAD and RELOAD copy what a layer keeps, or a piece of its state, unchanged.
    """
    if len(op.reads) > 1:
        context.pool.unsaved.overwritten(op)
        for source_access, target_access in zip(op.reads, op.writes, strict=True):
            bytes_of(lease, target_access).copy_(bytes_of(lease, source_access), non_blocking=True)
        return
    (source_access,), (target_access, *casts) = op.reads, op.writes
    source, target = bytes_of(lease, source_access), bytes_of(lease, target_access)
    if source.nbytes > target.nbytes:
        source, target = source.view(torch.float32), target.view(torch.bfloat16)
    elif source.nbytes < target.nbytes:
        source, target = source.view(torch.bfloat16), target.view(torch.float32)
    for cast in casts:  # otherwise the copy would allocate a buffer that the ledger does not know
        source = bytes_of(lease, cast).view(target.dtype).copy_(source)
    target.copy_(source, non_blocking=True)
