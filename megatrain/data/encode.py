"""Encodes samples as token ids, and marks which of them are targets.

A text is tokenised once, whole, and the characters that are trained are carried over to tokens by their offsets. So
the ids are those of the library's own `apply_chat_template` or tokenizer call, and the mask is exact to the token. The
first token of a sample is never a target: nothing stands before it.

Plain texts are closed by the end of text, which is trained; a completion's prompt begins as the tokenizer begins a
text. Special tokens that a plain text spells out stay text unless asked otherwise; in a chat they are read, as the
library does. A sample that is too long is cut at its right or dropped, and one without a target is dropped; all is
counted. Left out: packing, and splitting long texts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatrain.data.assistant_turns import Span
from megatrain.data.chat import EMPTY_ANSWER, ChatTemplate, MarkedText, TrainOn, choose_template, mark_chat, prompt_text
from megatrain.data.messages import Message
from megatrain.data.read_rows import LeftOut
from megatrain.data.sample_formats import NOT_A_TARGET, Sample
from megatrain.data.tokenizer import (
    Tokenizer,
    encode_with_offsets,
    end_of_text_id,
    leading_ids,
    special_tokens,
    tokenizer_identity,
    vocabulary_size,
)
from megatrain.errors import SampleError

FORMAT = 1  # part of an encoder's identity: raise it when the same sample would give other tokens or targets
BATCH_CHARACTERS = 1 << 20  # tokenised at once, which is what a tokenizer spreads over its threads

Offsets = npt.NDArray[np.int64]  # (tokens, 2): characters [start, stop)
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class EncodeOptions:
    """What decides the tokens of a sample, beside the tokenizer."""

    train_on: TrainOn = "assistant"
    max_tokens: int | None = None
    too_long: Literal["cut", "drop"] = "cut"
    special_tokens: Literal["text", "read"] = "text"  # what a plain text spells out
    template: str = "model"  # see `choose_template`
    template_values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class EncodedSample:
    """`ids` (tokens,) and `trained` (tokens,): which of them are targets, one at least."""

    ids: npt.NDArray[np.int32]
    trained: Mask
    origin: str
    answer: str = ""  # of a preference: chosen or rejected

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        """The ids with -100 for what is no target. Not shifted: a Hugging Face model does that."""
        return np.where(self.trained, self.ids, np.int32(NOT_A_TARGET)).astype(np.int32)


@dataclass
class Statistics:
    """What has become of the samples so far."""

    left_out: LeftOut = field(default_factory=LeftOut)
    samples: int = 0
    tokens: int = 0
    trained: int = 0  # tokens that are targets
    cut_samples: int = 0
    cut_tokens: int = 0
    notes: Counter[str] = field(default_factory=Counter)  # what is worth knowing -> samples

    @property
    def trained_share(self) -> float:
        """Targets among the tokens, 0 to 1."""
        return self.trained / self.tokens if self.tokens else 0.0

    def merge(self, later: Statistics) -> None:
        """Adds what has become of samples that stand behind all of these."""
        self.left_out.merge(later.left_out)
        self.notes.update(later.notes)
        self.samples += later.samples
        self.tokens += later.tokens
        self.trained += later.trained
        self.cut_samples += later.cut_samples
        self.cut_tokens += later.cut_tokens

    def lines(self) -> list[str]:
        """For the user, one fact each."""
        lines = [
            f"{self.samples:,} samples, {self.tokens:,} tokens, "
            f"{self.trained:,} of them trained ({self.trained_share:.1%})"
        ]
        if self.cut_samples:
            lines.append(f"{self.cut_samples:,} samples cut, {self.cut_tokens:,} tokens lost")
        lines += [f"left out: {line}" for line in self.left_out.lines()]
        return lines + [f"{count:,} samples {note}" for note, count in self.notes.most_common()]


class Encoder:
    """A tokenizer and options, with what is worth finding out once."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions | None = None) -> None:
        self.tokenizer = tokenizer
        self.options = options or EncodeOptions()

    @cached_property
    def template(self) -> ChatTemplate:
        """Chosen at the first chat. Raises `DataError` where the model has none and none was named."""
        return choose_template(self.tokenizer, self.options.template, self.options.template_values)

    def prompt_ids(self, question: str) -> list[int]:
        """The ids after which the model answers a user's `question`, as the template has it."""
        return chat_prompt_ids([{"role": "user", "content": question}], self.template)

    @cached_property
    def vocabulary(self) -> int:
        """Every id is below it."""
        return vocabulary_size(self.tokenizer)

    @cached_property
    def end_of_text(self) -> int:
        """Closes a plain text."""
        return end_of_text_id(self.tokenizer)

    @cached_property
    def leading(self) -> list[int]:
        """Ids before a prompt."""
        return leading_ids(self.tokenizer)

    @cached_property
    def special(self) -> list[str]:
        """What is or would be read as a token where a text spells it out."""
        return special_tokens(self.tokenizer)

    @cached_property
    def added(self) -> npt.NDArray[np.int64]:
        """Ids of tokens that are matched before all others, which marks of a template are."""
        return np.fromiter(self.tokenizer.added_tokens_decoder, dtype=np.int64)

    @cached_property
    def identity(self) -> str:
        """A hash of all that decides the tokens and targets of a sample: the key of whoever keeps them."""
        chosen = None if self.options.template == "model" else self.template.own
        own = self.tokenizer.chat_template if chosen is None else chosen
        special = self.tokenizer.special_tokens_map  # templates write them by their names
        content = [FORMAT, tokenizer_identity(self.tokenizer), own, special, asdict(self.options)]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def chat_prompt_ids(messages: Sequence[Message], template: ChatTemplate) -> list[int]:
    """The ids after which the model answers the last of `messages`, as the template has it.

    Raises `DataError` where the template refuses the chat.
    """
    text = prompt_text(messages, template)
    ((ids, _),) = encode_with_offsets(template.tokenizer, [text], special_tokens="read")
    return [int(token) for token in ids]


@dataclass(frozen=True)
class _Tokens:
    """A sample as tokens, before anything is cut; `text` and `offsets` are those between `leading` and the end."""

    ids: npt.NDArray[np.int64]
    trained: Mask
    text: str = ""
    offsets: Offsets = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))
    leading: int = 0  # tokens before the text


def encode_samples(samples: Iterable[Sample], encoder: Encoder, statistics: Statistics) -> Iterator[EncodedSample]:
    """The samples as tokens, in order, batch by batch; what becomes of them is added to `statistics`.

    A sample that is too long or without a target is counted and left out. Raises `SampleError` for one that cannot be
    used (or counts it: see `LeftOut`), and `DataError` where the tokenizer or the template is wrong for all.
    """
    for batch in batches_of(samples):
        yield from encode_batch(batch, encoder, statistics)


def encode_batch(samples: Sequence[Sample], encoder: Encoder, statistics: Statistics) -> list[EncodedSample]:
    """As `encode_samples`, all at once."""
    found = []
    for sample, tokens in _tokenised(samples, encoder, statistics):
        encoded = _fitted(sample, tokens, encoder.options, statistics)
        if encoded is not None:
            statistics.samples += 1
            statistics.tokens += len(encoded)
            statistics.trained += int(encoded.trained.sum())
            found.append(encoded)
    return found


def render_example(sample: Sample, encoder: Encoder) -> list[tuple[str, bool]]:
    """`sample` as runs of (text, whether it is trained), for showing it in two colours; nothing is cut.

    Raises `SampleError` where it cannot be used.
    """
    ((_, tokens),) = _tokenised([sample], encoder, Statistics())
    runs: list[tuple[str, bool]] = []
    for start, stop in _runs(tokens.trained):
        runs.append((_spelled(tokens, start, stop, encoder.tokenizer), bool(tokens.trained[start])))
    return runs


def try_to_render(sample: Sample, encoder: Encoder) -> list[tuple[str, bool]]:
    """As `render_example`, and nothing where it is not trained on."""
    try:
        runs = render_example(sample, encoder)
    except (SampleError, IndexError, ValueError):
        return []
    return runs if any(trained for _, trained in runs) else []


def trained_tokens(text: str, offsets: Offsets, spans: Sequence[Span], added: Mask) -> Mask:
    """Which tokens of `text` stand for characters in `spans`; `added` says which are matched before all others.

    A token that crosses the start of a span is trained, because part of it must be learned; but not an added one whose
    substance lies before: a header's mark that has swallowed the white space behind it (Phi-3's do).
    """
    wanted = np.array([span for span in spans if span.start < span.stop], dtype=np.int64).reshape(-1, 2)
    starts, stops = offsets[:, 0], offsets[:, 1]
    if not len(wanted) or not len(offsets):
        return np.zeros(len(offsets), dtype=np.bool_)
    # Byte-level tokenizers trim spaces off their offsets; a token of spaces alone is left with no width at its end.
    before = np.concatenate([[0], np.maximum.accumulate(stops)[:-1]])
    starts = np.where(starts == stops, np.minimum(before, starts), starts)
    stops = np.maximum(stops, starts + 1)
    place = np.minimum(np.searchsorted(wanted[:, 1], starts, side="right"), len(wanted) - 1)
    first, last = wanted[place, 0], wanted[place, 1]
    trained: Mask = (first < stops) & (starts < last)
    for token in np.flatnonzero(trained & added & (starts < first)):
        trained[token] = not text[starts[token] : first[token]].strip()
    return trained


def _tokenised(samples: Sequence[Sample], encoder: Encoder, statistics: Statistics) -> Iterator[tuple[Sample, _Tokens]]:
    """The usable ones of `samples`. One tokenizer call for all chats, one for all plain texts."""
    tokens: dict[int, _Tokens] = {}
    texts: dict[str, list[tuple[int, MarkedText]]] = {"read": [], "text": []}
    for number, sample in enumerate(samples):
        try:
            if sample.ids is not None:
                tokens[number] = _given(sample, encoder)
            elif (marked := _marked(sample, encoder, statistics)) is not None:
                texts["read" if sample.messages else encoder.options.special_tokens].append((number, marked))
        except SampleError as error:
            statistics.left_out.refuse(error)
    modes: tuple[Literal["read", "text"], ...] = ("read", "text")
    for mode in modes:
        encoded = encode_with_offsets(encoder.tokenizer, [m.text for _, m in texts[mode]], special_tokens=mode)
        for (number, marked), (ids, offsets) in zip(texts[mode], encoded, strict=True):
            tokens[number] = _read(samples[number], marked, ids.astype(np.int64), offsets, encoder)
    for number in sorted(tokens):
        yield samples[number], tokens[number]


def _marked(sample: Sample, encoder: Encoder, statistics: Statistics) -> MarkedText | None:
    """The text of a chat or plain text, and what of it is trained; None for one without any text, which is counted."""
    if sample.messages:
        marked = mark_chat(sample, encoder.template, encoder.options.train_on)
    else:
        text = sample.prompt + (sample.text or "")
        if not text:
            statistics.left_out.add("empty text", sample.origin)
            return None
        start = 0 if encoder.options.train_on == "all" else len(sample.prompt)
        treated = {"text": "stays text", "read": "is read as the token"}[encoder.options.special_tokens]
        notes = (
            [f"contain the text of a special token, which {treated}"]
            if any(token in text for token in encoder.special)
            else []
        )
        if start == len(text):
            notes.append(EMPTY_ANSWER)
        marked = MarkedText(text, (Span(start, len(text)),), tuple(notes))
    try:
        marked.text.encode()
    except UnicodeEncodeError as error:
        what = "text that holds a lone surrogate"
        raise SampleError(what, reason="not Unicode", where=sample.origin, fix="remove its escape") from error
    statistics.notes.update(marked.notes)
    return marked


def _read(
    sample: Sample, marked: MarkedText, ids: npt.NDArray[np.int64], offsets: Offsets, encoder: Encoder
) -> _Tokens:
    trained = trained_tokens(marked.text, offsets, marked.spans, np.isin(ids, encoder.added))
    if sample.messages:
        return _Tokens(ids, trained, marked.text, offsets)
    leading = encoder.leading if sample.prompt else []
    if ids[: len(leading)].tolist() == leading:
        leading = []
    ending = [] if ids[-1:].tolist() == [encoder.end_of_text] else [encoder.end_of_text]
    return _Tokens(
        np.concatenate([np.array(leading, np.int64), ids, np.array(ending, np.int64)]),
        np.concatenate([np.zeros(len(leading), np.bool_), trained, np.ones(len(ending), np.bool_)]),
        marked.text,
        offsets,
        len(leading),
    )


def _given(sample: Sample, encoder: Encoder) -> _Tokens:
    """Ids that the user brings."""
    assert sample.ids is not None
    assert sample.trained is not None
    outside = np.flatnonzero((sample.ids < 0) | (sample.ids >= encoder.vocabulary))
    if outside.size:
        at = int(outside[0])
        what = f"id {sample.ids[at]} at position {at} is outside the vocabulary of {encoder.vocabulary:,}"
        fix = "bring ids of the model's own tokenizer"
        raise SampleError(what, reason="ids outside the vocabulary", where=sample.origin, fix=fix)
    everything = encoder.options.train_on == "all"
    return _Tokens(sample.ids.astype(np.int64), np.ones_like(sample.trained) if everything else sample.trained)


def _fitted(sample: Sample, tokens: _Tokens, options: EncodeOptions, statistics: Statistics) -> EncodedSample | None:
    """`tokens` within the limit and with a target, or None, counted."""
    count = len(tokens.ids)
    limit = count if options.max_tokens is None else min(count, options.max_tokens)
    if limit < count and options.too_long == "drop":
        statistics.left_out.add(f"longer than {limit:,} tokens", sample.origin)
        return None
    if not tokens.trained[1:].any():
        statistics.left_out.add("without a target", sample.origin)
        return None
    trained = tokens.trained[:limit].copy()
    trained[:1] = False
    if not trained.any():
        statistics.left_out.add(f"without a target in the first {limit:,} tokens", sample.origin)
        return None
    if limit < count:
        statistics.cut_samples += 1
        statistics.cut_tokens += count - limit
    return EncodedSample(tokens.ids[:limit].astype(np.int32), trained, sample.origin, sample.answer)


def batches_of(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """The samples in batches of about `BATCH_CHARACTERS`, in order."""
    batch: list[Sample] = []
    characters = 0
    for sample in samples:
        batch.append(sample)
        characters += 100 + _size(sample)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _size(sample: Sample) -> int:
    """About as many characters as the sample has, or ids."""
    if sample.ids is not None:
        return len(sample.ids)
    said = sum(len(message.get("content", "")) + len(str(message.get("tool_calls", ""))) for message in sample.messages)
    return said + len(sample.prompt) + len(sample.text or "") + len(str(sample.tools))


def _runs(trained: Mask) -> Iterator[tuple[int, int]]:
    """Tokens [start, stop) that are all trained or all not."""
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(trained)]
    yield from ((start, stop) for start, stop in pairwise(edges) if start < stop)


def _spelled(tokens: _Tokens, start: int, stop: int, tokenizer: Tokenizer) -> str:
    """Tokens [start, stop) as text: their characters, without gaps between runs, and what has none decoded."""
    first, end = tokens.leading, tokens.leading + len(tokens.offsets)
    if not len(tokens.offsets):
        return str(tokenizer.decode(tokens.ids[start:stop]))
    before = str(tokenizer.decode(tokens.ids[start : min(stop, first)])) if start < first else ""
    behind = str(tokenizer.decode(tokens.ids[max(start, end) : stop])) if stop > end else ""
    inner = (max(start, first) - first, min(stop, end) - first)
    if inner[0] >= inner[1]:
        return before + behind
    edges = [0 if at == 0 else len(tokens.text) if at == end - first else int(tokens.offsets[at, 0]) for at in inner]
    return before + tokens.text[edges[0] : edges[1]] + behind
