"""Claims about the cache of encoded samples: keyed by content, and reporting the same when it is used."""

from __future__ import annotations

import json
import os
import re
import resource
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.detect_kind import begins_with_text, holds_samples, source_called
from megatrain.data.encode import EncodedSample, EncodeOptions, Encoder, encode_samples
from megatrain.data.images import Image
from megatrain.data.processor import ImageText
from megatrain.data.sample_cache import prepare_samples, write_samples
from megatrain.data.sample_formats import Schema
from megatrain.data.sample_sources import Source
from megatrain.errors import DataError, SampleError
from tests.data.chats import byte_tokenizer

ENCODER = Encoder(byte_tokenizer("chatml"), EncodeOptions(max_tokens=60))
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
UNANSWERED = {"messages": [{"role": "user", "content": "q"}]}


def lines(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def test_equal_content_is_encoded_once_at_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(tmp_path / "a" / "x.jsonl", CHAT, UNANSWERED, CHAT)
    first = prepare_samples(Source(str(path)), ENCODER, cache=tmp_path / "cache")
    moved = path.rename(tmp_path / "y.jsonl")
    os.utime(moved, (1, 1))
    monkeypatch.setattr("megatrain.data.sample_cache.encode_samples", None)  # must not be called again
    again = prepare_samples(Source(str(moved)), ENCODER, cache=tmp_path / "cache")
    assert again.tokens.path == first.tokens.path
    assert again.fingerprint == first.fingerprint
    assert again.details["report"] == first.details["report"]
    assert again.details["report"][0].startswith("2 samples")
    assert "left out: 1 without a target (first: " in again.details["report"][1]


def test_the_cache_key_covers_every_input(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", CHAT, CHAT)
    cache = tmp_path / "cache"
    found = {
        prepare_samples(source, encoder, cache=cache, bad=bad).tokens.path
        for source, encoder, bad in (
            (Source(str(path)), ENCODER, "stop"),
            (Source(str(path)), ENCODER, "leave_out"),
            (Source(str(path), limit=1), ENCODER, "stop"),
            (Source(str(path), pattern="x*"), ENCODER, "stop"),
            (Source(str(path), Schema("chat")), ENCODER, "stop"),
            (Source(str(path)), Encoder(ENCODER.tokenizer, EncodeOptions(train_on="all")), "stop"),
            (Source(str(lines(tmp_path / "y.jsonl", CHAT, {**CHAT, "id": 1}))), ENCODER, "stop"),
            (Source(str(lines(tmp_path / "folder" / "x.jsonl", CHAT, CHAT).parent)), ENCODER, "stop"),
        )
    }
    assert len(found) == 8


def test_concurrent_runs_encode_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [lines(tmp_path / name / "x.jsonl", CHAT, UNANSWERED, CHAT) for name in "ab"]
    encodings: list[object] = []

    def slowly(*arguments: Any, **_: object) -> Any:
        encodings.append(arguments)
        time.sleep(0.3)  # so that both would encode at the same time
        yield from encode_samples(*arguments)

    monkeypatch.setattr("megatrain.data.sample_cache.encode_samples", slowly)
    with ThreadPoolExecutor(2) as pool:
        files = list(pool.map(lambda path: prepare_samples(Source(str(path)), ENCODER, cache=tmp_path / "c"), paths))
    assert len(encodings) == 1
    assert files[0].tokens.path == files[1].tokens.path
    assert not list((tmp_path / "c").glob("*.lock"))


def test_a_killed_lock_holder_blocks_nobody(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", CHAT)
    entry = prepare_samples(Source(str(path)), ENCODER, cache=tmp_path / "c").tokens.path
    entry.unlink()
    entry.with_suffix(".lock").touch()
    assert len(prepare_samples(Source(str(path)), ENCODER, cache=tmp_path / "c")) == 1


def test_progress_counts_the_rows_that_have_been_read(tmp_path: Path) -> None:
    path, told = lines(tmp_path / "x.jsonl", *[CHAT] * 300), list[tuple[str, int, int | None]]()
    prepare_samples(Source(str(path)), ENCODER, cache=tmp_path / "c", progress=lambda *said: told.append(said))
    assert told == [(str(path), 256, 300), (str(path), 300, 300)]


def test_tokens_are_counted_a_few_samples_at_a_time(tmp_path: Path) -> None:
    rows = [EncodedSample(np.arange(size, dtype=np.int32), np.ones(size, np.bool_), "") for size in (1, 300, 2)]
    file = write_samples(tmp_path / "a.bin", rows * 5_000, 300, {})
    tracemalloc.start()
    try:
        assert file.counts(1).tolist() == [0, 1, 1] * 5_000
        assert tracemalloc.get_traced_memory()[1] < 6 * len(file.tokens)
    finally:
        tracemalloc.stop()


def test_few_images_wait_in_memory_until_they_are_written(tmp_path: Path) -> None:
    text = ImageText("", (Image("", "", b"x" * (1 << 20)),), "")
    row = EncodedSample(np.ones(3, np.int32), np.ones(3, np.bool_), "", images=text)
    file = write_samples(tmp_path / "a.bin", [row] * 40, 2, {}, has_images=True)
    assert max(batch.num_rows for batch in file.table.to_batches()) <= 16
    assert len(file) == 40


def test_an_example_is_kept_with_its_label_mask(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", UNANSWERED, CHAT)
    file = prepare_samples(Source(str(path)), ENCODER, cache=tmp_path / "cache")
    runs = file.details["example"]
    assert [text for text, trained in runs if trained] == ["a<|im_end|>"]
    assert "".join(text for text, _ in runs).startswith("<|im_start|>user\nq<|im_end|>")
    assert not file.details["text_only"]


def test_failed_preparation_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    broken = lines(tmp_path / "x.jsonl", CHAT, '{"messages"')
    with pytest.raises(SampleError, match=r"x\.jsonl:2: not a line of JSON"):
        prepare_samples(Source(str(broken)), ENCODER, cache=cache)
    with pytest.raises(DataError, match=r"no sample is left to train on.*2 without a target"):
        prepare_samples(Source(str(lines(tmp_path / "y.jsonl", UNANSWERED, UNANSWERED))), ENCODER, cache=cache)
    assert not cache.exists() or not list(cache.iterdir())
    kept = prepare_samples(Source(str(broken)), ENCODER, cache=cache, bad="leave_out")
    assert len(kept) == 1
    assert "left out: 1 not a line of JSON" in kept.details["report"][1]


@pytest.mark.parametrize(
    ("name", "row", "rich"),
    [
        ("x.jsonl", CHAT, True),
        ("x.jsonl", {"text": "t"}, False),
        ("x.jsonl", {"text": "t", "messages": CHAT["messages"]}, True),
        ("x.jsonl", "not JSON", True),
        ("x.txt", "words", False),
        ("x.json", CHAT, True),
        ("x.parquet", "", True),
    ],
)
def test_samples_are_distinguished_from_text(tmp_path: Path, name: str, row: object, rich: bool) -> None:
    path = lines(tmp_path / "folder" / name, row)
    assert holds_samples(str(path)) is rich
    assert holds_samples(str(path.parent)) is rich
    assert holds_samples(str(path), Schema("chat"))


def test_names_that_are_not_files_are_text_or_hub_names(tmp_path: Path) -> None:
    assert not holds_samples("python-stdlib")
    assert not holds_samples("missing.txt")
    assert not holds_samples(str(tmp_path / "ids.bin"))
    assert holds_samples("someone/some-data")
    with pytest.raises(DataError, match="python-stdlib: holds text or tokens, not chat samples"):
        holds_samples("python-stdlib", Schema("chat"))


def test_dataset_list_entries_are_sources(tmp_path: Path) -> None:
    lines(tmp_path / "alpaca.json", [{"instruction": "q", "output": "a"}])
    entry: dict[str, Any] = {"mine": {"file_name": "alpaca.json"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(entry))
    name = f"{tmp_path / 'dataset_info.json'}#mine"
    assert holds_samples(name)
    assert source_called(name, Schema()).name == str(tmp_path / "alpaca.json")
    assert not begins_with_text(source_called(name, Schema()))
    with pytest.raises(DataError, match="no data set of that name; did you mean 'mine'"):
        source_called(name.replace("mine", "mime"), Schema())


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """What a full disk is to Arrow and to Python alike, without a disk of its own: `File too large`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("rows", "letters"), [(4_000, 1), (100, 5_000)], ids=["many rows", "long rows"])
def test_samples_without_space_are_told_in_the_systems_words(tmp_path: Path, rows: int, letters: int) -> None:
    """By whoever writes them: the table is Arrow's file, the ids are ours."""
    answer = {"role": "assistant", "content": "a" * letters}
    path = lines(tmp_path / "x.jsonl", *[{"messages": [CHAT["messages"][0], answer]}] * rows)
    encoder = Encoder(byte_tokenizer("chatml"), EncodeOptions(max_tokens=10_000))
    with files_of_at_most(1 << 15), pytest.raises(DataError) as caught:
        prepare_samples(Source(str(path)), encoder, cache=tmp_path / "cache")
    told = rf"{tmp_path / 'cache'}/.*: cannot be written \(File too large\); free some space, or set another data.cache"
    assert re.fullmatch(told, str(caught.value))
    assert list((tmp_path / "cache").iterdir()) == []
