"""Built-in models: names find them, or nothing, and what was measured of them is what they have."""

from __future__ import annotations

import pytest

from bench.measured_models import measured
from megatrain.model.known_models import known_models
from megatrain.plan.measured_models import built_in, known_name, known_names


def test_each_model_of_the_table_has_been_measured() -> None:
    assert known_names() == tuple(known_models())


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "openai/gpt-oss-120b", "google/gemma-3-1b-pt"])
def test_what_was_measured_has_the_parameters_of_the_model(name: str) -> None:
    assert (
        sum(param.numel for unit in built_in(name).units for param in unit.params) == known_models()[name]["parameters"]
    )


@pytest.mark.parametrize(
    "name",
    [
        "openai-community/gpt2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B")),
    ],
)
def test_what_was_measured_is_what_is_measured_today(name: str) -> None:
    """Where it is not, `python -m bench.measured_models` writes it anew."""
    assert built_in(name) == measured(name)


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
    assert known_name(name) == known


def test_a_variant_with_a_line_of_its_own_is_not_given_the_shape_of_another() -> None:
    for name in ("mistralai/Mixtral-8x22B-v0.1", "mistralai/Mixtral-8x22B-Instruct-v0.1"):
        assert known_name(name) == name


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
    assert known_name(name) is None
