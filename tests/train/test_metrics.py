"""The metrics file: whole lines, whatever the disk does."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import ExportError
from megatrain.train.events import Ended, Evaluated, Event, Sampled, Skipped, Stepped
from megatrain.train.metrics import DERIVED, JsonLines, record, scalars


def stepped(step: int = 3, loss: float = 2.5) -> Stepped:
    return Stepped(
        step=step,
        steps=10,
        loss=loss,
        grad_norm=0.5,
        lr=1e-3,
        tokens=1000,
        seconds=2.0,
        data_seconds=0.1,
        stall_seconds=0.3,
        flops=4e9,
        peak_flops=1e10,
        nbytes={"host": 1 << 20},
        elapsed_seconds=6.0,
        written_nbytes=1 << 20,
    )


EVENTS: list[Event] = [
    stepped(),
    Skipped(4, 10, "the loss is not finite", 1, 2.0, 8.0),
    Evaluated(5, 2.4),
    Sampled(5, "def ", "f(x):\n\treturn 'é\u2028\x1b'"),
    Ended(10, 10, 20.0),
]


def no_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=no_constant) for line in path.read_bytes().split(b"\n")[:-1]]


def test_each_event_is_one_line_of_json_with_its_kind(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "m.jsonl") as watch:
        for event in EVENTS:
            watch(event)
    lines = read(tmp_path / "m.jsonl")
    assert [line["event"] for line in lines] == ["stepped", "skipped", "evaluated", "sampled", "ended"]
    assert lines[3]["text"] == "f(x):\n\treturn 'é\u2028\x1b'"


def test_a_step_holds_its_fields_and_what_follows_from_them() -> None:
    values = record(stepped())
    assert values["nbytes"] == {"host": 1 << 20}
    assert {name: values[name] for name in DERIVED} == {
        "tokens_per_second": 500.0,
        "flops_per_second": 2e9,
        "mfu": pytest.approx(0.2),
        "stall_share": pytest.approx(0.2),
        "written_nbytes_per_day": pytest.approx(43_200 * (1 << 20)),
    }


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_nonfinite_numbers_become_null(tmp_path: Path, loss: float) -> None:
    with JsonLines(tmp_path / "m.jsonl") as watch:
        watch(stepped(loss=loss))
    assert read(tmp_path / "m.jsonl")[0]["loss"] is None


def test_metric_lines_are_written_immediately(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "m.jsonl") as watch:
        for count, event in enumerate(EVENTS, start=1):
            watch(event)
            assert len(read(tmp_path / "m.jsonl")) == count


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"m\.jsonl: cannot be written"):
        JsonLines(tmp_path / "absent" / "m.jsonl")


class Small:
    """Stands in for an open file on a disk that has room for so many bytes more."""

    def __init__(self, file: Any) -> None:
        self.file, self.room = file, 10**9

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(len(data), self.room)
        self.room -= taken
        return int(self.file.write(data[:taken]))

    def fileno(self) -> int:
        return int(self.file.fileno())

    def close(self) -> None:
        self.file.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[JsonLines, Small, list[str]]]:
    said: list[str] = []
    with JsonLines(tmp_path / "m.jsonl", say=said.append) as watch:
        disk = Small(watch._file)
        watch._file = disk  # type: ignore[assignment]
        yield watch, disk, said


@pytest.mark.parametrize("room", [0, 1, 100])
def test_a_full_disk_is_reported_once_and_no_metric_line_is_lost(
    small: tuple[JsonLines, Small, list[str]], room: int
) -> None:
    watch, disk, said = small
    watch(stepped(1))
    disk.room = room
    for step in range(2, 6):
        watch(stepped(step))
    assert len(said) == 1
    assert "No space left" in said[0]
    assert "training continues" in said[0]
    disk.room = 10**9
    watch(stepped(6))
    assert [line["step"] for line in read(watch.path)] == [1, 2, 3, 4, 5, 6]
    assert len(said) == 2
    assert said[1].endswith("is written again")
    disk.room = 0
    watch(stepped(7))
    assert len(said) == 3  # another time that it is full


def test_lost_metric_lines_are_reported_at_the_end(tmp_path: Path) -> None:
    said: list[str] = []
    with JsonLines(tmp_path / "m.jsonl", say=said.append) as watch:
        watch(stepped(1))
        watch._file = Small(watch._file)  # type: ignore[assignment]
        watch._file.room = 5
        watch(stepped(2))
    assert "lacks the last 1 lines" in said[-1]


def test_perplexity_is_shown_beside_the_loss() -> None:
    assert record(Evaluated(5, 2.0))["perplexity"] == pytest.approx(math.exp(2.0))
    assert record(Evaluated(5, 1e4))["perplexity"] is None
    assert record(Evaluated(5, math.nan))["perplexity"] is None
    assert scalars(Evaluated(5, 2.0)) == {"loss/validation": 2.0, "loss/validation_perplexity": math.exp(2.0)}


def test_invalid_unicode_is_still_logged(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "m.jsonl") as watch:
        watch(Sampled(5, "", "\udc80"))
    assert read(tmp_path / "m.jsonl")[0]["event"] == "sampled"
