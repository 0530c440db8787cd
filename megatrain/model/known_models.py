"""Built-in dimensions of widely used models, so that you can plan for one by its name, offline.

`known_models.json` has a model on each line: its id on the Hugging Face hub, its `model_type`, and what of its config
decides sizes and work, where that is not the default of its type. `parameters` is how many were published, less what is
no parameter of the library's model: buffers, a tied weight that was saved twice, the layer of DeepSeek-V3 that predicts
a further token.

It leaves out what changes numbers alone, such as rotary bases, epsilons, scales and token ids, which are the library's
defaults here: to train, a model's own config is read (`megatrain.model.architecture`). Which other names mean one of
these models, and what was measured of them, is known without the library (`plan.measured_models`).
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
    """The shape of the model of that id in the table, as a new config."""
    entry = known_models()[name]
    fields = {field: value for field, value in entry.items() if field not in _NO_FIELDS}
    config: PreTrainedConfig = AutoConfig.for_model(entry["model_type"], **fields)
    config.name_or_path = name  # how errors call it
    return config


@cache
def known_models() -> Mapping[str, Mapping[str, Any]]:
    """Id -> `model_type`, fields of the config, and `parameters`."""
    table = resources.files("megatrain.model").joinpath("known_models.json")
    content: dict[str, dict[str, Any]] = json.loads(table.read_text(encoding="utf-8"))
    return content
