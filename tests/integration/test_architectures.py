"""Breadth: for the installed library's architectures, loss and every gradient equal the stock model's.

Each model is the twin of its type's own default config (`model.tiny`), so that no config is written by hand; `STATED`
holds what real checkpoints state and a default leaves out or, as it stands, the library cannot build. Equal means to
1e-6 of a gradient's norm, or where a gradient is a small sum of large terms, to a few times what the stock model's own
moves with the last bit of its weights (see `train.parity`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

from megatrain import Engine, Policy
from megatrain.errors import ModelError
from megatrain.model.tiny import shrink, twin_from, with_dropout
from megatrain.spec import Numerics
from megatrain.train.parity import Setting, compare, full_settings, short_cases, short_settings

# Of the library's own modules, as they are imported first here.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

TOLERANCE = 1e-6
ROPE = {"rope_type": "default", "rope_theta": 1e4}
STATED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}

KINDS = {
    "dense": "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 olmo olmo2 olmo3 granite cohere cohere2 glm4"
    " smollm3 gpt2 gpt_neo gpt_neox gptj gpt_bigcode opt bloom mpt falcon stablelm starcoder2",
    "with other mixers": "qwen3_next jamba bamba mamba mamba2 falcon_h1 recurrent_gemma lfm2 nemotron_h rwkv",
    "experts": "mixtral qwen2_moe qwen3_moe deepseek_v2 deepseek_v3 gpt_oss olmoe jetmoe dbrx phimoe llama4_text",
}
CHOSEN = [kind for kinds in KINDS.values() for kind in kinds.split() if kind in KNOWN]
WIDER = {"jamba", "rwkv", "recurrent_gemma", "falcon_h1", "deepseek_v2", "olmo3", "cohere2", "glm4", "jetmoe"}
"""Of those chosen, those that take long, or are in their code most like another one; not in the quick suite."""
OTHERS = sorted(set(KNOWN) - set(CHOSEN))

REFUSED = {
    "gemma4_text": "gradient other than through the hidden state",  # per-layer inputs
    "xlm": "pass on the hidden state",  # positions are masked between layers
}


PLAIN = short_settings()[0]


def make(model: PreTrainedModel, device: str, numerics: Numerics, policy: Policy) -> Engine:
    return Engine.from_model(model, device, numerics=numerics, policy=policy, verify=False)


def config_of(kind: str) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **STATED.get(kind, {}))


def twin(config: PreTrainedConfig) -> PreTrainedModel:
    return twin_from(with_dropout(shrink(config), 0.0), 0)


def assert_equal(model: PreTrainedModel, settings: list[Setting]) -> None:
    report = compare(model, make, short_cases(model), settings, TOLERANCE, enough=1)
    assert report.ok, report.worst
    assert report.worst.error < 10 * TOLERANCE


def test_the_quick_suite_covers_enough_architectures() -> None:
    assert len(set(CHOSEN) - WIDER) >= 40


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        pytest.param(place, kind, marks=pytest.mark.slow if kind in WIDER else (), id=kind)
        for place, kind in enumerate(CHOSEN)
    ],
)
def test_loss_and_every_gradient_equal_the_stock_model(place: int, kind: str) -> None:
    """On the cpu, padded, in two micro-batches; every other one keeps its graphs, and the rest recompute."""
    settings = short_settings()
    assert_equal(twin(config_of(kind)), [settings[place % len(settings)]])


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_next", "deepseek_v3", "gpt2"])
def test_the_simulated_device_computes_the_same_bits(kind: str) -> None:
    """With one slot, small pieces and a mixture of plans, against graphs kept on the cpu."""
    model = twin(config_of(kind))
    case, settings = short_cases(model)[0], full_settings()
    answers = []
    for setting in (settings[0], settings[-1]):
        numerics = replace(setting.numerics, mlp_chunk_tokens=0)  # chunks change the rounding
        with make(model, setting.device, numerics, setting.policy) as engine:
            answers.append(engine.gradients(case.micro_batches))
    one, other = answers
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", [kind for kind in REFUSED if kind in KNOWN])
def test_architectures_that_cannot_stream_exactly_are_refused(kind: str) -> None:
    model = twin(config_of(kind))
    with pytest.raises(ModelError, match=REFUSED[kind]):
        make(model, "cpu", PLAIN.numerics, PLAIN.policy)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_every_other_architecture_matches_or_is_refused(kind: str) -> None:
    """In every plan; refused in one typed line, by the shrinker or by the engine. Never wrong, never a traceback."""
    try:
        config = config_of(kind)
    except StrictDataclassError as error:
        pytest.skip(f"the library refuses its own defaults: {error}")
    try:
        model = twin(config)
        make(model, "cpu", PLAIN.numerics, PLAIN.policy).close()
    except ModelError as refusal:
        pytest.skip(one_line(refusal))
    assert_equal(model, short_settings())


def one_line(refusal: ModelError) -> str:
    text = str(refusal)
    assert "\n" not in text
    return text
