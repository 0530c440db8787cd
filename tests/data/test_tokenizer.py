"""Claims about tokenizers: the byte-level one is exact and portable, and unusable ones are refused at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import example, given
from hypothesis import strategies as st

from megatrain.data.tokenizer import (
    END_OF_TEXT,
    Tokenizer,
    byte_alphabet,
    encode_text,
    encode_texts,
    end_of_text_id,
    load_tokenizer,
    save_tokenizer,
    special_tokens,
    tokenizer_identity,
    vocabulary_size,
)
from megatrain.errors import DataError

BYTES = load_tokenizer("bytes")


def word_tokenizer(**special: str) -> Tokenizer:
    """A tokenizer with one id per word and a normalizer, so that its ids are not bytes."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"unknown": 0, "a": 1, "b": 2}, unk_token="unknown"))
    words.normalizer = tokenizers.normalizers.Lowercase()
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="unknown", **special)


def encode_slowly(tokenizer: Tokenizer, text: str) -> list[int]:
    """The slow reference for `encode_text`: the tokenizer's own pipeline on one text."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return ids


@given(st.text())
@example("")
@example(" \r\n\t e\u0301 漢字 🎉 \0 \ufeff ")
@example(f"a forged {END_OF_TEXT} stays text")
def test_any_text_round_trips_as_utf8_bytes(text: str) -> None:
    ids = encode_text(BYTES, text).tolist()
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text
    assert encode_slowly(BYTES, text) == ids


@given(st.binary())
def test_any_bytes_round_trip_through_the_vocabulary(data: bytes) -> None:
    characters = BYTES.convert_ids_to_tokens(list(data))
    assert bytes(map(byte_alphabet().index, characters)) == data


def test_the_vocabulary_is_256_bytes_and_end_of_text() -> None:
    assert set(byte_alphabet()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert BYTES.convert_ids_to_tokens(list(range(257))) == [*byte_alphabet(), END_OF_TEXT]
    assert vocabulary_size(BYTES) == len(BYTES) == 257
    assert end_of_text_id(BYTES) == BYTES.bos_token_id == 256


@pytest.mark.parametrize("model_type", [None, "llama", "gpt2", "gemma3_text", "mistral", "gpt_oss"])
def test_a_saved_byte_tokenizer_is_loaded_again_from_any_model_folder(tmp_path: Path, model_type: str | None) -> None:
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_tokenizer(BYTES, tmp_path)
    text = f"e\u0301  {END_OF_TEXT}\n漢"
    loaded = load_tokenizer(str(tmp_path))
    for tokenizer in (loaded, transformers.AutoTokenizer.from_pretrained(tmp_path)):
        assert encode_slowly(tokenizer, text) == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
        assert tokenizer.eos_token_id == 256
    assert encode_text(loaded, text).dtype == np.uint8  # it takes the fast path again
    assert tokenizer_identity(loaded) == tokenizer_identity(BYTES)


def test_a_saved_tokenizer_loads_in_transformers_4_and_converters(tmp_path: Path) -> None:
    """Class and special tokens have the names that transformers 4 knows, too, and the SentencePiece model is saved."""
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "tokenizer.model").write_bytes(b"pieces")
    tokenizer = word_tokenizer(eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|é|>"]})
    tokenizer.save_pretrained(tmp_path / "from")
    loaded = load_tokenizer(str(tmp_path / "from"))
    assert loaded.init_kwargs["vocab_file"] == str(tmp_path / "from" / "tokenizer.model")
    for _ in range(2):
        save_tokenizer(loaded, tmp_path / "to")
    described = json.loads((tmp_path / "to" / "tokenizer_config.json").read_text())
    assert described["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert described["additional_special_tokens"] == ["<|turn|>", "<|é|>"]
    assert not isinstance(described.get("extra_special_tokens"), list)
    assert (tmp_path / "to" / "tokenizer.model").read_bytes() == b"pieces"
    again = load_tokenizer(str(tmp_path / "to"))
    assert (tokenizer_identity(again), special_tokens(again)) == (tokenizer_identity(loaded), special_tokens(loaded))
    assert again.all_special_tokens == loaded.all_special_tokens


@pytest.mark.parametrize("other", [False, True])
def test_other_ids_than_those_of_a_sentencepiece_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    class Pieces:
        def __init__(self, model_file: str) -> None:
            assert Path(model_file).read_bytes() == b"pieces"

        def encode(self, texts: list[str]) -> list[list[int]]:
            return [encode_slowly(word_tokenizer(), text)[other:] for text in texts]

    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    monkeypatch.setitem(sys.modules, "sentencepiece", SimpleNamespace(SentencePieceProcessor=Pieces))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: word_tokenizer())
    if not other:
        assert load_tokenizer(str(tmp_path)).get_vocab() == word_tokenizer().get_vocab()
        return
    with pytest.raises(DataError, match=r"splits text otherwise than its tokenizer\.model"):
        load_tokenizer(str(tmp_path))


def splitting_tokenizer(*, lower: bool = False, ignore_merges: bool = False) -> Tokenizer:
    """A byte-level tokenizer that merges digits in threes, with a rule that no class of transformers has."""
    model = tokenizers.models.BPE(
        vocab={piece: index for index, piece in enumerate([*byte_alphabet(), "12", "123", "ab", "abc", END_OF_TEXT])},
        merges=[("1", "2"), ("12", "3"), ("a", "b")],
        ignore_merges=ignore_merges,
    )
    rules = tokenizers.Tokenizer(model)
    if lower:
        rules.normalizer = tokenizers.normalizers.Lowercase()
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=not ignore_merges)
    bytes_of = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.pre_tokenizer = bytes_of if lower or ignore_merges else tokenizers.pre_tokenizers.Sequence([digits, bytes_of])
    rules.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=rules, eos_token=END_OF_TEXT)


@pytest.mark.parametrize("rule", [{}, {"lower": True}, {"ignore_merges": True}], ids=["pieces", "text", "merges"])
@pytest.mark.parametrize(
    ("stated", "model_type"),
    [("GPT2Tokenizer", None), ("Qwen2Tokenizer", "qwen3"), ("PreTrainedTokenizerFast", "qwen2")],
)
def test_a_tokenizer_has_the_rules_of_its_file(
    tmp_path: Path, stated: str, model_type: str | None, rule: dict[str, bool]
) -> None:
    splitting_tokenizer(**rule).save_pretrained(tmp_path)
    described = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**described, "tokenizer_class": stated}), "utf-8")
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}), "utf-8")
    text = "123 Abc abc"
    expected = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    tokenizer = load_tokenizer(str(tmp_path))
    assert encode_text(tokenizer, text).tolist() == expected
    assert end_of_text_id(tokenizer) == splitting_tokenizer().eos_token_id
    of_class = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for name in ("padding_side", "model_input_names"):
        assert getattr(tokenizer, name) == getattr(of_class, name)
    save_tokenizer(tokenizer, tmp_path)
    assert encode_text(load_tokenizer(str(tmp_path)), text).tolist() == expected


@pytest.mark.parametrize("scheme", ["never", "first"])
def test_a_space_is_put_before_a_text_where_the_file_says_so(tmp_path: Path, scheme: str) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[("\u2581", "a")], byte_fallback=True, unk_token="<unk>")
    rules = tokenizers.Tokenizer(model)
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="</s>").save_pretrained(tmp_path)
    described = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**described, "tokenizer_class": "LlamaTokenizer"}))
    tokenizer = load_tokenizer(str(tmp_path))
    for text in ("ab a", " a"):
        assert encode_text(tokenizer, text).tolist() == rules.encode(text).ids


def test_a_class_of_transformers_is_kept_where_it_has_the_rules_of_the_file(tmp_path: Path) -> None:
    vocabulary = {piece: index for index, piece in enumerate([*byte_alphabet(), END_OF_TEXT])}
    transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[]).save_pretrained(tmp_path)
    assert type(load_tokenizer(str(tmp_path))) is transformers.Qwen2Tokenizer


def test_a_tokenizer_without_a_token_for_unknown_words_is_loaded(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(tmp_path)
    assert encode_text(load_tokenizer(str(tmp_path)), "b a").tolist() == [1, 0]


@given(st.lists(st.text(alphabet="aAbB éunkow<|>/s ")))
def test_other_tokenizers_use_their_own_rules(texts: list[str]) -> None:
    tokenizer = word_tokenizer(eos_token="</s>")
    assert [ids.tolist() for ids in encode_texts(tokenizer, texts)] == [encode_slowly(tokenizer, t) for t in texts]


def test_a_customised_byte_tokenizer_leaves_the_fast_path() -> None:
    tokenizer = load_tokenizer("bytes")
    tokenizer.add_tokens(["word"])  # an ordinary added token, which plain text does contain
    assert encode_text(tokenizer, "a word").tolist() == encode_slowly(tokenizer, "a word") == [97, 32, 257]
    assert tokenizer_identity(tokenizer) != tokenizer_identity(BYTES)


def test_a_tokenizers_identity_depends_on_its_rules_not_its_path(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(eos_token="</s>")
    tokenizer.save_pretrained(tmp_path / "here")
    assert tokenizer_identity(load_tokenizer(str(tmp_path / "here"))) == tokenizer_identity(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(3)  # stays until the next call sets its own
    assert tokenizer_identity(load_tokenizer(str(tmp_path / "here"))) == tokenizer_identity(tokenizer)
    assert tokenizer_identity(word_tokenizer(eos_token="</end>")) != tokenizer_identity(tokenizer)


def test_a_tokenizer_without_an_end_of_text_is_refused() -> None:
    with pytest.raises(DataError, match="no end-of-text token"):
        end_of_text_id(word_tokenizer())


def test_invalid_unicode_is_refused() -> None:
    with pytest.raises(DataError, match="lone surrogate"):
        encode_text(BYTES, "\ud800")


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2", "llama", "gemma3_text"])
def test_a_model_folder_without_a_tokenizer_is_refused(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(DataError, match="tokenizer") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_misspelt_folder_suggests_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(DataError, match=f"did you mean {tmp_path / 'tokenizer'}"):
        load_tokenizer(str(tmp_path / "tokeniser"))


def test_a_file_is_not_a_tokenizer_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=f"name its folder: {tmp_path}"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize(("name", "fix"), [("organisation/model", "name a local tokenizer"), ("byte", "`?bytes`?")])
def test_a_hub_name_without_a_network_fails_on_one_line_after_one_request(
    monkeypatch: pytest.MonkeyPatch, name: str, fix: str
) -> None:
    asked: list[str] = []
    loads: list[bool] = []

    def model_info(self: object, name: str, timeout: float) -> None:
        asked.append(name)
        raise ConnectionError("Name or service not known\nmore lines")

    def from_pretrained(name: str, *, local_files_only: bool, trust_remote_code: bool) -> Tokenizer:
        loads.append(local_files_only)
        raise OSError("not in the cache\nmore lines")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(DataError, match=fix) as caught:
        load_tokenizer(name)
    assert "\n" not in str(caught.value)
    assert "Name or service not known" in str(caught.value)
    assert (asked, loads) == ([name], [True])


def test_a_hub_name_is_read_from_the_cache_without_asking_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: BYTES)
    monkeypatch.delattr(huggingface_hub.HfApi, "model_info")
    assert load_tokenizer("organisation/model") is BYTES


def test_a_folder_without_a_tokenizer_is_said_to_hold_none(tmp_path: Path) -> None:
    """transformers lists what it can make a tokenizer of instead."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DataError, match=r"holds no tokenizer \(no file like tokenizer.json\)"):
        load_tokenizer(str(tmp_path))
