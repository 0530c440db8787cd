"""A mistake that needs no model is told before torch loads, and a disk that is too small before the weights do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatrain.config import save_config
from megatrain.errors import ConfigError, DataError, ModelError
from megatrain.model import port_model
from megatrain.run import disk_space, early_checks
from megatrain.run.early_checks import refuse_mistakes
from megatrain.run.existing_run import refuse_early
from megatrain.train.engine import Engine
from tests import before_torch_import
from tests.adapted import adapted
from tests.fake_hub import Hub
from tests.run.test_training import configuration, train
from tests.tiny import tiny_model


def test_early_checks_import_no_slow_library(tmp_path: Path) -> None:
    save_config(configuration(tmp_path), tmp_path / "config.yaml")
    (tmp_path / "old" / "model").mkdir(parents=True)
    (tmp_path / "old" / "status.json").write_text(json.dumps({"step": 2}))
    told = {
        f"data.sources={tmp_path}/corpse.txt": "corpse.txt: no such file or folder; did you mean",
        f"data.validation={tmp_path}/held.jsonl": "held.jsonl: no such file or folder",
        f"model.config=null model.path={tmp_path}/gone": f"model {tmp_path}/gone: no such folder or file",
        "model.config=null model.path=-5GB": "model -5GB: no such folder or file",
        f"model.config=null model.path={tmp_path}/corpus.txt": "corpus.txt: is a file, not a folder; name the folder",
        "data.tokenizer=a--b": "a--b: no such file or folder",
        "data.sources=org/absent": "org/absent: neither a local file nor an earlier download, and the Hugging Face hub",
        f"model.config={tmp_path}/config.json": f"model {tmp_path}/config.json: no such folder or file; did you mean",
        "data.format=sharegtp": "data.format",
        "train.device=tpu": "train.device: 'tpu' is not a device",
        "train.hardware=h300": "train.hardware: unknown machine 'h300'",
        "train.micro_batch_size=99000000": "train.global_batch_size: 6,336,000,000 tokens per step are too many; "
        "give 2,097,152 or less",
        "data.sequence_length=99000000": "data.sequence_length: 99,000,000 tokens per step are too many; give 67",
        "train.stps=3": "unknown key train.stps; did you mean train.steps?",
        f"output.folder={tmp_path}/corpus.txt/run": "corpus.txt is not a folder",
        f"output.folder={tmp_path}/old": "old: holds a finished run: the model",
        f"resume={tmp_path}/gone": "gone: there is no such checkpoint",
    }
    lines = before_torch_import.told([f"train {tmp_path}/config.yaml {mistake}" for mistake in told], tmp_path)
    for line, words in zip(lines, told.values(), strict=True):
        assert line.startswith("error: ")
        assert words in line


def test_valid_configs_pass(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    refuse_mistakes(config)
    refuse_early(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["org/name", "python-stdlib", "{0}", "{0}/dataset_info.json#chats"])
def test_existing_and_hub_names_are_not_refused(name: str, tmp_path: Path, hub: Hub) -> None:
    hub.publish("org/name", {})
    config = configuration(tmp_path, data={"sources": [name.format(tmp_path)]})
    (tmp_path / "dataset_info.json").write_text(json.dumps({"chats": {"file_name": "corpus.txt"}}))
    refuse_mistakes(config)


def test_names_of_no_data_set_on_the_hub_are_refused(tmp_path: Path, hub: Hub) -> None:
    hub.publish("org/texts", {})
    for data in (
        {"sources": ["org/absent"]},
        {"validation": ["org/absent"]},
        {"sources": [f"{tmp_path}/dataset_info.json#x"]},
    ):
        (tmp_path / "dataset_info.json").write_text(json.dumps({"x": {"hf_hub_url": "org/absent"}}))
        with pytest.raises(DataError, match="org/absent: the Hugging Face hub has no data set of this name"):
            refuse_mistakes(configuration(tmp_path, data=data))


TYPO = "qwen/Qwen3-8"
NEAR = r"the Hugging Face hub has no model of this name.*; did you mean Qwen/Qwen3-8B"


def test_a_typo_in_a_hub_name_is_told_with_the_near_name_in_python(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(ModelError, match=f"^model {TYPO}: {NEAR}"):
        train(configuration(tmp_path, model={"path": TYPO, "config": None}))
    with pytest.raises(DataError, match=f"^tokenizer {TYPO}: .*{NEAR}"):
        train(configuration(tmp_path, data={"tokenizer": TYPO}))
    with pytest.raises(ModelError, match=f"^model {TYPO}: {NEAR}"):
        Engine.from_pretrained(TYPO)


def test_dataset_info_entries_with_missing_files_are_refused(tmp_path: Path) -> None:
    config = configuration(tmp_path, data={"sources": [f"{tmp_path}/dataset_info.json#chats"]})
    (tmp_path / "dataset_info.json").write_text(json.dumps({"chats": {"file_name": "gone.json"}}))
    with pytest.raises(DataError, match=r"gone\.json: no such file or folder"):
        refuse_mistakes(config)


def test_an_empty_file_is_refused_as_what_it_is(tmp_path: Path) -> None:
    """Whatever else is set: of no kind of data, it would be said to have no use for `data.chat_template`."""
    path = tmp_path / "chats.jsonl"
    path.touch()
    config = configuration(tmp_path, data={"sources": [str(path)], "chat_template": "chatml"})
    with pytest.raises(DataError, match=r"chats\.jsonl: is empty; name a file with something in it"):
        refuse_mistakes(config)


def test_train_runs_the_same_early_checks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: no such file or folder"):
        train(configuration(tmp_path, data={"sources": [str(tmp_path / "gone.txt")]}))


@pytest.mark.parametrize("key", ["output.folder", "checkpoint.folder", "data.cache"])
def test_unwritable_folders_are_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    monkeypatch.setattr(early_checks.os, "access", lambda path, _: Path(path) != locked)  # root may write everywhere
    section, _, name = key.partition(".")
    config = configuration(tmp_path, **{section: {name: str(locked / "new")}})
    with pytest.raises(ConfigError, match=f"{locked} is not writable; choose another {key}"):
        refuse_mistakes(config)
    if key == "data.cache":
        refuse_mistakes(configuration(tmp_path, data={"cache": str(locked / "new"), "streaming": True}))


def test_leftover_metrics_do_not_block_a_run(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    config.folder.mkdir()
    (config.folder / "metrics.jsonl").touch()
    refuse_early(config)
    (config.checkpoints / "step-00000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds an earlier run: the checkpoint of step 1"):
        refuse_early(config)
    refuse_early(config.model_copy(update={"resume": "auto"}))  # what is in the way then, its checkpoint says


def test_a_disk_that_is_too_small_is_refused_before_the_weights_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights are loaded")

    monkeypatch.setattr(Engine, "from_source", load)
    asked: list[Path] = []
    monkeypatch.setattr(disk_space, "available_disk_nbytes", lambda folder: asked.append(folder) or 1_000)
    what = r"checkpoints: has .* free, but about .* are needed for a checkpoint and the model; free some space"
    with pytest.raises(ConfigError, match=what):
        train(configuration(tmp_path, checkpoint={"every": 1}))
    assert asked == [tmp_path]
    with pytest.raises(ConfigError, match=r"run: has .* free, but about .* are needed for the model"):
        train(configuration(tmp_path, checkpoint={"every": 0}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("how", "room", "told"),
    [
        ({"every": 1}, 3, ""),
        ({"every": 1}, 2, "has room for 2 of the 3 checkpoints held at one time; free some space, or keep fewer"),
        ({"every": 1, "keep_last": 1}, 1, "has room for 1 of the 2 checkpoints held at one time; free some space"),
        ({"every": 1, "keep_every": 2}, 6, "has room for 6 of the 8 checkpoints"),
        ({"every": 6}, 2, ""),
        ({"every": 0}, 0, ""),
    ],
)
def test_a_disk_without_room_for_all_checkpoints_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], room: int, told: str
) -> None:
    ported = port_model(tiny_model("llama"), torch.float32)
    nbytes = room * 12 * ported.structure.trained_numel + 4 * ported.structure.numel
    monkeypatch.setattr(disk_space, "available_disk_nbytes", lambda _: nbytes)
    said = disk_space.checkpoint_space_warning(configuration(tmp_path, checkpoint=how), ported, 10)
    assert said.startswith(f"{tmp_path}" if told else "")
    assert told in said
    assert bool(said) == bool(told)


def test_the_room_for_a_checkpoint_is_what_it_holds_and_frozen_weights_are_held_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = tiny_model("llama"), configuration(tmp_path, checkpoint={"every": 1, "keep_last": 1})
    model.model.layers.requires_grad_(False)
    with Engine.from_model(model, "cpu", precision="fp32", verify=False) as engine:
        ported, saved = engine.parts.ported, engine.save(tmp_path / "saved").wait()
    held = sum(tensor.nbytes for file in saved.rglob("*.safetensors") for tensor in load_file(file).values())
    room = held + disk_space.model_nbytes(config, ported)
    monkeypatch.setattr(disk_space, "available_disk_nbytes", lambda _: room)
    disk_space.refuse_full_disk(config, ported, None)
    assert "has room for 1 of the 2" in disk_space.checkpoint_space_warning(config, ported, 10)
    room -= 1
    with pytest.raises(ConfigError, match="are needed for a checkpoint and the model"):
        disk_space.refuse_full_disk(config, ported, None)
    room += 1 + disk_space.state_nbytes(ported)
    assert disk_space.checkpoint_space_warning(config, ported, 10) == ""
    first, second = (config.checkpoints / f"step-0000000{step}" / "model.safetensors" for step in (1, 2))
    for file in (first, second):
        file.parent.mkdir(parents=True)
    first.write_bytes(bytes(1000))
    second.hardlink_to(first)
    room -= 1001
    assert "has room for 1 of the 2" in disk_space.checkpoint_space_warning(config, ported, 10)


@pytest.mark.parametrize(
    "changes", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens", "q_proj"]}]
)
def test_the_room_for_an_adapter_is_what_peft_writes(tmp_path: Path, changes: dict[str, Any]) -> None:
    """`peft` writes embeddings, frozen ones too, beside an adapter over one of them."""
    model = adapted("llama", **changes)
    model.save_pretrained(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    config = configuration(tmp_path, output={"folder": str(tmp_path / "run"), "precision": "fp32"})
    with Engine.from_model(model, "cpu", precision="fp32", verify=False) as engine:
        room = disk_space.model_nbytes(config, engine.parts.ported)
    assert room == sum(tensor.nbytes for tensor in tensors.values())


def test_a_broken_model_is_reported_before_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{bad")
    model = {"path": str(tmp_path / "broken"), "config": None}
    with pytest.raises(ModelError, match=r"model .*/broken: its config.json is not a valid JSON file"):
        train(configuration(tmp_path, model=model, data={"tokenizer": None}))
