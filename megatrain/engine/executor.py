"""Runs the ops of a schedule on a device. Their order is decided already: streams and waits are in the schedule."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from megatrain.device import Device, Event
from megatrain.errors import RaceDetected
from megatrain.memory import Lease, Pool
from megatrain.schedule import Op, Schedule, Timeline

ATTEMPTS = 4
"""How often to wait for the streams after a failure: each may report a failure of its own, or a user interrupt."""

Act = Callable[[Op, Lease], None]
"""Performs an op with the memory it declared."""

Locate = Callable[[str, int, object], str]
"""(buffer, byte offset, content) -> the unit and parameter at that place, for messages."""


class Executor:
    """Submits each op to its stream, after the ops it waits for, and leases it the memory it declared."""

    def __init__(self, device: Device, pool: Pool, locate: Locate = lambda buffer, start, content: buffer) -> None:
        self.device, self.pool, self.locate = device, pool, locate
        self.under_way: dict[str, tuple[str, float]] = {}
        """Stream -> the op it is running, and since when (`time.monotonic`). Read by another thread to find stalls."""
        self.last_progress = time.monotonic()
        """When an op last began or ended (`time.monotonic`)."""

    def walk(self, schedule: Schedule, act: Act) -> Timeline | None:
        """Run the whole schedule and wait until it is done. Returns when each op ran, if the device is `timed`.

        Raises what an op raised: `MegaTrainError` as it is, anything else as `StreamFailed` naming the op. By then all
        streams are idle and all leases returned.
        """
        torch.get_num_threads()  # makes a thread that is new to torch use the thread count that was set
        events: list[Event] = []
        streams = {op.stream: self.device.stream(op.stream) for op in schedule.ops}
        try:
            with self.device.alongside():
                for op, waits in zip(schedule.ops, schedule.waits, strict=True):
                    work = self._with_memory(op, act)
                    events.append(streams[op.stream].submit(op, work, [events[earlier] for earlier in waits]))
                self.device.synchronize()
        except BaseException as failure:
            if isinstance(failure, RaceDetected):
                failure.where = self.locate(failure.buffer, failure.start, failure.content)
                failure.fix = _missing_wait(schedule, failure)
            self._wait_for_streams(failure)
            raise
        return self._timeline(schedule, events) if self.device.timed else None

    def _timeline(self, schedule: Schedule, events: list[Event]) -> Timeline:
        intervals = [event.interval() for event in events]
        origin = min((start for start, _ in intervals), default=0.0)
        return Timeline(
            schedule, tuple(start - origin for start, _ in intervals), tuple(end - origin for _, end in intervals)
        )

    def _with_memory(self, op: Op, act: Act) -> Callable[[], None]:
        def work() -> None:
            self.last_progress = time.monotonic()
            self.under_way[op.stream] = op.name, self.last_progress
            try:
                with self.pool.lease(op) as lease:
                    act(op, lease)
            finally:
                self.under_way.pop(op.stream, None)
                self.last_progress = time.monotonic()

        return work

    def _wait_for_streams(self, failure: BaseException) -> None:
        """Wait until all streams are idle after a failure; further failures are added to the first as notes.

        Work that is still running reads and writes the training state, so nothing else may run before it has ended.
        Gives up only after repeated interrupts, or if the device cannot recover.
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
