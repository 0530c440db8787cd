"""What a run does where its folder, the time or the system are not as they should be, and goes on all the same."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatrain.checkpoint.listing import checkpoints
from megatrain.errors import CheckpointError, ConfigError
from megatrain.run.training import run_training
from megatrain.system.locks import Claim
from megatrain.train.checkpoints import Checkpoints
from megatrain.train.engine import Engine
from megatrain.train.events import Event, Stepped
from megatrain.train.metrics import JsonLines
from tests.run.test_resume import config_of, interrupt_at, not_finite_at, steps_in, weights
from tests.run.test_training import lines, losses, train
from tests.tiny import equal


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return found


def wait_for_each_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step begins before the save of an earlier one is over: where one is under way, the next is left out."""
    honest = Engine.step

    def patient(engine: Engine, micro_batches: Any, *how: Any) -> Any:
        engine.saver.wait()
        return honest(engine, micro_batches, *how)

    monkeypatch.setattr(Engine, "step", patient)


def test_symlinked_checkpoints_belong_to_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone has moved it to a larger drive. Nothing is removed for that, and the run goes on where it was."""
    train(config_of(tmp_path, "straight", train={"steps": 4}))
    with monkeypatch.context() as patched:
        interrupt_at(3, patched)
        train(config_of(tmp_path, train={"steps": 4}))
    newest, older = checkpoints(tmp_path / "run" / "checkpoints")
    shutil.move(newest, tmp_path / "elsewhere")
    newest.symlink_to(tmp_path / "elsewhere")
    train(config_of(tmp_path, resume="auto", train={"steps": 4}))
    assert (tmp_path / "elsewhere" / "manifest.json").exists()
    assert older.exists()
    assert steps_in(tmp_path / "run") == [2, 3, 4]
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "straight"))


def test_a_deadline_between_steps_ends_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = JsonLines.__call__

    def slow(self: JsonLines, event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 3:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.3)
        honest(self, event)

    monkeypatch.setattr(JsonLines, "__call__", slow)
    monkeypatch.setattr(Checkpoints, "expected_seconds", lambda self: 19.9)
    said = train(config_of(tmp_path, checkpoint={"deadline_seconds": 20.0}, train={"steps": 4}))
    assert "`resume=auto` continues after step 3" in said
    assert steps_in(tmp_path / "run") == [2, 3]


def test_a_stopped_run_that_could_not_save_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain.checkpoint import save

    def full(target: Path, needed: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, "refuse_too_little_space", full)
    interrupt_at(1, monkeypatch)
    what = r"checkpoints: the state after step 1, the last one, was not saved; there is no checkpoint; .*train again$"
    with pytest.raises(CheckpointError, match=what):
        train(config_of(tmp_path))
    assert status(tmp_path / "run")["state"] == "failed"


def test_failure_of_the_final_save_is_reported_once_and_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from step 3 on; there is room for the model, and it goes on from where it was saved."""
    from megatrain.checkpoint import save

    honest = save.refuse_too_little_space

    def full(target: Path, needed: int) -> None:
        if not target.name.endswith("00000002"):
            raise OSError(28, "No space left on device")
        honest(target, needed)

    heard = io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr(save, "refuse_too_little_space", full)
        wait_for_each_save(patched)
        what = "the state after step 6, the last one, was not saved; the newest checkpoint is that of step 2; the model"
        with pytest.raises(CheckpointError, match=what + r".*set resume=auto, which continues after step 2"):
            run_training(config_of(tmp_path), Console(file=heard, width=500))
    told = [line for line in heard.getvalue().splitlines() if "No space left" in line]
    assert len(told) == 2
    for step, line in zip((4, 6), told, strict=True):
        assert f"the checkpoint of step {step} was not written: " in line
    found = status(tmp_path / "run")
    assert (found["state"], found["last_checkpoint_step"]) == ("failed", 2)
    assert "the state after step 6" in found["error"]
    assert (tmp_path / "run" / "model" / "config.json").exists()
    train(config_of(tmp_path, resume="auto"))
    assert steps_in(tmp_path / "run")[-1] == 6
    assert status(tmp_path / "run")["state"] == "finished"


def test_a_branched_run_can_roll_back_to_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(config_of(tmp_path, train={"steps": 2}))
    not_finite_at({2}, monkeypatch)
    taken = str(tmp_path / "run" / "checkpoints")
    rollback = {"steps": 3, "on_nonfinite": "rollback"}
    train(config_of(tmp_path, "branch", resume=taken, train=rollback))
    told = [(line["step"], line["to"]) for line in lines(tmp_path / "branch") if line["event"] == "rolledback"]
    assert told == [(3, 2)]
    assert steps_in(tmp_path / "branch") == [2, 3]


def test_a_rollback_skips_damaged_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    not_finite_at({4}, monkeypatch)
    step = Engine.step

    def damaging(engine: Engine, micro_batches: Any, *how: Any) -> Any:
        engine.saver.wait()  # at each step: while one save is under way, the next is left out
        if engine.steps == 4:
            file = tmp_path / "run" / "checkpoints" / "step-00000004" / "model.safetensors"
            content = bytearray(file.read_bytes())
            content[-2] ^= 1
            file.write_bytes(content)
        return step(engine, micro_batches, *how)

    monkeypatch.setattr(Engine, "step", damaging)
    train(config_of(tmp_path, train={"on_nonfinite": "rollback"}))
    told = [(line["step"], line["to"]) for line in lines(tmp_path / "run") if line["event"] == "rolledback"]
    assert told[0] == (5, 2)


def test_a_run_folder_is_locked(tmp_path: Path) -> None:
    with Claim() as claim:
        claim.make(tmp_path / "run")
        claim.take(tmp_path / "run")
        with pytest.raises(ConfigError, match=r"run: another run is using this folder; wait until"):
            train(config_of(tmp_path))
    assert os.listdir(tmp_path / "run") == []
    with Claim() as claim:
        claim.take(tmp_path / "run")
        claim.take(tmp_path / "nothing")


def test_file_systems_without_locks_are_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Claim() as claim:
        claim.take(tmp_path)
