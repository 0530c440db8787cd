"""Reads preference rows: a prompt with a chosen and a rejected answer, as two samples that stay together.

    prompt, chosen, rejected                    TRL's format: texts or messages
    chosen, rejected                            the prompt is what both have in common; also if there is a text prompt,
                                                but both answers are conversations that include it
    instruction [, input], chosen, rejected     LLaMA-Factory's ranking data in Alpaca format
    conversations, chosen, rejected             LLaMA-Factory's ranking data in ShareGPT format: the answers are turns

Each answer is read as if it were the only one, by the format of the rest of the row. The prompt is never trained. Not
supported: more than two answers, and scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from megatrain.data.encode import EncodedSample, Statistics
from megatrain.data.read_rows import Row
from megatrain.data.sample_formats import Format, Sample, Schema, read_sample, require_fields
from megatrain.errors import SampleError

ANSWERS = ("chosen", "rejected")
SECOND = ("rejected", "mismatched")
"""`Sample.answer` of the second sample of a pair."""


def read_pair(row: Row, schema: Schema) -> tuple[Sample, Sample]:
    """The chosen and the rejected sample of a row. Raises `SampleError` for an unusable row."""
    require_fields(row, schema)
    chosen, rejected = (row.fields[schema.column(name)] for name in ANSWERS)
    if chosen == rejected:
        what, fix = "the chosen and the rejected answer are the same", "remove the sample"
        raise SampleError(what, reason="equal answers", where=row.place, fix=fix)
    contexts = [row.fields.get(schema.column(name)) for name in ("prompt", "instruction", "conversations")]
    if not any(contexts) or (isinstance(contexts[0], str) and _share_first_message(chosen, rejected)):
        prompt, chosen, rejected = _split_prompt(chosen, rejected, row.place)
        row = row._replace(fields={**row.fields, schema.column("prompt"): prompt})
    first, second = (_with_answer(row, schema, answer) for answer in (chosen, rejected))
    return replace(first, answer="chosen"), replace(second, answer="rejected")


def _with_answer(row: Row, schema: Schema, answer: Any) -> Sample:
    """The sample of a row with one of its answers."""
    found = next(name for name in ("conversations", "instruction", "prompt") if row.fields.get(schema.column(name)))
    kinds: dict[str, tuple[Format, str]] = {
        "conversations": ("sharegpt", "conversations"),
        "instruction": ("alpaca", "output"),
        "prompt": ("completion", "completion"),
    }
    kind, field = kinds[found]
    if kind == "sharegpt":
        turns = row.fields[schema.column(found)]
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


def _share_first_message(chosen: Any, rejected: Any) -> bool:
    """Whether both answers are conversations that begin with the same message."""
    return isinstance(chosen, list) and isinstance(rejected, list) and bool(chosen) and chosen[:1] == rejected[:1]


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


__all__ = ["read_pair", "whole_pairs"]
