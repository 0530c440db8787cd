"""No run replaces what another has left without being told to, and then it says first what goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.errors import ConfigError
from tests.docs.test_examples import tree
from tests.run.test_resume import config_of, interrupt_at, steps_in
from tests.run.test_training import losses, train


def quick(tmp_path: Path, name: str = "run", resume: str | None = None, **changed: Any) -> Any:
    changed["train"] = {"steps": 2, "eval_every": 0, **changed.pop("train", {})}
    changed["checkpoint"] = {"every": 1, "keep_last": 9, **changed.pop("checkpoint", {})}
    return config_of(tmp_path, name, resume, **changed)


def said_by(config: Any) -> str:
    return " ".join(train(config).split())


def test_a_finished_run_is_not_overwritten_by_a_repeat(tmp_path: Path) -> None:
    train(quick(tmp_path))
    before = tree(tmp_path / "run")
    words = r"run: holds a finished run: the model and the checkpoints of steps 1, 2; "
    fixes = r"set output\.folder=NEW, resume=auto with more train\.steps to extend it, or output\.overwrite=true"
    for again in (quick(tmp_path), quick(tmp_path, train={"steps": 1})):
        with pytest.raises(ConfigError, match=words + fixes):
            train(again)
    assert tree(tmp_path / "run") == before


def test_files_to_be_deleted_are_listed_first(tmp_path: Path) -> None:
    train(quick(tmp_path))
    said = said_by(quick(tmp_path, train={"steps": 1}, output={"overwrite": True}))
    goes = "the model and the checkpoints of steps 1, 2"
    told = said.index(f"output.overwrite=true: replacing {goes} in {tmp_path / 'run'} and its metrics")
    assert told < said.index("step 1/1")
    assert steps_in(tmp_path / "run") == [1]


def test_overwrite_consent_is_not_saved_in_the_config(tmp_path: Path) -> None:
    train(quick(tmp_path, output={"overwrite": True}))
    with pytest.raises(ConfigError, match="holds a finished run"):
        train(load_config(tmp_path / "run" / "config.yaml"))


def test_without_checkpoints_extending_is_not_suggested(tmp_path: Path) -> None:
    train(quick(tmp_path, checkpoint={"every": 0}))
    for resume in (None, "auto"):
        with pytest.raises(ConfigError, match=r"the model; set output\.folder=NEW, or output"):
            train(quick(tmp_path, resume=resume, checkpoint={"every": 0}))


def test_a_branch_does_not_replace_another_run(tmp_path: Path) -> None:
    """From a checkpoint of one run into the folder of another: its checkpoints are no later part of this one."""
    train(quick(tmp_path))
    train(quick(tmp_path, "other"))
    before = tree(tmp_path / "other")
    taken = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    for steps in (2, 3):
        with pytest.raises(ConfigError, match=r"other: holds a finished run: the model and the checkpoints"):
            train(quick(tmp_path, "other", resume=taken, train={"steps": steps}))
    assert tree(tmp_path / "other") == before
    said = said_by(quick(tmp_path, "other", resume=taken, train={"steps": 3}, output={"overwrite": True}))
    assert "replacing the model and the checkpoints of steps 1, 2" in said
    assert steps_in(tmp_path / "other") == [3]
    assert steps_in(tmp_path / "run") == [1, 2]


def test_resuming_from_an_earlier_step_lists_checkpoints_to_be_deleted(tmp_path: Path) -> None:
    train(quick(tmp_path))
    taken = str(tmp_path / "run" / "checkpoints" / "step-00000001")
    what = r"checkpoints after step 1, from which this run would branch off: the checkpoint of step 2; set resume=auto"
    with pytest.raises(ConfigError, match=what):
        train(quick(tmp_path, resume=taken))
    said = said_by(quick(tmp_path, resume=taken, output={"overwrite": True}))
    assert "output.overwrite=true: replacing the checkpoint of step 2 in" in said
    assert steps_in(tmp_path / "run") == [1, 2]


def test_resuming_with_fewer_steps_reports_the_finished_length(tmp_path: Path) -> None:
    train(quick(tmp_path))
    before = tree(tmp_path / "run")
    said = said_by(quick(tmp_path, resume="auto", train={"steps": 1}))
    assert "is a finished run of 2 steps; increase train.steps to extend it" in said
    assert f"{tmp_path / 'run' / 'model'} Hugging Face folder" in said
    assert tree(tmp_path / "run") == before


def test_replacing_leftover_metrics_takes_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        interrupt_at(1, patched)
        train(quick(tmp_path))
    for path in sorted((tmp_path / "run" / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert f"replacing the metrics of an earlier run in {tmp_path / 'run'}" in said_by(quick(tmp_path))
    assert len(losses(tmp_path / "run")) == 2
