"""Encodes samples on several processes, with the same order, files and statistics as one process.

Writing a chat by its template and finding its turns is Python code, which one process does on one core. So batches go
to processes, and come back in order; what becomes of their samples is added up in that order. An error is raised in
its place, behind all that stands before it in the source.

Processes are started anew and not forked, because this one has threads by then, so each loads what it needs, which
takes a second: data of a few batches stays in this process. Left out: reading, which is the smaller part.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from typing import TypeAlias

from megatrain.data.encode import EncodedSample, Encoder, Statistics, batches_of, encode_batch
from megatrain.data.read_rows import Bad, LeftOut
from megatrain.data.sample_formats import Sample
from megatrain.errors import DataError

WORTH_PROCESSES = 8
"""Batches, about as many megabytes of text, from which on processes are started."""
UNDER_WAY = 2
"""Batches for each process that are read and not taken yet."""

_Encoded: TypeAlias = tuple[list[EncodedSample], Statistics]
_Batches: TypeAlias = Iterable[list[Sample] | Exception]

_encoder: Encoder | None = None
"""Of a process that encodes."""


def encode_in_processes(
    samples: Iterable[Sample],
    encoder: Encoder,
    statistics: Statistics,
    processes: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Iterator[EncodedSample]:
    """As `encode_samples`, on so many processes where that is worth it; `progress` is told the rows taken so far.

    Raises what `encode_samples` raises, and `DataError` where a process was ended from outside.
    """
    batches = _to_the_error(batches_of(samples))
    first = list(islice(batches, WORTH_PROCESSES if processes > 1 else 0))
    everything = chain(first, batches)
    taken = 0
    is_worth_it = len(first) == WORTH_PROCESSES
    bad = statistics.left_out.bad
    results = _elsewhere(everything, encoder, bad, processes) if is_worth_it else _here(everything, encoder, bad)
    for rows, (encoded, found) in results:
        statistics.merge(found)
        taken += rows
        if progress is not None:
            progress(taken)
        yield from encoded


def _to_the_error(batches: Iterator[list[Sample]]) -> Iterator[list[Sample] | Exception]:
    """The batches, and in the place where reading fails its error, so that what comes before is encoded before."""
    try:
        yield from batches
    except Exception as error:
        yield error


def _here(batches: _Batches, encoder: Encoder, bad: Bad) -> Iterator[tuple[int, _Encoded]]:
    """Of each batch the rows, the samples and what has become of them."""
    for batch in batches:
        if isinstance(batch, Exception):
            raise batch
        yield _rows(batch), _encoded(batch, encoder, bad)


def _elsewhere(batches: _Batches, encoder: Encoder, bad: Bad, processes: int) -> Iterator[tuple[int, _Encoded]]:
    """As `_here`, with the work in other processes."""
    before = multiprocessing.active_children()
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin, (encoder,))
    try:
        waiting: deque[tuple[int, Future[_Encoded]] | Exception] = deque()
        for batch in chain(batches, [None]):
            if isinstance(batch, list):
                with _interrupts_waiting():
                    waiting.append((_rows(batch), pool.submit(_work, batch, bad)))
            elif batch is not None:
                waiting.append(batch)
            while waiting and (batch is None or len(waiting) >= UNDER_WAY * processes):
                next_one = waiting.popleft()
                if isinstance(next_one, Exception):
                    raise next_one
                yield next_one[0], next_one[1].result()
    except BrokenProcessPool as error:
        what, fix = "a process that encoded samples was ended from outside", "free some host memory and start again"
        raise DataError(what, fix=fix) from error
    except BaseException:
        for process in multiprocessing.active_children():  # nobody waits for what they are at
            if process not in before:
                process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _rows(batch: list[Sample]) -> int:
    """How many rows of a source a batch is made of: a pair of answers is one."""
    return sum(sample.answer != "rejected" for sample in batch)


@contextmanager
def _interrupts_waiting() -> Iterator[None]:
    """In the block Ctrl-C waits; a process that is started in it never hears of it, and leaves it to the first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(encoder: Encoder) -> None:
    """In a new process: keep the encoder, and end with the first process whatever ends it."""
    global _encoder
    _encoder = encoder
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(batch: list[Sample], bad: Bad) -> _Encoded:
    assert _encoder is not None  # `_begin` has run
    return _encoded(batch, _encoder, bad)


def _encoded(batch: list[Sample], encoder: Encoder, bad: Bad) -> _Encoded:
    found = Statistics(LeftOut(bad))
    return encode_batch(batch, encoder, found), found


__all__ = ["encode_in_processes"]
