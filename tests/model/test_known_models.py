"""Built-in shapes have the parameters that were published, and names find them, or nothing."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.model.architecture import read_config, refuse_other_configs
from megatrain.model.known_models import known_config, known_names

TABLE: dict[str, dict[str, Any]] = json.loads(
    resources.files("megatrain.model").joinpath("known_models.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", known_names())
def test_a_known_model_has_as_many_parameters_as_were_published(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known_config(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == TABLE[name]["parameters"]


@pytest.mark.parametrize("name", known_names())
def test_a_known_model_is_one_that_can_be_trained_and_none_of_its_fields_is_misspelt(name: str) -> None:
    fields = {field: value for field, value in TABLE[name].items() if field != "parameters"}
    config, known = read_config(fields, where=name), known_config(name)
    assert known is not None
    refuse_other_configs(known, where=name)
    config.name_or_path = known.name_or_path
    assert known.to_dict() == config.to_dict()


def test_about_fifty_models_are_known_and_the_common_sizes_are_among_them() -> None:
    assert len(known_names()) >= 50
    assert {"meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V3"} <= set(known_names())


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("META-LLAMA/llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.3-70B", "meta-llama/Llama-3.3-70B-Instruct"),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("google/gemma-3-1b-it", "google/gemma-3-1b-pt"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistralai/Mistral-Nemo-Base-2407"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-ai/DeepSeek-V3"),
        ("gpt2", "openai-community/gpt2"),
        ("Phi-4", "microsoft/phi-4"),
        ("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B"),
    ],
)
def test_a_model_is_found_in_any_case_without_its_organisation_and_by_a_variant(name: str, known: str) -> None:
    found = known_config(name)
    assert found is not None
    assert found.name_or_path == known


def test_a_variant_with_a_line_of_its_own_is_not_given_the_shape_of_another() -> None:
    base, tuned = (known_config(f"mistralai/Mixtral-8x22B-{word}v0.1") for word in ("", "Instruct-"))
    assert base is not None
    assert tuned is not None
    assert (base.vocab_size, tuned.vocab_size) == (32_000, 32_768)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "base",
        "meta-llama",
        "meta-llama/",
        "Llama",
        "Mixtral-8x22B-Base-v0.1",  # two lines would fit
        "someone/Llama-3.1-8B",
        "./gpt2",
        "models/gpt2",
        "gpt2/config.json",
        "Qwen/Qwen3-8B-GGUF",
        "meta-llama/Llama-3.1-8B/model",
    ],
)
def test_a_name_that_is_not_built_in_finds_nothing(name: str) -> None:
    assert known_config(name) is None


def test_a_config_may_be_changed_without_changing_the_next_one() -> None:
    first, second = known_config("gpt2"), known_config("gpt2")
    assert first is not None
    assert second is not None
    first.n_layer = 1
    assert second.n_layer == 12
