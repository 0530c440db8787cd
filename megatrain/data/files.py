"""Finds and opens the files of a data source, decompresses `.gz` and `.zst`, and parses JSON.

The last suffix says how a file is compressed, the one before it what it contains. A folder is every file below it that
matches a pattern, in sorted order; hidden files and links to folders are left out, and a file and its compressed copy
count once. Not supported: compressed Parquet and Arrow files, which have a compression of their own, bzip2, xz and
archives.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn, TextIO, cast

from megatrain.errors import DataError, first_line
from megatrain.system.paths import missing, usable_path

STDLIB = "python-stdlib"
"""The source that is the Python code of the interpreter's standard library, real text that needs no network."""
# Installed packages, tests, and files that are mostly tables or copies.
STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"}
)
COMPRESSIONS = (".gz", ".zst")
COLUMNS = (".parquet", ".arrow")
BYTES_PER_TOKEN = 4
"""A rough average, also used as the compression ratio of text files."""


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


@dataclass(frozen=True)
class SourceFile:
    """A file to read, with its size and modification time, which show whether it has changed."""

    path: Path
    nbytes: int
    mtime_ns: int
    named: bool  # named by the user, not found in a folder, so it must be text


def find_files(sources: Sequence[str | Path], pattern: str = "*") -> tuple[list[SourceFile], Counter[str]]:
    """(the files of `sources` in reading order, reason -> number of files that were left out of folders).

    pattern: chooses the files of a folder, matched from the right: `*.md` at any depth, `docs/*.md` in any folder
    `docs`. Raises `DataError` for a source that is missing or unreadable, and if no file matches.
    """
    files: list[SourceFile] = []
    skipped: Counter[str] = Counter()
    for source in sources:
        path = usable_path(source, error=DataError)
        if source == STDLIB:
            paths = _stdlib_files()
        elif path.is_dir():
            paths = _folder_files(path, pattern, skipped)
        elif path.is_file():
            paths = [path]
        elif path.exists():
            raise DataError("neither a file nor a folder", where=str(path))
        else:
            raise missing(path, DataError)
        files += [_source_file(file, named=file == path) for file in paths]
    if not sources:
        raise DataError("no data source was given", fix=f"name a file or folder, or `{STDLIB}`")
    return files, skipped


def _source_file(path: Path, *, named: bool) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(error, path) from error
    # Links are not resolved: in the hub's cache the link has the file's name, and its target a hash.
    return SourceFile(path.absolute(), status.st_size, status.st_mtime_ns, named)


def _folder_files(folder: Path, pattern: str, skipped: Counter[str]) -> list[Path]:
    glob = pattern.removeprefix("**/")  # implied by every pattern
    if not glob or "**" in glob or glob.startswith("/"):
        raise DataError(f"{pattern!r} is not a pattern for files", where=str(folder), fix="write `*.txt`")
    matching: list[Path] = []
    for path in _walk(folder, skipped, frozenset()):
        if not path.relative_to(folder).match(glob):
            continue
        if path.name.startswith("."):
            skipped["hidden"] += 1
        elif not _is_file(path):
            skipped["special"] += 1  # a pipe, or a broken link
        else:
            matching.append(path)
    if not matching:
        fix = "name a folder with text in it" if glob == "*" else "correct the pattern"
        raise DataError(f"no file matches {pattern!r}", where=str(folder), fix=fix)
    once: dict[Path, Path] = {}  # by the uncompressed name; an uncompressed file is sorted first
    for path in sorted(matching):
        once.setdefault(without_compression(path), path)
    if copies := len(matching) - len(once):
        skipped["compressed copy of a file"] += copies
    return list(once.values())


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # in a folder that may be listed, but not entered
        raise unreadable(error, path) from error


def _stdlib_files() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in _walk(folder, Counter(), STDLIB_LEFT_OUT) if path.suffix == ".py")
    if not paths:
        fix = "name another source, since this interpreter keeps its library elsewhere"
        raise DataError(f"no Python file in {folder}", where=STDLIB, fix=fix)
    return paths


def _walk(folder: Path, skipped: Counter[str], without: frozenset[str]) -> Iterator[Path]:
    """The files in `folder` and below it, except in hidden folders, linked folders and those named in `without`."""
    for place, folders, names in os.walk(folder, onerror=_refuse):
        inside = []
        for name in folders:
            if name.startswith("."):
                skipped["hidden"] += 1
            elif os.path.islink(os.path.join(place, name)):
                skipped["linked"] += 1
            elif name not in without:
                inside.append(name)
        folders[:] = inside  # `os.walk` continues with these
        yield from (Path(place, name) for name in names)


def _refuse(error: OSError) -> NoReturn:
    raise unreadable(error, error.filename) from error


def unreadable(error: OSError, path: Path | str) -> DataError:
    """The error for a file, or for a folder with one, that the system or its compression refuses to read."""
    remedy = "download it again" if isinstance(error, DamagedData) else "make it readable"
    return DataError(error.strerror or str(error), where=str(error.filename or path), fix=f"{remedy}, or leave it out")


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


# JSON -----------------------------------------------------------------------------------------------------------------
#
# Python's `json` keeps the last value of a key that an object has twice; here that is an error. A file that is one list
# is parsed as a stream, so memory does not grow with its length, and errors name the line. JSON lines are read line by
# line (`read_rows.py`).

CHUNK_CHARACTERS = 1 << 20
CUT_TOKEN_CHARACTERS = 16
"""An error this close to the end of the text read so far may come from a token that is cut there: `tru`, `\\ud83`."""

_SPACE = re.compile(r"[ \t\r\n]*")


class MalformedJson(ValueError):
    """Not JSON. The message says why; `line`, counted from 1, says where."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.line = line


def parse_json(text: str) -> object:
    """Parse `text`. Raises `ValueError` if it is not JSON or has a duplicate key, and `RecursionError` if it is nested
    too deeply."""
    value: object = _DECODER.decode(text)
    return value


def list_elements(file: TextIO) -> Iterator[object]:
    """The elements of the JSON list in `file`, with one in memory at a time.

    Raises `MalformedJson`, `UnicodeDecodeError`, and `RecursionError` for elements that are nested too deeply.
    """
    stream = _Stream(file)
    stream.take("[")
    if stream.peek() != "]":
        yield stream.value()
        while stream.peek() == ",":
            stream.take(",")
            yield stream.value()
    if stream.peek() != "]":
        raise MalformedJson("Expecting ',' delimiter", stream.line)
    stream.take("]")
    if stream.peek():
        raise MalformedJson("Extra data", stream.line)


class _Stream:
    """Reads JSON tokens and values from a file, chunk by chunk."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._ended = file, False
        self._text, self._at = "", 0  # the current chunk, and the position of the next character in it
        self.line = 1  # of the next character

    def peek(self) -> str:
        """The next character after white space, which is skipped; empty at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._advance(match.end())
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def take(self, character: str) -> None:
        """Consume `character`. Raises `MalformedJson` if it is not the next one."""
        if self.peek() != character:
            raise MalformedJson(f"Expecting {character!r}", self.line)
        self._advance(self._at + 1)

    def value(self) -> object:
        """Parse and consume the next value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                may_be_cut = error.msg.startswith("Unterminated") or error.pos + CUT_TOKEN_CHARACTERS >= len(self._text)
                if self._ended or not may_be_cut:  # else what follows may mend it
                    line = self.line + self._text.count("\n", self._at, error.pos)
                    raise MalformedJson(error.msg, line) from error
            except ValueError as error:
                raise MalformedJson(str(error), self.line) from error
            else:
                if end + 2 < len(self._text) or self._ended:  # else a number may go on: `1.5`, `1e9`
                    self._advance(end)
                    return value
            self._read()

    def _advance(self, position: int) -> None:
        self.line += self._text.count("\n", self._at, position)
        self._at = position

    def _read(self) -> None:
        """Read on, at least as much as is left of the chunk, so that parsing a long value takes linear time."""
        rest = self._text[self._at :]
        more = self._file.read(max(CHUNK_CHARACTERS, len(rest)))
        self._text, self._at, self._ended = rest + more, 0, not more


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_refuse_duplicate_keys)
