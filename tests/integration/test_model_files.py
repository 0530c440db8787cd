"""Frozen weights that are read from the model's own files: the bits of a run that holds them, and no byte written."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain import AdamW, Engine, Policy
from megatrain.errors import DiskError, ModelError, PlanError
from megatrain.spec import Numerics, Placement
from tests.adapted import config_of
from tests.integration.test_tiers import results
from tests.tiny import equal, tiny_model, unequal_batches

IN_FILES = Placement(weights="file")


def saved(folder: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **how: Any) -> Path:
    """A tiny base in files, of `dtype`."""
    tiny_model(family).to(dtype).save_pretrained(folder, **how)
    return folder


def made(folder: Path, device: str, policy: Policy, precision: str = "bf16", **more: Any) -> Engine:
    clip = None if policy.update == "during_backward" else 0.5
    return Engine.from_pretrained(
        folder,
        device=device,
        optimizer=AdamW(lr=1e-2),
        max_grad_norm=clip,
        policy=policy,
        seed=4,
        verify=False,
        numerics=Numerics(precision, loss_chunk_tokens=5),  # type: ignore[arg-type]
        **{"adapter": config_of("lora"), **more},
    )


def usual(device: str, placement: Placement | None, units: int = 5, **fields: Any) -> Policy:
    placements = () if placement is None else (placement,) * units
    return Policy(shard_nbytes=3000, shares_memory=device == "cpu", placements=placements, **fields)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("device", "family", "update"),
    [
        ("cpu", "llama", "next_forward"),
        ("sim:1", "llama-tied", "next_forward"),
        ("sim:2", "mixtral", "during_backward"),
    ],
)
def test_a_file_backed_base_gives_the_same_bits_as_in_memory(
    device: str, family: str, update: str, tmp_path: Path
) -> None:
    """Sharded over files, experts one by one, in either direction of the bus; the files are as they were."""
    folder = saved(tmp_path / "base", family, max_shard_size="20KB")
    files = {file: file.read_bytes() for file in folder.iterdir()}
    with made(folder, "cpu", usual("cpu", None, update=update)) as held:
        expected = results(held)
        units = len(held.structure.units)
        frozen = 2 * (held.structure.numel - held.structure.trained_numel)
    with made(folder, device, usual(device, IN_FILES, units, update=update)) as read:
        assert equal(results(read), expected)
        assert read.parts.pool.files is not None
        assert read.parts.pool.files.nbytes == pytest.approx(frozen, rel=0.01)
        assert read.diagnostics.memory_table()["host", "weights"] == pytest.approx(
            2 * read.structure.trained_numel, rel=0.05
        )
    assert {file: file.read_bytes() for file in folder.iterdir()} == files


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_empty_weights_are_not_read_from_files(tmp_path: Path) -> None:
    """Among others that are: MLPs of no width, whose bytes begin where those of the next weight do."""
    tiny_model("llama", intermediate_size=0).to(torch.bfloat16).save_pretrained(tmp_path)
    adapter = config_of("lora", target_modules=["q_proj"])
    with made(tmp_path, "cpu", usual("cpu", None), adapter=adapter) as held:
        expected = results(held)
    with made(tmp_path, "sim:1", usual("sim", IN_FILES), adapter=adapter) as read:
        assert equal(results(read), expected)
        assert any(not each.numel() for each in read.master_weights().values())


def test_partly_file_backed_units_move_between_tiers_in_training(tmp_path: Path) -> None:
    """To files and back, over the disk and the device: the losses and weights of a run that stays in host memory."""
    folder = saved(tmp_path / "base")
    plain = usual("sim", None)
    with made(folder, "cpu", plain) as still:
        expected = [still.step(unequal_batches(2)).loss for _ in range(5)]
        weights = still.master_weights()
    homes = [IN_FILES, Placement("disk", "disk"), IN_FILES, Placement("device"), Placement()]
    with made(folder, "sim:4", plain, disk=[tmp_path]) as moving:
        found = []
        for number in range(5):
            placements = tuple(homes[(unit + number) % 5] for unit in range(5))
            moving.adopt(usual("sim", None) if number == 4 else replace(plain, placements=placements))
            found.append(moving.step(unequal_batches(2)).loss)
        assert found == expected
        assert equal(moving.master_weights(), weights)


def test_units_that_began_in_files_train_on_the_disk(tmp_path: Path) -> None:
    """Writes to the disk omit the frozen weights, which come to it from the files."""
    folder, read = saved(tmp_path / "base"), usual("sim", IN_FILES)
    with made(folder, "cpu", usual("sim", None)) as still:
        expected = [still.step(unequal_batches(1)).loss for _ in range(3)]
    with made(folder, "sim:4", read, disk=[tmp_path]) as moving:
        found = [moving.step(unequal_batches(1)).loss]
        moving.adopt(replace(read, placements=(Placement("disk", "disk"),) * 5))
        assert found + [moving.step(unequal_batches(1)).loss for _ in range(2)] == expected


def test_weights_that_differ_from_the_files_are_not_read_from_them(tmp_path: Path) -> None:
    with made(saved(tmp_path / "base"), "cpu", usual("cpu", None)) as held:
        (name,) = (param.name for param in held.structure.units[2].params if "up_proj.base" in param.name)
        held.weights.update({name: torch.ones(held.weights[name].shape)})
        with pytest.raises(PlanError, match=r"frozen weights of .*layers\.1 differ from the model's files; keep them"):
            held.adopt(usual("cpu", IN_FILES))
        assert held.weights[name].eq(1).all()


def test_checkpoints_of_file_backed_bases_hold_only_the_adapter(tmp_path: Path) -> None:
    """Its memory is that of the adapter; what goes on from it holds the base, or reads it, with the same bits."""
    folder, policy = saved(tmp_path / "base"), usual("cpu", IN_FILES)
    with made(folder, "cpu", policy) as first:
        first.step(unequal_batches(2))
        first.saver.reserve()
        trained = [sum(param.numel for param in unit.params if param.trainable) for unit in first.structure.units]
        assert first.diagnostics.memory_table()["host", "checkpoint"] < 20 * max(trained)
        checkpoint = first.save(tmp_path / "checkpoints").wait()
        expected = first.step(unequal_batches(2)).loss, first.master_weights()
    for again in (policy, usual("cpu", None)):
        with Engine.from_checkpoint(checkpoint, max_grad_norm=0.5, policy=again, verify=False) as second:
            second.parts.streamer.context.numerics = Numerics("bf16", loss_chunk_tokens=5)
            assert second.step(unequal_batches(2)).loss == expected[0]
            assert equal(second.master_weights(), expected[1])


def test_weights_stored_in_another_form_stay_in_memory(tmp_path: Path) -> None:
    """A float32 tensor among bfloat16 ones is held, rounded, and named; a base in float32 is refused."""
    folder = saved(tmp_path / "base")
    (file,) = folder.glob("*.safetensors")
    odd = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {odd: tensors[odd].float()}, file, {"format": "pt"})
    with made(folder, "cpu", usual("cpu", None)) as held:
        expected = results(held)
    with made(folder, "cpu", usual("cpu", IN_FILES)) as read:
        assert [param.file_backed for param in read.structure.units[2].params if "up_proj.base" in param.name] == [
            False
        ]
        assert list(read.parts.ported.in_files.others.values()) == ["is F32 in the files, but held as bfloat16"]
        assert equal(results(read), expected)
    whole = saved(tmp_path / "whole", dtype=torch.float32)
    with pytest.raises(PlanError, match="the model's files hold no frozen weights"):
        made(whole, "cpu", usual("cpu", IN_FILES))
    with made(whole, "cpu", usual("cpu", IN_FILES), precision="fp32") as made_whole:
        made_whole.step(unequal_batches(2))


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["written", "replaced", "gone", "cut"])
def test_a_file_that_changes_while_it_is_read_ends_the_run(how: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "base")
    (file,) = folder.glob("*.safetensors")
    with made(folder, "cpu", usual("cpu", IN_FILES)) as engine:
        engine.step(unequal_batches(2))
        if how == "written":
            with file.open("r+b") as opened:
                opened.seek(-2, os.SEEK_END)
                opened.write(b"\x01\x01")
        elif how == "cut":
            os.truncate(file, file.stat().st_size // 2)
        else:
            file.rename(tmp_path / "away")
            if how == "replaced":
                file.write_bytes((tmp_path / "away").read_bytes())
        with pytest.raises(DiskError, match=r"has changed|shorter|other bytes|is gone"):
            engine.step(unequal_batches(2))


def test_file_backed_weights_cannot_be_set(tmp_path: Path) -> None:
    with made(saved(tmp_path / "base"), "cpu", usual("cpu", IN_FILES)) as engine:
        name = next(p.name for p in engine.structure.units[1].params if p.file_backed)
        value = engine.weights[name]
        engine.weights.update({name: value})
        with pytest.raises(ModelError, match="is read from the model's files, but they hold other values"):
            engine.weights.update({name: value + 1})
