"""Parses JSON from data files: refuses duplicate keys and other silent losses, and streams long lists.

The library's reader, told to refuse what it would pass over: an object with a key twice, of which it keeps the last. A
file that is one list is read as a stream, so that memory does not grow with it; what is wrong is told by its line.
Left out: JSON lines (`read_rows.py`, `text_sources.py`), which are read line by line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

CHUNK_CHARACTERS = 1 << 20
UNSURE = 16
"""Characters at the end of what has been read in which a mistake may be one of reading only: `tru`, `\\ud83`."""

_SPACE = re.compile(r"[ \t\r\n]*")


class Malformed(ValueError):
    """Not JSON. The text says why, and `line`, from 1 on, where."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.line = line


def parsed(text: str) -> object:
    """`text` as a value. Raises `ValueError` for what is no JSON or gives a key twice, and `RecursionError`."""
    value: object = _DECODER.decode(text)
    return value


def elements(file: TextIO) -> Iterator[object]:
    """The elements of the list that `file` holds, one in memory at a time.

    Raises `Malformed`, `RecursionError` for what is nested too deeply, and `UnicodeDecodeError`.
    """
    stream = _Stream(file)
    stream.take("[")
    if stream.next() != "]":
        yield stream.value()
        while stream.next() == ",":
            stream.take(",")
            yield stream.value()
    if stream.next() != "]":
        raise Malformed("Expecting ',' delimiter", stream.line)
    stream.take("]")
    if stream.next():
        raise Malformed("Extra data", stream.line)


class _Stream:
    """What has been read of a file and not been taken yet."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at, self._ended = file, "", 0, False
        self.line = 1  # of the next character

    def next(self) -> str:
        """The next character that is no white space; empty at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._go_to(match.end())
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def take(self, character: str) -> None:
        """Goes on behind `character`, which must be the next one."""
        if self.next() != character:
            raise Malformed(f"Expecting {character!r}", self.line)
        self._go_to(self._at + 1)

    def value(self) -> object:
        """The value that is next."""
        self.next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - UNSURE
                if not is_cut or self._ended:
                    line = self.line + self._text.count("\n", self._at, error.pos)
                    raise Malformed(error.msg, line) from error
            except ValueError as error:
                raise Malformed(str(error), self.line) from error
            else:
                goes_on = end >= len(self._text) - 2 and self._text[end : end + 1] in ("", ".", "e", "E")  # a number
                if not goes_on or self._ended:
                    self._go_to(end)
                    return value
            self._read()

    def _go_to(self, place: int) -> None:
        self.line += self._text.count("\n", self._at, place)
        self._at = place

    def _read(self) -> None:
        """At least as much again as is there, so that a long value costs no more than twice its length."""
        rest = self._text[self._at :]
        more = self._file.read(max(CHUNK_CHARACTERS, len(rest)))
        self._text, self._at, self._ended = rest + more, 0, not more


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct)
