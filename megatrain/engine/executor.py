"""Runs the ops of a schedule on a device. Their order is decided already: streams and waits are in the schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from megatrain.device import Device, Event
from megatrain.errors import RaceDetected
from megatrain.memory import Lease, LeasedBuffers, Pool
from megatrain.schedule import Access, Op, Schedule, Timeline

ATTEMPTS = 4
"""How often to wait for the streams after a failure: each may report a failure of its own, or a user interrupt."""

Action = Callable[[Op, Lease], None]
"""Runs an op with the memory it declared."""

Release = Callable[[Access], None]

Locate = Callable[[str, int, object], str]
"""(buffer, byte offset, content) -> the unit and parameter at that place, for messages."""


class Executor:
    """Submits each op to its stream, after the ops it waits for, and leases it the memory it declared."""

    def __init__(self, device: Device, pool: Pool, locate: Locate = lambda buffer, start, content: buffer) -> None:
        self.device, self.pool, self.locate = device, pool, locate
        self.under_way: dict[str, tuple[Op, float]] = {}
        """Stream -> the op it is running, and since when (`time.monotonic`). Read by another thread to find stalls."""
        self.last_progress = time.monotonic()
        """When an op last began or ended (`time.monotonic`)."""
        self._last: tuple[Schedule, list[Event]] | None = None
        """The last schedule that ran on a `timed` device, and the end of each op."""

    def run(self, schedule: Schedule, actions: Sequence[Action], release: Release = lambda access: None) -> None:
        """Run the whole schedule and wait until it is done.

        actions: of each op. release: called for each transient buffer behind the last op that names it.

        Raises what an op raised: `MegaTrainError` as it is, anything else as `StreamFailed` naming the op. By then all
        streams are idle and all leases returned.
        """
        torch.get_num_threads()  # makes a thread that is new to torch use the thread count that was set
        events: list[Event] = []
        streams = {stream: self.device.stream(stream) for stream in schedule.streams}
        try:
            with self.device.alongside():
                for op, action, waits, ended in zip(schedule.ops, actions, schedule.waits, schedule.ended, strict=True):
                    work = partial(self._run_op, op, action, ended, release)
                    needed = [events[earlier] for earlier in waits] if waits else ()
                    events.append(streams[op.stream].submit(op, work, needed))
                self.device.synchronize()
        except BaseException as failure:
            if isinstance(failure, RaceDetected):
                failure.where = self.locate(failure.buffer, failure.start, failure.content)
                failure.fix = _missing_wait(schedule, failure)
            self._wait_for_streams(failure)
            raise
        self._last = (schedule, events) if self.device.timed else None

    @property
    def timeline(self) -> Timeline | None:
        """When the ops of the last schedule ran, if the device was `timed`."""
        if self._last is None:
            return None
        schedule, events = self._last
        intervals = [event.interval() for event in events]
        origin = min((start for start, _ in intervals), default=0.0)
        return Timeline(
            schedule, tuple(start - origin for start, _ in intervals), tuple(end - origin for _, end in intervals)
        )

    def _run_op(self, op: Op, action: Action, ended: Sequence[Access], release: Release) -> None:
        """Lease the memory of an op, run it, and release what no later op names."""
        self.last_progress = time.monotonic()
        self.under_way[op.stream] = op, self.last_progress
        try:
            with LeasedBuffers(self.pool, op) as lease:
                action(op, lease)
                for access in ended:
                    release(access)
        finally:
            del self.under_way[op.stream]
            self.last_progress = time.monotonic()

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
