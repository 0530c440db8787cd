"""Renders conversations as text, and marks the characters to train on.

transformers renders the text by a chat template: the tokenizer's own, one that the user chose for a model without one
(`chatml`, `none`, or a file), or TRL's variant for training (`trl`). The spans to train on come from the template's
`{% generation %}` marks if it has them, and from `assistant_turns.py` otherwise.

A conversation is refused if the template refuses it, with the template's own message, or if the template omits part of
it: a role that it skips, tools that it does not support. Only reasoning may be missing, since many templates drop it
from earlier turns on purpose; such samples are counted. Not here: tokens of samples (`encode.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeAlias

from megatrain.data.assistant_turns import (
    RenderError,
    Span,
    Turns,
    UnclearTurn,
    text_after_last_turn,
    text_of_next,
    unused_characters,
)
from megatrain.data.images import as_parts
from megatrain.data.messages import Message, Tool
from megatrain.data.sample_formats import Sample
from megatrain.data.tokenizer import Tokenizer, encode_with_offsets, special_tokens
from megatrain.errors import DataError, SampleError, first_line
from megatrain.system.paths import missing, read_text, usable_path

Shape: TypeAlias = tuple[Callable[[Message], Message], ...]
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
NOW = "strftime_now"
NOW_CALL = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
NOW_ASKED = re.compile(r"strftime_now\s+is\s+(not\s+)?defined")
DIRECTIVES = (*"aAbBcCdDeFGhHIjklmMnpPrRStTuUVwWxXyYzZfs", *(f"-{code}" for code in "deHIjklmMSUVWy"))
"""Codes of `strftime`, Python's and those of the C library on Linux."""
GENERATION_MARK = re.compile(r"\{%(-?)\s*generation\s*(-?)%\}")
END_MARK = re.compile(r"\{%(-?)\s*endgeneration\s*(-?)%\}")
THINK_BLOCK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
MARKED_BY_TRL = " (data.chat_template=trl has marks for the templates of many models)"
EMPTY_ANSWER = "with an empty answer, of which only the end is learned"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class MarkedText:
    """A conversation as text. `spans` are the characters to train on, in order and disjoint; `notes` are remarks that
    the statistics count."""

    text: str
    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and its arguments besides the messages. Made by `choose_template`."""

    tokenizer: Tokenizer
    name: str
    own: str | None = None  # Jinja text; None: the tokenizer's, which may have another one for tools
    values: Mapping[str, Any] = field(default_factory=dict)  # template variables: `enable_thinking`, say
    moment: datetime | None = None  # what `strftime_now` of a template tells; None: the time of each rendering
    in_parts: bool = False  # whether it gets contents as lists of parts, as templates with images expect them

    def text(self, tools: Sequence[Tool]) -> str:
        """The Jinja text for a conversation with these tools. Raises `DataError` if there is none."""
        try:
            text: str = self.tokenizer.get_chat_template(self.own, list(tools) or None)
        except ValueError as error:  # several templates, none of them for this case
            raise DataError(f"no chat template ({first_line(error)})", where=self.name, fix="name a file") from error
        return text

    @property
    def saved_text(self) -> str:
        """The Jinja text to save with the trained model: TRL's variant is for training only, so there the model's."""
        return ChatTemplate(self.tokenizer, self.name).text(()) if self.name == TRL else self.text(())

    @cached_property
    def special(self) -> list[str]:
        """The special tokens, which are read as tokens if a message contains their text."""
        return special_tokens(self.tokenizer)

    @cached_property
    def has_end_marker(self) -> bool:
        """Whether the template ends a turn with a marker, from which a model learns to stop; True if unknown."""
        after = text_after_last_turn(_Renderer(self))
        return after is None or bool(after.strip())

    @cached_property
    def closers(self) -> dict[str, str]:
        """Role of a message -> the added token that opens it and so ends the assistant's turn before it, for a template
        without end markers; empty if there are none."""
        if self.has_end_marker:
            return {}
        renderer, closers = _Renderer(self), dict[str, str]()
        added = {token.content for token in self.tokenizer.added_tokens_decoder.values()} - {self.tokenizer.bos_token}
        for role in ("user", "tool"):
            after = text_of_next(renderer, role).lstrip()
            if opening := max((token for token in added if after.startswith(token)), key=len, default=""):
                closers[role] = opening
        return closers


def choose_template(
    tokenizer: Tokenizer, choice: str = "model", values: Mapping[str, Any] | None = None, moment: datetime | None = None
) -> ChatTemplate:
    """The template called `choice`: `model` (the model's own), `trl` (TRL's variant of it), `chatml`, `none`, or the
    path of a file.

    values: template variables. moment: see `ChatTemplate`. If the vocabulary has no `<|im_end|>`, the built-in ChatML
    also ends a turn with the end-of-text token, so that the model can stop. Raises `DataError` if there is no such
    template.
    """
    chosen = dict(values or {})
    if choice in ("model", TRL) and not tokenizer.chat_template:
        what = "the model has no chat template"
        raise DataError(what, where=str(tokenizer.name_or_path), fix=f"set data.chat_template: {CHOICES}")
    if choice == TRL:
        return ChatTemplate(tokenizer, TRL, _training_template(tokenizer), chosen, moment)
    if choice == "model":
        return ChatTemplate(tokenizer, f"of {tokenizer.name_or_path or 'the tokenizer'}", None, chosen, moment)
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
        return ChatTemplate(tokenizer, choice, read_text(path), chosen, moment)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read ({first_line(error)})", where=choice, fix="name a text file") from error


def _training_template(tokenizer: Tokenizer) -> str | None:
    """The template that TRL uses instead of the model's for `assistant_only_loss`; None if it keeps the model's.

    Raises `DataError` if TRL is not installed or has no template for the model.
    """
    try:
        from trl.chat_template_utils import get_training_chat_template
    except ImportError as error:
        what, fix = "trl needs the `trl` package, which is not installed", "pip install trl, or leave the key out"
        raise DataError(what, where="data.chat_template", fix=fix) from error
    try:
        if GENERATION_MARK.search(tokenizer.get_chat_template()):
            return None
        text: str | None = get_training_chat_template(tokenizer)
    except ValueError as error:
        what = f"TRL has no training template for the model's ({first_line(error)})"
        fix = "leave the key out, or name a file with `{% generation %}` marks"
        raise DataError(what, where="data.chat_template", fix=fix) from error
    return text


def mark_chat(sample: Sample, template: ChatTemplate, train_on: TrainOn) -> MarkedText:
    """The text of a conversation, with the spans to train on: all assistant turns, the last one, or everything.

    A turn is trained with its end marker and without its header, which the generation prompt provides. If the template
    has generation marks, the marked text is trained. Raises `SampleError` if the template refuses the sample or omits
    part of it, and if the span of a turn cannot be determined.
    """
    renderer, turns = _rendered(sample, template, sample.tools)
    if missing_parts := turns.missing_parts():
        raise _refused(f"does not write {missing_parts[0]}", "message that the template leaves out", sample, template)
    if sample.tools and _rendered(sample, template, ())[1].text == turns.text:
        raise _refused("does not write the tools", "tools that the template leaves out", sample, template)
    notes, text = _notes(sample, turns.text, template), turns.text + turns.closing
    if train_on == "all":
        if sample.says_untrained:
            what, fix = "a key says that some of it is not trained, but data.train_on=all trains all text", "remove one"
            raise SampleError(what, reason="a key that may say what is trained", where=sample.origin, fix=fix)
        return MarkedText(text, (Span(0, len(text)),), notes)
    assistant = [index for index, message in enumerate(sample.messages) if message["role"] == "assistant"]
    chosen = [index for index in assistant if index not in sample.untrained][-1 if train_on == "last" else 0 :]
    try:
        if not GENERATION_MARK.search(renderer.text):
            spans = turns.spans(chosen)
        else:
            spans = _marked_spans(renderer, turns)
            if chosen != assistant:
                trained = turns.spans(chosen)
                spans = [
                    one for one in spans if any(one.start < turn.stop and turn.start < one.stop for turn in trained)
                ]
    except UnclearTurn as error:
        what = f"does not show which characters to train on: {error}"
        raise _refused(f"{what}{MARKED_BY_TRL}", "turns that cannot be found in the text", sample, template) from error
    return MarkedText(text, tuple(spans), notes)


def chat_prompt_ids(messages: Sequence[Message], template: ChatTemplate) -> list[int]:
    """The ids of `messages` with the generation prompt, which the model continues with its answer.

    Raises `DataError` if the template refuses the messages.
    """
    try:
        text = _Renderer(template).prompt(messages)
    except RenderError as error:
        raise DataError(f"refuses the chat ({error})", where=f"the chat template {template.name}") from error
    ((ids, _),) = encode_with_offsets(template.tokenizer, [text], special_tokens="read")
    return [int(token) for token in ids]


class _Renderer:
    """An `assistant_turns.Renderer`: a template with the tools of one sample.

    shape: changes of each message to what the template expects (see `_rendered`). values: the sample's own arguments.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tools: Sequence[Tool] = (),
        shape: Shape = (),
        values: Mapping[str, Any] | None = None,
    ) -> None:
        self.template = template
        self.values = {**template.values, **(values or {})}
        self.tools: list[Any] | None = [dict(tool) for tool in tools] or None
        self.text = _with_clock(template.text(tools), template.moment)
        self.shape = shape

    def conversation(self, messages: Sequence[Message]) -> str:
        return self._render(messages, add_generation_prompt=False)

    def prompt(self, messages: Sequence[Message]) -> str:
        return self._render(messages, add_generation_prompt=True)

    def marked(self, messages: Sequence[Message], start: str, stop: str) -> str:
        """The text of a finished conversation, with the character `start` where each generation block of the template
        begins and `stop` where it ends.

        An empty `if` beside each character takes over the mark's `-`, by which Jinja removes white space.
        """
        template = GENERATION_MARK.sub(rf"{{%\1 generation %}}{start}{{% if 0 %}}{{% endif \2%}}", self.text)
        template = END_MARK.sub(rf"{{%\1 if 0 %}}{{% endif %}}{stop}{{% endgeneration \2%}}", template)
        return self._render(messages, add_generation_prompt=False, template=template)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool, template: str = "") -> str:
        apply: Any = self.template.tokenizer.apply_chat_template
        try:
            text: str = apply(
                self._adapted(messages),
                tools=self.tools,
                chat_template=template or self.text,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.values,
            )
        except Exception as error:  # templates are programs, and may raise anything
            raise RenderError(first_line(error)) from error
        return text

    def _adapted(self, messages: Sequence[Message]) -> list[Message]:
        for change in (*self.shape, *([as_parts] if self.template.in_parts else [])):
            messages = [change(message) for message in messages]
        return list(messages)


def dates_in(template: str, moment: datetime) -> list[str]:
    """What a template writes of `moment`: the dates of its calls of `strftime_now`, or the moment if one is unclear."""
    dates = [moment.strftime(call[2]) for call in NOW_CALL.finditer(template)]
    return [*dates, moment.isoformat()] if NOW in NOW_ASKED.sub("", NOW_CALL.sub("", template)) else dates


def _with_clock(template: str, moment: datetime | None) -> str:
    """`template`, whose `strftime_now` tells `moment`.

    transformers passes no functions to templates, so a macro takes the place of its own. The line end behind it is
    removed by `trim_blocks`, which keeps the white space of the template as it is.
    """
    if moment is None or NOW not in template:
        return template
    told = {f"%{code}": moment.strftime(f"%{code}") for code in DIRECTIVES}
    steps = [("%%", "\0"), *told.items(), ("\0", "%")]
    filters = " | ".join(f"replace({json.dumps(code)}, {json.dumps(text)})" for code, text in steps)
    return f"{{%- macro {NOW}(format) -%}}{{{{ format | {filters} }}}}{{%- endmacro %}}\n{template}"


def _rendered(sample: Sample, template: ChatTemplate, tools: Sequence[Tool]) -> tuple[_Renderer, Turns]:
    """`sample` rendered with these tools.

    If the template refuses calls, their arguments are tried as JSON text and a missing content as an empty one, for
    templates that concatenate these with text (DeepSeek's).
    """
    refusals: list[RenderError] = []
    has_calls = any("tool_calls" in message for message in sample.messages)
    for shape in CALL_SHAPES if has_calls else CALL_SHAPES[:1]:
        renderer = _Renderer(template, tools, shape, sample.values)
        try:
            eos, has_end_marker = template.tokenizer.eos_token or "", template.has_end_marker
            closers = {} if GENERATION_MARK.search(renderer.text) else template.closers
            return renderer, Turns(renderer, sample.messages, eos=eos, has_end_marker=has_end_marker, closers=closers)
        except RenderError as error:
            refusals.append(error)
    what = f"refuses the sample: {refusals[0]}"
    raise _refused(what, "refused by the chat template", sample, template) from refusals[0]


def _marked_spans(renderer: _Renderer, turns: Turns) -> list[Span]:
    """The spans between the template's generation marks, found by characters that it is made to write at the marks.

    transformers takes the length of the output so far instead. That is wrong in a macro, a `set` block or a filter,
    which are written to the output as a whole at their end.
    """
    start, stop = unused_characters(turns.text, 2)
    try:
        pieces = re.split(f"([{start}{stop}])", renderer.marked(turns.messages, start, stop))
    except RenderError as error:
        raise UnclearTurn(f"it fails when it writes a character at each generation mark ({error})") from error
    marks = pieces[1::2]
    if "".join(pieces[::2]) != turns.text or marks != [start, stop] * (len(marks) // 2):
        raise UnclearTurn("its generation marks do not survive in the text")
    positions = list(accumulate(len(piece) for piece in pieces[::2]))
    return [Span(*pair) for pair in zip(positions[::2], positions[1::2], strict=False) if pair[0] < pair[1]]


def _notes(sample: Sample, text: str, template: ChatTemplate) -> tuple[str, ...]:
    notes = []
    contents = [message.get("content", "") for message in sample.messages]
    if any(token in content for content in contents for token in template.special):
        notes.append("with the text of a special token, which is read as the token")
    if any(reasoning not in text for message in sample.messages for reasoning in _reasoning(message)):
        notes.append("with reasoning that the template leaves out")
    answers = [message for index, message in enumerate(sample.messages) if index not in sample.untrained]
    if any(_is_empty(message) for message in answers if message["role"] == "assistant"):
        notes.append(EMPTY_ANSWER)
    if template.closers:
        tokens = " or ".join(dict.fromkeys(template.closers.values()))
        notes.append(f"with turns that end with the token of the next message, {tokens}: nothing else ends them")
    elif not template.has_end_marker:
        notes.append("with turns that have no end marker, so the model does not learn to stop")
    return tuple(notes)


def _is_empty(message: Message) -> bool:
    return not (message.get("content", "").strip() or message.get("tool_calls") or _reasoning(message))


def _reasoning(message: Message) -> list[str]:
    """The reasoning in an assistant's message: under keys of its own, and in `<think>` blocks of its content."""
    if message["role"] != "assistant":
        return []
    keyed = [message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)]
    return [text.strip() for text in (*keyed, *THINK_BLOCK.findall(message.get("content", ""))) if text.strip()]


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


def _with_content(message: Message) -> Message:
    return {"content": "", **message}


CALL_SHAPES: tuple[Shape, ...] = ((), (_with_json_arguments,), (_with_content,), (_with_json_arguments, _with_content))
