"""Tokenises plain texts once into a cached token file, and cuts it into fixed windows.

    Windows: window i is tokens [i * window, (i + 1) * window)

The key of the cache is a hash of the tokenizer's rules and of every file's path, size and modification time, so if a
file changes, its whole data set is tokenised again. The tokenizer's leading tokens (bos), if it has any, begin every
document unless asked otherwise, and an end-of-text token ends it. What was left out is stored with the tokens, so a run
that starts from the cache reports the same. A source named twice counts twice. Old entries are not removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatrain.data.files import STDLIB, find_files
from megatrain.data.packing import TrainingRow, epoch_order
from megatrain.data.read_rows import Bad, LeftOut, SourceRow, read_texts
from megatrain.data.sample_formats import Schema, require_fields
from megatrain.data.token_files import (
    TokenArray,
    TokenFile,
    is_token_file,
    open_tokens,
    write_tokens,
)
from megatrain.data.tokenizer import (
    Tokenizer,
    batched,
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
    with alone(path) if not _is_written(path) else nullcontext():
        if _is_written(path):
            return open_tokens(path)
        left_out, details = LeftOut(bad), dict[str, Any](sources=list(names))
        rows = (row for name in names for row in read_texts(name, left_out, pattern))
        arrays = _token_arrays(_usable(rows, left_out), left_out, tokenizer, leading, details)
        return write_tokens(path, arrays, vocabulary_size(tokenizer), details)


def describe_tokens(file: TokenFile) -> list[str]:
    """Lines for the user: the number of tokens, their source, and what was left out."""
    if "documents" not in file.details:
        return [f"{counted(len(file), 'token')} from {file.path}"]
    first = f"{counted(len(file), 'token')} from {counted(file.details['documents'], 'document')}"
    return [first, *(f"left out: {line}" for line in file.details["left_out"])]


def _is_written(path: Path) -> bool:
    return path.is_file() and path.with_suffix(".json").is_file()


def _usable(rows: Iterable[SourceRow], left_out: LeftOut) -> Iterator[SourceRow]:
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
    rows: Iterable[SourceRow], left_out: LeftOut, tokenizer: Tokenizer, leading: list[int], details: dict[str, Any]
) -> Iterator[TokenArray]:
    """The ids of all documents, each begun by `leading` and ended by an end-of-text token; at their end `details` has
    their number and what was left out. Raises `DataError` if there is no text."""
    begin, end = np.array(leading, np.int64), np.array([end_of_text_id(tokenizer)], dtype=np.int64)
    details["documents"] = 0
    for batch in batched(rows, lambda row: len(row.fields["text"]), BATCH_CHARACTERS):
        parts: list[TokenArray] = []
        for row, ids in zip(batch, encode_texts(tokenizer, [row.fields["text"] for row in batch]), strict=True):
            parts += [*([begin] if row.begins and leading else []), ids, *([end] if row.ends else [])]
            details["documents"] += row.ends
        yield np.concatenate(parts)
    details["left_out"] = left_out.lines()
    if not details["documents"]:
        what = f"no text (left out: {'; '.join(left_out.lines()) or 'nothing'})"
        raise DataError(what, where=", ".join(details["sources"]), fix="name a source with text")


# From a token file to windows -----------------------------------------------------------------------------------------
#
# Documents continue across windows, with an end-of-text token between them, so no token is padding. Tokens after the
# last whole window are unused and counted. Labels equal the inputs, since Hugging Face models shift them in the loss.
# No attention mask separates documents.


@dataclass(frozen=True)
class Windows:
    """`count` windows of a token file, from window `first` on. Nothing is read before it is used."""

    file: TokenFile
    window: int  # tokens
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def row(self, index: int) -> TrainingRow:
        """Window `index`, with every token as a target."""
        if not 0 <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")
        start = (self.first + index) * self.window
        ids = self.file.ids[start : start + self.window].astype(np.int64)
        return TrainingRow(ids, ids)

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """A random permutation."""
        return epoch_order(seed, epoch, self.count)

    def targets(self, index: int) -> int:
        """The number of targets of a window: all tokens but the first."""
        return self.window - 1

    @property
    def identity(self) -> dict[str, str | int]:
        """The tokens, and which windows of them these are."""
        dataset = self.file.fingerprint
        return {"dataset": dataset, "window": self.window, "first": self.first, "windows": self.count}


def pack(file: TokenFile, *, window: int, vocab_size: int) -> Windows:
    """All whole windows of `window` tokens in `file`.

    Unless the file states that its ids are below `vocab_size`, it is read once to check them, so that a wrong id is
    found before training. Raises `DataError` if the file is shorter than a window, or has an id outside the model's
    vocabulary.
    """
    if len(file) < window:
        fix = f"set data.sequence_length={len(file)} or less, or give more text"
        raise DataError(f"{len(file)} tokens are less than one window of {window}", where=str(file.path), fix=fix)
    file.require_ids_below(vocab_size)
    return Windows(file, window, first=0, count=len(file) // window)


def unused_tokens(windows: Windows) -> int:
    """The number of tokens after the file's last whole window."""
    return len(windows.file) % windows.window


def split_windows(windows: Windows, validation_fraction: float) -> tuple[Windows, Windows | None]:
    """(training, validation): hold out the last `validation_fraction` of the windows, at least one.

    At most one document is in both parts. A fraction of 0 gives None for validation. Raises `DataError` if no window
    would be left to train on.
    """
    if validation_fraction == 0:
        return windows, None
    held_out = max(1, round(windows.count * validation_fraction))
    trained = windows.count - held_out
    if trained < 1:
        counted = "the only sequence" if windows.count == 1 else f"{held_out} of {windows.count} sequences"
        what = f"holding out {counted} for validation leaves none to train on"
        fix = "lower data.sequence_length or data.validation_fraction, or give more text"
        raise DataError(what, where=str(windows.file.path), fix=fix)
    return replace(windows, count=trained), replace(windows, first=windows.first + trained, count=held_out)
