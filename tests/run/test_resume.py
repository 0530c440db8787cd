"""A run that was stopped, broken off or finished goes on as if nothing had been; and what has changed is said."""

from __future__ import annotations

import errno
import io
import json
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from megatrain.checkpoint import manifest
from megatrain.checkpoint.folder import newest_sound, open_checkpoint
from megatrain.checkpoint.listing import checkpoints, step_of
from megatrain.checkpoint.load import Checkpoint
from megatrain.checkpoint.range_writer import RangeWriter
from megatrain.errors import CheckpointError, ConfigError, DataError, ExportError, NonFinite
from megatrain.optim import Lion
from megatrain.run import training
from megatrain.run.resume import as_begun, changes_between, refuse_changes
from megatrain.run.training import run_training
from megatrain.spec import Numerics
from megatrain.system import atomic
from megatrain.train.async_save import Save, Saver
from megatrain.train.engine import Engine, StepOutput
from megatrain.train.loop import Feed
from megatrain.train.metrics import JsonLines
from tests.run.test_training import configuration, lines, losses, train
from tests.tiny import BYTE_LLAMA, equal

STEPS = 6


def config_of(tmp_path: Path, name: str = "run", resume: str | None = None, **changed: Any) -> Any:
    """A run of six steps with dropout; a keyword `resume` as the top-level key."""
    model = {"config": BYTE_LLAMA | {"attention_dropout": 0.2}, "verify": False}
    top = {key: changed.pop(key) for key in ("accept_changes",) if key in changed}
    sections = {
        "model": model,
        "train": {"steps": STEPS, "sample_tokens": 0, "eval_every": 3},
        "checkpoint": {"every": 2, "keep_last": 9, "keep_every": 2},  # a save that is kept is waited for
        "output": {"folder": str(tmp_path / name), "verify_export": False},
    }
    for section, values in changed.items():
        sections.setdefault(section, {}).update(values)
    return configuration(tmp_path, **sections).model_copy(update={"resume": resume, **top})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "model" / "model.safetensors"))


def steps_in(folder: Path) -> list[int]:
    return sorted(step_of(path) for path in checkpoints(folder / "checkpoints"))


def on_paper(folder: Path, config: dict[str, Any], step: int = 1, **engine: Any) -> Checkpoint:
    """A checkpoint of a run with that configuration, as far as its going on is decided."""
    engine = engine or {"numerics": asdict(Numerics())}
    training = {"run": {"step": step, "data": {}, "config": config}, "engine": engine}
    return cast(Checkpoint, SimpleNamespace(training=training, folder=folder))


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal comes within a step, counted from 1."""
    honest = Engine.step

    def interrupted(engine: Engine, micro_batches: Any, *how: Any) -> StepOutput:
        if engine.steps + 1 == step:
            signal.raise_signal(signal.SIGTERM)
        return honest(engine, micro_batches, *how)

    monkeypatch.setattr(Engine, "step", interrupted)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a run that is left alone."""
    tmp_path = tmp_path_factory.mktemp("straight")
    train(config_of(tmp_path, checkpoint={"every": 0}))
    assert not (tmp_path / "run" / "checkpoints").exists()
    return losses(tmp_path / "run"), weights(tmp_path / "run")


# Going on ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"policy": {"activations": "recompute", "weight_slots": 3, "host_threads": 1}},
        pytest.param({"train": {"device": "sim:3"}}, marks=pytest.mark.slow),
    ],
    ids=["other policy", "other device"],
)
def test_a_stopped_run_resumes_bit_for_bit(
    changed: dict[str, Any], straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        interrupt_at(3, patched)
        said = train(config_of(tmp_path))
    assert "`resume=auto` continues after step 3" in said
    folder = tmp_path / "run"
    assert steps_in(folder) == [2, 3]
    assert not (folder / "model").exists()
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
    said = train(config_of(tmp_path, resume="auto", **changed))
    assert "goes on after step 3, from" in said
    assert losses(folder) == straight[0]
    assert equal(weights(folder), straight[1])
    kinds = [line["event"] for line in lines(folder)]
    assert kinds.count("resumed") == kinds.count("ended") == 1
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["step"], status["last_checkpoint_step"]) == ("finished", STEPS, STEPS)


def test_resume_auto_starts_a_new_run(straight: Any, tmp_path: Path) -> None:
    train(config_of(tmp_path, resume="auto"))
    assert losses(tmp_path / "run") == straight[0]


@pytest.mark.parametrize("block_nbytes", [manifest.BLOCK_NBYTES, 1 << 12], ids=["opened", "loaded"])
def test_damaged_checkpoints_are_skipped_with_a_line(
    block_nbytes: int, straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether damage is in a first block, which is compared when they are opened, or where the model is loaded."""
    monkeypatch.setattr(manifest, "BLOCK_NBYTES", block_nbytes)
    with monkeypatch.context() as patched:
        interrupt_at(5, patched)
        train(config_of(tmp_path, checkpoint={"keep_every": 2}))  # which no other save makes it skip
    newest, second, third = checkpoints(tmp_path / "run" / "checkpoints")
    (newest / "manifest.json").unlink()
    content = bytearray((second / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (second / "model.safetensors").write_bytes(content)
    said = train(config_of(tmp_path, resume="auto"))
    (first, other) = [line for line in said.splitlines() if "skipped an invalid checkpoint" in line]
    assert "step-00000005: manifest.json is missing" in first
    assert "step-00000004: model.safetensors is damaged" in other
    assert f"goes on after step 2, from {third}" in said.replace("\n", "")
    assert losses(tmp_path / "run") == straight[0]
    assert equal(weights(tmp_path / "run"), straight[1])


def test_a_finished_run_whose_last_checkpoint_is_damaged_goes_on_from_the_one_before(
    straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "BLOCK_NBYTES", 1 << 12)
    train(config_of(tmp_path))
    newest, second, *_ = checkpoints(tmp_path / "run" / "checkpoints")
    path = newest / "optimizer" / "moments.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    said = train(config_of(tmp_path, resume="auto")).replace("\n", "")
    assert "skipped an invalid checkpoint: step-00000006: optimizer/moments.safetensors is damaged" in said
    assert f"goes on after step 4, from {second}" in said
    assert equal(weights(tmp_path / "run"), straight[1])


@pytest.mark.parametrize("inside", ["", pytest.param("checkpoints", marks=pytest.mark.slow)])
def test_a_named_run_resumes_from_its_newest_valid_checkpoint(inside: str, tmp_path: Path) -> None:
    train(config_of(tmp_path, train={"steps": 4}))
    newest, second = checkpoints(tmp_path / "run" / "checkpoints")
    named = {"resume": str(tmp_path / "run" / inside), "train": {"steps": 4}, "output": {"overwrite": False}}
    (newest / "manifest.json").unlink()
    said = train(config_of(tmp_path, **named)).replace("\n", "")
    assert "skipped an invalid checkpoint" in said
    assert f"goes on after step 2, from {second}" in said
    with pytest.raises(ConfigError, match=r"after step 2, .* resume=auto to resume from the newest valid"):
        train(config_of(tmp_path, **named | {"resume": str(second)}))


@pytest.mark.slow
def test_without_a_valid_checkpoint_a_run_does_not_silently_restart(tmp_path: Path) -> None:
    train(config_of(tmp_path, checkpoint={"keep_last": 1, "keep_every": None}))
    (only,) = checkpoints(tmp_path / "run" / "checkpoints")
    (only / "training.json").unlink()
    with pytest.raises(CheckpointError, match="holds no valid checkpoint; start again in another"):
        train(config_of(tmp_path, resume="auto"))


@pytest.mark.slow
def test_a_run_can_branch_from_another_runs_checkpoint(straight: Any, tmp_path: Path) -> None:
    train(config_of(tmp_path))
    taken = tmp_path / "run" / "checkpoints" / "step-00000002"
    train(config_of(tmp_path, "branch", resume=str(taken)))
    assert losses(tmp_path / "branch") == straight[0][2:]
    assert equal(weights(tmp_path / "branch"), straight[1])


# What has changed ----------------------------------------------------------------------------------------------------


def test_changes_that_would_corrupt_are_refused_unless_accepted(tmp_path: Path) -> None:
    train(config_of(tmp_path, train={"steps": 2}))
    rates = {"learning_rate": 5e-3, "learning_rates": {"*norm*": 0.0}, "optimizer": "lion"}
    changed = {"train": {"seed": 5, "precision": "fp32", **rates}, "data": {"sequence_length": 16}}
    said = r"train\.precision bf16 -> fp32.*train\.seed 0 -> 5|train\.seed 0 -> 5.*train\.precision bf16 -> fp32"
    with pytest.raises(ConfigError, match=said) as caught:
        train(config_of(tmp_path, resume="auto", **changed))
    assert "data.sequence_length 32 -> 16" in str(caught.value)
    assert "train.optimizer adamw -> lion" in str(caught.value)
    assert "train.learning_rate" not in str(caught.value)
    assert "accept_changes=true" in str(caught.value)
    told = train(config_of(tmp_path, resume="auto", accept_changes=True, **changed)).replace("\n", "")
    assert "train.learning_rate 0.01 -> 0.005; train.learning_rates {} -> {'*norm*': 0.0}" in told
    newest, norm = newest_sound(tmp_path / "run" / "checkpoints").checkpoint, "model.norm.weight"
    assert newest is not None
    assert newest.training["engine"]["optimizer"]["learning_rates"] == [["*norm*", 0.0]]
    assert newest.training["engine"]["optimizer"]["name"] == "lion"
    assert newest.keeps(norm, Lion.STATE)
    first = load_file(tmp_path / "run" / "checkpoints" / "step-00000002" / "model.safetensors")
    assert torch.equal(weights(tmp_path / "run")[norm], first[norm])
    assert "the data has changed, and starts from its beginning" in told
    assert len(losses(tmp_path / "run")) == STEPS


def test_changed_data_under_the_same_name_is_detected(tmp_path: Path) -> None:
    train(config_of(tmp_path, train={"steps": 2}))
    config = config_of(tmp_path, resume="auto")
    (tmp_path / "corpus.txt").write_text("something else entirely\n" * 300)
    with pytest.raises(DataError, match="accept_changes=true"):
        train(config)
    assert len(losses(tmp_path / "run")) == 2


def test_a_key_that_the_checkpoint_does_not_know_was_at_its_default(tmp_path: Path) -> None:
    """It is of an earlier version."""
    config = config_of(tmp_path).model_dump(mode="json")
    before = {**config, "train": {name: value for name, value in config["train"].items() if name != "learning_rates"}}
    assert changes_between(before, config) == {}
    config["train"]["learning_rates"] = {"*norm*": 0.0}
    assert changes_between(before, config) == {"train.learning_rates": ({}, {"*norm*": 0.0})}


def test_a_run_keeps_its_numerics_on_resume(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    numerics = asdict(Numerics("fp32", loss_chunk_tokens=77, mlp_chunk_tokens=9))
    taken = on_paper(tmp_path, config.model_dump(mode="json"), numerics=numerics)
    begun = as_begun(config, taken).policy.overrides
    assert (begun["loss_chunk_tokens"], begun["mlp_chunk_tokens"], begun["kernels"]) == (77, 9, "stock")
    assert "weight_slots" not in set(begun) - set(config.policy.overrides)


def test_a_checkpoint_of_before_the_first_release_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(CheckpointError, match="before the first release"):
        as_begun(config, on_paper(tmp_path, config.model_dump(mode="json"), policy={}))


# Faults --------------------------------------------------------------------------------------------------------------


def test_a_full_disk_keeps_the_run_and_old_checkpoint(
    straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, full = RangeWriter.write, [False]

    def write(self: RangeWriter, *given: Any) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        honest(self, *given)

    step = Engine.step

    def filling(engine: Engine, micro_batches: Any, *how: Any) -> StepOutput:
        engine.saver.wait()
        full[0] = 3 <= engine.steps + 1 <= 5
        return step(engine, micro_batches, *how)

    monkeypatch.setattr(RangeWriter, "write", write)
    monkeypatch.setattr(Engine, "step", filling)
    said = train(config_of(tmp_path))
    assert "the checkpoint of step 4 was not written" in said
    assert "No space left on device" in said
    assert steps_in(tmp_path / "run") == [2, 6]
    assert losses(tmp_path / "run") == straight[0]
    assert [line["step"] for line in lines(tmp_path / "run") if line["event"] == "saved"] == [2, 6]
    assert equal(weights(tmp_path / "run"), straight[1])


def test_a_run_whose_model_cannot_be_written_says_where_it_goes_on(
    straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Path:
        raise ExportError("cannot be written (No space left on device)", where="model", fix="free some space")

    told = io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr(training, "save_trained", refused)
        with pytest.raises(ExportError):
            run_training(config_of(tmp_path), Console(file=told, width=200))
    assert "`resume=auto` continues after step 6" in told.getvalue()
    train(config_of(tmp_path, resume="auto"))
    assert equal(weights(tmp_path / "run"), straight[1])


def not_finite_at(draws: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The data of these draws makes the loss not finite, whenever it is used."""
    feeds: list[Feed] = []
    honest_next, honest_step = Feed.__next__, Engine.step

    def noted(self: Feed) -> Any:
        feeds.append(self)
        return honest_next(self)

    def step(engine: Engine, micro_batches: Any, *how: Any) -> StepOutput:
        if feeds[-1].drawn - 1 in draws:
            raise NonFinite("the loss is nan", where="step")
        return honest_step(engine, micro_batches, *how)

    monkeypatch.setattr(Feed, "__next__", noted)
    monkeypatch.setattr(Engine, "step", step)


def without(draws: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Feed.__init__

    def made(self: Feed, loader: Any) -> None:
        honest(self, loader)
        self.left_out = set(draws)

    monkeypatch.setattr(Feed, "__init__", made)


@pytest.mark.parametrize("max_grad_norm", [1.0, pytest.param(None, marks=pytest.mark.slow)])
def test_a_rollback_skips_the_offending_data(
    max_grad_norm: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = {"max_grad_norm": max_grad_norm}
    with monkeypatch.context() as patched:
        without({0, 3, 4}, patched)
        train(config_of(tmp_path, "straight", train=clip))
    not_finite_at({0, 3, 4}, monkeypatch)
    said = train(config_of(tmp_path, train={"on_nonfinite": "rollback", **clip}))
    folder = tmp_path / "run"
    told = [(line["step"], line["to"]) for line in lines(folder) if line["event"] == "rolledback"]
    assert told[0] == (1, 0)
    assert len(told) == 3
    assert all(to < step for step, to in told)
    assert "left out; goes on after step" in said
    last = {line["step"]: line["loss"] for line in lines(folder) if line["event"] == "stepped"}
    assert list(last.values()) == losses(tmp_path / "straight")
    assert equal(weights(folder), weights(tmp_path / "straight"))
    newest = checkpoints(folder / "checkpoints")[0]
    assert open_checkpoint(newest).training["run"]["data"]["left_out"] == [0, 3, 4]


@pytest.mark.slow
def test_a_repeated_rollback_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    not_finite_at(set(range(3, 99)), monkeypatch)
    with pytest.raises(NonFinite, match="2 steps in a row not finite"):
        train(config_of(tmp_path, train={"on_nonfinite": "rollback", "nonfinite_limit": 2}))
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert "not finite" in status["error"]


def test_stop_ends_at_the_first_step_that_is_not_finite_and_says_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_finite_at({2}, monkeypatch)
    console = Console(file=io.StringIO(), width=120)
    with pytest.raises(NonFinite, match="step 3: 1 step not finite"):
        run_training(config_of(tmp_path, train={"on_nonfinite": "stop"}), console)
    assert steps_in(tmp_path / "run") == [2]
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().endswith("\nnot finished; `resume=auto` continues after step 2\n")


def test_a_deadline_aborts_a_long_step_without_loss(
    straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes in the middle of a step that would take ten minutes."""
    from megatrain.engine import streamer

    honest, backward = Engine.step, streamer.ACTIONS["BACKWARD"]

    def long(streamer: Any, now: Any, op: Any, held: Any) -> None:
        if now.number == 3:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(600)
        backward(streamer, now, op, held)

    with monkeypatch.context() as patched:
        patched.setitem(streamer.ACTIONS, "BACKWARD", long)
        patched.setattr("megatrain.train.checkpoints.REST_SECONDS", 30.0)  # whatever else the machine is at
        began = time.monotonic()
        said = train(config_of(tmp_path, checkpoint={"deadline_seconds": 30.5}))
    assert time.monotonic() - began < 280
    assert Engine.step is honest
    assert "stopped after 3 of 6 steps" in said
    assert steps_in(tmp_path / "run") == [2, 3]
    train(config_of(tmp_path, resume="auto"))
    assert losses(tmp_path / "run") == straight[0]
    assert equal(weights(tmp_path / "run"), straight[1])


def test_permanent_checkpoints_are_never_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save is over only when somebody waits for it, so it is under way whenever the next one is due."""
    honest_sync, honest_wait, waits = atomic._force_to_disk, Saver.wait, threading.Event()

    def sync(folder: Path) -> None:
        waits.wait(20)
        waits.clear()
        honest_sync(folder)

    def wait(saver: Saver) -> None:
        if saver.current is not None and not saver.current.is_over:
            waits.set()
        honest_wait(saver)

    monkeypatch.setattr(atomic, "_force_to_disk", sync)
    monkeypatch.setattr(Saver, "wait", wait)
    monkeypatch.setattr(Save, "wait", lambda save, timeout=None: (waits.set(), save._over.wait(20), save.path)[2])
    said = train(config_of(tmp_path, checkpoint={"every": 1, "keep_last": 1, "keep_every": 3}))
    assert "not saved at step 2" in said
    assert steps_in(tmp_path / "run") == [3, 6]


def test_a_full_disk_for_metrics_does_not_end_the_run(
    straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`metrics.jsonl`, `status.json` and TensorBoard are refused for some steps, and go on afterwards."""
    honest_line, honest_text, full, tried = JsonLines._append, Path.write_text, [False], [0]

    def refused() -> OSError:
        return OSError(errno.ENOSPC, "No space left on device")

    def append(watch: JsonLines, line: bytes) -> None:
        tried[0] += 1
        full[0] = 2 <= tried[0] < 6
        if full[0]:
            raise refused()
        honest_line(watch, line)

    def write_text(path: Path, *arguments: Any, **named: Any) -> int:
        if full[0] and "status" in path.name:
            raise refused()
        return honest_text(path, *arguments, **named)

    monkeypatch.setattr(JsonLines, "_append", append)
    monkeypatch.setattr(Path, "write_text", write_text)
    said = train(config_of(tmp_path, output={"trackers": ["tensorboard"]}, checkpoint={"every": 0}))
    assert said.count("metrics.jsonl cannot be written") == 1
    assert "training continues" in said
    assert losses(tmp_path / "run") == straight[0]
    assert equal(weights(tmp_path / "run"), straight[1])
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"


THEN = {"global_batch_size": None, "micro_batch_size": 4, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("given", "kept", "told"),
    [
        ({}, (4, 2), ""),
        ({"global_batch_size": 8}, (4, 2), ""),
        ({"micro_batch_size": 4}, (4, 2), ""),
        ({"gradient_accumulation_steps": 2, "global_batch_size": 8}, (4, 2), ""),
        ({"global_batch_size": 16}, (None, None), "train.global_batch_size 8 -> 16"),
        ({"micro_batch_size": 2, "global_batch_size": 8}, (2, None), "train.micro_batch_size 4 -> 2"),
        (
            {"micro_batch_size": 8, "gradient_accumulation_steps": 1},
            (8, 1),
            "train.micro_batch_size 4 -> 8; train.gradient_accumulation_steps 2 -> 1",
        ),
    ],
)
def test_only_user_changes_are_reported(
    given: dict[str, int], kept: tuple[int | None, int | None], told: str, tmp_path: Path
) -> None:
    """The plan chose how the steps of the run are cut; that it stays open is no change, and is filled in again."""
    config = config_of(tmp_path)
    train_ = config.train.model_copy(update={name: given.get(name) for name in THEN})
    config = config.model_copy(update={"train": train_})
    then = config.model_dump(mode="json")
    taken = on_paper(tmp_path, then | {"train": then["train"] | THEN})
    begun = as_begun(config, taken)
    assert (begun.train.micro_batch_size, begun.train.gradient_accumulation_steps) == kept
    said: list[str] = []
    refuse_changes(begun.model_copy(update={"policy": config.policy}), taken, said.append)
    assert said == ([f"changed since the checkpoint: {told}"] if told else [])


def test_of_changed_mappings_only_what_differs_is_reported(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    then = config.model_dump(mode="json")
    then["train"]["muon"] |= {"momentum": 0.9, "cut": {"*": 2}}
    then["train"]["learning_rates"] = {"*norm*": 0.1, "*head*": 0.2}
    train_ = config.train.model_copy(update={"learning_rates": {"*norm*": 0.1}})
    run = {"step": 1, "data": {}, "config": then}
    resumed = cast(Checkpoint, SimpleNamespace(training={"run": run}, folder=tmp_path))
    said: list[str] = []
    refuse_changes(config.model_copy(update={"train": train_}), resumed, said.append)
    muon = "{'momentum': 0.9, 'cut': {'*': 2}} -> {'momentum': 0.95, 'cut': {}}"
    rates = "train.learning_rates {'*head*': 0.2} -> {}"
    assert sorted(said[0].removeprefix("changed since the checkpoint: ").split("; ")) == [rates, f"train.muon {muon}"]


@pytest.mark.slow
def test_epochs_end_as_planned_and_can_be_extended(tmp_path: Path) -> None:
    """The same weights as by the steps that they are; from a checkpoint too; more of them go on behind the end."""

    def of(epochs: float, name: str, resume: str | None = None) -> Any:
        return config_of(tmp_path, name, resume, train={"steps": None, "epochs": epochs, "warmup_steps": 1})

    said = train(of(0.5, "whole"))
    status = json.loads((tmp_path / "whole" / "status.json").read_text())
    steps = status["steps"]
    assert f"{steps:,} steps = " in said
    assert "epochs of" in said
    assert 0.5 <= status["epoch"] < 0.5 * (1 + 1 / (steps - 1))
    assert f"step {steps}/{steps}  loss" in said  # less than one pass: the line leaves the epoch out
    train(config_of(tmp_path, "steps", train={"steps": steps, "warmup_steps": 1}))
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "steps"))

    taken = min(checkpoints(tmp_path / "whole" / "checkpoints"), key=step_of)
    assert step_of(taken) < steps
    train(of(0.5, "again", str(taken)))
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "again"))

    assert "increase train.epochs to extend it" in train(of(0.5, "whole", "auto"))
    said = train(of(1.0, "whole", "auto"))
    assert "train.epochs 0.5 -> 1.0" in said
    status = json.loads((tmp_path / "whole" / "status.json").read_text())
    assert status["step"] > steps
    told = f"{status['epoch']:.2f}/{status['epoch']:.3g}"
    assert f"step {status['steps']}/{status['steps']}  epoch {told}" in said
    before = (tmp_path / "whole" / "status.json").read_bytes()
    assert "increase train.epochs to extend it" in train(of(0.25, "whole", "auto"))
    assert (tmp_path / "whole" / "status.json").read_bytes() == before


def test_epochs_restart_with_new_data(tmp_path: Path) -> None:
    train(config_of(tmp_path, "run", train={"steps": 3}))
    more = tmp_path / "more.txt"
    more.write_text("other words, and more of them\n" * 100)
    changed = config_of(
        tmp_path, "run", "auto", accept_changes=True, train={"steps": None, "epochs": 0.5}, data={"sources": str(more)}
    )
    alone = config_of(tmp_path, "alone", train={"steps": None, "epochs": 0.5}, data={"sources": str(more)})
    said = train(changed)
    assert "starts from its beginning" in said
    train(alone)
    steps = [json.loads((tmp_path / name / "status.json").read_text())["step"] for name in ("run", "alone")]
    assert steps[0] == 3 + steps[1]
