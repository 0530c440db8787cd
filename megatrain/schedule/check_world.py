"""Proofs about the schedules of several ranks taken together: collectives match. `check` proves those of one rank.

A collective begins on no rank before all have come to it. So the ranks must agree on which come, in which order, over
which bytes, and what they bring to a GATHER must tile what it leaves. No ranks can wait for each other then: all
collectives are on one stream, and an op waits for earlier ones of its rank alone, so the n-th collective and what it
needs wait for nothing that comes behind the n-th on any rank.

Ranks that map each other's memory (`Buffer.peer`) are ordered by collectives alone. Of an op that touches another
rank's bytes, and each op that writes them there, one must come before a collective and the other behind it; and what is
read there must be what the last write in front of it, on the rank whose it is, has left.

`check_world` proves it of all schedules, side by side: for tests, and for plans. In a run each rank has its own, and
before they go through them they compare `Schedule.digest`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

from megatrain.errors import ScheduleError
from megatrain.schedule.check import check
from megatrain.schedule.ops import COLLECTIVES, LINKS, Access, Op, Schedule

WHERE = "schedules of ranks"


def check_world(schedules: Sequence[Schedule]) -> None:
    """Prove the schedules of all ranks, in their order, right for each and together, or raise `ScheduleError`."""
    for rank, schedule in enumerate(schedules):
        links = {op.stream for op in schedule.ops if op.stream in LINKS}
        for index, (op, waits) in enumerate(zip(schedule.ops, schedule.waits, strict=True)):
            if late := [schedule.ops[wait].name for wait in waits if wait >= index]:
                raise ScheduleError(
                    f"{op.name} waits for {late[0]}, which comes later", where=f"schedule of rank {rank}"
                )
            if (op.kind in COLLECTIVES) != (op.stream in LINKS) or len(links) > 1:
                raise ScheduleError(f"{op.name} is on stream {op.stream}", where=f"schedule of rank {rank}")
        check(schedule)
    for number, together in enumerate(zip_longest(*(schedule.collectives for schedule in schedules))):
        forms = [op.form if op else None for op in together]
        if odd := next((rank for rank, form in enumerate(forms) if form != forms[0]), None):
            names = [together[rank].name if together[rank] else "none" for rank in (0, odd)]
            what = f"collective {number} is {names[0]} on rank 0 and {names[1]} on rank {odd}, or of other bytes"
            raise ScheduleError(what, where=WHERE)
        _check_parts(together)
    _check_peers(schedules)


def _check_parts(together: Sequence[Op]) -> None:
    """Each rank brings to a GATHER its own part of what comes of it, at its place, or from where it has its parts."""
    if together[0].kind != "GATHER":
        return
    for rank, op in enumerate(together):
        (part,), (whole,) = op.reads, op.writes
        each = (whole.stop - whole.start) // len(together)
        there = part.buffer == whole.buffer
        begin = whole.start + rank * each if there else whole.start // len(together)
        if (part.start, part.stop) != (begin, begin + each) or not (there or part.content == whole.content):
            raise ScheduleError(f"rank {rank} brings another's part to {op.name}", where=WHERE)


# Memory that ranks share ----------------------------------------------------------------------------------------------


class _Touch(NamedTuple):
    """An op that touches bytes of a buffer, and the collectives around it: it begins behind the `after`-th, and has
    ended when the `before`-th begins on its rank. A collective is both."""

    op: Op
    access: Access
    after: int
    before: int


def _check_peers(schedules: Sequence[Schedule]) -> None:
    """What a rank does in another's memory comes before or behind each write there, and finds what it expects."""
    spans = [_spans(schedule) for schedule in schedules]
    written: dict[tuple[int, str], list[_Touch]] = defaultdict(list)
    for rank, schedule in enumerate(schedules):
        for index, op in enumerate(schedule.ops):
            for access in op.writes if op.kind != "BARRIER" else ():
                written[rank, access.buffer].append(_Touch(op, access, *spans[rank][index]))
    for rank, schedule in enumerate(schedules):
        for op in {id(schedule.ops[index]): schedule.ops[index] for index, _ in _of_peers(schedule)}.values():
            _check_sources(schedule, rank, len(schedules), op)
        for index, access in _of_peers(schedule):
            peer, touch = schedule.buffers[access.buffer].peer, _Touch(schedule.ops[index], access, *spans[rank][index])
            assert peer is not None
            there = [each for each in written[peer] if each.access._replace(buffer=access.buffer).overlaps(access)]
            _check_touch(touch, rank, peer.rank, there)
            if access in touch.op.reads:
                before = [each.access.content for each in there if each.before <= touch.after]
                found = before[-1] if before else schedules[peer.rank].buffers[peer.name].initial
                if found != access.content:
                    what = f"{touch.op.name} of rank {rank} reads {access.content} of rank {peer.rank}"
                    raise ScheduleError(f"{what} and finds {found}", where=WHERE)


def _check_sources(schedule: Schedule, rank: int, ranks: int, op: Op) -> None:
    """A FETCH of what ranks share takes the r-th part of the shard from rank r, and a REDUCE hears all others."""
    peers = [schedule.buffers[access.buffer].peer for access in (*op.reads, *op.writes)]
    of = [each.rank if each is not None else rank for each in peers]
    expected = list(range(ranks)) if op.kind == "FETCH" else [other for other in range(ranks) if other != rank]
    found = of[: len(op.reads)] if op.kind == "FETCH" else of[len(op.reads) + 1 :]
    places = [(access.start, access.stop) for access in op.writes] if op.kind == "FETCH" else []
    tiled = all(before[1] == after[0] for before, after in pairwise(places))
    if found != expected or not tiled or len({access.stop - access.start for access in op.reads}) > 1:
        raise ScheduleError(f"rank {rank} takes another's part for its own in {op.name}", where=WHERE)


def _check_touch(touch: _Touch, rank: int, owner: int, writes: Sequence[_Touch]) -> None:
    for write in writes:
        if write.before > touch.after and touch.before > write.after:
            what = f"nothing orders {touch.op.name} of rank {rank} and {write.op.name} of rank {owner}, whose bytes"
            raise ScheduleError(f"{what} it touches", where=WHERE)


def _of_peers(schedule: Schedule) -> Iterator[tuple[int, Access]]:
    """Ops that touch another rank's memory, and where. A BARRIER touches nothing: it says that others have written."""
    for index, op in enumerate(schedule.ops):
        for access in (*op.reads, *op.writes) if op.kind != "BARRIER" else ():
            if schedule.buffers[access.buffer].peer is not None:
                yield index, access


def _spans(schedule: Schedule) -> list[tuple[int, int]]:
    """Of each op `after` and `before`, as in `_Touch`."""
    ops, count = schedule.ops, len(schedule.collectives)
    needs: list[list[int]] = []
    last: dict[str, int] = {}
    for index, (op, waits) in enumerate(zip(ops, schedule.waits, strict=True)):
        needs.append([*waits, *([last[op.stream]] if op.stream in last else [])])
        last[op.stream] = index
    after, before = [-1] * len(ops), [count] * len(ops)
    number = 0
    for index, op in enumerate(ops):
        after[index] = max((after[each] for each in needs[index]), default=-1)
        if op.kind in COLLECTIVES:
            after[index], number = number, number + 1
    for index in reversed(range(len(ops))):
        if ops[index].kind in COLLECTIVES:
            before[index] = after[index]
        for each in needs[index]:
            before[each] = min(before[each], before[index])
    return list(zip(after, before, strict=True))
