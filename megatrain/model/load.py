"""Whole Hugging Face models in host memory, by name, folder or configuration: the stock way.

Training does not use it: `sources` fills the store unit by unit without a second copy of the model. It stays as the
slow, obviously right twin that lean loading is tested against, and for sampling from a model that was saved.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from megatrain.model.architecture import plain_errors, read_config
from megatrain.model.hub import is_local, located


def load_causal_lm(
    source: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal language model with its weights, from a local folder or a hub name, in training mode.

    dtype: of the weights; buffers are as the library makes them for it. trust_remote_code: run the model's own code.
    Raises `ModelError` when it is missing, unreadable, or not a causal language model.
    """
    with quiet(), plain_errors(f"model {source}"):
        source = located(source, where=f"model {source}")
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, local_files_only=is_local(source), trust_remote_code=trust_remote_code
        )
    loaded: PreTrainedModel = model.train()
    return loaded


def causal_lm_from_config(config: str | dict[str, Any], seed: int) -> PreTrainedModel:
    """A fresh causal language model in float32 and training mode, initialised by its own initialiser from `seed`.

    `config` is a local folder, a `config.json`, a hub name, or the fields themselves with `model_type` among them.
    """
    where = "model.config"
    with quiet(), torch.random.fork_rng(devices=[]), plain_errors(where):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(read_config(config, where=where), dtype=torch.float32)
    fresh: PreTrainedModel = model.train()
    return fresh


class quiet:
    """Silences the progress bars and notices of transformers for one call; errors come through as exceptions."""

    def __enter__(self) -> None:
        self._level = transformers_logging.get_verbosity()
        self._had_bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        transformers_logging.set_verbosity(self._level)
        if self._had_bars:
            transformers_logging.enable_progress_bar()
