"""Small vision-language models of eleven kinds, and micro-batches with images for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from megatrain.model.tiny import perturb
from tests.tiny import COMMON, VOCAB

IMAGE, VOCABULARY = 50, VOCAB
"""The token that stands for a part of an image, and the number of tokens."""

TEXT: dict[str, Any] = {**COMMON, "num_hidden_layers": 2, "head_dim": 8, "max_position_embeddings": 256}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
VIDEO = {"image_token_id": IMAGE, "video_token_id": 51}
MARKS = {"vision_start_token_id": 52, "vision_end_token_id": 53}
DEEP = {"depth": 2, "num_heads": 2, "out_hidden_size": 32, "temporal_patch_size": 1, "spatial_merge_size": 2}

Inputs = Callable[[torch.Generator], dict[str, Tensor]]


def _squares(generator: torch.Generator) -> dict[str, Tensor]:
    """One image of 8 x 8 pixels."""
    return {"pixel_values": torch.randn(1, 3, 8, 8, generator=generator)}


def _sized(generator: torch.Generator) -> dict[str, Tensor]:
    """One image of 8 x 16 pixels, with its size."""
    return {"pixel_values": torch.randn(1, 3, 8, 16, generator=generator), "image_sizes": torch.tensor([[8, 16]])}


def _patches(generator: torch.Generator) -> dict[str, Tensor]:
    """The four patches of one image, flat, and their grid."""
    return {"pixel_values": torch.randn(4, 48, generator=generator), "image_grid_thw": torch.tensor([[1, 2, 2]])}


def _kimi(generator: torch.Generator) -> dict[str, Tensor]:
    return _patches(generator) | {"pixel_values": torch.randn(4, 3, 4, 4, generator=generator)}


def _inkling(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 8, 8, 3, generator=generator), "image_grid_thw": torch.tensor([[1, 1, 1]])}


def _lfm(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(1, 4, 48, generator=generator),
        "spatial_shapes": torch.tensor([[2, 2]]),
        "pixel_attention_mask": torch.ones(1, 4, dtype=torch.long),
    }


def _gemma4(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.rand(1, 1, 192, generator=generator), "image_position_ids": torch.tensor([[[0, 0]]])}


@dataclass(frozen=True)
class Kind:
    """One kind of model: changes of its configuration, how many tokens an image takes, and its inputs."""

    text: dict[str, Any]
    vision: dict[str, Any]
    top: dict[str, Any]
    tokens: int
    inputs: Inputs
    typed: bool = False
    """Whether it takes `mm_token_type_ids`."""
    attention: str = "sdpa"


KINDS: dict[str, Kind] = {
    "llava": Kind({}, {"image_size": 8}, {"image_token_index": IMAGE, "image_seq_length": 4}, 4, _squares),
    "mistral3": Kind({}, {"image_size": 16, "head_dim": 8}, {"image_token_index": IMAGE}, 2, _sized),
    "gemma3": Kind(
        {"query_pre_attn_scalar": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        {"image_size": 8},
        {"image_token_index": IMAGE, "mm_tokens_per_image": 4},
        4,
        _squares,
    ),
    "qwen2_5_vl": Kind(
        MROPE | {"layer_types": ["full_attention"] * 2},
        DEEP | {"window_size": 8, "fullatt_block_indexes": [1]},
        VIDEO | MARKS,
        1,
        _patches,
        typed=True,
    ),
    "qwen3_5": Kind(
        {
            "rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 1.0, "mrope_interleaved": True},
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        DEEP | {"num_position_embeddings": 16},
        VIDEO | MARKS,
        1,
        _patches,
        typed=True,
    ),
    "qwen3_vl": Kind(
        {"rope_parameters": {**MROPE["rope_parameters"], "mrope_interleaved": True}},
        DEEP | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        VIDEO | MARKS,
        1,
        _patches,
        typed=True,
    ),
    "glm4v": Kind(
        MROPE,
        DEEP | {"image_size": 8},
        VIDEO
        | {"image_start_token_id": 52, "image_end_token_id": 53, "video_start_token_id": 54}
        | {"video_end_token_id": 55},
        1,
        _patches,
        typed=True,
    ),
    "internvl": Kind(
        {"layer_types": ["full_attention"] * 2},
        {"image_size": [8, 8], "patch_size": [4, 4]},
        {"image_token_id": IMAGE, "image_seq_length": 1},
        1,
        _squares,
    ),
    "lfm2_vl": Kind(
        {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        {"num_patches": 4},
        {"image_token_id": IMAGE, "projector_hidden_size": 32},
        1,
        _lfm,
    ),
    "kimi_k25": Kind(
        {
            "num_key_value_heads": 4,
            "head_dim": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        {"pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 1},
        VIDEO | MARKS | {"projection_hidden_size": 16},
        1,
        _kimi,
    ),
    "inkling2": Kind(
        {
            "num_hidden_layers": 4,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid_sliding"],
            "n_layers_per_attn_res_block": 2,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": 8,
            "d_rel": 4,
            "rel_extent": 8,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "unpadded_vocab_size": VOCABULARY,
        },
        {"posemb_grid_size": 4, "projection_hidden_dim": 16, "text_hidden_size": 32},
        {"image_token_id": IMAGE},
        1,
        _inkling,
        attention="eager",  # with a bias by distance
    ),
    "gemma4_unified": Kind(
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "per_layer_config": {}},
        {"pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 4, "output_proj_dims": 32},
        VIDEO
        | {"boi_token_id": 52, "eoi_token_id": 53, "boa_token_id": 54, "eoa_token_index": 55, "audio_token_id": 56},
        1,
        _gemma4,
        typed=True,
    ),
}


def image_model(kind: str, vocabulary: int = VOCABULARY, **ids: int) -> nn.Module:
    """A small model of this kind in float32, with noise on every parameter. ids: of its special tokens, by name."""
    of = KINDS[kind]
    known = AutoConfig.for_model(kind)
    parts = {}
    for name, usual, own in (("text_config", TEXT, of.text), ("vision_config", TOWER, of.vision)):
        changes = usual | own | ({"vocab_size": vocabulary} if name == "text_config" else {})
        stock = getattr(known, name)
        if stock is None:  # the default of a kind whose tower is optional
            parts[name] = {**changes, "patch_size": 4}
            continue
        fields = stock.to_dict()
        parts[name] = fields | {key: value for key, value in changes.items() if key in fields or key in own}
    tied = parts["text_config"].get("tie_word_embeddings", False)
    config = AutoConfig.for_model(kind, **parts, **{**of.top, **ids}, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation=of.attention)
        perturb(model, 0)
    return model.train()


def text_batch(seed: int, rows: int = 1, length: int = 9) -> dict[str, Tensor]:
    """Text alone, int64[rows, length]."""
    ids = torch.randint(3, IMAGE, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def image_batch(kind: str, seed: int) -> dict[str, Tensor]:
    """One row of text with one image in it, which is no target."""
    of, generator = KINDS[kind], torch.Generator().manual_seed(seed)
    ids = text_batch(seed)["input_ids"]
    places = torch.full((1, of.tokens), IMAGE)
    ids = torch.cat([ids[:, :3], places, ids[:, 3:]], dim=1)
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), **of.inputs(generator)}
    if kind == "gemma3":
        batch["token_type_ids"] = (ids == IMAGE).long()
    return batch | ({"mm_token_type_ids": (ids == IMAGE).int()} if of.typed else {})
