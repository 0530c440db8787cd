"""Normalises chat messages, tools and tool calls to the format that chat templates expect.

A message is `{"role": ..., "content": text}`. An assistant's message may have `tool_calls`, and then need not have
content; a call is `{"type": "function", "function": {"name": ..., "arguments": {...}}}`. Arguments given as JSON text
are parsed. A content that is a list of parts becomes one text, with reasoning and calls moved to their own keys. Other
keys of a message (`reasoning_content`, `tool_call_id`, `name`) are kept for the template. A malformed message is a
`SampleError` that names it. The order of roles is not checked, since templates do that. Images are marks in a content
by then (`images.py`); sound is not supported.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from megatrain.data.files import parse_json
from megatrain.data.loss_switches import is_on, join_switches
from megatrain.errors import SampleError

# Advice for rows of no known format ----------------------------------------------------------------------------------
#
# Errors suggest `data.columns` and `data.tags`, by the types of fields (a list of turns, a text) and by the names that
# other data sets use for them. Suggestions are never applied.

QUESTIONS = ("instruction", "prompt", "question", "query", "input", "problem", "request", "human", "user", "source")
ANSWERS = ("output", "completion", "answer", "response", "reply", "solution", "target", "assistant", "gpt", "bot")
CONTEXTS = ("input", "context")
TEXTS = ("text", "content", "body", "document", "article", "code", "page", "story")
CONTENTS = ("content", "value", "text", "message", "says", "said", "utterance", "body")
GENERAL = "set data.format, and data.columns to the names of the fields"


def columns_for(fields: Mapping[str, Any], known: Collection[str], roles: Collection[str]) -> str:
    """Advice for a row of no known format. known: names of fields in the known formats. roles: names of roles."""
    columns, turn = _columns(fields, known)
    if not columns:
        return GENERAL
    tags = "" if turn is None or _is_usual(turn) else f" and {tags_for(turn, roles)}"
    return f"set data.columns={_flow(columns)}{tags.replace(' and set ', ' and ')}"


def tags_for(turn: Mapping[str, Any], roles: Collection[str]) -> str:
    """Advice for a turn with unknown keys: which may be the keys of its role and of its text."""
    texts = {str(key): value for key, value in turn.items() if isinstance(value, str)}
    role = next((key for key, value in texts.items() if value.lower() in roles), None)
    others = [key for key in texts if key != role]
    content = next((key for key in others if key.lower() in CONTENTS), others[0] if len(others) == 1 else None)
    tags = {"role_tag": role, "content_tag": content}
    if role is None or content is None:
        return "set data.tags={role_tag: ..., content_tag: ...} to the keys of a turn's role and text"
    return f"set data.tags={_flow({tag: key for tag, key in tags.items() if key})}"


def _columns(fields: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, str], Mapping[str, Any] | None]:
    """(our name of a field -> the row's, the first turn if that field is a list of turns)."""
    pair = {kind: _first(fields, lambda name, kind=kind: name.startswith(kind)) for kind in ("chosen", "rejected")}
    if all(pair.values()):
        return {kind: str(name) for kind, name in pair.items()}, None
    for name, value in fields.items():
        turns = _as_list(value)
        if turns and isinstance(turns[0], Mapping):
            return {"conversations" if "from" in turns[0] else "messages": name}, turns[0]
    texts = {name: value for name, value in fields.items() if isinstance(value, str)}
    question = next((name for word in QUESTIONS for name in texts if name.lower() == word), None)
    answer = next((name for word in ANSWERS for name in texts if name.lower() == word), None)
    if question and answer:
        more = next((name for word in CONTEXTS for name in texts if name.lower() == word and name != question), None)
        found = {"instruction": question, "output": answer, "input": more}
        return {ours: name for ours, name in found.items() if name and name != ours}, None
    text = next((name for word in TEXTS for name in texts if name.lower() == word), None)
    if text is not None or (len(texts) == len(fields) == 1 and not question and not answer):
        return {"text": text or next(iter(texts))}, None
    near = {name: difflib.get_close_matches(str(name), known, n=1, cutoff=0.75) for name in fields}
    return {match[0]: name for name, match in near.items() if match and match[0] != name}, None


def _as_list(value: object) -> Sequence[Any]:
    """`value` if it is a list, parsed if it is the JSON text of one; otherwise an empty list."""
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.lstrip().startswith("[") else None
        except (ValueError, RecursionError):
            return ()
    return value if isinstance(value, Sequence) else ()


def _first(fields: Mapping[str, Any], fits: Any) -> str | None:
    return next((name for name in fields if fits(str(name).lower())), None)


def _is_usual(turn: Mapping[str, Any]) -> bool:
    return {"role", "content"} <= turn.keys() or {"from", "value"} <= turn.keys()


def _flow(names: Mapping[str, str]) -> str:
    """A mapping in YAML's flow style, for the command line."""
    return "{" + ", ".join(f"{ours}: {theirs}" for ours, theirs in names.items()) + "}"


# Messages and tools ---------------------------------------------------------------------------------------------------

Message: TypeAlias = dict[str, Any]
Tool: TypeAlias = dict[str, Any]

OTHER_ROLES = ("human", "gpt", "chatgpt", "model", "bot", "ai", "observation", "function_call", "function")
"""Names of roles in other data sets, for the advice in errors."""
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
    return {str(key): each for key, each in value.items() if each is not None}


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
        fix = tags_for(fields, {*ROLES, *OTHER_ROLES})
        raise SampleError(what, reason="message without a role", where=place, fix=fix)
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
    if "content" in fields:
        fields["content"] = _read_content(fields["content"], number, place)
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


def _read_content(content: object, number: int, place: str) -> str:
    if not isinstance(content, str):
        what = f"the content of message {number} is {type(content).__name__}, not text"
        raise SampleError(what, reason="content that is not text", where=place, fix="give text")
    return content


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
