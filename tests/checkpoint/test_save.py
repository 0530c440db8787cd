"""A checkpoint gives back every bit that it was given, by name, is a Hugging Face model, and is written by ranges."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatrain.checkpoint import manifest as sums_module
from megatrain.checkpoint import save as save_module
from megatrain.checkpoint.folder import open_checkpoint
from megatrain.checkpoint.listing import checkpoints
from megatrain.checkpoint.load import Checkpoint
from megatrain.checkpoint.manifest import full_check
from megatrain.checkpoint.save import CheckpointFacts, PlannedCheckpoint, write_checkpoint
from megatrain.errors import CheckpointError, DamagedCheckpoint
from megatrain.model import freeze_parameters, port_model
from tests.saved import (
    ParamState,
    bits,
    config_as_stock_saves_it,
    contents,
    expected,
    loaded,
    ported,
    reader_of,
    refuse,
    refuse_as_tokenizers_do,
    save,
    set_saved_at_once,
    units_of,
)
from tests.tiny import batch, tiny_model


@pytest.fixture(scope="module")
def llama() -> PlannedCheckpoint:
    return PlannedCheckpoint(ported())


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


# What comes back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "gemma2", "gpt2", "mixtral", "qwen3-moe"])
def test_masters_and_moments_round_trip_bit_for_bit(family: str, tmp_path: Path) -> None:
    planned = PlannedCheckpoint(ported(family), shard_nbytes=30_000)
    folder = save(tmp_path, 7, planned=planned)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    assert len(list(folder.glob("optimizer/moments-*-of-*.safetensors"))) > 1
    checkpoint = open_checkpoint(folder)
    assert bits(loaded(checkpoint, planned)) == expected(planned, 7)
    assert (checkpoint.step, checkpoint.training) == (7, {"step": 7})


def test_the_stock_loader_reads_a_checkpoint(tmp_path: Path) -> None:
    model = tiny_model("mixtral").eval()
    planned = PlannedCheckpoint(port_model(model, torch.bfloat16))
    masters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    units = (
        {param.name: ParamState(masters[param.name], *torch.zeros(2, *param.shape)) for param in unit.params}
        for unit in planned.spec.units
    )
    folder = write_checkpoint(tmp_path, planned, reader_of(planned, units), CheckpointFacts(3, {}))
    found, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert found.dtype == torch.float32
    inputs = batch(2, 9, 0)["input_ids"]
    with torch.no_grad():
        assert torch.equal(found.eval()(inputs).logits, model(inputs).logits)


def test_a_checkpoint_matches_save_pretrained_except_tensor_order(tmp_path: Path) -> None:
    model = tiny_model("qwen3-moe")
    planned = PlannedCheckpoint(port_model(model, torch.bfloat16))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    units = (
        {param.name: ParamState(*[weights[param.name]] * 3) for param in unit.params} for unit in planned.spec.units
    )
    folder = write_checkpoint(tmp_path / "run", planned, reader_of(planned, units), CheckpointFacts(1, {}))
    model.save_pretrained(tmp_path / "stock")
    assert config_as_stock_saves_it(folder) == (tmp_path / "stock" / "config.json").read_text()
    name = "generation_config.json"
    assert (folder / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()
    ours, stock = load_file(folder / "model.safetensors"), load_file(tmp_path / "stock" / "model.safetensors")
    assert ours.keys() == stock.keys()
    assert all(torch.equal(ours[name], stock[name]) for name in ours)
    with safe_open(folder / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_frozen_parameters_have_no_moments(tmp_path: Path) -> None:
    model = tiny_model()
    freeze_parameters(model, ["model.layers.0.*", "*embed*"])
    planned = PlannedCheckpoint(port_model(model, torch.bfloat16))
    checkpoint = open_checkpoint(save(tmp_path, planned=planned))
    params = [param for unit in planned.spec.units for param in unit.params]
    assert checkpoint.moment_shapes == {param.name: param.shape for param in params if param.trainable}
    assert 0 < len(checkpoint.moment_shapes) < len(params)
    assert bits(loaded(checkpoint, planned)) == expected(planned, 1)
    with pytest.raises(CheckpointError, match=r"step-00000001: has no model.layers.0.*\.m; train the parameters that"):
        checkpoint.moments("model.layers.0.mlp.up_proj.weight", ("m", "v"))


def test_a_fully_frozen_model_saves_no_optimizer_state(tmp_path: Path) -> None:
    model = tiny_model()
    freeze_parameters(model, ["*"])
    planned = PlannedCheckpoint(port_model(model, torch.bfloat16))
    checkpoint = open_checkpoint(save(tmp_path, planned=planned))
    assert not (checkpoint.folder / "optimizer").exists()
    assert checkpoint.moment_shapes == {}
    assert bits(loaded(checkpoint, planned)) == expected(planned, 1)


def test_buffers_of_other_dtypes_get_their_own_file(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.layers[1].mlp.register_buffer("seen", torch.tensor([3, 4]))
    model.model.layers[0].mlp.register_buffer("flag", torch.tensor(True))
    model.model.register_buffer("scale", torch.tensor([0.5], dtype=torch.float64))
    planned = PlannedCheckpoint(port_model(model, torch.bfloat16))
    folder = save(tmp_path, planned=planned)
    found = load_file(folder / "model-00002-of-00002.safetensors")
    assert {name.rpartition(".")[2]: tensor.tolist() for name, tensor in found.items()} == {
        "seen": [3, 4],
        "flag": True,
        "scale": [0.5],
    }
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in folder.glob("*.safetensors")}
    assert full_check(folder) == []


def test_moments_are_read_lazily(llama: PlannedCheckpoint, tmp_path: Path) -> None:
    """In any order, any number of times, each by its name."""
    checkpoint = open_checkpoint(save(tmp_path, planned=llama))
    wanted = expected(llama, 1)
    names = sorted(wanted, reverse=True)[:4] * 2
    for name in names:
        assert [saved.numpy().tobytes() for saved in checkpoint.moments(name, ("m", "v"))] == wanted[name][1:]


def test_saving_a_step_again_replaces_its_checkpoint(llama: PlannedCheckpoint, tmp_path: Path) -> None:
    folder = save(tmp_path, 5, planned=llama)
    (folder / "model.safetensors").write_text("damaged")
    assert save(tmp_path, 5, seed=9, planned=llama) == folder
    assert bits(loaded(open_checkpoint(folder), llama)) == expected(llama, 9)
    assert names_in(tmp_path)[0] == "step-00000005"
    assert not [name for name in names_in(tmp_path) if name.startswith(".")]


def test_extra_files_are_covered_by_the_manifest(llama: PlannedCheckpoint, tmp_path: Path) -> None:
    def more(folder: Path) -> None:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "short.jinja").write_text("{{ x }}")
        (folder / "tokenizer.json").write_text("{}")
        (folder / "empty.txt").write_text("")

    folder = save(tmp_path, planned=llama, write_more=more, score=float("nan"))
    assert full_check(folder) == []
    manifest = open_checkpoint(folder).manifest
    assert set(manifest.files) | {"manifest.json"} == {name for name in names_in(folder) if (folder / name).is_file()}
    assert manifest.files["empty.txt"].blocks == ""
    assert manifest.score is None
    assert manifest.nbytes == sum(
        path.stat().st_size for path in folder.rglob("*.*") if path.is_file() and path.name != "manifest.json"
    )


def test_progress_ends_at_the_bytes_of_all_tensors(llama: PlannedCheckpoint, tmp_path: Path) -> None:
    said: list[tuple[int, int]] = []
    save(tmp_path, planned=llama, progress=lambda done, total: said.append((done, total)))
    total = 12 * llama.spec.numel
    assert said[-1] == (total, total)
    assert said == sorted(said)
    assert total < llama.nbytes < total + 30_000


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_state_is_read_by_ranges_and_gives_the_files_of_whole_units(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short the ranges: in the order of the files, and each element once for each tensor that holds it."""
    planned = PlannedCheckpoint(ported(family), shard_nbytes=30_000)
    whole = save(tmp_path / "whole", planned=planned)
    reader, lengths = reader_of(planned, units_of(planned, 1)), list[int]()

    def read(unit: int, array: int, start: int, stop: int) -> Any:
        lengths.append(stop - start)
        return reader.read(unit, array, start, stop)

    set_saved_at_once(monkeypatch, 100)
    pieces = save(tmp_path / "pieces", planned=planned, state=replace(reader, read=read))
    assert contents(pieces) == contents(whole)
    assert max(lengths) <= 100
    assert sum(lengths) == 3 * planned.spec.numel


def test_files_are_those_of_whole_units_converted_by_the_library(tmp_path: Path) -> None:
    """As written before state was read by ranges: each unit was converted at once, and moments followed it."""
    planned = PlannedCheckpoint(ported("mixtral"))
    folder, units = save(tmp_path, planned=planned), list(units_of(planned, 1))
    weights, moments = (load_file(folder / name) for name in ("model.safetensors", "optimizer/moments.safetensors"))
    for number, unit in enumerate(units):
        converted = planned.written.tensors(number, {name: state.master for name, state in unit.items()})
        for name, value in converted.items():
            assert weights.pop(name).numpy().tobytes() == value.contiguous().numpy().tobytes()
        for name, state in unit.items():
            assert moments.pop(f"{name}.m").numpy().tobytes() == state.m.numpy().tobytes()  # type: ignore[union-attr]
            assert moments.pop(f"{name}.v").numpy().tobytes() == state.v.numpy().tobytes()  # type: ignore[union-attr]
    assert (weights, moments) == ({}, {})


def test_a_conversion_that_computes_values_gets_whole_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = PlannedCheckpoint(ported("mixtral"))
    honest = planned.written.tensors

    def doubled(unit: int, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value * 2 if "experts.1.w2" in name else value for name, value in honest(unit, masters).items()}

    plain = load_file(save(tmp_path / "plain", planned=planned) / "model.safetensors")
    assert PlannedCheckpoint(ported("mixtral")).are_moved
    monkeypatch.setattr(planned.written, "tensors", doubled)
    set_saved_at_once(monkeypatch, 100)
    computed = load_file(save(tmp_path / "computed", planned=planned) / "model.safetensors")
    assert not planned.are_moved
    assert len([name for name in plain if "experts.1.w2" in name]) == len(planned.spec.layers)
    for name, value in plain.items():
        expected = value * 2 if "experts.1.w2" in name else value
        assert computed[name].numpy().tobytes() == expected.numpy().tobytes()


def test_no_buffer_or_thread_leaks(llama: PlannedCheckpoint, tmp_path: Path) -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    save(tmp_path, planned=llama)
    after = threading.active_count(), len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after == before


# Whole or not at all -------------------------------------------------------------------------------------------------


def fail_in(place: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make a save fail at some place; options to call it with."""
    if place == "space":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000))
    elif place == "config":
        monkeypatch.setattr(Path, "write_bytes", refuse)
    elif place == "training":
        monkeypatch.setattr(save_module, "write_training", refuse)
    elif place == "tokenizer":
        return {"write_more": refuse_as_tokenizers_do}
    elif place in ("first block", "later block"):
        written = os.pwrite
        count = iter(range(1_000))

        def full(file: int, data: memoryview, start: int) -> int:
            if next(count) >= (0 if place == "first block" else 20):
                refuse()
            return written(file, data, start)

        monkeypatch.setattr(os, "pwrite", full)
    elif place == "no progress":
        monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    elif place == "disk":
        monkeypatch.setattr(os, "fsync", refuse)
    elif place == "last rename":
        renamed = Path.rename
        monkeypatch.setattr(
            Path, "rename", lambda self, to: refuse() if self.name.endswith(".part") else renamed(self, to)
        )
    elif place == "folder":
        forced = os.fsync

        def after_the_rename(file: int) -> None:
            return refuse() if Path(os.readlink(f"/proc/self/fd/{file}")).name == "run" else forced(file)

        monkeypatch.setattr(os, "fsync", after_the_rename)
    return {}


PLACES = ["space", "config", "training", "tokenizer", "first block", "later block", "no progress", "disk"]


@pytest.mark.few(10)
@pytest.mark.parametrize("place", [*PLACES, "last rename", "folder"])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_failed_save_leaves_the_previous_checkpoint_intact(
    place: str, replaces: bool, llama: PlannedCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "folder" and not Path("/proc/self/fd").exists():
        pytest.skip("nothing tells which folder is forced to the disk")
    monkeypatch.setattr(sums_module, "BLOCK_NBYTES", 4096)
    run = tmp_path / "run"
    older = save(run, 1, planned=llama)
    if replaces:
        older = save(run, 2, seed=8, planned=llama)
    before = names_in(tmp_path)
    options = fail_in(place, monkeypatch)
    with pytest.raises(
        CheckpointError, match=r"No space left on device|needs \S+ [kM]B, and 1.00 kB are free"
    ) as caught:
        save(run, 2, planned=llama, **options)
    monkeypatch.undo()
    monkeypatch.setattr(sums_module, "BLOCK_NBYTES", 4096)
    assert str(run / "step-00000002") in str(caught.value)
    assert str(caught.value).endswith("free some space")
    assert "\n" not in str(caught.value)
    assert names_in(tmp_path) == before
    assert full_check(older) == []
    save(run, 2, planned=llama)
    assert len(checkpoints(run)) == 2


def test_errors_of_reading_propagate_unchanged(llama: PlannedCheckpoint, tmp_path: Path) -> None:
    reader = reader_of(llama, units_of(llama, 1))

    def fails_at(last: int) -> Callable[[int, int, int, int], Any]:
        def read(unit: int, *of: int) -> Any:
            if unit == last:
                raise KeyboardInterrupt
            return reader.read(unit, *of)

        return read

    for unit in (0, 2):
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / "run", planned=llama, state=replace(reader, read=fails_at(unit)))
    assert names_in(tmp_path) == []


def test_units_are_said_to_be_written_in_order(llama: PlannedCheckpoint, tmp_path: Path) -> None:
    """Each when nothing of it is read any more."""
    reader, said = reader_of(llama, units_of(llama, 1)), list[tuple[str, int]]()

    def read(unit: int, *of: int) -> Any:
        said.append(("read", unit))
        return reader.read(unit, *of)

    save(tmp_path, planned=llama, state=replace(reader, read=read, written=lambda unit: said.append(("written", unit))))
    assert [*dict.fromkeys(said)] == [(what, unit) for unit in llama.order for what in ("read", "written")]
    assert said == sorted(said, key=lambda each: (each[1], each[0]))


def test_an_unrelated_folder_is_not_replaced(llama: PlannedCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="is a folder, but not a checkpoint"):
        save(tmp_path, planned=llama)
    (tmp_path / "step-00000002").write_text("years of work")
    with pytest.raises(CheckpointError, match="cannot be replaced"):
        save(tmp_path, 2, planned=llama)
    assert names_in(tmp_path) == ["step-00000001", "step-00000001/thesis.txt", "step-00000002"]


def test_without_direct_writes_the_files_are_the_same(
    llama: PlannedCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = save(tmp_path / "one", planned=llama)
    monkeypatch.delattr(os, "O_DIRECT")
    other = save(tmp_path / "other", planned=llama)
    assert {n: (one / n).read_bytes() for n in names_in(one) if (one / n).is_file()} == {
        n: (other / n).read_bytes() for n in names_in(other) if (other / n).is_file()
    }


def test_a_moved_checkpoint_opens(llama: PlannedCheckpoint, tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 3, planned=llama, score=2.5)
    shutil.copytree(folder, tmp_path / "best")
    found: Checkpoint = open_checkpoint(tmp_path / "best")
    assert (found.step, found.manifest.score) == (3, 2.5)
    with pytest.raises(
        DamagedCheckpoint, match=r"manifest.json is missing: the folder is unfinished, or not a checkpoint"
    ):
        open_checkpoint(tmp_path)


def test_a_run_or_a_typo_in_place_of_a_checkpoint_names_one(llama: PlannedCheckpoint, tmp_path: Path) -> None:
    folder = save(tmp_path / "run" / "checkpoints", 3, planned=llama)
    for named in (tmp_path / "run" / "checkpoints", tmp_path / "run"):
        with pytest.raises(DamagedCheckpoint, match=f"{named}: holds checkpoints, but is not one; name {folder}$"):
            open_checkpoint(named)
    with pytest.raises(DamagedCheckpoint, match=f"step-3: no such file or folder; did you mean {folder}"):
        open_checkpoint(tmp_path / "run" / "checkpoints" / "step-3")
