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

from megatrain.errors import first_line

COMPRESSIONS = (".gz", ".zst")
COLUMNS = (".parquet", ".arrow")


class DamagedData(OSError):
    """Compressed data that is cut off or changed, or not what its suffix says."""


def without_compression(path: Path) -> Path:
    """What the file would be called if it were not compressed: `chats.jsonl` of `chats.jsonl.gz`."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path


def kind_of(path: Path) -> str:
    """The suffix that says what a file holds, in small letters: `.jsonl` of `chats.JSONL.gz`."""
    inner = without_compression(path).suffix.lower()
    return inner + path.suffix.lower() if inner in COLUMNS and path.suffix.lower() != inner else inner


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The content of a file, decompressed as it is read. Raises `OSError`, `DamagedData` among these."""
    with _opened(path) as file:
        try:
            yield cast(BinaryIO, file)
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # not of a decompressor
                raise
            raise DamagedData(f"compressed data that is damaged ({first_line(error)})") from error


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
        return zstd_reader(str(path))
    return path.open("rb")


def zstd_reader(source: str | IO[bytes]) -> IO[bytes]:
    """What is in a file compressed by zstd, given its path or its bytes."""
    import pyarrow  # `datasets` brings it

    return io.BufferedReader(pyarrow.input_stream(source, compression="zstd"))
