"""Opens data files, transparently decompressing `.gz` and `.zst` (`chats.jsonl.gz`, say).

The last suffix says how a file is compressed, the one before it what it contains. Not supported: compressed Parquet and
Arrow files, which have a compression of their own, bzip2, xz and archives.
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
    """Compressed data that is truncated, corrupt, or of another format than its suffix says."""


def without_compression(path: Path) -> Path:
    """The path without the suffix of a compression: `chats.jsonl` for `chats.jsonl.gz`."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path


def kind_of(path: Path) -> str:
    """The suffix that says what a file contains, in lower case: `.jsonl` for `chats.JSONL.gz`. A compressed table keeps
    both suffixes (`.parquet.gz`), which no reader accepts."""
    inner = without_compression(path).suffix.lower()
    return inner + path.suffix.lower() if inner in COLUMNS and path.suffix.lower() != inner else inner


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressed as they are read. Raises `OSError`, which includes `DamagedData`."""
    with path.open("rb") as stored, _decompressed(stored, path.suffix.lower()) as file:
        try:
            yield cast(BinaryIO, file)
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # not from a decompressor
                raise
            raise DamagedData(f"compressed data that is damaged ({first_line(error)})") from error


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """`open_bytes` as UTF-8 text, without a byte-order mark and with line ends unchanged."""
    with open_bytes(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        yield text


def _decompressed(file: IO[bytes], suffix: str) -> IO[bytes]:
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(file))
    return zstd_reader(file) if suffix == ".zst" else file


def zstd_reader(source: IO[bytes]) -> IO[bytes]:
    """Read the decompressed bytes of an open zstd file."""
    import pyarrow  # `datasets` brings it

    return io.BufferedReader(pyarrow.input_stream(source, compression="zstd"))
