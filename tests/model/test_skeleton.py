"""A blueprint is the stock model without its weights, and nothing that cannot be trained gets one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from megatrain.errors import ModelError
from megatrain.model.architecture import read_config
from megatrain.model.skeleton import blueprint, registering
from tests.kinds import KINDS, TIED, stock_model, tiny_config


@pytest.mark.parametrize(("kind", "tied"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in TIED)])
def test_the_skeleton_equals_the_stock_model_without_weights(kind: str, tied: bool) -> None:
    config = tiny_config(kind, tie_word_embeddings=tied)
    before, random = config.to_dict(), torch.get_rng_state()
    drawn = blueprint(config)
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), random)
    stock = stock_model(config, 0)
    assert drawn.config.to_dict() == stock.config.to_dict()
    assert drawn.config._attn_implementation == stock.config._attn_implementation
    assert drawn.training
    assert drawn.state_dict().keys() == stock.state_dict().keys()
    for (name, one), (other_name, other) in zip(drawn.named_parameters(), stock.named_parameters(), strict=True):
        assert name == other_name
        assert one.is_meta
        assert (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
    for (name, one), (other_name, other) in zip(drawn.named_buffers(), stock.named_buffers(), strict=True):
        assert name == other_name
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama4_text"])  # experts from torch.empty, and from torch.zeros
def test_the_largest_models_need_no_memory(kind: str) -> None:
    held = _resident_nbytes()
    drawn = blueprint(AutoConfig.for_model(kind, num_hidden_layers=8))
    numbers = sum(parameter.numel() for parameter in drawn.parameters())
    assert numbers > 10e9
    assert _resident_nbytes() - held < 1 << 30


def _resident_nbytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


def test_the_requested_attention_is_used() -> None:
    for attention in ("eager", "sdpa"):
        assert blueprint(tiny_config("llama"), attention=attention).config._attn_implementation == attention
    chosen = tiny_config("llama", attn_implementation="eager")
    assert blueprint(chosen).config._attn_implementation == "eager", "auto follows the config"


@pytest.mark.parametrize(
    ("kind", "attention", "says"),
    [
        ("gpt_oss", "sdpa", "GptOssForCausalLM cannot use attention=sdpa here; use attention=eager"),
        ("mamba", "sdpa", "use attention=eager"),
        ("llama", "flash_attention_2", "use attention=eager or sdpa"),
        ("llama", "warp", "cannot use attention=warp"),
    ],
)
def test_unknown_attention_is_refused(kind: str, attention: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as raised:
        blueprint(tiny_config(kind), attention=attention)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "t5"}, "an encoder-decoder"),
        ({"model_type": "vit"}, "a vit is not a causal language model"),
        ({"model_type": "pi0"}, "a PI0ForConditionalGeneration has no loss of text"),
        ({"model_type": "bert"}, "a bert sees later tokens; set is_decoder"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "a quantized checkpoint"),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, "not a multiple of"),
        ({"model_type": "llama", "hidden_size": "wide"}, "expected int"),
        ({"model_type": "llama", "hiden_size": 32}, "did you mean 'hidden_size'"),
        ({"hidden_size": 32}, "has no model_type"),
        ({"model_type": "llamma"}, "llamma"),
        ("no/such-model", "couldn't connect|offline|cannot"),
        ("./no/such/folder", "no such folder"),
        ("/no/such/folder", "no such folder"),
    ],
)
def test_models_that_are_not_causal_lms_are_refused_in_one_line(fields: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says) as raised:
        blueprint(read_config(fields, where="model.config"))
    assert "\n" not in str(raised.value)


def test_quantization_inside_a_composite_config_is_detected() -> None:
    config = AutoConfig.for_model("llama4")
    config.text_config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(ModelError, match="quantized"):
        blueprint(config)


def test_construction_outside_the_block_and_in_other_threads_is_stock() -> None:
    import threading

    made: list[nn.Linear] = []
    with registering(lambda parameter: nn.Parameter(parameter.to("meta"))):
        other = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        other.start()
        other.join()
        assert nn.Linear(2, 2).weight.is_meta
    assert not made[0].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_failure_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    original = nn.Module.register_parameter
    config = copy.deepcopy(tiny_config("llama"))
    config.hidden_act = "no such function"
    with pytest.raises(ModelError, match="no such function"):
        blueprint(config)
    assert nn.Module.register_parameter is original
    assert torch.get_default_dtype() == torch.float32
