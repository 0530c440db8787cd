"""Built-in dimensions of widely used models, so that you can plan for one by its name, offline.

`known_models.json` has one model per line: its id on the Hugging Face hub, its `model_type`, and the config fields that
affect sizes and work, unless they are the type's defaults. `parameters` is the published count, minus what is not a
parameter of the library's model: buffers, a tied weight saved twice, layers for multi-token prediction, keys and values
of a layer that reads those of another. A model with images is the whole that its publisher gives, tower and all.
A model is listed if a published configuration gives its sizes and they give its count. The defaults of a class that
names a checkpoint are no such configuration: those of Qwen 3.5 have an image tower of another model's width.

Fields that only change numbers (rotary bases, epsilons, scales, token ids) are left at the library's defaults: training
reads a model's own config (`megatrain.model.architecture`). Aliases of these models and their measurements are in
`plan.measured_models`, which does not need the library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

_NO_FIELDS = ("model_type", "parameters")


def known_config(name: str) -> PreTrainedConfig:
    """A new config with the dimensions of the known model with this id."""
    entry = known_models()[name]
    fields = {field: value for field, value in entry.items() if field not in _NO_FIELDS}
    config: PreTrainedConfig = AutoConfig.for_model(entry["model_type"], **fields)
    config.name_or_path = name  # its name in errors
    return config


@cache
def known_models() -> Mapping[str, Mapping[str, Any]]:
    """Id -> `model_type`, fields of the config, and `parameters`."""
    table = resources.files("megatrain.model").joinpath("known_models.json")
    content: dict[str, dict[str, Any]] = json.loads(table.read_text(encoding="utf-8"))
    return content
