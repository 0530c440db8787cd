"""Proves that the schedules of several ranks fit together; `check` proves each on its own.

A collective begins on no rank before all have reached it. So the ranks must agree on the collectives, their order and
their bytes, and their contributions to a GATHER must tile its result. Then no deadlock is possible: all collectives
are on one stream, and ops wait only for earlier ones of their rank, so the n-th collective and its inputs depend on
nothing after the n-th on any rank.

Ranks that map each other's memory (`Buffer.peer`) are ordered by collectives alone. For an op that touches another
rank's bytes and any op that writes them there, one must come before a collective and the other after it; and a read
must find what the last write before it on the owning rank left.

`check_world` proves this for all schedules side by side, in tests and plans. In a run each rank has only its own,
so ranks compare `Schedule.digest` first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

from megatrain.errors import ScheduleError
from megatrain.schedule.check import check
from megatrain.schedule.contents import Direction
from megatrain.schedule.ops import COLLECTIVES, LINKS, Access, Op, Schedule

WHERE = "schedules of ranks"


def check_world(schedules: Sequence[Schedule]) -> None:
    """Prove the schedules of all ranks, in rank order, correct on their own and together, or raise
    `ScheduleError`."""
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
    """Each rank contributes its own part to a GATHER, at the right place, and no direction is lost in an ALLTOALL."""
    if together[0].kind == "ALLTOALL":
        read, wrote = ([each for op in together for each in side(op)] for side in (_read_directions, _wrote_directions))
        sent, received = (sum(each.stop - each.start for each in side) for side in (read, wrote))
        if sent != received or len({each.content for each in (*read, *wrote)}) > 1:
            what = f"the ranks send {sent:,} bytes of directions and get {received:,} in {together[0].name}"
            raise ScheduleError(what, where=WHERE)
    if together[0].kind != "GATHER":
        return
    for rank, op in enumerate(together):
        (part,), (whole,) = op.reads, op.writes
        nbytes = (whole.stop - whole.start) // len(together)
        in_place = part.buffer == whole.buffer
        begin = whole.start + rank * nbytes if in_place else whole.start // len(together)
        if (part.start, part.stop) != (begin, begin + nbytes) or not (in_place or part.content == whole.content):
            raise ScheduleError(f"rank {rank} contributes another rank's part to {op.name}", where=WHERE)


def _read_directions(op: Op) -> list[Access]:
    return [access for access in op.reads if isinstance(access.content, Direction)]


def _wrote_directions(op: Op) -> list[Access]:
    return [access for access in op.writes if isinstance(access.content, Direction)]


# Memory that ranks share ----------------------------------------------------------------------------------------------


class _Touch(NamedTuple):
    """An op that touches bytes of a buffer, between collectives: it starts after number `after` and ends before
    number `before` begins on its rank. A collective is both."""

    op: Op
    access: Access
    after: int
    before: int


def _check_peers(schedules: Sequence[Schedule]) -> None:
    """Each access to another rank's memory is ordered with the writes there, and finds the content it expects."""
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
            overlapping = [
                write for write in written[peer] if write.access._replace(buffer=access.buffer).overlaps(access)
            ]
            _check_touch(touch, rank, peer.rank, overlapping)
            if access in touch.op.reads:
                before = [write.access.content for write in overlapping if write.before <= touch.after]
                actual = before[-1] if before else schedules[peer.rank].buffers[peer.name].initial
                if actual != access.content:
                    what = f"{touch.op.name} of rank {rank} reads {access.content} of rank {peer.rank}"
                    raise ScheduleError(f"{what} but finds {actual}", where=WHERE)


def _check_sources(schedule: Schedule, rank: int, ranks: int, op: Op) -> None:
    """A FETCH from shared memory takes part r of a shard from rank r, and a REDUCE or an ALLTOALL reads what all other
    ranks have."""
    peers = [schedule.buffers[access.buffer].peer for access in (*op.reads, *op.writes)]
    of = [peer.rank if peer is not None else rank for peer in peers]
    expected = list(range(ranks)) if op.kind == "FETCH" else [other for other in range(ranks) if other != rank]
    mine = len(op.reads) + (len(_wrote_directions(op)) if op.kind == "ALLTOALL" else 1)
    ranks_read = of[: len(op.reads)] if op.kind == "FETCH" else of[mine:]
    places = [(access.start, access.stop) for access in op.writes] if op.kind == "FETCH" else []
    tiled = all(before[1] == after[0] for before, after in pairwise(places))
    alike = op.kind == "ALLTOALL" or len({access.stop - access.start for access in op.reads}) == 1
    if ranks_read != expected or not tiled or not alike:
        raise ScheduleError(f"rank {rank} takes another rank's part for its own in {op.name}", where=WHERE)


def _check_touch(touch: _Touch, rank: int, owner: int, writes: Sequence[_Touch]) -> None:
    for write in writes:
        if write.before > touch.after and touch.before > write.after:
            what = f"nothing orders {touch.op.name} of rank {rank} and {write.op.name} of rank {owner}, whose bytes"
            raise ScheduleError(f"{what} it touches", where=WHERE)


def _of_peers(schedule: Schedule) -> Iterator[tuple[int, Access]]:
    """(op index, access) of accesses to other ranks' memory. A BARRIER touches nothing: it says that others have
    written."""
    for index, op in enumerate(schedule.ops):
        for access in (*op.reads, *op.writes) if op.kind != "BARRIER" else ():
            if schedule.buffers[access.buffer].peer is not None:
                yield index, access


def _spans(schedule: Schedule) -> list[tuple[int, int]]:
    """(after, before) of each op, as in `_Touch`."""
    ops, count = schedule.ops, len(schedule.collectives)
    needs: list[list[int]] = []
    last: dict[str, int] = {}
    for index, (op, waits) in enumerate(zip(ops, schedule.waits, strict=True)):
        needs.append([*waits, *([last[op.stream]] if op.stream in last else [])])
        last[op.stream] = index
    after, before = [-1] * len(ops), [count] * len(ops)
    number = 0
    for index, op in enumerate(ops):
        after[index] = max((after[earlier] for earlier in needs[index]), default=-1)
        if op.kind in COLLECTIVES:
            after[index], number = number, number + 1
    for index in reversed(range(len(ops))):
        if ops[index].kind in COLLECTIVES:
            before[index] = after[index]
        for earlier in needs[index]:
            before[earlier] = min(before[earlier], before[index])
    return list(zip(after, before, strict=True))
