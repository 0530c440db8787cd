"""Claims about text sources: what is read, in which order, and that everything left out is counted."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data import read_rows, text_sources
from megatrain.data.files import STDLIB, find_files
from megatrain.data.read_rows import LeftOut, read_texts
from megatrain.errors import DataError


def documents(*sources: str | Path, pattern: str = "*") -> tuple[list[str], Counter[str]]:
    """All documents, with their pieces joined, and the counts of what was left out."""
    left_out, texts = LeftOut(), [""]
    for row in text_sources._usable(chain(*(read_texts(str(name), left_out, pattern) for name in sources)), left_out):
        assert row.begins is (not texts[-1])
        texts[-1] += row.fields["text"]
        if row.ends:
            texts.append("")
    assert texts.pop() == ""  # the last piece has ended its document
    return texts, left_out.counts


def refused(*sources: str | Path, pattern: str = "*") -> str:
    with pytest.raises(DataError) as caught:
        documents(*sources, pattern=pattern)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "deep.md").write_text("deep")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.py").write_text("third")
    (tmp_path / "d.jsonl").write_text('{"text": "fourth"}\n\n{"text": "fifth", "id": 5}\n{"text": ""}\n')
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "picture.png").write_bytes(b"PNG\0\0")
    (tmp_path / "damaged.txt.gz").write_bytes(b"not gzip")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / ".git" / "config").write_text("hidden")
    return tmp_path


def test_a_file_and_its_compressed_copy_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    for name in ("a.txt.gz", "b.txt.gz", "deep/a.txt.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(name.encode()))
    assert documents(tmp_path) == (["first", "b.txt.gz", "deep/a.txt.gz"], {"compressed copy of a file": 1})
    assert documents(tmp_path, pattern="*.gz")[0] == ["a.txt.gz", "b.txt.gz", "deep/a.txt.gz"]
    assert documents(tmp_path / "a.txt", tmp_path / "a.txt.gz")[0] == ["first", "a.txt.gz"]


def test_a_text_folder_is_read_sorted_and_skipped_files_are_counted(folder: Path) -> None:
    found, skipped = documents(folder)
    assert found == ["first", "deep", "third", "fourth", "fifth"]
    assert skipped == {"hidden": 1, "not UTF-8 text": 3, "empty file": 2, "empty text": 1}


def test_special_files_and_links_are_counted_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "x.txt").write_text("x")
    (tmp_path / "inside" / ".hidden.txt").write_text("hidden")
    (tmp_path / "inside" / "loop").symlink_to(tmp_path / "inside")
    (tmp_path / "inside" / "broken").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "inside" / "pipe")
    assert documents(tmp_path) == (["x"], Counter(hidden=1, linked=1, special=2))


@pytest.mark.parametrize("pattern", ["*.md", "**/*.md", "b/*", "deep.*"])
def test_a_pattern_chooses_the_files_of_a_folder_at_any_depth(folder: Path, pattern: str) -> None:
    assert documents(folder, pattern=pattern) == (["deep"], Counter(hidden=1))


def test_unreadable_folders_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.scandir

    def scandir(place: str) -> object:
        if place.endswith("b"):
            raise PermissionError(13, "Permission denied", place)
        return listed(place)

    monkeypatch.setattr(os, "scandir", scandir)
    assert refused(folder).startswith(f"{folder / 'b'}: Permission denied; ")


def test_sources_keep_their_order(folder: Path) -> None:
    assert documents(str(folder / "c.py"), folder / "b", folder / "c.py")[0] == ["third", "deep", "third"]


@given(
    data=st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    characters=st.integers(1, 5),
)
def test_chunked_reading_equals_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, data: str, characters: int
) -> None:
    path = tmp_path_factory.mktemp("pieces") / "x.txt"
    path.write_bytes(b"\xef\xbb\xbf" + data.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_rows, "PIECE_CHARACTERS", characters)
        found, _ = documents(path)
    assert found == ([data] if data else [])


def test_a_file_with_a_binary_tail_is_skipped_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.txt").write_bytes(b"line\n" * 10_000 + b"\xff")
    monkeypatch.setattr(read_rows, "PIECE_CHARACTERS", 100)
    assert documents(tmp_path) == ([], Counter({"not UTF-8 text": 1}))


def test_the_standard_library_gives_python_source_without_tests_or_packages() -> None:
    files, _ = find_files([STDLIB])
    assert any(file.path.name == "argparse.py" for file in files)
    assert all(file.path.suffix == ".py" for file in files)
    assert not any({"test", "tests", "site-packages"} & set(file.path.parts[-3:]) for file in files)
    assert sum(file.nbytes for file in files) > 4_000_000
    found, skipped = documents(STDLIB)
    assert len(found) + skipped.total() == len(files)
    assert any("class ArgumentParser" in text for text in found)


def test_a_missing_source_suggests_the_nearest_existing_one(folder: Path) -> None:
    assert f"did you mean {folder / 'a.txt'}?" in refused(folder / "a.text")
    assert f"did you mean {folder / 'latin.txt'}?" in refused(folder / "latin" / "x.txt")
    assert f"{folder} does not contain 'zzzzzz'" in refused(folder / "zzzzzz")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"text": "x"', "not a line of JSON"),
        (b"\xff\xfe", "not UTF-8 text ("),
        (b"[" * 100_000, "not a line of JSON"),
        (b'["x"]', "list instead of an object"),
        (b'{"content": "x", "id": 1}', "no 'text', which text samples have; it holds 'content', 'id'"),
        (b"{}", "no 'text', which text samples have; it holds nothing"),
        (b'{"text": null}', "no 'text', which text samples have; it holds 'text' (null)"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b'{"text": 5}', "'text' is int, not str"),
    ],
)
def test_a_bad_jsonl_line_is_named_by_file_and_number(tmp_path: Path, line: bytes, what: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    message = refused(path)
    assert message.startswith(f"{path}:3: ")
    assert what in message


def test_a_named_file_must_be_text(folder: Path) -> None:
    assert "not UTF-8 text" in refused(folder / "latin.txt")
    assert "not UTF-8 text (a zero byte)" in refused(folder / "picture.png")


def test_a_folder_without_a_match_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "no file matches '*.rst'" in refused(folder, pattern="*.rst")
    for pattern in ("", "/x", "b/**/x"):
        assert f"{pattern!r} is not a pattern" in refused(folder, pattern=pattern)


def test_a_pipe_is_not_a_source(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in refused(tmp_path / "pipe")


def test_json_escapes_are_decoded(tmp_path: Path) -> None:
    words = '🎉 \u2028 \\ \n " é'
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": words}, ensure_ascii=ascii) + "\n" for ascii in (True, False)), "utf-8")
    assert documents(path)[0] == [words, words]
