"""Blocks cover the segments exactly once, and a failure in any thread comes to the caller."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.optim import kernels


@given(st.lists(st.integers(0, 5000), max_size=20), st.sampled_from([1, 7, 64, 4096]))
def test_blocks_cover_each_segment_once_and_no_block_is_too_long(cuts: list[int], block: int) -> None:
    ordered = sorted(cuts)
    segments = [(a, b, i % 2 == 0) for i, (a, b) in enumerate(zip(ordered[::2], ordered[1::2], strict=False))]
    times = np.zeros((5000, 2), int)
    with patch.object(kernels, "BLOCK", block):
        for start, stop, decays in kernels.cut(segments, 5000):
            assert 0 < stop - start <= block
            times[start:stop, decays] += 1
    expected = np.zeros_like(times)
    for start, stop, decays in segments:
        expected[start:stop, int(decays)] += 1
    assert np.array_equal(times, expected)


def test_an_array_of_any_length_is_one_segment() -> None:
    assert kernels.cut(kernels.whole(0), 0).shape == (0, 3)
    assert kernels.cut(kernels.whole(3), 3).tolist() == [[0, 3, 1]]


@pytest.mark.parametrize("culprit", ["caller", "helper"])
def test_a_failure_in_any_thread_comes_to_the_caller(culprit: str) -> None:
    both_in = threading.Barrier(2, timeout=20)

    def kernel(table: Any, counter: Any) -> None:
        both_in.wait()
        here = "helper" if threading.current_thread().name.startswith("megatrain-optim") else "caller"
        if here == culprit:
            raise ArithmeticError(here)

    with pytest.raises(ArithmeticError, match=culprit):
        kernels.run(kernel, blocks=kernels.cut([(0, 1, True), (1, 2, True)], 2), threads=2)


def test_a_busy_pool_delays_nobody_for_ever() -> None:
    """More callers than the pool has threads, each of which wants helpers, all at once inside their kernels."""
    callers = 3 * (kernels.os.cpu_count() or 1)
    all_in = threading.Barrier(callers, timeout=20)
    done = []

    def kernel(table: Any, counter: Any) -> None:
        if not threading.current_thread().name.startswith("megatrain-optim"):
            all_in.wait()

    def call() -> None:
        kernels.run(kernel, blocks=kernels.cut([(i, i + 1, True) for i in range(8)], 8), threads=8)
        done.append(True)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(done) == callers
