"""An exported folder is what `save_pretrained` of the stock model would be, and appears whole or not at all."""

from __future__ import annotations

import errno
import filecmp
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatrain import AdamW, Engine
from megatrain.checkpoint import range_writer, safetensors_writer
from megatrain.checkpoint.export import export_pieces, model_card
from megatrain.checkpoint.range_writer import OpenFile, TensorWriter, writing_ranges
from megatrain.errors import ExportError
from megatrain.model import PortedModel, port_model
from megatrain.model.checkpoint_names import WrittenModel
from tests.checkpoint.test_save import fail_in
from tests.killed import die, killed
from tests.saved import (
    config_as_stock_saves_it,
    contents,
    export_model,
    refuse,
    set_saved_at_once,
)
from tests.tiny import FAMILIES, batch, equal, tiny_model, unequal_batches

DEEPSEEK: dict[str, Any] = {
    **FAMILIES["llama"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
"""Layers of two kinds, fused experts, and a float32 buffer that belongs in the checkpoint."""


def stock(family: str) -> PreTrainedModel:
    if family != "deepseek-v3":
        return tiny_model(family).eval()
    fields = dict(DEEPSEEK)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).eval()
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.normal_()
    return model


def ported(model: PreTrainedModel) -> tuple[PortedModel, Callable[[str], Tensor]]:
    """Taken apart."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return port_model(model, torch.bfloat16), weights.__getitem__


def exported(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    return export_model(*ported(model), folder, **options)


def weights_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def llama() -> tuple[PortedModel, Callable[[str], Tensor]]:
    return ported(tiny_model())


# What is written ---------------------------------------------------------------------------------------------------


# Not gemma4, whose persistent buffers are written as what they compute in.
@pytest.mark.parametrize("family", [*(each for each in FAMILIES if each != "gemma4"), "deepseek-v3"])
def test_files_equal_save_pretrained_byte_for_byte(family: str, tmp_path: Path) -> None:
    model = stock(family)
    model.save_pretrained(tmp_path / "stock")
    exported(model, tmp_path / "ours")
    names = names_in(tmp_path / "stock")
    assert [name for name in names_in(tmp_path / "ours") if name != "README.md"] == names
    _, different, missing = filecmp.cmpfiles(tmp_path / "stock", tmp_path / "ours", names, shallow=False)
    assert (different, missing) == (["config.json"], [])
    assert config_as_stock_saves_it(tmp_path / "ours") == (tmp_path / "stock" / "config.json").read_text()


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "qwen3-moe", "deepseek-v3"])
def test_the_stock_loader_gives_the_same_logits_from_several_files(family: str, tmp_path: Path) -> None:
    model = stock(family)
    folder = exported(model, tmp_path / "model", shard_nbytes=20_000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    inputs = batch(2, 9, 0)["input_ids"]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(inputs).logits, model(inputs).logits)


def test_a_loaded_model_is_written_back_unchanged(tmp_path: Path) -> None:
    stock("mixtral").save_pretrained(tmp_path / "found")
    exported(AutoModelForCausalLM.from_pretrained(tmp_path / "found"), tmp_path / "ours")
    assert filecmp.cmp(tmp_path / "found" / "model.safetensors", tmp_path / "ours" / "model.safetensors", False)


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_bf16_rounds_parameters_to_nearest_even_and_leaves_buffers(family: str, tmp_path: Path) -> None:
    model = stock(family)
    full = weights_in(exported(model, tmp_path / "fp32"))
    folder = exported(model, tmp_path / "bf16", precision="bf16", shard_nbytes=30_000)
    found = weights_in(folder)
    assert found.keys() == full.keys()
    for name, tensor in found.items():
        expected = full[name] if "correction_bias" in name else full[name].to(torch.bfloat16)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_the_index_names_every_tensor_and_its_sums_are_right(tmp_path: Path) -> None:
    model = stock("llama-tied")
    folder = exported(model, tmp_path / "model", precision="bf16", shard_nbytes=10_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    inside = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            inside |= dict.fromkeys(opened.keys(), file.name)
        assert file.stat().st_size < 10_000 + 3_000, "tensors within the limit, and a header"
    assert index["weight_map"] == inside
    assert index["metadata"] == {"total_parameters": model.num_parameters(), "total_size": 2 * model.num_parameters()}


def test_a_tensor_larger_than_a_file_has_one_of_its_own(llama: Any, tmp_path: Path) -> None:
    folder = export_model(*llama, tmp_path / "model", shard_nbytes=1)
    files = list(folder.glob("*.safetensors"))
    assert len(files) == sum(len(unit.params) for unit in llama[0].spec.units)
    assert len(weights_in(folder)) == len(files)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (300, 5), (3, 40, 5)])
def test_tensors_of_any_shape_are_written_in_blocks(
    shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_writer, "BLOCK_NBYTES", 64)
    whole = torch.randn(shape)
    turned = torch.randn(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
    values = {"whole": whole, "turned": turned, "flags": whole > 0, "narrow": whole}
    planned = [
        safetensors_writer.WrittenTensor(name, shape, torch.bfloat16 if name == "narrow" else value.dtype)
        for name, value in values.items()
    ]
    shards = safetensors_writer.plan_shards(planned, 1 << 20)
    with writing_ranges(tmp_path, shards) as ranges:
        writer = TensorWriter(ranges, shards)
        for each in planned:
            writer.write(each, values[each.name])
    found = load_file(tmp_path / "model.safetensors")
    assert equal(found, {**values, "narrow": whole.to(torch.bfloat16)})


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_masters_are_read_by_ranges_unit_by_unit(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever ranges, with the same files."""
    model = stock(family)
    ported = port_model(model, torch.bfloat16)
    masters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    whole = export_model(ported, masters.__getitem__, tmp_path / "model", precision="bf16")
    set_saved_at_once(monkeypatch, 100)
    asked, done = list[tuple[str, int]](), list[int]()

    def read(name: str, start: int, stop: int) -> Any:
        asked.append((name, stop - start))
        return masters[name].reshape(-1)[start:stop].numpy()

    options: dict[str, Any] = {"precision": "bf16", "progress": lambda nbytes, total: done.append(nbytes)}
    pieces = export_pieces(ported, read, tmp_path / "pieces" / "model", **options)
    assert contents(pieces) == contents(whole)
    assert max(length for _, length in asked) <= 100
    assert sum(length for _, length in asked) == ported.structure.numel
    unit_of = {param.name: number for number, unit in enumerate(ported.structure.units) for param in unit.params}
    units = [unit_of[name] for name, _ in asked]
    assert units == sorted(units)
    assert done == sorted(done)
    assert done[-1] == 2 * ported.structure.numel


@pytest.mark.parametrize("family", ["llama-tied", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_trained_engine_saves_its_exact_masters(family: str, tmp_path: Path) -> None:
    with Engine.from_model(tiny_model(family), precision="bf16", optimizer=AdamW(lr=1e-2), verify=False) as engine:
        engine.step(unequal_batches())
        folder = engine.save_pretrained(tmp_path / "model")
        masters = engine.master_weights()
        loss = engine.evaluate(unequal_batches())
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert equal({name: p.detach() for name, p in model.named_parameters()}, masters)
    with Engine.from_model(model.eval(), precision="bf16", verify=False) as engine:
        assert engine.evaluate(unequal_batches()) == loss


# The card and what others add --------------------------------------------------------------------------------------


def test_the_model_card_has_its_facts_and_loading_code(llama: Any, tmp_path: Path) -> None:
    facts = {"steps": "600", "data": "a | b\nc"}
    folder = export_model(*llama, tmp_path / "model", facts=facts, precision="bf16")
    text = (folder / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert "# model\n" in text
    assert f"{llama[0].spec.numel:,} parameters in bfloat16" in text
    assert "| steps | 600 |\n| data | a \\| b c |\n" in text
    assert "AutoTokenizer" not in text
    code = text.split("```python\n")[1].split("```")[0].replace("path/to/this/folder", str(folder))
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["model"].num_parameters() == llama[0].spec.numel


def test_a_card_without_facts_has_no_table() -> None:
    text = model_card("t", "s.", {"model": "AutoModelForCausalLM"}, ", trust_remote_code=True", {})
    assert "## Training" not in text
    assert 'from_pretrained("path/to/this/folder", trust_remote_code=True)' in text


def test_extra_files_appear_with_the_model(llama: Any, tmp_path: Path) -> None:
    def more(folder: Path) -> None:
        assert not (tmp_path / "model").exists()
        (folder / "tokenizer_config.json").write_text("{}")

    folder = export_model(*llama, tmp_path / "model", write_more=more)
    assert (folder / "tokenizer_config.json").exists()
    assert "tokenizer = AutoTokenizer.from_pretrained" in (folder / "README.md").read_text()
    export_model(*llama, folder, write_more=lambda path: (path / "README.md").write_text("mine"))
    assert (folder / "README.md").read_text() == "mine"


# Whole or not at all -----------------------------------------------------------------------------------------------


def fail_in_export(place: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make an export fail at some place; options to call it with."""
    if place == "config":
        monkeypatch.setattr(WrittenModel, "write_small_files", refuse)
    elif place == "weights":
        honest = range_writer.write_all

        def failing(file: OpenFile, *given: Any) -> None:
            (refuse if file.number == 1 else honest)(file, *given)

        monkeypatch.setattr(range_writer, "write_all", failing)
    else:
        return fail_in(place, monkeypatch)
    return {}


@pytest.mark.parametrize("place", ["space", "config", "weights", "tokenizer", "disk", "last rename"])
def test_a_failed_export_leaves_the_previous_one_intact(
    place: str, llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_model(*llama, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    changed = llama[0], lambda name: llama[1](name) + 1
    options = fail_in_export(place, monkeypatch)
    for target in (folder, tmp_path / "new" / "nested" / "other"):
        with pytest.raises(
            ExportError, match=r"No space left on device|needs \S+ [kM]B, and 1.00 kB are free"
        ) as caught:
            export_model(*changed, target, shard_nbytes=20_000, **options)
        assert str(target) in str(caught.value)
        assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert names_in(tmp_path) == ["model"]


def test_an_unwritable_parent_folder_is_one_clear_error(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="file is not a folder; name a path without it"):
        export_model(*llama, tmp_path / "file" / "model")

    def denied(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)  # root, who may run the tests, is denied nothing
    with pytest.raises(ExportError, match=r"model: cannot be written \(Permission denied\); check space and perm"):
        export_model(*llama, tmp_path / "model")
    assert names_in(tmp_path) == ["file"]


def killed_in_export(llama: Any, target: Path, *, progress: Callable[..., None], prepare: Callable[[], object]) -> None:
    """Export other weights in a child process, which is to kill itself on the way."""

    def work() -> None:
        prepare()
        export_model(llama[0], lambda name: llama[1](name) + 1, target, shard_nbytes=20_000, progress=progress)

    killed(work)


def die_in_rename(ending: str) -> None:
    """Die just before the folder with that ending would be renamed."""
    renamed = Path.rename
    Path.rename = lambda self, to: die() if self.name.endswith(ending) else renamed(self, to)  # type: ignore


KILLS = {
    "at the first tensor": (die, lambda: None),
    "in the middle": (lambda done, total: die() if 2 * done > total else None, lambda: None),
    "before the old model moves": (lambda *_: None, lambda: die_in_rename("model")),
    "between the two renames": (lambda *_: None, lambda: die_in_rename(".part")),
}


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("kill", "replaces"), [*((kill, True) for kill in KILLS), *((kill, False) for kill in KILLS if "old" not in kill)]
)
def test_a_killed_export_leaves_no_partial_folder(kill: str, replaces: bool, llama: Any, tmp_path: Path) -> None:
    target = tmp_path / "model"
    if replaces:
        export_model(*llama, target)
    before = {path.name: path.read_bytes() for path in target.iterdir()} if replaces else {}
    progress, prepare = KILLS[kill]
    killed_in_export(llama, target, progress=progress, prepare=prepare)
    assert len(names_in(tmp_path)) > 1 or not replaces, "it was killed with work left behind"
    survives = replaces and kill != "between the two renames"
    assert target.exists() == survives
    if survives:
        assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    with pytest.raises(ExportError):
        export_model(*llama, target, write_more=refuse)
    assert names_in(tmp_path) == (["model"] if replaces else []), "an old model that had been moved aside is back"
    if replaces:
        assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    export_model(*llama, target)
    assert names_in(tmp_path) == ["model"]
    assert AutoModelForCausalLM.from_pretrained(target).num_parameters() == llama[0].spec.numel


def test_temporary_folders_of_other_processes_are_kept(llama: Any, tmp_path: Path) -> None:
    own, living = f".model.{os.getpid()}.part", f".model.{os.getppid()}.part"
    dead = ".model.4194999.old"  # beyond the largest process id of Linux
    others = [".model.part", ".model.x.part", ".model.1.4194999.part", ".other.4194999.part", living]
    for name in (own, dead, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    export_model(*llama, tmp_path / "model")
    assert names_in(tmp_path) == sorted(["model", *others])


# What is in the way ------------------------------------------------------------------------------------------------


def test_an_unrelated_folder_is_not_touched(llama: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match="not a model folder"):
        export_model(*llama, tmp_path)
    folder = export_model(*llama, tmp_path / "model")
    (folder / "dataset.bin").write_text("years of work")
    with pytest.raises(ExportError, match=r"contains 'dataset.bin', which is not part of a model"):
        export_model(*llama, folder)
    with pytest.raises(ExportError, match="is a file"):
        export_model(*llama, tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").exists()
    assert (folder / "dataset.bin").exists()


def test_an_export_replaces_an_existing_model(llama: Any, tmp_path: Path) -> None:
    folder = export_model(*llama, tmp_path / "model", shard_nbytes=20_000)
    (folder / "stale.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    export_model(*llama, folder)
    assert names_in(folder) == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert names_in(tmp_path) == ["model"]


def test_exporting_through_a_symlink_replaces_its_target(llama: Any, tmp_path: Path) -> None:
    folder = export_model(*llama, tmp_path / "model")
    (folder / "stale.json").write_text("{}")
    (tmp_path / "link").symlink_to(folder)
    assert export_model(*llama, tmp_path / "link") == folder
    assert (tmp_path / "link").is_symlink()
    assert not (folder / "stale.json").exists()
    assert names_in(tmp_path) == ["link", "model"]
