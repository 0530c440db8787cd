"""A ported model behind the library's `generate`, with logits that the test makes up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache

from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import BatchError, ConfigError, ModelError, NonFinite, OutOfDeviceMemory
from megatrain.model import PortedModel, TextStream, port_model, speak
from tests.tiny import VOCAB, tiny_model

PROMPT = torch.tensor([[5, 6, 7]])


class Counting:
    """Is sure that the next id is one more than the last; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, Mapping[str, Any]]] = []

    def __call__(self, inputs: Mapping[str, Any], kept: int) -> Tensor:
        ids = inputs["input_ids"]
        self.asked.append((ids[0].tolist(), kept, inputs))
        logits = torch.zeros(*ids.shape, VOCAB)
        logits.scatter_(2, (ids[..., None] + 1) % VOCAB, 50.0)
        return logits[:, -kept:]


@pytest.fixture(scope="module")
def ported() -> PortedModel:
    return port_model(tiny_model().eval(), torch.float32)


def say(ported: PortedModel, logits: Any, prompt: Tensor = PROMPT, **options: Any) -> Any:
    settings = {"max_new_tokens": 4, "do_sample": False, **options}
    return speak(ported, logits, torch.device("cpu"), prompt, None, settings)


def test_generated_tokens_follow_the_logits(ported: PortedModel) -> None:
    assert say(ported, Counting()).tolist() == [[5, 6, 7, 8, 9, 10, 11]]


def test_with_a_kv_cache_each_call_computes_one_token(ported: PortedModel) -> None:
    model = Counting()
    say(ported, model)
    assert [(ids, kept) for ids, kept, _ in model.asked] == [([5, 6, 7], 1), ([8], 1), ([9], 1), ([10], 1)]
    caches = {id(value) for _, _, inputs in model.asked for value in inputs.values() if isinstance(value, Cache)}
    assert len(caches) == 1


def test_without_a_kv_cache_each_call_gets_the_whole_text(ported: PortedModel) -> None:
    model = Counting()
    say(ported, model, use_cache=False)
    assert [len(ids) for ids, _, _ in model.asked] == [3, 4, 5, 6]
    assert not any(isinstance(value, Cache) for _, _, inputs in model.asked for value in inputs.values())


def test_assisted_generation_computes_logits_for_every_candidate(ported: PortedModel) -> None:
    model = Counting()
    prompt = torch.tensor([[8, 9, 10, 11, 12, 5, 6, 7, 8]])
    assert say(ported, model, prompt, prompt_lookup_num_tokens=3)[0, 9:].tolist() == [9, 10, 11, 12]
    assert max(kept for _, kept, _ in model.asked) > 1
    assert len(model.asked) < 4


def test_families_without_logits_to_keep_return_the_last() -> None:
    old = port_model(tiny_model().eval(), torch.float32)
    stock = type(old.skeleton)

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, past_key_values: Any = None) -> None:
        raise AssertionError("what streams is not the model's own forward")

    old.skeleton.__class__ = type("Old", (stock,), {"forward": forward})
    model = Counting()
    assert say(old, model).tolist() == [[5, 6, 7, 8, 9, 10, 11]]
    assert {kept for _, kept, _ in model.asked} == {1}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"temprature": 0.5}, ConfigError, "temprature"),
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens"),
        ({"temperature": -1.0, "do_sample": True}, ConfigError, "temperature"),
        ({"num_beams": 2, "num_return_sequences": 3}, ConfigError, "num_return_sequences"),
        ({"output_attentions": True, "return_dict_in_generate": True}, ConfigError, "output_attentions"),
        ({"max_new_tokens": 62}, BatchError, "64 positions; set max_new_tokens=61 or less"),
        ({"max_new_tokens": None, "max_length": 65}, BatchError, "up to 62 more"),
    ],
)
def test_unsupported_generation_is_refused_in_one_line_before_computing(
    ported: PortedModel, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = Counting()
    with pytest.raises(error, match=words) as caught:
        say(ported, model, **options)
    assert "\n" not in str(caught.value)
    assert not model.asked


def test_a_prompt_that_fills_every_position_is_refused(ported: PortedModel) -> None:
    with pytest.raises(BatchError, match="use a shorter prompt"):
        say(ported, Counting(), torch.full((1, 64), 5), max_new_tokens=None)


def test_the_last_position_is_usable_and_the_default_length_is_the_librarys(ported: PortedModel) -> None:
    assert say(ported, Counting(), max_new_tokens=61).shape[1] == 64
    assert say(ported, Counting(), max_new_tokens=None).shape[1] == 3 + 20
    assert say(ported, Counting(), torch.full((1, 60), 5), max_new_tokens=None).shape[1] == 64


def test_nan_logits_are_an_error(ported: PortedModel) -> None:
    with pytest.raises(NonFinite, match="not finite"):
        say(ported, lambda inputs, kept: torch.full((1, 1, VOCAB), torch.nan))


def test_logits_of_minus_infinity_are_allowed(ported: PortedModel) -> None:
    logits = torch.full((1, 1, VOCAB), -torch.inf)
    logits[..., 9] = 0.0
    assert say(ported, lambda inputs, kept: logits)[0, 3:].tolist() == [9] * 4


def test_running_out_of_memory_for_the_kv_cache_advises_shorter_text(ported: PortedModel) -> None:
    def full(inputs: Mapping[str, Any], kept: int) -> Tensor:
        raise OutOfDeviceMemory("device memory ran out", fix="use smaller micro-batches")

    with pytest.raises(OutOfDeviceMemory, match="device memory ran out; use fewer rows, a shorter text"):
        say(ported, full)


def test_models_without_generate_are_refused() -> None:
    mute = port_model(tiny_model().eval(), torch.float32)
    mute.skeleton.__class__ = type("Mute", (type(mute.skeleton),), {"can_generate": classmethod(lambda cls: False)})
    with pytest.raises(ModelError, match="cannot generate"):
        say(mute, Counting())


def test_generating_leaves_training_state_unchanged(ported: PortedModel) -> None:
    skeleton = ported.skeleton
    before = type(skeleton), dict(skeleton.__dict__), skeleton.generation_config.to_dict(), skeleton.config.to_dict()
    say(ported, Counting(), num_beams=2, cache_implementation="static", pad_token_id=3)
    assert before == (
        type(skeleton),
        dict(skeleton.__dict__),
        skeleton.generation_config.to_dict(),
        skeleton.config.to_dict(),
    )


def test_a_text_stream_yields_new_text_as_it_comes() -> None:
    """By words, or sooner where the library decodes each token."""
    heard: list[str] = []
    stream = TextStream(load_tokenizer("bytes"), heard.append)
    stream.put(torch.tensor([list(b"prompt")]))
    for byte in "one two\nthr\u00e9\u00e9 ".encode():
        stream.put(torch.tensor([byte]))
    before_the_end = "".join(heard)
    stream.put(torch.tensor([*b"last", 256]))
    stream.end()
    assert before_the_end == "one two\nthr\u00e9\u00e9 "
    assert "".join(heard) == "one two\nthr\u00e9\u00e9 last"
    assert len([text for text in heard if text]) >= 4
