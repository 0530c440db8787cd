"""The gradient norm: its value, its independence of threads, and elements that are not finite."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import ConfigError, NonFinite
from megatrain.optim import clip_scale, kernels, sum_of_squares
from megatrain.optim.clip import expansion, own_square_sums
from megatrain.spec.layout import OWNED
from tests.references import f32_to_bf16, reference_sum_of_squares

SIZES = [0, 1, 63, 64, 255, 256, 257, kernels.BLOCK - 1, kernels.BLOCK, 3 * kernels.BLOCK + 300]


def gradient(size: int, dtype: type, scale: float = 1.0) -> np.ndarray:
    grad = (np.random.default_rng(size).standard_normal(size) * scale).astype(np.float32)
    return f32_to_bf16(grad) if dtype is np.uint16 else grad


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("size", SIZES)
def test_the_sum_is_exact_to_thirteen_digits(size: int, dtype: type, scale: float) -> None:
    grad = gradient(size, dtype, scale)
    assert sum_of_squares(grad) == pytest.approx(reference_sum_of_squares(grad), rel=1e-13, abs=0)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_the_sum_is_the_same_for_every_thread_count(dtype: type) -> None:
    grad = gradient(9 * kernels.BLOCK + 1234, dtype)
    assert len({sum_of_squares(grad, threads) for threads in (1, 2, 3, 5, 16)}) == 1


def test_a_small_gradient_beside_a_large_one_counts() -> None:
    grad = np.full(kernels.BLOCK, 1e-4, np.float32)
    grad[0] = 1.0
    assert sum_of_squares(grad) == pytest.approx(reference_sum_of_squares(grad), rel=1e-13)
    assert sum_of_squares(grad) > 1.0006


@given(st.integers(0, 700), st.sampled_from([math.inf, -math.inf, math.nan]), st.sampled_from([np.uint16, np.float32]))
def test_one_element_that_is_not_finite_shows_wherever_it_is(place: int, bad: float, dtype: type) -> None:
    values = np.ones(701, np.float32)
    values[place] = bad
    grad = f32_to_bf16(values) if dtype is np.uint16 else values
    total = sum_of_squares(grad)
    assert math.isnan(total) if math.isnan(bad) else total == math.inf


def test_the_largest_finite_gradients_do_not_overflow() -> None:
    grad = np.full(100, np.finfo(np.float32).max, np.float32)
    assert sum_of_squares(grad) == pytest.approx(100 * float(grad[0]) ** 2)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 50.0])
def test_the_factor_is_that_of_torch(scale: float, max_norm: float) -> None:
    grad = gradient(5000, np.float32, scale)
    weight = torch.nn.Parameter(torch.zeros(5000))
    weight.grad = torch.from_numpy(grad.copy())
    norm = torch.nn.utils.clip_grad_norm_([weight], max_norm)
    total = math.sqrt(sum_of_squares(grad))
    assert total == pytest.approx(float(norm), rel=1e-6)
    clipped = grad * np.float32(clip_scale(total, max_norm))
    np.testing.assert_allclose(clipped, weight.grad.numpy(), rtol=2e-6)


@given(st.floats(0, 1e30), st.floats(1e-6, 1e6))
def test_clipping_never_enlarges_and_leaves_at_most_the_maximum(norm: float, max_norm: float) -> None:
    factor = clip_scale(norm, max_norm)
    assert 0 < factor <= 1
    assert norm * factor <= max_norm * (1 + 1e-15)
    assert factor == 1 or norm + 1e-6 > max_norm


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_gives_no_factor(norm: float) -> None:
    with pytest.raises(NonFinite, match=f"gradient norm is {norm}"):
        clip_scale(norm, 1.0)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_maximum_that_is_not_positive_is_refused(max_norm: float) -> None:
    with pytest.raises(ConfigError, match="max_norm"):
        clip_scale(1.0, max_norm)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_the_norm_over_several_ranks_does_not_depend_on_how_many_and_who_owns_what(dtype: type) -> None:
    gradient = np.random.default_rng(0).standard_normal(12 * OWNED).astype(np.float32)
    gradient *= np.exp2(np.random.default_rng(1).integers(-40, 40, gradient.size)).astype(np.float32)
    grad = gradient if dtype is np.float32 else f32_to_bf16(gradient)
    totals = []
    for ranks in (2, 3, 4, 6, 12):
        parts = [np.concatenate(np.split(grad, 12)[rank::ranks]) for rank in range(ranks)]
        totals.append(math.fsum(term for part in reversed(parts) for term in own_square_sums(part, OWNED, threads=2)))
    assert len(set(totals)) == 1
    assert totals[0] == pytest.approx(sum_of_squares(grad), rel=1e-13)


@given(st.lists(st.floats(-1e200, 1e200), max_size=50))
def test_an_expansion_is_the_exact_sum_in_a_few_numbers(values: list[float]) -> None:
    found = expansion(values)
    assert sum(map(Fraction, found), Fraction()) == sum(map(Fraction, values), Fraction())
    assert len(found) <= len(values)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_own_sums_show_an_element_that_is_not_finite(bad: float) -> None:
    grad = np.ones(2 * OWNED, np.float32)
    grad[-1] = bad
    assert not math.isfinite(math.fsum(own_square_sums(grad, OWNED)))
