"""TensorBoard, Weights & Biases and Trackio: told the same, sending nothing unless asked, ending nothing."""

from __future__ import annotations

import errno
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import ConfigError
from megatrain.train.events import Ended, Evaluated, Event, Sampled, Saved
from megatrain.train.metrics import Lenient, Tracked, identity_of, open_tracker, refuse_missing
from tests.train.test_metrics import EVENTS, stepped


def tracked(folder: Path, online: bool = False, step: int | None = None) -> Tracked:
    return Tracked(folder, "project", online, {"train": {"steps": 3}}, "abc", step)


class Fake(types.ModuleType):
    """A package that notes what it is told, in place of wandb or trackio."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.opened: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, Any], int | None]] = []
        self.finished = 0
        self.failing = False

    def Settings(self, **given: Any) -> dict[str, Any]:  # as wandb calls it
        return given

    def init(self, **given: Any) -> Fake:
        self.opened.append(given)
        return self

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        if self.failing:
            raise ConnectionError("the network is down")
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture(params=["wandb", "trackio"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake(request.param)
    monkeypatch.setitem(sys.modules, request.param, made)
    return made


def test_all_trackers_get_the_same_numbers(fake: Fake, tmp_path: Path) -> None:
    refuse_missing([fake.__name__])
    with open_tracker(fake.__name__, tracked(tmp_path), pytest.fail) as watch:
        for event in (stepped(3), Evaluated(3, 2.0), Sampled(3, "a", "b"), Saved(3, 1.0, 2, "x"), Ended(3, 3, 1.0)):
            watch(event)
    assert len(fake.opened) == 1
    assert fake.opened[0]["config"] == {"train": {"steps": 3}}
    steps = [values.get("step", step) for values, step in fake.logged]
    assert steps == [3, 3, 3]
    assert fake.logged[0][0]["loss/train"] == 2.5
    assert fake.logged[1][0]["loss/validation_perplexity"] == pytest.approx(7.389, rel=1e-3)
    assert fake.logged[2][0]["sample"] == "ab"
    assert fake.finished == 1


@pytest.mark.parametrize(("online", "mode"), [(False, "offline"), (True, "online")])
def test_nothing_is_sent_by_default(online: bool, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Fake("wandb")
    monkeypatch.setitem(sys.modules, "wandb", made)
    with open_tracker("wandb", tracked(tmp_path, online), pytest.fail) as watch:
        watch(stepped(1))
    assert made.opened[0]["mode"] == mode
    assert made.opened[0]["dir"] == str(tmp_path)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_uninstalled_trackers_are_refused_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"{name} cannot be imported.*pip install {name}"):
        refuse_missing(["tensorboard", name])


def test_a_tracker_failure_is_reported_once_and_the_tracker_reopened(fake: Fake, tmp_path: Path) -> None:
    said: list[str] = []
    now = [0.0]
    make: Callable[[bool], Any] = open_tracker(fake.__name__, tracked(tmp_path), said.append)._make
    with Lenient(fake.__name__, make, said.append, pause_seconds=60, clock=lambda: now[0]) as watch:
        watch(stepped(1))
        fake.failing = True
        watch(stepped(2))
        watch(stepped(3))  # not even tried
        assert len(said) == 1
        assert "the network is down" in said[0]
        now[0] = 61.0
        watch(stepped(4))
        assert len(said) == 1
        fake.failing = False
        now[0] = 122.0
        watch(stepped(5))
    assert [values.get("step", step) for values, step in fake.logged] == [1, 5]
    assert len(fake.opened) == 3
    assert fake.finished == 3


def test_a_tracker_failing_to_close_does_not_end_the_run(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fake, "finish", fails)
    said: list[str] = []
    with open_tracker(fake.__name__, tracked(tmp_path), said.append) as watch:
        watch(stepped(1))
    assert len(said) == 1


def test_a_resumed_run_keeps_its_tracker_name(tmp_path: Path) -> None:
    first = identity_of(tmp_path, goes_on=False)
    assert identity_of(tmp_path, goes_on=True) == first
    assert identity_of(tmp_path, goes_on=False) != first
    assert identity_of(tmp_path / "absent", goes_on=True)  # where it cannot be kept, the run is drawn anew


def read_back(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_tensorboard_reads_the_numbers_back(tmp_path: Path) -> None:
    with open_tracker("tensorboard", tracked(tmp_path), pytest.fail) as watch:
        for event in EVENTS:
            watch(event)
    found = read_back(tmp_path)
    (loss,) = found.Scalars("loss/train")
    (held_out,) = found.Scalars("loss/validation")
    assert (loss.step, loss.value) == (3, 2.5)
    assert (held_out.step, held_out.value) == (5, pytest.approx(2.4))
    assert "speed/mfu" in found.Tags()["scalars"]
    assert "loss/validation_perplexity" in found.Tags()["scalars"]
    assert found.Tags()["tensors"]  # the sample


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_continues_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    honest, full, said = RecordWriter.write, [False], []

    def write(writer: RecordWriter, data: bytes) -> Any:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return honest(writer, data)

    monkeypatch.setattr(RecordWriter, "write", write)
    with open_tracker("tensorboard", tracked(tmp_path), said.append) as watch:
        watch._pause_seconds = 0.0
        steps: list[Event] = [stepped(step) for step in range(1, 30)]
        for at, event in enumerate(steps):
            full[0] = 5 <= at < 20
            watch(event)
            watch(Ended(at, 30, 0.0))  # flushes
    assert len(said) == 1
    found = {each.step for each in read_back(tmp_path).Scalars("loss/train")}
    assert {1, 2, 3, 4, 29} <= found
