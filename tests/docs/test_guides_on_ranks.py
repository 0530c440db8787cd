"""What the guides on ranks and on clusters show runs as printed, with two ranks on this machine, of a tiny model."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from torch.distributed.run import parse_args
from transformers import AutoModelForCausalLM

from megatrain.cli import app, main
from megatrain.config import save_config
from tests.docs.test_examples import ROOT, blocks
from tests.fork_server import Preloaded
from tests.rank_processes import free_port
from tests.run.test_training import configuration, losses
from tests.tiny import tiny_model

GUIDES = ("docs/guides/ranks.md", "docs/guides/clusters.md")
PROGRAMS = {"torchrun": "torch.distributed.run", "megatrain": "megatrain"}
STEPS = """
import torch

folder = "base"
ids = torch.arange(3, 27).view(4, 6)
steps = [[{"input_ids": row[None], "labels": row[None]} for row in ids]] * 2

"""
"""What the guide's script leaves to its reader: a model and two steps of four micro-batches."""
SRUN = """
#!/bin/sh
for task in 0 1; do "$@" & eval "task$task=$!"; done
wait "$task0" && wait "$task1"
"""
"""A cluster of two machines that are this one."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a tiny model, the configuration of a run, and programs that are those of this Python."""
    monkeypatch.chdir(tmp_path)
    for name, module in PROGRAMS.items():
        program(name, f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
    paths = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for name, value in {**paths, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    tiny_model("llama").save_pretrained("base")
    train = {"device": "cpu", "gradient_accumulation_steps": 16, "micro_batch_size": 2, "precision": "fp32"}
    save_config(
        configuration(tmp_path, train=train, output={"folder": "runs/new", "verify_export": False}), Path("config.yaml")
    )


def program(name: str, text: str) -> None:
    Path("bin").mkdir(exist_ok=True)
    Path("bin", name).write_text(text.lstrip())
    Path("bin", name).chmod(0o755)


def script() -> str:
    """The one of the guide, on a CPU."""
    (text,) = blocks("docs/guides/ranks.md", "python")
    on_cpu = re.sub(r'device=f"cuda:[^"]*"', 'device="cpu"', text)
    assert on_cpu != text
    return STEPS + on_cpu


def shown() -> list[str]:
    """All lines with ranks that are to be typed, or that a cluster is given."""
    found = [line for guide in GUIDES for block in blocks(guide, "text") for line in block.splitlines()]
    for guide in GUIDES:
        found += re.findall(r"`(torchrun [^`]*\.py)`", (ROOT / guide).read_text())
        found += re.findall(r"^# .*?(torchrun .*)", (ROOT / guide).read_text(), re.MULTILINE)
    return [line for line in found if line.partition(" ")[0] in PROGRAMS]


def small(line: str) -> str:
    """Two ranks in place of four, or one on each of two machines."""
    each = "1" if "--nnodes" in line else "2"
    line = re.sub(r"--(nproc-per-node|ranks) \d+", rf"--\1 {each}", line)
    return line.replace("HOST:29500", f"127.0.0.1:{free_port()}")


def ran(*lines: str, **environment: str) -> str:
    """What shells have said that ran these beside each other, once all have ended well."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    shells = [subprocess.Popen(["bash", "-c", line], env={**os.environ, **environment}, **pipes) for line in lines]
    said = [shell.communicate(timeout=240)[0] for shell in shells]
    assert [shell.returncode for shell in shells] == [0] * len(lines), said
    return "\n".join(said)


def assert_trained_by(ranks: int) -> None:
    assert len(losses(Path("runs/new"))) == 4
    assert Path("runs/new/model/config.json").exists()
    assert Path(f"runs/new/logs/rank-{ranks - 1}.log").exists()
    assert not Path(f"runs/new/logs/rank-{ranks}.log").exists()


def assert_script_has_trained() -> None:
    before, after = (AutoModelForCausalLM.from_pretrained(name).state_dict() for name in ("base", "runs/example"))
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


def rank(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


def test_shown_commands_have_the_options_of_today() -> None:
    lines = [line for line in shown() if line.startswith("torchrun")]
    assert len(lines) >= 3
    command: Any = typer.main.get_command(app)
    for line in lines:
        found = parse_args(shlex.split(line, comments=True)[1:])
        assert found.training_script == ("megatrain" if found.module else "script.py")
        if found.module:
            verb, *words = found.training_script_args
            command.commands[verb].make_context(verb, words)


@pytest.mark.slow
def test_the_script_trains_on_two_ranks(preloaded: Preloaded) -> None:
    Path("script.py").write_text(script())
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        preloaded.start(rank, "script.py", environment={**meeting, "RANK": str(each), "LOCAL_RANK": str(each)})
        for each in range(2)
    ]
    for child in ranks:
        assert child.wait() == 0, child.said
    assert_script_has_trained()


@pytest.mark.slow
def test_shown_plans_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in shown() if line.startswith("megatrain plan")]
    assert len(lines) >= 2
    for line in lines:
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(line)[1:])
        assert ended.value.code == 0, capsys.readouterr().err
    assert "tokens/s" in capsys.readouterr().out


def trains() -> Sequence[str]:
    return [line for line in shown() if " train " in line and "--nnodes" not in line]


@pytest.mark.slow
@pytest.mark.parametrize("line", trains())
def test_a_run_is_trained_by_several_ranks(line: str) -> None:
    ran(small(line))
    assert_trained_by(2)


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in shown() if line.endswith("script.py")])
def test_the_script_is_started_by_torchrun(line: str) -> None:
    Path("script.py").write_text(script())
    ran(*[small(line)] * (2 if "--nnodes 2" in line else 1))
    assert_script_has_trained()


@pytest.mark.slow
def test_a_slurm_job_trains_on_two_machines() -> None:
    program("scontrol", "#!/bin/sh\necho 127.0.0.1\necho other\n")
    program("srun", SRUN)
    text = (ROOT / "examples" / "slurm.sh").read_text().replace(":29500", f":{free_port()}")
    Path("slurm.sh").write_text(small(text))
    ran("bash slurm.sh config.yaml", SLURM_JOB_NODELIST="x[1-2]", SLURM_NNODES="2", SLURM_JOB_ID="7")
    assert_trained_by(2)


@pytest.mark.slow
def test_a_kubernetes_job_trains_on_two_machines() -> None:
    _, job = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    places = {"megatrain-0.megatrain": "127.0.0.1", "29500": str(free_port()), "/runs/run.yaml": "config.yaml"}
    (text,) = container["args"]
    for name, place in places.items():
        assert name in text
        text = text.replace(name, place)
    variables = {each["name"]: each["value"] for each in container["env"]}
    command = shlex.join([*container["command"], small(text)])
    ran(*(f"JOB_COMPLETION_INDEX={pod} {command}" for pod in range(2)), **variables)
    assert_trained_by(2)
