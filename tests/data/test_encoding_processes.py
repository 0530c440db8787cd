"""Claims about encoding on several processes: the result equals that of one, including errors and their order."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatrain.data import EncodeOptions, Encoder, Source, prepare_samples
from megatrain.data import encode as encoding
from megatrain.data import encoding_processes as several
from megatrain.data.encode import Statistics
from megatrain.data.encoding_processes import encode_in_processes
from megatrain.data.read_rows import Bad, LeftOut
from megatrain.data.sample_cache import statistics_of
from megatrain.data.sample_formats import Sample
from megatrain.errors import DataError, SampleError
from tests.data.chats import assistant, byte_tokenizer, user

ENCODER = Encoder(byte_tokenizer("gemma"), EncodeOptions(max_tokens=60))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads instead of processes, which take a second to start, and a few samples per batch."""
    monkeypatch.setattr(several, "ProcessPoolExecutor", lambda count, _, start, with_: ThreadPoolExecutor(
        count, initializer=start, initargs=with_
    ))  # fmt: skip
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(several, "MIN_BATCHES", 2)


def samples(count: int, refused: tuple[int, ...] = ()) -> Iterator[Sample]:
    """Some are too long or without a target; `refused` begin with a role that Gemma's template refuses."""
    for number in range(count):
        turns = [user(f"{number}?"), assistant("a" * (number % 23) if number % 5 else "b" * 90)]
        turns = [{"role": "system", "content": "s"}, *turns] if number in refused else turns
        yield Sample(f"x.jsonl:{number}", tuple(turns[: 1 if number % 11 == 7 else 3]))


def outcome(processes: int, given: Iterator[Sample], bad: Bad = "leave_out") -> Any:
    """Everything observable of an encoding: its samples, statistics, error, and reported progress."""
    statistics, told, found, error = Statistics(LeftOut(bad)), list[int](), [], ""
    try:
        for each in encode_in_processes(given, ENCODER, statistics, processes, told.append):
            found.append((each.ids.tolist(), each.trained.tolist(), each.origin))
    except DataError as raised:
        error = str(raised)
    return found, statistics.lines(), dict(statistics.left_out.first), error, told


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_encode_like_one(processes: int) -> None:
    alone = outcome(1, samples(80, (3, 50)))
    assert outcome(processes, samples(80, (3, 50))) == alone
    assert (len(alone[0]), alone[3], alone[4][-1]) == (71, "", 80)


@pytest.mark.usefixtures("threads")
def test_the_first_source_error_is_reported_from_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(at: int, refused: tuple[int, ...]) -> Iterator[Sample]:
        yield from samples(at, refused)
        raise DataError("not JSON", where=f"x.jsonl:{at}")

    alone = outcome(1, broken(60, (20, 40)), "stop")
    assert alone[3].startswith("x.jsonl:20: the chat template")
    assert outcome(3, broken(60, (20, 40)), "stop") == alone
    alone = outcome(1, broken(60, ()), "stop")
    assert alone[3] == "x.jsonl:60: not JSON"
    assert outcome(3, broken(60, ()), "stop") == alone


def test_samples_are_encoded_without_the_semaphores_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are files in /dev/shm."""

    def refuse(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(several, "MIN_BATCHES", 2)
    monkeypatch.setattr(several, "ProcessPoolExecutor", refuse)
    assert outcome(2, samples(80)) == outcome(1, samples(80))


def test_a_process_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(several, "MIN_BATCHES", 2)
    told = "a process to encode samples cannot be started (Resource temporarily unavailable); end other processes"
    with monkeypatch.context() as processes:
        processes.setattr(several.ProcessPoolExecutor, "submit", refuse)
        assert outcome(2, samples(80))[3].startswith(told)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert outcome(2, samples(80))[3].startswith("a process to encode samples cannot be started (can't start new thre")


def test_a_pool_whose_thread_has_died_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(ThreadPoolExecutor):
        def submit(self, *_: Any, **__: Any) -> Any:
            self._executor_manager_thread = threading.Thread()  # it has not been started, or has ended
            return Future[Any]()

    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(several, "MIN_BATCHES", 2)
    monkeypatch.setattr(several, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(several, "ProcessPoolExecutor", lambda *_: Dead(1))
    assert outcome(2, samples(80))[3].startswith("a process to encode samples cannot be started (no more threads)")


def test_errors_are_the_same_from_a_worker_process() -> None:
    error = SampleError("what", reason="why", where="there", fix="so")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.reason) == (SampleError, str(error), "why")


@pytest.mark.slow  # each process imports transformers
def test_processes_write_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(several, "MIN_BATCHES", 2)
    rows = [{"messages": list(sample.messages)} for sample in samples(200, (3, 50))]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told: list[tuple[str, int, int | None]] = []
    files = {}
    for processes in (1, 3):
        cache = tmp_path / str(processes)
        file = prepare_samples(
            Source(str(path)),
            ENCODER,
            cache=cache,
            bad="leave_out",
            processes=processes,
            progress=lambda *said: told.append(said),
        )
        assert statistics_of(file).left_out.counts["refused by the chat template"] == 2
        files[processes] = {each.name: each.read_bytes() for each in cache.iterdir()}
        assert told[-1] == (str(path), 200, 200)
    assert files[1] == files[3]
    assert {name.split(".", 1)[1] for name in files[1]} == {"bin", "json", "lengths", "trained", "hashes", "marks"}
