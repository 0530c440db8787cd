"""Prints schedules as text, one op per line, for people, diffs and error messages."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.schedule.ops import Access, Op, Schedule


def show_access(access: Access) -> str:
    """`device/layer0[0:4096]=w3`"""
    return f"{access.buffer}[{access.start}:{access.stop}]={access.content}"


def show_op(op: Op) -> str:
    """`fetch    FETCH u3 s0         r host/hi/3[0:4096]=w3  w device/layer0[0:4096]=w3`"""
    sides = [f"r {' '.join(map(show_access, op.reads))}"] if op.reads else []
    sides += [f"w {' '.join(map(show_access, op.writes))}"] if op.writes else []
    return f"{op.stream:<8} {op.name:<18} {'  '.join(sides)}"


def show_schedule(
    schedule: Schedule,
    start: int = 0,
    stop: int | None = None,
    marks: Mapping[int, str] | None = None,
) -> str:
    """Ops [start, stop) as a table, each with its number and waits; `marks`: op number -> a note below it."""
    lines = []
    stop = len(schedule.ops) if stop is None else min(stop, len(schedule.ops))
    for index in range(max(0, start), stop):
        waits = schedule.waits[index] if schedule.waits else ()
        after = f"  after {','.join(map(str, waits))}" if waits else ""
        lines.append(f"{index:>6}  {show_op(schedule.ops[index])}{after}")
        if marks and index in marks:
            lines.append(f"{'':>6}  ^^^^^^^^ {marks[index]}")
    return "\n".join(lines)
