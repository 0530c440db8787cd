"""Sources of samples to encoded samples on disk, encoded once and kept: the key is the content, not a name or a time.

A key is a hash of what decides the outcome: every byte of a local source (a hub's commit for one on the hub), how its
fields are read, and all that an encoder's identity holds. A file that is moved or touched is not encoded again; a
changed byte is never overlooked. Hashing reads a gigabyte or two a second, encoding a hundredth of that. What has
become of the samples, and one example, are kept beside them, so a run that starts from the cache reports the same.

Left out: removing old entries.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from megatrain.data.alone import alone
from megatrain.data.encode import EncodedSample, Encoder, Statistics, encode_samples, render_example
from megatrain.data.formats import Sample
from megatrain.data.left_out import LeftOut
from megatrain.data.preferences import whole_pairs
from megatrain.data.records import HUB_TIMEOUT_SECONDS
from megatrain.data.sample_file import SampleFile, are_samples, open_samples, write_samples
from megatrain.data.samples import Source, read_samples
from megatrain.errors import DataError, SampleError
from megatrain.files import usable_path

FORMAT = 4  # part of the key: raise it when the same content would give other samples

Runs = list[tuple[str, bool]]
"""A rendered example: runs of text, and whether they are trained."""


def prepare_samples(
    source: Source, encoder: Encoder, *, cache: Path, bad: Literal["stop", "leave_out"] = "stop"
) -> SampleFile:
    """The samples of `source`, encoded, from `cache` where it has them.

    Raises `DataError` for a source that cannot be read or has no sample to train on, and `SampleError` for one that
    cannot be used, where `bad` says so.
    """
    path = cache / f"{_key(source, encoder, bad)}.bin"
    if are_samples(path):
        return open_samples(path)
    with alone(path):
        if are_samples(path):
            return open_samples(path)
        statistics = Statistics(LeftOut(bad))
        details: dict[str, Any] = {"source": source.name}
        return write_samples(path, _encoded(source, encoder, statistics, details), encoder.vocabulary, details)


def statistics_of(file: SampleFile) -> Statistics:
    """What had become of the samples when they were encoded."""
    kept = dict(file.details["statistics"])
    left_out = kept.pop("left_out")
    left_out = LeftOut(left_out["bad"], Counter(left_out["counts"]), dict(left_out["first"]))
    return Statistics(**{**kept, "left_out": left_out, "notes": Counter(kept["notes"])})


def example_of(file: SampleFile) -> Runs:
    """The first sample that is trained on, whole."""
    return [(text, trained) for text, trained in file.details["example"]]


def holds_text_only(file: SampleFile) -> bool:
    """Whether every sample is a plain text without a prompt, of which all is trained."""
    return bool(file.details["text_only"])


def holds_chats(file: SampleFile) -> bool:
    """Whether any sample is a conversation."""
    return bool(file.details["chats"])


def holds_pairs(file: SampleFile) -> bool:
    """Whether samples 0, 2, ... are chosen answers, and the one after each the rejected one."""
    return bool(file.details["pairs"])


def _encoded(
    source: Source, encoder: Encoder, statistics: Statistics, details: dict[str, Any]
) -> Iterator[EncodedSample]:
    """The samples; at its end it fills `details`."""
    example: Runs = []
    text_only, chats = True, False
    kinds: set[bool] = set()

    def watched() -> Iterator[Sample]:
        nonlocal text_only, chats
        for sample in read_samples([source], statistics.left_out):
            text_only = text_only and sample.text is not None and not sample.prompt
            chats = chats or bool(sample.messages)
            kinds.add(bool(sample.answer))
            if not example:
                example.extend(_rendered(sample, encoder))
            yield sample

    yield from whole_pairs(encode_samples(watched(), encoder, statistics), statistics)
    if len(kinds) > 1:
        what, fix = "holds preferences and other samples", "give each a source of its own"
        raise DataError(what, where=source.name, fix=fix)
    if not statistics.samples:
        reasons = "; ".join(statistics.left_out.lines())
        what = f"no sample is left to train on (left out: {reasons})"
        raise DataError(what, where=source.name, fix="see data.train_on, data.window and data.too_long")
    details |= {
        "statistics": _as_json(statistics),
        "example": example,
        "text_only": text_only,
        "chats": chats,
        "pairs": True in kinds,
    }


def _as_json(statistics: Statistics) -> dict[str, Any]:
    """What `statistics_of` reads. `dataclasses.asdict` breaks counters before Python 3.12."""
    left_out = statistics.left_out
    kept = {"bad": left_out.bad, "counts": dict(left_out.counts), "first": left_out.first}
    plain = {one.name: getattr(statistics, one.name) for one in fields(Statistics)}
    return {**plain, "left_out": kept, "notes": dict(statistics.notes)}


def _rendered(sample: Sample, encoder: Encoder) -> Runs:
    """`sample`, or nothing where it is not trained on."""
    try:
        runs = render_example(sample, encoder)
    except (SampleError, IndexError, ValueError):
        return []
    return runs if any(trained for _, trained in runs) else []


def _key(source: Source, encoder: Encoder, bad: str) -> str:
    schema = source.schema
    how = [schema.format, dict(schema.columns), dict(schema.tags)]
    which = [source.split, source.subset, source.folder, source.pattern, source.limit]
    content = [FORMAT, encoder.identity, _content(source), how, which, bad]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _content(source: Source) -> object:
    """What tells the content of `source` from any other."""
    path = usable_path(source.name, error=DataError)
    if path.is_file():
        return [path.suffix, _digest(path)]
    if path.is_dir():
        try:
            files = sorted(file for file in path.rglob("*") if file.is_file())
        except OSError as error:
            raise _unreadable(error, path) from error
        return [[str(file.relative_to(path)), _digest(file)] for file in files]
    if path.exists():
        return source.name
    import huggingface_hub

    try:
        commit = huggingface_hub.HfApi().dataset_info(source.name, timeout=HUB_TIMEOUT_SECONDS).sha
    except Exception:  # no common base; whether there is such a data set at all, the reader says
        commit = None
    return [source.name, commit]


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(error, path) from error


def _unreadable(error: OSError, path: Path) -> DataError:
    return DataError(error.strerror or str(error), where=str(error.filename or path), fix="make it readable")
