"""Containers, workflows, the notebook and the version: what they name is there, and the notebook runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

import megatrain

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_version_is_defined_once() -> None:
    assert version("megatrain") == megatrain.__version__
    assert f"## {megatrain.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_guide_to_installing_names_the_packages_versions_extras_and_files() -> None:
    text = (ROOT / "docs" / "guides" / "install.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = dict(each.split(">=") for each in project["dependencies"])
    assert (
        f"Python {project['requires-python'][2:]} or newer, PyTorch {oldest['torch']} or newer, "
        f"transformers {oldest['transformers']} or newer." in text
    )
    (extras,) = re.findall(r"Extras: (.*)\.$", text, re.MULTILINE)
    for_us = {"dev", "cuda", "docs"}
    assert set(re.findall(r"`(\w+)`", extras)) == set(project["optional-dependencies"]) - for_us
    assert [ROOT / name for name in sorted(re.findall(r"docker build -f (\S+)", text))] == DOCKERFILES
    assert (ROOT / ".devcontainer").is_dir()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile_copy_sources_exist_and_are_not_ignored(path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [name for line in re.findall(r"^COPY (.*)$", path.read_text(), re.MULTILINE) for name in line.split()[:-1]]
    assert "megatrain" in copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, name


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_any_user_can_write_the_container_home(path: Path) -> None:
    """A user id without an account has `/` as its home, where no cache can be."""
    text = path.read_text()
    (folder,) = re.findall(r"^WORKDIR (.*)$", text, re.MULTILINE)
    assert f"\nENV HOME={folder}\n" in text
    assert re.search(r"^RUN .*chmod a\+rwx \. runs$", text, re.MULTILINE)


def test_the_gpu_container_has_a_c_compiler_for_triton() -> None:
    assert re.search(r"^RUN .* gcc libc6-dev ", (ROOT / "docker" / "cuda.Dockerfile").read_text(), re.MULTILINE)


def test_the_cpu_container_uses_the_pinned_torch() -> None:
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f'"torch=={pinned}+cpu"' in (ROOT / "docker" / "cpu.Dockerfile").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    made = [name for run in runs for name in re.findall(r"make ([a-z-]+)", run)]
    assert made
    assert set(made) <= targets


def test_the_devcontainer_builds_the_environment() -> None:
    found = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert found["postCreateCommand"] == "make venv"


@pytest.mark.slow
def test_the_notebook_runs_end_to_end(tmp_path: Path) -> None:
    """As it is, but for the cell that installs; 10 steps in place of 60."""
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = f"{sys.executable} -m megatrain"
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        for cell in cells:
            source = "".join(cell["source"]).replace("steps: 60", "steps: 10")
            if cell["cell_type"] != "code" or source.startswith("%pip"):
                continue
            if source.startswith("!megatrain"):
                command = source.replace("!megatrain", program, 1)
                done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=240)
                assert done.returncode == 0, done.stderr
            else:
                exec(compile(source, "notebook", "exec"), names)
    finally:
        os.chdir(here)
    assert names["model"].num_parameters() > 100_000
    assert (tmp_path / "runs" / "notebook" / "metrics.jsonl").exists()


def test_the_slurm_job_is_valid_shell_and_resumes() -> None:
    path = ROOT / "examples" / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert asked["signal"] == "TERM@900"
    assert asked["gpus-per-node"] in re.findall(r"--nproc-per-node (\d+)", text)
    assert "resume=auto" in text


def test_the_kubernetes_job_names_the_rendezvous_pod() -> None:
    service, job = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (command,) = container["args"]
    assert f"{job['metadata']['name']}-0.{service['metadata']['name']}" in command
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--nnodes {job['spec']['completions']} " in command
    assert f"--nproc-per-node {container['resources']['limits']['nvidia.com/gpu']} " in command
    (variable,) = container["env"]
    assert pod["terminationGracePeriodSeconds"] >= int(variable["value"])
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}
