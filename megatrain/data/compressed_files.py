"""Open data files, transparently decompressing `.gz` and `.zst` (`chats.jsonl.gz`, say).

The suffix says that a file is compressed, and the one before it what it holds. Columns (Parquet, Arrow) have a
compression of their own and no other. Left out: bzip2, xz and archives of several files.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, TextIO, cast

COMPRESSIONS = (".gz", ".zst")
COLUMNS = (".parquet", ".arrow")


def kind_of(path: Path) -> str:
    """The suffix that says what a file holds, in small letters: `.jsonl` of `chats.JSONL.gz`."""
    suffix = path.suffix.lower()
    if suffix not in COMPRESSIONS:
        return suffix
    inner = Path(path.stem).suffix.lower()
    return inner + suffix if inner in COLUMNS else inner


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The content of a file, decompressed as it is read. Raises `OSError`, for damaged compressed data, too."""
    with _opened(path) as file:
        try:
            yield cast(BinaryIO, file)
        except (EOFError, zlib.error) as error:
            raise OSError(f"compressed data that is damaged ({error})") from error


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """The same as text in UTF-8, without a byte-order mark and with line ends as they are."""
    with open_bytes(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        yield text


def _opened(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if suffix == ".zst":
        import pyarrow  # `datasets` brings it

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return path.open("rb")
