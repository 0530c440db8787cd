"""Ranks as processes: torch.distributed transfers bytes between them, with gloo on the host and NCCL between CUDA
devices.

There is a process group for each purpose, so that concurrent threads do not mix their messages. Only an all-gather
and an all-to-all, of bytes, are used: every backend has these for any dtype, and they add nothing up.
torch.distributed is imported when a world of several ranks is joined.

A launcher starts the processes and tells each its rank (`system.environment`).
"""

from __future__ import annotations

import atexit
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megatrain.dist.watch import Watch
from megatrain.dist.world import World
from megatrain.errors import RankError, first_line

SECONDS = 600.0
"""Default seconds after which a rank gives up on the others."""
ALONE_TIMES = 12
"""Factor on these for the host, where rank 0 may check a large checkpoint for all."""
LATER_SECONDS = 30.0
"""Extra seconds for process groups, so that the watch, which knows who is missing, gives up first."""
PAUSE_SECONDS = 0.01
"""Between looks for ranks that have not come."""
CARRIERS = ("host", "device", "beside")


class ProcessCollectives:
    """`Collectives` over a process group of torch.distributed."""

    def __init__(self, group: Any, where: str, name: str = "", queues: bool = False) -> None:
        """name: identifies the carrier to the watch. queues: calls return before their collective is done, in
        stream order."""
        import torch.distributed as dist

        self._group, self._where, self._dist, self._name, self._queues = group, where, dist, name, queues
        self.watch: Watch | None = None
        # one function under the name of torch 2.13 and the one before
        self._all_gather: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        self._carry(self._all_gather, whole, part)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_nbytes: Sequence[int] | None = None,
        sent_nbytes: Sequence[int] | None = None,
    ) -> None:
        sizes = () if received_nbytes is None else (received_nbytes, sent_nbytes)
        self._carry(self._dist.all_to_all_single, received, sent, *sizes)

    def close(self) -> None:
        self._dist.destroy_process_group(self._group)

    def _carry(self, carrier: Callable[..., object], target: Tensor, source: Tensor, *sizes: object) -> None:
        if self.watch is not None:
            self.watch.enters(self._name)
        try:
            carrier(target, source, *sizes, group=self._group)
        except RuntimeError as error:
            what = f"another rank has ended or hangs ({first_line(error)})"
            failure = RankError(what, where=self._where)
            raise (self.watch.explained(failure) if self.watch is not None else failure) from error
        if self.watch is not None:
            self.watch.leaves(self._name, self._end_on(target.device) if self._queues else None)

    def _end_on(self, device: torch.device) -> Callable[[], bool]:
        """A function that tells whether the device has finished everything in its current stream so far."""
        event = torch.Event(device)
        event.record()
        return event.query


@cache
def join(rank: int, size: int, device: str, address: str = "", seconds: float | None = None) -> World:
    """Join as rank `rank` of `size`, until the process ends, using an existing process group if there is one, else
    MASTER_ADDR and MASTER_PORT of the environment.

    device: type of the devices between which schedules have collectives. address: of rank 0's machine, for ranks that
    watch each other. seconds: how long to wait for other ranks, by default `SECONDS`. Raises `RankError` if they do not
    connect.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    seconds = SECONDS if seconds is None else seconds
    where, timeout = f"rank {rank} of {size}", timedelta(seconds=seconds)
    try:
        if not dist.is_initialized():
            launched, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
            name = name_of_start(launched, rank, size, seconds)
            store = dist.PrefixStore(name, launched)  # type: ignore[attr-defined]  # it is, by another name
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
            atexit.register(_leave)
        backends = dict(zip(CARRIERS, ("gloo", "nccl" if device == "cuda" else "gloo", "gloo"), strict=True))
        limits = dict(zip(CARRIERS, (ALONE_TIMES * seconds, seconds, seconds), strict=True))
        later = {name: timedelta(seconds=limit + LATER_SECONDS) for name, limit in limits.items()}
        groups = {name: dist.new_group(backend=backend, timeout=later[name]) for name, backend in backends.items()}
    except RuntimeError as error:
        what = f"the other ranks have not connected ({first_line(error)})"
        raise RankError(what, where=where, fix="start all of them, with one MASTER_ADDR and MASTER_PORT") from error
    carriers = [ProcessCollectives(group, where, name, backends[name] == "nccl") for name, group in groups.items()]
    host, on_device, beside = carriers
    world = World(rank, size, host, on_device, beside)
    if not address:
        return world
    watch = Watch(world, address, limits)
    for carrier in carriers:
        carrier.watch = watch
    atexit.register(watch.close)
    _tell_of_what_nobody_catches(watch)
    return replace(world, watch=watch)


def name_of_start(store: Any, rank: int, size: int, seconds: float) -> str:
    """A name that the ranks of this start agree on, in a store that may hold what those of earlier starts have put
    there: `torchrun` keeps one store for all its restarts, and a rank that found the address of one that was killed
    would wait for it. The first rank answers what each asks now. Raises `RankError` and what the store raises.
    """
    token, ends = secrets.token_hex(8), time.monotonic() + seconds
    if rank > 0:
        store.set(f"asks {rank}", token)
        name = bytes(store.get(f"answer to {token}")).decode()
        store.set(f"{name} has {rank}", "")
        return name
    missing = list(range(1, size))
    while missing:
        if time.monotonic() > ends:
            raise RankError(f"no sign of rank {missing[0]}", where=f"rank 0 of {size}", fix="start all of them")
        for other in missing:
            if store.check([f"asks {other}"]):
                store.set(f"answer to {bytes(store.get(f'asks {other}')).decode()}", token)
        missing = [other for other in missing if not store.check([f"{token} has {other}"])]
        time.sleep(PAUSE_SECONDS)
    return token


def _tell_of_what_nobody_catches(watch: Watch) -> None:
    """Report an uncaught exception that ends a script to the other ranks."""
    shown = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        watch.failed(error)
        shown(kind, error, where)

    sys.excepthook = tell


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
