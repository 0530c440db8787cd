"""Claims about preparation: documents end with an end of text, and a second run tokenises nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatrain.data import read_rows, text_sources
from megatrain.data.files import STDLIB
from megatrain.data.text_sources import describe_tokens, prepare_tokens
from megatrain.data.token_files import write_tokens
from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import DataError, SampleError

BYTES = load_tokenizer("bytes")
END = [256]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("one\ntwo")
    (tmp_path / "text" / "b.jsonl").write_text('{"text": "x"}\n{"text": "é"}\n')
    (tmp_path / "text" / "c.bin").write_bytes(b"\0\1\2")
    return tmp_path / "text"


@pytest.mark.parametrize("characters", [1, 1 << 20])
def test_each_document_ends_in_one_end_of_text(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, characters: int
) -> None:
    monkeypatch.setattr(read_rows, "PIECE_CHARACTERS", characters)
    monkeypatch.setattr(text_sources, "BATCH_CHARACTERS", characters)
    file = prepare_tokens([str(folder)], BYTES, cache=tmp_path / "cache")
    assert file.ids.tolist() == [*b"one\ntwo", *END, *b"x", *END, *"é".encode(), *END]
    assert file.vocab_size == 257
    assert describe_tokens(file) == [
        "13 tokens from 3 documents",
        f"left out: 1 not UTF-8 text (first: {folder / 'c.bin'})",
    ]


def test_a_cached_run_reports_the_same(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare_tokens([str(folder)], BYTES, cache=tmp_path / "cache")
    monkeypatch.delattr(text_sources, "read_texts")  # a second tokenisation would have to read
    second = prepare_tokens([str(folder)], BYTES, cache=tmp_path / "cache")
    assert second.path == first.path
    assert describe_tokens(second) == describe_tokens(first)


def test_a_damaged_cache_entry_is_made_again(folder: Path, tmp_path: Path) -> None:
    for suffix in (".bin", ".json"):
        made = prepare_tokens([str(folder)], BYTES, cache=tmp_path / "cache")
        made.path.with_suffix(suffix).unlink()
        assert prepare_tokens([str(folder)], BYTES, cache=tmp_path / "cache").ids.tolist() == made.ids.tolist()


def test_changed_inputs_are_tokenised_again(folder: Path, tmp_path: Path) -> None:
    other = load_tokenizer("bytes")
    other.add_tokens(["one"])
    cache = tmp_path / "cache"
    paths = [prepare_tokens([str(folder)], tokenizer, cache=cache).path for tokenizer in (BYTES, other)]
    paths.append(prepare_tokens([str(folder)], BYTES, cache=cache, pattern="*.txt").path)
    (folder / "a.txt").write_text("one\nTWO")
    os.utime(folder / "a.txt", ns=(1, 1))  # the clock may be coarser than this test
    changed = prepare_tokens([str(folder)], BYTES, cache=cache)
    assert len({*paths, changed.path}) == 4
    assert changed.ids[:7].tobytes().decode("utf-16-le") == "one\nTWO"


def test_a_token_file_is_used_as_is_and_alone(folder: Path, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "x.bin", [np.arange(5)], 10)
    file = prepare_tokens([str(tmp_path / "x.bin")], BYTES, cache=tmp_path / "cache")
    assert file.ids.tolist() == tokens.ids.tolist()
    assert describe_tokens(file) == [f"5 tokens from {tmp_path / 'x.bin'}"]
    assert not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match="cannot be mixed"):
        prepare_tokens([str(tmp_path / "x.bin"), str(folder)], BYTES, cache=tmp_path / "cache")


def test_empty_sources_are_refused_and_not_cached(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": ""}) + "\n")
    (tmp_path / "y.txt").touch()
    with pytest.raises(DataError, match=r"no text \(left out: 1 empty text .*; 1 empty file \(first: "):
        prepare_tokens([str(tmp_path / "x.jsonl"), str(tmp_path / "y.txt")], BYTES, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_unusable_lines_of_a_corpus_are_left_out_if_asked(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": 5}\n{"text"\n{"text": "\\ud800"}\n{"text": "b"}\n')
    with pytest.raises(SampleError, match=r"x\.jsonl:2: 'text' is int, not str"):
        prepare_tokens([str(tmp_path / "x.jsonl")], BYTES, cache=tmp_path / "cache")
    file = prepare_tokens([str(tmp_path / "x.jsonl")], BYTES, cache=tmp_path / "cache", bad="leave_out")
    assert file.ids.tolist() == [*b"a", *END, *b"b", *END]
    assert [line.split(" (")[0] for line in describe_tokens(file)[1:]] == [
        "left out: 1 'text' of another type",
        "left out: 1 not a line of JSON",
        "left out: 1 not Unicode",
    ]


def test_the_standard_library_is_a_dataset_without_a_network(tmp_path: Path) -> None:
    file = prepare_tokens([STDLIB], BYTES, cache=tmp_path)
    assert len(file) > 4_000_000
    assert int((file.ids == 256).sum()) == file.details["documents"]
