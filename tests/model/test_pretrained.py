"""What a checkpoint leaves in the store is what `from_pretrained` would have loaded, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.errors import ModelError
from megatrain.model import PretrainedSource, port_model, pretrained
from tests.kinds import KINDS, TIED, stock_model, tiny_config
from tests.tiny import equal


class Written(dict[str, Tensor]):
    """Masters in a dict, which look at what they get from outside torch as the store does."""

    def master(self, name: str) -> Tensor:
        return self[name].clone()

    def write_master(self, name: str, value: Tensor) -> None:
        self[name] = torch.from_numpy(value.detach().float().numpy().copy())


class WrittenByRange(Written):
    """As a store takes what is large."""

    is_shared = False

    def __init__(self, source: PretrainedSource) -> None:
        self.asked: list[str] = []
        self._shapes = {name: parameter.shape for name, parameter in source.model.named_parameters()}

    def write_ranges(self, name: str, read: Callable[[int, int], Tensor]) -> None:
        self.asked.append(name)
        whole = range(0, self._shapes[name].numel(), 700)
        self[name] = torch.cat([read(start, min(start + 700, whole.stop)) for start in whole]).view(self._shapes[name])


def fill(source: PretrainedSource, masters: Written | None = None) -> Written:
    masters = Written() if masters is None else masters
    names = [name for name, _ in source.model.named_parameters()]
    told: list[tuple[int, int]] = []
    source.fill(masters, [names[:3], names[3:6], names[6:]], lambda done, total: told.append((done, total)))
    total = sum(parameter.numel() for parameter in source.model.parameters())
    assert told == sorted(told)
    assert told[-1] == (total, total)
    assert all(parameter.is_meta for parameter in source.model.parameters())
    return masters


def assert_loaded_as_stock(folder: Path) -> PretrainedSource:
    """The source loads what the library does: parameters, buffers, generation config."""
    source = PretrainedSource(folder)
    masters = fill(source)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert masters.keys() == dict(stock.named_parameters()).keys()
    assert [name for name, value in stock.named_parameters() if not torch.equal(masters[name], value)] == []
    for (name, one), (other_name, other) in zip(source.model.named_buffers(), stock.named_buffers(), strict=True):
        assert name == other_name
        assert torch.equal(one, other)
    assert source.model.generation_config.to_dict() == stock.generation_config.to_dict()
    return source


def saved(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model of one kind with its files in `folder`, in shards; all of its buffers that are saved are random."""
    model = stock_model(tiny_config(kind, **changes), 0)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            buffer.normal_()
    model.to(dtype).save_pretrained(folder, max_shard_size="20KB")
    return model


LIKE_LLAMA = ("qwen2", "qwen3", "gemma3_text", "granite", "olmo2")
"""Kinds whose weights are in files as the model holds them, and that are trained in the quick suite."""


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        *(pytest.param(kind, False, marks=pytest.mark.slow if kind in LIKE_LLAMA else ()) for kind in KINDS),
        *((kind, True) for kind in TIED),
    ],
)
def test_every_family_loads_as_in_transformers(
    kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ranges, too, if no value is computed."""
    saved(tmp_path, kind, torch.bfloat16, tie_word_embeddings=tied)
    assert (tmp_path / "model.safetensors.index.json").exists()
    source = assert_loaded_as_stock(tmp_path)
    assert source.unexpected == []
    monkeypatch.setattr(pretrained, "BATCH_NBYTES", 1)  # so that all are large
    by_range = WrittenByRange(source)
    assert equal(fill(source, by_range), fill(source))
    assert len(by_range.asked) > len(by_range) // 2


def test_a_large_parameter_is_read_without_a_look_at_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library looks at the whole model each time that it is asked."""
    saved(tmp_path)
    source, asked = PretrainedSource(tmp_path), list[int]()
    honest = PretrainedSource._run_library
    monkeypatch.setattr(PretrainedSource, "_run_library", lambda *of: (asked.append(1), honest(*of))[1])
    monkeypatch.setattr(pretrained, "BATCH_NBYTES", 1)
    by_range = WrittenByRange(source)
    fill(source, by_range)
    assert len(by_range.asked) == len(by_range)
    assert asked == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_loads_from_one_file(dtype: torch.dtype, tmp_path: Path) -> None:
    saved(tmp_path, "mixtral", dtype)
    whole = {name: value for file in tmp_path.glob("*.safetensors") for name, value in load_file(file).items()}
    for file in tmp_path.glob("model*"):
        file.unlink()
    save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
    assert_loaded_as_stock(tmp_path)


def test_bin_checkpoints_are_memory_mapped(tmp_path: Path) -> None:
    model = saved(tmp_path, "gpt2", tie_word_embeddings=True)
    for file in tmp_path.glob("model*"):
        file.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert_loaded_as_stock(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read .* save the model as safetensors"):
        PretrainedSource(tmp_path)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a checkpoint, and put them into one file."""
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    change(tensors)
    for file in folder.glob("model*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_legacy_names_and_base_model_names_load(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")

    def without_prefix(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    rewrite(tmp_path, without_prefix)
    assert_loaded_as_stock(tmp_path)


def test_tied_weights_stored_twice_load(tmp_path: Path) -> None:
    """Equal ones are one; different ones are not tied, as in the library."""
    saved(tmp_path, tie_word_embeddings=True)
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({head: tensors[table].clone()}))
    assert head not in dict(assert_loaded_as_stock(tmp_path).model.named_parameters())
    rewrite(tmp_path, lambda tensors: tensors.update({head: tensors[table] + 1}))
    apart = assert_loaded_as_stock(tmp_path)
    assert head in dict(apart.model.named_parameters())
    assert not port_model(apart.model, torch.float32).structure.tied


def test_tied_weights_stored_under_the_other_name_load(tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert_loaded_as_stock(tmp_path)


def test_unexpected_tensors_are_listed_unless_ignored(tmp_path: Path) -> None:
    saved(tmp_path)

    def more(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.7.extra.weight"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    rewrite(tmp_path, more)
    source = assert_loaded_as_stock(tmp_path)
    assert source.unexpected == ["model.layers.7.extra.weight"]
    assert source.left_out() == "1 tensor is not loaded: model.layers.7.extra.weight"


def test_many_unexpected_tensors_are_summarised(tmp_path: Path) -> None:
    saved(tmp_path)
    assert PretrainedSource(tmp_path).left_out() == ""
    rewrite(tmp_path, lambda tensors: tensors.update({f"vision.{index}": torch.zeros(1) for index in range(9)}))
    assert PretrainedSource(tmp_path).left_out() == "9 tensors are not loaded: vision.* (9)"


def test_loading_leaves_global_state_unchanged(tmp_path: Path) -> None:
    saved(tmp_path)
    random, files = torch.get_rng_state(), sorted(tmp_path.iterdir())
    fill(PretrainedSource(tmp_path))
    assert torch.equal(torch.get_rng_state(), random)
    assert sorted(tmp_path.iterdir()) == files


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def cut(folder: Path) -> None:
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-100])


def scramble(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"no header at all")


def lose_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def lose_weights(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()


def lose_tensors(folder: Path) -> None:
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name] and None)


def quantize(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.int8)}))


def need_code(folder: Path) -> None:
    change_config(folder, model_type="homemade", auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"})


def name_a_shard(name: str) -> Callable[[Path], None]:
    """The first shard lies outside its folder, and the index names it there."""

    def spoil(folder: Path) -> None:
        shard = sorted(folder.glob("*.safetensors"))[0]
        elsewhere = folder.parent / "elsewhere"
        elsewhere.mkdir()
        (folder / "link").symlink_to(elsewhere)
        shard.rename(elsewhere / "x.safetensors")
        index = folder / "model.safetensors.index.json"
        named = name.replace("HERE", str(folder.parent))
        index.write_text(index.read_text().replace(json.dumps(shard.name), json.dumps(named)))

    return spoil


def map_weights(file: object) -> Callable[[Path], None]:
    """The index names this in place of the file of each weight."""

    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps({**index, "weight_map": dict.fromkeys(index["weight_map"], file)}))

    return spoil


def make_deep(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text("[" * 100_000 + "]" * 100_000) and None


def keep_an_adapter(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "peft_type": "LORA"}')
    (folder / "adapter_model.safetensors").write_bytes(b"")


INDEX = "model.safetensors.index.json"
READ_FILES = ("config.json", "generation_config.json", INDEX)
OUTSIDE = "its index names a file outside its folder"
BAD: list[tuple[Callable[[Path], None], str]] = [
    (name_a_shard("../elsewhere/x.safetensors"), rf"{OUTSIDE}, \.\./elsewhere/x\.safetensors"),
    (name_a_shard("HERE/elsewhere/x.safetensors"), OUTSIDE),
    (name_a_shard("link/x.safetensors"), OUTSIDE),
    (name_a_shard("link/../elsewhere/x.safetensors"), OUTSIDE),
    (name_a_shard("a\0b.safetensors"), OUTSIDE),
    (map_weights(3), rf"its {INDEX} names no file for .*; copy or download it again"),
    (map_weights(None), f"its {INDEX} names no file for "),
    (lambda folder: (folder / INDEX).write_text("{}") and None, f"its {INDEX} has no weight_map; copy or"),
    *((make_deep(name), "nested too deeply|maximum recursion depth") for name in READ_FILES),
    (lambda folder: change_config(folder, model_type="lama"), "no model_type 'lama'; did you mean llama or "),
    (lambda folder: change_config(folder, model_type="zzzzz"), "no model_type 'zzzzz'; a newer transformers"),
    (lambda folder: change_config(folder, model_type=5), "no model_type '5'"),
    (lambda folder: change_config(folder, model_type=None), "has no model_type; add model_type: llama, say"),
    (lambda folder: (folder / "config.json").write_text("[]") and None, "holds list, not an object of fields"),
    (
        keep_an_adapter,
        "holds a LoRA adapter for org/base, not a whole model; give that model, with this folder as its adapter",
    ),
    (cut, r"model-00005-of-00005\.safetensors is truncated or damaged \(.*\); copy or download it again"),
    (scramble, r"model-00001-of-00005\.safetensors is truncated or damaged"),
    (lose_shard, r"its file model-00002-of-00005\.safetensors is missing"),
    (lambda folder: (folder / "config.json").unlink(), "config.json"),
    (lose_weights, r"holds no weights \(no file like model\.safetensors\); .* model\.config to train a fresh model"),
    (lose_tensors, r"its files lack model\.layers\.1\.input_layernorm\.weight, .* and 4 more"),
    (quantize, r"lm_head\.weight holds I8 values \(quantized\?\)"),
    (need_code, "needs code from its own repository; set trust_remote_code=true"),
    (lambda folder: change_config(folder, hidden_size=64), r"shape of .* \(files \(96, 32\), config \(96, 64\)\)"),
    (lambda folder: change_config(folder, quantization_config={"quant_method": "awq"}), "a quantized checkpoint"),
    (lambda folder: change_config(folder, model_type="t5"), "an encoder-decoder"),
    (lambda folder: change_config(folder, model_type="clip"), "a clip is not a causal language model"),
    (lambda folder: change_config(folder, model_type="mllamma"), "mllamma"),
    (lambda folder: change_config(folder, hidden_size="wide"), "expected int"),
    (lambda folder: (folder / "config.json").write_text("{") and None, "not a valid JSON"),
    (shutil.rmtree, "no such folder"),
]


@pytest.mark.parametrize(("spoil", "says"), BAD, ids=lambda value: getattr(value, "__name__", "")[:12])
def test_bad_input_is_refused_in_one_line_before_loading(
    spoil: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    saved(folder)
    spoil(folder)
    with pytest.raises(ModelError, match=says) as raised:
        PretrainedSource(folder)
    assert "\n" not in str(raised.value)
    assert str(folder) in str(raised.value)
    assert len(str(raised.value)) < 700


def test_a_cached_model_is_read_through_symlinks(tmp_path: Path) -> None:
    """As the hub's client keeps them: each file of a snapshot is a link to a blob elsewhere."""
    saved(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for blob in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / blob.name).symlink_to(Path("..") / "blobs" / blob.name)
    assert fill(PretrainedSource(tmp_path / "snapshot"))


def test_a_tilde_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saved(tmp_path / "model")
    assert fill(PretrainedSource("~/model"))


def test_wrong_expert_shapes_are_found_without_reading_weights(tmp_path: Path) -> None:
    saved(tmp_path, "mixtral")
    rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "experts.3." in name] and None)
    with pytest.raises(ModelError, match=r"shape of .*experts.*\(files \(3, .*config \(4, "):
        PretrainedSource(tmp_path)


def test_uncached_names_are_reported_offline() -> None:
    with pytest.raises(ModelError, match=r"model no/such-model: .*; give a local Hugging Face folder"):
        PretrainedSource("no/such-model")


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class HomemadeConfig(LlamaConfig):
    model_type = "homemade"
class HomemadeForCausalLM(LlamaForCausalLM):
    config_class = HomemadeConfig
"""


def test_trusted_remote_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    model = saved(folder)
    (folder / "homemade.py").write_text(CODE)
    names = {"AutoConfig": "homemade.HomemadeConfig", "AutoModelForCausalLM": "homemade.HomemadeForCausalLM"}
    change_config(folder, model_type="homemade", auto_map=names)
    with pytest.raises(ModelError, match="set trust_remote_code=true"):
        PretrainedSource(folder)
    source = PretrainedSource(folder, trust_remote_code=True)
    assert type(source.model).__name__ == "HomemadeForCausalLM"
    masters = fill(source)
    assert all(torch.equal(masters[name], value) for name, value in model.named_parameters())
