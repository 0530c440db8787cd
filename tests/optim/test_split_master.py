"""The split master: two halves that are a float32, exactly, the upper one the nearest bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import MegaTrainError
from megatrain.optim.split_master import join, join_into, split, split_into
from tests.references import bf16_to_f32, f32_to_bf16, reference_join, reference_split

patterns = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(lambda bits: np.array(bits, np.uint32))


def every_upper_half_with_the_low_halves_that_matter() -> np.ndarray:
    upper = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (upper[:, None] | lower).ravel()


@given(patterns)
def test_the_halves_rebuild_every_bit_pattern(u: np.ndarray) -> None:
    assert np.array_equal(join(*split(u.view(np.float32))).view(np.uint32), u)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_halves_rebuild_and_equal_the_reference_around_every_tie(threads: int) -> None:
    u = every_upper_half_with_the_low_halves_that_matter()
    hi, lo = split(u.view(np.float32), threads)
    for fast, slow in zip((hi, lo), reference_split(u.view(np.float32)), strict=True):
        assert np.array_equal(fast, slow)
    assert np.array_equal(join(hi, lo, threads).view(np.uint32), u)
    assert np.array_equal(reference_join(hi, lo).view(np.uint32), u)


def test_hi_is_the_nearest_bfloat16_and_ties_go_away_from_zero() -> None:
    u = every_upper_half_with_the_low_halves_that_matter()
    master = u.view(np.float32)
    keep = np.abs(master) < 3.38e38  # finite, with a finite neighbour on either side
    master = master[keep]
    hi, lo = split(master)
    chosen = np.abs(bf16_to_f32(hi).astype(np.float64) - master)
    for step in (-1, 1):
        toward_inf = (hi & np.uint16(0x7FFF)) < 0x7F80 - 1
        movable = toward_inf if step == 1 else (hi & np.uint16(0x7FFF)) > 0
        other = np.abs(bf16_to_f32(hi + np.int16(step).astype(np.uint16)).astype(np.float64) - master)
        assert np.all(chosen[movable] <= other[movable])
    ties = lo == 0x8000
    assert np.all(np.abs(bf16_to_f32(hi[ties])) > np.abs(master[ties]))
    elsewhere = ~ties
    assert np.array_equal(hi[elsewhere], f32_to_bf16(master[elsewhere]))


def test_a_bfloat16_value_is_already_split() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    hi, lo = split(bf16_to_f32(bits))
    assert np.array_equal(hi, bits)
    assert not lo.any()


def test_hi_of_a_master_near_the_largest_float_is_infinite_and_the_master_survives() -> None:
    master = np.array([np.finfo(np.float32).max, -np.finfo(np.float32).max], np.float32)
    hi, lo = split(master)
    assert np.isinf(bf16_to_f32(hi)).all()
    assert np.array_equal(join(hi, lo), master)


def test_hi_of_a_computed_nan_is_nan() -> None:
    with np.errstate(invalid="ignore"):
        computed = np.array([np.inf, -np.inf], np.float32) * np.float32(0)
    assert np.isnan(bf16_to_f32(split(computed)[0])).all()


@given(patterns)
def test_conversion_to_and_from_bfloat16_is_that_of_torch(u: np.ndarray) -> None:
    x = u.view(np.float32)
    theirs = torch.from_numpy(x.copy()).to(torch.bfloat16)
    ours = f32_to_bf16(x)
    numbers = ~np.isnan(x)
    assert np.array_equal(ours[numbers], theirs.view(torch.uint16).numpy()[numbers])
    assert np.isnan(bf16_to_f32(ours[~numbers])).all()
    assert np.array_equal(bf16_to_f32(ours)[numbers], theirs.float().numpy()[numbers])


def test_what_does_not_fit_is_refused_by_name() -> None:
    f32, u16 = np.zeros(4, np.float32), np.zeros(4, np.uint16)
    with pytest.raises(MegaTrainError, match="lo: shape"):
        split_into(f32, u16, np.zeros(3, np.uint16))
    with pytest.raises(MegaTrainError, match="hi: dtype float32"):
        join_into(f32, u16, np.zeros(4, np.float32))
    with pytest.raises(MegaTrainError, match="hi, lo: two arrays of one call share memory"):
        split_into(f32, u16, u16)
    with pytest.raises(MegaTrainError, match="out: not contiguous"):
        join_into(u16, u16.copy(), np.zeros(8, np.float32)[::2])
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(MegaTrainError, match="out: read-only"):
        join_into(u16, u16.copy(), frozen)
