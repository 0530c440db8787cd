"""Claims about encoding: ids and targets of every kind of sample, limits, and counts of what is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data.encode import EncodedSample, EncodeOptions, Encoder, Statistics, encode_samples, try_to_render
from megatrain.data.read_rows import LeftOut
from megatrain.data.sample_formats import Sample
from megatrain.data.tokenizer import END_OF_TEXT, load_tokenizer
from megatrain.errors import DataError, SampleError
from tests.data.chats import assistant, byte_tokenizer, call, chat, user

CHATML = byte_tokenizer("chatml")
BYTES = load_tokenizer("bytes")
EOS = 256


def encode(sample: Sample, tokenizer: Any = CHATML, **options: Any) -> tuple[EncodedSample | None, Statistics]:
    statistics = Statistics()
    return next(encode_samples([sample], Encoder(tokenizer, EncodeOptions(**options)), statistics), None), statistics


def tokens(sample: Sample, tokenizer: Any = CHATML, **options: Any) -> tuple[list[int], list[bool]]:
    encoded, _ = encode(sample, tokenizer, **options)
    assert encoded is not None
    assert (encoded.ids.dtype, encoded.trained.dtype) == (np.int32, np.bool_)
    return encoded.ids.tolist(), encoded.trained.tolist()


def test_plain_text_trains_its_end_of_text() -> None:
    assert tokens(Sample("x", text="abc"), BYTES) == ([97, 98, 99, EOS], [False, True, True, True])


@pytest.mark.parametrize(("train_on", "prompt"), [("assistant", False), ("last", False), ("all", True)])
def test_the_prompt_of_a_completion_is_context(train_on: str, prompt: bool) -> None:
    expected = [False, prompt, True, True, True]
    assert tokens(Sample("x", prompt="ab", text="cd"), BYTES, train_on=train_on) == ([97, 98, 99, 100, EOS], expected)


def test_a_prompt_gets_the_tokenizers_start_tokens() -> None:
    import tokenizers

    tokenizer = load_tokenizer("bytes")
    tokenizer.add_tokens(["<s>"], special_tokens=True)
    start = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    assert tokens(Sample("x", prompt="a", text="b"), tokenizer) == ([start, 97, 98, EOS], [False, False, True, True])


def test_special_tokens_in_plain_text_stay_text() -> None:
    sample = Sample("x", text=f"a{END_OF_TEXT}")
    assert tokens(sample, BYTES)[0] == [*f"a{END_OF_TEXT}".encode(), EOS]
    assert list(encode(sample, BYTES)[1].notes) == ["with the text of a special token, which stays text"]
    assert not encode(Sample("x", text="a"), BYTES)[1].notes


def test_token_ids_are_kept_and_checked() -> None:
    ids, trained = np.array([1, 2, 3]), np.array([True, False, True])
    assert tokens(Sample("x", ids=ids, trained=trained), BYTES) == ([1, 2, 3], [False, False, True])
    assert tokens(Sample("x", ids=ids, trained=trained), BYTES, train_on="all")[1] == [False, True, True]
    for wrong in (-1, 257):
        with pytest.raises(SampleError, match=f"x: id {wrong} at position 1 is outside the vocabulary of 257"):
            encode(Sample("x", ids=np.array([1, wrong]), trained=np.ones(2, bool)), BYTES)


def test_labels_are_the_trained_ids() -> None:
    encoded, _ = encode(Sample("x", prompt="a", text="b"), BYTES)
    assert encoded is not None
    assert encoded.labels.tolist() == [-100, 98, EOS]
    assert encoded.labels.dtype == np.int32


LONG = chat(user("12345"), assistant("abcde"), user("6"), assistant("f"))


def test_long_samples_are_truncated_on_the_right_and_counted() -> None:
    whole, trained = tokens(LONG)
    for limit in range(len(whole) + 2):
        encoded, statistics = encode(LONG, max_tokens=limit)
        if encoded is None:
            assert not any(trained[:limit])
            assert statistics.left_out.counts == {f"without a target in the first {limit} tokens": 1}
        else:
            assert (encoded.ids.tolist(), encoded.trained.tolist()) == (whole[:limit], trained[:limit])
            lost = max(0, len(whole) - limit)
            assert (statistics.cut_samples, statistics.cut_tokens) == (int(lost > 0), lost)
            assert (statistics.samples, statistics.tokens, statistics.trained) == (
                1,
                len(encoded),
                sum(trained[:limit]),
            )


def test_long_samples_may_be_dropped() -> None:
    encoded, statistics = encode(LONG, max_tokens=20, too_long="drop")
    assert encoded is None
    assert statistics.left_out.counts == {"longer than 20 tokens": 1}
    assert encode(LONG, max_tokens=len(tokens(LONG)[0]), too_long="drop")[0] is not None


@pytest.mark.parametrize(
    "sample",
    [
        chat(user("q")),
        Sample("x", chat(user("q"), assistant("a")).messages, untrained=frozenset({1})),
        Sample("x", ids=np.array([1, 2]), trained=np.zeros(2, bool)),
        Sample("x", ids=np.array([1, 2]), trained=np.array([True, False])),  # the first token has no token before it
        Sample("x", ids=np.array([], np.int64), trained=np.array([], bool)),
    ],
)
def test_a_sample_without_a_target_is_counted(sample: Sample) -> None:
    encoded, statistics = encode(sample)
    assert encoded is None
    assert statistics.left_out.counts == {"without a target": 1}
    assert statistics.left_out.first == {"without a target": sample.origin}


def test_an_empty_text_is_counted() -> None:
    assert encode(Sample("x", text=""))[1].left_out.counts == {"empty text": 1}


@pytest.mark.parametrize("sample", [chat(user("q"), assistant(" ")), Sample("x", prompt="q", text="")])
def test_empty_answers_are_noted(sample: Sample) -> None:
    note = "with an empty answer, of which only the end is learned"
    assert encode(sample)[1].notes[note] == 1
    assert not encode(chat(user(" "), call(), assistant("a")), byte_tokenizer("qwen2_5"))[1].notes[note]


@pytest.mark.parametrize("kind", ["ids", "tools", "calls"])
def test_encoding_holds_little_memory(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("megatrain.data.encode.BATCH_CHARACTERS", 5000)
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 500}}
    sample = {
        "ids": Sample("x", ids=np.zeros(500, np.int64), trained=np.ones(500, bool)),
        "tools": chat(user("q"), assistant("a"), tools=(tool,)),
        "calls": chat(user("q"), call("x" * 500), assistant("a")),
    }[kind]
    drawn = 0

    def many() -> Iterator[Sample]:
        nonlocal drawn
        for _ in range(60):
            drawn += 1
            yield sample

    next(encode_samples(many(), Encoder(byte_tokenizer("qwen2_5")), Statistics()))
    assert drawn < 12


def test_bad_samples_are_errors_or_counted() -> None:
    samples = [LONG, chat(user("q"), assistant("\ud800")), Sample("x", text="abc"), chat(user("q")), LONG]
    with pytest.raises(SampleError, match=r"here\.jsonl:1: text that holds a lone surrogate"):
        list(encode_samples(samples, Encoder(CHATML), Statistics()))
    statistics = Statistics(LeftOut("leave_out"))
    encoded = list(encode_samples(samples, Encoder(CHATML), statistics))
    assert [sample.origin for sample in encoded] == [LONG.origin, "x", LONG.origin]
    assert statistics.left_out.counts == {"not Unicode": 1, "without a target": 1}
    assert statistics.lines()[1:] == [
        "left out: 1 not Unicode (first: here.jsonl:1)",
        "left out: 1 without a target (first: here.jsonl:1)",
    ]


def test_statistics_account_for_every_sample() -> None:
    statistics = Statistics()
    list(encode_samples([LONG, LONG], Encoder(CHATML, EncodeOptions(max_tokens=30)), statistics))
    trained = 2 * sum(tokens(LONG, max_tokens=30)[1])
    assert statistics.lines() == [
        f"2 samples, 60 tokens, {trained} of them trained ({trained / 60:.1%})",
        f"2 samples cut, {2 * (len(tokens(LONG)[0]) - 30)} tokens lost",
    ]


def test_encoding_batch_size_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [
        LONG,
        Sample("x", text="abc"),
        Sample("x", ids=np.array([1, 2]), trained=np.ones(2, bool)),
        chat(user("q")),
    ]
    samples = kinds * 3
    whole = list(encode_samples(samples, Encoder(CHATML), Statistics()))
    monkeypatch.setattr("megatrain.data.encode.BATCH_CHARACTERS", 300)
    parts = list(encode_samples(samples, Encoder(CHATML), Statistics()))
    assert len(whole) == 9
    assert [(s.ids.tolist(), s.trained.tolist()) for s in whole] == [
        (s.ids.tolist(), s.trained.tolist()) for s in parts
    ]


SPOKEN = st.text(alphabet="aé🎉 \n", max_size=5)


@given(st.lists(st.tuples(SPOKEN, SPOKEN), min_size=1, max_size=3))
def test_a_rendered_example_is_split_into_trained_and_context_runs(pairs: list[tuple[str, str]]) -> None:
    sample = chat(*(message for said, reply in pairs for message in (user(said), assistant(reply))))
    runs = try_to_render(sample, Encoder(CHATML))
    assert "".join(text for text, _ in runs) == CHATML.apply_chat_template(list(sample.messages), tokenize=False)
    assert [text for text, trained in runs if trained] == [reply + "<|im_end|>" for _, reply in pairs]


def test_every_kind_of_example_is_rendered() -> None:
    encoder = Encoder(BYTES)
    assert try_to_render(Sample("x", prompt="é", text="ö"), encoder) == [("é", False), ("ö", True)]
    ids = Sample("x", ids=np.array([97, 98, 99]), trained=np.array([False, True, True]))
    assert try_to_render(ids, encoder) == [("a", False), ("bc", True)]


def test_a_model_without_a_template_is_refused_at_the_first_chat_only() -> None:
    assert encode(Sample("x", text="abc"), BYTES)[0] is not None
    with pytest.raises(DataError, match=r"no chat template; set data\.chat_template"):
        encode(LONG, BYTES)
    assert encode(LONG, BYTES, template="chatml")[0] is not None


def test_an_encoders_identity_depends_on_everything_that_decides_its_tokens() -> None:
    def identity(tokenizer: Any = CHATML, **options: Any) -> str:
        return Encoder(tokenizer, EncodeOptions(**options)).identity

    other_start = byte_tokenizer("chatml")
    other_start.bos_token = "</s>"  # not part of the pipeline, but a template may write it
    others = [
        identity(BYTES, template="chatml"),
        identity(byte_tokenizer("zephyr")),
        identity(train_on="last"),
        identity(max_tokens=5),
        identity(too_long="drop"),
        identity(template="none"),
        identity(template_values={"x": 1}),
        identity(other_start),
    ]
    assert identity() == identity(byte_tokenizer("chatml"))
    assert len({identity(), *others}) == 1 + len(others)
