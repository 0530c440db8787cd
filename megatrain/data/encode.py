"""Encodes samples as token ids, and marks which of them are targets.

Each text is tokenised once, as a whole, and the character spans to train on are mapped to tokens by the tokenizer's
offsets. So the ids equal those of `apply_chat_template` or a tokenizer call, and the mask is exact to the token. The
first token of a sample is never a target, since no token precedes it.

A plain text ends with the end-of-text token, which is a target; it and a completion's prompt start with the tokenizer's
own leading tokens (bos). The text of a special token in a plain text stays text; in a chat it is read as the token, as
transformers does. A sample that is too long is truncated on the right or dropped, and one without a target is dropped;
both are counted. Not here: packing.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatrain.data.assistant_turns import Span
from megatrain.data.chat import (
    EMPTY_ANSWER,
    ChatTemplate,
    MarkedText,
    TrainOn,
    chat_prompt_ids,
    choose_template,
    dates_in,
    mark_chat,
)
from megatrain.data.messages import Message, Tool
from megatrain.data.processor import ImageText, Processor
from megatrain.data.read_rows import LeftOut
from megatrain.data.sample_formats import NOT_A_TARGET, Sample
from megatrain.data.tokenizer import (
    Tokenizer,
    batched,
    encode_with_offsets,
    end_of_text_id,
    leading_ids,
    require_unicode,
    special_tokens,
    tokenizer_identity,
    vocabulary_size,
)
from megatrain.errors import DataError, SampleError
from megatrain.formatting import counted

FORMAT = 2  # part of an encoder's identity: raise it when the same sample would give other tokens or targets
BATCH_CHARACTERS = 1 << 20  # about so many are tokenised in one call

Offsets = npt.NDArray[np.int64]  # (tokens, 2): characters [start, stop)
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class EncodeOptions:
    """What the tokens and targets of a sample depend on besides the tokenizer.

    template, template_values: see `choose_template`. bos: whether a plain text begins with the tokenizer's leading
    tokens.
    """

    train_on: TrainOn = "assistant"
    max_tokens: int | None = None
    too_long: Literal["cut", "drop"] = "cut"
    template: str = "model"
    template_values: Mapping[str, Any] = field(default_factory=dict)
    bos: bool = True


@dataclass(frozen=True, eq=False)
class EncodedSample:
    """A sample as tokens: `ids` (tokens,) and `trained` (tokens,), the mask of its targets, at least one.

    origin: its file and line. answer: see `Sample.answer`. images: of a sample encoded for a processor.
    """

    ids: npt.NDArray[np.int32]
    trained: Mask
    origin: str
    answer: str = ""
    images: ImageText | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        """The ids, with -100 for tokens that are not targets. Not shifted, since Hugging Face models shift them."""
        return np.where(self.trained, self.ids, np.int32(NOT_A_TARGET)).astype(np.int32)


@dataclass
class Statistics:
    """Counts of the samples encoded so far, and of those left out."""

    left_out: LeftOut = field(default_factory=LeftOut)
    samples: int = 0
    tokens: int = 0
    trained: int = 0  # tokens that are targets
    cut_samples: int = 0  # truncated to `max_tokens`
    cut_tokens: int = 0
    notes: Counter[str] = field(default_factory=Counter)  # remark -> samples that it is true of

    def merge(self, later: Statistics) -> None:
        """Add the statistics of the samples that come after these."""
        self.left_out.merge(later.left_out)
        self.notes.update(later.notes)
        self.samples += later.samples
        self.tokens += later.tokens
        self.trained += later.trained
        self.cut_samples += later.cut_samples
        self.cut_tokens += later.cut_tokens

    def lines(self) -> list[str]:
        """The statistics for the user, one line per fact."""
        lines = [
            f"{counted(self.samples, 'sample')}, {counted(self.tokens, 'token')}, "
            f"{self.trained:,} of them trained ({self.trained / max(1, self.tokens):.1%})"
        ]
        if self.cut_samples:
            lines.append(f"{counted(self.cut_samples, 'sample')} cut, {counted(self.cut_tokens, 'token')} lost")
        lines += [f"left out: {line}" for line in self.left_out.lines()]
        return lines + [f"{counted(count, 'sample')} {note}" for note, count in self.notes.most_common()]


class Encoder:
    """A tokenizer with options, and what is derived from them once.

    moment: whose date a chat template writes that asks for it; by default now. processor: writes the tokens of images;
    None: samples have none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: EncodeOptions | None = None,
        moment: datetime | None = None,
        processor: Processor | None = None,
    ) -> None:
        self.tokenizer, self.processor = tokenizer, processor
        self.options = options or EncodeOptions()
        self.moment = moment or datetime.now()
        self.leading = leading_ids(tokenizer)
        """The ids that the tokenizer puts before a text (bos)."""
        self.special = special_tokens(tokenizer)
        """The texts of the special tokens."""
        self.added = np.fromiter(tokenizer.added_tokens_decoder, dtype=np.int64)
        """Ids of the added tokens, which are matched before all others; a template's markers usually are some."""

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, chosen on first use. Raises `DataError` if the model has none and none was chosen."""
        chosen = choose_template(self.tokenizer, self.options.template, self.options.template_values, self.moment)
        return chosen if self.processor is None else replace(chosen, in_parts=True)

    @cached_property
    def _template_text(self) -> Any:
        """The Jinja text of the chat template, or the texts by name; none if the model has none."""
        chosen = None if self.options.template == "model" else self.template.own
        return self.tokenizer.chat_template if chosen is None else chosen

    @cached_property
    def dates(self) -> list[str]:
        """What the chat template writes of `moment`; none for most templates."""
        template = self._template_text
        texts = template.values() if isinstance(template, Mapping) else [template or ""]
        return [date for text in texts for date in dates_in(text, self.moment)]

    def prompt_ids(self, question: str) -> list[int]:
        """The prompt of a chat in which a user asks `question`, with the generation prompt."""
        return chat_prompt_ids([{"role": "user", "content": question}], self.template)

    @cached_property
    def vocabulary(self) -> int:
        """The size of the vocabulary; every id is below it."""
        return vocabulary_size(self.tokenizer)

    @cached_property
    def end_of_text(self) -> int:
        """The id of the end-of-text token, which ends a plain text."""
        return end_of_text_id(self.tokenizer)

    @cached_property
    def identity(self) -> str:
        """A hash of everything that the tokens and targets of a sample depend on: part of the key of a cache."""
        special = self.tokenizer.special_tokens_map  # templates refer to them
        options = {**asdict(self.options), "bos": (self.options.bos and self.leading) or None}
        content = [FORMAT, tokenizer_identity(self.tokenizer), self._template_text, special, options, self.dates]
        content.append(self.processor and self.processor.identity)
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def turn_ends(template: ChatTemplate) -> list[int]:
    """The ids of the tokens with which a template ends an answer and a call of a function, after which a model trained
    on them stops; none if it ends them with a text."""
    encoder = Encoder(template.tokenizer)
    encoder.__dict__["template"] = template
    question: Message = {"role": "user", "content": "x"}
    answer: Message = {"role": "assistant", "content": "x"}
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "x"}}}
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "description": "x", "parameters": schema}}

    def marks(*messages: Message, tools: tuple[Tool, ...] = ()) -> list[int]:
        """The ids of the added tokens with which the trained tokens end."""
        try:
            ((_, tokens),) = _tokenised([Sample("", messages, tools)], encoder, Statistics())
        except (DataError, ValueError):  # the template refuses calls, or shows no turn
            return []
        written = np.array([bool(tokens.text[start:stop].strip()) for start, stop in tokens.offsets], np.bool_)
        ids = tokens.ids[tokens.trained & written]
        return list(takewhile(lambda token: bool(np.isin(token, encoder.added)), ids[::-1].tolist()))[::-1]

    inner, last = marks(question, answer, question), marks(question, answer)
    called = marks(question, {"role": "assistant", "tool_calls": [call]}, tools=(tool,))
    ends = inner[-1:] if {*inner[-1:]} & {*last} else last[-1:]  # an eos token may follow the last turn (Phi-3's)
    return ends + [end for end in called[-1:] if end not in ends]


@dataclass(frozen=True)
class _Tokenized:
    """A sample as tokens, before truncation. `text` and `offsets` describe those of a chat. The first `needed` hold all
    images of `images`."""

    ids: npt.NDArray[np.int64]
    trained: Mask
    text: str = ""
    offsets: Offsets = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))
    images: ImageText | None = None
    needed: int = 0


def encode_samples(samples: Iterable[Sample], encoder: Encoder, statistics: Statistics) -> Iterator[EncodedSample]:
    """Encode samples in order, batch by batch, and add their counts to `statistics`.

    Samples without a target, and those that are too long and not truncated, are left out and counted. Raises
    `SampleError` for an unusable sample (or counts it, see `LeftOut`), and `DataError` if the tokenizer or the template
    cannot be used at all.
    """
    for batch in batched(samples, _size, BATCH_CHARACTERS):
        yield from encode_batch(batch, encoder, statistics)


def encode_batch(samples: Sequence[Sample], encoder: Encoder, statistics: Statistics) -> list[EncodedSample]:
    """`encode_samples` for one batch."""
    encoded_samples = []
    for sample, tokens in _tokenised(samples, encoder, statistics):
        encoded = _truncated(sample, tokens, encoder.options, statistics)
        if encoded is not None:
            statistics.samples += 1
            statistics.tokens += len(encoded)
            statistics.trained += int(encoded.trained.sum())
            encoded_samples.append(encoded)
    return encoded_samples


def try_to_render(sample: Sample, encoder: Encoder) -> list[tuple[str, bool]]:
    """`sample` as runs (text, whether it is trained), to show it in two colours; not truncated. Without runs if it is
    unusable or has no target."""
    try:
        if sample.ids is not None:
            tokens = _from_ids(sample, encoder)
            edges = [0, *(np.flatnonzero(np.diff(tokens.trained)) + 1).tolist(), len(tokens.ids)]
            spans = [(start, stop) for start, stop in pairwise(edges) if start < stop]
            runs = [(str(encoder.tokenizer.decode(tokens.ids[a:b])), bool(tokens.trained[a])) for a, b in spans]
        elif (marked := _marked(sample, encoder, Statistics())) is not None:
            edges = [0, *(edge for span in marked.spans for edge in span), len(marked.text)]
            runs = [(marked.text[a:b], bool(at % 2)) for at, (a, b) in enumerate(pairwise(edges)) if a < b]
        else:
            return []
    except (SampleError, IndexError, ValueError):
        return []
    return runs if any(trained for _, trained in runs) else []


def trained_tokens(text: str, offsets: Offsets, spans: Sequence[Span], added: Mask) -> Mask:
    """The mask of the tokens of `text` that cover characters in `spans`. offsets: (tokens, 2). added: the mask of added
    tokens.

    A token that crosses the start of a span is trained, because part of it must be learned; except an added token that
    has only white space inside the span: a header's marker that absorbed the white space after it (as Phi-3's do).
    """
    wanted = np.array([span for span in spans if span.start < span.stop], dtype=np.int64).reshape(-1, 2)
    starts, stops = offsets[:, 0], offsets[:, 1]
    if not len(wanted) or not len(offsets):
        return np.zeros(len(offsets), dtype=np.bool_)
    # Byte-level tokenizers trim spaces from offsets, so a token of spaces only has an empty range at its end.
    before = np.concatenate([[0], np.maximum.accumulate(stops)[:-1]])
    starts = np.where(starts == stops, np.minimum(before, starts), starts)
    stops = np.maximum(stops, starts + 1)
    nearest = np.minimum(np.searchsorted(wanted[:, 1], starts, side="right"), len(wanted) - 1)
    first, last = wanted[nearest, 0], wanted[nearest, 1]
    trained: Mask = (first < stops) & (starts < last)
    for token in np.flatnonzero(trained & added & (starts < first)):
        outside, inside = text[starts[token] : first[token]], text[first[token] : stops[token]]
        trained[token] = not outside.strip() or bool(inside.strip())
    return trained


def _tokenised(
    samples: Sequence[Sample], encoder: Encoder, statistics: Statistics
) -> Iterator[tuple[Sample, _Tokenized]]:
    """The usable samples with their tokens. One tokenizer call for all chats, one for all plain texts."""
    tokens: dict[int, _Tokenized] = {}
    expanded: dict[int, tuple[ImageText, int]] = {}
    texts: dict[str, list[tuple[int, MarkedText]]] = {"read": [], "text": []}
    for number, sample in enumerate(samples):
        try:
            if sample.ids is not None:
                tokens[number] = _from_ids(sample, encoder)
            elif (marked := _marked(sample, encoder, statistics)) is not None:
                if encoder.processor is not None:
                    marked, images, end = _expanded(sample, marked, encoder.processor)
                    expanded[number] = images, end
                texts["read" if sample.messages else "text"].append((number, marked))
        except SampleError as error:
            statistics.left_out.refuse(error)
    modes: tuple[Literal["read", "text"], ...] = ("read", "text")
    for mode in modes:
        encoded = encode_with_offsets(encoder.tokenizer, [m.text for _, m in texts[mode]], special_tokens=mode)
        for (number, marked), (ids, offsets) in zip(texts[mode], encoded, strict=True):
            tokens[number] = _with_mask(samples[number], marked, ids.astype(np.int64), offsets, encoder)
            if number in expanded:
                images, end = expanded[number]
                tokens[number] = replace(tokens[number], images=images, needed=int((offsets[:, 0] < end).sum()))
    for number in sorted(tokens):
        yield samples[number], tokens[number]


def _expanded(sample: Sample, marked: MarkedText, processor: Processor) -> tuple[MarkedText, ImageText, int]:
    """(the text with what the processor writes for images, no character of which is trained, the text without, the
    character at which the last image ends)."""
    text, replaced = processor.expanded(marked.text, sample.images, sample.origin)
    spans = list[Span]()
    for start, stop in marked.spans:
        for old, _ in replaced:
            if start <= old.start < stop:
                spans.append(Span(start, old.start))
                start = old.stop
        spans.append(Span(start, stop))

    def moved(character: int) -> int:
        return character + sum(new - (old.stop - old.start) for old, new in replaced if old.stop <= character)

    trained = tuple(Span(moved(start), moved(stop)) for start, stop in spans if start < stop)
    end = moved(replaced[-1][0].stop) if replaced else 0
    return replace(marked, text=text, spans=trained), ImageText(marked.text, sample.images, sample.origin), end


def _marked(sample: Sample, encoder: Encoder, statistics: Statistics) -> MarkedText | None:
    """The text of a sample, with the spans to train on; None if it is empty, which is counted."""
    if sample.messages:
        marked = mark_chat(sample, encoder.template, encoder.options.train_on)
    else:
        text = sample.prompt + (sample.text or "")
        if not text:
            statistics.left_out.add("empty text", sample.origin)
            return None
        start = 0 if encoder.options.train_on == "all" else len(sample.prompt)
        special = any(token in text for token in encoder.special)
        notes = ["with the text of a special token, which stays text"] if special else []
        if start == len(text):
            notes.append(EMPTY_ANSWER)
        marked = MarkedText(text, (Span(start, len(text)),), tuple(notes))
    require_unicode(marked.text, sample.origin)
    statistics.notes.update(marked.notes)
    return marked


def _with_mask(
    sample: Sample, marked: MarkedText, ids: npt.NDArray[np.int64], offsets: Offsets, encoder: Encoder
) -> _Tokenized:
    """A tokenised text with its mask; a plain text also gets its leading and end-of-text tokens."""
    trained = trained_tokens(marked.text, offsets, marked.spans, np.isin(ids, encoder.added))
    if sample.messages:
        return _Tokenized(ids, trained, marked.text, offsets)
    leading = encoder.leading if sample.prompt or encoder.options.bos else []
    if ids[: len(leading)].tolist() == leading:
        leading = []
    ending = [] if ids[-1:].tolist() == [encoder.end_of_text] else [encoder.end_of_text]
    return _Tokenized(
        np.concatenate([np.array(leading, np.int64), ids, np.array(ending, np.int64)]),
        np.concatenate([np.zeros(len(leading), np.bool_), trained, np.ones(len(ending), np.bool_)]),
    )


def _from_ids(sample: Sample, encoder: Encoder) -> _Tokenized:
    """A sample that the user supplies as ids. Raises `SampleError` for an id outside the vocabulary."""
    assert sample.ids is not None
    assert sample.trained is not None
    outside = np.flatnonzero((sample.ids < 0) | (sample.ids >= encoder.vocabulary))
    if outside.size:
        at = int(outside[0])
        what = f"id {sample.ids[at]} at position {at} is outside the vocabulary of {encoder.vocabulary:,}"
        fix = "give ids of the model's own tokenizer"
        raise SampleError(what, reason="ids outside the vocabulary", where=sample.origin, fix=fix)
    everything = encoder.options.train_on == "all"
    return _Tokenized(sample.ids.astype(np.int64), np.ones_like(sample.trained) if everything else sample.trained)


def _truncated(
    sample: Sample, tokens: _Tokenized, options: EncodeOptions, statistics: Statistics
) -> EncodedSample | None:
    """`tokens`, truncated to the limit; None, and counted, if it is dropped or has no target."""
    count = len(tokens.ids)
    limit = count if options.max_tokens is None else min(count, options.max_tokens)
    if limit < count and options.too_long == "drop":
        statistics.left_out.add(f"longer than {limit:,} tokens", sample.origin)
        return None
    if limit < tokens.needed:
        statistics.left_out.add(f"with an image beyond {limit:,} tokens", sample.origin)
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
    return EncodedSample(tokens.ids[:limit].astype(np.int32), trained, sample.origin, sample.answer, tokens.images)


def _size(sample: Sample) -> int:
    """Roughly the number of characters of a sample, or of its ids, and something for the sample itself."""
    if sample.ids is not None:
        return 100 + len(sample.ids)
    said = sum(len(message.get("content", "")) + len(str(message.get("tool_calls", ""))) for message in sample.messages)
    pictures = sum(len(image.data or b"") for image in sample.images)
    return 100 + said + len(sample.prompt) + len(sample.text or "") + len(str(sample.tools)) + pictures
