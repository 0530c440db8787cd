"""A narrow model repeated over its width is the same function in the library's own code."""

from __future__ import annotations

import math
from fractions import Fraction
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from bench.wide import Repeated, WideModel, find_recipe, with_width
from megatrain.errors import ModelError
from megatrain.model.tiny import built
from tests.tiny import FAMILIES, VOCAB, stock_gradients, unequal_batches

PHI: dict[str, Any] = {"model_type": "phi3", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40}
PHI |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
DEEPSEEK: dict[str, Any] = {"model_type": "deepseek_v3", **FAMILIES["llama"], "q_lora_rank": 8, "kv_lora_rank": 8}
DEEPSEEK |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 20}
DEEPSEEK |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
DEEPSEEK |= {"first_k_dense_replace": 1, "num_key_value_heads": 4, "model_type": "deepseek_v3", "intermediate_size": 56}
KINDS: dict[str, dict[str, Any]] = {**FAMILIES, "phi3": PHI, "deepseek-v3": DEEPSEEK}
KINDS["qwen3-moe"] = {**FAMILIES["qwen3-moe"], "moe_intermediate_size": 24}


def narrow_model(kind: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    fields = {**KINDS[kind], **changes}
    return built(AutoConfig.for_model(fields.pop("model_type"), **fields), None, None).train()


class Written(dict[str, Tensor]):
    def write_master(self, name: str, value: Tensor) -> None:
        self[name] = value


@pytest.mark.few(3)
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize(
    "kind", ["llama", "llama-tied", "qwen3", "gpt2", "mixtral-balanced", "qwen3-moe", "phi3", "deepseek-v3"]
)
def test_a_wide_model_computes_the_loss_and_the_gradients_of_the_narrow_one(kind: str, times: int) -> None:
    """In the stock code: joined and separate projections, shared keys, tied heads, routers, ranks."""
    narrow = narrow_model(kind)
    wide = WideModel(narrow, times)
    weights, names = Written(), [name for name, _ in wide.model.named_parameters()]
    wide.fill(weights, [names])  # type: ignore[arg-type]
    stock = built(wide.config, None, None).train()
    assert sum(parameter.numel() for parameter in stock.parameters()) > times * narrow.num_parameters()
    stock.load_state_dict(weights, strict=False)
    batches = unequal_batches()
    loss, gradients = stock_gradients(narrow, batches)
    wide_loss, of_copies = stock_gradients(stock, batches)
    assert wide_loss == pytest.approx(loss, rel=1e-6)
    for name, repeated in wide.parameters.items():
        start, stop = 5, prod(repeated.wide_shape) - 3
        assert torch.equal(wide.values(name, start, stop), weights[name].flatten()[start:stop])
        scale = max(float(gradients[name].norm()), 1e-3)
        made = repeated.farthest(of_copies[name]) / repeated.gradient_factor
        assert float((made - gradients[name]).norm()) < 1e-4 * scale, name


@pytest.mark.parametrize("copy", [2.0, math.inf, -math.inf, math.nan])
def test_the_farthest_of_the_copies_is_the_one_that_is_not_finite(copy: float) -> None:
    (found,) = Repeated((1,), (4,), (1,), 1.0).farthest(torch.tensor([1.0, copy, 1.0, 1.1]))
    assert not torch.isclose(found, torch.tensor(1.0), atol=0.2)


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        ("gemma2", {}, "is another function when its width is repeated"),
        ("phi3", {"num_key_value_heads": 2}, "is another function when its width is repeated"),
        ("llama", {"head_dim": 8, "intermediate_size": 50}, "its intermediate_size of 50 cannot be divided by 4"),
    ],
)
def test_a_model_that_cannot_be_repeated_is_refused(kind: str, changes: dict[str, Any], complaint: str) -> None:
    """Phi-3 joins queries with keys that several of them share, so that no two parts are of one size."""
    config = narrow_model(kind, **changes).config
    with pytest.raises(ModelError, match=complaint):
        find_recipe(with_width(config, Fraction(1, 4)) if kind == "llama" else config)
