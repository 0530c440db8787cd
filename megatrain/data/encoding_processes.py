"""Encodes samples on several processes, with the same order, files and statistics as one process.

Rendering chats and finding their turns is Python code, so one process uses one core. Batches are therefore encoded by
worker processes, and their results and statistics are taken in order. An error is raised at its position, after all
samples that precede it in the source.

Workers are spawned, not forked, because this process has threads by then. Each imports what it needs, which takes a
second, so data of a few batches is encoded in this process, and so is all data on a system without semaphores. Reading
stays in this process; it is the smaller part.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import TypeAlias

from megatrain.data.encode import EncodedSample, Encoder, Statistics, batches_of, encode_batch
from megatrain.data.read_rows import Bad, LeftOut
from megatrain.data.sample_formats import Sample
from megatrain.errors import DataError

MIN_BATCHES = 8
"""Batches (about a megabyte of text each) from which on worker processes are used."""
BATCHES_PER_PROCESS = 2
"""Batches that are submitted ahead, per worker process."""

LOOK_SECONDS = 1.0
"""Between looks at the pool while a result is waited for."""

_Encoded: TypeAlias = tuple[list[EncodedSample], Statistics]
_Batches: TypeAlias = Iterable[list[Sample] | Exception]

_encoder: Encoder | None = None
"""In a worker process, its encoder."""


def encode_in_processes(
    samples: Iterable[Sample],
    encoder: Encoder,
    statistics: Statistics,
    processes: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Iterator[EncodedSample]:
    """`encode_samples` with `processes` worker processes, or in this process if the data is small.

    progress: called with the number of rows encoded so far. Raises what `encode_samples` raises, and `DataError` if a
    worker is killed.
    """
    batches = _with_error_last(batches_of(samples))
    first = list(islice(batches, MIN_BATCHES if processes > 1 else 0))
    everything = chain(first, batches)
    taken = 0
    bad = statistics.left_out.bad
    if len(first) == MIN_BATCHES:
        results = _in_workers(everything, encoder, bad, processes)
    else:
        results = _in_this_process(everything, encoder, bad)
    for rows, (encoded, found) in results:
        statistics.merge(found)
        taken += rows
        if progress is not None:
            progress(taken)
        yield from encoded


def _with_error_last(batches: Iterator[list[Sample]]) -> Iterator[list[Sample] | Exception]:
    """The batches; if reading fails, its error comes as the last item, so that everything before it is encoded."""
    try:
        yield from batches
    except Exception as error:
        yield error


def _in_this_process(batches: _Batches, encoder: Encoder, bad: Bad) -> Iterator[tuple[int, _Encoded]]:
    """(number of rows, result) of each batch."""
    for batch in batches:
        if isinstance(batch, Exception):
            raise batch
        yield _rows(batch), _encoded(batch, encoder, bad)


def _in_workers(batches: _Batches, encoder: Encoder, bad: Bad, processes: int) -> Iterator[tuple[int, _Encoded]]:
    """`_in_this_process`, but encoded by worker processes, unless the system has no semaphores."""
    before = multiprocessing.active_children()
    try:
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _init_worker, (encoder,))
    except OSError:  # semaphores are files in /dev/shm, which some containers lack
        yield from _in_this_process(batches, encoder, bad)
        return
    try:
        waiting: deque[tuple[int, Future[_Encoded]] | Exception] = deque()
        for batch in chain(batches, [None]):
            if isinstance(batch, list):
                waiting.append((_rows(batch), _submitted(pool, batch, bad)))
            elif batch is not None:
                waiting.append(batch)
            while waiting and (batch is None or len(waiting) >= BATCHES_PER_PROCESS * processes):
                next_one = waiting.popleft()
                if isinstance(next_one, Exception):
                    raise next_one
                yield next_one[0], _result(pool, next_one[1])
    except BrokenProcessPool as error:
        what, fix = "a process that encoded samples was killed", "free some host memory and start again"
        raise DataError(what, fix=fix) from error
    except BaseException:
        for process in multiprocessing.active_children():  # their results are not needed
            if process not in before:
                process.terminate()
        raise
    finally:
        with suppress(RuntimeError):  # it joins its own thread, also where that could not be started
            pool.shutdown(cancel_futures=True)


def _submitted(pool: ProcessPoolExecutor, batch: list[Sample], bad: Bad) -> Future[_Encoded]:
    try:
        with _interrupts_blocked():
            return pool.submit(_encode_in_worker, batch, bad)
    except (OSError, RuntimeError) as error:  # no process, no thread
        raise _not_started(str(getattr(error, "strerror", "") or error)) from error


def _result(pool: ProcessPoolExecutor, future: Future[_Encoded]) -> _Encoded:
    """The result, once it is there. Raises `DataError` if the pool's own thread has ended, as Python does not tell: it
    does if it cannot start another."""
    manager = getattr(pool, "_executor_manager_thread", None)
    while not wait([future], LOOK_SECONDS).done:
        if manager is not None and not manager.is_alive() and not future.done():
            raise _not_started("no more threads")
    return future.result()


def _not_started(why: str) -> DataError:
    what = f"a process to encode samples cannot be started ({why})"
    return DataError(what, fix="end other processes, or raise the limit on them (ulimit -u)")


def _rows(batch: list[Sample]) -> int:
    """The number of rows of the source that a batch comes from: a pair of answers is one row."""
    return sum(sample.answer != "rejected" for sample in batch)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block. Processes started in it never receive it; this process handles it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _init_worker(encoder: Encoder) -> None:
    """Keep the encoder, and watch the parent process, so that the worker exits with it however it ends."""
    global _encoder
    _encoder = encoder
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(batch: list[Sample], bad: Bad) -> _Encoded:
    assert _encoder is not None  # `_init_worker` has run
    return _encoded(batch, _encoder, bad)


def _encoded(batch: list[Sample], encoder: Encoder, bad: Bad) -> _Encoded:
    found = Statistics(LeftOut(bad))
    return encode_batch(batch, encoder, found), found


__all__ = ["encode_in_processes"]
