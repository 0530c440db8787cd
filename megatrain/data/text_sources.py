"""Tokenises plain texts once into a cached token file: JSON lines, text files, folders, the standard library.

The key of the cache is a hash of the tokenizer's rules and of every file's path, size and modification time, so if a
file changes, its whole data set is tokenised again. The tokenizer's leading tokens (bos), if it has any, begin every
document unless asked otherwise, and an end-of-text token ends it. What was left out is stored with the tokens, so a run
that starts from the cache reports the same. A source named twice counts twice. Old entries are not removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.data.files import STDLIB, find_files
from megatrain.data.read_rows import Bad, LeftOut, Row, read_texts
from megatrain.data.sample_formats import Schema, require_fields
from megatrain.data.token_files import TokenArray, TokenFile, is_token_file, open_tokens, write_tokens
from megatrain.data.tokenizer import (
    Tokenizer,
    encode_texts,
    end_of_text_id,
    leading_ids,
    require_unicode,
    tokenizer_identity,
    vocabulary_size,
)
from megatrain.errors import DataError, SampleError
from megatrain.formatting import counted
from megatrain.system.locks import alone

FORMAT = 3  # part of the cache key: raise it when the same text would give other tokens
BATCH_CHARACTERS = 1 << 22  # tokenised in one call, which the tokenizer spreads over its threads
TEXT = Schema("text")


def prepare_tokens(
    names: Sequence[str], tokenizer: Tokenizer, *, cache: Path, pattern: str = "*", bos: bool = True, bad: Bad = "stop"
) -> TokenFile:
    """The tokens of plain texts (see `read_texts`), one after another, or a single token file as it is.

    pattern: see `find_files`. bos: begin each document with the tokenizer's leading tokens. bad: what happens to
    unusable lines of JSON. Raises `DataError` for a source that cannot be read, and if there is no text.
    """
    if any(name != STDLIB and is_token_file(Path(name)) for name in names):
        if len(names) > 1:
            what = "a token file cannot be mixed with other sources"
            raise DataError(what, where=", ".join(names), fix="join the tokens into one file")
        return open_tokens(names[0])
    files, _ = find_files(names, pattern)
    leading = leading_ids(tokenizer) if bos else []
    listing = [(str(file.path), file.nbytes, file.mtime_ns, file.named) for file in files]
    key = json.dumps([FORMAT, tokenizer_identity(tokenizer), listing, leading, bad])
    path = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.bin"
    if _is_written(path):
        return open_tokens(path)
    with alone(path):
        if _is_written(path):
            return open_tokens(path)
        left_out, details = LeftOut(bad), {"sources": list(names)}
        rows = (row for name in names for row in read_texts(name, left_out, pattern))
        arrays = _token_arrays(_usable(rows, left_out), tokenizer, leading, details)
        return write_tokens(path, _until_counted(arrays, names, left_out, details), vocabulary_size(tokenizer), details)


def describe_tokens(file: TokenFile) -> list[str]:
    """Lines for the user: the number of tokens, their source, and what was left out."""
    if "documents" not in file.details:
        return [f"{counted(len(file), 'token')} from {file.path}"]
    first = f"{counted(len(file), 'token')} from {counted(file.details['documents'], 'document')}"
    return [first, *(f"left out: {line}" for line in file.details["left_out"])]


def _is_written(path: Path) -> bool:
    return path.is_file() and path.with_suffix(".json").is_file()


def _usable(rows: Iterable[Row], left_out: LeftOut) -> Iterator[Row]:
    """The rows with a text; others are left out."""
    for row in rows:
        text = row.fields.get("text")
        try:
            if not isinstance(text, str):
                require_fields(row, TEXT)
                what = f"'text' is {type(text).__name__}, not str"
                raise SampleError(what, reason="'text' of another type", where=row.place)
            require_unicode(text, row.place)
        except SampleError as error:
            left_out.refuse(error)
            continue
        if text:
            yield row
        else:
            left_out.add("empty text", row.place)


def _token_arrays(
    rows: Iterable[Row], tokenizer: Tokenizer, leading: list[int], details: dict[str, Any]
) -> Iterator[TokenArray]:
    """The ids of all documents, each begun by `leading` and ended by an end-of-text token; `details` gets their
    number."""
    begin, end = np.array(leading, np.int64), np.array([end_of_text_id(tokenizer)], dtype=np.int64)
    details["documents"] = 0
    for batch in _batches(rows):
        parts: list[TokenArray] = []
        for row, ids in zip(batch, encode_texts(tokenizer, [row.fields["text"] for row in batch]), strict=True):
            parts += [*([begin] if row.begins and leading else []), ids, *([end] if row.ends else [])]
            details["documents"] += row.ends
        yield np.concatenate(parts)


def _until_counted(
    arrays: Iterator[TokenArray], names: Sequence[str], left_out: LeftOut, details: dict[str, Any]
) -> Iterator[TokenArray]:
    """The arrays; at their end `details` gets what was left out. Raises `DataError` if there is no text."""
    yield from arrays
    details["left_out"] = left_out.lines()
    if not details["documents"]:
        what = f"no text (left out: {'; '.join(left_out.lines()) or 'nothing'})"
        raise DataError(what, where=", ".join(names), fix="name a source with text")


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += len(row.fields["text"])
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
