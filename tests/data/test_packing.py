"""Claims about best-fit packing: every sample once, no row too full, and close to the smallest number of rows."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data.packing import best_fit, copies


def slowly(lengths: list[int], room: int) -> int:
    """The slow reference: the number of rows of best-fit decreasing, looking at every row for each sample."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(left, row) for row, left in enumerate(free) if left >= length]
        if fitting:
            free[min(fitting)[1]] -= length
        else:
            free.append(room - length)
    return len(free)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 60), st.integers(0, 9))
def test_every_sample_is_in_exactly_one_row_that_fits(lengths: list[int], room: int, seed: int) -> None:
    sizes = np.array(lengths)
    members, starts = best_fit(sizes, room, seed)
    assert sorted(members.tolist()) == list(range(len(lengths)))
    rows = [members[a:b] for a, b in itertools.pairwise(starts)]
    assert all(len(row) and sizes[row].sum() <= room for row in rows)
    assert len(rows) == slowly(lengths, room)


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=4))
def test_duplicates_are_counted_within_and_across_sources(sources: list[list[int]]) -> None:
    expected, before = [], set[int]()
    for hashes in sources:
        expected.append((len(hashes) - len({*hashes}), len({*hashes} & before)))
        before |= {*hashes}
    assert copies([np.array(hashes, np.uint64) for hashes in sources]) == expected


def test_the_seed_orders_equal_samples() -> None:
    lengths = np.full(40, 5)
    first, again, other = (best_fit(lengths, 10, seed)[0].tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_packing_handles_no_samples_and_refuses_too_long_ones() -> None:
    members, starts = best_fit(np.array([], dtype=np.int64), 10, 0)
    assert (len(members), starts.tolist()) == (0, [0])
    with pytest.raises(ValueError, match="11 tokens in rows of 10"):
        best_fit(np.array([11]), 10, 0)


def test_typical_lengths_fill_rows_quickly() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 50_000).astype(np.int64) + 2, 2048)
    began = time.perf_counter()
    _, starts = best_fit(lengths, 2048, 0)
    assert time.perf_counter() - began < 30
    assert lengths.sum() / ((len(starts) - 1) * 2048) > 0.99
