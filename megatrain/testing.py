"""Tools for testing engine changes on the simulated device. See `docs/testing.md` for an example.

`SimDevice(seed)` can be passed to `Engine.from_model` like any device. The functions here run schedules with ops that
do nothing, so thousands of runs take seconds: races follow from the ops' declared accesses and waits alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from megatrain.device.sim import KINDS, TEMPERAMENTS, Fault, FaultKind, SimDevice
from megatrain.engine import Executor
from megatrain.errors import RaceDetected
from megatrain.memory import Lease, Ledger, Pool
from megatrain.schedule import Op, Schedule, Timeline
from megatrain.spec.contention import NO_CONTENTION, Contention

__all__ = [
    "KINDS",
    "TEMPERAMENTS",
    "Fault",
    "SimDevice",
    "executed_timeline",
    "random_fault",
    "run_idle",
    "surviving_waits",
    "without_each_wait",
]


def run_idle(schedule: Schedule, device: SimDevice) -> Timeline | None:
    """Run a schedule with ops that do nothing. Raises `RaceDetected` if two conflicting accesses are not ordered."""
    executor = Executor(device, Pool(device, Ledger()))
    executor.run(schedule, [_nothing] * len(schedule.ops))
    return executor.timeline


def _nothing(op: Op, lease: Lease) -> None:
    return


def executed_timeline(
    schedule: Schedule, cost: Callable[[Op], float], seed: int = 0, contention: Contention = NO_CONTENTION
) -> Timeline:
    """When each op ran on the simulator's virtual clock. cost: seconds that an op takes alone."""
    timeline = run_idle(schedule, SimDevice(seed, cost=cost, contention=contention))  # type: ignore[arg-type]  # its tasks are ops
    assert timeline is not None
    return timeline


def without_each_wait(schedule: Schedule) -> Iterator[tuple[int, int, Schedule]]:
    """For every wait of the schedule: (op, the earlier op it waits for, a copy of the schedule without that wait)."""
    for index, waits in enumerate(schedule.waits):
        for wait in waits:
            fewer = list(schedule.waits)
            fewer[index] = tuple(other for other in waits if other != wait)
            yield index, wait, replace(schedule, waits=tuple(fewer))


def surviving_waits(schedule: Schedule, seeds: range = range(3)) -> list[tuple[int, int]]:
    """Waits whose removal causes no race with any of `seeds`: (op, the earlier op it waits for)."""
    survivors = []
    for index, wait, mutant in without_each_wait(schedule):
        if not any(_races(mutant, seed) for seed in seeds):
            survivors.append((index, wait))
    return survivors


def _races(schedule: Schedule, seed: int) -> bool:
    try:
        run_idle(schedule, SimDevice(seed))
    except RaceDetected:
        return True
    return False


def random_fault(schedule: Schedule, kind: FaultKind, seed: int) -> Fault:
    """A fault of this kind at a random op of the schedule."""
    index = random.Random(seed).randrange(len(schedule.ops))
    name = schedule.ops[index].name
    return Fault(kind, name, after=sum(op.name == name for op in schedule.ops[:index]))
