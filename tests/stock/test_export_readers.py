"""Exports x readers: what a folder written here is for transformers 5, for transformers 4, and by names alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatrain.model import PretrainedSource, port_model
from megatrain.model.checkpoint_names import add_old_fields, old_fields
from megatrain.model.tiny import perturb
from tests.saved import export_model
from tests.tiny import FAMILIES, tiny_model

ORDINARY: dict[str, Any] = {**FAMILIES["llama"], "num_key_value_heads": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [2.0, 3.0, 4.0, 5.0]

LONGROPE = {
    **{"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG},
    "original_max_position_embeddings": 16,
}

WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama-3": (
        {**ORDINARY, "rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    ),
    "qwen2": ({**ORDINARY, "model_type": "qwen2", "rope_theta": 1e6}, {"rope_theta": 1e6, "rope_scaling": None}),
    "qwen3-moe": (
        {**FAMILIES["qwen3-moe"], "rope_theta": 1e6, "rope_scaling": YARN},
        {"num_experts": 8, "rope_theta": 1e6, "rope_scaling": YARN},
    ),
    "gemma3": (
        {
            **{**ORDINARY, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 4},
            **{"sliding_window_pattern": 2, "rope_theta": 2e6, "rope_local_base_freq": 5000.0},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {"rope_theta": 2e6, "rope_local_base_freq": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "phi3": (
        {
            **{**ORDINARY, "model_type": "phi3", "rope_theta": 20000.0, "original_max_position_embeddings": 16},
            "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
        },
        {
            **{"rope_theta": 20000.0, "partial_rotary_factor": 1.0},
            "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
        },
    ),
    "gpt-neox": (
        {**ORDINARY, "model_type": "gpt_neox", "rotary_emb_base": 20000, "rotary_pct": 0.5},
        {"rotary_emb_base": 20000, "rotary_pct": 0.5, "rope_scaling": None},
    ),
    "glm4": (
        {**ORDINARY, "model_type": "glm4", "head_dim": 8, "rope_theta": 20000.0, "partial_rotary_factor": 0.5},
        {"rope_theta": 20000.0, "partial_rotary_factor": 0.5, "rope_scaling": None},
    ),
    "apertus": (
        {**ORDINARY, "model_type": "apertus", "rope_theta": 20000.0, "rope_scaling": LLAMA3},
        {"rope_theta": 20000.0, "rope_scaling": LLAMA3},
    ),
    "gpt2": (FAMILIES["gpt2"], {}),
}
"""Fields as a publisher wrote them for transformers 4, and those among them that version 5 renames when it saves."""

MORE: dict[str, dict[str, Any]] = {
    "mixtral": {**FAMILIES["mixtral"], "rope_theta": 1e6},
    "llama-longrope": {**ORDINARY, "rope_scaling": LONGROPE},
    "olmo2": {**ORDINARY, "model_type": "olmo2", "rope_theta": 500000},
    "olmo3": {**ORDINARY, "model_type": "olmo3", "rope_theta": 500000, "rope_scaling": YARN},
    "gpt-oss": {
        **{**FAMILIES["mixtral"], "model_type": "gpt_oss", "head_dim": 8, "rope_theta": 150000},
        "rope_scaling": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    },
}
"""More families for the logits in transformers 4."""


def config_of(fields: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(**json.loads(json.dumps(fields)))


def exported(fields: dict[str, Any], folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(fields), dtype=torch.float32).eval()
    perturb(model, 1)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return export_model(port_model(model, torch.float32), weights.__getitem__, folder)


@pytest.mark.parametrize("family", WRITTEN)
def test_old_fields_are_what_the_publisher_wrote(family: str) -> None:
    given, expected = WRITTEN[family]
    assert old_fields(config_of(given)) == expected


@pytest.mark.parametrize(("scales", "within"), [({}, False), ({"short_mscale": 1.1, "long_mscale": 1.2}, True)])
def test_longrope_is_written_where_version_4_of_the_class_looks(
    scales: dict[str, float], within: bool, tmp_path: Path
) -> None:
    """Phi-3 counts the keys of `rope_scaling`, PhiMoE reads the original length from there, others beside it."""
    name = "phimoe" if within else "llama"
    config = config_of({**ORDINARY, "model_type": name, "rope_theta": 20000.0, "rope_scaling": {**LONGROPE, **scales}})
    config.save_pretrained(tmp_path)
    add_old_fields(tmp_path / "config.json", config)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["rope_theta"] == 20000.0
    due = {key: value for key, value in LONGROPE.items() if key != "rope_type"}
    assert fields["rope_scaling"] == {"type": "longrope", **due, **scales}
    assert fields["original_max_position_embeddings"] == 16


def test_the_text_model_of_a_vision_language_model_has_old_fields_too(tmp_path: Path) -> None:
    text = {**ORDINARY, "rope_theta": 500000.0, "rope_scaling": LLAMA3}
    config = AutoConfig.for_model("llava", text_config=json.loads(json.dumps(text)))
    config.save_pretrained(tmp_path)
    before = without_type(AutoConfig.from_pretrained(tmp_path).text_config)
    add_old_fields(tmp_path / "config.json", config)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert (fields["text_config"]["rope_theta"], fields["text_config"]["rope_scaling"]) == (500000.0, LLAMA3)
    assert "rope_theta" not in fields
    assert without_type(AutoConfig.from_pretrained(tmp_path).text_config) == before


def without_type(config: PreTrainedConfig) -> dict[str, Any]:
    """Every field, without the older of two names of a rotary type."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    fields.pop("_name_or_path", None)
    rope = fields.get("rope_parameters") or {}
    for group in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        group.pop("type", None)
    return fields


@pytest.mark.parametrize("family", WRITTEN)
def test_transformers_5_reads_the_same_config_as_from_a_stock_save(family: str, tmp_path: Path) -> None:
    config = config_of(WRITTEN[family][0])
    config.architectures, config.dtype = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]], torch.float32
    config.save_pretrained(tmp_path / "stock")
    read = AutoConfig.from_pretrained(exported(WRITTEN[family][0], tmp_path / "ours"))
    stock = without_type(AutoConfig.from_pretrained(tmp_path / "stock"))
    allowed = {"partial_rotary_factor"}  # some classes keep the old field beside the new
    ours = {name: value for name, value in without_type(read).items() if name in stock or name not in allowed}
    assert ours == stock


def test_an_endless_number_is_written_as_transformers_4_reads_it(tmp_path: Path) -> None:
    fields = {
        **{"model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 8},
        **{"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 4},
    }
    folder = exported(fields, tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["time_step_limit"] == [0.0, float("inf")]
    assert AutoConfig.from_pretrained(folder).time_step_limit[1] == float("inf")


# Parts that are not loaded --------------------------------------------------------------------------------------------


def test_names_of_several_layers_are_joined(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    inside = [f"model.layers.{layer}.self_attn." for layer in range(3)]
    tensors |= {f"{each}o_proj.bias": torch.zeros(32) for each in inside}
    tensors |= {f"{each}rotary_emb.{name}": torch.ones(1, 1, 64, 8) for each in inside for name in ("cos_cached", "x")}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    said = "3 tensors are not loaded: model.layers.*.self_attn.o_proj.bias (3)"
    assert PretrainedSource(tmp_path).left_out() == said


def test_tables_that_a_model_makes_itself_are_not_missed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tiny_model("gpt2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64).tril()}
    tensors |= {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4), "transformer.position_ids": torch.arange(64)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert PretrainedSource(tmp_path).unexpected == []


# transformers 4 -------------------------------------------------------------------------------------------------------


VERSION_4 = ("transformers==4.57.6", "tokenizers==0.22.1", "huggingface_hub==0.36.0")
COMPARE = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, __version__
assert __version__ == "4.57.6"
for folder in map(Path, sys.argv[1:]):
    ids, logits = torch.load(folder.with_suffix(".pt"))
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    with torch.no_grad():
        found = model.float().eval()(input_ids=ids, use_cache=False).logits
    odd = [name for name, value in info.items() if value]
    print(folder.name, float((found - logits).abs().max() / logits.abs().max()), *odd)
"""


@pytest.fixture(scope="module")
def version_4(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python that imports transformers 4.57.6, and all else from here."""
    folder = tmp_path_factory.mktemp("version-4")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    for packages in (["--no-deps", *VERSION_4], ["requests"]):
        done = subprocess.run([*pip, *packages], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"transformers 4.57.6 cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    return {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_transformers_4_computes_the_same_logits(version_4: dict[str, str], tmp_path: Path) -> None:
    families = {**{name: fields for name, (fields, _) in WRITTEN.items() if name != "apertus"}, **MORE}
    assert len(families) >= 10
    folders = []
    for name, fields in families.items():
        folder = exported(fields, tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        ids = torch.arange(5, 35)[None]
        with torch.no_grad():
            torch.save((ids, model(input_ids=ids, use_cache=False).logits), folder.with_suffix(".pt"))
        folders.append(str(folder))
    command = [sys.executable, "-c", COMPARE, *folders]
    done = subprocess.run(command, capture_output=True, text=True, env=version_4, check=False)
    assert done.returncode == 0, done.stderr
    found = {name: rest for name, *rest in map(str.split, done.stdout.splitlines())}
    assert found.keys() == families.keys()
    wrong = {name: rest for name, rest in found.items() if len(rest) > 1 or float(rest[0]) > 1e-5}
    assert not wrong
