"""A plan that is taken up between two steps moves state; where a tier refuses, training goes on as it was."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatrain import AdamW, Engine, Policy, preflight
from megatrain.memory import Disk
from megatrain.memory.disk_faults import DiskFault
from megatrain.plan import Calibration, Plan
from megatrain.preflight import Replanner
from megatrain.spec import Home, Work
from tests.run.test_run import configuration, train
from tests.tiny import tiny_model, unequal_batches


@dataclass(frozen=True)
class Asked:
    model: Any = None
    hardware: Any = field(default_factory=lambda: SimpleNamespace(shares_memory=True))
    calibration: Any = None
    pinned: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_disk_that_is_full_meanwhile_ends_no_run(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Policy("fp32", shares_memory=True, loss_chunk_tokens=5)
    better = replace(usual, homes=(Home(moments="disk"),) * 5)
    monkeypatch.setattr(preflight, "op_seconds", lambda *_: None)
    monkeypatch.setattr(preflight, "calibrate", lambda *_, **__: Calibration())
    monkeypatch.setattr(preflight, "examine", lambda *_: SimpleNamespace(seconds=2.0))
    monkeypatch.setattr(preflight, "find_plan", lambda _: SimpleNamespace(question=Asked(), seconds=1.0, policy=better))
    plan = cast(Plan, SimpleNamespace(question=Asked(), work=Work((20, 18)), micro_batch=1))
    faults = [DiskFault("full", "disk/moments/3")] if refuses else []
    losses = []
    for disk in (Disk([tmp_path]), Disk([tmp_path], faults=faults)):
        with Engine.from_model(tiny_model(), "cpu", "fp32", AdamW(lr=1e-2), 0.5, usual, 4, False, disk) as engine:
            losses.append([engine.step(unequal_batches(2)).loss])
            if losses[1:]:
                assert (Replanner(engine, plan)(1) is None) == refuses
                assert engine.policy.homes == (() if refuses else better.homes)
            losses[-1] += [engine.step(unequal_batches(2)).loss for _ in range(2)]
    assert losses[0] == losses[1]


def test_a_run_hands_the_times_of_every_step_to_whoever_replans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once the trace of an early step, which every run writes, has ended; and on a device that is not timed."""
    seen: dict[str, list[bool]] = {}
    honest = Replanner.__call__

    def noted(self: Replanner, step: int) -> object:
        seen.setdefault(self.engine._device.name, []).append(self.engine.timeline is not None)
        return honest(self, step)

    monkeypatch.setattr(Replanner, "__call__", noted)
    monkeypatch.setattr("megatrain.device.sim.SimDevice.timed", False)
    for name in ("cpu", "sim:1"):
        (tmp_path / name).mkdir()
        train(configuration(tmp_path / name, train={"steps": 5, "device": name}))
    assert {name: len(times) for name, times in seen.items()} == {"cpu": 5, "sim:1": 5}
    assert all(all(times) for times in seen.values()), seen
