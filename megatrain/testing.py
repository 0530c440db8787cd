"""What a contributor needs to test an engine change on the simulated device. See `docs/testing.md` for an example.

`SimDevice(seed)` is a device like any other: give it to `Engine.from_model`. The functions here work on schedules
alone, with ops that do nothing, so that thousands of runs take seconds: races are found from what ops declare and wait
for, whatever they compute.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from megatrain.device.sim import KINDS, TEMPERAMENTS, Fault, FaultKind, SimDevice
from megatrain.engine import Executor
from megatrain.errors import RaceDetected
from megatrain.memory import Held, Ledger, Pool
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
    """Execute a schedule whose ops do nothing. Raises `RaceDetected` if its waits leave a conflict without an order."""
    return Executor(device, Pool(device, Ledger())).walk(schedule, _nothing)


def _nothing(op: Op, held: Held) -> None:
    return


def executed_timeline(
    schedule: Schedule, cost: Callable[[Op], float], seed: int = 0, contention: Contention = NO_CONTENTION
) -> Timeline:
    """When each op ran on the virtual clock of the simulator, at `cost` seconds an op alone."""
    timeline = run_idle(schedule, SimDevice(seed, cost=cost, contention=contention))  # type: ignore[arg-type]  # its tasks are ops
    assert timeline is not None
    return timeline


def without_each_wait(schedule: Schedule) -> Iterator[tuple[int, int, Schedule]]:
    """(op, the earlier op it no longer waits for, the schedule so changed), for every wait of the schedule."""
    for index, waits in enumerate(schedule.waits):
        for wait in waits:
            fewer = list(schedule.waits)
            fewer[index] = tuple(other for other in waits if other != wait)
            yield index, wait, replace(schedule, waits=tuple(fewer))


def surviving_waits(schedule: Schedule, seeds: range = range(3)) -> list[tuple[int, int]]:
    """Waits that no run of `seeds` misses when they are left out: (op, the earlier op it waits for)."""
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
    """A fault of this kind at an op of the schedule that the seed chooses."""
    index = random.Random(seed).randrange(len(schedule.ops))
    name = schedule.ops[index].name
    return Fault(kind, name, after=sum(op.name == name for op in schedule.ops[:index]))
