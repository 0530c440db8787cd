"""Ranks that are processes: torch.distributed carries bytes between them, gloo on the host, NCCL between CUDA devices.

There is a process group for each purpose, so that what one thread has under way mixes with nothing of another's. All
that is used of the library are an all-gather and an all-to-all of equal parts, of bytes: every backend has these, for
any dtype, and they add nothing up. torch.distributed is loaded here, when a world of several is joined.

Left out: who starts the processes (a launcher), and what tells each its rank (`config.environment`).
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

from torch import Tensor

from megatrain.dist.world import World
from megatrain.errors import RankError, first_line

SECONDS = 600.0
"""After which a rank gives up on the others, where nothing else is asked for."""
ALONE_TIMES = 12
"""So many times as long it waits on the host, where rank 0 may check a large checkpoint for all."""


class ProcessCollectives:
    """See `Collectives`: over a process group of torch.distributed."""

    def __init__(self, group: Any, where: str) -> None:
        import torch.distributed as dist

        self._group, self._where, self._dist = group, where, dist
        # one function under the name of torch 2.13 and the one before
        self._all_gather: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

    def all_gather(self, whole: Tensor, own: Tensor) -> None:
        self._carry(self._all_gather, whole, own)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        self._carry(self._dist.all_to_all_single, received, sent)

    def close(self) -> None:
        self._dist.destroy_process_group(self._group)

    def _carry(self, carrier: Callable[..., object], target: Tensor, source: Tensor) -> None:
        try:
            carrier(target, source, group=self._group)
        except RuntimeError as error:
            raise RankError(f"another rank is gone, or stands still ({first_line(error)})", where=self._where) from error


@cache
def join(rank: int, size: int, device: str, seconds: float = SECONDS) -> World:
    """Become one rank of `size`, until the process ends: beside process groups that there are, or where MASTER_ADDR and
    MASTER_PORT of the environment say.

    device: the type of those that collectives of schedules are between. seconds: how long a rank waits for the others.
    Raises `RankError` where they do not come.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    where, timeout = f"rank {rank} of {size}", timedelta(seconds=seconds)
    try:
        if not dist.is_initialized():
            store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
            atexit.register(_leave)
        backends = "gloo", "nccl" if device == "cuda" else "gloo", "gloo"
        waits = ALONE_TIMES * timeout, timeout, timeout
        groups = [dist.new_group(backend=each, timeout=wait) for each, wait in zip(backends, waits, strict=True)]
    except RuntimeError as error:
        what = f"the others have not come ({first_line(error)})"
        raise RankError(what, where=where, fix="start all of them, with one MASTER_ADDR and MASTER_PORT") from error
    return World(rank, size, *(ProcessCollectives(group, where) for group in groups))


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
