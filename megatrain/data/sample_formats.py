"""Converts rows in the common fine-tuning formats to samples.

A sample is a conversation, a text (possibly after a prompt that is not trained), or token ids:

    chat         messages [, tools, system]                      a list of {"role", "content"}, or its JSON text
    sharegpt     conversations [, tools, system]                 a list of {"from", "value"}, or its JSON text
    completion   prompt, completion [, tools, system]            two texts, or messages
    alpaca       instruction, output [, input, system, history]  a conversation
    text         text                                            every token is trained
    tokens       input_ids [, labels, masks]                     labels are -100 or the id at the same position
    preference   chosen, rejected [, prompt and others]          two samples: see `preferences.py`
    unpaired     label [, prompt, completion and others]         two samples: see there; never chosen by `auto`

`auto` chooses the first of preference, tokens, chat, sharegpt, completion, alpaca and text whose required fields a row
has. `columns` gives the names of fields in the user's data, `tags` the names of roles and keys in turns. chat and
sharegpt are distinguished by the keys of the first turn. A row of messages may bring arguments of the chat template,
`chat_template_kwargs`. Keys that say what is not trained are read by `loss_switches.py`. Rows labelled good or bad, as
data for KTO is, are refused unless the format is `unpaired`, since the bad answers would be learned too. Images of
chats are taken out first, if `Schema.images` asks for them (`images.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from megatrain.data.images import MARK, Image, place_before_question, take_images
from megatrain.data.loss_switches import ONLY_LAST, as_label, refuse_row_switches, take_switches
from megatrain.data.messages import (
    TAGS_FIX,
    Message,
    Tool,
    columns_for,
    read_calls,
    read_messages,
    read_tools,
    read_turns,
    read_values,
)
from megatrain.data.read_rows import SourceRow
from megatrain.data.token_files import TokenArray
from megatrain.errors import ConfigError, DataError, SampleError

Format: TypeAlias = Literal[
    "auto", "preference", "chat", "alpaca", "sharegpt", "completion", "text", "tokens", "unpaired"
]

VALUES = "chat_template_kwargs"
CONTEXT = ("tools", "system", VALUES)
TARGET_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
"""Fields of token ids that are 0 for those that are no targets: TRL's, and verl's."""
# Format -> its (required, optional) fields, in the order in which `auto` tries them.
FIELDS: dict[Format, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "preference": (("chosen", "rejected"), ("prompt", "instruction", "input", "conversations", *CONTEXT)),
    "tokens": (("input_ids",), ("labels", "attention_mask", *TARGET_MASKS)),
    "chat": (("messages",), CONTEXT),
    "sharegpt": (("conversations",), CONTEXT),
    "completion": (("prompt", "completion"), CONTEXT),
    "alpaca": (("instruction", "output"), ("input", "system", "history", VALUES)),
    "text": (("text",), ()),
    "unpaired": (
        ("label",),
        (*("prompt", "completion", "messages", "conversations", "instruction", "input", "output", "history"), *CONTEXT),
    ),
}
KNOWN_FIELDS = tuple(sorted({name for fields in FIELDS.values() for names in fields for name in names}))
# LLaMA-Factory's name of a tag -> (the role that it names, or None if it names a key of turns; its default names)
TAGS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "role_tag": (None, ("from",)),
    "content_tag": (None, ("value",)),
    "user_tag": ("user", ("human", "user")),
    "assistant_tag": ("assistant", ("gpt", "assistant", "chatgpt", "model", "bot")),
    "system_tag": ("system", ("system",)),
    "observation_tag": ("tool", ("observation", "tool", "function_response")),
    "function_tag": ("call", ("function_call",)),
}
WITH_TURNS: tuple[Format, ...] = ("auto", "chat", "sharegpt", "preference", "unpaired")
KEYS_OF_TURNS = {"role": "role_tag", "from": "role_tag", "content": "content_tag", "value": "content_tag"}
LABELS = ("label", "kto_tag", "desirable", "undesirable", "chosen", "rejected", "accepted", "preferred", "thumbs_up")
"""Columns that label an answer as good or bad if they hold booleans; also with the prefix `is_`."""
AMBIGUOUS_LABELS = ("label", "chosen", "rejected")
"""Labels that may also hold a class or an answer, so only booleans count in a single row."""
LABELLED = "says whether the answer is good or bad, as data for KTO does"
LABELLED_FIX = "set train.objective=kto, or keep the rows with good answers and remove the column"
MEDIA = ("image", "video", "audio")
SAID = ("system", "history", "messages", "conversations", "prompt", "instruction", "input", "completion", "output")
"""Fields of what is said, which may hold images."""
NOT_A_TARGET = -100


@dataclass(frozen=True)
class Schema:
    """How rows are read: their format, and the user's names. Raises `ConfigError` for an unknown column or tag."""

    format: Format = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)  # our name of a field -> the user's
    tags: Mapping[str, str] = field(default_factory=dict)
    images: str | None = None  # the user's column of a chat's images; None: only text is read

    def __post_init__(self) -> None:
        for name, theirs in self.columns.items():
            if name in KEYS_OF_TURNS:
                fix = f"set data.tags={{{KEYS_OF_TURNS[name]}: {theirs}}}"
                raise ConfigError(f"{name!r} is not a column, but a key of turns", where="data.columns", fix=fix)
        _require_known(self.columns, set(KNOWN_FIELDS), "data.columns")
        _require_known(self.tags, set(TAGS), "data.tags")
        _require_known([self.format], set(get_args(Format)), "data.format")

    def refuse_unused(self) -> None:
        """Raise `ConfigError` for columns and tags that the format does not use."""
        if self.tags and self.format not in WITH_TURNS:
            fix = f"leave data.tags out, or data.format={self.format}"
            raise ConfigError(f"{self.format} samples have no turns", where="data.tags", fix=fix)
        fields = FIELDS.get(self.format, (KNOWN_FIELDS, ()))
        for name in self.columns:
            if name not in {*fields[0], *fields[1]}:
                fix = f"they have {', '.join((*fields[0], *fields[1]))}"
                raise ConfigError(f"{self.format} samples have no {name!r}", where="data.columns", fix=fix)

    def column(self, name: str) -> str:
        """The user's name for field `name`."""
        return self.columns.get(name, name)

    def fits(self, fields: Mapping[str, Any]) -> bool:
        """Whether a row has all fields that the format requires."""
        return all(fields.get(self.column(name)) is not None for name in FIELDS[self.format][0])


@dataclass(frozen=True, eq=False)
class Sample:
    """What to train on: `messages`, or `text`, or `ids` with `trained`, the mask of targets of the same length."""

    origin: str  # the place of its row
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)  # arguments of the chat template, before those of the run
    untrained: frozenset[int] = frozenset()  # messages not trained: those of a prompt, and those with a weight of 0
    says_untrained: bool = False  # whether keys of its row say that messages are not trained
    prompt: str = ""  # precedes `text` and is not trained
    text: str | None = None
    ids: TokenArray | None = None
    trained: npt.NDArray[np.bool_] | None = None
    answer: Literal["", "chosen", "rejected", "desirable", "undesirable", "mismatched"] = ""
    """The sample's role in a pair, of a preference or with a label; the two samples of a pair are consecutive."""
    images: tuple[Image, ...] = ()
    """Those of the marks in `messages`, in order."""


def detect_schema(row: SourceRow, schema: Schema) -> Schema:
    """`schema`, with the format of `row` instead of `auto`. Raises `SampleError` if the row has no known format."""
    if schema.format == "chat" and schema.fits(row.fields):
        return _chat_or_sharegpt(row, schema) if schema.tags else schema
    if schema.format != "auto":
        return schema
    for name in FIELDS:
        candidate = replace(schema, format=name)
        if name == "unpaired" or not candidate.fits(row.fields):
            continue
        if name not in ("preference", "tokens", "text"):
            _refuse_half_a_pair(row)
        return _chat_or_sharegpt(row, candidate) if name in ("chat", "sharegpt") else candidate
    raise SampleError(
        f"none of the known formats: it holds {_named(row.fields)[:200]}",
        reason="of no known format",
        where=row.place,
        fix=columns_for({name: value for name, value in row.fields.items() if value is not None}),
    )


def _named(fields: Mapping[str, object]) -> str:
    """The names of a row's fields, for a message."""
    return ", ".join(f"{name!r}{' (null)' * (value is None)}" for name, value in fields.items()) or "nothing"


def _chat_or_sharegpt(row: SourceRow, schema: Schema) -> Schema:
    """`schema`, of chat or sharegpt, corrected to the other one if the tags or the keys of the first turn say so."""
    column = schema.column(FIELDS[schema.format][0][0])
    turns = read_turns(row.fields[column], column, row.place)
    first = turns[0] if isinstance(turns, Sequence) and turns and isinstance(turns[0], Mapping) else {}
    if schema.tags:
        usual = {"role_tag": "role", "content_tag": "content"} if "role" in first else {}
        return replace(
            schema,
            format="sharegpt",
            columns={**schema.columns, "conversations": column},
            tags={**usual, **schema.tags},
        )
    if "role" in first:
        return replace(schema, format="chat", columns={**schema.columns, "messages": column})
    if "from" in first:
        return replace(schema, format="sharegpt", columns={**schema.columns, "conversations": column})
    return schema


def _refuse_half_a_pair(row: SourceRow) -> None:
    """Raise `SampleError` for a row with a rejected answer, but no chosen one."""
    for name, value in row.fields.items():
        if name.lower().startswith("rejected") and isinstance(value, str | Sequence | Mapping) and value:
            what = f"{name!r} holds a rejected answer, but there is no 'chosen' one"
            fix = "set data.columns={chosen: ..., rejected: ...} and train.objective=dpo, or data.format, or remove it"
            raise SampleError(what, reason="half a preference", where=row.place, fix=fix)


def read_sample(row: SourceRow, schema: Schema) -> Sample:
    """The sample in `row`, by a schema whose format is not `auto`. Raises `SampleError` for an unusable row."""
    require_fields(row, schema)
    _refuse_labels(row, schema)
    required, optional = FIELDS[schema.format]
    known = {ONLY_LAST, *(schema.column(name) for name in (*required, *optional))}
    refuse_row_switches(row.fields, known, row.place, is_text=schema.format == "text")
    sample = _READERS[schema.format](row, schema) if schema.images is None else _read_with_images(row, schema)
    _require_text_only(row, sample)
    if not sample.messages:
        return sample
    values = row.fields.get(schema.column(VALUES))
    sample = replace(sample, values=read_values(values, schema.column(VALUES), row.place) if values else {})
    return _with_switches(sample, row)


def require_fields(row: SourceRow, schema: Schema) -> None:
    """Raise `SampleError` if a row lacks a field that its format requires."""
    if not schema.fits(row.fields):
        _refuse_labels(row, schema)
        missing = next(n for n in FIELDS[schema.format][0] if row.fields.get(schema.column(n)) is None)
        what = f"no {schema.column(missing)!r}, which {schema.format} samples have; it holds {_named(row.fields)}"
        fix = "add the field, or set data.columns to its name"
        raise SampleError(what, reason=f"without {schema.column(missing)!r}", where=row.place, fix=fix)


def _refuse_labels(row: SourceRow, schema: Schema) -> None:
    """Raise `SampleError` if a column labels the answer as good or bad, since bad answers must not be learned."""
    if schema.format in ("text", "tokens"):
        return
    required, optional = FIELDS[schema.format]
    fields = {schema.column(name) for name in (*required, *optional)}
    for name, value in row.fields.items():
        plain = name.lower().removeprefix("is_")
        if plain not in LABELS or name in fields:
            continue
        if isinstance(value, bool | np.bool_) or (plain not in AMBIGUOUS_LABELS and as_label(value) is not None):
            what = f"{name!r} {LABELLED}"
            raise SampleError(what, reason="labelled as good or bad", where=row.place, fix=LABELLED_FIX)


class LabelCheck:
    """Finds out whether a source's column `label` labels answers as good or bad.

    A boolean is refused in its row (`_refuse_labels`), but 0, 1 and texts may be classes. They are labels if all rows
    hold nothing else, which is known when the source has been read.
    """

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._classes: set[str] = set()

    def add(self, row: SourceRow, schema: Schema) -> None:
        """Note the label of a row that has been read by `schema`."""
        for name in () if schema.format in ("text", "tokens", "unpaired") else row.fields:
            if name.lower().removeprefix("is_") == "label" and (value := row.fields[name]) is not None:
                self._first.setdefault(name, row.place)
                if as_label(value) is None:
                    self._classes.add(name)

    def refuse_labels(self) -> None:
        """Raise `DataError` for a column that held nothing but 0, 1, true and false."""
        for name in self._first.keys() - self._classes:
            what = f"{name!r} is 0, 1, true or false in every row: it {LABELLED}"
            raise DataError(what, where=self._first[name], fix=LABELLED_FIX)


def _read_with_images(row: SourceRow, schema: Schema) -> Sample:
    """A conversation with its images, in messages that hold their marks."""
    assert schema.images is not None
    required, optional = FIELDS[schema.format]
    said = [schema.column(name) for name in SAID if name in (*required, *optional)]
    row, images, unplaced = take_images(row, schema.images, said)
    sample = _READERS[schema.format](row, schema)
    if not sample.messages:
        what = f"{schema.format} samples beside images: with data.images, all samples are chats"
        raise SampleError(what, reason="not a chat", where=row.place, fix="give messages")
    messages = place_before_question(sample.messages, unplaced, row.place) if unplaced else sample.messages
    if sum(message.get("content", "").count(MARK) for message in messages) != len(images):
        what = "an image that is not in the content of a message"
        raise SampleError(what, reason="images without a place", where=row.place, fix="put it into a content")
    return replace(sample, messages=messages, images=images)


def _require_text_only(row: SourceRow, sample: Sample) -> None:
    """Raise `SampleError` for a text with a placeholder (`<image>`) for media in a column, as in LLaVA's data."""
    for kind in MEDIA:
        contents = [message.get("content", "") for message in sample.messages]
        columns = [name for name in (kind, f"{kind}s") if row.fields.get(name)]
        if columns and any(f"<{kind}>" in text for text in (*contents, sample.prompt)):
            what = f"refers to {columns[0]!r} by <{kind}>; only text is trained"
            fix = f"set data.images={columns[0]}, or remove the sample" if kind == "image" else "remove the sample"
            raise SampleError(what, reason="content that is not text", where=row.place, fix=fix)


def require_json(sample: Sample) -> None:
    """Raise `SampleError` for a value of messages or tools that JSON does not have, such as bytes of a table, since
    templates would write the name of its type."""
    values: list[Any] = [*sample.messages, *sample.tools]
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
        elif not isinstance(value, str | int | float | None):
            what = f"holds {value!r:.80}, which no JSON can hold"
            fix = "write it as text or as a number"
            raise SampleError(what, reason="a value that is not JSON", where=sample.origin, fix=fix)


def _read_chat(row: SourceRow, schema: Schema) -> Sample:
    column = schema.column("messages")
    messages = read_messages(read_turns(row.fields[column], column, row.place), row.place)
    return Sample(row.place, _with_system(messages, row, schema), _tools(row, schema))


def _read_sharegpt(row: SourceRow, schema: Schema) -> Sample:
    column = schema.column("conversations")
    turns = read_turns(row.fields[column], column, row.place)
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        what = f"{column!r} is {type(turns).__name__}, not a list of turns"
        raise SampleError(what, reason="no messages", where=row.place)
    role_key, content_key = (schema.tags.get(key, TAGS[key][1][0]) for key in ("role_tag", "content_tag"))
    roles = {name: role for tag, (role, names) in TAGS.items() if role for name in names}
    roles |= {schema.tags[tag]: role for tag, (role, _) in TAGS.items() if role and tag in schema.tags}
    messages: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        for key in (role_key, content_key):
            if not isinstance(turn, Mapping) or turn.get(key) is None:
                what = f"message {number} has no {key!r}"
                raise SampleError(what, reason=f"message without {key!r}", where=row.place, fix=TAGS_FIX)
        content, role_name = turn[content_key], turn[role_key]
        role = roles.get(role_name) if isinstance(role_name, str) else None
        if role is None:
            what = f"message {number} has the role {role_name!r}"
            fix = f"known are {', '.join(roles)}; for others set data.tags={{user_tag: ..., assistant_tag: ...}}"
            raise SampleError(what, reason="unknown role", where=row.place, fix=fix)
        extra = {key: value for key, value in turn.items() if key not in (role_key, content_key)}
        if role == "call":
            messages.append({**extra, "role": "assistant", "tool_calls": read_calls(content, row.place)})
        else:
            messages.append({**extra, "role": role, "content": content})
    return Sample(row.place, _with_system(read_messages(messages, row.place), row, schema), _tools(row, schema))


def _read_completion(row: SourceRow, schema: Schema) -> Sample:
    prompt, completion = (row.fields[schema.column(name)] for name in ("prompt", "completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
        for name in CONTEXT:
            if row.fields.get(schema.column(name)):
                what = f"{schema.column(name)!r} beside a prompt that is text, not messages, which has no place for it"
                fix = "write the prompt as messages, or rename it to instruction and its answer to output"
                raise SampleError(what, reason=f"{name} beside a text", where=row.place, fix=fix)
        return Sample(row.place, prompt=prompt, text=completion)
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    completion = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    context = _with_system(read_messages(prompt, row.place), row, schema)
    messages = (*context, *read_messages(completion, row.place))
    return Sample(row.place, messages, _tools(row, schema), untrained=frozenset(range(len(context))))


def _read_alpaca(row: SourceRow, schema: Schema) -> Sample:
    messages: list[Message] = []
    for pair in _optional(row, schema, "history", list) or ():
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            what = f"{schema.column('history')!r} is not a list of pairs of texts"
            raise SampleError(what, reason="malformed history", where=row.place)
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    instruction = _text(row, schema, "instruction")
    more = _optional(row, schema, "input", str)
    question = f"{instruction}\n{more}" if instruction and more else instruction or more or ""
    if not question.strip():
        raise SampleError("an empty instruction", reason="empty instruction", where=row.place, fix="remove the sample")
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _text(row, schema, "output")})
    return Sample(row.place, _with_system(messages, row, schema))


def _read_tokens(row: SourceRow, schema: Schema) -> Sample:
    ids = _integers(row, schema, "input_ids")
    trained = np.ones(len(ids), dtype=np.bool_)
    if row.fields.get(schema.column("labels")) is not None:
        labels = _integers(row, schema, "labels")
        _require_length(len(labels), len(ids), row, schema.column("labels"))
        trained = labels != NOT_A_TARGET
        if (wrong := np.flatnonzero(trained & (labels != ids))).size:
            at = int(wrong[0])
            what = f"label {labels[at]} at position {at} is neither {NOT_A_TARGET} nor the id there, {ids[at]}"
            fix = "give each label at the position of its token; do not shift labels"
            raise SampleError(what, reason="labels that are not the ids", where=row.place, fix=fix)
    for name in TARGET_MASKS:
        if row.fields.get(schema.column(name)) is not None:
            mask = _integers(row, schema, name)
            _require_length(len(mask), len(ids), row, schema.column(name))
            trained = trained & (mask != 0)
    if row.fields.get(schema.column("attention_mask")) is not None:
        mask = _integers(row, schema, "attention_mask") != 0
        _require_length(len(mask), len(ids), row, schema.column("attention_mask"))
        kept = np.flatnonzero(mask)
        if kept.size and kept[-1] - kept[0] + 1 != kept.size:
            raise SampleError("an attention mask with a hole in it", reason="a masked middle", where=row.place)
        ids, trained = ids[mask], trained[mask]
    return Sample(row.place, ids=ids, trained=trained)


_READERS = {
    "chat": _read_chat,
    "sharegpt": _read_sharegpt,
    "completion": _read_completion,
    "alpaca": _read_alpaca,
    "text": lambda row, schema: Sample(row.place, text=_text(row, schema, "text")),
    "tokens": _read_tokens,
}


def _with_switches(sample: Sample, row: SourceRow) -> Sample:
    """`sample`, with what the keys of its messages and of the row say about what is trained (see `loss_switches`)."""
    messages, off = take_switches(sample.messages, row.place)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if (only_last := row.fields.get(ONLY_LAST)) not in (None, ""):
        if as_label(only_last) is None:
            what = f"{ONLY_LAST!r} is {only_last!r}, not true or false"
            raise SampleError(what, reason=f"malformed {ONLY_LAST!r}", where=row.place, fix="correct it")
        off |= {*(answers[:-1] if as_label(only_last) else ())}
    return replace(sample, messages=messages, untrained=sample.untrained | off, says_untrained=bool(off))


def _with_system(messages: Sequence[Message], row: SourceRow, schema: Schema) -> tuple[Message, ...]:
    """`messages`, after a system message from the column `system` if there is one."""
    system = _optional(row, schema, "system", str)
    if not system:
        return tuple(messages)
    if messages[0]["role"] == "system":
        what = f"a system message, but also a column {schema.column('system')!r}"
        raise SampleError(what, reason="two system messages", where=row.place, fix="keep one of them")
    return ({"role": "system", "content": system}, *messages)


def _tools(row: SourceRow, schema: Schema) -> tuple[Tool, ...]:
    tools = row.fields.get(schema.column("tools"))
    return read_tools(tools, row.place) if tools else ()


def _text(row: SourceRow, schema: Schema, name: str) -> str:
    value = row.fields[schema.column(name)]
    return value if isinstance(value, str) else _wrong_type(row, schema, name, value, str)


def _optional(row: SourceRow, schema: Schema, name: str, kind: type) -> Any:
    value = row.fields.get(schema.column(name))
    return value if value is None or isinstance(value, kind) else _wrong_type(row, schema, name, value, kind)


def _integers(row: SourceRow, schema: Schema, name: str) -> npt.NDArray[np.int64]:
    values = row.fields[schema.column(name)]
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        _wrong_type(row, schema, name, values, list)
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # nested lists of different lengths, or numbers that are too large
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        what = f"{schema.column(name)!r} is not a list of integers"
        raise SampleError(what, reason=f"malformed {schema.column(name)!r}", where=row.place)
    return array.astype(np.int64)


def _require_length(length: int, expected: int, row: SourceRow, name: str) -> None:
    if length != expected:
        what = f"{length} {name} for {expected} ids"
        raise SampleError(what, reason=f"{name} of another length", where=row.place)


def _wrong_type(row: SourceRow, schema: Schema, name: str, value: object, kind: type) -> NoReturn:
    what = f"{schema.column(name)!r} is {type(value).__name__}, not {kind.__name__}"
    raise SampleError(what, reason=f"{schema.column(name)!r} of another type", where=row.place)


def _require_known(names: Mapping[str, str] | Sequence[str], known: set[str], where: str) -> None:
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, sorted(known), n=1)
            fix = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"unknown name {name!r}", where=where, fix=fix)
