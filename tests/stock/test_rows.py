"""Claims about rows of any file: the ids are those that transformers gives for the rows as Python's json reads them.

Rows are read and streamed, from JSON, CSV, Parquet by three writers and saved data sets.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pytest
import trl
from pyarrow import parquet
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain.data.detect_kind import holds_samples
from megatrain.data.encode import EncodeOptions, Encoder, Statistics, encode_samples
from megatrain.data.read_rows import LeftOut, RowStream, SourceRow
from megatrain.data.sample_formats import LabelCheck, Sample
from megatrain.data.sample_sources import Source, samples_of
from megatrain.data.text_sources import prepare_tokens
from megatrain.data.tokenizer import Tokenizer, load_tokenizer
from megatrain.errors import SampleError
from tests.data.chats import TOOL, byte_tokenizer

TOKENIZER = byte_tokenizer("qwen2_5")
Fields = dict[str, Any]


def chat(arguments: Fields, **more: Any) -> Fields:
    called = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [called]}]
    return {"messages": [*turns, {"role": "tool", "content": "{}"}, {"role": "assistant", "content": "a"}], **more}


DEFAULTS: Fields = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "2026-05-01",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "default": None, "enum": ["1", 1]}}},
    },
}
ROWS = [
    chat({"when": "2026-05-01T10:00:00"}, tools=[DEFAULTS]),
    chat({"when": "2026-05-01T10:00:00Z", "day": "2026-05-01"}, tools=[TOOL, DEFAULTS]),
    chat({"id": "42", "city": None, "limit": 5}),
    chat({"id": 7, "limit": {"from": None, "to": [None, {"a": None}]}}),
    chat({"id": "1e3", "number": 1e3, "one": 1.0, "price": 0.7}),
    chat({"id": "null", "empty": {}, "list": [], "text": ""}),
    chat({"id": True, "z": 1, "a": 2, "ä\u2028": "é\\u00e9\u2028\x85\n\t\U0001f600"}),
    chat({"id": 2**53 + 1, "large": 2**63 - 1, "00": "007"}),
    chat({"mixed": ["1", 1, None, [1.5], {"k": "v"}]}),
]
EXACT = [
    chat({"float": 0.1 + 0.2, "large": 2**63, "larger": 2**64 + 1, "small": 1e-7}),
    chat({"more": 12345678901234567890123, "pi": 3.141592653589793}),
]
"""Numbers that `datasets` writes rounded, or refuses to write, into a column of JSON."""


def as_lines(rows: list[Fields]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_text(rows: list[Fields]) -> list[Fields]:
    """Nested values as JSON text, as they are in a table of texts."""
    return [{key: json.dumps(row.get(key, []), ensure_ascii=False) for key in ("messages", "tools")} for row in rows]


def as_json_columns(rows: list[Fields]) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows, on_mixed_types="use_json")


def write_csv(path: Path, rows: list[Fields]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["messages", "tools"])
        writer.writeheader()
        writer.writerows(as_text(rows))


def write_texts(path: Path, rows: list[Fields]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(as_text(rows)), path)


def write_jsons(path: Path, rows: list[Fields]) -> None:
    """Extension types of Arrow, as pyarrow writes them."""
    columns = {key: [row[key] for row in as_text(rows)] for key in ("messages", "tools")}
    arrays = [pyarrow.array(texts, pyarrow.string()).cast(pyarrow.json_()) for texts in columns.values()]
    parquet.write_table(pyarrow.Table.from_arrays(arrays, list(columns)), path, row_group_size=4)


WRITERS: dict[str, tuple[str, Callable[[Path, list[Fields]], object], bool]] = {
    "json lines": ("a.jsonl", lambda path, rows: path.write_bytes(as_lines(rows)), True),
    "gzip": ("a.jsonl.gz", lambda path, rows: path.write_bytes(gzip.compress(as_lines(rows))), True),
    "zstd": ("a.jsonl.zst", lambda path, rows: path.write_bytes(pyarrow.compress(as_lines(rows), "zstd", True)), True),
    "json": ("a.json", lambda path, rows: path.write_text(json.dumps(rows, ensure_ascii=False, indent=1)), True),
    "csv": ("a.csv", write_csv, True),
    "pyarrow": ("a.parquet", write_texts, True),
    "pyarrow's json": ("a.parquet", write_jsons, True),
    "pandas": ("a.parquet", lambda path, rows: pandas.DataFrame(as_text(rows)).to_parquet(path), True),
    "datasets": ("a.parquet", lambda path, rows: as_json_columns(rows).to_parquet(path), False),
    "saved": ("saved", lambda path, rows: as_json_columns(rows).save_to_disk(path), False),
}
"""Writer -> (file name, how it writes, whether it keeps every number)."""


def ids_of(rows: Iterator[SourceRow]) -> list[list[int]]:
    samples = [sample for group in samples_of(rows, Source("").schema, LeftOut(), LabelCheck()) for sample in group]
    return [each.ids.tolist() for each in encode_samples(samples, Encoder(TOKENIZER, EncodeOptions()), Statistics())]


def stock(rows: list[Fields]) -> list[list[int]]:
    """The independent method: what TRL's trainer calls, on plain rows of JSON."""
    rows = json.loads(json.dumps(rows))
    return [TOKENIZER.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False) for row in rows]


@pytest.mark.parametrize("writer", WRITERS)
def test_every_reader_gives_the_ids_of_the_rows_as_json(tmp_path: Path, writer: str) -> None:
    name, write, is_exact = WRITERS[writer]
    rows = ROWS + EXACT if is_exact else ROWS
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / name, rows)
    expected = stock(rows)
    assert ids_of(Source(str(tmp_path / "data" / name)).opened(LeftOut()).rows_from(0, None)) == expected
    streamed = tmp_path / "data" / name
    stream = RowStream(str(streamed))
    assert ids_of(stream.rows_from(0, None)) == expected
    going = stream.rows_from(0, None)
    list(zip(range(5), going, strict=False))
    state = json.loads(json.dumps(stream.state()))
    assert ids_of(RowStream(str(streamed)).rows_from(5, state)) == expected[5:]
    earlier = {"examples_iterable": {"type": "of another reader"}}
    assert ids_of(RowStream(str(streamed)).rows_from(5, earlier)) == expected[5:]


def alike(*arguments: Fields) -> list[Fields]:
    """Rows whose turns have the same keys, so that `datasets` gives each of them a type."""
    rows = [chat(each) for each in arguments]
    for row in rows:
        row["messages"] = [{"tool_calls": None, **turn} for turn in row["messages"]]
    return rows


@pytest.mark.parametrize(
    "rows",
    [
        alike({"when": "2026-05-01T10:00:00"}, {"when": "2026-05-02T00:00:00"}),
        alike({"when": "2026-05-01"}, {"when": "2026-05-02"}),
        alike({"when": "2026-05-01T10:00:00+02:00"}, {"when": "2026-05-02T10:00:00Z"}),
        alike({"id": "42"}, {"id": 7}),
        alike({"id": "1e3"}, {"id": 7}),
        alike({"id": "null"}, {"id": 7}),
        alike({"city": None, "limit": 5}, {"city": "Bern", "limit": None}),
        alike({"a": 1}, {"b": None}),
        [{"messages": row["messages"], "tools": [DEFAULTS]} for row in alike({"city": "x"}, {"city": "y"})],
    ],
)
def test_streamed_json_keeps_its_types(tmp_path: Path, rows: list[Fields]) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_lines(rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for name in ("a.jsonl", "a.json"):
        assert ids_of(RowStream(str(tmp_path / name)).rows_from(0, None)) == stock(rows)
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.jsonl").rename(tmp_path / "folder" / "a.jsonl")
    assert ids_of(RowStream(str(tmp_path / "folder")).rows_from(0, None)) == stock(rows)


def test_columns_that_datasets_made_dates_train_their_iso_text(tmp_path: Path) -> None:
    """`datasets` gives the column of a text that looks like a date the type of a date, and saves that."""
    rows = alike({"when": "2026-05-01T10:00:00"}, {"when": "2026-05-02T00:00:00"})
    (tmp_path / "a.jsonl").write_bytes(as_lines(rows))
    made = datasets.load_dataset("json", data_files=str(tmp_path / "a.jsonl"), split="train", cache_dir=str(tmp_path))
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    assert "timestamp" in str(made.features)
    for name in ("a.parquet", "saved"):
        assert ids_of(Source(str(tmp_path / name)).opened(LeftOut()).rows_from(0, None)) == stock(rows)
        assert ids_of(RowStream(str(tmp_path / name)).rows_from(0, None)) == stock(rows)


def test_typed_columns_train_their_json_and_fillers_of_structs_are_no_keys(tmp_path: Path) -> None:
    """Types of Arrow that JSON does not have; a key that one row lacks is null in a struct."""
    when = pandas.Timestamp("2026-05-01T10:00:00").to_pydatetime()
    given = {"when": when, "day": when.date(), "time": when.time(), "price": Decimal("1.50"), "count": Decimal(7)}
    plain = {"when": "2026-05-01T10:00:00", "day": "2026-05-01", "time": "10:00:00", "price": 1.5, "count": 7}
    rows, expected = [chat(given), chat({"city": "Bern"})], [chat(plain), chat({"city": "Bern"})]
    turns = pyarrow.array([row["messages"] for row in rows])
    others = [pyarrow.array(["x", "y"]).dictionary_encode(), pyarrow.array([b"0", b"1"])]
    table = pyarrow.table([turns, *others], ["messages", "kind", "bytes"])
    parquet.write_table(table, tmp_path / "a.parquet")
    assert ids_of(Source(str(tmp_path / "a.parquet")).opened(LeftOut()).rows_from(0, None)) == stock(expected)


@pytest.mark.parametrize("value", [b"x", timedelta(seconds=3), Decimal("0.12345678901234567890123")])
def test_values_that_json_does_not_have_are_refused(tmp_path: Path, value: object) -> None:
    """Templates would write `<bytes>`."""
    turns = pyarrow.array([chat({"value": value})["messages"]])
    parquet.write_table(pyarrow.table([turns, pyarrow.array([b"x"])], ["messages", "more"]), tmp_path / "a.parquet")
    with pytest.raises(SampleError, match=r"a\.parquet\[0\]: holds .*, which no JSON can hold; write it as text or"):
        ids_of(Source(str(tmp_path / "a.parquet")).opened(LeftOut()).rows_from(0, None))


def test_json_lines_of_which_no_row_parses_are_told_of_their_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{'messages': []}\n" * 3)
    assert holds_samples(str(tmp_path / "a.jsonl"))
    with pytest.raises(SampleError, match=r"a\.jsonl:1: not a line of JSON"):
        ids_of(Source(str(tmp_path / "a.jsonl")).opened(LeftOut()).rows_from(0, None))


# Plain texts ----------------------------------------------------------------------------------------------------------

TEXTS = ["one", "two words", "x" * 40]


def text_tokenizer(*, has_bos: bool) -> Tokenizer:
    """A tokenizer with or without a bos token before a text, like Llama's and Qwen's."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})
    if has_bos:
        bos = ("<s>", tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", "<s> $A <s> $B", [bos])
    return tokenizer


def trls_texts(tokenizer: Tokenizer, folder: Path, **options: Any) -> list[list[int]]:
    """The ids that TRL's trainer trains for rows of texts."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    config = trl.SFTConfig(
        str(folder), max_length=48, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=None, **options
    )
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    trainer = trl.SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer)
    return [list(ids) for ids in trainer.train_dataset["input_ids"]]


@pytest.mark.parametrize("has_bos", [True, False])
def test_texts_begin_and_end_as_in_trl(tmp_path: Path, has_bos: bool) -> None:
    tokenizer = text_tokenizer(has_bos=has_bos)
    samples = [Sample(text, text=text) for text in TEXTS]
    found = [each.ids.tolist() for each in encode_samples(samples, Encoder(tokenizer), Statistics())]
    assert found == trls_texts(tokenizer, tmp_path)
    (tmp_path / "a.jsonl").write_bytes(as_lines([{"text": text} for text in TEXTS]))
    stream = prepare_tokens([str(tmp_path / "a.jsonl")], tokenizer, cache=tmp_path).ids.tolist()
    assert stream == [*chain(*found)]
    packed = trls_texts(tokenizer, tmp_path, packing=True, packing_strategy="wrapped")
    assert [*chain(*packed)] == stream[: sum(map(len, packed))]


def test_a_bos_token_is_optional_and_changes_no_cache_without_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")
    for has_bos in (True, False):
        tokenizer = text_tokenizer(has_bos=has_bos)
        files = [prepare_tokens([str(tmp_path / "a.txt")], tokenizer, cache=tmp_path, bos=bos) for bos in (True, False)]
        encoders = [Encoder(tokenizer, EncodeOptions(bos=bos)) for bos in (True, False)]
        bare = [*b"one\ntwo", tokenizer.eos_token_id]
        assert files[0].ids.tolist() == [tokenizer.bos_token_id] * has_bos + bare
        assert files[1].ids.tolist() == bare
        assert (files[0].path != files[1].path) is (encoders[0].identity != encoders[1].identity) is has_bos
        (found,) = encode_samples([Sample("a", text="one\ntwo")], encoders[1], Statistics())
        assert found.ids.tolist() == bare
