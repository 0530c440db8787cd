"""A twin is small, and yet of the same kind: every switch, every kind of layer, every relation between sizes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedConfig,
)

from megatrain.errors import ModelError
from megatrain.model.tiny import (
    EFFORTS,
    dropout_rates,
    narrowed,
    ordinary_tokens,
    shrink,
    twin_from,
    twin_of,
    with_dropout,
)
from tests.tiny import causal_lm_from_config

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
REAL: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_parameters": LLAMA3},
    "qwen3": {"num_key_value_heads": 8, "tie_word_embeddings": True},
    "gemma2": {},
    "gpt2": {},
    "phi": {},
    "deepseek_v3": {},
    "qwen3_next": {},
    "jamba": {},
    "mamba2": {},
    "gpt_oss": {},
    "granite": {"logits_scaling": 16.0, "residual_multiplier": 0.22},
    "mixtral": {"output_router_logits": True},
}
"""Kinds of model with what their checkpoints state beyond the defaults, at full size."""


def real(kind: str) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **REAL.get(kind, {}))


@cache
def small_of(kind: str) -> PreTrainedConfig:
    """Shared: not to be changed."""
    return shrink(real(kind))


def test_initialisation_seeds_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that makes one for its check leaves the user's random state on a GPU as it was."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("devices are seeded"))
    twin_from(small_of("gpt2"), 0)
    causal_lm_from_config(small_of("gpt2").to_dict(), 0)


def switches(config: PreTrainedConfig) -> dict[str, object]:
    """What is no size: truth values, words, real numbers, and what is absent."""
    skipped = ("dtype", "transformers_version")
    fields = {name: value for name, value in config.to_dict().items() if name not in skipped}
    return {name: value for name, value in fields.items() if isinstance(value, bool | str | float | None)}


@pytest.mark.parametrize("kind", REAL)
def test_shrinking_keeps_switches_and_reduces_sizes(kind: str) -> None:
    config, small = real(kind), small_of(kind)
    assert type(small) is type(config)
    assert switches(small) == switches(config)
    assert sum(p.numel() for p in twin_from(small, 0).parameters()) < 300_000


@pytest.mark.parametrize(
    ("queries", "keys", "expected"), [(32, 32, (4, 4)), (32, 8, (4, 2)), (32, 1, (4, 1)), (71, 71, (4, 4))]
)
def test_head_grouping_is_kept(queries: int, keys: int, expected: tuple[int, int]) -> None:
    sizes = {"hidden_size": 64 * queries, "num_attention_heads": queries, "num_key_value_heads": keys}
    small = shrink(AutoConfig.for_model("llama", **sizes))
    assert (small.num_attention_heads, small.num_key_value_heads) == expected
    assert small.hidden_size == small.head_dim * small.num_attention_heads


@pytest.mark.parametrize(
    ("kind", "field", "expected"),
    [
        ("gemma3_text", "layer_types", ["sliding_attention", "full_attention"]),
        ("qwen3_next", "layer_types", ["linear_attention", "full_attention"]),
        ("gpt_oss", "layer_types", ["sliding_attention", "full_attention"]),
        ("gpt_neo", "attention_layers", ["global", "local"]),
        ("deepseek_v3", "first_k_dense_replace", 1),
        ("smollm3", "no_rope_layers", [1, 0]),
        ("llama4_text", "layer_types", ["chunked_attention", "full_attention"]),
        ("llama", "num_hidden_layers", 2),
    ],
)
def test_each_layer_kind_is_kept_once_in_order(kind: str, field: str, expected: object) -> None:
    assert getattr(small_of(kind), field) == expected


def test_periodic_layer_kinds_are_kept_up_to_the_last() -> None:
    small = small_of("jamba")
    assert small.num_hidden_layers == 5
    assert "full_attention" in small.layers_block_type or "attention" in small.layers_block_type


def test_layers_sharing_keys_still_share_them() -> None:
    small = small_of("gemma3n_text")
    assert 0 < small.num_kv_shared_layers < small.num_hidden_layers
    own = small.num_hidden_layers - small.num_kv_shared_layers
    assert set(small.layer_types[own:]) <= set(small.layer_types[:own])


def test_grouped_expert_routing_is_kept() -> None:
    config, small = real("deepseek_v3"), small_of("deepseek_v3")
    assert small.num_experts_per_tok < small.n_routed_experts == 8
    assert small.topk_group < small.n_group
    assert small.n_routed_experts % small.n_group == 0
    nope, rope = small.qk_nope_head_dim, small.qk_rope_head_dim
    assert nope / rope == config.qk_nope_head_dim / config.qk_rope_head_dim
    assert small.qk_head_dim == nope + rope


def test_windows_are_short_and_position_scaling_is_consistent() -> None:
    assert small_of("mistral").sliding_window == 4
    small = small_of("llama")
    scaling = small.rope_parameters
    assert small.max_position_embeddings == 128
    assert scaling["original_max_position_embeddings"] == 128 * 8192 // 131072
    assert {k: v for k, v in scaling.items() if not k.startswith("orig")} == {
        k: v for k, v in LLAMA3.items() if not k.startswith("orig")
    }


FACTORS = {"short_factor": [1.0 + i / 64 for i in range(64)], "long_factor": [2.0 + i for i in range(64)]}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        {"rope_type": "longrope", "original_max_position_embeddings": 4096, **FACTORS},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_every_rope_scaling_is_kept(rope: dict[str, Any]) -> None:
    stated = {"rope_theta": 1e4, **rope}
    small = shrink(AutoConfig.for_model("llama", max_position_embeddings=131072, rope_parameters=stated))
    assert small.rope_parameters["rope_type"] == rope["rope_type"]
    assert small.hidden_size == 32
    assert len(small.rope_parameters.get("long_factor", [])) in (0, small.head_dim // 2)


def test_special_tokens_keep_distinct_ids() -> None:
    config = AutoConfig.for_model("llama", vocab_size=128256, pad_token_id=128004, eos_token_id=[128001, 128009])
    small = shrink(config)
    special = [small.bos_token_id, small.pad_token_id, *small.eos_token_id]
    assert len(set(special)) == len(special)
    assert max(special) < small.vocab_size == 96
    assert not set(special) & set(ordinary_tokens(small))
    assert len(ordinary_tokens(small)) == 96 - 4


def test_nested_text_configs_are_shrunk_with_their_tower() -> None:
    small = small_of("gemma3")
    assert small.text_config.num_hidden_layers == 2
    assert small.vision_config.num_hidden_layers == 2


def test_a_towers_output_stays_as_wide_as_the_text() -> None:
    """By value, whatever the field's name; and four patches side by side are as wide as four."""
    config = AutoConfig.for_model("muse_glimmer")
    assert config.out_hidden_size == 4 * config.vision_config.hidden_size
    kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    small = shrink(config, kind)
    assert small.out_hidden_size == 4 * small.vision_config.hidden_size
    assert twin_from(small, 0, kind=kind).num_parameters() < 1_000_000


def test_placeholders_of_images_are_ids_of_the_small_vocabulary() -> None:
    small = small_of("gemma3")
    special = {small.image_token_index, small.boi_token_index, small.eoi_token_index, small.text_config.eos_token_id}
    assert len(special) == 4
    assert max(special) < small.text_config.vocab_size == 96
    assert not special & set(ordinary_tokens(small))


@pytest.mark.parametrize(
    ("sections", "share", "small"),
    [
        ([22, 22, 20], 1.0, [1, 1, 2]),  # Ernie 4.5 VL: heights and widths take turns
        ([24, 20, 20], 1.0, [2, 1, 1]),  # Qwen3-VL
        ([16, 24, 24], 1.0, [2, 1, 1]),
        ([11, 11, 10], 0.25, [1, 1, 2]),  # Qwen 3.5
        ([16, 16, 16, 16], 1.0, [1, 1, 1, 1]),  # HunYuan-VL
    ],
)
def test_equal_sections_of_image_positions_stay_equal_and_none_is_empty(
    sections: list[int], share: float, small: list[int]
) -> None:
    rope = {"rope_type": "default", "partial_rotary_factor": share, "mrope_section": sections}
    head = round(2 * sum(sections) / share)
    node = {"hidden_size": 16 * head, "num_attention_heads": 16, "head_dim": head, "vocab_size": 1000}
    made = narrowed(node | {"rope_parameters": rope}, EFFORTS[0])
    assert made["rope_parameters"]["mrope_section"] == small
    assert 2 * sum(small) == made["head_dim"] * share


def test_every_layer_that_a_tower_hands_on_is_kept() -> None:
    """Images enter Qwen3-VL between layers, from layers that its tower names by number."""
    config = AutoConfig.for_model("qwen3_vl")
    small = shrink(config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)])
    tapped = small.vision_config.deepstack_visual_indexes
    assert len(tapped) == len(config.vision_config.deepstack_visual_indexes) == 3
    assert max(tapped) < small.vision_config.depth


def test_shrinking_leaves_the_original_config_unchanged() -> None:
    config = real("qwen3")
    before = config.to_dict()
    assert shrink(config).to_dict() == small_of("qwen3").to_dict()
    assert config.to_dict() == before


class Demanding(MistralForCausalLM):
    """Takes no window below 8."""

    def __init__(self, config: PreTrainedConfig) -> None:
        if config.sliding_window < 8:
            raise ValueError("too short")
        super().__init__(config)


class Impossible(LlamaForCausalLM):
    """Builds, but never runs."""

    def forward(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
        raise RuntimeError("not today\nnor tomorrow")


def test_gentler_rules_are_tried_if_the_first_fail() -> None:
    config = AutoConfig.for_model("mistral", sliding_window=4096)
    assert shrink(config).sliding_window == 4
    assert shrink(config, Demanding).sliding_window == 4096
    assert isinstance(twin_of(config, 0, kind=Demanding), Demanding)


def test_models_that_run_at_no_size_are_refused_in_one_line() -> None:
    tiny = AutoConfig.for_model("llama", hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=96)
    with pytest.raises(ModelError, match=r"no small twin of it builds and runs .*not today") as caught:
        shrink(tiny, Impossible)
    assert "\n" not in str(caught.value)


def test_models_the_library_cannot_build_are_refused_at_once() -> None:
    with pytest.raises(ModelError, match="transformers cannot build it"):
        shrink(AutoConfig.for_model("dots1"))  # its defaults leave the number of experts out


def test_the_tiny_twin_has_every_parameter_and_saved_buffer() -> None:
    model = twin_from(small_of("deepseek_v3"), 3)
    assert model.training
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.numel() == 1 or parameter.std() > 0.01, name
    corrections = [value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert corrections
    assert all(value.std() > 0.01 for value in corrections)


def test_the_tiny_twin_depends_only_on_config_and_seed() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = twin_of(real("gemma2"), 1)
    assert torch.equal(torch.rand(3), expected)
    same, other = twin_from(small_of("gemma2"), 1), twin_from(small_of("gemma2"), 2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_tiny_twin_uses_the_models_kernels_where_available() -> None:
    config = real("mixtral")
    config._experts_implementation = "eager"
    small = shrink(config)
    assert twin_from(small, 0, "eager").config._attn_implementation == "eager"
    assert twin_from(small, 0, "sdpa").config._attn_implementation == "sdpa"
    assert twin_from(small, 0, "flash_attention_2").config._attn_implementation == "sdpa"
    assert twin_from(with_dropout(small, 0.0), 0).config._experts_implementation == "eager"


def test_dropout_is_set_in_all_modules() -> None:
    small = small_of("gpt2")
    assert set(dropout_rates(with_dropout(small, 0.0))) == {0.0}
    assert set(dropout_rates(with_dropout(small, 0.25))) == {0.25}
    still = twin_from(with_dropout(small, 0.0), 0)
    ids: dict[str, Tensor] = {"input_ids": torch.arange(3, 12).unsqueeze(0)}
    with torch.no_grad():
        assert torch.equal(still(**ids).logits, still(**ids).logits)
        moving = twin_from(with_dropout(small, 0.25), 0)
        assert not torch.equal(moving(**ids).logits, moving(**ids).logits)
