"""Claims about `chat_template: trl`: ids and targets are those of TRL's `assistant_only_loss`, template by template.

The independent method: the library's own `apply_chat_template` with the template that TRL's trainer swaps in.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken

from megatrain.data.chat import choose_template
from megatrain.data.encode import EncodeOptions, Encoder, Statistics, encode_samples
from megatrain.data.tokenizer import Tokenizer
from megatrain.errors import DataError
from tests.data.chats import assistant, byte_tokenizer, chat, special_tokens, template_text, user

TEMPLATES = ("qwen2_5", "qwen3", "qwen3_vl", "llama3", "gemma", "gemma3", "phi3", "lfm2", "deepseekv3", "cohere")
CONVERSATIONS = (
    [user("q"), assistant("a")],
    [user("q1\n"), assistant("\n\na1 \n"), user("q2"), assistant("an answer in words"), user("q3"), assistant("é🎉")],
    [user("q"), assistant("<think>\nfirst\n</think>\n\na1"), user("r"), assistant("<think>\nsecond\n</think>\n\na2")],
)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    """A tokenizer that merges bytes, including line ends, with TRL's copy of a model's template."""
    import trl.chat_template_utils as trl

    text = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    rules = tokenizers.Tokenizer(tokenizers.models.BPE())
    rules.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rules.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    rules.train_from_iterator(["\n\n an answer in words \n\n"] * 9, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=rules, clean_up_tokenization_spaces=False)
    marks = [AddedToken(mark, special=True, normalized=False) for mark in special_tokens(text)]
    tokenizer.add_tokens(marks, special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template = "<s>", "</s>", text
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_label_masks_match_trl(name: str) -> None:
    from trl.chat_template_utils import get_training_chat_template

    tokenizer = tokenizer_of(name)
    encoder = Encoder(tokenizer, EncodeOptions(template="trl"))
    for found, messages in zip(
        encode_samples([chat(*each) for each in CONVERSATIONS], encoder, Statistics()), CONVERSATIONS, strict=True
    ):
        theirs = tokenizer.apply_chat_template(
            messages,
            chat_template=get_training_chat_template(tokenizer),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert found.ids.tolist() == theirs["input_ids"]
        assert found.trained.astype(int).tolist() == theirs["assistant_masks"]


def test_default_label_masks_differ_from_trls_as_documented() -> None:
    """The trained text other than the answer and its end marker."""
    sample = chat(user("q"), assistant("a"))
    more = {}
    for name in ("qwen2_5", "qwen3_vl", "llama3", "gemma", "deepseekv3"):
        trained = []
        for template in ("model", "trl"):
            encoder = Encoder(tokenizer_of(name), EncodeOptions(template=template))
            (found,) = encode_samples([sample], encoder, Statistics())
            trained.append(tokenizer_of(name).decode(found.ids[found.trained], spaces_between_special_tokens=False))
        before, found_own, behind = trained[1].partition(trained[0])
        assert found_own
        more[name] = before, behind
    assert more == {
        "qwen2_5": ("\n", "\n"),
        "qwen3_vl": ("", "\n"),
        "llama3": ("", ""),
        "gemma": ("", "\n"),
        "deepseekv3": ("<\uff5cAssistant\uff5c>", ""),
    }


def test_a_model_keeps_its_own_template() -> None:
    own = tokenizer_of("qwen3").chat_template
    template = choose_template(tokenizer_of("qwen3"), "trl")
    assert template.text(()) != own
    assert template.saved_text == own
    assert choose_template(tokenizer_of("qwen3"), "none").saved_text != own


def test_templates_with_generation_marks_are_kept_and_unknown_ones_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = byte_tokenizer("lfm2_5")
    assert choose_template(marked, "trl").text(()) == template_text("lfm2_5")
    with pytest.raises(DataError, match=r"^data.chat_template: TRL has no training template .*; leave the key out"):
        choose_template(byte_tokenizer("zephyr"), "trl")
    monkeypatch.setitem(sys.modules, "trl.chat_template_utils", None)
    with pytest.raises(DataError, match=r"^data.chat_template: trl needs the `trl` package.*; pip install trl"):
        choose_template(byte_tokenizer("zephyr"), "trl")
