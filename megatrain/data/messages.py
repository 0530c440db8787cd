"""Normalises chat messages, tools and tool calls to the format that chat templates expect.

A message is `{"role": ..., "content": text}`. An assistant's message may have `tool_calls`, and then need not have
content; a call is `{"type": "function", "function": {"name": ..., "arguments": {...}}}`. Arguments given as JSON text
are parsed. A content that is a list of parts becomes one text, with reasoning and calls moved to their own keys. Other
keys of a message (`reasoning_content`, `tool_call_id`, `name`) are kept for the template. A malformed message is a
`SampleError` that names it. The order of roles is not checked, since templates do that. Images are marks in a content
by then (`images.py`); sound is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from megatrain.data.files import parse_json
from megatrain.data.loss_switches import is_on, join_switches
from megatrain.errors import SampleError

COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "dialog", "dialogue", "chat", "turns"),
    "instruction": ("instruction", "prompt", "question", "query", "problem", "request", "input", "source"),
    "output": ("output", "completion", "answer", "response", "reply", "solution", "target"),
    "text": ("text", "content", "body", "document", "article", "code", "page", "story"),
}
"""Our name of a field -> names of such columns in other data sets, for the advice in errors."""
TAGS_FIX = "set data.tags={role_tag: ..., content_tag: ...} to the keys of a turn's role and text"


def columns_for(fields: Mapping[str, Any]) -> str:
    """Advice for a row of no known format, by the names of its fields. It is never applied."""
    named = {ours: next((name for name in fields if name.lower() in usual), None) for ours, usual in COLUMNS.items()}
    for needed in (("messages",), ("instruction", "output"), ("text",)):
        if all(named[ours] for ours in needed):
            pairs = ", ".join(f"{ours}: {named[ours]}" for ours in needed if named[ours] != ours)
            return f"set data.columns={{{pairs}}}" if pairs else TAGS_FIX
    return "set data.format, and data.columns to the names of the fields"


# Messages and tools ---------------------------------------------------------------------------------------------------

Message: TypeAlias = dict[str, Any]
Tool: TypeAlias = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
IMAGES = ("image", "image_url")
"""Types of a part that is an image."""


def read_messages(value: object, place: str) -> list[Message]:
    """Normalise a list of messages. Raises `SampleError` if it is malformed or empty.

    place: of the row, for errors.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        what = f"{'an empty list' if value == [] else type(value).__name__} instead of messages"
        raise SampleError(what, reason="no messages", where=place, fix="give a list of messages")
    return [_read_message(message, number, place) for number, message in enumerate(value, start=1)]


def read_turns(value: object, column: str, place: str) -> object:
    """The value of a column of turns. A text is parsed as JSON, since a CSV file can only hold texts.

    Raises `SampleError` for a text that is not JSON.
    """
    if not isinstance(value, str):
        return value
    fix = "write the list by json.dumps; pandas' to_csv writes Python's notation, which is not JSON"
    return _from_json(value, f"{column!r} is a text", place, reason="messages that are not JSON", fix=fix)


def read_tools(value: object, place: str) -> tuple[Tool, ...]:
    """Normalise a list of JSON schemas of functions, or its JSON text. Raises `SampleError`."""
    if isinstance(value, str):
        value = (_from_json(value, "tools", place) if value.strip() else None) or []
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        what = f"tools are {type(value).__name__}, not a list of objects"
        raise SampleError(what, reason="malformed tools", where=place, fix="give JSON schemas of functions")
    return tuple(
        dict(tool) if "function" in tool or "name" not in tool else {"type": "function", "function": dict(tool)}
        for tool in value
    )


def read_values(value: object, column: str, place: str) -> dict[str, Any]:
    """Arguments of the chat template: an object, or its JSON text, without those that are null.

    Raises `SampleError` for anything else.
    """
    value = _from_json(value, f"{column!r} is a text", place) if isinstance(value, str) and value.strip() else value
    value = {} if value is None or value == "" else value
    if not isinstance(value, Mapping):
        what = f"{column!r} is {type(value).__name__}, not an object"
        raise SampleError(what, reason=f"malformed {column!r}", where=place, fix="give names and values")
    return {str(key): inner for key, inner in value.items() if inner is not None}


def read_calls(value: object, place: str) -> list[dict[str, Any]]:
    """Normalise a function call, a list of calls, or the JSON text of either. Raises `SampleError`."""
    if isinstance(value, str):
        value = _from_json(value, "a function call", place)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or not value:
        raise _malformed_call(f"{type(value).__name__} instead of function calls", place)
    return [_read_call(call, place) for call in value]


def _read_message(message: object, number: int, place: str) -> Message:
    if not isinstance(message, Mapping):
        what = f"message {number} is {type(message).__name__}, not an object"
        raise SampleError(what, reason="malformed message", where=place, fix="a message has a role and a content")
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.get("role")
    if role is None:
        what = f"message {number} has no 'role'; it holds {', '.join(map(repr, fields)) or 'nothing'}"
        raise SampleError(what, reason="message without a role", where=place, fix=TAGS_FIX)
    if role not in ROLES:
        what = f"message {number} has the role {role!r}"
        fix = f"known are {', '.join(ROLES)}; for others set data.tags={{user_tag: ..., assistant_tag: ...}}"
        raise SampleError(what, reason="unknown role", where=place, fix=fix)
    if isinstance(fields.get("content"), Sequence) and not isinstance(fields["content"], str):
        fields = _join_parts(fields, number, place)
    calls = fields.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise _malformed_call(f"message {number} ({role}) calls tools", place)
        fields["tool_calls"] = read_calls(calls, place)
    if "content" not in fields and not calls:
        what = f"message {number} ({role}) has no content"
        raise SampleError(what, reason="message without content", where=place, fix="give it one, or remove it")
    if not isinstance(content := fields.get("content", ""), str):
        what = f"the content of message {number} is {type(content).__name__}, not text"
        raise SampleError(what, reason="content that is not text", where=place, fix="give text")
    return fields


def _join_parts(message: Message, number: int, place: str) -> Message:
    """`message`, whose content is a list of parts, with their joined text as its content.

    A part is a text, or an object with a `type` and its text under `text` or, in LLaMA-Factory's v1 format, `value`.
    Parts of type `reasoning` and `tool_call` get their own keys.
    """
    texts: dict[str, list[str]] = {"text": [], "reasoning": [], "tool_call": []}
    trained: list[tuple[str, bool | None]] = []
    for part in message["content"]:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        value = part.get("text", part.get("value")) if isinstance(part, Mapping) else part
        if kind not in texts or not isinstance(value, str):
            named = kind if isinstance(part, Mapping) else type(part).__name__
            what = f"message {number} has a part of type {named!r}; only text is trained"
            if kind in texts and isinstance(part, Mapping):
                what = f"message {number} has a part of type {named!r} without 'text' or 'value'"
            fix = (
                "set data.images=images, or the name of their column" if named in IMAGES else "remove it, or the sample"
            )
            raise SampleError(what, reason="content that is not text", where=place, fix=fix)
        texts[str(kind)].append(value)
        on = is_on(part, f"a part of message {number}", place) if isinstance(part, Mapping) else None
        trained.append((value, on))
    joined: Message = {} if texts["tool_call"] and not texts["text"] else {"content": "".join(texts["text"])}
    if texts["reasoning"]:
        joined["reasoning_content"] = "".join(texts["reasoning"])
    if texts["tool_call"]:
        joined["tool_calls"] = [call for text in texts["tool_call"] for call in read_calls(text, place)]
    joined |= join_switches(trained, f"message {number}", place)
    return {**{key: value for key, value in message.items() if key != "content"}, **joined}


def _read_call(call: object, place: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise _malformed_call(f"{type(call).__name__} instead of a function call", place)
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _malformed_call("a function call without a name", place)
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _from_json(arguments, "the arguments of a function call", place) if arguments.strip() else {}
    if not isinstance(arguments, Mapping):
        raise _malformed_call(f"the arguments of a call of {function['name']} are {type(arguments).__name__}", place)
    ids = {key: value for key, value in call.items() if key in ("id", "index") and value is not None}
    return {"type": "function", **ids, "function": {"name": function["name"], "arguments": dict(arguments)}}


def _from_json(text: str, what: str, place: str, *, reason: str = "malformed tools", fix: str = "correct it") -> object:
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise SampleError(f"{what}: not JSON ({error})", reason=reason, where=place, fix=fix) from error
    return value


def _malformed_call(what: str, place: str) -> SampleError:
    fix = 'a call is {"name": ..., "arguments": {...}}'
    return SampleError(what, reason="malformed function call", where=place, fix=fix)
