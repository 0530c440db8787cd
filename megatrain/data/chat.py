"""Renders conversations as text, and marks the characters to train on.

The text is the chat template's, rendered by the library: the tokenizer's own template, one that the user chose because
the model has none (`chatml`, `none`, or a file), or TRL's variant for training (`trl`). What is trained is told by the
template where it has `{% generation %}` marks, and by `assistant_turns.py` where it has none.

A conversation is refused with the template's own words where the template refuses it, and where the template writes
less than was said: a role that it skips, tools that it does not know. Only reasoning may be missing, which many
templates drop from earlier turns on purpose; that is noted and counted. Left out: tokens (`encode.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from megatrain.data.assistant_turns import Span, Turns, Unclear, Unrendered, tail_of_last
from megatrain.data.messages import Message, Tool
from megatrain.data.sample_formats import Sample
from megatrain.data.tokenizer import Tokenizer, marked_chat, special_tokens
from megatrain.errors import DataError, SampleError, first_line
from megatrain.system.paths import missing, read_text, usable_path
from megatrain.system.time_limit import OutOfTime, within

T = TypeVar("T")
TrainOn: TypeAlias = Literal["assistant", "last", "all"]

CHOICES = "`chatml`, `none` (contents on lines of their own), or a .jinja file"
CHATML_END = "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + 'END' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NONE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
)
TRL = "trl"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
SECONDS = 10.0
"""Of work that a template may take for one conversation: a thousand times what the longest take."""
EMPTY_ANSWER = "have an empty answer, of which only the end is learned"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class MarkedText:
    """A conversation as text. `spans` are trained, in order and disjoint; `notes` are for the statistics."""

    text: str
    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """A template and what it is handed beside the messages. Make it by `choose_template`."""

    tokenizer: Tokenizer
    name: str
    own: str | None = None  # its text; None: the tokenizer's, which may have one for tools and one without
    values: Mapping[str, Any] = field(default_factory=dict)  # `enable_thinking`, say

    def text(self, tools: Sequence[Tool]) -> str:
        """The Jinja text for a conversation with these tools."""
        try:
            text: str = self.tokenizer.get_chat_template(self.own, list(tools) or None)
        except ValueError as error:  # several templates, and none for this
            raise DataError(f"no chat template ({first_line(error)})", where=self.name, fix="name a file") from error
        return text

    @property
    def saved(self) -> str:
        """The Jinja text that a model which is trained with it is saved with: TRL's variant is for training alone."""
        return ChatTemplate(self.tokenizer, self.name).text(()) if self.name == TRL else self.text(())

    @cached_property
    def special(self) -> list[str]:
        """What is read as a token where a message spells it out."""
        return special_tokens(self.tokenizer)

    @cached_property
    def marks_ends(self) -> bool:
        """Whether a turn is closed by something, so that a model can learn to stop; True where that cannot be told."""
        tail = tail_of_last(_Rendering(self, (), "object"))
        return tail is None or bool(tail.strip())


def choose_template(
    tokenizer: Tokenizer, choice: str = "model", values: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """The template called `choice`: the model's own (`model`), TRL's variant of it (`trl`), `chatml`, `none`, a file's.

    The built-in ChatML closes a turn with the end of text too where the vocabulary has no `<|im_end|>`, so that a model
    can stop. Raises `DataError` where there is no such template.
    """
    chosen = dict(values or {})
    if choice in ("model", TRL) and not tokenizer.chat_template:
        what = "the model has no chat template"
        raise DataError(what, where=str(tokenizer.name_or_path), fix=f"set data.chat_template: {CHOICES}")
    if choice == TRL:
        return ChatTemplate(tokenizer, TRL, _training_template(tokenizer), chosen)
    if choice == "model":
        return ChatTemplate(tokenizer, f"of {tokenizer.name_or_path or 'the tokenizer'}", None, chosen)
    if choice == "chatml":
        end = CHATML_END if CHATML_END in tokenizer.get_vocab() else CHATML_END + (tokenizer.eos_token or "")
        return ChatTemplate(tokenizer, choice, CHATML.replace("END", end), chosen)
    if choice == "none":
        return ChatTemplate(tokenizer, choice, NONE, chosen)
    path = usable_path(choice, where="data.chat_template", error=DataError)
    if not path.is_file():
        if path.exists() or path.suffix or path.parent != Path():
            raise missing(path, DataError)
        raise DataError(
            f"no chat template is called {choice!r}", where="data.chat_template", fix=f"name `model`, `trl`, {CHOICES}"
        )
    try:
        return ChatTemplate(tokenizer, choice, read_text(path), chosen)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read ({first_line(error)})", where=choice, fix="name a text file") from error


def _training_template(tokenizer: Tokenizer) -> str | None:
    """What TRL puts in the place of the model's template for `assistant_only_loss`; `None` where it keeps the model's.

    Raises `DataError` where TRL is not installed or has none for the model.
    """
    try:
        from trl.chat_template_utils import get_training_chat_template
    except ImportError as error:
        what, fix = "trl needs the `trl` package, which is not installed", "pip install trl, or leave the key out"
        raise DataError(what, where="data.chat_template", fix=fix) from error
    try:
        if MARKS.search(tokenizer.get_chat_template()):
            return None
        found: str | None = get_training_chat_template(tokenizer)
    except ValueError as error:
        what = f"TRL has no training template for the model's ({first_line(error)})"
        fix = "leave the key out, or name a file with `{% generation %}` marks"
        raise DataError(what, where="data.chat_template", fix=fix) from error
    return found


def mark_chat(sample: Sample, template: ChatTemplate, train_on: TrainOn) -> MarkedText:
    """The text of `sample`, a conversation, and what of it is trained: all assistant turns, the last, or everything.

    A turn is trained with the mark that ends it and without the header that the generation prompt gives. Where the
    template marks what is generated, that is trained. Raises `SampleError` where the template refuses the sample or
    leaves out part of it, and where it cannot be told which characters a turn is.
    """
    rendering, turns = _rendered(sample, template, sample.tools)
    if lost := turns.left_out():
        raise _refused(f"does not write {lost[0]}", "message that the template leaves out", sample, template)
    if sample.tools and _rendered(sample, template, ())[1].text == turns.text:
        raise _refused("does not write the tools", "tools that the template leaves out", sample, template)
    notes = _notes(sample, turns.text, template)
    if train_on == "all":
        return MarkedText(turns.text, (Span(0, len(turns.text)),), notes)
    assistant = [index for index, message in enumerate(sample.messages) if message["role"] == "assistant"]
    chosen = [index for index in assistant if index not in sample.untrained][-1 if train_on == "last" else 0 :]
    try:
        if not MARKS.search(rendering.text):
            spans = turns.spans(chosen)
        else:
            spans = _marked_spans(rendering, turns)
            if chosen != assistant:
                own = turns.spans(chosen)
                spans = [
                    span for span in spans if any(span.start < turn.stop and turn.start < span.stop for turn in own)
                ]
    except Unclear as error:
        what = f"does not tell what is trained: {error}"
        raise _refused(what, "turns that cannot be told apart", sample, template) from error
    return MarkedText(turns.text, tuple(spans), notes)


def prompt_text(messages: Sequence[Message], template: ChatTemplate) -> str:
    """The text after which the model answers the last of `messages`.

    Raises `DataError` where the template refuses the chat.
    """
    try:
        return _Rendering(template, (), "object").prompt(messages)
    except Unrendered as error:
        raise DataError(f"refuses the chat ({error})", where=f"the chat template {template.name}") from error


class _Rendering:
    """A `turns.Renderer`: the template with the tools of one sample.

    Arguments of calls are objects, but JSON text for a template that glues them to text (DeepSeek's).
    """

    def __init__(self, template: ChatTemplate, tools: Sequence[Tool], arguments: Literal["object", "json"]) -> None:
        self.template = template
        self.tools: list[Any] | None = [dict(tool) for tool in tools] or None
        self.text = template.text(tools)
        self.arguments = arguments

    def whole(self, messages: Sequence[Message]) -> str:
        return self._render(messages, add_generation_prompt=False)

    def prompt(self, messages: Sequence[Message]) -> str:
        return self._render(messages, add_generation_prompt=True)

    def marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text and what lies between its marks of generation."""
        tokenizer, values = self.template.tokenizer, self.template.values
        shaped = self._shaped(messages)
        return self._in_time(lambda: marked_chat(tokenizer, shaped, self.tools, template=self.text, values=values))

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        apply: Any = self.template.tokenizer.apply_chat_template
        shaped = self._shaped(messages)

        def render() -> str:
            try:
                text: str = apply(
                    shaped,
                    tools=self.tools,
                    chat_template=self.text,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self.template.values,
                )
            except Exception as error:  # a template is a program: it raises by intention, and what its mistakes raise
                raise Unrendered(first_line(error)) from error
            return text

        return self._in_time(render)

    def _in_time(self, render: Callable[[], T]) -> T:
        """What `render` returns. Raises `DataError` for a template that does not end."""
        where = f"the chat template {self.template.name}"
        fix = "correct it, or choose another data.chat_template"
        if _raises_to_a_power(self.text):  # in one call into C, which no limit of time can end
            raise DataError("raises a number to a power, which may never end", where=where, fix=fix)
        try:
            return within(SECONDS, render)
        except OutOfTime as error:
            raise DataError(f"does not end ({error})", where=where, fix=fix) from error

    def _shaped(self, messages: Sequence[Message]) -> list[Message]:
        return list(messages) if self.arguments == "object" else [_with_json_arguments(message) for message in messages]


@lru_cache(maxsize=16)
def _raises_to_a_power(template: str) -> bool:
    """Whether `**` stands between two values of a template, and not before the arguments of a call."""
    import jinja2

    try:
        tokens = [(kind, value) for _, kind, value in jinja2.Environment().lex(template) if kind != "whitespace"]
    except jinja2.TemplateError:
        return False  # whoever renders it says what is wrong
    return any(
        token == ("operator", "**") and before not in (("operator", "("), ("operator", ","))
        for before, token in pairwise(tokens)
    )


def _rendered(sample: Sample, template: ChatTemplate, tools: Sequence[Tool]) -> tuple[_Rendering, Turns]:
    """`sample` with these tools. What the template refuses with objects for arguments is tried with JSON text."""
    refusals: list[Unrendered] = []
    has_calls = any("tool_calls" in message for message in sample.messages)
    shapes: tuple[Literal["object", "json"], ...] = ("object", "json") if has_calls else ("object",)
    for arguments in shapes:
        rendering = _Rendering(template, tools, arguments)
        try:
            closing = template.tokenizer.eos_token or ""
            return rendering, Turns(rendering, sample.messages, closing=closing, marks_ends=template.marks_ends)
        except Unrendered as error:
            refusals.append(error)
    what = f"refuses the sample: {refusals[0]}"
    raise _refused(what, "refused by the chat template", sample, template) from refusals[0]


def _marked_spans(rendering: _Rendering, turns: Turns) -> list[Span]:
    """What the template marks as generated."""
    text, marks = rendering.marked(turns.messages)
    if text != turns.text:
        raise Unclear("it writes another text when it is asked for its marks")
    return [Span(start, stop) for start, stop in marks if start < stop]


def _notes(sample: Sample, text: str, template: ChatTemplate) -> tuple[str, ...]:
    notes = []
    said = [message.get("content", "") for message in sample.messages]
    if any(token in text for text in said for token in template.special):
        notes.append("spell a special token, which is read as one")
    if any(thought not in text for message in sample.messages for thought in _thoughts(message)):
        notes.append("hold reasoning that the template leaves out")
    answers = [message for index, message in enumerate(sample.messages) if index not in sample.untrained]
    if any(_says_nothing(message) for message in answers if message["role"] == "assistant"):
        notes.append(EMPTY_ANSWER)
    if not template.marks_ends:
        notes.append("have turns that nothing ends, so that no end is learned")
    return tuple(notes)


def _says_nothing(message: Message) -> bool:
    return not (message.get("content", "").strip() or message.get("tool_calls") or _thoughts(message))


def _thoughts(message: Message) -> list[str]:
    if message["role"] != "assistant":
        return []
    apart = [message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)]
    return [thought.strip() for thought in (*apart, *THOUGHT.findall(message.get("content", ""))) if thought.strip()]


def _refused(what: str, reason: str, sample: Sample, template: ChatTemplate) -> SampleError:
    fix = "correct the sample, or choose another data.chat_template"
    return SampleError(f"the chat template {template.name} {what}", reason=reason, where=sample.origin, fix=fix)


def _with_json_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
