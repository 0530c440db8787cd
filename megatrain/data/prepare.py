"""Sources to one token file: text is tokenised once, and kept so that the next run starts at once.

The cache key is a hash of every file's path, size and time of change and of the tokenizer's rules; a file
that changes is tokenised again, with the rest of its dataset. An end-of-text token closes every document. The
counts of documents and of what was left out are kept with the tokens, so a run that starts from the cache
reports the same. Left out: removing old cache entries, and progress while tokenising.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.data.alone import alone
from megatrain.data.text import STDLIB, Piece, SourceFile, find_files, read_pieces
from megatrain.data.tokenizer import (
    Tokenizer,
    encode_texts,
    end_of_text_id,
    tokenizer_identity,
    vocabulary_size,
)
from megatrain.data.tokens import TokenArray, TokenFile, is_token_file, open_tokens, write_tokens
from megatrain.errors import DataError

FORMAT = 1  # part of the cache key: raise it when the same text would give other tokens
BATCH_CHARACTERS = 1 << 22  # encoded at once, which is what a tokenizer spreads over its threads


def prepare_tokens(
    sources: str | Path | Sequence[str | Path], tokenizer: Tokenizer, *, cache: Path, pattern: str = "*"
) -> TokenFile:
    """The tokens of `sources`: one token file as it is, or text files, folders and JSONL, tokenised.

    `pattern` chooses the files of folders. Raises `DataError` for whatever cannot be read, and for
    sources without any text.
    """
    named = [sources] if isinstance(sources, str | Path) else list(sources)
    if any(_names_tokens(source) for source in named):
        if len(named) > 1:
            what = "a token file stands alone and cannot be mixed with other sources"
            raise DataError(what, where=", ".join(map(str, named)), fix="join the tokens into one file")
        return open_tokens(named[0])
    files, skipped = find_files(named, pattern)
    path = cache / f"{_cache_key(files, tokenizer)}.bin"
    if _is_written(path):
        return open_tokens(path)
    with alone(path):
        if _is_written(path):
            return open_tokens(path)
        details: dict[str, Any] = {"sources": list(map(str, named)), "tokenizer": str(tokenizer.name_or_path)}
        arrays = _token_arrays(files, tokenizer, skipped, details)
        return write_tokens(path, arrays, vocabulary_size(tokenizer), details)


def describe_tokens(file: TokenFile) -> str:
    """One line for the user: how many tokens, from what, and what was left out."""
    line = f"{len(file):,} tokens from {file.path}"
    if "documents" not in file.details:
        return line
    line = f"{len(file):,} tokens from {file.details['documents']:,} documents"
    skipped = ", ".join(f"{count} {reason}" for reason, count in file.details.get("skipped", {}).items())
    return f"{line} (left out: {skipped})" if skipped else line


def _is_written(path: Path) -> bool:
    return path.is_file() and path.with_suffix(".json").is_file()


def _names_tokens(source: str | Path) -> bool:
    return source != STDLIB and is_token_file(Path(source))


def _cache_key(files: Sequence[SourceFile], tokenizer: Tokenizer) -> str:
    listing = [(str(file.path), file.nbytes, file.mtime_ns, file.named) for file in files]
    content = json.dumps([FORMAT, tokenizer_identity(tokenizer), listing])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _token_arrays(
    files: Sequence[SourceFile], tokenizer: Tokenizer, skipped: Counter[str], details: dict[str, Any]
) -> Iterator[TokenArray]:
    """The ids of all documents, each closed by end-of-text. At its end it fills `details` with the counts."""
    closing = np.array([end_of_text_id(tokenizer)], dtype=np.int64)
    documents = 0
    for batch in _batches(read_pieces(files, skipped)):
        parts: list[TokenArray] = []
        for piece, ids in zip(batch, encode_texts(tokenizer, [piece.text for piece in batch]), strict=True):
            parts.append(ids)
            if piece.ends_document:
                parts.append(closing)
                documents += 1
        yield np.concatenate(parts)
    details |= {"files": len(files), "documents": documents, "skipped": dict(skipped)}
    if documents == 0:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "all of them are empty"
        where = ", ".join(details["sources"])
        raise DataError(
            f"no text in {len(files)} files (left out: {reasons})", where=where, fix="name a source with text"
        )


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
