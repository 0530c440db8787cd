"""Finds where the assistant's turns are in the text that a chat template renders.

A turn is what the model writes: it starts after its prompt and includes its end marker (`<|im_end|>`, say), but not the
white space after it. Templates do not report where turns are, so the spans are derived by comparing renderings, without
searching for contents, a list of markers or rules by model family.

* A turn starts where its prompt ends: the rendering of the messages before it, with the generation prompt. It ends
  where the rendering of the messages up to and including it ends.
* For most templates both are prefixes of the full text. Other templates write a message differently once more messages
  follow: Qwen3 and DeepSeek-R1 drop reasoning, GPT-OSS ends the last turn with another marker, Mistral moves tools and
  system text to the last question. For these, the full and the shorter rendering are aligned by an *anchor*: a
  private-use character inserted after the text of one message in both. Removing the anchor must give the rendering
  without it, so an anchor never changes the text; and the text after the anchor must agree in both.
* A turn starts earlier if its prompt writes more than the finished turn keeps (`<think>` and a line end, where the turn
  has `<think></think>`): where the two part, if that is behind the name of the role.
* Some templates write no end marker, since the token that opens the next message ends the turn (GLM-4.5: `<|user|>`, or
  `<|observation|>` after a call; the model stops there). That token is then the end of the turn, and is appended to a
  conversation that ends with one.
* A turn for which none of this works is refused with the reason. Nothing is guessed.

Not here: tokens (`encode.py`), and templates whose `{% generation %}` marks give the spans (`chat.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, islice, pairwise, takewhile
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]


class Span(NamedTuple):
    """Characters `start` to `stop` of a text."""

    start: int
    stop: int


class UnclearTurn(Exception):
    """The position of a turn cannot be determined. The message says which turn, and why."""


class RenderError(Exception):
    """Raised by a `Renderer` if the template refuses the messages; the message is the template's own."""


class Renderer(Protocol):
    """A chat template with everything but the messages fixed. Both methods raise `RenderError`."""

    def conversation(self, messages: Sequence[Message]) -> str:
        """The text of a finished conversation, without a generation prompt."""

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text of `messages` with the generation prompt, after which the model writes its turn."""


_Kind: TypeAlias = Literal["conversation", "prompt"]
"""Which method of `Renderer` renders a text."""


class Turns:
    """The assistant's turns of one conversation. Renderings are cached, since turns share them.

    eos: the end-of-text token, which a template may append after the last message and which belongs to no turn.
    has_end_marker: whether the template writes an end marker after a turn (see `text_after_last_turn`).
    closers: role of the next message -> the token that opens it and so ends the turn before; empty if turns have end
    markers.
    """

    def __init__(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        *,
        eos: str = "",
        has_end_marker: bool = True,
        closers: Mapping[str, str] | None = None,
    ) -> None:
        self.messages = list(messages)
        self.text = renderer.conversation(messages)
        self._closers = closers or {}
        last = self.messages[-1]
        self.closing = self._closers.get("tool" if last.get("tool_calls") else "user", "")
        """Ends the last turn, which `text` does not; empty if the last message is not the assistant's."""
        if last["role"] != "assistant":
            self.closing = ""
        self.renderer = renderer
        self._eos = eos
        self._has_end_marker = has_end_marker
        self._anchor, self._filler = unused_characters(self.text, 2)
        self._cache: dict[tuple[_Kind, int, int], str | None] = {}

    def span(self, index: int) -> Span:
        """The span of message `index`, an assistant turn, in the text with `closing`. Raises `UnclearTurn`."""
        start, stop = self._start(index), self._stop(index)
        if stop < start:
            raise UnclearTurn(f"message {index + 1} would end before it starts")
        for other, end in self._content_ends:
            if other != index and start < end <= stop:
                raise UnclearTurn(f"message {index + 1} would include the content of message {other + 1}")
        if index == len(self.messages) - 1 and self.closing:
            return Span(start, len(self.text) + len(self.closing))
        closer = index + 1 < len(self.messages) and self._closers.get(self.messages[index + 1]["role"])
        if closer and self.text[stop:].lstrip().startswith(closer):
            return Span(start, self.text.index(closer, stop) + len(closer))
        return Span(start, start + len(self.text[start:stop].rstrip()))

    def spans(self, indices: Sequence[int]) -> list[Span]:
        """The spans of messages `indices`, in order. Raises `UnclearTurn`, also if two overlap."""
        spans = [self.span(index) for index in indices]
        if any(after.start < before.stop for before, after in pairwise(spans)):
            raise UnclearTurn("two turns would overlap")
        return spans

    @cached_property
    def _content_ends(self) -> list[tuple[int, int]]:
        """(message, position in the full text where its content ends), for the contents that an anchor can find."""
        spoken = [index for index, message in enumerate(self.messages) if "content" in _parts(message)]
        anchors = unused_characters(self.text, len(spoken))
        marked = [*self.messages]
        for index, anchor in zip(spoken, anchors, strict=True):
            marked[index] = _anchored(marked[index], "content", anchor)
        text = self._render("conversation", marked) or ""
        message_of = dict(zip(anchors, spoken, strict=True))
        pieces = re.split(f"([{''.join(anchors)}])", text) if anchors else [text]
        if "".join(pieces[::2]) != self.text:
            return []
        ends = accumulate(len(piece) for piece in pieces[::2])
        return [(message_of[anchor], end) for anchor, end in zip(pieces[1::2], ends, strict=False)]

    def missing_parts(self) -> list[str]:
        """The parts of messages that the text does not contain: `message 2 (tool)`, `the calls of message 3`."""
        parts = [(index, part) for index, message in enumerate(self.messages) for part in _parts(message)]
        anchors = unused_characters(self.text, len(parts))
        marked = [*self.messages]
        for (index, part), anchor in zip(parts, anchors, strict=True):
            marked[index] = _anchored(marked[index], part, anchor)
        text = self._render("conversation", marked) or ""  # one rendering, enough for most templates
        missing = [where for where, anchor in zip(parts, anchors, strict=True) if anchor not in text]
        return [
            f"{'the calls of ' if part == 'calls' else ''}message {index + 1} ({self.messages[index]['role']})"
            for index, part in missing
            if not self._depends_on(index, part)
        ]

    def _depends_on(self, index: int, part: str) -> bool:
        """Whether the text changes if this part of message `index` is replaced."""
        changed = [*self.messages]
        changed[index] = _changed(self.messages[index], part, lambda text: self._filler)
        return self._render("conversation", changed) != self.text

    def _start(self, index: int) -> int:
        prompt = self._rendering("prompt", index)
        if prompt is not None and self.text.startswith(prompt):
            return len(prompt)
        if index == 0:
            return self._start_of_first()
        opening = self._text_after("prompt", index, index - 1)
        anchored = self._anchor_in_full_text(index - 1)
        if opening is None or anchored is None:
            raise UnclearTurn(f"the prompt of message {index + 1} cannot be found in the full text")
        position, rest = anchored
        if rest.startswith(opening):
            return position + len(opening)
        # The generation prompt may add something (`<think>`, say) that the finished turn does not keep.
        header = self._header(index, "assistant")
        shared = _beginning(opening, header or "", rest)
        if shared != header:
            shared = re.sub(r"[<\[][^<>\[\]\s]*$", "", shared)  # `<think>` and `</think>` differ as a whole
        if shared and (shared == header or self._is_past_role(index, shared, opening, rest)):
            return position + len(shared)
        raise UnclearTurn(f"the template writes message {index + 1} differently after its prompt")

    def _is_past_role(self, index: int, shared: str, opening: str, rest: str) -> bool:
        """Whether `shared`, with which `opening` and `rest` begin, includes the name of the role of message `index`: it
        goes on where a user's message differs, and does not end within a word."""
        other = self._header(index, "user")
        if other is None or len(shared) <= len(_beginning(opening, other)):
            return False
        return not (shared[-1].isalnum() and any(text[len(shared) :][:1].isalnum() for text in (opening, rest)))

    def _start_of_first(self) -> int:
        """The start of an assistant turn that begins the conversation: it follows what opens any turn."""
        opening = self._opening(1)
        first = _changed(self.messages[0], _main_part(self.messages[0]), lambda text: self._filler)
        changed = [first, *self.messages[1:]]
        text = self._render("conversation", changed) or ""
        header, filler, _ = text.partition(self._filler)
        if not (opening and filler and header.count(opening) == 1):
            raise UnclearTurn("the conversation begins with an assistant turn, whose start the template does not show")
        start = header.index(opening) + len(opening)
        if not self.text.startswith(header[:start]):
            raise UnclearTurn("the template writes the first message in a way that depends on its content")
        return start

    def _stop(self, index: int) -> int:
        if index == len(self.messages) - 1:
            return len(self.text)
        ended = self._rendering("conversation", index + 1)
        is_prefix = ended is not None and self.text.startswith(ended)
        if ended is not None and is_prefix and self._has_end_marker:
            return len(ended)
        anchored = self._anchor_in_full_text(index)
        markers = []
        for marker in self._end_markers(index) if anchored else ():
            if marker and anchored and anchored[1].startswith(marker):
                return anchored[0] + len(marker)
            markers.append(marker)
        if ended is not None and is_prefix:  # no end marker
            return len(ended)
        if anchored and "" in markers and not self._has_end_marker:
            return anchored[0]
        raise UnclearTurn(f"the template ends message {index + 1} differently if more messages follow")

    def _end_markers(self, index: int) -> Iterator[str]:
        """Texts that may end the turn of message `index` after its content, the most reliable first."""
        ended = self._text_after("conversation", index + 1, index)
        if ended is not None:
            yield ended.rstrip()
        # GPT-OSS ends the last turn with another marker. With a generation prompt after it, a turn is not the last.
        reopened = self._text_after("prompt", index + 1, index)
        for opening in (self._opening(count) for count in range(index, 0, -1)):
            if opening and reopened is not None and reopened.endswith(opening):
                yield reopened.removesuffix(opening).rstrip()
                break
        # Phi-3 appends an end-of-text token that belongs to no message.
        if ended is not None and self._eos and ended.endswith(self._eos):
            yield ended.removesuffix(self._eos).rstrip()

    def _opening(self, index: int) -> str | None:
        """The generation prompt that follows the first `index` messages; None if it cannot be isolated."""
        prompt, ended = self._rendering("prompt", index), self._rendering("conversation", index)
        if prompt is None or ended is None or not prompt.startswith(ended):
            return None
        return prompt[len(ended) :]

    def _header(self, index: int, role: str) -> str | None:
        """The text between messages `index` - 1 and `index` in the full text, whatever message `index` says, if it had
        this role and no calls."""
        changed = [*self.messages]
        kept = {key: value for key, value in self.messages[index].items() if key != "tool_calls"}
        changed[index] = {**kept, "role": role, "content": self._filler}
        changed[index - 1] = self._with_anchor(index - 1)
        _, anchored, rest = (self._render("conversation", changed) or "").partition(self._anchor)
        header, filled, _ = rest.partition(self._filler)
        return header if anchored and filled else None

    def _anchor_in_full_text(self, index: int) -> tuple[int, str] | None:
        """(position of the anchor after message `index` in the full text, the text from there on)."""
        rest = self._text_after("conversation", len(self.messages), index)
        return None if rest is None else (len(self.text) - len(rest), rest)

    def _text_after(self, kind: _Kind, count: int, index: int) -> str | None:
        """The text after the content of message `index` in a rendering of the first `count` messages; None if an
        anchor cannot find it."""
        key = kind, count, index
        if key not in self._cache:
            self._cache[key] = self._find_text_after(kind, count, index)
        return self._cache[key]

    def _find_text_after(self, kind: _Kind, count: int, index: int) -> str | None:
        plain = self._rendering(kind, count)
        messages = self.messages[:count]
        messages[index] = self._with_anchor(index)
        text = self._render(kind, messages)
        if plain is None or text is None:
            return None
        before, anchor, after = text.partition(self._anchor)
        after = after.replace(self._anchor, "")  # a tool's answer may repeat the name of its call
        return after if anchor and before + after == plain else None

    def _rendering(self, kind: _Kind, count: int) -> str | None:
        """The rendering of the first `count` messages; None if there are none or the template refuses them."""
        key = kind, count, -1
        if key not in self._cache:
            self._cache[key] = self._render(kind, self.messages[:count]) if count else None
        return self._cache[key]

    def _with_anchor(self, index: int) -> Message:
        """Message `index` with the anchor after its content (or after its last call's name)."""
        message = self.messages[index]
        return _anchored(message, _main_part(message), self._anchor)

    def _render(self, kind: _Kind, messages: Sequence[Message]) -> str | None:
        """None if the template refuses the messages."""
        try:
            return self.renderer.prompt(messages) if kind == "prompt" else self.renderer.conversation(messages)
        except RenderError:
            return None


def text_after_last_turn(renderer: Renderer) -> str | None:
    """The text that the template writes after the last assistant message's content; None if it cannot be determined."""
    filler = "\ue000"
    try:
        text = renderer.conversation([{"role": "user", "content": "x"}, {"role": "assistant", "content": filler}])
    except RenderError:
        return None
    _, written, after = text.partition(filler)
    return after if written else None


def text_of_next(renderer: Renderer, role: Literal["user", "tool"]) -> str:
    """The text that the template writes for a message of `role` after an assistant's, which is a call if `role` is
    `tool`; empty if it cannot be determined."""
    turn: Message = {"role": "assistant", "content": "x"}
    if role == "tool":
        turn["tool_calls"] = [{"type": "function", "function": {"name": "x", "arguments": {}}}]
    before: list[Message] = [{"role": "user", "content": "x"}, turn]
    try:
        text, longer = (renderer.conversation(chat) for chat in (before, [*before, {"role": role, "content": "x"}]))
    except RenderError:
        return ""
    return longer[len(text) :] if longer.startswith(text) else ""


def _beginning(*texts: str) -> str:
    """The text with which all of `texts` begin."""
    alike = takewhile(lambda characters: len({*characters}) == 1, zip(*texts, strict=False))
    return "".join(characters[0] for characters in alike)


def unused_characters(text: str, count: int) -> list[str]:
    """`count` private-use characters (Unicode, plane 0) that do not occur in `text`."""
    private = (chr(code) for code in range(0xE000, 0xF900))
    return list(islice((character for character in private if character not in text), count))


def _parts(message: Message) -> list[str]:
    """The parts of `message` that are not empty: `content`, `calls`."""
    parts = ["content"] if message.get("content", "").strip() else []
    return [*parts, "calls"] if message.get("tool_calls") else parts


def _main_part(message: Message) -> str:
    return next(iter(_parts(message)), "content")


def _anchored(message: Message, part: str, anchor: str) -> Message:
    """`message` with `anchor` after the text of a part, before trailing white space, which a template may strip."""
    return _changed(message, part, lambda text: text.rstrip() + anchor + text[len(text.rstrip()) :])


def _changed(message: Message, part: str, change: Callable[[str], str]) -> Message:
    """`message` with `change` applied to its content, or to the function name of its last call."""
    if part == "content":
        return {**message, "content": change(message.get("content", ""))}
    *others, last = message["tool_calls"]
    function = {**last["function"], "name": change(last["function"]["name"])}
    return {**message, "tool_calls": [*others, {**last, "function": function}]}
