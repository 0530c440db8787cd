"""Amounts as people read them, and as they type them again."""

from __future__ import annotations

import pytest

from megatrain.formatting import at_least, at_most, clock, counted_epochs
from megatrain.spec.limits import parse_nbytes


@pytest.mark.parametrize(
    ("nbytes", "up", "down"),
    [
        (471_383_916_228, "472 GB", "471 GB"),
        (21_175_197_696, "21.2 GB", "21.1 GB"),
        (24_000_000_000, "24.0 GB", "24.0 GB"),
        (999_500_000_001, "1.00 TB", "999 GB"),
        (999, "999 B", "999 B"),
        (9_991, "10.0 kB", "9.99 kB"),
        (0, "0 B", "0 B"),
    ],
)
def test_amounts_are_rounded_to_three_digits_the_safe_way(nbytes: int, up: str, down: str) -> None:
    assert (at_least(nbytes), at_most(nbytes)) == (up, down)


@pytest.mark.parametrize("size", [10**6, 10**9, 10**12, 10**15])
def test_an_amount_that_is_typed_again_is_enough_and_no_more_than_a_hundredth_more(size: int) -> None:
    for digits in range(100, 1000):
        for nbytes in (digits * size // 100, digits * size // 100 + 1, digits * size // 100 - 1):
            if 10**6 <= nbytes < 9 * 10**17:
                assert nbytes <= parse_nbytes(at_least(nbytes), "here") <= 1.01 * nbytes
                assert parse_nbytes(at_most(max(nbytes, 10**6)), "here") <= nbytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (3_600, "1:00:00"), (86_399, "23:59:59"), (90_061, "1 d 1:01:01")],
)
def test_a_clock_counts_seconds(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1 epoch"), (0.9996, "1 epoch"), (0.996, "0.996 epochs"), (2.5, "2.5 epochs"), (2345.6, "2,350 epochs")],
)
def test_one_epoch_is_no_plural(number: float, text: str) -> None:
    assert counted_epochs(number) == text
