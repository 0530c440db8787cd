"""Memory-mapped files of token ids: the cached form of every text source, or a file of the user's.

Two forms are read. `.npy` is a one-dimensional integer array. `.bin` is raw little-endian ids with a `.json`
beside it (`x.bin`, `x.json`) that holds at least {"dtype": "uint16"} or "uint32"; so a file of another
project needs one line. `write_tokens` writes `.bin`, and its `.json` last: a pair that a crash left
incomplete is refused, not misread. Left out: several files as one stream, and compression.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from megatrain.errors import DataError
from megatrain.system.atomic import sync
from megatrain.system.paths import missing, read_json, usable_path

DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SUFFIXES = (".bin", ".npy")
SAMPLES, SAMPLE_TOKENS = 256, 256  # of a fingerprint: it reads 65,536 tokens at most
SCAN_TOKENS = 1 << 22

TokenArray: TypeAlias = npt.NDArray[np.integer[Any]]  # 1-D, of any integer type that holds the ids


@dataclass(frozen=True)
class TokenFile:
    """An open token file. `ids` is a read-only memory map of shape (tokens,): nothing is read before it is
    used.
    """

    path: Path
    ids: TokenArray
    vocab_size: int | None  # every id is below it, says the writer; None: nobody says
    details: Mapping[str, Any]  # what the writer wrote beside the ids

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the number of tokens and of evenly spaced samples, of all tokens where there are few.

        It depends on the ids alone, not on path or dtype. It tells one dataset from another; it does not find
        a single changed token in a large one.
        """
        digest = hashlib.sha256(str(len(self)).encode())
        if len(self) <= SAMPLES * SAMPLE_TOKENS:
            starts = np.array([0])
            length = len(self)
        else:
            starts = np.linspace(0, len(self) - SAMPLE_TOKENS, SAMPLES).astype(np.int64)
            length = SAMPLE_TOKENS
        for start in starts:
            digest.update(self.ids[start : start + length].astype("<i8").tobytes())
        return digest.hexdigest()[:32]

    def require_ids_below(self, vocab_size: int) -> None:
        """Raises `DataError` for the first id outside; reads no id where the writer has vouched for all."""
        if self.vocab_size is not None and self.vocab_size <= vocab_size:
            return
        for start in range(0, len(self), SCAN_TOKENS):
            require_ids_below(self.ids[start : start + SCAN_TOKENS], vocab_size, start, self.path)


def require_ids_below(ids: TokenArray, vocab_size: int, first: int, path: Path) -> None:
    """Raises `DataError` for the first of `ids` outside [0, vocab_size); `first` is where they begin in `path`."""
    if ids.size == 0 or (ids.max() < vocab_size and ids.min() >= 0):
        return
    offset = int(np.argmax((ids >= vocab_size) | (ids < 0)))
    wrong = int(ids[offset])
    raise DataError(
        f"token id {wrong} at position {first + offset} is outside the vocabulary of {vocab_size}",
        where=str(path),
        fix="tokenise the text with the model's own tokenizer, or give the model a larger vocabulary",
    )


def is_token_file(path: Path) -> bool:
    """Whether the name says that it holds tokens."""
    return path.suffix in SUFFIXES


def open_tokens(path: str | Path) -> TokenFile:
    """Opens a `.bin` or `.npy` memory mapped. Raises `DataError` where it is missing, empty or malformed."""
    path = usable_path(path, error=DataError)
    if not path.is_file():
        raise missing(path, DataError)
    try:
        file = _open_npy(path) if path.suffix == ".npy" else _open_bin(path)
    except OSError as error:
        raise DataError(error.strerror or str(error), where=str(path)) from error
    if len(file) == 0:
        raise DataError("holds no token", where=str(path), fix="name a file with tokens in it")
    return file


def write_tokens(
    path: Path, arrays: Iterable[TokenArray], vocab_size: int, details: Mapping[str, Any] | None = None
) -> TokenFile:
    """Writes the ids of `arrays`, one after another, to `path` (a `.bin`) and its `.json`, and opens them.

    A crash leaves both files whole or a pair that is refused. `details` is JSON for the reader of the file;
    it is read after the last array. Raises `DataError` for an id outside the vocabulary, for no token at all,
    and where the disk refuses.
    """
    if path.suffix != ".bin":
        raise DataError("tokens are written to a `.bin` file", where=str(path), fix="change the suffix")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_pair(path, arrays, vocab_size, details or {})
    except OSError as error:
        fix = "free some space, or choose another folder"
        raise DataError(f"cannot be written ({error.strerror or error})", where=str(path), fix=fix) from error
    return open_tokens(path)


def _open_npy(path: Path) -> TokenFile:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"not a .npy array ({error})", where=str(path), fix="save it with numpy.save") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        what = f"an array of {ids.dtype} of shape {ids.shape}, not a row of integers"
        raise DataError(what, where=str(path), fix="save one 1-D integer array")
    return TokenFile(path, ids, None, {})


def _open_bin(path: Path) -> TokenFile:
    note_path = path.with_suffix(".json")
    fix = f'write {{"dtype": "uint16"}} or "uint32" to {note_path.name}, or write the tokens again'
    if not note_path.is_file():
        raise DataError(f"has no {note_path.name} beside it to tell its dtype", where=str(path), fix=fix)
    try:
        note = read_json(note_path)
        dtype = DTYPES[note["dtype"]]
        vocab_size = None if note.get("vocab_size") is None else int(note["vocab_size"])
        details = dict(note.get("details", {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError("does not describe a token file", where=str(note_path), fix=fix) from error
    nbytes = path.stat().st_size
    tokens, rest = divmod(nbytes, dtype.itemsize)
    if rest or note.get("tokens", tokens) != tokens:
        expected = f"{note['tokens']} tokens" if "tokens" in note else "whole tokens"
        what = f"{nbytes} bytes are not {expected} of {dtype.name}"
        raise DataError(what, where=str(path), fix=f"correct {note_path.name}, or write the tokens again")
    ids = np.memmap(path, dtype=dtype, mode="r") if tokens else np.empty(0, dtype)
    return TokenFile(path, ids, vocab_size, details)


def _write_pair(path: Path, arrays: Iterable[TokenArray], vocab_size: int, details: Mapping[str, Any]) -> None:
    dtype_name = "uint16" if vocab_size <= 1 << 16 else "uint32"
    ids, note = (path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp") for _ in range(2))
    try:
        with ids.open("wb") as file:
            tokens = _write_arrays(file, arrays, vocab_size, DTYPES[dtype_name], path)
            _flush(file)
        head = {"dtype": dtype_name, "tokens": tokens, "vocab_size": vocab_size}
        content = json.dumps({**head, "details": dict(details)}, indent=1).encode()
        with note.open("wb") as file:
            file.write(content)
            _flush(file)
        old = path.with_suffix(".json")
        if old.is_file() and old.read_bytes() != content:
            old.unlink()  # it must never describe the new ids; an equal one does, and may be in use
        ids.replace(path)
        note.replace(old)
        sync(path.parent)
    finally:
        ids.unlink(missing_ok=True)
        note.unlink(missing_ok=True)


def _write_arrays(
    file: BinaryIO, arrays: Iterable[TokenArray], vocab_size: int, dtype: np.dtype[Any], path: Path
) -> int:
    tokens = 0
    for ids in arrays:
        require_ids_below(ids, vocab_size, tokens, path)
        file.write(ids.astype(dtype).tobytes())
        tokens += len(ids)
    if tokens == 0:
        raise DataError("no token to write", where=str(path), fix="give a source with text in it")
    return tokens


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
