"""Reads KTO rows: answers labelled good or bad, each paired with another prompt's answer for the KL estimate.

    prompt, completion, label                    texts or messages, as TRL has them
    messages, label; conversations, label        a chat: the prompt is all but its last message
    instruction, output, label                   LLaMA-Factory's, as Alpaca; `kto_tag` is its column there

The label is a boolean, or 0, 1 or a text that says so. Behind each answer comes a *mismatched* one: the same prompt
with the answer of the sample before it (the first has that of the second). It is never trained: its log-probability
tells how far the policy is from its reference, for KTO's KL term. TRL takes the answer of another sample of the batch;
here which one it is depends on the file alone, so the reference can be asked before anything is batched. Left out: how
many good and bad answers there are, which weights may make up for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from megatrain.data.read_rows import Row
from megatrain.data.sample_formats import Format, Sample, Schema, as_mark, read_sample, require_fields
from megatrain.errors import DataError, SampleError

GOOD: Literal["desirable"] = "desirable"
BAD: Literal["undesirable"] = "undesirable"
MISMATCHED: Literal["mismatched"] = "mismatched"
HELD: tuple[tuple[str, Format], ...] = (
    ("messages", "chat"),
    ("conversations", "sharegpt"),
    ("completion", "completion"),
    ("instruction", "alpaca"),
)
"""The field by which the rest of a row is told, and the format that it then is of."""


def read_unpaired(row: Row, schema: Schema) -> Sample:
    """The answer of a row, said to be desirable or not. Raises `SampleError`: what is wrong, and where."""
    require_fields(row, schema)
    column = schema.column("label")
    if (is_good := as_mark(row.fields[column])) is None:
        what = f"{column!r} is {row.fields[column]!r}, not true or false"
        raise SampleError(what, reason="a label that is neither", where=row.place, fix="write true or false")
    kinds = [kind for name, kind in HELD if row.fields.get(schema.column(name)) is not None]
    if not kinds:
        what, fix = "a label and no answer", f"add one of {', '.join(name for name, _ in HELD)}, or set data.columns"
        raise SampleError(what, reason="without an answer", where=row.place, fix=fix)
    inner = replace(schema, format=kinds[0], columns={k: v for k, v in schema.columns.items() if k != "label"})
    fields = {name: value for name, value in row.fields.items() if name != column}
    sample = read_sample(replace(row, fields=fields), inner)
    if sample.messages and kinds[0] != "completion":
        context = len(sample.messages) - 1
        if not context or sample.messages[-1]["role"] != "assistant":
            what = "a conversation that does not end in an answer to something"
            raise SampleError(what, reason="without an answer", where=row.place, fix="remove the sample")
        sample = replace(sample, untrained=sample.untrained | frozenset(range(context)))
    return replace(sample, answer=GOOD if is_good else BAD)


def with_mismatched(samples: Iterable[Sample], name: str) -> Iterator[Sample]:
    """`samples`, and behind each one that is said to be good or bad the mismatched one.

    name: of the source. Raises `DataError` where it has only one answer of a kind, text or chat.
    """
    before: dict[bool, Sample] = {}
    alone: dict[bool, Sample] = {}
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
        what, fix = "one answer alone, and KTO compares with others'", "add samples"
        raise DataError(what, where=f"{name} ({sample.origin})", fix=fix)


def _pair(sample: Sample, other: Sample) -> tuple[Sample, Sample]:
    if not sample.messages:
        return sample, replace(sample, text=other.text, answer=MISMATCHED)
    own, theirs = _context(sample), _context(other)
    messages = (*sample.messages[:own], *other.messages[theirs:])
    untrained = {*range(own), *(own + at - theirs for at in other.untrained if at >= theirs)}
    return sample, replace(sample, messages=messages, untrained=frozenset(untrained), answer=MISMATCHED)


def _context(sample: Sample) -> int:
    """Messages of the prompt: those before the first that is trained."""
    count = len(sample.messages)
    return next((at for at in range(count) if at not in sample.untrained), count - 1)


__all__ = ["BAD", "GOOD", "MISMATCHED", "read_unpaired", "with_mismatched"]
