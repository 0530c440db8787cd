"""How arrays are checked, cut into blocks and handed to threads, for every kernel of this room.

The blocks are fixed: they depend on the segments alone, never on the thread count. Threads are our own small
pool, not numba's parallel loops, whose threading layers clash with OpenMP and with other callers. The calling
thread always works too, and a helper that has not begun when the work is done is dropped, so calls from
several threads at once cannot wait for each other. Left out: pinning threads to cores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.errors import ConfigError, MegaTrainError
from megatrain.optim.kernels import Kernel

Array = NDArray[Any]
F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
Segment = tuple[int, int, bool]

BLOCK = 1 << 16  # elements; a multiple of `kernels.LANES` and of a cache line in every dtype

MOST_THREADS = 1 << 10
"""More than any machine has."""

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def whole(nelements: int) -> list[Segment]:
    """One segment over a whole array, with weight decay."""
    return [(0, nelements, True)]


def cut(segments: Sequence[Segment], nelements: int) -> NDArray[np.int64]:
    """Segments as blocks of at most `BLOCK` elements: rows of (start, stop, decays), int64[blocks, 3].

    Raises MegaTrainError unless the segments ascend, do not overlap and lie within [0, nelements].
    """
    if len(segments) == 0:
        return np.zeros((0, 3), np.int64)
    table = np.array(segments, np.int64)
    start, stop = table[:, 0], table[:, 1]
    if start[0] < 0 or stop[-1] > nelements or np.any(start > stop) or np.any(start[1:] < stop[:-1]):
        raise MegaTrainError(
            "segments overlap, descend or leave the array",
            where=f"{len(segments)} segments of an array of {nelements} elements",
            fix="take them from the unit's layout, in its order",
        )
    counts = -(-(stop - start) // BLOCK)
    owner = np.repeat(np.arange(len(table)), counts)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = table[owner]
    blocks[:, 0] += index * BLOCK
    blocks[:, 1] = np.minimum(blocks[:, 0] + BLOCK, blocks[:, 1])
    return blocks


def check_arrays(written: dict[str, Array], read: dict[str, Array], dtypes: dict[str, tuple[type, ...]]) -> None:
    """Raise MegaTrainError unless all are contiguous, one-dimensional, of one length, of their dtype, and
    disjoint.

    The kernels trust this: they neither check bounds nor expect one array to change under another.
    """
    arrays = written | read
    length = next(iter(arrays.values())).size
    for name, array in arrays.items():
        problem = ""
        if array.dtype not in dtypes[name]:
            problem = f"dtype {array.dtype}, expected {' or '.join(d.__name__ for d in dtypes[name])}"
        elif array.shape != (length,):
            problem = f"shape {array.shape}, expected ({length},)"
        elif not array.flags.c_contiguous or not array.flags.aligned:
            problem = "not contiguous and aligned"
        elif name in written and not array.flags.writeable:
            problem = "read-only"
        if problem:
            raise MegaTrainError(problem, where=name, fix="pass flat arrays of one length")
    for one, other in combinations(arrays, 2):
        if (one in written or other in written) and np.may_share_memory(arrays[one], arrays[other]):
            raise MegaTrainError("two arrays of one call share memory", where=f"{one}, {other}")


def run(kernel: Kernel, *args: Any, blocks: NDArray[np.int64], threads: int) -> None:
    """Run `kernel(*args, blocks, counter)` on the calling thread and up to `threads - 1` helpers.

    Where the calling thread is kept to some of the processors, as beside a memory node, there are no more of them than
    those; a helper is kept to those of the thread that needed it first. Returns when every block is done. Raises
    ConfigError for fewer than one thread.
    """
    if threads < 1:
        raise ConfigError(f"{threads} threads", where="optimizer threads", fix="give at least 1")
    counter = np.zeros(1, np.int64)
    helpers = min(threads, len(blocks), _most_threads()) - 1
    pool = _shared_pool() if helpers > 0 else None
    futures = [pool.submit(kernel, *args, blocks, counter) for _ in range(helpers)] if pool else []
    try:
        kernel(*args, blocks, counter)
    finally:
        for future in futures:
            if not future.cancel():
                future.result()


def _most_threads() -> int:
    allowed, there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0, os.cpu_count() or 1
    return allowed if 0 < allowed < there else MOST_THREADS


def _shared_pool() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="megatrain-optim")
        return _pool


def _forget_pool() -> None:
    """A forked child has none of its parent's threads, and may have inherited the lock held."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
