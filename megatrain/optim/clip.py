"""The norm of a gradient, and the factor that clips it.

The total norm is the square root of `sum_of_squares` summed over all units and ranks. `clip_scale` of it becomes (part
of) `grad_scale` in `AdamW.scalars`, so clipping never rewrites gradients in memory. Squares are added in float64, which
neither overflows nor loses a small gradient beside a large one. Blocks and the order within them are fixed, and block
sums are added exactly (`math.fsum`), so the result depends neither on the thread count nor on the vector width. With
several ranks, blocks are small enough that each belongs to one rank, and each rank sends the exact sum of its own
(`expansion`), so the norm does not depend on the number of ranks either. Only the 2-norm is supported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatrain.errors import ConfigError, NonFinite
from megatrain.optim import kernels
from megatrain.optim.kernels import F32, U16, check_arrays, cut, run, whole

F64 = NDArray[np.float64]


def sum_of_squares(grad: U16 | F32, threads: int = 1) -> float:
    """The sum of squares of all elements of `grad`, bfloat16 bits (uint16[n]) or float32[n].

    It is inf or nan if an element is. The relative error is below 1e-13. Padding is summed too, so it must be zero.
    """
    return math.fsum(_block_sums(grad, cut(whole(grad.size), grad.size), threads))


def own_square_sums(grad: U16 | F32, block: int, threads: int = 1) -> list[float]:
    """Sum the squares of each `block` elements of `grad`, and of the rest; returns a few numbers with that total.

    `math.fsum` over the numbers of all pieces and ranks gives the same total however the gradient is split at blocks.
    If an element is not finite, the result is a single inf or nan.
    """
    starts = np.arange(0, grad.size, block)
    stops = np.minimum(starts + block, grad.size)
    return expansion(_block_sums(grad, np.stack((starts, stops, np.ones_like(stops)), 1), threads).tolist())


def expansion(values: Sequence[float]) -> list[float]:
    """A few numbers with the same exact sum as `values` (Shewchuk, 1997), or just their sum if that is not finite.

    Each number is the rounded sum of what the ones before it leave over.
    """
    terms: list[float] = []
    while (left := math.fsum([*values, *(-term for term in terms)])) != 0.0:
        if not math.isfinite(left):
            return [left]
        terms.append(left)
    return terms


def _block_sums(grad: U16 | F32, blocks: NDArray[np.int64], threads: int) -> F64:
    check_arrays({}, {"grad": grad})
    sums = np.empty(len(blocks), np.float64)
    run(kernels.block_sums, grad, sums, blocks=blocks, threads=threads)
    return sums


def clip_scale(total_norm: float, max_norm: float) -> float:
    """The factor for the gradients: min(1, max_norm / (total_norm + 1e-6)), as in torch's `clip_grad_norm_`.

    Raises NonFinite if `total_norm` is not finite (torch would continue with a factor of 0 or nan), and
    ConfigError unless `max_norm` is positive.
    """
    if not max_norm > 0:
        raise ConfigError(f"{max_norm} is not a positive norm", where="max_norm", fix="give a number above 0")
    if not math.isfinite(total_norm):
        raise NonFinite(f"the gradient norm is {total_norm}", where="clip_scale", fix="lower the learning rate")
    return min(1.0, max_norm / (total_norm + 1e-6))
