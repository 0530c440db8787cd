"""Several processes: each finds its rank, or is told what is missing; where one works alone the others are refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain import Engine, cli
from megatrain.errors import ConfigError
from megatrain.model import freeze_parameters
from megatrain.system.environment import (
    LAUNCHERS,
    Launch,
    find_launch,
    let_idle_threads_sleep,
    refuse_several_processes,
)
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _started_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"
    for name in (*(name for names in LAUNCHERS.values() for name in names), *meeting):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_each_of_several_processes_is_refused(launcher: str, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, number, _ = LAUNCHERS[launcher]
    monkeypatch.setenv(size, "2")
    monkeypatch.setenv(number, rank)
    told = f"here: started as one of 2 processes ({size}=2, {number}={rank}), but it runs in a single process;"
    with pytest.raises(ConfigError, match=re.escape(f"{told} start it without {launcher}, or unset {size}")):
        refuse_several_processes("here")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": ""},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # of a batch script, which runs once
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
    ],
)
def test_a_single_process_has_world_size_one(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refuse_several_processes("here")
    assert find_launch() is None


MEETING = {"MASTER_ADDR": "somewhere", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_of_several_processes_finds_its_rank(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, rank, local = LAUNCHERS[launcher]
    for name, value in {size: "16", rank: "9", local: "1", **MEETING}.items():
        monkeypatch.setenv(name, value)
    assert find_launch() == Launch(rank=9, size=16, local_rank=1, address="somewhere")
    monkeypatch.delenv(local)  # one process on each machine
    assert find_launch() == Launch(rank=9, size=16, local_rank=0, address="somewhere")


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("value", [None, "", "2"])
def test_half_set_launch_variables_are_refused_by_name(
    name: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each, told in {"WORLD_SIZE": "2", "RANK": "1", **MEETING, name: value}.items():
        if told is not None:
            monkeypatch.setenv(each, told)
    if value == "2" and name != "RANK":
        assert find_launch() is not None  # an address and a port may be that
        return
    with pytest.raises(
        ConfigError, match=f"one of 2 processes.*, but {name} is '{value or ''}'; start them with torchrun"
    ):
        find_launch()


@pytest.mark.parametrize(
    "variables",
    [{"RANK": "1"}, {"RANK": "0"}, {"WORLD_SIZE": "two"}, {"WORLD_SIZE": "1", "RANK": "1"}, {"WORLD_SIZE": "-2"}],
)
def test_a_rank_without_a_world_size_is_refused(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    size, rank = variables.get("WORLD_SIZE", ""), variables.get("RANK", "")
    with pytest.raises(ConfigError, match=f"environment: WORLD_SIZE is '{size}' and RANK is '{rank}', which do"):
        find_launch()


POD = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PYTHONUNBUFFERED": "1", "WORLD_SIZE": "2", "RANK": "1"}
WORKER = {"NODE_RANK": "1", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}
TASK = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
AGENT = {**TASK, "SLURM_PROCID": "0", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(POD, id="pod of a PyTorchJob"),
        pytest.param(WORKER, id="worker of Ray Train"),
        pytest.param(TASK, id="task of srun"),
        pytest.param(AGENT, id="torchrun in a task of srun"),
    ],
)
def test_launcher_variables_are_recognised(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**variables, **MEETING}.items():
        monkeypatch.setenv(name, value)
    assert find_launch() == Launch(rank=1, size=2, local_rank=0, address="somewhere")


def test_only_a_training_engine_needs_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    model = tiny_model()
    with pytest.raises(ConfigError, match=r"one of 2 processes \(WORLD_SIZE=2, RANK=1\), but MASTER_ADDR is ''"):
        Engine.from_model(model, verify=False)
    freeze_parameters(model, ("*",))
    Engine.from_model(model, verify=False).close()


def test_verbs_other_than_train_refuse_several_ranks_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "error.json"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    for verb in ("plan", "verify", "generate", "export", "init", "probe"):
        with pytest.raises(SystemExit) as caught:
            cli.main((verb, "x"))
        assert caught.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: megatrain {verb}: started as one of 2 processes (WORLD_SIZE=2), but it runs")
        assert f"error: {json.loads(report.read_text())['message']}" == line


@pytest.mark.slow
def test_torchrun_with_two_processes_ends_at_once_and_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "megatrain", "train"]
    overrides = ["configs/quickstart.yaml", f"output.folder={tmp_path / 'run'}"]
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    reason = "train.gradient_accumulation_steps: a step has 1 micro-batch, and each of 2 ranks needs one"
    assert f"error: {reason}" in done.stderr
    assert reason in "\n".join(done.stderr.splitlines()[-10:]), "at the end, and not buried"
    assert not (tmp_path / "run").exists()


def test_idle_threads_sleep_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that what was there comes back
    monkeypatch.delenv("OMP_WAIT_POLICY")
    let_idle_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    let_idle_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
