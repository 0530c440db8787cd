"""Built-in shapes have the parameters that were published."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from megatrain.model.architecture import auto_class, read_config, refuse_other_configs
from megatrain.model.hub import known_config, known_models


@pytest.mark.few(30)  # `test_stored_measurements_have_the_models_parameters` compares the same counts of all, unbuilt
@pytest.mark.parametrize("name", known_models())
def test_built_in_models_have_their_published_parameter_counts(name: str) -> None:
    model = without_weights(known_config(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == known_models()[name]["parameters"]


def without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config on the meta device, where drawing weights would be most of the work."""
    with torch.device("meta"), no_init_weights():
        model: PreTrainedModel = auto_class(config).from_config(config)
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", known_models())
def test_built_in_models_are_trainable_and_their_fields_valid(name: str) -> None:
    fields = {field: value for field, value in known_models()[name].items() if field != "parameters"}
    config, known = read_config(fields, where=name), known_config(name)
    refuse_other_configs(known, where=name)
    config.name_or_path = known.name_or_path
    assert known.to_dict() == config.to_dict()


def test_common_models_are_built_in() -> None:
    assert len(known_models()) >= 80
    assert {"meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V3"} <= known_models().keys()
    assert {"Qwen/Qwen3.6-27B", "Qwen/Qwen3-VL-8B-Instruct", "moonshotai/Kimi-K2.6"} <= known_models().keys()


@pytest.mark.parametrize(
    ("name", "of_images"),
    [
        ("Qwen/Qwen3.5-27B", 460_730_096),
        ("Qwen/Qwen3-VL-4B-Instruct", 415_347_712),
        ("moonshotai/Kimi-K2.6", 471_143_920),
    ],
)
def test_a_model_with_images_has_the_tower_that_was_published(name: str, of_images: int) -> None:
    """Published counts of what is not the language model, which a total alone would not tell from it."""
    model = without_weights(known_config(name))
    text = {id(parameter) for part in ("language_model", "lm_head") for parameter in parts(model, part)}
    assert sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in text) == of_images


def parts(model: nn.Module, name: str) -> list[nn.Parameter]:
    return [each for path, module in model.named_modules() if path.endswith(name) for each in module.parameters()]


def test_built_in_configs_are_independent_copies() -> None:
    first, second = known_config("openai-community/gpt2"), known_config("openai-community/gpt2")
    first.n_layer = 1
    assert second.n_layer == 12
