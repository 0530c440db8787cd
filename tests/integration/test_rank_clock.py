"""Time of several ranks: what is planned for one of them is what all take, replayed side by side and as they run.

On the clock of a world (`tests.ranks.WorldClock`) ranks share host memory, and a collective waits for all.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from bench.shapes import llama_shape
from megatrain import Engine
from megatrain.device.base import Task
from megatrain.device.sim import SimDevice
from megatrain.dist import World
from megatrain.plan import Choice, Plan, Question, contention, examine, op_seconds, question_of_one
from megatrain.schedule import Op, Timeline, build_step
from megatrain.schedule.check_world import check_world
from megatrain.spec import Hardware, Numerics, Placement, Policy, Work
from megatrain.spec.contention import Contention
from tests.ranks import WorldClock, replay_world, together, worlds
from tests.schedule.test_directions import with_matrices
from tests.tiny import batch, tiny_model

MAKING = threading.Lock()
SLOW_LINK = Hardware(
    *("of four devices", 1 << 40, 1 << 40, 1e9, 8e8, 1e12, 8e9),
    host_dram_bandwidth=6e9,
    device_bandwidth=1e11,
    launch_seconds=1e-6,
    duplex_fetch_bandwidth=7e8,
    duplex_grad_bandwidth=6e8,
    devices=4,
    link_bandwidth=5e8,
    link_route="host",
    link_seconds=1e-5,
)
MACHINES = {
    "through host memory": SLOW_LINK,
    "over the bus": replace(SLOW_LINK, link_route="bus"),
    "links of their own": replace(SLOW_LINK, link_route="own", link_bandwidth=3e9),
}
MODEL = llama_shape("small", 4, 128, vocabulary=1000)


def planned(model: Any, hardware: Hardware, ranks: int, policy: Policy, rows: int, length: int, batch: int) -> Plan:
    """Of one of the ranks, with so many sequences each."""
    whole = Question(model, hardware, ranks * rows * length, length)
    return examine(question_of_one(whole, ranks, ranks), Choice(Numerics(), policy), batch)


def of_all(plan: Plan) -> Contention:
    """What ranks share, with the host memory of all."""
    hardware = plan.question.hardware
    assert hardware.host_dram_bandwidth is not None
    whole = replace(hardware, host_dram_bandwidth=hardware.sharing_ranks * hardware.host_dram_bandwidth)
    return contention(plan.question.model, plan.numerics, whole)


def price_of(plan: Plan) -> Any:
    return op_seconds(plan.question.model, plan.numerics, plan.policy, plan.work, plan.question.hardware)


@pytest.mark.few(3)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_replayed_together_take_the_planned_time(machine: str, ranks: int) -> None:
    by_shard = Policy(weight_slots=1, shard_nbytes=1 << 16, wait_for="shard")
    there = Policy(shard_nbytes=1 << 17, placements=(Placement("device", "device", "device"), Placement("device")) * 3)
    streamed = Policy(shard_nbytes=1 << 17, streamed_updates=0.7)
    policies = Policy(shard_nbytes=1 << 17), by_shard, replace(by_shard, delivery="shared"), there, streamed
    matrices = with_matrices(MODEL), Policy(shard_nbytes=1 << 17)
    for model, policy in (*((MODEL, policy) for policy in policies), matrices):
        plan = planned(model, MACHINES[machine], ranks, policy, 4, 64, 2)
        schedules = [
            build_step(plan.question.model, plan.numerics, policy, plan.work, "all", rank=rank) for rank in range(ranks)
        ]
        check_world(schedules)
        found = replay_world(schedules, price_of(plan), of_all(plan))
        for each in found:
            assert each.seconds == pytest.approx(plan.seconds, rel=1e-9)
            assert each.ends == pytest.approx(plan.timeline.ends, rel=1e-9)
        free = replay_world(schedules, price_of(plan), Contention())
        assert plan.seconds > 1.01 * free[0].seconds  # or what they share would not have mattered


def test_ranks_with_fewer_micro_batches_wait_for_the_planned_one() -> None:
    plan = planned(MODEL, SLOW_LINK, 2, Policy(shard_nbytes=1 << 17), 4, 256, 2)
    works = plan.work, Work(plan.work.tokens[:1], plan.work.length)
    schedules = [
        build_step(plan.question.model, plan.numerics, plan.policy, work, "all", rank=rank)
        for rank, work in enumerate(works)
    ]
    most, fewer = replay_world(schedules, price_of(plan), of_all(plan))
    assert 0.97 * plan.seconds <= most.seconds <= 1.001 * plan.seconds
    assert fewer.stall_seconds() > most.stall_seconds()


@pytest.mark.parametrize(
    "machine",
    [pytest.param(each, marks=pytest.mark.slow if "own" in each else ()) for each in MACHINES if "bus" not in each],
)
@pytest.mark.parametrize("streamed", [0.0, pytest.param(0.7, marks=pytest.mark.slow)])
def test_simulated_ranks_take_the_planned_time(machine: str, streamed: float) -> None:
    """Engines with real work and collectives, in threads, a step after others, in any order that events allow."""
    policy, clocks = Policy(shard_nbytes=16 << 10, streamed_updates=streamed), dict[int, WorldClock]()
    prices: list[Any] = []

    def run(world: World) -> tuple[Timeline, Plan]:
        def cost(task: Task) -> float:
            return prices[0](task) if isinstance(task, Op) and prices else 0.0

        def dram_nbytes(task: Task) -> float:
            return shared.dram_nbytes(task) if isinstance(task, Op) and prices else 0.0

        with MAKING:
            spec = Engine.from_model(tiny_model(), "cpu", policy=Policy(), verify=False).parts.ported.spec
            plan = planned(spec, MACHINES[machine], 2, policy, 4, 8, 2)
            shared = of_all(plan)
            device = SimDevice(7 + world.rank, cost=cost, contention=replace(shared, dram_nbytes=dram_nbytes))
            clock = clocks.setdefault(0, WorldClock(2, shared))
            device.virtual = clock.of(world.rank)
            engine = Engine.from_model(
                tiny_model(), device, numerics=plan.numerics, policy=policy, world=world, verify=False
            )
        with engine:
            engine.step([batch(2, 8, seed=seed) for seed in range(2)])  # with gradients to be taken up, from then on
            engine.diagnostics.record_timeline = True
            world.exchange("priced from now on", 0)
            with MAKING:
                prices.append(price_of(plan))
            world.exchange("all", 0)
            for _ in range(2):
                engine.step([batch(2, 8, seed=seed) for seed in range(2)])
            assert engine.diagnostics.timeline is not None
            return engine.diagnostics.timeline, plan

    for timeline, plan in together(worlds(2), run):
        assert timeline.schedule.digest == plan.timeline.schedule.digest
        assert timeline.seconds == pytest.approx(plan.seconds, rel=0.01)
        assert timeline.stall_seconds() == pytest.approx(plan.timeline.stall_seconds(), rel=0.01)
