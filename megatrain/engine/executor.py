"""Runs the ops of a schedule on a device. It decides no order: streams and waits are in the schedule."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from megatrain.device import Device, Event
from megatrain.errors import RaceDetected
from megatrain.memory import Held, Pool
from megatrain.schedule import Op, Schedule, Timeline

ATTEMPTS = 4
"""Times that the streams are waited for after a failure: each stream may report one, and a user may interrupt."""

Act = Callable[[Op, Held], None]
"""Does what an op stands for, with the memory that it declared."""

Locate = Callable[[str, int, object], str]
"""(buffer, byte offset, content) -> the unit and parameter that lie there, for messages."""


class Executor:
    """Submits each op to its stream, behind the ops it waits for, and leases it the memory it declared."""

    def __init__(self, device: Device, pool: Pool, locate: Locate = lambda buffer, start, content: buffer) -> None:
        self.device, self.pool, self.locate = device, pool, locate
        self.under_way: dict[str, tuple[str, float]] = {}
        """Stream -> the op that it is at, and since when (`time.monotonic`), for a thread that watches."""
        self.moved = time.monotonic()
        """When an op last began or ended."""

    def walk(self, schedule: Schedule, act: Act) -> Timeline | None:
        """Run the whole schedule and wait for its end. Returns when each op ran, if the device is `timed`.

        Raises what an op raised: errors of ours as they are, others as `StreamFailed` naming the op. Every stream has
        come to rest by then, and no lease is out.
        """
        torch.get_num_threads()  # a thread that torch meets for the first time takes over the count that was set
        events: list[Event] = []
        streams = {op.stream: self.device.stream(op.stream) for op in schedule.ops}
        try:
            for op, waits in zip(schedule.ops, schedule.waits, strict=True):
                work = self._leased(op, act)
                events.append(streams[op.stream].submit(op, work, [events[earlier] for earlier in waits]))
            self.device.synchronize()
        except BaseException as failure:
            if isinstance(failure, RaceDetected):
                failure.where = self.locate(failure.buffer, failure.start, failure.content)
                failure.fix = _missing_wait(schedule, failure)
            self._settle(failure)
            raise
        return self._timeline(schedule, events) if self.device.timed else None

    def _timeline(self, schedule: Schedule, events: list[Event]) -> Timeline:
        intervals = [event.interval() for event in events]
        origin = min((start for start, _ in intervals), default=0.0)
        return Timeline(
            schedule, tuple(start - origin for start, _ in intervals), tuple(end - origin for _, end in intervals)
        )

    def _leased(self, op: Op, act: Act) -> Callable[[], None]:
        def work() -> None:
            self.moved = time.monotonic()
            self.under_way[op.stream] = op.name, self.moved
            try:
                with self.pool.lease(op) as held:
                    act(op, held)
            finally:
                self.under_way.pop(op.stream, None)
                self.moved = time.monotonic()

        return work

    def _settle(self, failure: BaseException) -> None:
        """Let the streams come to rest after a failure; what else fails is a consequence, noted on the first.

        Work that is under way reads and writes the state, so nobody may go on before it has ended; only a user who
        insists (or a device that is beyond recovery) gets away.
        """
        for _ in range(ATTEMPTS):
            try:
                self.device.synchronize()
                return
            except (Exception, KeyboardInterrupt) as consequence:
                if consequence is not failure:
                    failure.add_note(f"and then: {consequence}")


def _missing_wait(schedule: Schedule, race: RaceDetected) -> str:
    """Which op should have waited for which, by their numbers in the schedule."""
    earlier, later = sorted(index for index, op in enumerate(schedule.ops) if any(op is task for task in race.tasks))
    names = [f"op {index} ({schedule.ops[index].name})" for index in (earlier, later)]
    return f"{names[1]} must wait for {names[0]}"
