"""Reads text from files, folders, JSONL or the standard library, and tokenises it once into a cached token file.

A source is one of

* a text file with any suffix: one document;
* a `.jsonl` file: one document per line, its `text` field; both may be compressed (`files.py`);
* a folder: every file below it that matches a pattern, in sorted order, each read as above;
* `python-stdlib`: the Python code of the interpreter's standard library, real text that needs no network (write
  `./python-stdlib` for a folder of that name).

A source named twice counts twice. In a folder, a file and its compressed copy are read once, and files that are not
text are left out and counted by reason; a file that the user named must be text. Text is UTF-8; a byte-order mark is
dropped, and line ends are kept. A large file is read in pieces that end with a line, so memory does not grow with its
size. Links to folders are not followed. Not here: Parquet (`read_rows.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from megatrain.data.files import (
    COMPRESSIONS,
    STDLIB,
    DamagedData,
    SourceFile,
    find_files,
    kind_of,
    open_bytes,
    open_text,
    unreadable,
)
from megatrain.data.json_text import parse_json
from megatrain.data.token_files import TokenArray, TokenFile, is_token_file, open_tokens, write_tokens
from megatrain.data.tokenizer import (
    Tokenizer,
    encode_texts,
    end_of_text_id,
    leading_ids,
    tokenizer_identity,
    vocabulary_size,
)
from megatrain.errors import DataError
from megatrain.formatting import counted
from megatrain.system.locks import alone
from megatrain.system.paths import usable_path

PIECE_CHARACTERS = 1 << 20
BYTES_PER_TOKEN = 4
"""A rough average, also used as the compression ratio of text files."""
COMPRESSION_MAGIC = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04")
"""The first bytes of gzip, zstd, bzip2, xz and zip files."""


class Piece(NamedTuple):
    """A part of a document, never empty; a document may be several pieces."""

    text: str
    ends_document: bool


def about_tokens(sources: Sequence[str], tokenizer: str = "", pattern: str = "*") -> int | None:
    """A rough number of tokens of `sources`, by file sizes; None if one of them is not on this machine.

    tokenizer: its name; `bytes` gives one token per byte. Raises `DataError` as `find_files` does.
    """
    if any(name != STDLIB and not usable_path(name, error=DataError).exists() for name in sources):
        return None
    per_token = 1 if tokenizer == "bytes" else BYTES_PER_TOKEN
    files = find_files(sources, pattern)[0]
    compressed = (*COMPRESSIONS, ".parquet")
    nbytes = [file.nbytes * (BYTES_PER_TOKEN if file.path.suffix.lower() in compressed else 1) for file in files]
    return max(1, sum(nbytes) // per_token)


def read_pieces(files: Iterable[SourceFile], skipped: Counter[str]) -> Iterator[Piece]:
    """The documents of `files`, piece by piece; what is left out is counted in `skipped`, by reason.

    Raises `DataError` for a file that the user named if it is not UTF-8 text, and for a malformed JSONL line.
    """
    for file in files:
        try:
            if kind_of(file.path) == ".jsonl":
                yield from _jsonl_pieces(file.path, skipped)
            elif file.named or _is_text(file.path):
                yield from _text_pieces(file.path, skipped)
            else:
                skipped["not UTF-8 text"] += 1
        except UnicodeDecodeError as error:
            raise _not_text(error, file.path) from error
        except OSError as error:
            raise unreadable(error, file.path) from error


def _not_text(error: UnicodeDecodeError, path: Path) -> DataError:
    with open_bytes(path) as file:
        head = file.read(8)
    if head.startswith(COMPRESSION_MAGIC):
        what = "holds compressed data, which is only read from .gz and .zst files"
        return DataError(what, where=str(path), fix="rename it to end in .gz or .zst, or decompress it")
    what = f"not UTF-8 text ({error.reason})"
    return DataError(what, where=str(path), fix="convert it to UTF-8, or leave it out")


def _text_pieces(path: Path, skipped: Counter[str]) -> Iterator[Piece]:
    """A text file in pieces of about `PIECE_CHARACTERS`. Raises `UnicodeDecodeError` if it is not text."""
    with open_text(path) as file:
        text = _next_piece(file)
        if not text:
            skipped["empty"] += 1
        while text:
            following = _next_piece(file)
            yield Piece(text, ends_document=not following)
            text = following


def _next_piece(file: TextIO) -> str:
    text = file.read(PIECE_CHARACTERS)
    text += file.readline(PIECE_CHARACTERS)  # to the end of the line, unless it is very long
    if "\0" in text:
        raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "a zero byte")
    return text


def _is_text(path: Path) -> bool:
    """Whether a file is text; reads all of it, so that reading it later does not fail halfway."""
    try:
        for _ in _text_pieces(path, Counter()):
            pass
    except (UnicodeDecodeError, DamagedData):
        return False
    return True


def _jsonl_pieces(path: Path, skipped: Counter[str]) -> Iterator[Piece]:
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            text = _text_field(line, where=f"{path}:{number}")
            if text:
                yield Piece(text, ends_document=True)
            else:
                skipped["empty line of JSONL"] += 1


def _text_field(line: bytes, *, where: str) -> str:
    try:
        record = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text ({error.reason})", where=where, fix="convert it to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a line of JSON ({error})", where=where, fix="correct or remove the line") from error
    fix = 'each line must be {"text": "..."}'
    if not isinstance(record, dict):
        raise DataError(f"{type(record).__name__} instead of an object", where=where, fix=fix)
    if "text" not in record:
        names = ", ".join(map(repr, record)) or "nothing"
        raise DataError(f"no field 'text'; the line holds {names}", where=where, fix=fix)
    text = record["text"]
    if not isinstance(text, str):
        raise DataError(f"field 'text' is {type(text).__name__}, not a string", where=where, fix=fix)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError("field 'text' holds a lone surrogate", where=where, fix="remove its escape") from error
    return text


# From sources to a token file -----------------------------------------------------------------------------------------
#
# The key of the cache is a hash of the tokenizer's rules and of every file's path, size and modification time, so if a
# file changes, its whole data set is tokenised again. The tokenizer's leading tokens (bos), if it has any, begin every
# document unless asked otherwise, and an end-of-text token ends it. The numbers of documents and of files left out are
# stored with the tokens, so a run that starts from the cache reports the same. Old entries are not removed.

FORMAT = 2  # part of the cache key: raise it when the same text would give other tokens
BATCH_CHARACTERS = 1 << 22  # tokenised in one call, which the tokenizer spreads over its threads


def prepare_tokens(
    sources: str | Path | Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    cache: Path,
    pattern: str = "*",
    bos: bool = True,
) -> TokenFile:
    """The tokens of `sources`: a single token file as it is, or text files, JSONL and folders, tokenised.

    pattern: see `find_files`. bos: begin each document with the tokenizer's leading tokens. Raises `DataError` for a
    source that cannot be read, and if there is no text.
    """
    named = [sources] if isinstance(sources, str | Path) else list(sources)
    if any(_names_tokens(source) for source in named):
        if len(named) > 1:
            what = "a token file cannot be mixed with other sources"
            raise DataError(what, where=", ".join(map(str, named)), fix="join the tokens into one file")
        return open_tokens(named[0])
    files, skipped = find_files(named, pattern)
    leading = leading_ids(tokenizer) if bos else []
    path = cache / f"{_cache_key(files, tokenizer, leading)}.bin"
    if _is_written(path):
        return open_tokens(path)
    with alone(path):
        if _is_written(path):
            return open_tokens(path)
        details: dict[str, Any] = {"sources": list(map(str, named)), "tokenizer": str(tokenizer.name_or_path)}
        arrays = _token_arrays(files, tokenizer, leading, skipped, details)
        return write_tokens(path, arrays, vocabulary_size(tokenizer), details)


def describe_tokens(file: TokenFile) -> str:
    """One line for the user: the number of tokens, their source, and what was left out."""
    line = f"{counted(len(file), 'token')} from {file.path}"
    if "documents" not in file.details:
        return line
    line = f"{counted(len(file), 'token')} from {counted(file.details['documents'], 'document')}"
    skipped = ", ".join(f"{count} {reason}" for reason, count in file.details.get("skipped", {}).items())
    return f"{line} (left out: {skipped})" if skipped else line


def _is_written(path: Path) -> bool:
    return path.is_file() and path.with_suffix(".json").is_file()


def _names_tokens(source: str | Path) -> bool:
    return source != STDLIB and is_token_file(Path(source))


def _cache_key(files: Sequence[SourceFile], tokenizer: Tokenizer, leading: list[int]) -> str:
    listing = [(str(file.path), file.nbytes, file.mtime_ns, file.named) for file in files]
    content = json.dumps([FORMAT, tokenizer_identity(tokenizer), listing, *leading])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _token_arrays(
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    leading: list[int],
    skipped: Counter[str],
    details: dict[str, Any],
) -> Iterator[TokenArray]:
    """The ids of all documents, each begun by `leading` and ended by an end-of-text token. Fills `details` with the
    counts at its end."""
    begin, end_of_text = np.array(leading, np.int64), np.array([end_of_text_id(tokenizer)], dtype=np.int64)
    documents, begins = 0, bool(leading)
    for batch in _batches(read_pieces(files, skipped)):
        parts: list[TokenArray] = []
        for piece, ids in zip(batch, encode_texts(tokenizer, [piece.text for piece in batch]), strict=True):
            parts += [begin, ids] if begins else [ids]
            begins = piece.ends_document and bool(leading)
            if piece.ends_document:
                parts.append(end_of_text)
                documents += 1
        yield np.concatenate(parts)
    details |= {"files": len(files), "documents": documents, "skipped": dict(skipped)}
    if documents == 0:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "all of them are empty"
        where = ", ".join(details["sources"])
        what = f"no text in {counted(len(files), 'file')} (left out: {reasons})"
        raise DataError(what, where=where, fix="name a source with text")


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
