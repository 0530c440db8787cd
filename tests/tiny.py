"""Models of a few thousand parameters, batches for them, and the stock model's loss and gradients.

The slow, obviously right reference for the engine: one plain forward and backward per micro-batch through Hugging
Face's own code, with the loss divided by the number of target tokens of the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatrain.model.architecture import auto_class, plain_errors, read_config
from megatrain.model.weight_sources import quiet

VOCAB = 96
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **COMMON},
    "llama-tied": {"model_type": "llama", **COMMON, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **COMMON, "head_dim": 8},
    "qwen3-tied": {"model_type": "qwen3", **COMMON, "head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", **COMMON, "head_dim": 8, "sliding_window": 4, "num_hidden_layers": 4},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mixtral": {"model_type": "mixtral", **COMMON, "num_local_experts": 4},
    "mixtral-balanced": {
        "model_type": "mixtral",
        **COMMON,
        "num_local_experts": 4,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        **COMMON,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gemma4": {  # layers take inputs of their own from the prologue, and keys and values from each other
        "model_type": "gemma4_text",
        **COMMON,
        "head_dim": 8,
        "global_head_dim": 8,
        "layer_types": ["full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "tie_word_embeddings": False,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 4,
    },
}

BYTE_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 257,
    "max_position_embeddings": 64,
}
"""Two layers over bytes, as the key `model.config` of a run."""


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A fresh float32 model in training mode; `changes` go into its config."""
    fields = {**FAMILIES[family], **changes}
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).train()


def batch(rows: int, length: int, seed: int, padded: int = 0) -> dict[str, Tensor]:
    """Random tokens; with `padded`, that many at the end of the first row are masked and no targets."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    labels = ids.clone()
    if not padded:
        return {"input_ids": ids, "labels": labels}
    mask = torch.ones_like(ids)
    mask[0, length - padded :] = 0
    labels[mask == 0] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def unequal_batches(count: int = 2) -> list[dict[str, Tensor]]:
    """Micro-batches of different shapes, the first with padding."""
    return [batch(2, 10, 0, padded=3), batch(3, 6, 1), batch(1, 13, 2)][:count]


def target_tokens(batches: Sequence[dict[str, Tensor]]) -> int:
    return sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)


def stock_gradients(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Loss and every gradient of a step by plain autograd; a parameter that got none has a zero.

    A router auxiliary loss that the config asks for counts by each micro-batch's share of the target tokens.
    """
    model.zero_grad(set_to_none=True)
    total = 0.0
    count = target_tokens(batches)
    for each in batches:
        inputs = {key: value for key, value in each.items() if key != "labels"}
        output = model(**inputs, use_cache=False)
        logits = output.logits[:, :-1].to(torch.promote_types(output.logits.dtype, torch.float32))
        losses = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), each["labels"][:, 1:].reshape(-1), reduction="sum"
        )
        if getattr(model.config, "output_router_logits", False):
            share = int((each["labels"][:, 1:] != -100).sum())
            losses = losses + model.config.router_aux_loss_coef * output.aux_loss * share
        (losses / count).backward()
        total += losses.item() / count
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return total, gradients


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected (absolute where that is zero)."""
    scale = expected.double().norm().item()
    return (found.double() - expected.double()).norm().item() / (scale or 1.0)


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Same names, and bit-equal tensors."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def causal_lm_from_config(config: str | dict[str, Any], seed: int) -> PreTrainedModel:
    """A fresh float32 causal language model in training mode, initialised by its own code from `seed`.

    config: a local folder, a `config.json`, a hub name, or the fields themselves, including `model_type`.
    """
    where = "model.config"
    with quiet(), torch.random.fork_rng(devices=[]), plain_errors(where):
        torch.default_generator.manual_seed(seed)
        read = read_config(config, where=where)
        model = auto_class(read).from_config(read, dtype=torch.float32)
    fresh: PreTrainedModel = model.train()
    return fresh
