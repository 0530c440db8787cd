"""What the engine says is what the stock model says: token by token, and logit by logit, in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatrain import AdamW, Engine
from megatrain.commands.generate import GenerationModel, run_chat, run_generation
from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import BatchError, ConfigError, DataError, MegaTrainError, ModelError, NonFinite
from megatrain.run.sampling import Sampling, draw_ids, prompt_ids
from tests.tiny import FAMILIES, VOCAB, batch, tiny_model

SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
OTHER_PASTS: dict[str, dict[str, Any]] = {
    "mamba": {"model_type": "mamba", "vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
    "gemma3": {"model_type": "gemma3_text", **SMALL, **HEADS, "num_hidden_layers": 6, "sliding_window": 4},
    "delta": {
        "model_type": "qwen3_next",
        **SMALL,
        **HEADS,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}
"""Families whose past is more than keys and values: states of a recurrence, windows of their own."""

NEVER_ENDS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
WITH_LOGITS: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}


def left_padded(rows: int = 2, length: int = 7, padding: int = 3) -> dict[str, Tensor]:
    """Prompts of unequal length, as a tokenizer with padding on the left gives them."""
    found = batch(rows, length, 1)
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    found["attention_mask"][0, :padding] = found["input_ids"][0, :padding] = 0
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def said_by_stock(model: PreTrainedModel, seed: int = 0, **options: Any) -> Any:
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False  # the stock loss of routers stumbles over a padded prompt
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model.generate(**options)


def assert_same(found: Any, expected: Any) -> None:
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.logits) == len(expected.logits) > 0
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


DEVICES = ("cpu", "sim:5")
QUICK = [("gemma2", "cpu"), ("llama-tied", "sim:5"), ("gpt2", "sim:5"), ("qwen3", "cpu"), ("mixtral", "cpu")]


@pytest.mark.parametrize(
    ("family", "device"),
    [
        pytest.param(family, device, marks=() if (family, device) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for device in DEVICES
    ],
)
def test_tokens_and_logits_equal_the_stock_models(family: str, device: str) -> None:
    model = tiny_model(family).eval()
    options = {**left_padded(), "max_new_tokens": 5, "do_sample": False, **NEVER_ENDS, **WITH_LOGITS}
    with Engine.from_model(model, device, "fp32", verify=False) as engine:
        assert_same(engine.generate(**options), said_by_stock(model, **options))


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=pytest.mark.slow if each != "mamba" else ()) for each in OTHER_PASTS]
)
def test_other_cache_types_are_supported(family: str) -> None:
    fields = dict(OTHER_PASTS[family])
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).eval()
    options = {**left_padded(), "max_new_tokens": 6, "do_sample": False, **NEVER_ENDS, **WITH_LOGITS}
    with Engine.from_model(model, "cpu", "fp32", verify=False) as engine:
        assert_same(engine.generate(**options), said_by_stock(model, **options))


def test_families_without_a_library_cache_recompute() -> None:
    fields = {**SMALL, **HEADS, "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"]}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("minimax", **fields)).eval()
    options = {"input_ids": batch(1, 6, 0)["input_ids"], "max_new_tokens": 5, "do_sample": False}
    with Engine.from_model(model, "cpu", "fp32", verify=False) as engine:
        expected = said_by_stock(model, **options, **NEVER_ENDS, **WITH_LOGITS, use_cache=False)
        assert_same(engine.generate(**options, **NEVER_ENDS, **WITH_LOGITS), expected)


@pytest.mark.parametrize(
    "way",
    [
        {"use_cache": False},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        {"do_sample": True, "top_k": 9, "temperature": 1.5},
        {"do_sample": True, "top_p": 0.7, "num_return_sequences": 3},
        {"cache_implementation": "static"},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    ],
    ids=lambda way: "-".join(way),
)
def test_every_sampling_method_matches_the_library(way: dict[str, Any]) -> None:
    model = tiny_model("gemma2" if "use_cache" in way else "llama").eval()
    options = {**left_padded(), "max_new_tokens": 5, **NEVER_ENDS, "do_sample": False, **way}
    with Engine.from_model(model, "sim:2", "fp32", verify=False) as engine:
        assert torch.equal(engine.generate(**options, seed=11), said_by_stock(model, seed=11, **options))


def test_sampling_depends_only_on_its_seed() -> None:
    model = tiny_model(attention_dropout=0.5)
    options = {**left_padded(), "max_new_tokens": 6, "do_sample": True, **NEVER_ENDS}
    with Engine.from_model(model, "cpu", "fp32", verify=False) as engine:
        state = torch.get_rng_state(), random.getstate()
        first = engine.generate(**options, seed=1)
        assert torch.equal(torch.get_rng_state(), state[0])
        assert random.getstate() == state[1]
        torch.rand(3)
        assert torch.equal(engine.generate(**options, seed=1), first)
        assert not torch.equal(engine.generate(**options, seed=2), first)
    assert torch.equal(said_by_stock(model.eval(), seed=1, **options), first), "without dropout"


def test_generating_during_training_sees_all_updates_and_changes_nothing() -> None:
    twins = [Engine.from_model(tiny_model(), "sim:4", "fp32", AdamW(lr=0.1)) for _ in range(2)]
    try:
        losses = []
        for engine in twins:
            engine.step([batch(2, 9, 0)])
            if engine is twins[0]:
                table = engine.diagnostics.memory_table()
                found = engine.generate(**left_padded(), max_new_tokens=5, do_sample=False, **NEVER_ENDS)
                assert engine.diagnostics.memory_table() == table
            losses.append(engine.step([batch(2, 9, 1)]).loss)
        assert losses[0] == losses[1]
        trained = tiny_model().eval()
        with Engine.from_model(tiny_model(), "cpu", "fp32", AdamW(lr=0.1)) as other:
            other.step([batch(2, 9, 0)])
            trained.load_state_dict(other.master_weights(), strict=False)
        expected = trained.generate(**left_padded(), max_new_tokens=5, do_sample=False, **NEVER_ENDS)
        assert torch.equal(found, expected)
    finally:
        for engine in twins:
            engine.close()


def test_bfloat16_and_frozen_weights_generate_like_the_stock_model() -> None:
    model = tiny_model().eval().requires_grad_(False)
    options = {**left_padded(), "max_new_tokens": 4, "do_sample": False, **NEVER_ENDS}
    with Engine.from_model(model, "sim:1", "bf16", verify=False) as engine:
        assert not any("grad" in owner for _, owner in engine.diagnostics.memory_table())
        found = engine.generate(**options)
    assert torch.equal(found, said_by_stock(model.to(torch.bfloat16), **options))


def test_bad_input_is_refused_clearly_and_the_engine_stays_usable() -> None:
    ids = batch(1, 9, 0)["input_ids"]
    with Engine.from_model(tiny_model(max_position_embeddings=12), "sim:3", "fp32") as engine:
        for bad in (ids[0], ids.float(), ids + VOCAB, ids[:, :0], ids.repeat(1, 2)):
            with pytest.raises(BatchError):
                engine.generate(bad, max_new_tokens=1)
        with pytest.raises(BatchError, match="attention_mask"):
            engine.generate(ids, torch.ones(1, 5, dtype=torch.int64))
        with pytest.raises(BatchError, match="12 positions"):
            engine.generate(ids, max_new_tokens=4)
        with pytest.raises(ConfigError, match="colour"):
            engine.generate(ids, colour=3)
        assert engine.generate(ids, max_new_tokens=3, **NEVER_ENDS).shape == (1, 12)


def test_nan_weights_are_named_as_the_cause() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with Engine.from_model(model, "cpu", "fp32", verify=False) as engine, pytest.raises(NonFinite, match="not finite"):
        engine.generate(batch(1, 3, 0)["input_ids"])


# From a folder -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("generate") / "model"
    tiny_model(vocab_size=300, eos_token_id=256).save_pretrained(path)
    load_tokenizer("bytes").save_pretrained(path)
    return str(path)


def legible(text: str) -> str:
    """What is left of a byte-level text whatever has been replaced in it."""
    return "".join(char for char in text if char.isascii() and char.isprintable())


def test_a_model_folder_generates_like_its_stock_model(folder: str) -> None:
    pieces: list[str] = []
    spoken = run_generation(
        GenerationModel(folder, precision="fp32"), "one two", pieces.append, Sampling(16, temperature=0)
    )
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([list(b"one two")])
    known = {"suppress_tokens": list(range(257, 300)), "eos_token_id": 256, "pad_token_id": 256}
    expected = model.generate(ids, max_new_tokens=16, do_sample=False, **known)[0, 7:].tolist()
    text = load_tokenizer(folder).decode(expected, skip_special_tokens=True)
    assert "".join(pieces) == spoken.text
    assert legible(spoken.text) == legible(text) != ""
    assert spoken.tokens == len(expected)
    assert spoken.summary().startswith(f"{len(expected)} tokens in ")


def test_a_seed_fixes_generation_from_a_folder(folder: str) -> None:
    first, again, other = (
        run_generation(
            GenerationModel(folder), "", lambda text: None, Sampling(12, temperature=9.0, top_k=0, seed=seed)
        )
        for seed in (1, 1, 2)
    )
    assert first.text == again.text != other.text


def test_only_tokens_known_to_the_tokenizer_are_drawn() -> None:
    """The model would draw ids up to 2,000, of which the tokenizer knows 257."""
    tokenizer = load_tokenizer("bytes")
    with Engine.from_model(tiny_model(vocab_size=2000, eos_token_id=256), "cpu", "fp32") as engine:
        drawn = draw_ids(engine, tokenizer, [1], Sampling(8, 9.0, top_k=0))
        assert len(drawn) == 8 or drawn[-1] == 256
        assert max(drawn) <= 256
        free = engine.generate(torch.tensor([[1]]), max_new_tokens=8, do_sample=True, temperature=9.0, top_k=0)
    assert int(free.max()) > 256


def test_without_a_limit_generation_fills_the_positions(folder: str) -> None:
    spoken = run_generation(GenerationModel(folder), "x" * 60, lambda text: None, Sampling(temperature=0))
    assert spoken.tokens <= 4


def test_generated_control_characters_are_escaped(folder: str) -> None:
    spoken = run_generation(
        GenerationModel(folder), "", lambda text: None, Sampling(20, temperature=9.0, top_k=0, seed=3)
    )
    assert spoken.text
    assert all(char.isprintable() or char in "\n\t" for char in spoken.text)


def test_bad_folders_and_prompts_are_refused_before_loading(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.commands.generate.pretrained_source", None)
    bare = tmp_path / "bare"
    AutoConfig.from_pretrained(folder).save_pretrained(bare)
    cases: list[tuple[type[MegaTrainError], str, dict[str, Any]]] = [
        (ModelError, "no such folder", {"folder": str(tmp_path / "gone")}),
        (DataError, "tokenizer", {"folder": str(bare)}),
        (BatchError, "use a shorter prompt", {"prompt": "x" * 64}),
        (BatchError, "at most 61 new ones", {"sampling": Sampling(62)}),
        (DataError, "not Unicode", {"prompt": "\udc80"}),
    ]
    for error, words, changed in cases:
        with pytest.raises(error, match=words) as caught:
            generator = GenerationModel(changed.pop("folder", folder))
            run_generation(generator, **{"prompt": "abc", "heard": print, **changed})
        assert "\n" not in str(caught.value)


def test_a_prompt_begins_as_texts_do_once_and_does_not_end_as_they_do() -> None:
    """Some tokenizers put an end-of-text token behind each text."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> <s> $B </s>", [("<s>", start), ("</s>", end)]
    )
    assert prompt_ids(tokenizer, "ab") == prompt_ids(tokenizer, "<s>ab") == [start, 97, 98]
    assert prompt_ids(tokenizer, "") == [start]


def test_an_empty_prompt_starts_with_the_bos_token() -> None:
    tokenizer = load_tokenizer("bytes")
    assert prompt_ids(tokenizer, "") == [256]
    assert prompt_ids(tokenizer, "ab") == [97, 98]
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(DataError, match="no start token"):
        prompt_ids(tokenizer, "")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 128 positions whose tokenizer has a chat template that writes all it is given."""
    path = tmp_path_factory.mktemp("chat") / "model"
    tiny_model(vocab_size=300, eos_token_id=256, max_position_embeddings=128).save_pretrained(path)
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    tokenizer.save_pretrained(path)
    return str(path)


def test_questions_are_answered_each_by_itself_with_the_system_prompt(
    chatty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []

    def draw(engine: Engine, tokenizer: Any, ids: list[int], sampling: Sampling, **_: Any) -> list[int]:
        prompts.append(tokenizer.decode(ids))
        return [1]

    monkeypatch.setattr("megatrain.commands.generate.draw_ids", draw)
    model = GenerationModel(chatty, precision="fp32")
    run_chat(model, ["one", "two"], lambda text: None, system="be brief")
    assert prompts == ["s:be brief;u:one;a:", "s:be brief;u:two;a:"]
    with pytest.raises(BatchError, match="more than the model's 128 positions"):
        run_chat(model, ["x" * 200], lambda text: None)


def test_answers_equal_the_librarys(chatty: str) -> None:
    heard: list[str] = []
    generator, how = GenerationModel(chatty, precision="fp32"), Sampling(12, temperature=0)
    run_chat(generator, ["one"], heard.append, how)
    spoken = run_generation(generator, "u:one;a:", lambda text: None, how)
    assert "".join(heard) == spoken.text + "\n"


def test_a_model_without_a_chat_template_is_refused_before_its_weights_are_loaded(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.commands.generate.pretrained_source", None)
    with pytest.raises(DataError, match="has no chat template; leave --chat out, or train it on chats first"):
        run_chat(GenerationModel(folder), ["one"], print)
