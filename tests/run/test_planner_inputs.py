"""Runs within budgets of memory, with what the host has no room for on the disk."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from megatrain import Engine, Policy
from megatrain.config import Config, DiskSection, TrainSection
from megatrain.device import open_device
from megatrain.errors import ConfigError, DoesNotFit
from megatrain.formatting import amount, at_least, at_most
from megatrain.memory import Disk, scratch_files
from megatrain.model import port_model
from megatrain.optim import AdamW, Lion, Muon
from megatrain.plan import Question, available_threads
from megatrain.run import planner_inputs
from megatrain.run import training as run_module
from megatrain.run.ranks import Ranks
from megatrain.schedule.passes.state_buffers import save_nbytes
from megatrain.schedule.passes.workspace import beside_nbytes
from megatrain.spec import IN_HOST, Hardware, Numerics, Placement, Precision
from tests.run.test_training import configuration, lines, train
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


def host_budget(device: str) -> int:
    """`HOST`, and on a cpu what products take for themselves, which is as much again for a model as small as this."""
    return HOST + beside_nbytes(
        Numerics("bf16"), Policy(shares_memory=device == "cpu", host_threads=available_threads())
    )


def run(folder: Path, **changed: dict[str, Any]) -> tuple[str, list[float], dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    config = configuration(folder, model={"config": DEEP}, **changed)
    told = train(config)
    losses = [line["loss"] for line in lines(folder / "run") if line["event"] == "stepped"]
    return told, losses, load_file(folder / "run" / "model" / "model.safetensors")


@pytest.mark.slow  # of engines it is shown by `tests/integration/test_tiers.py`
@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_half_the_memory_gives_the_same_numbers(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them where direct I/O is refused."""
    refused = device != "cpu"
    if refused:
        monkeypatch.setattr(scratch_files, "_DIRECT", 0)
    same = {"loss_chunk_tokens": 64}  # which a plan chooses by memory, and rounding depends on
    plain_told, losses, weights = run(tmp_path / "plain", train={"device": device}, policy=same)
    tight: dict[str, Any] = {"memory": {"host": host_budget(device)}, "disk": {"folders": [str(tmp_path)]}}
    if device != "cpu":
        tight["memory"]["device"] = "4MB"  # else what the host has no room for is there
    told, same_losses, same_weights = run(tmp_path / "tight", train={"device": device}, policy=same, **tight)
    assert len(losses) == 4
    assert same_losses == losses
    steps = [line for line in lines(tmp_path / "tight" / "run") if line["event"] == "stepped"]
    assert max(line["written_nbytes"] for line in steps) > 1e5  # a new plan may find a better home for it
    assert max(line["written_nbytes_per_day"] for line in steps) > 1e8
    assert all(weights[name].equal(same_weights[name]) for name in weights)
    how = "through the page cache, because the file system has no direct I/O, checksums compared"
    assert (how in " ".join(told.split())) == (refused or not Disk([tmp_path]).direct)
    assert "disk tier" in told
    assert "disk" not in plain_told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "tight"], "nothing stays on the drive"


@pytest.mark.parametrize(
    ("preallocate", "told"),
    [
        (True, "compresses, but not space that is allocated in advance (disk.preallocate: false)"),
        (False, "compresses what is written; a full disk is found by a write"),
    ],
)
def test_a_run_is_told_of_a_file_system_that_compresses(
    preallocate: bool, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = DiskSection(folders=(str(tmp_path),), preallocate=preallocate)
    disk = planner_inputs.open_disk(section, cast(Hardware, SimpleNamespace(disk_block_nbytes=0, disk_depth=0)))
    assert disk is not None
    assert len(planner_inputs.describe_disk(disk, section)) == 1
    monkeypatch.setattr(planner_inputs, "compresses_what_is_not_preallocated", lambda _: True)
    assert planner_inputs.describe_disk(disk, section)[1:] == [("compression", f"the file system of {tmp_path} {told}")]
    disk.provide({"a": (1 << 16, "a")})
    assert (os.fstat(disk._files[0].number).st_blocks > 0) == preallocate
    disk.close()


def test_without_a_disk_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match=r"needs at least .* of host memory"):
        run(tmp_path, memory={"host": HOST})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (
            {"memory": {"host": host_budget("cpu")}, "disk": {"folders": ["."], "max_write_per_day": "2MB"}},
            "writes .* per day",
        ),
        ({"disk": {"folders": ["/no/such/folder"]}}, "there is no folder"),
        ({"disk": {"folders": ["/dev/shm"]}}, "is in host memory"),
        ({"memory": {"disk": "1GB"}}, "there is no disk tier"),
        ({"memory": {"host": "lots"}}, "not an amount of memory"),
        ({"memory": {"host": "120%"}}, "not an amount of memory"),
        ({"memory": {"device": "1GB"}}, "no memory of its own"),
    ],
)
def test_impossible_budgets_are_refused(tmp_path: Path, changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run(tmp_path, **changed)
    assert not (tmp_path / "run").exists()


SPLITS = {
    "host": IN_HOST,
    "device": Placement("device", "device", "device"),
    "weights on the device": Placement("device"),
    "disk": Placement("disk", "disk", "disk", "disk"),
    "moments on the disk": Placement(moments="disk"),
    "halves on the disk": Placement("disk", "disk"),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("split", SPLITS)
def test_plans_reserve_exactly_what_saves_need(tmp_path: Path, precision: Precision, split: str) -> None:
    for device in ("cpu", "sim:1") if "device" not in split else ("sim:1",):
        how = Policy(shares_memory=device == "cpu", placements=(SPLITS[split],) * 5)
        with Engine.from_model(tiny_model(), device, precision, policy=how, verify=False, disk=[tmp_path]) as engine:
            engine.saver.reserve()
            assert engine.diagnostics.memory_table().get(("host", "checkpoint"), 0) == save_nbytes(
                engine.structure, engine.numerics, how
            )


def least_in(error: DoesNotFit, tier: str) -> int:
    """The bytes that a refusal says are needed."""
    assert f"needs at least {at_least(error.needed[tier])} of {tier} memory" in str(error)
    return error.needed[tier]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("tier", "device", "precision", "every", "host"),
    [
        ("host", "cpu", "bf16", 1, None),
        pytest.param("host", "cpu", "fp32", 0, None, marks=pytest.mark.slow),
        pytest.param("host", "sim:1", "bf16", 1, None, marks=pytest.mark.slow),
        pytest.param("host and disk", "cpu", "bf16", 1, None, marks=pytest.mark.slow),
        pytest.param("host and disk", "sim:1", "fp32", 1, None, marks=pytest.mark.slow),
        ("disk", "sim:1", "bf16", 1, 480_000),
        ("device", "sim:1", "bf16", 1, None),
    ],
)
def test_the_budget_named_in_a_refusal_is_exactly_enough(
    tier: str, device: str, precision: str, every: int, host: int | None, tmp_path: Path
) -> None:
    """A whole run, with measurements, samples and checkpoints, in exactly as many bytes as the message named."""
    tier, _, disk = tier.partition(" and ")

    def within(nbytes: int) -> Config:
        return configuration(
            tmp_path,
            train={"device": device, "precision": precision, "steps": 2},
            checkpoint={"every": every},
            disk={"folders": [str(tmp_path)] if disk or tier == "disk" else []},
            memory={"host": host, "device": 300_000 if tier == "disk" else None, tier: nbytes},
            output={"verify_export": False},
        )

    with pytest.raises(DoesNotFit, match=r"more than its budget of 1.00 kB;") as caught:
        train(within(1000))
    least = least_in(caught.value, tier)
    saves = tier == "host" and every > 0 and (precision == "bf16" or bool(disk))
    assert ("of it for checkpoints" in str(caught.value)) == saves
    for less in (least // 2, least - 1):
        said = f"{at_least(least - less)} more than its budget of {at_most(less)};"
        with pytest.raises(DoesNotFit, match=said) as caught:
            train(within(less))
        assert least_in(caught.value, tier) == least
    told = " ".join(train(within(least)).split())
    assert f"{amount(least)} of {amount(least)} {tier}" in told
    assert ("of it for checkpoints)" in told) == (every > 0 and (precision == "bf16" or bool(disk)))
    assert len([line for line in lines(tmp_path / "run") if line["event"] == "stepped"]) == 2


def test_budgets_above_available_memory_are_capped(tmp_path: Path) -> None:
    capacities = {"device": 0, "host": 10**9, "disk": 0}
    hardware = cast(Hardware, SimpleNamespace(shares_memory=True, capacities=capacities))
    config = configuration(tmp_path, memory={"host": "500GB"})
    assert planner_inputs.limits_of(config.memory, config.disk, hardware).host_nbytes == 10**9


def test_disk_folders_share_by_measured_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folders on one drive share what it does; one folder alone is not measured."""
    speeds, asked = {1: (4e9, 4e9), 2: (1e9, 0.5e9)}, []

    def measured(folder: Any, nbytes: int, seconds: float) -> SimpleNamespace:
        asked.append(folder.drive)
        read, write = speeds[folder.drive]
        return SimpleNamespace(best=SimpleNamespace(read_bandwidth=read, write_bandwidth=write))

    monkeypatch.setattr(planner_inputs, "disk_speed", measured)
    folders: Any = [
        SimpleNamespace(drive=drive, stat=lambda at=drive: SimpleNamespace(st_dev=at)) for drive in (1, 2, 2)
    ]
    assert planner_inputs._shares(folders) == pytest.approx([2e9, 1e9 / 6, 1e9 / 6])
    assert asked == [1, 2]
    assert planner_inputs._shares(folders[:1]) is None
    assert asked == [1, 2]


@pytest.mark.parametrize(
    ("changed", "rows"),
    [
        ({}, "uniform"),
        ({"data": {"packing": "best_fit"}}, "packed"),
        ({"data": {"packing": "grouped"}}, "padded"),
        ({"train": {"objective": "dpo"}}, "padded"),
    ],
)
def test_plans_use_the_configs_row_length(
    changed: dict[str, Any], rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Question] = []

    def noted(question: Question) -> None:
        asked.append(question)
        raise DoesNotFit("seen")

    monkeypatch.setattr(run_module, "find_plan", noted)
    ported, device = port_model(tiny_model(), torch.float32), open_device("sim")
    with pytest.raises(DoesNotFit, match="seen"):
        run_module._plan(configuration(tmp_path, **changed), ported, device, Ranks(), None)
    assert asked[0].batching == rows


def test_an_optimizer_brings_its_usual_rates(tmp_path: Path) -> None:
    """A file that says them again, as a saved configuration does, means the same."""
    lion = Lion(1e-4, weight_decay=0.1, no_decay=("vectors",))
    config = configuration(tmp_path, train={"optimizer": "lion"})
    rest = {key: value for key, value in config.train.model_dump().items() if key != "learning_rate"}
    usual = TrainSection(**{**rest, "betas": (0.9, 0.99), "learning_rate": 1e-4})
    assert planner_inputs.optimizer_for(usual) == lion
    assert planner_inputs.optimizer_for(TrainSection(steps=1, optimizer="lion")) == lion
    assert planner_inputs.optimizer_for(TrainSection(steps=1)).as_json()["betas"] == [0.9, 0.95]


def test_muon_and_the_adamw_beside_it_share_rate_and_decay_unless_told_otherwise() -> None:
    shared = TrainSection(steps=1, optimizer="muon", learning_rate=1e-3, betas=(0.9, 0.98), eps=1e-6)
    adamw = AdamW(1e-3, (0.9, 0.98), 1e-6, 0.1, ("vectors",))
    assert planner_inputs.optimizer_for(shared) == Muon(1e-3, 0.1, adamw=adamw)
    muon: dict[str, Any] = {"adjust": "original", "adamw_learning_rate": 3e-4, "adamw_weight_decay": 0.0}
    muon |= {"momentum": 0.9, "nesterov": False, "newton_schulz": "fp32", "cut": {"*.qkv.weight": 3}}
    own = TrainSection(
        steps=1,
        optimizer="muon",
        learning_rate=0.02,
        learning_rates={"*embed*": 0.1},
        muon={**muon, "matrices": {"*.router.weight": True}},  # type: ignore[arg-type]
    )
    assert planner_inputs.optimizer_for(own) == Muon(
        0.02,
        0.1,
        0.9,
        nesterov=False,
        adjust_lr_fn="original",
        newton_schulz="fp32",
        adamw=AdamW(3e-4, (0.9, 0.95), 1e-8, 0.0, ("vectors",), (("*embed*", 0.1),)),
        matrices=(("*.router.weight", True),),
        cut=(("*.qkv.weight", 3),),
    )
