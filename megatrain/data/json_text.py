"""Parses JSON from data files: refuses duplicate keys and other silent losses, and streams long lists.

Python's `json` keeps the last value of a key that an object has twice; here that is an error. A file that is one list
is parsed as a stream, so memory does not grow with its length, and errors name the line. Not here: JSON lines, which
are read line by line (`read_rows.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

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
                may_be_cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - CUT_TOKEN_CHARACTERS
                if not may_be_cut or self._ended:
                    line = self.line + self._text.count("\n", self._at, error.pos)
                    raise MalformedJson(error.msg, line) from error
            except ValueError as error:
                raise MalformedJson(str(error), self.line) from error
            else:
                may_be_cut = end >= len(self._text) - 2 and self._text[end : end + 1] in ("", ".", "e", "E")  # a number
                if not may_be_cut or self._ended:
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
