"""Claims about distinguishing text from samples: by name, format and content, with an error in doubt."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path

import datasets
import pytest

from megatrain.data.detect_kind import holds_samples, require_source, source_called
from megatrain.data.read_rows import LeftOut
from megatrain.data.sample_formats import Schema
from megatrain.data.sample_sources import Source, read_samples
from megatrain.data.text_sources import prepare_tokens
from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import DataError

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
ALPACA = {"instruction": "q", "output": "a"}


def lines(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def counts(source: Source, bad: str = "leave_out") -> tuple[int, dict[str, int]]:
    left_out = LeftOut("leave_out" if bad == "leave_out" else "stop")
    return sum(1 for _ in read_samples(source, left_out)), dict(left_out.counts)


@pytest.mark.parametrize("name", ["data/train.parquet", "data.json", "data.jsonl", "DATA.JSON"])
def test_a_readme_beside_samples_is_ignored(tmp_path: Path, name: str) -> None:
    """A data set cloned from the hub, with its card and the client's cache files."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        datasets.Dataset.from_list([ALPACA]).to_parquet(str(path))
    else:
        path.write_text(json.dumps([ALPACA] if path.suffix.lower() == ".json" else ALPACA))
    for other in ("README.md", "LICENSE", ".gitattributes", ".cache/huggingface/a.metadata", "dataset_infos.json"):
        lines(tmp_path / other, "{}")
    assert holds_samples(str(tmp_path))
    count, left_out = counts(Source(str(tmp_path)), "stop")
    assert count == 1
    assert left_out == {"hidden in a folder": 2, "file about the data": 3}


def test_a_mixed_folder_asks_for_the_format(tmp_path: Path) -> None:
    lines(tmp_path / "chats.jsonl", CHAT)
    lines(tmp_path / "module.py", "code")
    with pytest.raises(DataError, match=r"holds samples \(chats.jsonl\) and other files \(module.py\); .*pattern"):
        holds_samples(str(tmp_path))
    assert holds_samples(str(tmp_path), Schema("chat"))
    assert holds_samples(str(tmp_path), pattern="*.jsonl")
    assert not holds_samples(str(tmp_path), pattern="*.py")
    assert not holds_samples(str(tmp_path), Schema("text"))


def test_a_folder_of_code_is_text(tmp_path: Path) -> None:
    lines(tmp_path / "README.md", "words")
    lines(tmp_path / "package.json", '{"name": "x", "version": "1"}')
    lines(tmp_path / "names.json", '["a", "b"]')
    lines(tmp_path / "module.py", "code")
    assert not holds_samples(str(tmp_path))


def test_any_file_may_mark_a_folder_as_samples(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    lines(tmp_path / "b.jsonl", {"text": "t"})
    lines(tmp_path / "c.jsonl", {**CHAT, "text": "u"})
    assert holds_samples(str(tmp_path))


def test_the_first_json_object_decides(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", "{", {"about": "these chats"}, CHAT)
    assert holds_samples(str(path))
    assert counts(Source(str(path))) == (1, {"not a line of JSON": 1, "of no known format": 1})


def test_unknown_json_lines_are_treated_as_samples(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"dialog": CHAT["messages"]})
    assert holds_samples(str(path))
    with pytest.raises(DataError, match=r"it holds 'dialog'; set data\.columns=\{messages: dialog\}"):
        counts(Source(str(path)), "stop")
    assert holds_samples(str(tmp_path))
    assert not holds_samples(str(lines(tmp_path / "b.jsonl", {"title": "x"}, {"text": "t"})))


def test_user_field_names_are_used_for_detection(tmp_path: Path) -> None:
    path = str(lines(tmp_path / "a.jsonl", {"dialog": CHAT["messages"], "text": "no"}))
    assert not holds_samples(path)
    assert holds_samples(path, Schema(columns={"messages": "dialog"}))
    path = str(lines(tmp_path / "b.jsonl", {"content": "yes", "text": "no"}))
    schema = Schema("text", {"text": "content"})
    assert holds_samples(path, schema)  # if the name of the field is given
    assert [sample.text for sample in read_samples(source_called(path, schema), LeftOut())] == ["yes"]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("chats.txt", json.dumps(CHAT), "samples, but its name does not say so; rename it"),
        ("chats", json.dumps([ALPACA]), "samples, but its name does not say so; rename it"),
        ("a.txt", '"Instruction";"input";"output"\nq;;a', "a table of samples, but its name does not say so"),
    ],
)
def test_samples_with_another_suffix_are_not_read_as_text(tmp_path: Path, name: str, content: str, what: str) -> None:
    path = lines(tmp_path / name, content)
    with pytest.raises(DataError, match=what):
        holds_samples(str(path))
    assert not holds_samples(str(path), Schema("text"))


@pytest.mark.parametrize(
    "content", ["Messages\n\nwords", "[1]", "{}", "instruction, and more", json.dumps({"text": "x"})]
)
def test_ordinary_text_is_detected_as_text(tmp_path: Path, content: str) -> None:
    assert not holds_samples(str(lines(tmp_path / "a.txt", content)))


def test_a_pattern_chooses_the_files_of_samples(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", CHAT, CHAT)
    lines(tmp_path / "test.jsonl", CHAT)
    assert counts(source_called(str(tmp_path), Schema(), pattern="train*"))[0] == 2
    assert counts(source_called(str(tmp_path), Schema()))[0] == 3


def test_hub_names_may_end_in_a_version() -> None:
    assert holds_samples("teknium/OpenHermes-2.5")
    assert not holds_samples("data/missing.json5")


def test_a_missing_file_in_an_existing_folder_is_not_a_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(tmp_path / "data" / "chats.jsonl", CHAT)
    monkeypatch.chdir(tmp_path)
    for schema in (Schema(), Schema("chat")):
        with pytest.raises(DataError, match=r"no such file or folder; did you mean .*data/chats\.jsonl"):
            require_source("data/chats", schema)
    with pytest.raises(DataError, match=r"no such file or folder"):
        load_tokenizer("data/chats")


def test_a_symlinks_own_suffix_decides(tmp_path: Path) -> None:
    """Files as in the cache of the hub's client."""
    blob = lines(tmp_path / "blobs" / "0a1b", ALPACA)
    text = lines(tmp_path / "blobs" / "2c3d", {"text": "words"})
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "a.jsonl").symlink_to(blob)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.jsonl").symlink_to(text)
    assert holds_samples(str(tmp_path / "rich"))
    assert counts(Source(str(tmp_path / "rich"))) == (1, {})
    assert not holds_samples(str(tmp_path / "plain"))
    tokens = prepare_tokens([str(tmp_path / "plain")], load_tokenizer("bytes"), cache=tmp_path / "cache")
    assert bytes(tokens.ids[:-1].astype("u1")) == b"words"


def test_unsupported_compression_is_reported_as_such(tmp_path: Path) -> None:
    for name, content in (("a.txt", gzip.compress(b"x")), ("a.txt.bz2", bz2.compress(b"x"))):
        (tmp_path / name).write_bytes(content)
        assert not holds_samples(str(tmp_path / name))
        with pytest.raises(DataError, match=r"holds compressed data, .*; rename it to end in \.gz or \.zst, or"):
            prepare_tokens([str(tmp_path / name)], load_tokenizer("bytes"), cache=tmp_path)


def test_a_folder_of_code_with_a_table_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "table.csv").write_text("x,y\n1,2\n")
    assert not holds_samples(str(tmp_path))
    (tmp_path / "samples.csv").write_text("text\nwords\n")
    with pytest.raises(DataError, match=r"holds samples \(samples\.csv\) and other files \(a\.py\)"):
        holds_samples(str(tmp_path))


def test_compressed_companion_files_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "README.md.gz").write_bytes(gzip.compress(b"About these chats."))
    lines(tmp_path / "a.jsonl", CHAT)
    assert holds_samples(str(tmp_path))
    assert counts(Source(str(tmp_path)))[0] == 1


def test_csv_is_samples_and_compressed_files_are_their_content(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("instruction,output\nq,a\n")
    (tmp_path / "chats.jsonl.gz").write_bytes(gzip.compress(json.dumps(CHAT).encode()))
    (tmp_path / "text.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "words"}).encode()))
    (tmp_path / "text.md.gz").write_bytes(gzip.compress(b"words"))
    found = {path.name: holds_samples(str(path)) for path in tmp_path.iterdir()}
    assert found == {"a.csv": True, "chats.jsonl.gz": True, "text.jsonl.gz": False, "text.md.gz": False}
