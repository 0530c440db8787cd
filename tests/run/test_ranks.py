"""Whole runs by several ranks: the losses, the folder and the checkpoints of one."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint import checkpoints, open_checkpoint, step_of
from megatrain.config import Config, save_config
from megatrain.errors import ConfigError
from megatrain.run.ranks import refuse_what_ranks_lack
from tests.preloaded import Child, Preloaded
from tests.rank_processes import free_port
from tests.run.test_training import configuration, lines, losses, train

ROOT = Path(__file__).parents[2]


def begin(preloaded: Preloaded, ranks: int, config: Config, *overrides: str) -> list[Child]:
    """Ranks that nothing looks after but they themselves."""
    path = config.folder.parent / "config.yaml"
    save_config(config, path)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    found = []
    for rank in range(ranks):
        numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        environment = meeting | {name: str(number) for name, number in numbers.items()}
        found.append(preloaded.command("train", str(path), *overrides, environment=environment))
    return found


def ended(processes: Sequence[Child]) -> str:
    """What the first tells the person, once all have ended well."""
    for process in processes:
        assert process.wait() == 0, process.said
    return processes[0].said


def launched(ranks: int, config: Config, launcher: str) -> subprocess.Popen[str]:
    """By torchrun, or by `--ranks`, which becomes one."""
    path = config.folder.parent / "config.yaml"
    save_config(config, path)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    own = ["--ranks", str(ranks)]
    command = ["-m", "megatrain", "train", str(path)]
    command = [sys.executable, *(command + own if launcher == "--ranks" else torchrun + command)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)


def shared(tmp_path: Path, name: str, **train_: Any) -> Config:
    """Five micro-batches a step, in full precision."""
    sizes = {"gradient_accumulation_steps": 5, "precision": "fp32", "eval_batches": 2, **train_}
    return configuration(tmp_path, train=sizes, output={"folder": str(tmp_path / name), "trackers": []})


@pytest.mark.parametrize("launcher", ["", pytest.param("--ranks", marks=pytest.mark.slow)])
def test_ranks_leave_the_folder_of_one_and_its_losses(tmp_path: Path, preloaded: Preloaded, launcher: str) -> None:
    one, two = shared(tmp_path, "one"), shared(tmp_path, "two")
    train(one)
    if launcher:
        process = launched(2, two, launcher)
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said
    else:
        said = ended(begin(preloaded, 2, two))
    assert losses(two.folder) == pytest.approx(losses(one.folder), rel=1e-6)
    alone, many = ([line for line in lines(each.folder) if line["event"] != "replanned"] for each in (one, two))
    assert [line["event"] for line in many] == [line["event"] for line in alone]
    for ours, theirs in zip(many, alone, strict=True):
        for key in ("tokens", "flops", "text"):
            assert ours.get(key) == theirs.get(key)
        if ours["event"] == "evaluated":
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    files = [sorted(path.name for path in each.folder.iterdir() if path.name != "logs") for each in (one, two)]
    assert files[0] == files[1]
    assert said.count("step 4/4") == 1
    assert "step 4/4" in (two.folder / "logs" / "rank-1.log").read_text()
    kept = [open_checkpoint(each.folder / "checkpoints" / "step-00000004").training["run"] for each in (one, two)]
    assert kept[0]["data"] == kept[1]["data"]


@pytest.mark.parametrize("launcher", ["", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_signal_stops_all_after_the_same_step_and_any_number_goes_on(
    tmp_path: Path, preloaded: Preloaded, launcher: str
) -> None:
    many = shared(tmp_path, "many", steps=100_000, lr_scheduler="constant", eval_every=0)
    processes = [launched(3, many, launcher)] if launcher else begin(preloaded, 3, many)
    metrics = many.folder / "metrics.jsonl"
    while not (metrics.exists() and losses(many.folder)):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    if isinstance(processes[0], subprocess.Popen):
        said, _ = processes[0].communicate(timeout=120)
    else:
        said = ended(processes)
    assert "not finished; `resume=auto` goes on after step" in said
    kept = [path.name for path in (many.folder / "checkpoints").iterdir()]
    done = losses(many.folder)
    assert kept == [f"step-{len(done):08}"]
    assert f"goes on after step {len(done):,}" in (many.folder / "logs" / "rank-2.log").read_text()
    steps = len(done) + 2
    ended(begin(preloaded, 2, many, "resume=auto", f"train.steps={steps}"))
    one = shared(tmp_path, "one", steps=steps, lr_scheduler="constant", eval_every=0)
    train(one)
    assert losses(many.folder) == pytest.approx(losses(one.folder), rel=1e-5)


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("train", {"device": "cuda:1"}, "train.device: with several ranks each rank takes the GPU of its number"),
        ("disk", {"folders": ["/tmp"]}, "disk.folders: with several ranks"),
        ("checkpoint", {"deadline_seconds": 30.0}, "deadline_seconds: with several ranks a collective"),
    ],
)
def test_what_several_ranks_lack_is_refused_by_its_key(
    tmp_path: Path, section: str, values: dict[str, Any], told: str
) -> None:
    config = configuration(tmp_path, **{section: values})
    with pytest.raises(ConfigError, match=told):
        refuse_what_ranks_lack(config)


def killed(processes: Sequence[Child], config: Config, chance: random.Random) -> None:
    """Kill one once there is a step more; the others end by themselves, each with a line about it."""
    metrics = config.folder / "metrics.jsonl"
    before = len(losses(config.folder)) if metrics.exists() else 0
    victim = chance.randrange(len(processes))
    try:
        while not (metrics.exists() and len(losses(config.folder)) > before):
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        time.sleep(chance.random() * 0.3)
        processes[victim].kill()
        ends = time.monotonic() + 5
        for rank, process in enumerate(processes):
            status = process.wait(max(0.1, ends - time.monotonic()))
            if rank != victim:
                told = [line for line in process.said.splitlines() if line.startswith("error: ")]
                assert len(told) == 1
                assert re.match(rf"error: rank {victim} of {len(processes)}, at .*: was killed", told[0])
                assert status != 0
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_killed_rank_is_named_by_the_others_and_any_number_goes_on_as_if_nothing_was(
    tmp_path: Path, preloaded: Preloaded, kills: int
) -> None:
    """Bit for bit: a run whose ranks were as many in each of its steps, and that nothing broke."""
    chance = random.Random(kills)
    steps = {"lr_scheduler": "constant", "warmup_steps": 0, "eval_every": 0, "sample_tokens": 0}
    many = shared(tmp_path, "many", steps=100_000, **steps)
    many = many.model_copy(update={"checkpoint": many.checkpoint.model_copy(update={"every": 1})})
    parts: dict[int, int] = {}  # the step that they end with -> ranks
    for kill in range(kills):
        ranks = (3, 2, 4)[kill % 3]
        killed(begin(preloaded, ranks, many, "resume=auto"), many, chance)
        for folder in checkpoints(many.checkpoints):
            open_checkpoint(folder)  # raises for a torn one
        parts.setdefault(max(map(step_of, checkpoints(many.checkpoints)), default=0), ranks)
    done = max(parts) + 2
    ended(begin(preloaded, 2, many, "resume=auto", f"train.steps={done}"))
    whole = many.model_copy(update={"output": many.output.model_copy(update={"folder": str(tmp_path / "whole")})})
    for end, ranks in {**parts, done: 2}.items():
        if end > 0:
            ended(begin(preloaded, ranks, whole, "resume=auto", f"train.steps={end}"))
    assert losses(many.folder) == losses(whole.folder)


def test_a_rank_that_fails_is_named_by_the_others(tmp_path: Path, preloaded: Preloaded) -> None:
    config = shared(tmp_path, "run", steps=100_000)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("in the way of the second rank")
    processes = begin(preloaded, 2, config)
    assert all(process.wait(60) for process in processes)
    told = [[line for line in each.said.splitlines() if line.startswith("error: ")] for each in processes]
    path = tmp_path / "run" / "logs"
    assert told == [
        [f"error: rank 1 of 2, at loading the model: {path}/rank-1.log: cannot be written (File exists)"],
        [f"error: {path}/rank-1.log: cannot be written (File exists)"],
    ]
