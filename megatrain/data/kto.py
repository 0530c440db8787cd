"""Reads KTO rows: answers labelled good or bad, each paired with another prompt's answer for the KL estimate.

    prompt, completion, label                    texts or messages, as TRL has them
    messages, label; conversations, label        a chat: the prompt is all but its last message
    instruction, output, label                   LLaMA-Factory's, as Alpaca; `kto_tag` is its column there

The label is a boolean, 0 or 1, or one of these as text. Each answer is followed by a *mismatched* one: the same prompt
with the answer of the previous sample (the first prompt gets the second answer). It is not a training target: its
log-probability estimates how far the policy is from the reference model, for KTO's KL term (Ethayarajh et al., "KTO:
Model alignment as prospect theoretic optimization", ICML 2024). TRL takes the answer of another sample of the batch;
here it depends on the file alone, so that the reference log-probabilities can be computed beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from megatrain.data.loss_switches import as_label
from megatrain.data.read_rows import Row
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


def read_unpaired(row: Row, schema: Schema) -> Sample:
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
    own, theirs = _prompt_length(sample), _prompt_length(other)
    messages = (*sample.messages[:own], *other.messages[theirs:])
    untrained = {*range(own), *(own + at - theirs for at in other.untrained if at >= theirs)}
    return sample, replace(sample, messages=messages, untrained=frozenset(untrained), answer=MISMATCHED)


def _prompt_length(sample: Sample) -> int:
    """The number of messages before the first trained one."""
    count = len(sample.messages)
    return next((at for at in range(count) if at not in sample.untrained), count - 1)


__all__ = ["BAD", "GOOD", "MISMATCHED", "read_unpaired", "with_mismatched"]
