"""A system that lets little be page-locked costs speed and no number."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatrain import AdamW, Engine, Policy
from megatrain.device.sim import SimDevice
from megatrain.errors import DeviceError, PlanError
from megatrain.plan import Question, find_plan
from megatrain.run.this_machine import this_machine
from megatrain.schedule.passes.pinned_staging import pinned_nbytes
from megatrain.spec import Transfer
from tests.integration.test_tiers import RESIDENT, SPLITS, results, run, usual
from tests.tiny import equal, tiny_model, unequal_batches

MIXED, RESIDENTS = SPLITS["a different one each"], RESIDENT["ends resident"]
SOME = [("bf16", "next_forward", MIXED), ("fp32", "during_backward", RESIDENTS)]
SOME += [("bf16", "next_forward", SPLITS["everything"])]
WAYS = [("bf16", "next_forward"), ("fp32", "during_backward")]
ALL = [(*way, split) for way, split in product(WAYS, (*SPLITS.values(), *RESIDENT.values()))]


@pytest.mark.parametrize(
    "cases",
    [SOME, pytest.param(ALL, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_pageable_memory_gives_the_same_bits(cases: list[Any], tmp_path: Path) -> None:
    for number, (precision, update, split) in enumerate(cases):
        expected = run("cpu", precision, usual(update, shares_memory=True), tmp_path)
        policy = replace(
            usual(update, placements=split, transfer="pageable", pinned_staging_slots=1 + number % 3), shard_nbytes=9000
        )
        assert equal(run(f"sim:{number}", precision, policy, tmp_path), expected), split


def small(device: SimDevice, policy: Policy | str = "auto") -> Engine:
    return Engine.from_model(tiny_model(), device, "bf16", AdamW(lr=1e-2), 0.5, policy, seed=4, verify=False)  # type: ignore[arg-type]


def test_beyond_the_pinning_limit_pageable_copies_are_used() -> None:
    with small(SimDevice(1)) as free:
        expected = results(free)
        everything = sum(free.parts.device.host.locked.values())  # type: ignore[attr-defined]
    for limit, transfer in ((everything, "pinned"), (everything - 1, "pageable"), (1000, "pageable")):
        device = SimDevice(1, lockable=limit)
        with small(device) as made:
            assert made.policy.transfer == transfer
            assert equal(results(made), expected)
            assert sum(device.host.locked.values()) <= limit
    with pytest.raises(
        DeviceError, match=r"\S+ [kM]B are page-locked, and 1.00 kB are allowed; use a policy with transfer"
    ):
        small(SimDevice(1, lockable=1000), Policy())


@pytest.mark.parametrize("transfer", ["pinned", "pageable"])
def test_save_buffers_are_not_pinned(transfer: Transfer, tmp_path: Path) -> None:
    """No copy to or from the device touches it, and it is as large as the largest unit in float32."""
    device = SimDevice(1)
    with small(device, replace(usual("next_forward"), transfer=transfer)) as made:
        made.step(unequal_batches(2))
        before = sum(device.host.locked.values())
        device.host.lockable_nbytes = before
        made.save(tmp_path).wait()
        assert sum(device.host.locked.values()) == before


def test_plans_pin_the_memory_they_announce() -> None:
    device = SimDevice(2, lockable=400_000)
    machine = replace(this_machine(device, "bf16", "rtx-4090"), device_nbytes=1 << 24)
    assert machine.pinnable_nbytes == 400_000
    with Engine.from_model(tiny_model(), "sim:0", verify=False) as made:
        spec = made.parts.ported.spec
    plan = find_plan(Question(spec, machine, 24, 12, overrides={"shard_nbytes": 2000, "placements": ()}))
    with small(device, plan.policy) as made:
        made.parts.prepare(plan.work)
        made.step(unequal_batches(2))
        made.step(unequal_batches(2))
        locked = pinned_nbytes(plan.timeline.schedule.buffers.values(), "pinned")
        assert 0 < sum(device.host.locked.values()) <= locked <= 400_000
        with pytest.raises(PlanError, match=r"policy.transfer: cannot change during training"):
            made.adopt(replace(plan.policy, transfer="pageable", streamed_updates=0.0))
    assert device.host.locked == {}
