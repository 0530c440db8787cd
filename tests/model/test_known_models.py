"""Built-in shapes have the parameters that were published."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.model.architecture import read_config, refuse_other_configs
from megatrain.model.known_models import known_config, known_models


@pytest.mark.parametrize("name", known_models())
def test_built_in_models_have_their_published_parameter_counts(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known_config(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == known_models()[name]["parameters"]


@pytest.mark.parametrize("name", known_models())
def test_built_in_models_are_trainable_and_their_fields_valid(name: str) -> None:
    fields = {field: value for field, value in known_models()[name].items() if field != "parameters"}
    config, known = read_config(fields, where=name), known_config(name)
    refuse_other_configs(known, where=name)
    config.name_or_path = known.name_or_path
    assert known.to_dict() == config.to_dict()


def test_common_models_are_built_in() -> None:
    assert len(known_models()) >= 50
    assert {"meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V3"} <= known_models().keys()


def test_built_in_configs_are_independent_copies() -> None:
    first, second = known_config("openai-community/gpt2"), known_config("openai-community/gpt2")
    first.n_layer = 1
    assert second.n_layer == 12
