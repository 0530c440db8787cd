"""Built-in shapes have the parameters that were published."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.model.architecture import read_config, refuse_other_configs
from megatrain.model.known_models import known_config, known_models


@pytest.mark.parametrize("name", known_models())
def test_a_known_model_has_as_many_parameters_as_were_published(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known_config(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == known_models()[name]["parameters"]


@pytest.mark.parametrize("name", known_models())
def test_a_known_model_is_one_that_can_be_trained_and_none_of_its_fields_is_misspelt(name: str) -> None:
    fields = {field: value for field, value in known_models()[name].items() if field != "parameters"}
    config, known = read_config(fields, where=name), known_config(name)
    refuse_other_configs(known, where=name)
    config.name_or_path = known.name_or_path
    assert known.to_dict() == config.to_dict()


def test_about_fifty_models_are_known_and_the_common_sizes_are_among_them() -> None:
    assert len(known_models()) >= 50
    assert {"meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V3"} <= known_models().keys()


def test_a_config_may_be_changed_without_changing_the_next_one() -> None:
    first, second = known_config("openai-community/gpt2"), known_config("openai-community/gpt2")
    first.n_layer = 1
    assert second.n_layer == 12
