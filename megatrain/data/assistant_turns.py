"""Finds where the assistant's turns are in the text that a chat template renders.

A turn is what the model writes: from the end of its prompt to the end of the turn, the mark that ends it included and
white space after that left out. Templates do not tell it. It is derived from renderings and from nothing else: no
search for a content, no list of marks, no model family.

* A turn starts where its prompt ends: the template's own rendering of the messages before it, with the generation
  prompt. It ends where the rendering of the messages up to it ends.
* Both are prefixes of the whole text for most templates. Others write a message differently once more follow (Qwen3
  and DeepSeek-R1 drop reasoning, GPT-OSS ends the last turn with another mark, Mistral moves tools and system text to
  the last question). There the renderings are aligned by an *anchor*: a private-use character put behind the text of
  one message, in the whole and in the shorter rendering. The anchored rendering less its anchor must be the rendering,
  so an anchor never changes what it measures; and what follows it in both must be the same text.
* A turn for which none of this holds is refused with the reason. Nothing is guessed.

Left out: tokens (see `chat.py`), and templates with `{% generation %}` marks, which say it themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]


class Span(NamedTuple):
    """Characters `start` to `stop` of a text."""

    start: int
    stop: int


class Unclear(Exception):
    """Where a turn stands cannot be told. The text says which turn, and why."""


class Unrendered(Exception):
    """What a `Renderer` raises where the template refuses the messages; the text is the template's own."""


class Renderer(Protocol):
    """A chat template with all but the messages decided. Both raise `Unrendered`."""

    def whole(self, messages: Sequence[Message]) -> str:
        """The text of a conversation that has ended."""

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text after which the model writes its turn."""


class Turns:
    """The assistant's turns of one conversation. Renderings are kept, because turns share them."""

    def __init__(
        self, renderer: Renderer, messages: Sequence[Message], *, closing: str = "", marks_ends: bool = True
    ) -> None:
        """`closing`: the end of text, which a template may write behind the last message and which is of none.
        `marks_ends`: whether the template is known to close a turn with something (see `tail_of_last`).
        """
        self.messages = list(messages)
        self.text = renderer.whole(messages)
        self.renderer = renderer
        self._closing = closing
        self._marks_ends = marks_ends
        self._anchor, self._filler = _unused_characters(self.text, 2)
        self._kept: dict[tuple[str, int, int], str | None] = {}

    def span(self, index: int) -> Span:
        """The turn that is message `index`. Raises `Unclear`."""
        start, stop = self._start(index), self._stop(index)
        if stop < start:
            raise Unclear(f"message {index + 1} would end before it starts")
        for other, place in self._places:
            if other != index and start < place <= stop:
                raise Unclear(f"message {index + 1} would take in what message {other + 1} says")
        return Span(start, start + len(self.text[start:stop].rstrip()))

    def spans(self, indices: Sequence[int]) -> list[Span]:
        """The turns `indices`, in order. Raises `Unclear`, also where two would overlap."""
        spans = [self.span(index) for index in indices]
        if any(after.start < before.stop for before, after in pairwise(spans)):
            raise Unclear("two turns would overlap")
        return spans

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """(message, where what it says ends in the whole text), for as much as the template tells of it."""
        spoken = [index for index, message in enumerate(self.messages) if "content" in _parts(message)]
        anchors = _unused_characters(self.text, len(spoken))
        marked = [*self.messages]
        for index, anchor in zip(spoken, anchors, strict=True):
            marked[index] = _anchored(marked[index], "content", anchor)
        text = self._render(self.renderer.whole, marked) or ""
        owner = dict(zip(anchors, spoken, strict=True))
        pieces = re.split(f"([{''.join(anchors)}])", text) if anchors else [text]
        if "".join(pieces[::2]) != self.text:
            return []
        ends = accumulate(len(piece) for piece in pieces[::2])
        return [(owner[anchor], end) for anchor, end in zip(pieces[1::2], ends, strict=False)]

    def left_out(self) -> list[str]:
        """What the messages say and the text does not hold: `message 2 (tool)`, `the calls of message 3`."""
        parts = [(index, part) for index, message in enumerate(self.messages) for part in _parts(message)]
        anchors = _unused_characters(self.text, len(parts))
        marked = [*self.messages]
        for (index, part), anchor in zip(parts, anchors, strict=True):
            marked[index] = _anchored(marked[index], part, anchor)
        text = self._render(self.renderer.whole, marked) or ""  # all at once, because most show all
        missing = [where for where, anchor in zip(parts, anchors, strict=True) if anchor not in text]
        return [
            f"{'the calls of ' if part == 'calls' else ''}message {index + 1} ({self.messages[index]['role']})"
            for index, part in missing
            if not self._shows(index, part)
        ]

    def _shows(self, index: int, part: str) -> bool:
        """Whether the text depends on that part of message `index`."""
        changed = [*self.messages]
        changed[index] = _changed(self.messages[index], part, lambda said: self._filler)
        return self._render(self.renderer.whole, changed) != self.text

    def _start(self, index: int) -> int:
        prompt = self._plain("prompt", index)
        if prompt is not None and self.text.startswith(prompt):
            return len(prompt)
        if index == 0:
            return self._start_of_first()
        before = self._behind("prompt", index, index - 1)
        here = self._behind_in_whole(index - 1)
        if before is None or here is None:
            raise Unclear(f"the prompt of message {index + 1} cannot be found in the whole text")
        place, rest = here
        if rest.startswith(before):
            return place + len(before)
        # The prompt may open a turn (with `<think>`, say) in a way that the finished turn does not keep.
        header = self._header(index)
        if header is not None and before.startswith(header) and rest.startswith(header):
            return place + len(header)
        raise Unclear(f"the template writes message {index + 1} in another way than its prompt announces")

    def _start_of_first(self) -> int:
        """The start of a conversation's first message: what the template opens a turn with leads up to it."""
        opening = self._opening(1)
        changed = [self._filled(0), *self.messages[1:]]
        text = self._render(self.renderer.whole, changed) or ""
        header, found, _ = text.partition(self._filler)
        if not (opening and found and header.count(opening) == 1):
            raise Unclear("the conversation begins with an assistant turn, and the template does not tell its start")
        start = header.index(opening) + len(opening)
        if not self.text.startswith(header[:start]):
            raise Unclear("the template writes the first message in a way that depends on its content")
        return start

    def _stop(self, index: int) -> int:
        if index == len(self.messages) - 1:
            return len(self.text)
        ended = self._plain("whole", index + 1)
        is_prefix = ended is not None and self.text.startswith(ended)
        if ended is not None and is_prefix and self._marks_ends:
            return len(ended)
        here = self._behind_in_whole(index)
        tails = []
        for tail in self._tails(index) if here else ():
            if tail and here and here[1].startswith(tail):
                return here[0] + len(tail)
            tails.append(tail)
        if ended is not None and is_prefix:  # nothing marks the end of a turn
            return len(ended)
        if here and "" in tails and not self._marks_ends:
            return here[0]
        raise Unclear(f"the template ends message {index + 1} in another way where more messages follow")

    def _tails(self, index: int) -> Iterator[str]:
        """What may stand in the whole text behind message `index` and still be of its turn, by declining trust."""
        ended = self._behind("whole", index + 1, index)
        if ended is not None:
            yield ended.rstrip()
        # GPT-OSS: the end of a last turn is another one. Followed by a generation prompt, the turn is not the last.
        reopened = self._behind("prompt", index + 1, index)
        for opening in (self._opening(count) for count in range(index, 0, -1)):
            if opening and reopened is not None and reopened.endswith(opening):
                yield reopened.removesuffix(opening).rstrip()
                break
        # Phi-3: an end of text that belongs to no message.
        if ended is not None and self._closing and ended.endswith(self._closing):
            yield ended.removesuffix(self._closing).rstrip()

    def _opening(self, index: int) -> str | None:
        """What the generation prompt adds behind the first `index` messages; None where that cannot be told."""
        prompt, ended = self._plain("prompt", index), self._plain("whole", index)
        if prompt is None or ended is None or not prompt.startswith(ended):
            return None
        return prompt[len(ended) :]

    def _header(self, index: int) -> str | None:
        """What stands in the whole text between message `index` - 1 and whatever message `index` says."""
        changed = [*self.messages]
        changed[index] = self._filled(index)
        changed[index - 1] = self._anchored(index - 1)
        _, anchored, rest = (self._render(self.renderer.whole, changed) or "").partition(self._anchor)
        header, filled, _ = rest.partition(self._filler)
        return header if anchored and filled else None

    def _behind_in_whole(self, index: int) -> tuple[int, str] | None:
        """(place of the anchor behind message `index` in the whole text, the text from there)."""
        tail = self._behind("whole", len(self.messages), index)
        return None if tail is None else (len(self.text) - len(tail), tail)

    def _behind(self, kind: str, count: int, index: int) -> str | None:
        """What follows the text of message `index` in a rendering of the first `count`; None: it has no such place."""
        key = kind, count, index
        if key not in self._kept:
            self._kept[key] = self._measure(kind, count, index)
        return self._kept[key]

    def _measure(self, kind: str, count: int, index: int) -> str | None:
        plain = self._plain(kind, count)
        messages = self.messages[:count]
        messages[index] = self._anchored(index)
        text = self._render(self._way(kind), messages)
        if plain is None or text is None:
            return None
        before, found, behind = text.partition(self._anchor)
        behind = behind.replace(self._anchor, "")  # the answer to a call may repeat its name
        return behind if found and before + behind == plain else None

    def _plain(self, kind: str, count: int) -> str | None:
        """The rendering of the first `count` messages; None where the template refuses it."""
        key = kind, count, -1
        if key not in self._kept:
            self._kept[key] = self._render(self._way(kind), self.messages[:count]) if count else None
        return self._kept[key]

    def _filled(self, index: int) -> Message:
        """Message `index` saying nothing but the filler."""
        message = self.messages[index]
        return _changed(message, _main_part(message), lambda said: self._filler)

    def _anchored(self, index: int) -> Message:
        """Message `index` with the anchor behind what it says."""
        message = self.messages[index]
        return _anchored(message, _main_part(message), self._anchor)

    def _way(self, kind: str) -> Callable[[Sequence[Message]], str]:
        return self.renderer.prompt if kind == "prompt" else self.renderer.whole

    @staticmethod
    def _render(way: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str | None:
        try:
            return way(messages)
        except Unrendered:
            return None


def tail_of_last(renderer: Renderer) -> str | None:
    """What the template writes behind the last assistant message; None where it cannot be told."""
    filler = "\ue000"
    try:
        text = renderer.whole([{"role": "user", "content": "x"}, {"role": "assistant", "content": filler}])
    except Unrendered:
        return None
    _, found, tail = text.partition(filler)
    return tail if found else None


def _unused_characters(text: str, count: int) -> list[str]:
    """Private-use characters (Unicode, plane 0) that `text` does not hold."""
    private = (chr(code) for code in range(0xE000, 0xF900))
    return list(islice((character for character in private if character not in text), count))


def _parts(message: Message) -> list[str]:
    """Which of `content` and `calls` say something in `message`."""
    said = ["content"] if message.get("content", "").strip() else []
    return [*said, "calls"] if message.get("tool_calls") else said


def _main_part(message: Message) -> str:
    return next(iter(_parts(message)), "content")


def _anchored(message: Message, part: str, anchor: str) -> Message:
    """`message` with `anchor` behind what a part says, before white space at its end, which a template may strip."""
    return _changed(message, part, lambda said: said.rstrip() + anchor + said[len(said.rstrip()) :])


def _changed(message: Message, part: str, change: Callable[[str], str]) -> Message:
    """`message` with `change` made to its content, or to the name in the last of its calls."""
    if part == "content":
        return {**message, "content": change(message.get("content", ""))}
    *others, last = message["tool_calls"]
    function = {**last["function"], "name": change(last["function"]["name"])}
    return {**message, "tool_calls": [*others, {**last, "function": function}]}
