"""What layers keep follows the bus: when it becomes slower in the middle of a run, within three steps, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatrain import AdamW, Engine, Policy
from megatrain.device.base import Task
from megatrain.plan import Plan, Question, find_plan, op_seconds
from megatrain.run.replan import Replanner
from megatrain.schedule import Op
from megatrain.spec import NOT_OFFLOADED, Hardware, Limits, Numerics
from megatrain.testing import SimDevice
from tests.tiny import batch, tiny_model

QUICK = Hardware("m", 1 << 40, 1 << 40, 4e9, 4e9, 1e11, 1e12, device_bandwidth=1e12)
"""Compute of a layer takes about as long as its input's way."""

LENGTH, ROWS = 64, 8


class Bus:
    """A machine's prices, as they are at the moment."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.plan: Plan | None = None
        self._prices: dict[Hardware, Callable[[Op], float]] = {}

    def cost(self, task: Task) -> float:
        if self.plan is None or not isinstance(task, Op):
            return 0.0
        if self.hardware not in self._prices:
            plan = self.plan
            self._prices[self.hardware] = op_seconds(
                plan.question.model, plan.numerics, plan.policy, plan.work, self.hardware
            )
        return self._prices[self.hardware](task)


def offloaded_share(policy: Policy) -> float:
    return sum(share for keep, share in policy.kept_shares.items() if keep in NOT_OFFLOADED)


def planned(engine: Engine, hardware: Hardware, **overrides: Any) -> Plan:
    """Within as much memory as leaves no room for all inputs."""
    fixed = {
        "micro_batch": 2,
        "micro_batches_per_round": 0,
        "placements": (),
        "loss_chunk_tokens": 64,
        "weight_slots": 2,
        "grad_slots": 2,
    }
    asked = Question(
        engine.parts.ported.spec, hardware, ROWS * LENGTH, LENGTH, "fp32", overrides={**fixed, "shard_nbytes": 1 << 16}
    )
    lean = find_plan(replace(asked, overrides={**asked.overrides, "activations_by_layer": (("offload",),)})).nbytes[
        "device"
    ]
    whole = find_plan(replace(asked, overrides={**asked.overrides, "activations_by_layer": (("input",),)})).nbytes[
        "device"
    ]
    return find_plan(
        replace(
            asked,
            limits=Limits(device_nbytes=round(0.3 * lean + 0.7 * whole)),
            overrides={**asked.overrides, **overrides},
        )
    )


def batches(step: int) -> list[dict[str, Any]]:
    return [batch(2, LENGTH, 10 * step + number) for number in range(ROWS // 2)]


def made(device: Any, policy: Policy) -> Engine:
    model = tiny_model("llama", num_hidden_layers=8)
    return Engine.from_model(
        model,
        device,
        numerics=Numerics("fp32", loss_chunk_tokens=64),
        optimizer=AdamW(lr=1e-2),
        max_grad_norm=0.5,
        policy=policy,
        verify=False,
    )


def test_a_slower_bus_triggers_a_replan_within_three_steps() -> None:
    bus = Bus(QUICK)
    slow = replace(QUICK, fetch_bandwidth=QUICK.fetch_bandwidth / 32, grad_bandwidth=QUICK.grad_bandwidth / 32)
    with made("cpu", Policy(shares_memory=True)) as plain:
        expected = [plain.step(batches(step)).loss for step in range(9)]
    with made(SimDevice(3, cost=bus.cost), Policy()) as engine:
        bus.plan = planned(engine, QUICK)
        engine.adopt(bus.plan.policy)
        replanner, losses, seconds, changes = Replanner(engine, bus.plan), [], [], []
        for step in range(9):
            if step == 4:
                bus.hardware = slow
            losses.append(engine.step(batches(step)).loss)
            assert engine.diagnostics.timeline is not None
            seconds.append(engine.diagnostics.timeline.seconds)
            changes.append(replanner(step + 1))
        best = planned(engine, slow)
    assert losses == expected
    quick, slow_bus = (offloaded_share(plan.policy) for plan in (bus.plan, best))
    assert quick > 0.2, "a quick bus fetches"
    assert slow_bus < quick, "a slow one computes"
    assert changes[:5] == [None] * 5
    assert any(changes[5:7])
    assert seconds[4] > 1.1 * best.seconds
    assert 0.9 * seconds[7] <= best.seconds, (seconds, best.seconds)


def test_brief_bus_slowdowns_do_not_replan() -> None:
    bus = Bus(QUICK)
    with made(SimDevice(3, cost=bus.cost), Policy()) as engine:
        bus.plan = planned(engine, QUICK)
        engine.adopt(bus.plan.policy)
        replanner = Replanner(engine, bus.plan)
        for step in range(6):
            speed = QUICK.fetch_bandwidth / (32 if step % 2 else 1)
            bus.hardware = replace(QUICK, fetch_bandwidth=speed, grad_bandwidth=speed)
            engine.step(batches(step))
            assert replanner(step + 1) is None
