"""The metrics file and the TensorBoard events."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatrain.errors import ExportError
from megatrain.train.events import Ended, Evaluated, Event, Sampled, Skipped, Stepped
from megatrain.train.metrics import DERIVED, JsonLines, TensorBoard, record


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
        "light_share": pytest.approx(0.2),
        "stall_share": pytest.approx(0.2),
        "written_nbytes_per_day": pytest.approx(43_200 * (1 << 20)),
    }


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_becomes_null(tmp_path: Path, loss: float) -> None:
    with JsonLines(tmp_path / "m.jsonl") as watch:
        watch(stepped(loss=loss))
    assert read(tmp_path / "m.jsonl")[0]["loss"] is None


def test_a_line_is_on_disk_as_soon_as_it_is_told(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "m.jsonl") as watch:
        for count, event in enumerate(EVENTS, start=1):
            watch(event)
            assert len(read(tmp_path / "m.jsonl")) == count


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"m\.jsonl: cannot be written"):
        JsonLines(tmp_path / "absent" / "m.jsonl")


def test_tensorboard_reads_the_numbers_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoard(tmp_path) as watch:
        for event in EVENTS:
            watch(event)
    read_back = EventAccumulator(str(tmp_path))
    read_back.Reload()
    (loss,) = read_back.Scalars("loss/train")
    (held_out,) = read_back.Scalars("loss/validation")
    assert (loss.step, loss.value) == (3, 2.5)
    assert (held_out.step, held_out.value) == (5, pytest.approx(2.4))
    assert "speed/light_share" in read_back.Tags()["scalars"]
    assert read_back.Tags()["tensors"]  # the sample
