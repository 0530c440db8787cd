"""A run that is killed at any moment goes on, when it is started again, as if nothing had been: to the last bit."""

from __future__ import annotations

import json
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.spec.limits import parse_nbytes
from tests.fork_server import Child, Preloaded
from tests.integration.killed_run import run
from tests.tiny import BYTE_LLAMA

STEPS = 8
TEXT = "def answer(question):\n    return 42 if question else None\n" * 60
FIRST_HALF: dict[str, Any] = {}
OTHER_POLICY: dict[str, Any] = {"policy": {"activations": "recompute", "weight_slots": 3, "host_threads": 1}}
PLACES: dict[str, int] = {  # what is about to happen -> about how often it does in a run
    "FORWARD": 60,
    "BACKWARD": 55,
    "UPDATE": 26,
    "NORM": 26,
    "LOSS": 14,
    "write": 200,
    "rename": 6,
    "fsync": 50,
    "replace": 15,
    "rmdir": 3,
}


def ran(
    preloaded: Preloaded, config: dict[str, Any], expected: tuple[int, ...], place: str | None = None, count: float = 0
) -> Child:
    """A run that has ended, with one of these exit statuses; see `killed_run`."""
    child = preloaded.start(run, config, place, count)
    assert child.wait() in expected, child.said
    return child


def configuration(folder: Path, name: str, host: int | None, disk: bool = True, **changed: Any) -> dict[str, Any]:
    (folder / "corpus.txt").write_text(TEXT)
    fields = BYTE_LLAMA | {"attention_dropout": 0.2}
    tree: dict[str, Any] = {
        "model": {"config": fields, "verify": False},
        "data": {
            "sources": [str(folder / "corpus.txt")],
            "tokenizer": "bytes",
            "sequence_length": 32,
            "cache": str(folder / "tokens"),
        },
        "train": {
            "steps": STEPS,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "eval_every": 4,
            "eval_batches": 1,
            "sample_tokens": 0,
        },
        "checkpoint": {"every": 2},
        "output": {"folder": str(folder / name), "trackers": [], "verify_export": False},
        "resume": "auto",
    }
    if (base := folder / "base").exists():
        tree["model"] = {"path": str(base), "verify": False}
        tree["adapter"] = {"type": "lora", "r": 4, "alpha": 8, "dropout": 0.1, "target_modules": "all-linear"}
    if host is not None:
        tree["memory"] = {"host": host}
        tree |= {"disk": {"folders": [str(folder)]}} if disk else {}
    return {**tree, **changed}


def result(folder: Path) -> tuple[list[tuple[int, float]], bytes]:
    """Step and loss of each step in turn, and the weights, as bytes."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in lines if line["event"] == "stepped"]
    (weights,) = (folder / "model").glob("*model.safetensors")  # of an adapter, or of all
    return losses, weights.read_bytes()


def least_host(preloaded: Preloaded, folder: Path, disk: bool) -> int:
    """Bytes of host memory with which a run just fits by either policy, its state on the disk or its base in files:
    what refusals name. Recomputing takes more than what the planner is free to choose."""
    least = []
    for changed in (FIRST_HALF, OTHER_POLICY):
        said = ran(preloaded, configuration(folder, "refused", 1000, disk, **changed), (2,)).said
        named = re.search(r"needs at least (\S+ [MG]B) of host memory", said)
        assert named is not None, said
        least.append(parse_nbytes(named[1], "host"))
    return max(least)


def survive(
    preloaded: Preloaded, folder: Path, disk: bool, draw: random.Random, kills: int, files: bool = False
) -> dict[str, int]:
    """Run, killed so many times, in as many runs as that takes, each compared with one that is left alone.

    Returns how often each place was where it died.
    """
    host = least_host(preloaded, folder, disk) if disk or files else None
    said = " ".join(ran(preloaded, configuration(folder, "straight", host, disk), (0,)).said.split())
    assert ("units on the disk" in said, "are read from the model's files" in said) == (disk, files)
    expected = result(folder / "straight")
    assert [step for step, _ in expected[0]] == list(range(1, STEPS + 1))
    met: dict[str, int] = {}
    runs = 0
    while sum(met.values()) < kills:
        runs += 1
        name, over = f"run-{runs}", False
        while not over:
            place = draw.choice([*PLACES, "seconds"])
            count = draw.uniform(0.1, 1.2) if place == "seconds" else draw.randint(1, PLACES[place])
            place_now: str | None = place if sum(met.values()) < kills else None
            changed = draw.choice([FIRST_HALF, OTHER_POLICY])
            config = configuration(folder, name, host, disk, **changed)
            over = ran(preloaded, config, (0, -signal.SIGKILL), place_now, count).returncode == 0
            if not over:
                met[place] = met.get(place, 0) + 1
        assert result(folder / name) == expected, (name, met)
        left = [path.name for path in (folder / name / "checkpoints").iterdir() if path.name.startswith(".")]
        assert left == []
    return met


@pytest.mark.parametrize(
    "disk", [pytest.param(False, id="host", marks=pytest.mark.slow), pytest.param(True, id="disk")]
)
def test_a_killed_run_resumes_bit_for_bit(preloaded: Preloaded, tmp_path: Path, disk: bool) -> None:
    """Dropout, shuffled data, and now and then another policy after the kill."""
    survive(preloaded, tmp_path, disk, random.Random(int(disk)), kills=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "home"),
    [
        (1, "host"),
        *(pytest.param(20, h, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]) for h in ("host", "files")),
    ],
)
def test_a_killed_adapter_run_resumes_bit_for_bit(preloaded: Preloaded, tmp_path: Path, kills: int, home: str) -> None:
    """Of its dropout too; the base is in host memory, or read from its files."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**BYTE_LLAMA))
    base.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    met = survive(preloaded, tmp_path, False, random.Random(f"7 {home}"), kills, files=home == "files")
    assert (tmp_path / "straight" / "model" / "adapter_model.safetensors").exists()
    assert sum(met.values()) == kills


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_kills(preloaded: Preloaded, tmp_path: Path, disk: bool, part: int) -> None:
    met = survive(preloaded, tmp_path, disk, random.Random(f"{part} {disk}"), kills=25)
    print(met)
    assert len(met) >= 5, "many places are to be met"
