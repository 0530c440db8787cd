"""A world of ranks in one process: a thread for each, which meet where processes would.

What they carry between them can be held up at random, and spoilt. A rank that fails ends the others, which wait for it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from megatrain.dist import World
from megatrain.errors import RankError

T = TypeVar("T")
SECONDS = 30.0
"""After which a rank that waits for the others gives up."""


class Meeting:
    """Where the threads of all ranks meet, for one carrier."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.given: list[Tensor | None] = [None] * size
        self.met = 0


class ThreadCollectives:
    """See `megatrain.dist.Collectives`. delay: seconds, at most, that it holds this rank up; spoil: changes what has
    come, given the number of the collective."""

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        delay: Callable[[], float] = lambda: 0.0,
        spoil: Callable[[int, Tensor], None] = lambda number, received: None,
    ) -> None:
        self._meeting, self._rank, self._delay, self._spoil = meeting, rank, delay, spoil
        self._number = 0

    def all_gather(self, whole: Tensor, own: Tensor) -> None:
        size = len(self._meeting.given)
        assert whole.numel() == size * own.numel()
        self._meet(own)
        parts = whole.view(size, -1)
        for rank, given in enumerate(self._meeting.given):
            assert given is not None
            if given.data_ptr() != parts[rank].data_ptr():
                parts[rank].copy_(given)
        self._part(whole)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        assert received.shape == sent.shape
        self._meet(sent)
        parts = received.view(len(self._meeting.given), -1)
        for rank, given in enumerate(self._meeting.given):
            assert given is not None
            parts[rank].copy_(given.view(parts.shape)[self._rank])
        self._part(received)

    def close(self) -> None:
        self._meeting.barrier.abort()

    def _meet(self, given: Tensor) -> None:
        time.sleep(self._delay())
        self._meeting.given[self._rank] = given
        self._wait()

    def _part(self, received: Tensor) -> None:
        """Nobody changes what it gave before all have taken it."""
        self._wait()
        self._spoil(self._number, received)
        self._number += 1

    def _wait(self) -> None:
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise RankError("another rank has ended", where=f"rank {self._rank}") from None


def worlds(
    size: int, seed: int | None = None, spoil: Callable[[int, Tensor], None] = lambda number, received: None
) -> list[World]:
    """One for each rank. seed: of what holds ranks up, by some milliseconds; spoil: as for `ThreadCollectives`, of what
    rank 0 receives on the device."""
    host, device, beside = Meeting(size), Meeting(size), Meeting(size)
    found = []
    for rank in range(size):
        chance = random.Random(f"{seed} {rank}")
        delay = (lambda chance=chance: chance.random() * 0.003) if seed is not None else lambda: 0.0
        spoils = spoil if rank == 0 else lambda number, received: None
        carriers = [ThreadCollectives(host, rank, delay), ThreadCollectives(device, rank, delay, spoils)]
        found.append(World(rank, size, *carriers, ThreadCollectives(beside, rank, delay)))
    return found


def together(of: list[World], work: Callable[[World], T]) -> list[T]:
    """What `work` returns on each rank, each in a thread of its own. Raises what the first that failed has raised."""
    found: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(world: World) -> None:
        try:
            found[world.rank] = work(world)
        except BaseException as failure:
            failures.append(failure)
            world.close()

    threads = [threading.Thread(target=run, args=(world,), name=f"rank {world.rank}") for world in of]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    return [found[rank] for rank in range(len(of))]
