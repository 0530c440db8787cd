"""What to set so that rows of an unknown shape are understood: `data.columns` and `data.tags`, as a user types them.

Told by what a field holds (a list of turns, a text) and by the names that other data sets give to the same thing. It
is advice in an error, never acted upon.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

QUESTIONS = ("instruction", "prompt", "question", "query", "input", "problem", "request", "human", "user", "source")
ANSWERS = ("output", "completion", "answer", "response", "reply", "solution", "target", "assistant", "gpt", "bot")
CONTEXTS = ("input", "context")
TEXTS = ("text", "content", "body", "document", "article", "code", "page", "story")
CONTENTS = ("content", "value", "text", "message", "says", "said", "utterance", "body")
GENERAL = "set data.format, and data.columns to what the fields are called"


def columns_for(fields: Mapping[str, Any], known: Collection[str], roles: Collection[str]) -> str:
    """What to do about a row of no known format. `known`: names of fields; `roles`: names of roles."""
    columns, turn = _columns(fields, known)
    if not columns:
        return GENERAL
    tags = "" if turn is None or _is_usual(turn) else f" and {tags_for(turn, roles)}"
    return f"set data.columns={_flow(columns)}{tags.replace(' and set ', ' and ')}"


def tags_for(turn: Mapping[str, Any], roles: Collection[str]) -> str:
    """What to do about a turn whose keys are unknown: the key that holds a role's name, and the one that holds text."""
    texts = {str(key): value for key, value in turn.items() if isinstance(value, str)}
    role = next((key for key, value in texts.items() if value.lower() in roles), None)
    others = [key for key in texts if key != role]
    content = next((key for key in others if key.lower() in CONTENTS), others[0] if len(others) == 1 else None)
    tags = {"role_tag": role, "content_tag": content}
    if role is None or content is None:
        return "set data.tags={role_tag: ..., content_tag: ...} to what a turn calls its role and its text"
    return f"set data.tags={_flow({tag: key for tag, key in tags.items() if key})}"


def _columns(fields: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, str], Mapping[str, Any] | None]:
    """Our name of a field -> the row's, and the first turn where the field is a list of turns."""
    pair = {kind: _first(fields, lambda name, kind=kind: name.startswith(kind)) for kind in ("chosen", "rejected")}
    if all(pair.values()):
        return {kind: str(name) for kind, name in pair.items()}, None
    for name, value in fields.items():
        if isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
            return {"conversations" if "from" in value[0] else "messages": name}, value[0]
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


def _first(fields: Mapping[str, Any], fits: Any) -> str | None:
    return next((name for name in fields if fits(str(name).lower())), None)


def _is_usual(turn: Mapping[str, Any]) -> bool:
    return {"role", "content"} <= turn.keys() or {"from", "value"} <= turn.keys()


def _flow(names: Mapping[str, str]) -> str:
    """As YAML on the command line."""
    return "{" + ", ".join(f"{ours}: {theirs}" for ours, theirs in names.items()) + "}"
