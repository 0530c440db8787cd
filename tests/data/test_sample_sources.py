"""Claims about sources of samples: every file type gives the same rows, and errors and counts name the place."""

from __future__ import annotations

import csv
import gzip
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pytest

from megatrain.data.read_rows import LeftOut
from megatrain.data.sample_formats import Sample, Schema
from megatrain.data.sample_sources import Source, read_dataset_info, read_samples
from megatrain.errors import DataError, SampleError
from tests.fake_hub import Hub

ROWS = [{"prompt": f"q{number}", "completion": "é🎉\u2028"} for number in range(3)]
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def read(*names: str | Path | Source, bad: Any = "stop") -> tuple[list[Sample], LeftOut]:
    left_out = LeftOut(bad)
    sources = [name if isinstance(name, Source) else Source(str(name)) for name in names]
    return [sample for source in sources for sample in read_samples(source, left_out)], left_out


def refused(*names: str | Path | Source) -> str:
    with pytest.raises(DataError) as caught:
        read(*names)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix in (".jsonl", ".ndjson"):
        return lines(path, *rows)
    if path.suffix.lower() in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".TSV" else ",")
            table.writeheader()
            table.writerows(rows)
        return path
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), "utf-8-sig")
        return path
    columns = datasets.Dataset.from_list(rows)
    if path.suffix == ".parquet":
        columns.to_parquet(str(path))
        return path
    columns.save_to_disk(str(path.with_suffix("")))
    return path.with_suffix("") if path.suffix == ".saved" else next(path.with_suffix("").glob("*.arrow"))


def compress(plain: Path, path: Path) -> None:
    data = plain.read_bytes()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = pyarrow.Codec("zstd").compress(data, asbytes=True)
    path.write_bytes(data)


@pytest.fixture(autouse=True)
def no_progress_bars() -> None:
    datasets.disable_progress_bars()


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "json", "parquet", "arrow", "saved"])
def test_every_file_format_gives_the_same_samples(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path / f"a [0].{suffix}", ROWS)
    samples, left_out = read(path)
    assert [(sample.prompt, sample.text) for sample in samples] == [(row["prompt"], row["completion"]) for row in ROWS]
    places = [f"{path}:{n + 1}" if "nd" in suffix or suffix == "jsonl" else f"{path}[{n}]" for n in range(3)]
    assert [sample.origin for sample in samples] == places
    assert not left_out.counts


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "TSV"])
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_a_compressed_file_gives_the_same_samples(tmp_path: Path, suffix: str, compression: str) -> None:
    plain = written(tmp_path / f"a.{suffix}", ROWS)
    path = tmp_path / f"b.{suffix}{compression}"
    compress(plain, path)
    samples, left_out = read(path)
    assert [(sample.prompt, sample.text) for sample in samples] == [(row["prompt"], row["completion"]) for row in ROWS]
    first = {"json": "[0]", "jsonl": ":1"}.get(suffix, ":2")
    assert samples[0].origin == f"{path}{first}"
    assert not left_out.counts


@pytest.mark.few(1)
@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_truncated_compressed_data_is_refused(tmp_path: Path, compression: str) -> None:
    rng = random.Random(0)
    plain = lines(tmp_path / "a.jsonl", *({"text": f"{rng.random()}"} for _ in range(4_000)))
    compress(plain, path := tmp_path / f"b.jsonl{compression}")
    path.write_bytes(path.read_bytes()[:-1000])
    assert refused(path).startswith(f"{path}: compressed data that is damaged (")
    assert refused(path).endswith("; download it again, or leave it out")


@pytest.mark.parametrize("number", [2, 3000])
def test_a_cell_in_another_encoding_is_refused_with_its_line(tmp_path: Path, number: int) -> None:
    """Although text is decoded in larger pieces than lines."""
    rows = [b"text", *[b"words"] * 5000]
    rows[number - 1] = b"\xe9"
    (tmp_path / "a.csv").write_bytes(b"\n".join(rows))
    assert refused(tmp_path / "a.csv").startswith(f"{tmp_path}/a.csv:{number}: not UTF-8 text")


def test_empty_files_are_counted(tmp_path: Path) -> None:
    for name, content in (("a.json.gz", b""), ("b.csv.gz", b"\n"), ("c.jsonl.gz", b"\n\n"), ("d.json.gz", b" \n")):
        (tmp_path / name).write_bytes(gzip.compress(content))
    (tmp_path / "e.csv").write_text("\n\ntext\nwords\n")
    samples, left_out = read(tmp_path)
    assert [sample.text for sample in samples] == ["words"]
    assert left_out.counts == {"empty file": 4}


def test_table_cells_stay_text_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    text = "x, \r\n" * 100_000
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["instruction", "output"], ["007", text], ["8", "end"]])
    samples, _ = read(path)
    assert samples[0].messages[-1]["content"] == text
    assert samples[0].messages[0]["content"] == "007"
    assert samples[1].origin == f"{path}:{2 + text.count(chr(10)) + 1}"


def test_chats_in_table_cells_are_json(tmp_path: Path) -> None:
    """In both formats, with and without tools; text that is not JSON is an error with its line."""
    shared = [{"from": "human", "value": "q"}, {"from": "gpt", "value": 'a,\n"b"'}]
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": 'a,\n"b"'}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for column, turns in (("messages", chat), ("conversations", shared), ("conversations", chat)):
        cells = [{column: json.dumps(turns), "tools": json.dumps(tools), "n": n} for n in range(2)]
        samples, _ = read(written(tmp_path / "a.csv", cells))
        assert [list(sample.messages) for sample in samples] == [chat, chat]
        assert list(samples[0].tools) == tools
    pair = {
        "prompt": json.dumps(chat[:1]),
        "chosen": json.dumps(chat[1:]),
        "rejected": json.dumps([chat[1] | {"content": "b"}]),
    }
    (good, worse), _ = read(written(tmp_path / "pairs.csv", [pair]))
    assert (list(good.messages), worse.messages[1]["content"]) == (chat, "b")
    (plain,), _ = read(written(tmp_path / "plain.csv", [{"prompt": "q", "completion": '[{"role": "x"}, 5]'}]))
    assert plain.text == '[{"role": "x"}, 5]'
    bad = written(tmp_path / "b.csv", [{"messages": json.dumps(chat)}, {"messages": str(chat)}])
    assert refused(bad).startswith(f"{bad}:3: 'messages' is a text: not JSON (")
    assert "json.dumps" in refused(bad)
    assert read(bad, bad="leave_out")[1].counts == {"messages that are not JSON": 1}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "arrow", "saved"])
def test_kto_data_is_refused_in_every_format(tmp_path: Path, suffix: str) -> None:
    """Otherwise its undesirable answers would be learned, too."""
    for number, row in enumerate((CHAT, {"prompt": "q", "completion": "a"})):
        path = written(tmp_path / f"{number}.{suffix}", [{**row, "label": good} for good in (True, False)])
        assert "'label' says whether the answer is good or bad, as data for KTO does" in refused(path)
        with pytest.raises(DataError, match=r"no sample \(left out: 2 labelled as good or bad"):
            read(path, bad="leave_out")


@pytest.mark.parametrize("row", [CHAT, {"prompt": "q", "completion": "a"}, {"instruction": "q", "output": "a"}])
@pytest.mark.parametrize("labels", [(0, 1), (1, 1), (0.0, 1.0), ("true", "False"), ("1", "0"), (None, 0)])
def test_all_boolean_labels_are_refused(row: dict[str, Any], labels: tuple[Any, Any], tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{**row, "label": label} for label in labels])
    for bad in ("stop", "leave_out"):
        with pytest.raises(
            DataError, match=r"'label' is 0, 1, true or false in every row: it says whether the answer .* KTO"
        ):
            read(path, bad=bad)


@pytest.mark.parametrize("labels", [(0, 1, 2), ("true", "false", "unsure"), (1, None, "joy"), (0, 0.5)])
def test_class_labels_are_ignored(labels: tuple[Any, ...], tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{**CHAT, "label": label} for label in labels])
    assert len(read(path)[0]) == len(labels)


def test_json_lines_with_a_json_suffix_are_read(tmp_path: Path) -> None:
    assert [sample.origin for sample in read(lines(tmp_path / "a.json", *ROWS))[0]] == [
        f"{tmp_path}/a.json:{n}" for n in (1, 2, 3)
    ]
    assert len(read(lines(tmp_path / "b.json", ROWS[0]))[0]) == 1


def test_missing_table_keys_are_absent_not_null(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    other = {"type": "function", "function": {"name": "g", "arguments": {"y": 2}}}
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [asked]}]}
        for asked in (call, other)
    ]
    samples, _ = read(written(tmp_path / "a.parquet", rows))
    assert [sample.messages[1] for sample in samples] == [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [other]},
    ]


def test_a_folder_is_read_in_order_and_skipped_files_are_counted(tmp_path: Path) -> None:
    lines(tmp_path / "b.jsonl", CHAT)
    lines(tmp_path / "a.jsonl", *ROWS)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "picture.png").write_bytes(b"PNG")
    (tmp_path / ".hidden").touch()
    (tmp_path / "words.txt").write_text("words")
    samples, left_out = read(tmp_path)
    assert [sample.origin.removeprefix(f"{tmp_path}/") for sample in samples] == [
        "a.jsonl:1",
        "a.jsonl:2",
        "a.jsonl:3",
        "b.jsonl:1",
        "words.txt",
    ]
    assert left_out.counts == {"empty file": 2, "file of another kind": 1, "hidden in a folder": 1}
    assert f"1 file of another kind (first: {tmp_path}/picture.png)" in left_out.lines()


@pytest.mark.parametrize(
    ("name", "content", "where", "what"),
    [
        ("a.jsonl", '{"text": "x"}\n\n{"text": \n', ":3", "not a line of JSON"),
        ("a.jsonl", '{"text": "x"}\n["x"]\n', ":2", "list instead of an object"),
        ("a.jsonl", '{"text": "x"}\n{"txt": "x"}\n', ":2", "it holds 'txt'"),
        ("a.json", '[\n{"text": "x"},\n{"text" "x"}\n]', ":3", "not JSON (Expecting ':' delimiter)"),
        ("a.json", '[{"text": "x"}, "x"]', "[1]", "str instead of an object"),
        ("a.json", '{\n"data": []}', "", "a single object instead of a list of samples"),
        ("a.json", "[" * 100_000, "", "nested too deeply"),
        ("a.parquet", "PAR", "", "cannot be read ("),
        ("a.xml", "x", "", "a file of samples does not end in '.xml'; known are .json, .jsonl"),
        ("a.csv", 'text,n\nx,1\n"x\ny",2\nx\n', ":5", "1 cells in a row, but 2 in the header"),
        ("a.csv", 'text\n"x', ":2", "not a table (unexpected end of data)"),
        ("a.tsv", "text\ttext\nx\ty\n", ":1", "two columns are called 'text'"),
        ("a.jsonl.gz", "text", "", "compressed data that is damaged (Not a gzipped file"),
        ("a.parquet.gz", "x", "", "does not end in '.parquet.gz'"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(
    tmp_path: Path, name: str, content: str, where: str, what: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    message = refused(path)
    assert message.startswith(f"{path}{where}: ")
    assert what in message


def test_text_in_another_encoding_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xe9"}\n')
    assert refused(tmp_path / "a.jsonl").startswith(f"{tmp_path}/a.jsonl:2: not UTF-8 text")


def test_mixed_formats_are_refused_at_the_first_other_row(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", CHAT, CHAT, {"instruction": "q", "output": "a"})
    assert refused(path).startswith(f"{path}:3: a sample in alpaca format, but the file begins with chat samples")
    path = lines(tmp_path / "c.jsonl", {"text": "x"}, {"text": "y", **CHAT})  # it would fit as a text, too
    assert refused(path).startswith(f"{path}:2: a sample in chat format, but the file begins with text samples")
    assert len(read(Source(str(path), Schema("text")))[0]) == 2
    lines(tmp_path / "b.jsonl", {"instruction": "q", "output": "a"})
    assert "it holds 'instruction', 'output'" in refused(Source(str(tmp_path / "b.jsonl"), Schema("chat")))


def test_bad_samples_are_skipped_and_counted_on_request(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl",
        CHAT,
        "{",
        {"messages": []},
        "[]",
        {"instruction": "q", "output": "a"},
        CHAT,
        {"messages": []},
    )
    samples, left_out = read(path, bad="leave_out")
    assert [sample.origin for sample in samples] == [f"{path}:1", f"{path}:6"]
    assert left_out.counts == {
        "not a line of JSON": 1,
        "no messages": 2,
        "not an object": 1,
        "of another format than its file": 1,
    }
    assert left_out.lines()[0] == f"2 no messages (first: {path}:3)"


def test_sources_without_samples_are_refused_with_reasons(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    assert refused(tmp_path / "a.jsonl").startswith(f"{tmp_path}/a.jsonl: no sample (left out: 1 empty file (first:")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.png").touch()
    assert "holds no file of samples" in refused(tmp_path / "b")
    assert "did you mean" in refused(tmp_path / "a.json")


def test_a_limit_takes_the_first_samples_and_counts_the_rest(tmp_path: Path) -> None:
    samples, left_out = read(Source(str(lines(tmp_path / "a.jsonl", *ROWS)), limit=2))
    assert [sample.prompt for sample in samples] == ["q0", "q1"]
    assert left_out.counts == {"beyond the first 2": 1}
    assert not read(Source(str(tmp_path / "a.jsonl"), limit=3))[1].counts


def test_a_hub_name_without_a_network_fails_on_one_line_after_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def dataset_info(self: object, name: str, timeout: float) -> None:
        asked.append(timeout)
        raise ConnectionError("Name or service not known\nmore lines")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", None)
    began = time.monotonic()
    message = refused("organisation/data")
    assert time.monotonic() - began < 30
    assert message.startswith("organisation/data: neither a local file nor an earlier download")
    assert "(Name or service not known)" in message
    assert len(asked) == 1


def test_a_split_of_a_subset_is_read_from_the_hub(hub: Hub) -> None:
    rows = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    card = "---\nconfigs:\n- config_name: small\n  data_files: [{split: test, path: small/test.jsonl}]\n"
    card += "- config_name: large\n  data_files: [{split: train, path: large.jsonl}]\n---\n"
    hub.publish("organisation/data", {"README.md": card.encode(), "small/test.jsonl": rows, "large.jsonl": rows * 9})
    samples, left_out = read(Source("organisation/data", split="test", subset="small", limit=2))
    assert [sample.origin.partition("/small/")[2] for sample in samples] == ["test.jsonl:1", "test.jsonl:2"]
    assert left_out.counts == {"beyond the first 2 or more": 1}
    assert not any("large" in each for each in hub.asked if "resolve" in each), "nothing is fetched to be counted"


def test_a_missing_optional_package_refuses_only_its_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "needs the `datasets` package, which is not installed; pip install datasets" in refused(path)
    assert len(read(lines(tmp_path / "a.jsonl", *ROWS))[0]) == 3


def test_reading_local_files_contacts_no_server(tmp_path: Path) -> None:
    read(written(tmp_path / "a.parquet", ROWS))
    assert datasets.config.HF_UPDATE_DOWNLOAD_COUNTS is False


INFO = {
    "plain": {"file_name": "alpaca.jsonl"},
    "renamed": {
        "file_name": "renamed.jsonl",
        "columns": {"prompt": "question", "query": None, "response": "reply", "system": "rules", "history": "before"},
        "num_samples": 1,
    },
    "shared": {
        "file_name": "shared.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "dialog", "tools": "functions"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "U", "assistant_tag": "A"},
    },
    "books": {"file_name": "books.jsonl", "columns": {"prompt": "words"}},
    "remote": {"hf_hub_url": "organisation/data", "subset": "en", "split": "test", "folder": "v2"},
    "ranked": {
        "file_name": "x.jsonl",
        "ranking": True,
        "columns": {"prompt": "instruction", "query": "input", "chosen": "good", "rejected": "bad"},
    },
    "seen": {"file_name": "x.jsonl", "formatting": "sharegpt", "columns": {"messages": "m", "images": "i"}},
    "elsewhere": {"script_url": "x"},
    "odd": {"file_name": "x.jsonl", "formatting": "openai2"},
    "more": {"file_name": "x.jsonl", "wieght": 2},
}


def test_llama_factory_dataset_info_is_read(tmp_path: Path) -> None:
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps(INFO))
    lines(tmp_path / "alpaca.jsonl", {"instruction": "q", "input": "i", "output": "a"})
    row = {"question": "q", "reply": "a", "rules": "s", "before": [["x", "y"]]}
    lines(tmp_path / "renamed.jsonl", row, row)
    lines(tmp_path / "shared.jsonl", {"dialog": [{"role": "U", "content": "q"}, {"role": "A", "content": "a"}]})
    lines(tmp_path / "books.jsonl", {"words": "w"})
    samples, left_out = read(*(read_dataset_info(path, name) for name in ("plain", "renamed", "shared", "books")))
    assert [[message["content"] for message in sample.messages] for sample in samples[:3]] == [
        ["q\ni", "a"],
        ["s", "x", "y", "q", "a"],
        ["q", "a"],
    ]
    assert samples[3].text == "w"
    assert left_out.counts == {"beyond the first 1": 1}
    remote = Source("organisation/data", Schema("alpaca"), split="test", subset="en", folder="v2")
    assert read_dataset_info(path, "remote") == remote
    ranked = read_dataset_info(path, "ranked")
    columns = {"instruction": "instruction", "input": "input", "chosen": "good", "rejected": "bad"}
    assert ranked.schema == Schema("preference", columns, {})


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("plane", "no data set of that name; did you mean 'plain'?"),
        ("seen", "has the column 'images', which is not supported"),
        ("elsewhere", "is available by 'script_url' only"),
        ("odd", "'formatting' is 'openai2'; known are alpaca, sharegpt"),
        ("more", "has an unknown key 'wieght'"),
    ],
)
def test_unsupported_dataset_info_entries_are_refused(tmp_path: Path, name: str, what: str) -> None:
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps(INFO))
    with pytest.raises(DataError) as caught:
        read_dataset_info(path, name)
    assert str(caught.value).startswith(f"{path}#{name}: {what}")
    for named in (tmp_path, path):
        assert f"a list of data sets; one of them must be named; name one of them, {path}#plain say" in refused(named)


def test_samples_are_validated_individually() -> None:
    with pytest.raises(SampleError, match="why"):
        LeftOut().refuse(SampleError("why", reason="r", where="here"))
