"""Preferences as TRL and LLaMA-Factory have them: two samples that differ in the answer, and stay together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.detect_kind import source_called
from megatrain.data.encode import EncodeOptions, Encoder
from megatrain.data.loader import Loader
from megatrain.data.packing import Reference, SampleRows, collate, split_samples
from megatrain.data.sample_cache import SampleFile, prepare_samples
from megatrain.data.sample_formats import Schema
from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import SampleError

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ASKS = [{"role": "user", "content": "why?"}]


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def prepared(tmp_path: Path, rows: list[dict[str, Any]], schema: Schema | None = None, **options: Any) -> SampleFile:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = TEMPLATE
    source = source_called(str(path), schema or Schema())
    return prepare_samples(source, Encoder(tokenizer, EncodeOptions(**options)), cache=tmp_path / "cache")


def texts(file: SampleFile) -> list[tuple[str, str]]:
    """(text, trained text) of each sample."""
    tokenizer = load_tokenizer("bytes")
    found = []
    for number in range(len(file)):
        ids, trained = file.sample(number)
        found.append((tokenizer.decode(ids), tokenizer.decode(ids[trained])))
    return found


EOS = load_tokenizer("bytes").eos_token


@pytest.mark.parametrize(
    ("row", "schema", "whole", "trained"),
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, None, "1+1={}" + EOS, "{}" + EOS),
        ({"chosen": "one two 2", "rejected": "one two 3"}, None, "one two {}" + EOS, "{}" + EOS),
        (
            {"prompt": ASKS, "chosen": [says("2")], "rejected": [says("3")]},
            None, f"u:why?{EOS}a:{{}}{EOS}", "{}" + EOS,
        ),
        (
            {"chosen": [*ASKS, says("2")], "rejected": [*ASKS, says("3")]},
            None, f"u:why?{EOS}a:{{}}{EOS}", "{}" + EOS,
        ),
        (
            {"prompt": "why?", "chosen": [*ASKS, says("2")], "rejected": [*ASKS, says("3")]},
            None, f"u:why?{EOS}a:{{}}{EOS}", "{}" + EOS,
        ),
        (
            {"prompt": "why?", "chosen": [says("2")], "rejected": [says("3")]},
            None, f"u:why?{EOS}a:{{}}{EOS}", "{}" + EOS,
        ),
        (
            {"instruction": "add", "input": "1 1", "chosen": "2", "rejected": "3"},
            None, f"u:add\n1 1{EOS}a:{{}}{EOS}", "{}" + EOS,
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                               {"from": "human", "value": "c"}],
             "chosen": {"from": "gpt", "value": "2"}, "rejected": {"from": "gpt", "value": "3"}},
            None, f"u:a{EOS}a:b{EOS}u:c{EOS}a:{{}}{EOS}", "{}" + EOS,
        ),
        (
            {"q": "1+1=", "good": "2", "bad": "3"},
            Schema("preference", {"prompt": "q", "chosen": "good", "rejected": "bad"}), "1+1={}" + EOS, "{}" + EOS,
        ),
    ],
    ids=["trl", "trl-implicit", "trl-messages", "trl-implicit-messages", "ultrafeedback", "asked", "alpaca", "sharegpt",
         "columns"],
)  # fmt: skip
def test_chosen_and_rejected_share_their_context(
    tmp_path: Path, row: dict[str, Any], schema: Schema | None, whole: str, trained: str
) -> None:
    file = prepared(tmp_path, [row], schema)
    assert file.details["pairs"]
    assert texts(file) == [(whole.format(answer), trained.format(answer)) for answer in ("2", "3")]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a", "chosen": "2", "rejected": "2"}, "are the same"),
        ({"chosen": "2", "rejected": "3"}, "no prompt, and the answers have no common beginning"),
        ({"chosen": ASKS, "rejected": [*ASKS, says("3")]}, "no prompt, and the answers have no common beginning"),
        ({"conversations": [{"from": "human", "value": "a"}], "chosen": "2", "rejected": "3"}, "not a turn"),
        ({"prompt": "a", "chosen": 2, "rejected": "3"}, "message"),
    ],
)
def test_invalid_preference_rows_are_refused_with_their_location(
    tmp_path: Path, row: dict[str, Any], what: str
) -> None:
    with pytest.raises(SampleError, match=rf"pairs\.jsonl:1.*{what}"):
        prepared(tmp_path, [row])


def test_a_pair_is_dropped_whole_if_one_side_is_too_long(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "chosen": "b" * 40, "rejected": "c"},
        {"prompt": "d", "chosen": "e", "rejected": "f"},
        {"prompt": "g", "chosen": "h", "rejected": "i" * 40},
    ]
    file = prepared(tmp_path, rows, max_tokens=16, too_long="drop")
    assert [text for text, _ in texts(file)] == [f"de{EOS}", f"df{EOS}"]
    report = file.details["report"]
    assert report[0].startswith(f"2 samples, {sum(file.lengths)} tokens")
    assert any(line.startswith("left out: 2 the other answer is left out (first: ") for line in report)


def test_pairs_stay_together_in_every_micro_batch_of_every_epoch(tmp_path: Path) -> None:
    rows = [{"prompt": "?" * (1 + n % 5), "chosen": f"{n}+", "rejected": f"{n}-" * (1 + n % 3)} for n in range(11)]
    file = prepared(tmp_path, rows)
    training, held_out, _ = split_samples(file, 0.2, 2)
    assert len(training) + len(held_out) == 11
    reference = Reference(np.arange(22, dtype=np.float32))
    pairs = SampleRows(file, training, 4, 2, reference)
    loader = Loader(pairs, micro_batch=4, micro_batches=2, seed=3)
    seen: list[float] = []
    for _ in range(9):
        for batch in next(loader):
            said = batch["reference_log_probs"]
            assert said.dtype.is_floating_point
            assert (said[::2] % 2 == 0).all()
            assert (said[1::2] == said[::2] + 1).all()
            seen += said.tolist()
    assert set(seen[: 2 * len(training)]) == {float(2 * n + half) for n in training for half in (0, 1)}
    assert "reference_log_probs" not in collate([SampleRows(file, training, 4, 2).row(0)])
    assert 0.3 < pairs.efficiency <= 1
