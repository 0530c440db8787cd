"""Which parameters of the library's models are matrices of layers, which Muon updates: as an expert would choose."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatrain.model import port_model
from megatrain.optim import Muon
from megatrain.spec import ParamSpec
from tests.kinds import KINDS
from tests.tiny import tiny_model

EXPERTS = {"gate_up_proj": 4, "down_proj": 4}
CHOICES: dict[str, tuple[set[str], dict[str, int]]] = {
    "llama": (set(), {}),
    "gpt2": (set(), {}),
    "gpt_neox": (set(), {}),
    "bloom": (set(), {}),
    "falcon": (set(), {}),
    "phi3": (set(), {}),
    "gemma2": (set(), {}),
    "mixtral": ({"mlp.gate.weight"}, EXPERTS),
    "qwen3_moe": ({"mlp.gate.weight"}, EXPERTS),
    "gpt_oss": ({"mlp.router.weight", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"}, EXPERTS),
    "deepseek_v3": ({"mlp.gate.weight"}, EXPERTS),
    "mamba": ({"mixer.A_log", "mixer.conv1d.weight"}, {}),
    "mamba2": ({"mixer.conv1d.weight"}, {}),
    "bamba": ({"mamba.conv1d.weight"}, {}),
    "jamba": ({"mamba.A_log", "mamba.conv1d.weight", "feed_forward.router.weight"}, EXPERTS),
    "rwkv": (
        {
            *(f"attention.time_mix_{name}" for name in ("key", "value", "receptance")),
            *(f"feed_forward.time_mix_{name}" for name in ("key", "receptance")),
        },
        {},
    ),
    "qwen2_moe": ({"mlp.gate.weight", "mlp.shared_expert_gate.weight"}, EXPERTS),
    "phimoe": ({"mlp.router.weight"}, EXPERTS),
    "recurrent_gemma": (
        {"conv_1d.weight", "rg_lru.input_gate_bias", "rg_lru.recurrent_gate_bias"},
        {"rg_lru.input_gate_weight": 4, "rg_lru.recurrent_gate_weight": 4},
    ),
}
"""Model type -> (parameters of its layers of two dimensions or more that are no matrices, stacked ones with their
number). What is in neither is one matrix: fused queries, keys and values, too, and low-rank factors."""
_IDS: dict[str, Any] = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 32}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
_EXPERTS = {**_IDS, **_HEADS, "num_hidden_layers": 2, "num_experts_per_tok": 2}
MORE: dict[str, dict[str, Any]] = {
    "mamba2": {**_IDS, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "jamba": {**_EXPERTS, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "rwkv": {**_IDS, "num_hidden_layers": 2, "context_length": 64},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "phimoe": {**_EXPERTS, "num_local_experts": 4},
    "recurrent_gemma": {**_IDS, **_HEADS, "num_hidden_layers": 3, "lru_width": 32, "head_dim": 8},
}


def stock(kind: str, experts: str | None = None) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **(MORE.get(kind) or KINDS[kind]))
    if experts is not None:
        config._experts_implementation = experts
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def layer_params(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, ParamSpec]:
    """Name within its layer -> parameter, of all layers. Nothing outside of them may count as a matrix."""
    units = port_model(model, dtype).structure.units
    assert not any(param.products for unit in units if unit.kind != "layer" for param in unit.params)
    params = [param for unit in units if unit.kind == "layer" for param in unit.params]
    return {re.split(r"\.\d+\.", param.name, maxsplit=1)[1]: param for param in params}


@pytest.mark.parametrize("kind", CHOICES)
def test_matrices_are_what_an_expert_would_choose(kind: str) -> None:
    others, stacked = CHOICES[kind]
    params = layer_params(stock(kind), torch.bfloat16)
    wide = {name for name, param in params.items() if len(param.shape) > 1}
    assert {name for name in wide if not params[name].products} == {
        name for name in wide if name.endswith(tuple(others))
    }
    assert len({name for name in wide if name.endswith(tuple(others))} if others else ()) >= len(others)
    of_many = {name: param.products for name, param in params.items() if param.products > 1}
    assert all(name.endswith(tuple(stacked)) for name in of_many)
    assert {next(end for end in stacked if name.endswith(end)): count for name, count in of_many.items()} == stacked
    turned = {name for name, param in params.items() if param.inputs_first}
    assert turned == {
        "gpt2": wide,
        "gpt_oss": {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
        "recurrent_gemma": {name for name in wide if name.endswith("gate_weight")},
    }.get(kind, set())


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_experts_are_matrices_whatever_computes_them(experts: str) -> None:
    params = layer_params(stock("gpt_oss", experts))
    stacked = {name: (param.products, param.inputs_first) for name, param in params.items() if param.products > 1}
    assert stacked == {f"mlp.experts.{name}": (4, True) for name in EXPERTS}


def test_low_rank_factors_are_matrices() -> None:
    """Who asks for Muon with an adapter trains nothing else."""
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    params = layer_params(model.base_model.model)
    trained = {name: param for name, param in params.items() if param.trainable}
    assert len(trained) == 4
    assert all(Muon().described(param).matrices == 1 for param in trained.values())
