"""Runs within budgets of memory, with what the host has no room for on the disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from megatrain import Engine, Policy, budgets
from megatrain import run as run_module
from megatrain.device import open_device
from megatrain.errors import ConfigError, DoesNotFit
from megatrain.memory import Disk, scratch
from megatrain.model import port_model
from megatrain.plan import Question
from megatrain.run import _for_saves
from megatrain.spec import Hardware, Home, Precision
from tests.run.test_run import configuration, lines, train
from tests.tiny import tiny_model

DEEP: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 257,
    "max_position_embeddings": 64,
}
HOST = 7 << 19
"""Bytes: about half of what the state, gradients and activations of that model take."""


def run(folder: Path, **changed: dict[str, Any]) -> tuple[str, list[float], dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    config = configuration(folder, model={"config": DEEP}, **changed)
    told = train(config)
    losses = [line["loss"] for line in lines(folder / "run") if line["event"] == "stepped"]
    return told, losses, load_file(folder / "run" / "model" / "model.safetensors")


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "sim:1"])
def test_a_run_with_half_the_memory_has_the_same_numbers(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them where direct I/O is refused."""
    refused = device != "cpu"
    if refused:
        monkeypatch.setattr(scratch, "_DIRECT", 0)
    same = {"loss_chunk_tokens": 64}  # which a plan chooses by memory, and rounding depends on
    plain_told, losses, weights = run(tmp_path / "plain", train={"device": device}, policy=same)
    tight: dict[str, Any] = {"memory": {"host": HOST}, "disk": {"folders": [str(tmp_path)]}}
    told, same_losses, same_weights = run(tmp_path / "tight", train={"device": device}, policy=same, **tight)
    assert len(losses) == 4
    assert same_losses == losses
    steps = [line for line in lines(tmp_path / "tight" / "run") if line["event"] == "stepped"]
    assert max(line["written_nbytes"] for line in steps) > 1e5  # a new plan may find a better home for it
    assert max(line["written_nbytes_per_day"] for line in steps) > 1e8
    assert all(weights[name].equal(same_weights[name]) for name in weights)
    how = "through the page cache, since direct I/O is refused there, checksums compared"
    assert (how in " ".join(told.split())) == (refused or not Disk([tmp_path]).direct)
    assert "disk tier" in told
    assert "disk" not in plain_told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "tight"], "nothing stays on the drive"


def test_without_a_disk_the_way_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match="host memory at the least"):
        run(tmp_path, memory={"host": HOST})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"memory": {"host": HOST}, "disk": {"folders": ["."], "max_write_per_day": "2MB"}}, "writes .* per day"),
        ({"disk": {"folders": ["/no/such/folder"]}}, "there is no folder"),
        ({"disk": {"folders": ["/dev/shm"]}}, "lies in host memory"),
        ({"memory": {"disk": "1GB"}}, "there is no disk tier"),
        ({"memory": {"host": "lots"}}, "no amount of memory"),
        ({"memory": {"host": "120%"}}, "no amount of memory"),
        ({"memory": {"device": "1GB"}}, "none of its own"),
    ],
)
def test_budgets_that_cannot_be_are_refused(tmp_path: Path, changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run(tmp_path, **changed)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_plan_leaves_the_memory_that_saves_take(tmp_path: Path, precision: Precision) -> None:
    """Also where state lives on the device, of which a save needs a copy in host memory."""
    config = configuration(tmp_path, train={"precision": precision})
    for device, homes in (("cpu", Home()), ("sim:1", Home("device", "device", "device")), ("sim:1", Home("device"))):
        how = Policy(precision, shares_memory=device == "cpu", homes=(homes,) * 5)
        with Engine.from_model(tiny_model(), device, precision, policy=how, verify=False) as engine:
            engine.saver.reserve()
            taken = engine.memory_table().get(("host", "checkpoint"), 0)
            hardware = cast(Hardware, SimpleNamespace(shares_memory=device == "cpu"))
            assert taken <= _for_saves(config, engine.spec, hardware)


def test_folders_hold_shares_by_their_measured_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folders on one drive share what it does; one folder alone is not measured."""
    speeds, asked = {1: (4e9, 4e9), 2: (1e9, 0.5e9)}, []

    def measured(folder: Any, nbytes: int, seconds: float) -> SimpleNamespace:
        asked.append(folder.drive)
        read, write = speeds[folder.drive]
        return SimpleNamespace(best=SimpleNamespace(read_bandwidth=read, write_bandwidth=write))

    monkeypatch.setattr(budgets, "disk_speed", measured)
    folders: Any = [
        SimpleNamespace(drive=drive, stat=lambda at=drive: SimpleNamespace(st_dev=at)) for drive in (1, 2, 2)
    ]
    assert budgets._shares(folders) == pytest.approx([2e9, 1e9 / 6, 1e9 / 6])
    assert asked == [1, 2]
    assert budgets._shares(folders[:1]) is None
    assert asked == [1, 2]


@pytest.mark.parametrize(
    ("changed", "rows"),
    [
        ({}, "whole"),
        ({"data": {"packing": "best_fit"}}, "packed"),
        ({"data": {"packing": "grouped"}}, "padded"),
        ({"train": {"objective": "dpo"}}, "padded"),
    ],
)
def test_a_plan_is_for_the_rows_that_the_configuration_tells(
    changed: dict[str, Any], rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Question] = []

    def noted(question: Question) -> None:
        asked.append(question)
        raise DoesNotFit("seen")

    monkeypatch.setattr(run_module, "find_plan", noted)
    spec, device = port_model(tiny_model(), torch.float32).spec, open_device("sim")
    with pytest.raises(DoesNotFit, match="seen"):
        run_module._plan(configuration(tmp_path, **changed), spec, device)
    assert asked[0].rows_are == rows
