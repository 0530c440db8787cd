"""Whole Hugging Face models in host memory, by name, folder or configuration.

It leaves out lean loading (shards straight into the store), which replaces `load_causal_lm` when it lands.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from megatrain.errors import ModelError


def load_causal_lm(source: str) -> PreTrainedModel:
    """A causal language model with its weights, from a local folder or a hub name, in float32 and training mode.

    Raises `ModelError` when it is missing, unreadable, or not a causal language model.
    """
    with quiet():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, local_files_only=Path(source).exists()
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(_first_line(error), where=f"model {source}", fix=_SOURCES) from error
    loaded: PreTrainedModel = model.train()
    return loaded


def causal_lm_from_config(config: str | dict[str, Any], seed: int) -> PreTrainedModel:
    """A fresh causal language model in float32 and training mode, initialised by its own initialiser from `seed`.

    `config` is a local folder, a `config.json`, a hub name, or the fields themselves with `model_type` among them.
    """
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if isinstance(config, dict):
                fields = dict(config)
                kind = fields.pop("model_type", None)
                if kind is None:
                    raise ModelError("has no model_type", where="model.config", fix="add model_type: llama, say")
                _refuse_unknown_fields(kind, fields)
                parsed = AutoConfig.for_model(kind, **fields)
            else:
                parsed = AutoConfig.from_pretrained(config)
            model = AutoModelForCausalLM.from_config(parsed, dtype=torch.float32)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(_first_line(error), where="model.config", fix=_SOURCES) from error
    fresh: PreTrainedModel = model.train()
    return fresh


COMMON_FIELDS = ("attn_implementation", "rope_theta", "rope_scaling", "num_key_value_heads", "head_dim", "torch_dtype")
"""Fields that many configs take without listing them."""

_SOURCES = "give a local Hugging Face folder, a hub name, or a config with a causal-LM model_type"


def _refuse_unknown_fields(kind: str, fields: dict[str, Any]) -> None:
    """transformers keeps a field that it does not know in silence; a misspelt one would train another model."""
    known = set(AutoConfig.for_model(kind).to_dict()) | set(PreTrainedConfig().to_dict()) | set(COMMON_FIELDS)
    for name in fields:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ModelError(
                f"{kind} has no field {name!r}",
                where="model.config",
                fix=f"did you mean {near[0]!r}?" if near else f"see the fields of a {kind} config.json",
            )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0].rstrip(".") if text else type(error).__name__


class quiet:
    """Silences the progress bars and notices of transformers for one call; errors come through as exceptions."""

    def __enter__(self) -> None:
        self._level = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        transformers_logging.set_verbosity(self._level)
        transformers_logging.enable_progress_bar()
