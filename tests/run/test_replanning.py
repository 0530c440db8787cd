"""A plan that is taken up between two steps moves state; where a tier refuses, training goes on as it was."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatrain import AdamW, Engine, Policy
from megatrain.memory import Disk
from megatrain.plan import Calibration, Plan
from megatrain.run import replan
from megatrain.run.replan import MAY_CHANGE, MAY_FOLLOW, Replanner
from megatrain.spec import Numerics, Placement, WaitFor, Work
from tests.disk_faults import DiskFault, failing
from tests.run.test_training import configuration, train
from tests.tiny import tiny_model, unequal_batches

NUMERICS = Numerics("fp32", loss_chunk_tokens=5)


@dataclass(frozen=True)
class Asked:
    model: Any = None
    hardware: Any = field(default_factory=lambda: SimpleNamespace(shares_memory=True))
    calibration: Any = None
    overrides: dict[str, Any] = field(default_factory=dict)


@pytest.mark.few(1)
@pytest.mark.parametrize("refuses", [False, True])
def test_a_disk_filling_up_does_not_end_a_run(refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Policy(shares_memory=True)
    better = replace(usual, placements=(Placement(moments="disk"),) * 5)
    plan = finds(better, monkeypatch)
    faults = [DiskFault("full", "disk/moments/3")] if refuses else []
    losses = []
    for disk in (Disk([tmp_path]), Disk([tmp_path], calls=failing(*faults))):
        with Engine.from_model(
            tiny_model(), "cpu", "fp32", AdamW(lr=1e-2), 0.5, usual, seed=4, verify=False, disk=disk, numerics=NUMERICS
        ) as engine:
            losses.append([engine.step(unequal_batches(2)).loss])
            if losses[1:]:
                assert (Replanner(engine, plan)(1) is None) == refuses
                assert engine.policy.placements == (() if refuses else better.placements)
            losses[-1] += [engine.step(unequal_batches(2)).loss for _ in range(2)]
    assert losses[0] == losses[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("wait_for", ["unit", "shard"])
def test_replans_can_change_gates(wait_for: WaitFor, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Policy(shard_nbytes=2000, wait_for=wait_for)
    goes_over(usual, replace(usual, wait_for="shard" if wait_for == "unit" else "unit", weight_slots=3), monkeypatch)


@pytest.mark.few(1)
@pytest.mark.parametrize("ahead", [(0, 16_384), (16_384, 0)])
def test_replans_can_add_and_remove_a_ring(ahead: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    before = Policy(shard_nbytes=16_384, wait_for="shard", read_ahead_nbytes=ahead[0])
    told, asked = goes_over(before, replace(before, read_ahead_nbytes=ahead[1]), monkeypatch)
    assert "read_ahead_nbytes" in told
    assert "read_ahead_nbytes" not in asked.overrides


def goes_over(before: Policy, after: Policy, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Asked]:
    """A re-plan takes up the other policy, and losses stay. What it tells, and what it asks the planner."""
    asked: list[Asked] = []
    plan, losses, told = finds(after, monkeypatch, asked), [], ""
    for replanned in (False, True):
        with Engine.from_model(tiny_model(), "sim:2", "fp32", AdamW(lr=1e-2), 0.5, before, numerics=NUMERICS) as engine:
            losses.append([engine.step(unequal_batches(2)).loss])
            if replanned:
                changed = Replanner(engine, plan)(1)
                assert changed is not None
                assert engine.policy == after
                told = changed.changes
            losses[-1] += [engine.step(unequal_batches(2)).loss for _ in range(2)]
    assert losses[0] == losses[1]
    return told, asked[0]


def test_replans_adapt_kept_outputs_beside_a_ring() -> None:
    assert "read_ahead_nbytes" in set(MAY_CHANGE) - set(MAY_FOLLOW)  # and so pinned, when a bus is followed


def finds(better: Policy, monkeypatch: pytest.MonkeyPatch, asked: list[Asked] | None = None) -> Plan:
    """A plan to begin with, for a planner that then finds `better` at half the time; what it is asked is noted."""

    def found(question: Asked) -> object:
        if asked is not None:
            asked.append(question)
        return SimpleNamespace(question=question, seconds=1.0, policy=better)

    monkeypatch.setattr(replan, "op_seconds", lambda *_: None)
    monkeypatch.setattr(replan, "contention", lambda *_: None)
    monkeypatch.setattr(replan, "calibrate", lambda *_, **__: Calibration())
    monkeypatch.setattr(replan, "examine", lambda *_: SimpleNamespace(seconds=2.0))
    monkeypatch.setattr(replan, "find_plan", found)
    return cast(Plan, SimpleNamespace(question=Asked(), work=Work((20, 18)), micro_batch=1))


def test_step_times_reach_the_replanner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once the trace of an early step, which every run writes, has ended; and on a device that is not timed."""
    seen: dict[str, list[bool]] = {}
    honest = Replanner.__call__

    def noted(self: Replanner, step: int) -> object:
        seen.setdefault(self.engine.parts.device.name, []).append(self.engine.diagnostics.timeline is not None)
        return honest(self, step)

    monkeypatch.setattr(Replanner, "__call__", noted)
    monkeypatch.setattr("megatrain.device.sim.SimDevice.timed", False)
    for name in ("cpu", "sim:1"):
        (tmp_path / name).mkdir()
        train(configuration(tmp_path / name, train={"steps": 5, "device": name}))
    assert {name: len(times) for name, times in seen.items()} == {"cpu": 5, "sim:1": 5}
    assert all(all(times) for times in seen.values()), seen
