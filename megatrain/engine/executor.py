"""Walks the ops of a schedule on a device. Nothing here decides an order: streams and waits are in the schedule."""

from __future__ import annotations

from collections.abc import Callable

from megatrain.device import Device, Event
from megatrain.memory import Held, Pool
from megatrain.schedule import Op, Schedule

ATTEMPTS = 4
"""Times that the streams are waited for after a failure: each stream may report one, and a user may interrupt."""

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
                events.append(streams[op.stream].submit(op, work, [events[earlier] for earlier in waits]))
            self.device.synchronize()
        except BaseException as failure:
            self._settle(failure)
            raise

    def _leased(self, op: Op, act: Act) -> Callable[[], None]:
        def work() -> None:
            with self.pool.lease(op) as held:
                act(op, held)

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
