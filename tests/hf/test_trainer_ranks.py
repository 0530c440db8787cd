"""Trainer scripts under `torchrun` and `accelerate launch` match `DistributedDataParallel` and write one folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import ConfigError
from megatrain.hf.training_options import refuse_arguments
from tests.hf.test_trainer import arguments, weights_of
from tests.rank_processes import free_port
from tests.tiny import relative_error, tiny_model

pytest.importorskip("accelerate", reason="a Trainer needs accelerate")
ROOT = Path(__file__).parents[2]
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "--master-port")
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port")


def launch(launcher: tuple[str, ...], *script: str, **environment: str) -> None:
    """Run a script in two processes, which must succeed."""
    quiet = {"HF_HUB_OFFLINE": "1", "CI": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", **environment}
    command = [sys.executable, "-m", *launcher, str(free_port()), *script]
    done = subprocess.run(command, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]


def logs(folder: Path, case: str) -> list[dict[str, Any]]:
    """What each rank has logged."""
    launch(TORCHRUN, "-m", "tests.hf.trainer_ranks", case, str(folder))
    return [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(2)]


def assert_equal_logs(mine: list[dict[str, float]], theirs: list[dict[str, float]], within: float) -> None:
    """All entries except times."""
    assert len(mine) == len(theirs)
    for ours, stock in zip(mine, theirs, strict=True):
        assert ours.keys() == stock.keys()
        for name in stock.keys() - {name for name in stock if name.endswith(("runtime", "per_second"))}:
            assert ours[name] == pytest.approx(stock[name], rel=within), (name, stock)


@pytest.mark.slow
def test_two_processes_match_stock_logs_and_folders(tmp_path: Path) -> None:
    """Training and evaluation losses within 1e-6; a resumed run ends with the same bits."""
    for found in logs(tmp_path, "trainer"):
        stock, ours, again = found["Trainer"], found["StreamedTrainer"], found["again"]
        assert_equal_logs(ours["history"], stock["history"], 1e-6)
        assert ours["calls"] == stock["calls"]
        assert_equal_logs(again["history"][:-1], ours["history"][:-1], 0.0)
    for name in ("final", "checkpoint-10"):
        mine, theirs = weights_of(tmp_path / "StreamedTrainer" / name), weights_of(tmp_path / "Trainer" / name)
        assert max(relative_error(mine[key], theirs[key]) for key in theirs) < 1e-5
        files = {path.name for path in (tmp_path / "Trainer" / name).iterdir()}
        assert files <= {path.name for path in (tmp_path / "StreamedTrainer" / name).iterdir()}
    expected, found = weights_of(tmp_path / "StreamedTrainer" / "final"), weights_of(tmp_path / "again" / "final")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_two_trl_processes_match_stock_logs(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed; it is a development dependency")
    for found in logs(tmp_path, "sft"):
        assert_equal_logs(found["StreamedTrainer"]["history"], found["Trainer"]["history"], 1e-6)


@pytest.mark.slow
def test_weights_modified_on_one_rank_are_refused_on_all(tmp_path: Path) -> None:
    logs(tmp_path, "changed_on_one_rank")


@pytest.mark.slow
def test_the_guides_script_runs_under_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed; it is a development dependency")
    (script,) = re.findall(r"```text\n(# sft\.py.*?)```", (ROOT / "docs/guides/trainer.md").read_text(), re.DOTALL)
    tiny_model(vocab_size=320).save_pretrained(tmp_path / "model")
    load_tokenizer("bytes").save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{n} and {n + 1} is", "completion": f" {2 * n + 1}"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    replaced = {"org/name": f"{tmp_path}/model", "chats.jsonl": f"{tmp_path}/rows.jsonl", "runs/sft": f"{tmp_path}/run"}
    replaced["max_steps=1_000"] = "max_steps=2, use_cpu=True, bf16=False"
    for name, value in replaced.items():
        assert name in script
        script = script.replace(name, value)
    (tmp_path / "sft.py").write_text(script)
    launch(ACCELERATE, str(tmp_path / "sft.py"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final") is not None


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
        ({"save_on_each_node": True}, "save_on_each_node=True"),
        ({"accelerator_config": {"even_batches": False}}, "even_batches=False"),
    ],
)
def test_options_unsupported_on_several_processes_are_refused(
    tmp_path: Path, changes: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(tmp_path, **changes)
    refuse_arguments(given)  # with one process it is supported
    monkeypatch.setattr(type(given), "world_size", 2)
    with pytest.raises(ConfigError, match=f"{what} is not supported with 2 processes"):
        refuse_arguments(given)
