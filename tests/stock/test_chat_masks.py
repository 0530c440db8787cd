"""Ids and targets of chats against TRL: every template that it ships, with conversations of many shapes.

The oracle is the library's own `apply_chat_template` with the template that TRL's trainer swaps in for
`assistant_only_loss`. `trl`: with `chat_template: trl`, both must be equal wherever both render. `model`: with the
model's own template the ids must be those of `apply_chat_template`, and the targets differ as `OWN` says, template by
template. What is refused, by us or by TRL, is listed, so that each change shows.
"""

from __future__ import annotations

import copy
from collections import Counter
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.chat import DIRECTIVES, choose_template, mark_chat
from megatrain.data.encode import EncodedSample, EncodeOptions, Encoder, Statistics, encode_samples
from megatrain.data.preferences import read_pair
from megatrain.data.read_rows import SourceRow
from megatrain.data.sample_formats import Sample, Schema, read_sample
from megatrain.errors import SampleError
from tests.data.chats import TOOL, answer, assistant, byte_tokenizer, call, user
from tests.data.test_trl_masks import tokenizer_of

SYSTEM = {"role": "system", "content": "be brief"}


def calling(content: str, *cities: str, **more: Any) -> dict[str, Any]:
    calls = [each for city in cities or ("Bern",) for each in call(city)["tool_calls"]]
    return assistant(content, tool_calls=calls, **more)


CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [user("q"), assistant("a")],
    "system": [SYSTEM, user("q"), assistant("a")],
    "white space": [
        user("q1\n"),
        assistant("\n\na1 \n"),
        user("q2"),
        assistant("some words"),
        user("q3"),
        assistant("é"),
    ],
    "thoughts": [user("q"), assistant("<think>\nr\n</think>\n\na"), user("q"), assistant("<think>\ns\n</think>\n\nb")],
    "reasoning": [user("q"), assistant("a", reasoning_content="r"), user("q"), assistant("b", reasoning_content="s")],
    "a call at the end": [user("q"), call()],
    "a call without content": [user("q"), call(), answer(), assistant("a")],
    "a call with null": [user("q"), {**call(), "content": None}, answer(), assistant("a")],
    "a call with empty content": [user("q"), calling(""), answer(), assistant("a")],
    "a call with text": [user("q"), calling("I look."), answer(), assistant("a")],
    "a call after reasoning": [
        user("q"),
        calling("", reasoning_content="r"),
        answer(),
        assistant("a", reasoning_content="s"),
    ],
    "two calls": [user("q"), calling("", "Bern", "Rome"), answer(), answer('{"sun": 4}'), assistant("a")],
    "calls in turn": [
        *(user("q"), calling(""), answer(), calling(""), answer("x"), assistant("a")),
        *(user("r"), assistant("b")),
    ],
}
ROWS = {(name, "call" in name): messages for name, messages in CHATS.items()}
ROWS |= {("one turn", True): CHATS["one turn"], ("a call with text", False): CHATS["a call with text"]}
ROWS |= {("calls in turn", False): CHATS["calls in turn"]}
"""(chat, whether with tools) -> its messages."""


@cache
def templates() -> list[str]:
    """The models' templates that TRL ships, by name."""
    import trl

    names = [path.stem for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")]
    return sorted(name for name in names if not name.endswith("_training"))


@cache
def training_template(name: str) -> str | None:
    """TRL's template for `assistant_only_loss`; None if it has none for this model."""
    from trl.chat_template_utils import get_training_chat_template

    try:
        found = get_training_chat_template(tokenizer_of(name))
    except ValueError:
        return None
    return str(found or tokenizer_of(name).chat_template)


def ours(name: str, row: tuple[str, bool], template: str) -> EncodedSample | str:
    """The sample, or why it is refused."""
    fields = {"messages": copy.deepcopy(ROWS[row]), **({"tools": [TOOL]} if row[1] else {})}
    try:
        sample = read_sample(SourceRow(fields, "rows.jsonl", "rows.jsonl:1"), Schema("chat"))
        (found,) = encode_samples([sample], encoder_of(name, template), Statistics())
    except SampleError as error:
        return error.reason
    return found


@cache
def encoder_of(name: str, template: str) -> Encoder:
    return Encoder(tokenizer_of(name), EncodeOptions(template=template))


def theirs(name: str, row: tuple[str, bool], template: str | None) -> tuple[list[int], list[int]] | None:
    """(ids, mask) by transformers; None if the template refuses the messages."""
    how = {"tools": [TOOL] if row[1] else None, "chat_template": template, "return_dict": True}
    try:
        found = tokenizer_of(name).apply_chat_template(
            copy.deepcopy(ROWS[row]), return_assistant_tokens_mask=template is not None, **how
        )
    except Exception:  # templates are programs, and may raise anything
        return None
    return found["input_ids"], found.get("assistant_masks", [])


LOSES = ("tools that the template leaves out", "message that the template leaves out")
"""Why a row is refused that TRL trains without a part of it."""
DIFFERENT_CHARACTER = "\ufffd"  # the last byte of one
DIFFERENT = {
    (
        "diffusion_gemma",
        "white space",
    ): "transformers' mask lacks all tokens but the first of a character that ends a mark"
}
"""Rows whose targets differ with `chat_template: trl`, and why."""


AFTER_PROMPT = "the generation prompt, or a part of it, since TRL trains the whole turn"
MORE: dict[tuple[str, ...], tuple[list[str], str]] = {
    ("\n",): (
        [
            *("diffusion_gemma", "gemma", "gemma3", "lfm2", "lfm2_v2", "phi3", "phi3_5", "qwen2_5", "qwen2_5_vl"),
            *("qwen3", "qwen3_instruct_2507", "qwen3_vl"),
        ],
        "the line end after the end token, at which generation has stopped; for Qwen2.5 also that of the header",
    ),
    ("<think>", "<think>\n", "\n"): (
        [
            *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
            *("qwen3_5_think", "qwen3_6", "qwen3_8"),
        ],
        AFTER_PROMPT,
    ),
    ("<think>\n", "<think>\n\n</think>\n\n", "\n"): (["qwen3_5_nothink"], AFTER_PROMPT),
    ("<|start|>assistant",): (["gptoss", "muse_glimmer"], AFTER_PROMPT),
    ("<\uff5cAssistant\uff5c>",): (["deepseek_r1_distill"], AFTER_PROMPT),
    ("<\uff5cAssistant\uff5c>", "<\uff5ctool▁outputs▁end\uff5c>"): (["deepseekv3"], AFTER_PROMPT),
}
"""What TRL trains and we do not -> (templates, what it is)."""
LESS = {"diffusion_gemma": {"<|tool_response>", "<|turn>model\n", DIFFERENT_CHARACTER}}
"""What we train and TRL does not: the token after a call, at which the model stops, and the header after a tool's
answer, which this template leaves out of its generation prompt."""
THOUGHTS = {"white space", "reasoning", "thoughts"}  # "white space" has several turns, too
CALLS = {name for name in CHATS if "call" in name} - {"a call at the end", "a call after reasoning"}
TEXTS = {
    "deepseek_r1_distill": {"thoughts"},
    "qwen3": THOUGHTS | CALLS,
    **{name: {*THOUGHTS, "calls in turn"} for name in ("qwen3_5_nothink", "qwen3_5_think", "qwen3_6")},
}
"""Chats whose text differs: TRL's templates keep the thoughts of all turns, the models' drop those of earlier ones."""
UNCLEAR = {
    ("deepseekv3", "calls in turn"): "the template does not close the tool's answer before the second call",
    **dict.fromkeys(
        [(name, "a call with text") for name in ("diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5")],
        "the template moves the text behind the tool's answer",
    ),
}
"""Chats that are refused since the template writes a turn in two places, or as a part of others."""


def test_targets_equal_trls_with_its_templates() -> None:
    counts: Counter[str] = Counter()
    different = set()
    for name in templates():
        if (template := training_template(name)) is None:
            continue
        for row in ROWS:
            found, expected = ours(name, row, "trl"), theirs(name, row, template)
            if isinstance(found, str) or expected is None:
                counts["refused by both" if isinstance(found, str) and expected is None else str(found)] += 1
                continue
            counts["both render"] += 1
            assert found.ids.tolist() == expected[0], (name, row)
            if found.trained.astype(int).tolist() != expected[1]:
                different.add((name, row[0]))
    print(f"{counts['both render'] - len(different)} of {counts['both render']} equal; {dict(counts)}")
    assert different == DIFFERENT.keys()
    assert set(counts) == {"both render", "refused by both", *LOSES}


@pytest.mark.slow
def test_targets_of_the_models_own_templates_differ_from_trls_as_documented() -> None:
    more: dict[str, set[str]] = {}
    less: dict[str, set[str]] = {}
    others: dict[str, set[str]] = {}
    unclear: set[tuple[str, str]] = set()
    for name in templates():
        for row in ROWS:
            found, plain = ours(name, row, "model"), theirs(name, row, None)
            if isinstance(found, str):
                if found not in (*LOSES, "refused by the chat template"):
                    unclear.add((name, row[0]))
                continue
            closed = name == "glm4moe" and ROWS[row][-1]["role"] == "assistant"
            if plain is not None:
                assert found.ids[: len(found) - closed].tolist() == plain[0], (name, row)
            if (template := training_template(name)) is None or (expected := theirs(name, row, template)) is None:
                continue
            if found.ids.tolist() != expected[0]:
                others.setdefault(name, set()).add(row[0])
                continue
            mask = np.array(expected[1], dtype=bool)
            for difference, table in ((mask & ~found.trained, more), (found.trained & ~mask, less)):
                edges = np.flatnonzero(np.diff(np.concatenate([[0], difference.astype(int), [0]])))
                for start, stop in zip(edges[::2], edges[1::2], strict=True):
                    table.setdefault(name, set()).add(tokenizer_of(name).decode(found.ids[start:stop]))
    assert more == {name: set(texts) for texts, (names, _) in MORE.items() for name in names}
    assert less == LESS
    assert others == TEXTS
    assert unclear == UNCLEAR.keys()


def test_a_rows_own_template_arguments_reach_the_template_as_in_trl() -> None:
    """TRL passes the column to `apply_chat_template`."""
    values: list[Any] = [{"reasoning_effort": "high"}, '{"reasoning_effort": "low"}', None]
    for value, effort in zip(values, ("high", "low", "medium"), strict=True):
        fields = {"messages": CHATS["one turn"], "chat_template_kwargs": value}
        sample = read_sample(SourceRow(fields, "r", "r:1"), Schema("chat"))
        (found,) = encode_samples([sample], Encoder(tokenizer_of("gptoss")), Statistics())
        expected = tokenizer_of("gptoss").apply_chat_template(CHATS["one turn"], reasoning_effort=effort)
        assert found.ids.tolist() == expected["input_ids"]
        assert f"Reasoning: {effort}" in tokenizer_of("gptoss").decode(found.ids)
    pair = {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]}
    row = SourceRow({**pair, "chat_template_kwargs": {"reasoning_effort": "high", "absent": None}}, "r", "r:1")
    assert [each.values for each in read_pair(row, Schema("preference"))] == [{"reasoning_effort": "high"}] * 2
    own = Sample("r:1", tuple(CHATS["one turn"]), values={"enable_thinking": True})
    template = choose_template(byte_tokenizer("qwen3"), values={"enable_thinking": False})
    spans = [mark_chat(each, template, "assistant").spans for each in (own, Sample("r:1", own.messages))]
    assert spans[0] != spans[1], "a row's arguments go before those of the run"
    with pytest.raises(SampleError, match="'chat_template_kwargs' is list, not an object"):
        read_sample(SourceRow({"messages": CHATS["one turn"], "chat_template_kwargs": [1]}, "r", "r:1"), Schema("chat"))
    with pytest.raises(SampleError, match="'chat_template_kwargs' beside a prompt that is text"):
        fields = {"prompt": "p", "completion": "c", "chat_template_kwargs": {"x": 1}}
        read_sample(SourceRow(fields, "r", "r:1"), Schema("completion"))


ALL_CODES = "{% set f = '%%Y " + " ".join(f"%{code}" for code in DIRECTIVES) + "' %}{{ strftime_now(f) }}|"
SPACED = "\n  {% if strftime_now is defined %}{{ strftime_now('%d') }}{% endif %}\n x"
CLOCKS = ["llama3_2", "gptoss", ALL_CODES, SPACED]


@pytest.mark.parametrize("text", CLOCKS, ids=["llama3_2", "gptoss", "all codes", "white space"])
def test_a_template_that_writes_the_date_writes_the_given_one(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly as transformers does on that day."""
    moment = datetime(2023, 9, 4, 6, 5, 3)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return moment

    tokenizer = copy.deepcopy(tokenizer_of("llama3_2"))
    if text in templates():
        tokenizer.chat_template = tokenizer_of(text).chat_template
    else:
        tokenizer.chat_template = text + "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    found = mark_chat(Sample("r:1", tuple(CHATS["one turn"])), choose_template(tokenizer, moment=moment), "all").text
    assert found != mark_chat(Sample("r:1", tuple(CHATS["one turn"])), choose_template(tokenizer), "all").text
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    assert found == tokenizer.apply_chat_template(CHATS["one turn"], tokenize=False)
    day, other = (Encoder(tokenizer, moment=moment.replace(day=each)) for each in (4, 5))
    assert day.identity == Encoder(tokenizer, moment=moment).identity != other.identity
