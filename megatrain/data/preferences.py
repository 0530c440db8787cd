"""Reads answers to compare, as two samples that stay together: chosen and rejected ones, or labelled good or bad.

    prompt, chosen, rejected                    TRL's format: texts or messages
    chosen, rejected                            the prompt is what both have in common; also if there is a text prompt,
                                                but both answers are conversations that include it
    instruction [, input], chosen, rejected     LLaMA-Factory's ranking data in Alpaca format
    conversations, chosen, rejected             LLaMA-Factory's ranking data in ShareGPT format: the answers are turns

    prompt, completion, label                   for KTO: texts or messages, as TRL has them
    messages, label; conversations, label       a chat: the prompt is all but its last message
    instruction, output, label                  LLaMA-Factory's, as Alpaca; `kto_tag` is its column there

Each answer is read as if it were the only one, by the format of the rest of the row. The prompt is never trained. A
label is a boolean, 0 or 1, or one of these as text, and its answer is followed by a *mismatched* one: the same prompt
with the answer of the previous sample (the first prompt gets the second answer). It is not a training target: its
log-probability estimates how far the policy is from the reference model, for KTO's KL term (Ethayarajh et al., "KTO:
Model alignment as prospect theoretic optimization", ICML 2024). TRL takes the answer of another sample of the batch;
here it depends on the file alone, so that the reference log-probabilities can be computed beforehand. Not supported:
more than two answers, and scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal

from megatrain.data.encode import EncodedSample, Statistics
from megatrain.data.loss_switches import as_label
from megatrain.data.read_rows import SourceRow
from megatrain.data.sample_formats import FIELDS, Format, Sample, Schema, read_sample, require_fields
from megatrain.errors import DataError, SampleError

GOOD: Literal["desirable"] = "desirable"
BAD: Literal["undesirable"] = "undesirable"
MISMATCHED: Literal["mismatched"] = "mismatched"
ANSWER_FIELDS: tuple[tuple[str, Format], ...] = (
    ("messages", "chat"),
    ("conversations", "sharegpt"),
    ("completion", "completion"),
    ("instruction", "alpaca"),
)
"""(field, the format that a row with this field has), in the order in which they are tried; fields that data.columns
names come first."""


ANSWERS = ("chosen", "rejected")
SECOND = ("rejected", "mismatched")
"""`Sample.answer` of the second sample of a pair."""


def read_pair(row: SourceRow, schema: Schema) -> tuple[Sample, Sample]:
    """The chosen and the rejected sample of a row. Raises `SampleError` for an unusable row."""
    require_fields(row, schema)
    chosen, rejected = (row.fields[schema.column(name)] for name in ANSWERS)
    if chosen == rejected:
        what, fix = "the chosen and the rejected answer are the same", "remove the sample"
        raise SampleError(what, reason="equal answers", where=row.place, fix=fix)
    contexts = [row.fields.get(schema.column(name)) for name in ("prompt", "instruction", "conversations")]
    are_chats = isinstance(chosen, list) and isinstance(rejected, list)
    begin_alike = are_chats and chosen and chosen[:1] == rejected[:1]
    if not any(contexts) or (isinstance(contexts[0], str) and begin_alike):
        prompt, chosen, rejected = _split_prompt(chosen, rejected, row.place)
        row = row._replace(fields={**row.fields, schema.column("prompt"): prompt})
    first, second = (_with_answer(row, schema, answer) for answer in (chosen, rejected))
    return replace(first, answer="chosen"), replace(second, answer="rejected")


def _with_answer(row: SourceRow, schema: Schema, answer: Any) -> Sample:
    """The sample of a row with one of its answers."""
    named = next(name for name in ("conversations", "instruction", "prompt") if row.fields.get(schema.column(name)))
    kinds: dict[str, tuple[Format, str]] = {
        "conversations": ("sharegpt", "conversations"),
        "instruction": ("alpaca", "output"),
        "prompt": ("completion", "completion"),
    }
    kind, field = kinds[named]
    if kind == "sharegpt":
        turns = row.fields[schema.column(named)]
        if not isinstance(turns, Sequence) or isinstance(turns, str) or not isinstance(answer, Mapping):
            what = "conversations with an answer that is not a turn"
            raise SampleError(what, reason="malformed preference", where=row.place)
        answer = [*turns, answer]
    elif isinstance(answer, Mapping):
        answer = [answer]
    inner = replace(schema, format=kind)
    sample = read_sample(row._replace(fields={**row.fields, inner.column(field): answer}), inner)
    context = len(sample.messages) - 1
    return sample if kind == "completion" else replace(sample, untrained=sample.untrained | frozenset(range(context)))


def _split_prompt(chosen: Any, rejected: Any, place: str) -> tuple[Any, Any, Any]:
    """(the common beginning of two texts or conversations, the rest of each). Raises `SampleError` if there is none.

    Texts are divided at a space.
    """
    both_texts = isinstance(chosen, str) and isinstance(rejected, str)
    both_lists = isinstance(chosen, list) and isinstance(rejected, list)
    if both_texts:
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
        size = chosen[: sum(1 for _ in alike)].rfind(" ") + 1
    elif both_lists:
        equal = (one == other for one, other in zip(chosen, rejected, strict=False))
        size = next((at for at, same in enumerate(equal) if not same), min(len(chosen), len(rejected)))
    if not (both_texts or both_lists) or not size or not chosen[size:] or not rejected[size:]:
        what = "no prompt, and the answers have no common beginning"
        fix = "add the field, or set data.columns to its name"
        raise SampleError(what, reason="without 'prompt'", where=place, fix=fix)
    return chosen[:size], chosen[size:], rejected[size:]


def whole_pairs(samples: Iterator[EncodedSample], statistics: Statistics) -> Iterator[EncodedSample]:
    """`samples` without answers whose counterpart was left out; `statistics` then counts them as left out, too."""
    waiting: EncodedSample | None = None
    for sample in samples:
        if sample.answer in SECOND and waiting is not None and waiting.origin == sample.origin:
            yield waiting
            yield sample
            waiting = None
            continue
        if waiting is not None:
            _leave_out(waiting, statistics)
            waiting = None
        if sample.answer in SECOND:
            _leave_out(sample, statistics)
        elif sample.answer:
            waiting = sample
        else:
            yield sample
    if waiting is not None:
        _leave_out(waiting, statistics)


def _leave_out(sample: EncodedSample, statistics: Statistics) -> None:
    statistics.samples -= 1
    statistics.tokens -= len(sample)
    statistics.trained -= int(sample.trained.sum())
    statistics.left_out.add("the other answer is left out", sample.origin)


def read_unpaired(row: SourceRow, schema: Schema) -> Sample:
    """The answer of a row, with its label. Raises `SampleError` for an unusable row."""
    require_fields(row, schema)
    column = schema.column("label")
    if (is_good := as_label(row.fields[column])) is None:
        what = f"{column!r} is {row.fields[column]!r}, not true or false"
        raise SampleError(what, reason="a label that is neither", where=row.place, fix="write true or false")
    kinds = [kind for name, kind in ANSWER_FIELDS if row.fields.get(schema.column(name)) is not None]
    kinds.sort(key=lambda kind: not any(name in schema.columns for name in FIELDS[kind][0]))
    if not kinds:
        what = "a label and no answer"
        fix = f"add one of {', '.join(name for name, _ in ANSWER_FIELDS)}, or set data.columns"
        raise SampleError(what, reason="without an answer", where=row.place, fix=fix)
    inner = replace(schema, format=kinds[0], columns={k: v for k, v in schema.columns.items() if k != "label"})
    fields = {name: value for name, value in row.fields.items() if name != column}
    sample = read_sample(row._replace(fields=fields), inner)
    if sample.messages and kinds[0] != "completion":
        context = len(sample.messages) - 1
        if not context or sample.messages[-1]["role"] != "assistant":
            what = "a conversation that does not end in an answer to a message"
            raise SampleError(what, reason="without an answer", where=row.place, fix="remove the sample")
        sample = replace(sample, untrained=sample.untrained | frozenset(range(context)))
    return replace(sample, answer=GOOD if is_good else BAD)


def with_mismatched(samples: Iterable[Sample], name: str) -> Iterator[Sample]:
    """`samples`, with the mismatched sample after each labelled one.

    name: of the source. Raises `DataError` if it has only one answer as text, or only one as a chat.
    """
    before: dict[bool, Sample] = {}  # the previous sample of each kind: text, chat
    alone: dict[bool, Sample] = {}  # the first of each kind, until there is a second
    for sample in samples:
        if not sample.answer or sample.answer not in (GOOD, BAD):
            yield sample
            continue
        is_chat = bool(sample.messages)
        if is_chat not in before:
            alone[is_chat] = sample
        else:
            if is_chat in alone:
                yield from _pair(alone.pop(is_chat), sample)
            yield from _pair(sample, before[is_chat])
        before[is_chat] = sample
    for sample in alone.values():
        what, fix = "holds only one answer, but KTO needs others to compare it with", "add samples"
        raise DataError(what, where=f"{name} ({sample.origin})", fix=fix)


def _pair(sample: Sample, other: Sample) -> tuple[Sample, Sample]:
    """(`sample`, its prompt with the answer of `other`)."""
    if not sample.messages:
        return sample, replace(sample, text=other.text, answer=MISMATCHED)
    ours, theirs = _prompt_length(sample), _prompt_length(other)
    messages = (*sample.messages[:ours], *other.messages[theirs:])
    untrained = {*range(ours), *(ours + at - theirs for at in other.untrained if at >= theirs)}
    return sample, replace(sample, messages=messages, untrained=frozenset(untrained), answer=MISMATCHED)


def _prompt_length(sample: Sample) -> int:
    """The number of messages before the first trained one."""
    count = len(sample.messages)
    return next((at for at in range(count) if at not in sample.untrained), count - 1)
