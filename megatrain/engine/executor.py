"""Walks the ops of a schedule on a device. Nothing here decides an order: streams and waits are in the schedule."""

from __future__ import annotations

from collections.abc import Callable

from megatrain.device import Device, Event
from megatrain.errors import MegaTrainError
from megatrain.memory import Held, Pool
from megatrain.schedule import Op, Schedule

Act = Callable[[Op, Held], None]
"""Does what an op stands for, with the memory that it declared."""


class Executor:
    """Submits each op to its stream, behind the ops it waits for, and leases it the memory it declared."""

    def __init__(self, device: Device, pool: Pool) -> None:
        self.device, self.pool = device, pool

    def run(self, schedule: Schedule, act: Act) -> None:
        """Run the whole schedule and wait for its end.

        Raises what an op raised: errors of ours as they are, others as `StreamFailed` naming the op. Every stream has
        come to rest by then, and no lease is out.
        """
        events: list[Event] = []
        streams = {op.stream: self.device.stream(op.stream) for op in schedule.ops}
        try:
            for op, waits in zip(schedule.ops, schedule.waits, strict=True):
                work = self._leased(op, act)
                events.append(streams[op.stream].submit(op.name, work, [events[earlier] for earlier in waits]))
        except BaseException as failure:
            self._settle(failure)
            raise
        self.device.synchronize()

    def _leased(self, op: Op, act: Act) -> Callable[[], None]:
        def work() -> None:
            with self.pool.lease(op) as held:
                act(op, held)

        return work

    def _settle(self, failure: BaseException) -> None:
        """Let the streams come to rest after a failure; a second failure is a consequence, noted on the first."""
        try:
            self.device.synchronize()
        except MegaTrainError as consequence:
            if consequence is not failure:
                failure.add_note(f"and then: {consequence}")
