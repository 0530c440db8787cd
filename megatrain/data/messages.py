"""Messages, tools and tool calls of a chat, brought into the one shape that chat templates are written for.

A message is `{"role": ..., "content": text}`, with `tool_calls` where an assistant makes some, and then perhaps
without content; a call is `{"type": "function", "function": {"name": ..., "arguments": {...}}}`, with its arguments as
an object, whether they came as one or as JSON text. Contents in parts become one text. Whatever else a message holds
(`reasoning_content`, `tool_call_id`, `name`) is kept for the template. What does not fit is a `SampleError` that names
the message. Left out: the order of roles, which is the template's business, and parts other than text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from megatrain.data.json_text import parsed
from megatrain.errors import SampleError

Message: TypeAlias = dict[str, Any]
Tool: TypeAlias = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(value: object, place: str) -> list[Message]:
    """`value` as messages, at least one."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        what = "an empty list" if value == [] else f"{type(value).__name__}"
        raise SampleError(f"{what} in place of messages", reason="no messages", where=place, fix="bring a list of them")
    return [_read_message(message, number, place) for number, message in enumerate(value, start=1)]


def read_tools(value: object, place: str) -> tuple[Tool, ...]:
    """`value`, a list of JSON schemas or the JSON text of one, as function tools."""
    if isinstance(value, str):
        value = _from_json(value, "tools", place) if value.strip() else []
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        what = f"tools are {type(value).__name__}, not a list of objects"
        raise SampleError(what, reason="malformed tools", where=place, fix="bring JSON schemas of functions")
    return tuple(
        dict(tool) if "function" in tool or "name" not in tool else {"type": "function", "function": dict(tool)}
        for tool in value
    )


def read_calls(value: object, place: str) -> list[dict[str, Any]]:
    """`value`, a call, a list of calls or the JSON text of either, as function calls."""
    if isinstance(value, str):
        value = _from_json(value, "a function call", place)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or not value:
        raise _malformed_call(f"{type(value).__name__} in place of function calls", place)
    return [_read_call(call, place) for call in value]


def _read_message(message: object, number: int, place: str) -> Message:
    if not isinstance(message, Mapping):
        what = f"message {number} is {type(message).__name__}, not an object"
        raise SampleError(what, reason="malformed message", where=place, fix="a message has a role and a content")
    kept = {key: value for key, value in message.items() if value is not None}
    role = kept.get("role")
    if role is None:
        held = ", ".join(map(repr, kept)) or "nothing"
        what = f"message {number} has no 'role'; it holds {held}"
        raise SampleError(what, reason="message without a role", where=place, fix="name its role, or set data.columns")
    if role not in ROLES:
        what = f"message {number} has the role {role!r}"
        raise SampleError(what, reason="unknown role", where=place, fix=f"known are {', '.join(ROLES)}")
    calls = kept.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise _malformed_call(f"message {number} ({role}) calls tools", place)
        kept["tool_calls"] = read_calls(calls, place)
    if "content" not in kept and not calls:
        what = f"message {number} ({role}) has no content"
        raise SampleError(what, reason="message without content", where=place, fix="give it one, or remove it")
    if "content" in kept:
        kept["content"] = _read_content(kept["content"], number, place)
    return kept


def _read_content(content: object, number: int, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        what = f"the content of message {number} is {type(content).__name__}, not text"
        raise SampleError(what, reason="content that is not text", where=place, fix="bring text")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type", "nameless") if isinstance(part, Mapping) else type(part).__name__
            what = f"message {number} holds a part of kind {kind!r}; only text is trained"
            raise SampleError(what, reason="content that is not text", where=place, fix="remove it, or the sample")
        texts.append(text)
    return "".join(texts)


def _read_call(call: object, place: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise _malformed_call(f"{type(call).__name__} in place of a function call", place)
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _malformed_call("a function call without a name", place)
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _from_json(arguments, "the arguments of a function call", place) if arguments.strip() else {}
    if not isinstance(arguments, Mapping):
        raise _malformed_call(f"the arguments of a call of {function['name']} are {type(arguments).__name__}", place)
    around = {key: value for key, value in call.items() if key in ("id", "index") and value is not None}
    return {"type": "function", **around, "function": {"name": function["name"], "arguments": dict(arguments)}}


def _from_json(text: str, what: str, place: str) -> object:
    try:
        value = parsed(text)
    except (ValueError, RecursionError) as error:
        raise SampleError(
            f"{what}: not JSON ({error})", reason="malformed tools", where=place, fix="correct it"
        ) from error
    return value


def _malformed_call(what: str, place: str) -> SampleError:
    fix = 'a call is {"name": ..., "arguments": {...}}'
    return SampleError(what, reason="malformed function call", where=place, fix=fix)
