"""Claims about streams: each sample once per epoch, the same rows after a resume, and changed data is detected."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatrain.data.loader import Loader
from megatrain.data.read_rows import LeftOut, RowStream, read_rows
from megatrain.data.stream_rows import Packing
from megatrain.errors import DataError, SampleError
from tests.data.streamed_datasets import TOKENIZER, WINDOW, loader, small_blocks, steps, stream, text  # noqa: F401  # a fixture

pytestmark = pytest.mark.usefixtures("small_blocks")


def folder(path: Path, count: int = 47, word: str = "n") -> Path:
    """Rows of various lengths in three files."""
    path.mkdir(exist_ok=True)
    for part in range(3):
        texts = [f"{word}{number}:" + "x" * (number % 13) for number in range(count) if number % 3 == part]
        lines = (json.dumps({"text": text, "note": None if part else 1}) for text in texts)
        (path / f"train-{part}.jsonl").write_text("\n".join(lines) + "\n")
    return path


def test_each_epoch_has_every_sample_once_in_a_new_order(tmp_path: Path) -> None:
    rows = stream(folder(tmp_path / "a"))
    first, second = ([text(rows.row(index)) for index in range(47 * epoch, 47 * epoch + 47)] for epoch in (0, 1))
    assert max(Counter(first).values()) == max(Counter(second).values()) == 1
    assert {*first} == {*second} == {f"n{number}:" + "x" * (number % 13) for number in range(47)}
    assert first != second
    other = stream(tmp_path / "a", seed=6)
    assert [text(other.row(index)) for index in range(47)] != first
    assert text(rows.row(3)) == first[3]  # of a block that is no longer in memory
    assert rows.statistics.samples == 2 * 47


def test_rows_match_their_packing(tmp_path: Path) -> None:
    folder(tmp_path / "a")
    packed, windows = stream(tmp_path / "a", "best_fit"), stream(tmp_path / "a", "windows")
    assert any(list(packed.row(index).positions).count(0) > 1 for index in range(9))  # type: ignore[arg-type]
    assert all(packed.targets(index) == (packed.row(index).labels != -100).sum() for index in range(9))
    assert {len(windows.row(index).ids) for index in range(40)} == {WINDOW}
    assert windows.targets(0) == WINDOW - 1


@pytest.mark.parametrize(("how", "workers"), [("windows", 0), ("best_fit", 2), ("grouped", 1)])
def test_any_saved_position_continues_with_the_same_rows(tmp_path: Path, how: Packing, workers: int) -> None:
    """Across files, blocks and epochs, in the same loader and in a new one, with and without workers."""
    folder(tmp_path / "a")
    going = loader(tmp_path / "a", how, workers=workers)
    found, states = [], []
    for _ in range(30):
        states.append(json.dumps(going.state_dict()))
        found += steps(going, 1)
    assert going.epoch is None
    for at in (0, 1, 7, 20):
        again = loader(tmp_path / "a", how)
        again.load_state_dict(json.loads(states[at]))
        assert steps(again, 8) == found[at : at + 8]
    for at in (22, 3, 0):
        going.load_state_dict(json.loads(states[at]))
        assert steps(going, 5) == found[at : at + 5]
    going.close()


def test_ranks_split_a_step_and_share_one_state(tmp_path: Path) -> None:
    folder(tmp_path / "a")
    alone = loader(tmp_path / "a", micro_batches=3)
    ranks = [loader(tmp_path / "a", micro_batches=3, part=(rank, 2)) for rank in range(2)]
    for _ in range(12):
        (whole,) = steps(alone, 1)
        (first,), (second,) = (steps(rank, 1) for rank in ranks)
        assert [first[0], second[0], first[1]] == whole
        assert ranks[0].state_dict() == ranks[1].state_dict() == alone.state_dict()


def test_streams_are_mixed_by_weight_and_resume_together(tmp_path: Path) -> None:
    paths = [folder(tmp_path / name, word=name) for name in "ab"]

    def both() -> Loader:
        sources = [stream(path, seed=number) for number, path in enumerate(paths)]
        return Loader(sources, micro_batch=2, micro_batches=2, seed=5, weights=[3, 1])

    going = both()
    found = steps(going, 4)
    state = json.loads(json.dumps(going.state_dict()))
    assert going.positions == [12, 4]
    rest = steps(going, 9)
    again = both()
    again.load_state_dict(state)
    assert steps(again, 9) == rest
    assert found[0] != rest[0]


def test_a_changed_dataset_is_reported_without_data_loss(tmp_path: Path) -> None:
    going = loader(folder(tmp_path / "a"))
    steps(going, 7)
    state = json.loads(json.dumps(going.state_dict()))
    changed = loader(folder(tmp_path / "b", word="m"))
    before = steps(changed, 1)
    with pytest.raises(DataError, match="holds other samples at this position than when the checkpoint was saved"):
        changed.load_state_dict(state)
    fresh = loader(tmp_path / "b")
    assert steps(fresh, 1) == before
    assert steps(changed, 1) == steps(fresh, 1)
    with pytest.raises(DataError, match=r"was saved with stream = "):
        loader(tmp_path / "a", "best_fit").load_state_dict(state)
    del state["places"][0]["at"]
    with pytest.raises(DataError, match=r"^loader state: has no 'at', which the state of a stream has"):
        loader(tmp_path / "a").load_state_dict(state)


def test_a_folder_streams_the_files_that_reading_it_whole_takes(tmp_path: Path) -> None:
    """Whatever splits they are named for, CSV included; a state continues in any of them."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "test.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "a" / "train.csv").write_text("text\n007\n1e3\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["five", "six"]}), tmp_path / "a" / "z.parquet")
    whole = [row.fields["text"] for row in read_rows(str(tmp_path / "a"), LeftOut())]
    assert whole == ["one", "two", "007", "1e3", "five", "six"]
    stream = RowStream(str(tmp_path / "a"))
    for number, _ in enumerate(stream.rows_from(0, None), start=1):
        rest = RowStream(str(tmp_path / "a")).rows_from(number, json.loads(json.dumps(stream.state())))
        assert [row.fields["text"] for row in rest] == whole[number:]


def test_text_shorter_than_a_row_is_not_called_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no sample is left to train on .*its text fills no row"):
        stream(folder(tmp_path / "a", 3), "windows").row(0)


def test_sources_that_cannot_stream_are_named(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.txt").write_text("one\ntwo\n")
    with pytest.raises(DataError, match="plain: is plain text, of which each file would be a sample"):
        stream(tmp_path / "plain")
    (tmp_path / "mixed.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    with pytest.raises(DataError, match=r"mixed\.jsonl:1: is not plain text, but would be divided into windows"):
        stream(tmp_path / "mixed.jsonl", "windows").row(0)
    (tmp_path / "short.jsonl").write_text('{"text": "a"}\n' * 3)
    with pytest.raises(DataError, match=r"short\.jsonl: no sample is left to train on"):
        stream(tmp_path / "short.jsonl", "windows").row(0)
    (tmp_path / "bad.jsonl").write_text('{"text": "abc"}\n' * 4 + '{"other": 1}\n' + '{"text": "abc"}\n' * 4)
    with pytest.raises(SampleError, match=r"bad\.jsonl:5: "):
        stream(tmp_path / "bad.jsonl").row(0)
    kept = stream(tmp_path / "bad.jsonl", bad="leave_out")
    assert [text(kept.row(index)) for index in range(8)] == ["abc"] * 8
    assert sum(kept.statistics.left_out.counts.values()) == 1
