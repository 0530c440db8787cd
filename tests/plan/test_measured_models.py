"""Built-in models: names find them, or nothing, and what was measured of them is what they have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.measured_models import measured
from megatrain.model.hub import known_models
from megatrain.plan.measured_models import built_in, known_name, known_names

CONSTRAINTS = (Path(__file__).parents[2] / "constraints.txt").read_text().split()
IS_PINNED = f"torch=={torch.__version__.partition('+')[0]}" in CONSTRAINTS


def test_every_built_in_model_has_measurements() -> None:
    assert known_names() == tuple(known_models())


@pytest.mark.parametrize("name", known_models())
def test_stored_measurements_have_the_models_parameters(name: str) -> None:
    """And tell of each whether it is a matrix, as some of every layer are."""
    units = built_in(name).units
    assert sum(param.numel for unit in units for param in unit.params) == known_models()[name]["parameters"]
    assert all(param.products >= 0 for unit in units for param in unit.params)
    assert all(any(param.products for param in unit.params) for unit in units[1:-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "openai-community/gpt2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B")),
    ],
)
@pytest.mark.skipif(not IS_PINNED, reason="what layers allocate differs by version of PyTorch")
def test_stored_measurements_equal_new_ones(name: str) -> None:
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
        ("qwen3.6-27b-fp8", "Qwen/Qwen3.6-27B"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        ("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B"),
    ],
)
def test_model_names_match_without_case_organisation_or_variant(name: str, known: str) -> None:
    assert known_name(name) == known


def test_listed_variants_keep_their_own_shape() -> None:
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
