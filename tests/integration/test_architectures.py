"""Breadth: for the installed library's architectures, loss and every gradient equal the stock model's.

Each model is the twin of its type's own default config (`model.tiny`), so that no config is written by hand; `STATED`
holds what real checkpoints state and a default leaves out or, as it stands, the library cannot build. Equal means to
1e-6 of a gradient's norm, or where a gradient is a small sum of large terms, to a few times what the stock model's own
moves with the last bit of its weights (see `train.parity`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from megatrain import Engine, Policy
from megatrain.errors import ModelError
from megatrain.model.architecture import ropes_of
from megatrain.model.tiny import shrink, twin_from, with_dropout
from megatrain.spec import Numerics
from megatrain.train.parity import Setting, compare, full_settings, short_cases, short_settings
from tests.kinds import case_of

# Of the library's own modules, as they are imported first here.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

TOLERANCE = 1e-6
ROPE = {"rope_type": "default", "rope_theta": 1e4}
COMPASS = {"full_attention": ROPE, "sliding_attention": ROPE}


def with_images(sections: list[int], text: dict[str, Any] | None = None, **rope: Any) -> dict[str, Any]:
    """A config whose text model has the positions of images in its rotary embedding."""
    return {"text_config": {"rope_parameters": ROPE | rope | {"mrope_section": sections}, **(text or {})}}


GLM = with_images([8, 12, 12], partial_rotary_factor=0.5)
QWEN = with_images([16, 24, 24])
QWEN_4 = {
    **{"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 128},
    **{"indexer_budget": 2048, "indexer_compress_ratio": 16},
    **with_images([11, 11, 10], partial_rotary_factor=0.25)["text_config"],
}
STATED: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 8711}},
    "cohere_compass_text": {"rope_parameters": COMPASS},
    "cohere_compass": {"text_config": {"rope_parameters": COMPASS}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "emu3": {"vocabulary_map": {"<image>": 151851}},
    "ernie4_5_vl_moe": with_images([22, 22, 20]),
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": with_images([16, 16, 16, 16], {"head_dim": 128}),
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    **dict.fromkeys(("glm4v", "glm46v", "glmga"), GLM),
    "glm4v_moe": with_images([8, 12, 12], {"head_dim": 128}, partial_rotary_factor=0.5),
    "glm_ocr": with_images([16, 24, 24], {"head_dim": 128}),
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    **dict.fromkeys(("paddleocr_vl", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"), QWEN),
    "qwen4_exp": {"text_config": QWEN_4},
    "qwen4_exp_text": QWEN_4,
    "step3p7": {"text_config": {"sliding_window": 512}},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},  # Gemma 3
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},  # InternLM
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},  # Qwen 3
    "yarn, with scales": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},  # DeepSeek V3
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"rope_type": "longrope", "factor": 32.0, "original_max_position_embeddings": 4096},  # Phi 4
}
"""Rotary embeddings as published, for every type that has one."""

SWITCHES = """
attention_bias mlp_bias use_bias bias add_bias_linear qkv_bias use_qkv_bias attention_out_bias conv_bias use_conv_bias
mamba_proj_bias projectors_bias lm_head_bias use_qk_norm qk_layernorm tie_word_embeddings norm_topk_prob rope_interleave
use_parallel_residual parallel_attn alibi multi_query new_decoder_architecture mamba_rms_norm mamba_norm_before_gate
do_layer_norm_before apply_residual_connection_post_layernorm layer_norm_elementwise_affine use_expert_bias
scale_attn_by_inverse_layer_idx use_double_wide_mlp use_mem_rope use_shared_attention_adapter attention_k_eq_v
add_swa_attention_sink_bias use_post_norm moe_renormalize output_router_logits moe_apply_router_weight_on_input
"""
"""Fields that one published model of a type has set, and another has not."""

OPTIONS: dict[str, dict[str, Any]] = {
    "sliding window": {"sliding_window": 4096},
    "first layers without a window": {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 4096},
    "caps": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "a capped router": {"moe_router_logit_softcapping": 30.0},
    "clipped projections": {"clip_qkv": 8.0},
    "a query without a rank": {"q_lora_rank": None},
    "a query with a rank": {"q_lora_rank": 768},
    "first dense layers": {"first_k_dense_replace": 1},
    "no dense layer": {"first_k_dense_replace": 0},
    "leading dense layers": {"num_dense_layers": 1},
    "dense layers by number": {"mlp_only_layers": [0]},
    "every other layer sparse": {"decoder_sparse_step": 2},
    "groups of experts": {"n_group": 8, "topk_group": 4},
    "no groups of experts": {"n_group": 1, "topk_group": 1},
    "groups that are limited": {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
    "scores by softmax": {"scoring_func": "softmax"},
    "scores by sigmoid": {"scoring_func": "sigmoid"},
    "experts chosen by sigmoid": {"expert_selection_fn": "sigmoid"},
    "a shared expert": {"n_shared_experts": 1},
    "shared experts": {"num_shared_experts": 2},
    "no shared expert": {"num_shared_experts": 0},
    "a scaled router": {"routed_scaling_factor": 2.5},
    "layers without positions": {"no_rope_layer_interval": 2},
    "layers that share keys": {"num_kv_shared_layers": 2},
}
"""Options of published models by field, for every type that has all of its fields."""

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

MULTIMODAL_TYPES = sorted(
    {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES} - {*KNOWN}
)
"""Types of models with images or sound that no causal language model class stands for."""

BEYOND_TIMM = ("fast_vlm", "gemma3n", "perception_lm")
REFUSED: dict[str, dict[str, str]] = {
    "its hidden state is not [batch, length, width]": dict.fromkeys(
        ("cpmant", "prophetnet", "xlnet"), "its hidden state is"
    ),
    "some of its layers run more than once, or not in every forward": {
        "hrm_text": "goes through its decoder layers more than once|looks at several tokens at a time",
        "mllama": "does not call each of its decoder layers once",
    },
    "its layers share parameters": dict.fromkeys(("zamba", "zamba2"), "layers share a parameter"),
    "its layers are spread over several lists": {"xlm": "what is written in place is used after the next"},
    "an encoder-decoder": {"florence2": "an encoder-decoder"},
}
"""Why the engine refuses a type -> type -> words of the one line that says so."""

WITHOUT_TWIN: dict[str, dict[str, str]] = {
    "its forward needs more than text": {
        **dict.fromkeys(("blip", "blip-2", "instructblip", "instructblipvideo"), "builds and runs .TypeError"),
        **dict.fromkeys(("idefics", "kosmos-2", "pp_formulanet", "vision-encoder-decoder"), "pixel_values"),
        **{"kyutai_speech_to_text": "no small twin", "pi0": "no small twin", "pix2struct": "flattened_patches"},
        **{"t5gemma2": "input_ids or inputs_embeds", "udop": "Bbox is required", "voxtral_realtime": "input_features"},
    },
    "its whole has no forward; its parts are types of their own": dict.fromkeys(
        ("qwen2_5_omni", "qwen3_omni_moe"), "twin of it builds|cannot build it"
    ),
    "transformers does not build the defaults of its config": {
        **dict.fromkeys(BEYOND_TIMM, "requires the timm library"),
        **dict.fromkeys(("deepseek_ocr2", "diffusion_gemma", "evolla", "granite4_vision"), "cannot build it"),
        **dict.fromkeys(("gemma4_unified_assistant", "musicgen", "musicgen_melody", "reformer"), "cannot build it"),
        "gemma4_assistant": "refuses its fields",
    },
}
"""Why a type has no small twin -> type -> pattern of the one line that says so."""

NOT_COMPARED = {
    kind: words for reasons in (REFUSED, WITHOUT_TWIN) for types in reasons.values() for kind, words in types.items()
}
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "architectures.md"
IS_PINNED = f"transformers=={transformers.__version__}" in (ROOT / "constraints.txt").read_text().split()


def table() -> list[str]:
    """The lines of the page that say which types are not compared, and why."""
    every = {*KNOWN, *MULTIMODAL_TYPES}
    lines = ["| | why | types |", "|---|---|---|"]
    for outcome, reasons in {"refused": REFUSED, "no twin": WITHOUT_TWIN}.items():
        lines += [f"| {outcome} | {why} | {', '.join(sorted(types))} |" for why, types in reasons.items()]
    return [*lines, "", f"The other {len(every - {*NOT_COMPARED})} of {len(every)} are equal."]


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


Fields = dict[str, Any]


def options_of(kind: str) -> dict[str, Fields]:
    """Name -> fields that an option changes in the default config of a type."""
    config = config_of(kind)
    if config.sub_configs:  # its text model is a type of its own
        return {}
    default = json.loads(config.to_json_string(use_diff=False))
    changes = {name: {name: not default[name]} for name in SWITCHES.split() if isinstance(default.get(name), bool)}
    changes |= {name: fields for name, fields in OPTIONS.items() if fields.keys() <= default.keys()}
    for name, rope in ROPES.items() if ropes_of(default) else ():
        if rope["rope_type"] == "longrope" and "head_dim" in differing_by_layer(config):
            continue  # its factors are as many as there are pairs in a head
        changes[f"{name} rope"] = {"rope_parameters": with_rope(config, rope)}
    pattern = default.get("layer_types") or []
    if set(pattern) <= {"full_attention", "sliding_attention"} and len(pattern) > 1 and "sliding_window" in default:
        mixed = ["full_attention" if layer % 3 else "sliding_attention" for layer in range(len(pattern))]
        changes["a mixture of windows"] = {"layer_types": mixed, "sliding_window": 4096, "use_sliding_window": True}
    return {name: fields for name, fields in changes.items() if any(default.get(n) != v for n, v in fields.items())}


def differing_by_layer(config: PreTrainedConfig) -> set[str]:
    """Fields that the layers of one model have different values of, which transformers refuses to read."""
    spec = vars(config).get("_heterogeneity_spec")
    return set() if spec is None else spec.per_layer_attributes


def with_rope(config: PreTrainedConfig, rope: Fields) -> Fields:
    """The config's rotary parameters with another kind of embedding, in all types of layers that have one."""
    stated = config.rope_parameters
    if "rope_type" not in stated:
        return {name: with_rope_of(config, each, rope) if each else each for name, each in stated.items()}
    return with_rope_of(config, stated, rope)


def with_rope_of(config: PreTrainedConfig, stated: Fields, rope: Fields) -> Fields:
    if rope["rope_type"] != "longrope":
        return stated | rope
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = int(head * stated.get("partial_rotary_factor", 1.0)) // 2
    factors = {"short_factor": [1.0 + 0.02 * pair for pair in range(pairs)]}
    return stated | rope | factors | {"long_factor": [1.0 + 0.5 * pair for pair in range(pairs)]}


def merged(options: dict[str, Fields]) -> list[list[str]]:
    """The names of options in as few groups as there are values for one field."""
    groups: list[list[str]] = []
    for name, fields in options.items():
        for group in groups:
            if not any(fields.keys() & options[other].keys() for other in group):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def parsed(kind: str, fields: Fields) -> PreTrainedConfig:
    try:
        return AutoConfig.for_model(kind, **fields)
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, StrictDataclassError, ValueError) as error:
        raise ModelError(f"transformers refuses its fields ({type(error).__name__})") from error


def compare_options(kind: str, names: list[str], options: dict[str, Fields]) -> list[str]:
    """What differs from the stock model with these options; if the library or the engine refuses some of them
    together, they are compared by halves. Returns what was refused."""
    fields: Fields = {name: value for each in names for name, value in options[each].items()}
    try:
        model = twin(parsed(kind, STATED.get(kind, {}) | fields))
        make(model, "cpu", PLAIN.numerics, PLAIN.policy).close()
    except ModelError as refusal:
        if len(names) == 1:
            return [f"{names[0]}: {one_line(refusal)}"]
        half = len(names) // 2
        return compare_options(kind, names[:half], options) + compare_options(kind, names[half:], options)
    kept = json.loads(model.config.to_json_string(use_diff=False))
    for name, value in fields.items():
        if isinstance(value, bool | str) or value is None:
            assert kept.get(name, value) == value, f"the twin has lost {name}={value}"
    ropes = [{rope["rope_type"] for rope in ropes_of(each)} for each in (fields, kept)]
    assert not ropes[0] or ropes[0] == ropes[1]
    settings = short_settings()
    assert_equal(model, [settings[len(names) % len(settings)]])
    return []


@pytest.mark.parametrize(
    "kind", ["qwen3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in sorted(KNOWN) if kind != "qwen3")]
)
def test_published_options_equal_the_stock_model(kind: str) -> None:
    """An option that the library refuses for a type, or the engine in one typed line, is none."""
    try:
        options = options_of(kind)
    except StrictDataclassError as error:
        pytest.skip(f"the library refuses its own defaults: {error}")
    if not options or kind in NOT_COMPARED:
        pytest.skip("has no options of its own")
    refused = [each for names in merged(options) for each in compare_options(kind, names, options)]
    if len(refused) == len(options):
        pytest.skip(refused[0])


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in (*CHOSEN, *OTHERS) if kind not in NOT_COMPARED])
def test_fused_functions_equal_the_stock_model(kind: str) -> None:
    """They round otherwise, which moves the gradients of a few by more than 1e-5, and those of the stock model by as
    much when the last bits of its weights change."""
    model = twin(config_of(kind))
    report = compare(model, make, short_cases(model), short_settings("fused")[:1], enough=1)
    assert report.ok, report.worst


@pytest.mark.few(3)
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


def assert_refused(kind: str) -> None:
    """Or has no twin, in one typed line."""
    with pytest.raises(ModelError, match=NOT_COMPARED[kind]) as refusal:
        make(twin(parsed(kind, STATED.get(kind, {}))), "cpu", PLAIN.numerics, PLAIN.policy).close()
    one_line(refusal.value)


@pytest.mark.parametrize("kind", [case_of("nemotron_h_omni"), case_of("molmo2")])
def test_wholes_whose_head_is_in_a_part_or_that_want_marks_of_text_equal_the_stock_model(kind: str) -> None:
    assert_equal(twin(config_of(kind)), short_settings()[:1])


@pytest.mark.parametrize("kind", [pytest.param("zamba", marks=pytest.mark.slow), "xlm"])
def test_architectures_that_cannot_stream_exactly_are_refused(kind: str) -> None:
    assert_refused(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*OTHERS, *MULTIMODAL_TYPES])
def test_every_other_architecture_matches_or_is_listed(kind: str) -> None:
    """Each as its own class; of the causal ones, in every plan. A type that is refused or has no twin is listed with
    its reason, and no other is."""
    if kind in NOT_COMPARED:
        assert_refused(kind)
    else:
        assert_equal(twin(config_of(kind)), short_settings()[: 1 if kind in MULTIMODAL_TYPES else None])


@pytest.mark.skipif(not IS_PINNED, reason="the page tells of the types of the transformers that constraints.txt names")
def test_the_page_lists_what_is_not_compared() -> None:
    assert {*NOT_COMPARED} <= {*KNOWN, *MULTIMODAL_TYPES}, "not types of the installed library"
    lines = PAGE.read_text().splitlines()
    begin = lines.index(table()[0])
    assert lines[begin : begin + len(table())] == table()


def one_line(refusal: ModelError) -> str:
    text = str(refusal)
    assert "\n" not in text
    return text
