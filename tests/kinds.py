"""Tiny configs of many kinds of causal language models, for what must hold for all that the library can build."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.tiny import COMMON

_IDS: dict[str, Any] = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COMMON: dict[str, Any] = {**COMMON, "num_hidden_layers": 2}
_FALCON = {name: value for name, value in _COMMON.items() if name not in ("intermediate_size", "num_key_value_heads")}
_EXPERTS = {**_COMMON, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
_MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}

KINDS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "qwen2": _COMMON,
    "qwen3": {**_COMMON, "head_dim": 8},
    "gemma2": {**_COMMON, "head_dim": 8},
    "gemma3_text": {**_COMMON, "head_dim": 8},
    "gpt2": {**_IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {**_FALCON, "intermediate_size": 48},
    "opt": {**_FALCON, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {**_IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": _FALCON,
    "phi3": _COMMON,
    "granite": _COMMON,
    "cohere2": _COMMON,
    "olmo2": _COMMON,
    "mixtral": {**_COMMON, "num_local_experts": 4},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8, "num_experts": 4},
    "gpt_oss": {**_EXPERTS, "head_dim": 8, "num_local_experts": 4},
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "mamba": {**_IDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "bamba": {**_COMMON, **_MAMBA, "attn_layer_indices": [1]},
}
"""Model type -> fields."""

TIED = ("llama", "gpt2", "mixtral", "mamba")
"""Kinds to look at with tied embeddings too."""


def case_of(kind: str, *marks: pytest.MarkDecorator) -> Any:
    """A test's case of this model type, skipped where the installed transformers has no such type."""
    reason = f"transformers {transformers.__version__} has no {kind}"
    return pytest.param(kind, marks=(*marks, pytest.mark.skipif(kind not in CONFIG_MAPPING, reason=reason)))


def tiny_config(kind: str, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **{**KINDS[kind], **changes})


def stock_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """As the library initialises it, in float32 and training mode; `config` is left alone."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).train()
