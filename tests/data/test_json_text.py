"""Claims about reading JSON: a list is parsed as `json` does, in little memory, and nothing is skipped silently."""

from __future__ import annotations

import io
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatrain.data import files
from megatrain.data.files import MalformedJson, list_elements, parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@example([0.0, -1.5e-300, 1e22], None, False, 1)
@given(st.lists(VALUES, max_size=6), st.sampled_from([None, 0, 1]), st.booleans(), st.integers(1, 9))
def test_chunked_json_lists_equal_the_whole_list(
    values: list[Any], indent: int | None, ascii_only: bool, chunk: int
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK_CHARACTERS", chunk)
        assert list(list_elements(io.StringIO(f" \n{text}\r\n"))) == values


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", 1, "Expecting '['"),
        ("[", 1, "Expecting value"),
        ('[\n{"a": 1}\n{"a": 2}]', 3, "Expecting ',' delimiter"),
        ('[\n{"a": 1},\n{"a"\n: 2,\n"b" 3}]', 5, "Expecting ':' delimiter"),
        ("[1,\n2]\n[3]", 3, "Extra data"),
        ('[\n{"a": 1}', 2, "Expecting ',' delimiter"),
        ('[\n"a', 2, "Unterminated string"),
        ('[1,\n{"a": 1, "b": {"c": 1, "c": 2}}]', 2, "the key 'c' twice"),
        (f"[1,\n{'9' * 5000}]", 2, "4300 digits"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_json_errors_name_the_line(
    monkeypatch: pytest.MonkeyPatch, text: str, line: int, what: str, chunk: int
) -> None:
    monkeypatch.setattr(files, "CHUNK_CHARACTERS", chunk)
    with pytest.raises(MalformedJson, match=re.escape(what)) as caught:
        list(list_elements(io.StringIO(text)))
    assert caught.value.line == line


def test_an_early_error_in_a_json_list_is_found_without_reading_on() -> None:
    file = io.StringIO('[{"a": 1 "b": 2},' + ",".join(["1"] * files.CHUNK_CHARACTERS) + "]")
    with pytest.raises(MalformedJson, match="delimiter"):
        list(list_elements(file))
    assert file.tell() == files.CHUNK_CHARACTERS


def test_duplicate_json_keys_are_refused() -> None:
    assert parse_json('{"a": {"a": 1}}') == {"a": {"a": 1}}
    with pytest.raises(ValueError, match="'a' twice"):
        parse_json('{"a": 1, "b": 2, "a": 3}')


def test_a_long_list_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    row = json.dumps({"text": "x" * 1000})
    path.write_text("[" + ",".join([row] * 20_000) + "]")
    tracemalloc.start()
    try:
        with path.open() as file:
            assert sum(1 for _ in list_elements(file)) == 20_000
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 3
    finally:
        tracemalloc.stop()
