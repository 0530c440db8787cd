"""What a config's fields mean before a model is built: counts, sizes and positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import ModelError
from megatrain.model import PretrainedSource, port_model, written_of
from megatrain.model.architecture import position_limit, read_config
from tests.stock.test_export_readers import exported
from tests.tiny import FAMILIES, tiny_model

SILENT: dict[str, dict[str, Any]] = {
    kind: {
        **{
            name: value
            for name, value in FAMILIES["qwen3"].items()
            if name not in ("head_dim", "max_position_embeddings")
        },
        **{"model_type": kind, **more},
    }
    for kind, more in {
        "olmo3": {},
        "exaone_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    }.items()
}
"""Configs as their publishers wrote them, without positions; the class's default is 2,048."""


def written(folder: Path, fields: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


@pytest.mark.parametrize("kind", SILENT)
def test_the_default_of_a_rotary_class_is_no_limit(kind: str, tmp_path: Path) -> None:
    config = read_config(written(tmp_path / "model", SILENT[kind]), where="model")
    assert config.max_position_embeddings == 2048
    assert position_limit(config) is None


def test_what_the_publisher_states_is_the_limit_even_if_it_is_the_default(tmp_path: Path) -> None:
    stated = {**SILENT["olmo3"], "max_position_embeddings": 2048}
    assert position_limit(read_config(written(tmp_path / "model", stated), where="model")) == 2048
    assert position_limit(read_config({**SILENT["olmo3"], "max_position_embeddings": 64}, where="model")) == 64


@pytest.mark.parametrize("kind", ["opt", "gpt2"])
def test_a_table_of_positions_is_a_limit_even_by_default(kind: str, tmp_path: Path) -> None:
    limit = position_limit(read_config(written(tmp_path / "model", {"model_type": kind}), where="model"))
    assert limit == {"opt": 2048, "gpt2": 1024}[kind]


def test_an_export_states_no_limit_that_its_publisher_did_not(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = exported(SILENT["olmo3"], tmp_path / "first")
    fields = json.loads((folder / "config.json").read_text())
    assert fields.pop("max_position_embeddings") == 2048  # of a model in memory, nobody knows
    (folder / "config.json").write_text(json.dumps(fields))
    source = PretrainedSource(folder)
    ported = port_model(source.model, model.dtype)
    assert ported.structure.max_positions is None
    ported.whole().config.save_pretrained(tmp_path / "stock")
    assert "max_position_embeddings" in json.loads((tmp_path / "stock" / "config.json").read_text())
    (tmp_path / "again").mkdir()
    written_of(ported, model.dtype).write_small_files(tmp_path / "again")
    assert "max_position_embeddings" not in json.loads((tmp_path / "again" / "config.json").read_text())


def test_what_a_config_class_says_of_its_fields_is_said_in_its_own_words(tmp_path: Path) -> None:
    """Qwen3.8-Flash-Next: its hashes of token sequences need to know where a text ends, and its class asks for it."""
    text = {"num_hidden_layers": 4, "ple_layer_ids": [1], "model_type": "qwen4_exp_text"}
    folder = written(tmp_path / "model", {"model_type": "qwen4_exp", "text_config": text})
    said = "model: eos_token_id must be set when Qwen4-Exp PLE layers are enabled; correct that field of its config"
    with pytest.raises(ModelError, match=f"^{said}$"):
        read_config(folder, where="model")
    folder = written(tmp_path / "mended", {"model_type": "qwen4_exp", "text_config": text | {"eos_token_id": 7}})
    assert read_config(folder, where="model").text_config.eos_token_id == 7


@pytest.mark.parametrize("edit", [{"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {"rope_theta": 5e6}])
@pytest.mark.parametrize("as_file", [True, False])
def test_a_rope_theta_that_transformers_would_forget_is_refused(
    edit: dict[str, Any], as_file: bool, tmp_path: Path
) -> None:
    fields = {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert read_config(fields, where="model").rope_parameters["rope_theta"] == 1e6
    source = written(tmp_path / "model", fields | edit) if as_file else fields | edit
    with pytest.raises(ModelError, match=r"states a rope_theta of 1000000\.0.* but .* would be used"):
        read_config(source, where="model")
    both = read_config(
        fields | {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, where="model"
    )
    assert both.rope_parameters["rope_theta"] == 1e6
    assert read_config(fields | {"rope_theta": None}, where="model").rope_parameters["rope_theta"] == 1e6


def test_a_file_is_no_model_unless_it_is_json(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_text("x")
    (tmp_path / "config.json").write_text("x")
    with pytest.raises(ModelError, match="model: is a file, not a folder; give the folder of a Hugging Face model"):
        read_config(str(tmp_path / "weights.bin"), where="model")
    with pytest.raises(ModelError, match=r"model: its config.json is not a valid JSON file"):
        read_config(str(tmp_path / "config.json"), where="model")
