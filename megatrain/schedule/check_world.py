"""Proofs about the schedules of several ranks taken together: collectives match. `check` proves those of one rank.

A collective begins on no rank before all have come to it. So the ranks must agree on which come, in which order, over
which bytes, and what they bring to a GATHER must tile what it leaves. No ranks can wait for each other then: all
collectives are on one stream, and an op waits for earlier ones of its rank alone, so the n-th collective and what it
needs wait for nothing that comes behind the n-th on any rank.

`check_world` proves it of all schedules, side by side: for tests, and for plans. In a run each rank has its own, and
before they go through them they compare `Schedule.digest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from megatrain.errors import ScheduleError
from megatrain.schedule.check import check
from megatrain.schedule.ops import COLLECTIVES, Op, Schedule


def check_world(schedules: Sequence[Schedule]) -> None:
    """Prove the schedules of all ranks, in their order, right for each and together, or raise `ScheduleError`."""
    for rank, schedule in enumerate(schedules):
        for index, (op, waits) in enumerate(zip(schedule.ops, schedule.waits, strict=True)):
            if late := [schedule.ops[wait].name for wait in waits if wait >= index]:
                raise ScheduleError(
                    f"{op.name} waits for {late[0]}, which comes later", where=f"schedule of rank {rank}"
                )
            if (op.kind in COLLECTIVES) != (op.stream == "link"):
                raise ScheduleError(f"{op.name} is on stream {op.stream}", where=f"schedule of rank {rank}")
        check(schedule)
    for number, together in enumerate(zip_longest(*(schedule.collectives for schedule in schedules))):
        forms = [op.form if op else None for op in together]
        if odd := next((rank for rank, form in enumerate(forms) if form != forms[0]), None):
            names = [together[rank].name if together[rank] else "none" for rank in (0, odd)]
            what = f"collective {number} is {names[0]} on rank 0 and {names[1]} on rank {odd}, or of other bytes"
            raise ScheduleError(what, where="schedules of ranks")
        _check_parts(together)


def _check_parts(together: Sequence[Op]) -> None:
    """Each rank brings to a GATHER its own part of what comes of it, at its place."""
    if together[0].kind != "GATHER":
        return
    for rank, op in enumerate(together):
        (part,), (whole,) = op.reads, op.writes
        each = (whole.stop - whole.start) // len(together)
        begin = whole.start + rank * each
        if (part.buffer, part.start, part.stop) != (whole.buffer, begin, begin + each):
            raise ScheduleError(f"rank {rank} brings another's part to {op.name}", where="schedules of ranks")
