"""A run tells how it is, and what hangs is named."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatrain import AdamW, Engine, Policy
from megatrain.checkpoint.range_writer import RangeWriter
from megatrain.device.cpu import CpuDevice
from megatrain.engine import streamer
from megatrain.errors import DiskFull
from megatrain.train.events import Resumed, Saved, Skipped
from megatrain.train.progress import ProgressLine
from megatrain.train.status import Health, Intervals
from tests.tiny import tiny_model, unequal_batches
from tests.train.test_metrics import stepped

STALL = 0.15
SKIPPED = Skipped(4, 10, "nan", 1, 2.0, 8.0)


@pytest.fixture
def engine() -> Iterator[Engine]:
    policy = Policy(shares_memory=True)
    with Engine.from_model(tiny_model(), "cpu", "bf16", AdamW(), policy=policy, verify=False) as made:
        yield made


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def watched(engine: Engine, path: Path, said: list[str]) -> Health:
    return Health(path, engine, 10, Intervals(3, STALL, beat_seconds=0.02), say=said.append)


def eventually(holds: Any) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.01)


def test_the_file_follows_the_run(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    with watched(engine, path, []) as health:
        assert read(path)["state"] == "starting"
        health(Resumed(2, 10, "runs/step-2"))
        health(stepped(3))
        assert read(path) | {"state": "running", "step": 3, "loss": 2.5, "pid": os.getpid()} == read(path)
        health(Saved(3, 1.0, 10, "runs/step-3"))
        health(SKIPPED)
        before = read(path)["heartbeat"]
        eventually(lambda: read(path)["heartbeat"] > before and read(path)["step"] == 4)
        assert read(path)["last_checkpoint"] == "runs/step-3"
    assert read(path)["state"] == "stopped"
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


def test_tracked_loss_and_epoch_equal_the_progress_line(engine: Engine, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    health, line = watched(engine, tmp_path / "status.json", []), ProgressLine(console, log_every=3)
    for event in (stepped(1, 4.0), stepped(4, 3.0), SKIPPED, replace(stepped(6, 2.0), epoch=0.5)):
        health(event)
        line(event)
    health.write()
    status = read(tmp_path / "status.json")
    assert isinstance(console.file, io.StringIO)
    assert f"epoch {status['epoch']:.2f}  loss {status['loss']:.3f}" in console.file.getvalue().splitlines()[-1]
    assert status["loss"] == 2.5


def test_an_error_marks_the_run_as_failed(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(DiskFull), watched(engine, tmp_path / "status.json", []):
        raise DiskFull("no space", where="disk")
    assert read(tmp_path / "status.json")["state"] == "failed"
    assert read(tmp_path / "status.json")["error"] == "DiskFull: disk: no space"


def test_hanging_ops_are_named_once_with_their_age(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    honest, gate = streamer.ACTIONS["UPDATE"], threading.Event()

    def hangs(*given: Any) -> None:
        gate.wait(60)
        honest(*given)

    engine.step(unequal_batches(1))
    monkeypatch.setitem(streamer.ACTIONS, "UPDATE", hangs)
    path = tmp_path / "status.json"
    with watched(engine, path, said):
        runner = threading.Thread(target=engine.step, args=(unequal_batches(1),))
        runner.start()
        eventually(lambda: read(path)["stalled"])
        assert "op UPDATE u0 on stream host has been running for" in said[0]
        time.sleep(0.1)
        gate.set()
        runner.join()
        eventually(lambda: not read(path)["stalled"])
    assert len([line for line in said if "UPDATE u0" in line]) == 1


def test_a_slow_disk_is_named_during_a_stalled_save(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    honest, gate = RangeWriter.write, threading.Event()

    def stands(self: RangeWriter, *given: Any) -> None:
        gate.wait(60)
        honest(self, *given)

    monkeypatch.setattr(RangeWriter, "write", stands)
    path = tmp_path / "status.json"
    with watched(engine, path, said):
        save = engine.save(tmp_path / "run")
        eventually(lambda: said)
        assert said[0].startswith("the checkpoint of step 0 has been stuck at ")
        assert read(path)["saving"]["step"] == 0
        gate.set()
        save.wait()


def test_a_thread_that_dies_is_named(tmp_path: Path) -> None:
    said: list[str] = []
    device = CpuDevice()
    with (
        Engine.from_model(tiny_model(), device, policy=Policy(shares_memory=True), verify=False) as engine,
        watched(engine, tmp_path / "status.json", said),
    ):
        time.sleep(0.1)
        assert said == []
        device.stream("host")._queue.put(None)  # type: ignore[attr-defined]
        eventually(lambda: said)
    assert said == ["thread megatrain-host has died"]
    device._closed = True
