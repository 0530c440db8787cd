"""Data sets on a local fake Hub: streaming, revisions, dropped connections, and no network."""

from __future__ import annotations

import gzip
import io
import json
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow
import pytest
from huggingface_hub import HfApi, constants
from pyarrow import parquet

from megatrain.data.detect_kind import require_source
from megatrain.data.read_rows import LeftOut, RowStream, read_rows
from megatrain.data.sample_cache import _content
from megatrain.data.sample_formats import Schema
from megatrain.data.sample_sources import Source
from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import DataError
from megatrain.system import hub_client
from tests.conftest import forget_hub
from tests.data.streamed_datasets import loader, small_blocks, steps, stream, text  # noqa: F401  # a fixture
from tests.fake_hub import Hub

pytestmark = pytest.mark.usefixtures("small_blocks")
COUNT, SHARDS = 41, 3
TEXTS = [f"n{number}:" + "x" * (number % 13) for number in range(COUNT)]


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def table(texts: list[str]) -> bytes:
    """A file with several row groups, so that a position may be inside one."""
    written = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), written, row_group_size=5)
    return written.getvalue()


WRITERS = {
    "jsonl": json_lines,
    "jsonl.gz": lambda texts: gzip.compress(json_lines(texts)),
    "jsonl.zst": lambda texts: pyarrow.compress(json_lines(texts), codec="zstd", asbytes=True),
    "parquet": table,
}


def shards(ending: str, texts: list[str] = TEXTS) -> dict[str, bytes]:
    """`SHARDS` files and a card."""
    parts = [texts[len(texts) * part // SHARDS : len(texts) * (part + 1) // SHARDS] for part in range(SHARDS)]
    files = {f"data/train-{part:05}-of-{SHARDS:05}.{ending}": WRITERS[ending](each) for part, each in enumerate(parts)}
    return {"README.md": b"---\nlicense: mit\n---\n# Texts\n", **files}


@pytest.mark.parametrize("ending", WRITERS)
def test_shards_of_any_kind_stream_and_resume_at_the_exact_row(hub: Hub, ending: str) -> None:
    hub.publish("org/texts", shards(ending))
    rows = stream("org/texts")
    assert Counter(text(rows.row(index)) for index in range(COUNT)) == Counter(TEXTS)
    going = loader("org/texts")
    states, found = [], []
    for _ in range(16):
        states.append(json.dumps(going.state_dict()))
        found += steps(going, 1)
    for at in (0, 3, 5, 9, 13):
        again = loader("org/texts")
        again.load_state_dict(json.loads(states[at]))
        assert steps(again, 3) == found[at : at + 3]


def test_rows_are_of_the_commit_that_was_looked_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the data set is changed between the two."""
    commit = hub.publish("org/texts", shards("jsonl"))
    hub.publish("org/texts", shards("jsonl", ["later"] * COUNT))
    monkeypatch.setattr(hub_client, "ask_hub", lambda _: SimpleNamespace(sha=commit))
    assert sorted(row.fields["text"] for row in read_rows("org/texts", LeftOut())) == sorted(TEXTS)


def test_a_run_looks_a_data_set_up_once_and_reads_what_it_cached(hub: Hub, tmp_path: Path) -> None:
    """Though a commit is published meanwhile, which a new process sees."""
    for words in ("first", "second"):
        hub.asked.clear()
        commit = hub.publish("org/texts", shards("jsonl", [f"{words} {number}" for number in range(COUNT)]))
        require_source("org/texts", Schema(), asks_hub=True)
        hub.publish("org/texts", shards("jsonl", ["later"] * COUNT))
        assert _content(Source("org/texts", Schema())) == ["org/texts", commit]
        assert next(read_rows("org/texts", LeftOut())).fields["text"] == f"{words} 0"
        stream("org/texts")
        assert hub.asked.count("GET /api/datasets/org/texts") == 1
        forget_hub()


def test_names_of_no_data_set_are_refused_after_one_request(hub: Hub) -> None:
    told = r"^org/txts: the Hugging Face hub has no data set of this name, or keeps it private; correct the name, or"
    for read in (lambda: stream("org/txts"), lambda: next(read_rows("org/txts", LeftOut()))):
        hub.asked.clear()
        with pytest.raises(DataError, match=told):
            read()
        assert [each for each in hub.asked if "harness" not in each] == ["GET /api/datasets/org/txts"]


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a DNS server does not answer, which the timeouts of the client do not cover."""
    over = threading.Event()
    monkeypatch.setattr(hub_client, "TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **__: over.wait(60))
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: over.wait(60))
    for load in (lambda: stream("org/texts"), lambda: load_tokenizer("org/texts")):
        with pytest.raises(DataError, match=r"the Hugging Face hub did not provide it \(no answer in 0\.1 s\)"):
            load()
    over.set()


@pytest.mark.parametrize("name", ["org/texts", "Org/TinyTexts-V2", "Org/ABCTexts_en"])
def test_an_earlier_download_is_read_without_asking_the_hub_again(
    hub: Hub, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a name with capitals, of which `datasets` calls its folder otherwise."""
    hub.publish(name, shards("jsonl"))
    datasets.load_dataset(name, split="train")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub_client, "TIMEOUT_SECONDS", 0.5)
    hub.asked.clear()
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    assert [row.fields["text"] for row in read_rows(name, LeftOut())] == TEXTS
    rows = stream(name)
    assert Counter(text(rows.row(index)) for index in range(COUNT)) == Counter(TEXTS)
    assert hub.asked == slept == []


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_lost_connections_are_made_again_and_no_row_is_lost(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    hub.publish("org/texts", shards(ending))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.drops = 4
    rows = stream("org/texts")
    assert Counter(text(rows.row(index)) for index in range(COUNT)) == Counter(TEXTS)
    assert hub.drops == 0
    hub.drops = 10**6
    with pytest.raises(DataError, match=r"^org/texts: cannot be read \(.*; check the network, the files"):
        [stream("org/texts").row(index) for index in range(COUNT)]


def test_a_resumed_stream_reads_the_revision_that_it_began_with(hub: Hub) -> None:
    old = hub.publish("org/texts", shards("jsonl"))
    going = loader("org/texts")
    steps(going, 5)
    state, rest = going.state_dict(), steps(going, 4)
    assert state["places"][0]["commit"] == old
    hub.publish("org/texts", shards("jsonl", [text.replace("n", "m") for text in TEXTS]))
    forget_hub()
    assert steps(loader("org/texts"), 9)[5:] != rest
    again = loader("org/texts")
    again.load_state_dict(state)
    assert steps(again, 4) == rest
    rows = stream("org/texts")
    assert "m" in text(rows.row(0))
    rows.use_commit(old)
    assert "n" in text(rows.row(0))
    del hub.data_sets["org/texts"][old]
    with pytest.raises(DataError, match=r"^org/texts: cannot be read "):
        loader("org/texts").load_state_dict(state)


@pytest.mark.parametrize(("ending", "between"), [("csv", ","), ("tsv.gz", "\t")])
def test_cells_of_tables_are_texts_as_in_local_files(hub: Hub, tmp_path: Path, ending: str, between: str) -> None:
    """By its own reader the library takes 007 for 7, and an empty cell for a number that is none."""
    rows = [["prompt", "completion"], ["1+1", "2"], ["agent", "007"], ["x", "1e5"], ["y", ""]]
    data = "".join(between.join(row) + "\n" for row in rows).encode()
    (tmp_path / f"train.{ending}").write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
    hub.publish("org/table", {f"train.{ending}": (tmp_path / f"train.{ending}").read_bytes()})
    local = [row.fields for row in read_rows(str(tmp_path / f"train.{ending}"), LeftOut())]
    assert local[1] == {"prompt": "agent", "completion": "007"}
    assert [row.fields for row in read_rows("org/table", LeftOut())] == local
    for name in ("org/table", str(tmp_path)):
        assert [row.fields for row in RowStream(name).rows_from(0, None)] == local


def test_text_files_are_documents_as_local_ones_are(hub: Hub) -> None:
    files = {f"{part}.txt": f"{part}: first line\n\n  second line\n".encode() for part in "ab"}
    hub.publish("org/books", files)
    assert [row.fields["text"].encode() for row in read_rows("org/books", LeftOut())] == [*files.values()]
