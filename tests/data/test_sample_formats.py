"""Claims about formats: each is read as its users mean it, and errors name the place."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from megatrain.data.read_rows import SourceRow
from megatrain.data.sample_formats import Sample, Schema, detect_schema, read_sample
from megatrain.errors import ConfigError, SampleError

HELLO = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SYSTEM = {"role": "system", "content": "s"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def read(fields: dict[str, Any], **schema: Any) -> Sample:
    row = SourceRow(fields, "x.jsonl", "x.jsonl:3")
    return read_sample(row, detect_schema(row, Schema(**schema)))


def refused(fields: dict[str, Any], **schema: Any) -> str:
    with pytest.raises(SampleError) as caught:
        read(fields, **schema)
    assert caught.value.where == "x.jsonl:3"
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"messages": HELLO}, HELLO),
        ({"messages": HELLO, "system": "s"}, [SYSTEM, *HELLO]),
        ({"messages": HELLO, "prompt": "p", "text": "t"}, HELLO),
        ({"conversations": HELLO}, HELLO),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, HELLO),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "user", "value": "q"},
                    {"from": "bot", "value": "a"},
                ]
            },
            [SYSTEM, *HELLO],
        ),
        ({"instruction": "q", "output": "a"}, HELLO),
        ({"instruction": "q", "input": "", "output": "a", "text": "all of it again"}, HELLO),
        ({"instruction": "q", "input": "more", "output": "a"}, [{"role": "user", "content": "q\nmore"}, HELLO[1]]),
        ({"instruction": "", "input": "q", "output": "a", "system": "s", "history": []}, [SYSTEM, *HELLO]),
        ({"instruction": "q", "output": "a", "history": [["q", "a"], ["q", "a"]]}, [*HELLO, *HELLO, *HELLO]),
        ({"prompt": HELLO[:1], "completion": HELLO[1:]}, HELLO),
        ({"prompt": "q", "completion": HELLO[1:]}, HELLO),
        ({"prompt": HELLO[:1], "completion": "a", "system": "s"}, [SYSTEM, *HELLO]),
    ],
)
def test_every_conversation_format_is_recognised(fields: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert list(read(fields).messages) == messages


def test_prompt_messages_are_context() -> None:
    prompt = [SYSTEM, *HELLO, HELLO[0]]
    assert read({"prompt": prompt, "completion": HELLO[1:]}).untrained == {0, 1, 2, 3}
    assert read({"prompt": HELLO[:1], "completion": "a", "system": "s"}).untrained == {0, 1}
    assert read({"messages": HELLO}).untrained == frozenset()


def test_texts_and_prompt_completion_pairs() -> None:
    assert read({"text": "t", "id": 1}).text == "t"
    sample = read({"prompt": "p", "completion": "c"})
    assert (sample.prompt, sample.text, sample.messages) == ("p", "c", ())


def test_token_ids_keep_labels_and_drop_padding() -> None:
    sample = read({"input_ids": [5, 6, 7]})
    assert sample.ids is not None
    assert sample.trained is not None
    assert (sample.ids.tolist(), sample.trained.tolist()) == ([5, 6, 7], [True] * 3)
    padded = read(
        {"input_ids": [0, 0, 5, 6, 0], "labels": [-100, -100, -100, 6, -100], "attention_mask": [0, 0, 1, 1, 0]}
    )
    assert padded.ids is not None
    assert padded.trained is not None
    assert (padded.ids.tolist(), padded.trained.tolist()) == ([5, 6], [False, True])
    assert read({"input_ids": np.array([1, 2], np.uint16)}).ids is not None


def test_multipart_contents_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    assert read({"messages": [{"role": "user", "content": parts}]}).messages[0]["content"] == "a b"


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
@pytest.mark.parametrize("wrapped", [True, False])
def test_tool_calls_are_normalised(arguments: object, wrapped: bool) -> None:
    function = {"name": "f", "arguments": arguments}
    asked = {"type": "function", "id": "i", "function": function} if wrapped else function
    tools = [TOOL] if wrapped else json.dumps([TOOL["function"]])
    sample = read(
        {"messages": [HELLO[0], {"role": "assistant", "content": None, "tool_calls": [asked]}], "tools": tools}
    )
    assert sample.messages[1] == {"role": "assistant", "tool_calls": [{**CALL, "id": "i"} if wrapped else CALL]}
    assert sample.tools == (TOOL,)


def test_sharegpt_supports_tool_calls_and_custom_tags() -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "1"},
        {"from": "gpt", "value": "a"},
    ]
    sample = read({"conversations": turns, "tools": "[]"})
    assert sample.messages[1] == {"role": "assistant", "tool_calls": [CALL]}
    assert [message["role"] for message in sample.messages] == ["user", "assistant", "tool", "assistant"]
    tagged = {"dialog": [{"who": "U", "says": "q"}, {"who": "A", "says": "a"}]}
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "U", "assistant_tag": "A"}
    assert list(read(tagged, format="sharegpt", columns={"conversations": "dialog"}, tags=tags).messages) == HELLO


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"name": "q", "size": 3}, "none of the known formats: it holds 'name', 'size'; set data.format"),
        ({"instruction": "q"}, "none of the known formats: it holds 'instruction'"),
        ({}, "it holds nothing"),
        ({"messages": []}, "an empty list instead of messages"),
        ({"messages": "q"}, "'messages' is a text: not JSON"),
        ({"messages": ["q"]}, "message 1 is str, not an object"),
        ({"messages": [HELLO[0], {"content": "a"}]}, "message 2 has no 'role'; it holds 'content'; set data.tags"),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            "message 1 has the role 'robot'; known are system, developer, user, assistant, tool; for others set data",
        ),
        ({"messages": [HELLO[0], {"role": "assistant"}]}, "message 2 (assistant) has no content"),
        ({"messages": [{"role": "user", "content": 5}]}, "the content of message 1 is int, not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 1 has a part of type 'image'"),
        ({"messages": [{**HELLO[0], "tool_calls": [CALL]}]}, "message 1 (user) calls tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": 1}]}]}, "a function call without a name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "not JSON"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "5"}]}]},
            "arguments of a call of f are int",
        ),
        ({"messages": [HELLO[0], {**HELLO[1], "weight": 0.5}]}, "weight of 0.5"),
        ({"messages": HELLO, "tools": 5}, "tools are int, not a list of objects"),
        ({"messages": [SYSTEM, *HELLO], "system": "s"}, "a system message, but also a column 'system'"),
        ({"messages": HELLO, "system": 5}, "'system' is int, not str"),
        ({"prompt": "p", "completion": "c", "system": "s"}, "'system' beside a prompt that is text, not messages"),
        ({"prompt": "p", "completion": "c", "tools": [TOOL]}, "'tools' beside a prompt that is text, not messages"),
        ({"conversations": [{"from": "human"}]}, "message 1 has no 'value'; set data.tags"),
        ({"conversations": [{"from": "robot", "value": "a"}]}, "message 1 has the role 'robot'; known are human"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, "message 1 has the role ['human']; known are human"),
        ({"conversations": "{}"}, "'conversations' is dict, not a list of turns"),
        ({"instruction": " ", "output": "a"}, "an empty instruction"),
        ({"instruction": "q", "output": 5}, "'output' is int, not str"),
        ({"instruction": "q", "output": "a", "history": [["q"]]}, "'history' is not a list of pairs"),
        ({"text": 5}, "'text' is int, not str"),
        ({"input_ids": "5"}, "'input_ids' is str, not list"),
        ({"input_ids": [0.5]}, "'input_ids' is not a list of integers"),
        ({"input_ids": [[1], [2, 3]]}, "'input_ids' is not a list of integers"),
        ({"input_ids": [1, 2], "labels": [1]}, "1 labels for 2 ids"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "label 2 at position 0 is neither -100 nor the id there, 1"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "a hole"),
        (
            {"messages": [{"role": "user", "content": "<image>\nq"}, HELLO[1]], "images": ["a.png"]},
            "refers to 'images' by <image>; only text is trained",
        ),
    ],
)
def test_malformed_rows_name_the_problem(fields: dict[str, Any], what: str) -> None:
    assert what in refused(fields)


def test_a_missing_field_is_reported_with_the_fields_present() -> None:
    message = refused({"instruction": "q", "out": "a"}, format="alpaca")
    assert message.startswith("x.jsonl:3: no 'output', which alpaca samples have; it holds 'instruction', 'out'")
    assert "no 'reply'" in refused({"instruction": "q"}, format="alpaca", columns={"output": "reply"})


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"dialog": HELLO}, "set data.columns={messages: dialog}"),
        ({"question": "q", "answer": "a"}, "set data.columns={instruction: question, output: answer}"),
        ({"instruction": "q", "context": "c", "response": "a"}, "set data.columns={output: response}"),
        ({"Query": "q", "response": "a"}, "set data.columns={instruction: Query, output: response}"),
        ({"content": "t", "url": "u"}, "set data.columns={text: content}"),
        ({"a": "q", "b": "a"}, "set data.format, and data.columns to the names of the fields"),
        (
            {"messages": [{"speaker": "user", "text": "q"}]},
            "set data.tags={role_tag: ..., content_tag: ...} to the keys",
        ),
        ({"conversations": [{"speaker": "bot", "x": "q"}]}, "set data.tags={role_tag: ..., content_tag: ...} to the k"),
    ],
)
def test_an_unrecognised_row_suggests_what_to_set(fields: dict[str, Any], hint: str) -> None:
    message = refused(fields)
    assert f"; {hint}" in message
    assert len(message) < 300


def test_suggested_settings_work() -> None:
    """Following each hint makes the row readable: any keys of turns, in either column, also with a format set."""
    turns = [{"speaker": "user", "text": "q"}, {"speaker": "assistant", "text": "a"}]
    tags = {"role_tag": "speaker", "content_tag": "text"}
    assert list(read({"messages": turns}, tags=tags).messages) == HELLO
    assert list(read({"conversations": turns}, tags=tags).messages) == HELLO
    assert list(read({"messages": turns}, format="chat", tags=tags).messages) == HELLO
    assert list(read({"talk": turns}, columns={"messages": "talk"}, tags=tags).messages) == HELLO
    named = [{"role": "human", "content": "q"}, {"role": "robot", "content": "a"}]
    assert list(read({"messages": named}, tags={"assistant_tag": "robot"}).messages) == HELLO
    assert list(read({"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}).messages) == HELLO
    columns = {"instruction": "question", "output": "answer"}
    assert list(read({"question": "q", "answer": "a"}, columns=columns).messages) == HELLO


def test_llama_factory_message_parts_are_read() -> None:
    def part(kind: str, value: str) -> dict[str, str]:
        return {"type": kind, "value": value}

    call = part("tool_call", '{"name": "f", "arguments": {"x": 1}}')
    sample = read(
        {
            "messages": [
                {"role": "user", "content": [part("text", "q")], "loss_weight": 0.0},
                {"role": "assistant", "content": [part("reasoning", "r"), call], "loss_weight": 0.0},
                {"role": "tool", "content": [part("text", "1")], "loss_weight": 0.0},
                {"role": "assistant", "content": [part("reasoning", "r"), part("text", "a")], "loss_weight": 1.0},
            ]
        }
    )
    assert list(sample.messages) == [
        HELLO[0],
        {"role": "assistant", "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "reasoning_content": "r", "content": "a"},
    ]
    assert sample.untrained == {0, 1, 2}
    assert "a part of type 'image_url'; only text" in refused(
        {"messages": [{"role": "user", "content": [part("image_url", "a.png")]}]}
    )
    assert "a part of type 'text' without 'text' or 'value'" in refused(
        {"messages": [{"role": "user", "content": [{"type": "text", "words": "q"}]}]}
    )


@pytest.mark.parametrize("key", ["weight", "loss_weight", "train", "training"])
def test_every_untrained_message_marker_is_respected(key: str) -> None:
    off, on = (False, True) if key in ("train", "training") else (0, 1.0)
    sample = read({"messages": [HELLO[0], {**HELLO[1], key: off}, HELLO[0], {**HELLO[1], key: on}]})
    assert (list(sample.messages), sample.untrained) == ([*HELLO, *HELLO], {1})
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", key: off}]
    assert read({"conversations": turns}).untrained == {1}


ANSWERED: list[dict[str, Any]] = [
    {"messages": HELLO},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"prompt": "q", "completion": "a"},
    {"prompt": HELLO[:1], "completion": HELLO[1:]},
    {"instruction": "q", "output": "a"},
]


@pytest.mark.parametrize("fields", ANSWERED, ids=lambda fields: next(iter(fields)))
def test_kto_rows_are_refused_by_name(fields: dict[str, Any]) -> None:
    marks = [{"label": True}, {"label": False}, {"label": np.bool_(False)}, {"kto_tag": 0}, {"is_rejected": True}]
    for mark in (*marks, {"kto_tag": "false"}, {"desirable": 1.0}):
        (name,) = mark
        message = refused({**fields, **mark})
        assert f"{name!r} says whether the answer is good or bad, as data for KTO does" in message
    for other in ({"label": 3}, {"label": "joy"}, {"label": 0}, {"labels": [True]}, {"score": 1}, {"chosen": "x"}):
        read({**fields, **other})
    assert read({"text": "t", "label": True}).text == "t"  # a class, not a label of an answer
    assert "'label' says whether the answer" in refused({**fields, "label": True}, format="preference")


def test_a_rejected_answer_without_a_chosen_one_is_refused() -> None:
    message = refused({"messages": HELLO, "rejected_response": "b"})
    assert "'rejected_response' holds a rejected answer, but there is no 'chosen' one; set data.columns" in message
    read({"messages": HELLO, "rejected_response": "b"}, format="chat")  # the user says what it is
    read({"messages": HELLO, "rejected_response": None, "rejected_ids": np.array([1, 2])})


def test_unused_columns_and_tags_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.tags: alpaca samples have no turns"):
        Schema("alpaca", tags={"role_tag": "x"}).refuse_unused()
    with pytest.raises(ConfigError, match=r"data\.columns: chat samples have no 'conversations'; they have messages"):
        Schema("chat", {"conversations": "x"}).refuse_unused()
    for schema in (
        Schema("chat", {"messages": "x"}, {"role_tag": "x"}),
        Schema("auto", {"output": "x", "messages": "y"}, {"role_tag": "x"}),
        Schema("preference", {"chosen": "x"}, {"role_tag": "x"}),
        Schema("text", {"text": "x"}),
    ):
        schema.refuse_unused()


def test_unknown_schema_fields_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.columns: unknown name 'mesages'; did you mean 'messages'"):
        Schema(columns={"mesages": "x"})
    for name, tag in (("role", "role_tag"), ("content", "content_tag")):
        hint = rf"data\.columns: '{name}' is not a column, but a key of turns; set data\.tags={{{tag}: x}}"
        with pytest.raises(ConfigError, match=hint):
            Schema(columns={name: "x"})
    with pytest.raises(ConfigError, match=r"data\.tags: unknown name 'user'; did you mean 'user_tag'"):
        Schema(tags={"user": "x"})
    with pytest.raises(ConfigError, match=r"data\.format: unknown name 'sharegtp'; did you mean 'sharegpt'"):
        Schema(format="sharegtp")  # type: ignore[arg-type]
