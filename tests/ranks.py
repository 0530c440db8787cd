"""A world of ranks in one process: a thread for each, which meet where processes would.

What they carry between them can be held up at random, and spoilt. A rank that fails ends the others, which wait for it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from torch import Tensor

from megatrain.dist import World
from megatrain.errors import RankError
from megatrain.schedule import Op, Schedule, Timeline
from megatrain.schedule.ops import LINKS
from megatrain.spec.contention import Contention, StreamClock, TimedTask

T = TypeVar("T")
SECONDS = 30.0
"""After which a rank that waits for the others gives up."""


class Meeting:
    """Where the threads of all ranks meet, for one carrier."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.given: list[Any] = [None] * size
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

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_nbytes: Sequence[int] | None = None,
        sent_nbytes: Sequence[int] | None = None,
    ) -> None:
        size = len(self._meeting.given)
        cut = sent.split([*sent_nbytes]) if sent_nbytes is not None else sent.view(size, -1)
        parts = received.split([*received_nbytes]) if received_nbytes is not None else received.view(size, -1)
        assert sum(part.numel() for part in parts) == received.numel()
        self._meet(cut)
        for part, given in zip(parts, self._meeting.given, strict=True):
            assert given is not None
            assert part.shape == given[self._rank].shape
            part.copy_(given[self._rank])
        self._part(received)

    def close(self) -> None:
        self._meeting.barrier.abort()

    def _meet(self, given: Tensor | Sequence[Tensor]) -> None:
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


class WorldClock:
    """One virtual time for the devices of all ranks of a machine: they share its host memory, each has its own bus, and
    a collective begins when all have come to it. contention: that of one device, with the host memory of all."""

    def __init__(self, size: int, contention: Contention) -> None:
        self.clock, self.lock, self.size = _StreamsOfRanks(contention), threading.Lock(), size
        self.arrivals: list[list[TimedTask]] = []
        """Of each collective, in order: when each rank has come to it."""

    def of(self, rank: int) -> RankClock:
        return RankClock(self, rank)


class _StreamsOfRanks(StreamClock):
    """The stream `fetch` of rank 1 is `fetch@1`."""

    def _beside_each_other(self, busy: Collection[str]) -> dict[str, float]:
        found: dict[str, float] = {}
        for rank in {stream.partition("@")[2] for stream in busy}:
            own = [stream.partition("@")[0] for stream in busy if stream.endswith(f"@{rank}")]
            found |= {f"{stream}@{rank}": speed for stream, speed in super()._beside_each_other(own).items()}
        return found


class RankClock(StreamClock):
    """What one rank's device, or a replay, sees of it."""

    def __init__(self, world: WorldClock, rank: int) -> None:
        self._world, self._rank, self._collectives = world, rank, 0

    def submit(self, piece: TimedTask) -> None:
        with self._world.lock:
            is_collective = piece.stream in LINKS
            piece.stream = f"{piece.stream}@{self._rank}"
            if is_collective:
                piece.waits = self._all_come(piece)
            self._world.clock.submit(piece)

    def _all_come(self, piece: TimedTask) -> list[TimedTask]:
        """When this rank, and when each other, has come to its next collective."""
        arrivals = self._world.arrivals
        if self._collectives == len(arrivals):
            stream = piece.stream.partition("@")[0]
            arrivals.append([TimedTask(f"{stream}@{rank}", 0.0) for rank in range(self._world.size)])
        all_of_it = arrivals[self._collectives]
        own = all_of_it[self._rank]
        own.waits, own.submitted = piece.waits, piece.submitted
        self._world.clock.submit(own)
        self._collectives += 1
        return all_of_it

    def run(self, until: TimedTask | None = None) -> float:
        with self._world.lock:
            return self._world.clock.run(until)


def replay_world(schedules: Sequence[Schedule], cost: Callable[[Op], float], contention: Contention) -> list[Timeline]:
    """Those of all ranks of a machine on one clock: slow and plain, where `replay` takes one for all of them."""
    clock, pieces = WorldClock(len(schedules), contention), list[list[TimedTask]]()
    for rank, schedule in enumerate(schedules):
        own, mine = clock.of(rank), list[TimedTask]()
        for op, waits in zip(schedule.ops, schedule.waits, strict=True):
            before = [mine[wait] for wait in waits]
            mine.append(TimedTask(op.stream, cost(op), contention.dram_nbytes(op), before))
            own.submit(mine[-1])
        pieces.append(mine)
    clock.clock.run()
    times = [(tuple(piece.began for piece in mine), tuple(piece.ended for piece in mine)) for mine in pieces]
    return [Timeline(schedule, *when) for schedule, when in zip(schedules, times, strict=True)]


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
