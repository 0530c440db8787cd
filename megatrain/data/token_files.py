"""Opens and writes memory-mapped files of token ids: the cached form of texts, or files that the user supplies.

Two formats are read. A `.npy` file is a 1-D integer array. A `.bin` file is raw little-endian ids, described by a
`.json` file beside it (`x.bin`, `x.json`) with at least {"dtype": "uint16"} or "uint32", so a file of another project
needs one line. `write_tokens` writes the `.json` last, so a pair that a crash left incomplete is refused, not misread.
Not supported: several files as one stream, and compression.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from megatrain.errors import DataError
from megatrain.system.atomic import sync
from megatrain.system.paths import missing, read_json, usable_path, written_or_refused

DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SUFFIXES = (".bin", ".npy")
SAMPLES, SAMPLE_TOKENS = 256, 256  # a fingerprint reads at most 256 samples of 256 tokens
SCAN_TOKENS = 1 << 22  # read at once when ids are checked

TokenArray: TypeAlias = npt.NDArray[np.integer[Any]]  # 1-D, of any integer type


@dataclass(frozen=True)
class TokenFile:
    """An open token file. `ids` is a read-only memory map of shape (tokens,)."""

    path: Path
    ids: TokenArray
    vocab_size: int | None  # every id is below it, as its writer states; None: not stated
    details: Mapping[str, Any]  # what the writer stored beside the ids

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the number of tokens and of evenly spaced samples of them (of all, if there are few).

        Independent of path and dtype. It tells data sets apart, but may miss a single changed token in a large one.
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
        """Raise `DataError` for the first id outside the vocabulary. Reads nothing if the file states a vocabulary no
        larger than it."""
        if self.vocab_size is not None and self.vocab_size <= vocab_size:
            return
        for start in range(0, len(self), SCAN_TOKENS):
            require_ids_below(self.ids[start : start + SCAN_TOKENS], vocab_size, start, self.path)


def require_ids_below(ids: TokenArray, vocab_size: int, first: int, path: Path) -> None:
    """Raise `DataError` for the first of `ids` outside [0, vocab_size). first: position of `ids` in the file `path`."""
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
    """Whether a file holds tokens, by its suffix."""
    return path.suffix in SUFFIXES


def open_tokens(path: str | Path) -> TokenFile:
    """Open a `.bin` or `.npy` file, memory-mapped. Raises `DataError` if it is missing, empty or malformed."""
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
    """Write the ids of `arrays`, one after another, to `path` (a `.bin`) and its `.json`, and open them.

    A crash leaves either complete files or a pair that is refused. details: a JSON object to store; used only after the
    last array, so `arrays` may fill it. Raises `DataError` for an id outside the vocabulary, if there is no token, and
    if writing fails.
    """
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    description, fix = path.with_suffix(".json"), "free some space, or set another data.cache"
    with written_or_refused(path, DataError, fix, makes_folder=True) as draft:
        with draft.open("wb") as file:
            tokens = _write_arrays(file, arrays, vocab_size, DTYPES[dtype], path)
        sync(draft)
        head = {"dtype": dtype, "tokens": tokens, "vocab_size": vocab_size, "details": dict(details or {})}
        content = json.dumps(head, indent=1)
        stays = description.is_file() and description.read_text() == content  # it may be in use
        if not stays:
            description.unlink(missing_ok=True)  # it must not describe the new ids
    if not stays:
        with written_or_refused(description, DataError, fix) as draft:
            draft.write_text(content)
            sync(draft)
    sync(path.parent)
    return open_tokens(path)


def _open_npy(path: Path) -> TokenFile:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"not a .npy array ({error})", where=str(path), fix="save it with numpy.save") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        what = f"an array of {ids.dtype} of shape {ids.shape}, not a 1-D array of integers"
        raise DataError(what, where=str(path), fix="save one 1-D integer array")
    return TokenFile(path, ids, None, {})


def _open_bin(path: Path) -> TokenFile:
    description_path = path.with_suffix(".json")
    fix = f'write {{"dtype": "uint16"}} or "uint32" to {description_path.name}, or write the tokens again'
    if not description_path.is_file():
        raise DataError(f"has no {description_path.name} beside it, which gives its dtype", where=str(path), fix=fix)
    try:
        description = read_json(description_path)
        dtype = DTYPES[description["dtype"]]
        vocab_size = None if description.get("vocab_size") is None else int(description["vocab_size"])
        details = dict(description.get("details", {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError("does not describe a token file", where=str(description_path), fix=fix) from error
    nbytes = path.stat().st_size
    tokens, rest = divmod(nbytes, dtype.itemsize)
    if rest or description.get("tokens", tokens) != tokens:
        expected = f"{description['tokens']} tokens" if "tokens" in description else "whole tokens"
        what = f"{nbytes} bytes are not {expected} of {dtype.name}"
        raise DataError(what, where=str(path), fix=f"correct {description_path.name}, or write the tokens again")
    ids = np.memmap(path, dtype=dtype, mode="r") if tokens else np.empty(0, dtype)
    return TokenFile(path, ids, vocab_size, details)


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
