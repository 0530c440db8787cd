"""Every recipe trains at tiny size as it stands, but for sizes, places and the device; the large ones are planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.commands.plan import find_model
from megatrain.config import Config, load_config
from megatrain.data.tokenizer import load_tokenizer
from megatrain.plan import Plan, Question, find_plan, load_hardware
from tests.run.test_chats import chats
from tests.run.test_preferences import preferences
from tests.run.test_training import TEXT, losses, train

RECIPES = Path(__file__).parents[2] / "configs"
LIKE_ANOTHER = ("pretrain.yaml", "long-context.yaml", "sft-70b.yaml", "lora-70b.yaml")
"""Recipes that differ from another in sizes, or in whether they begin from a model."""
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
QWEN_32B = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25_600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY)).save_pretrained(folder)
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def made_tiny(name: str, tmp_path: Path, model: Path) -> Config:
    recipe = load_config(RECIPES / name)
    changes: dict[str, Any] = {
        "data.sequence_length": 64,
        "data.cache": tmp_path / "cache",
        "data.validation_fraction": 0.1,
        "train.steps": 3,
        "train.warmup_steps": 1,
        "train.decay_steps": 1,
        "train.global_batch_size": 2,
        "train.eval_batches": 1,
        "train.sample_tokens": 0,
        "train.device": "cpu",
        "train.hardware": "null",
        "checkpoint.every": 2,
        "output.folder": tmp_path / "run",
        "output.trackers": "[]",
    }
    if recipe.model.config is None:
        changes["model.path"] = model
    else:
        changes |= {f"model.config.{key}": value for key, value in TINY.items()} | {"data.tokenizer": "bytes"}
    sources = []
    for source in recipe.data.sources:
        path = tmp_path / Path(source).name
        if recipe.train.objective == "dpo":
            preferences(path)
        elif path.suffix:
            chats(path)
        else:
            path.mkdir()
            (path / "text.txt").write_text(TEXT)
        sources.append(str(path))
    changes["data.sources"] = json.dumps(sources)
    if recipe.disk.folders:
        changes["disk.folders"] = json.dumps([str(tmp_path / Path(folder).parts[-2]) for folder in recipe.disk.folders])
        for folder in json.loads(changes["disk.folders"]):
            Path(folder).mkdir()
    return load_config(RECIPES / name, [f"{key}={value}" for key, value in changes.items()])


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=pytest.mark.slow if path.name in LIKE_ANOTHER else ())
        for path in sorted(RECIPES.glob("*.yaml"))
        if path.name != "quickstart.yaml"
    ],
)
def test_a_recipe_trains_at_tiny_size(name: str, tmp_path: Path, model: Path) -> None:
    said = train(made_tiny(name, tmp_path, model))
    assert len(losses(tmp_path / "run")) == 3
    config = "adapter_config.json" if name.startswith("lora") else "config.json"
    assert (tmp_path / "run" / "model" / config).is_file()
    assert ("of them trained" in said) == (name not in ("pretrain.yaml", "continue.yaml"))


def planned(name: str, fields: dict[str, Any], tmp_path: Path) -> Plan:
    recipe = load_config(RECIPES / name)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert recipe.train.hardware is not None
    overrides = {**recipe.policy.overrides, "host_threads": 16}
    if recipe.train.micro_batch_override is not None:
        overrides["micro_batch"] = recipe.train.micro_batch_override
    question = Question(
        find_model(str(tmp_path / "config.json"), recipe.train.precision, adapter="lora" if recipe.adapter else None),
        load_hardware(recipe.train.hardware),
        tokens_per_step=recipe.train.sequences * recipe.data.sequence_length,
        length=recipe.data.sequence_length,
        precision=recipe.train.precision,
        clips=recipe.train.max_grad_norm is not None,
        overrides=overrides,
    )
    return find_plan(question)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sft-8b.yaml", LLAMA_8B),
        ("sft-70b.yaml", LLAMA_70B),
        ("long-context.yaml", LLAMA_8B),
        ("disk.yaml", QWEN_32B),
        ("lora-8b.yaml", LLAMA_8B),
        ("lora-70b.yaml", LLAMA_70B),
    ],
)
def test_large_recipes_fit_their_machines(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    plan = planned(name, fields, tmp_path)
    assert plan.tokens_per_second > 10
    assert any(placement.uses_disk for placement in plan.policy.placements) == (name == "disk.yaml")
    print(name, plan.seconds, plan.tokens_per_second, plan.micro_batch, dict(plan.nbytes))
