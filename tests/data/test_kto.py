"""Answers labelled good or bad: their formats, the mismatched answer after each, and that pairs stay together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.detect_kind import source_called
from megatrain.data.encode import Encoder
from megatrain.data.packing import Reference, SampleRows, collate, split_samples
from megatrain.data.sample_cache import prepare_samples
from megatrain.data.sample_formats import Schema
from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import DataError, SampleError
from tests.data.test_preferences import EOS, TEMPLATE, prepared, says, texts

SCHEMA = Schema("unpaired")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(*turns: str) -> list[dict[str, str]]:
    return [says(text) if place % 2 else user(text) for place, text in enumerate(turns)]


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": [user("1")], "completion": [says("a")], "label": True},
         {"prompt": [user("2")], "completion": [says("b")], "label": False},
         {"prompt": [user("3")], "completion": [says("c")], "label": "true"}],
        [{"messages": chat("1", "a"), "label": 1}, {"messages": chat("2", "b"), "label": 0},
         {"messages": chat("3", "c"), "label": 1}],
        [{"conversations": [{"from": "human", "value": ask}, {"from": "gpt", "value": answer}], "label": mark}
         for ask, answer, mark in (("1", "a", True), ("2", "b", False), ("3", "c", True))],
        [{"instruction": ask, "output": answer, "label": mark}
         for ask, answer, mark in (("1", "a", True), ("2", "b", False), ("3", "c", True))],
    ],
    ids=["trl", "chat", "sharegpt", "alpaca"],
)  # fmt: skip
def test_kto_rows_get_a_mismatched_answer_to_their_prompt(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    file = prepared(tmp_path, rows, SCHEMA)
    assert (file.details["unpaired"], file.details["pairs"]) == (True, False)
    both = [("1", "a"), ("1", "b"), ("2", "b"), ("2", "a"), ("3", "c"), ("3", "b")]
    assert texts(file) == [(f"u:{ask}{EOS}a:{said}{EOS}", f"{said}{EOS}") for ask, said in both]
    assert file.marks[::2].tolist() == [1, 0, 1]


def test_text_is_a_chat_if_its_columns_are_named_as_instruction_and_output(tmp_path: Path) -> None:
    rows = [{"prompt": ask, "completion": said, "label": True} for ask, said in (("1", "a"), ("2", "b"))]
    schema = Schema("unpaired", {"instruction": "prompt", "output": "completion"})
    assert texts(prepared(tmp_path, rows, schema))[0] == (f"u:1{EOS}a:a{EOS}", f"a{EOS}")


def test_kto_takes_plain_text_and_the_last_answer_of_a_chat(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "completion": f" {2 * n}", "label": n > 1} for n in range(1, 3)]
    both = [("1+1=", " 2"), ("1+1=", " 4"), ("2+2=", " 4"), ("2+2=", " 2")]
    assert texts(prepared(tmp_path, rows, SCHEMA)) == [(f"{ask}{said}{EOS}", f"{said}{EOS}") for ask, said in both]
    longer = [{"messages": chat("1", "a", "2", "b"), "label": True}, {"messages": chat("3", "c"), "label": False}]
    trained = [said for _, said in texts(prepared(tmp_path, longer, SCHEMA))]
    assert trained == [f"b{EOS}", f"c{EOS}", f"c{EOS}", f"b{EOS}"]


def test_matched_and_mismatched_samples_are_dropped_together(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": text, "label": True} for text in ("a", "b" * 60, "c", "d")]
    file = prepared(tmp_path, rows, SCHEMA, max_tokens=20, too_long="drop")
    assert [all_of for all_of, _ in texts(file)] == [f"pd{EOS}", f"pc{EOS}"]
    assert "the other answer is left out" in "\n".join(file.details["report"])


def test_kto_labels_are_read_and_change_the_fingerprint(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "completion": f"answer {n % 3}", "label": n % 2 == 0} for n in range(6)]
    file = prepared(tmp_path, rows, SCHEMA)
    training, held_out, copies = split_samples(file, 0.4, 2)
    assert (len(training), len(held_out), copies) == (4, 2, 0)
    reference = Reference(np.arange(len(file), dtype=np.float32))
    pairs = SampleRows(file, training, 4, 2, reference)
    batch = collate([pairs.row(int(at)) for at in pairs.order(0, 0)[:4]])
    assert batch["desirable"].tolist()[::2] == [bool(file.marks[int(at)]) for at in batch["reference_log_probs"][::2]]
    assert (batch["reference_log_probs"][1::2] == batch["reference_log_probs"][::2] + 1).all()
    others = [row | {"label": not row["label"]} for row in rows]
    assert prepared(tmp_path, others, SCHEMA).fingerprint != file.fingerprint
    again = [*rows, rows[0] | {"prompt": "p0"}]
    assert split_samples(prepared(tmp_path, again, SCHEMA), 0.99, 2)[2] == 2, "copies are found whatever mismatches"


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "p", "completion": "c", "label": "good"}, "'label' is 'good', not true or false"),
        ({"prompt": "p", "completion": "c"}, "no 'label', which unpaired samples have"),
        ({"text": "t", "label": True}, "a label and no answer"),
        ({"messages": [user("1")], "label": True}, "does not end in an answer"),
        ({"messages": [says("1")], "label": True}, "does not end in an answer"),
    ],
)
def test_invalid_kto_rows_are_reported_with_their_location(tmp_path: Path, row: dict[str, Any], what: str) -> None:
    with pytest.raises(SampleError, match=f"pairs.jsonl:2: .*{what}"):
        prepared(tmp_path, [{"prompt": "p", "completion": "c", "label": True}, row], SCHEMA)


def test_a_single_kto_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pairs.jsonl:1\): holds only one answer, but KTO"):
        prepared(tmp_path, [{"prompt": "p", "completion": "c", "label": True}], SCHEMA)


def test_llama_factory_kto_data_is_read(tmp_path: Path) -> None:
    (tmp_path / "kto.json").write_text(
        '[{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "a"}], "label": true},'
        ' {"messages": [{"role": "user", "content": "2"}, {"role": "assistant", "content": "b"}], "label": false}]'
    )
    (tmp_path / "dataset_info.json").write_text(
        '{"kto": {"file_name": "kto.json", "formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag":'
        ' "label"}, "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag":'
        ' "assistant"}}}'
    )
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = TEMPLATE
    source = source_called(f"{tmp_path}/dataset_info.json#kto", Schema())
    file = prepare_samples(source, Encoder(tokenizer), cache=tmp_path / "cache")
    assert [said for _, said in texts(file)] == [f"a{EOS}", f"b{EOS}", f"b{EOS}", f"a{EOS}"]
    assert file.marks[::2].tolist() == [1, 0]
