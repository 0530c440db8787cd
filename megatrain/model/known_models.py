"""Built-in dimensions of widely used models, so that you can plan for one by its name, offline.

`known_models.json` has a model on each line: its id on the Hugging Face hub, its `model_type`, and what of its config
decides sizes and work, where that is not the default of its type. `parameters` is how many were published, less what is
no parameter of the library's model: buffers, a tied weight that was saved twice, the layer of DeepSeek-V3 that predicts
a further token.

It leaves out what changes numbers alone, such as rotary bases, epsilons, scales and token ids, which are the library's
defaults here: to train, a model's own config is read (`megatrain.model.architecture`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

_TABLE = "known_models.json"
_NO_FIELDS = ("model_type", "parameters")
_VARIANTS = frozenset({"base", "chat", "hf", "instruct", "it", "pt"})
"""Words of an id, between dashes, that say how a model was tuned or stored and nothing of its shape."""


def known_names() -> tuple[str, ...]:
    """The ids of the models whose shape is built in."""
    return tuple(_table())


def known_config(name: str) -> PreTrainedConfig | None:
    """The shape of the model called `name`, as a new config; `None` where it is not built in.

    Case does not count, and the organisation may be left out. A variant (`-Instruct`, `-it`, `-Base`) gets the shape of
    the model in the table, although some were published for more or fewer positions, or with a few more tokens.
    """
    if (found := _known_name(name)) is None:
        return None
    entry = _table()[found]
    fields = {field: value for field, value in entry.items() if field not in _NO_FIELDS}
    config: PreTrainedConfig = AutoConfig.for_model(entry["model_type"], **fields)
    config.name_or_path = found  # how errors call it
    return config


def _known_name(name: str) -> str | None:
    """The id in the table that `name` means: the same one, or else the only variant of the same model."""
    for reduced in (str.lower, _without_variant):
        wanted = reduced(name)
        found = [each for each in _table() if wanted in (reduced(each), reduced(each).rpartition("/")[2])]
        if len(found) == 1:
            return found[0]
    return None


def _without_variant(name: str) -> str:
    """`meta-llama/llama-3.1-8b` for `meta-llama/Meta-Llama-3.1-8B-Instruct`; the hub dropped that `Meta-` too."""
    organisation, slash, model = name.lower().rpartition("/")
    words = model.removeprefix("meta-").split("-")
    return organisation + slash + "-".join(word for word in words if word not in _VARIANTS)


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    """Id -> `model_type`, fields of the config, and `parameters`."""
    content: dict[str, dict[str, Any]] = json.loads(
        resources.files("megatrain.model").joinpath(_TABLE).read_text(encoding="utf-8")
    )
    return content
