"""The loops of fused functions on a CPU, beside their reference forms and for any number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.engine import fused_cpu
from megatrain.model import fused
from megatrain.model.fused import HALVES, NEIGHBOURS, ONCE

DTYPES = [torch.float32, torch.bfloat16]
OPS: Any = torch.ops.megatrain
NORM, GATED = "norm(x) * weight", "norm(x * silu(gate)) * weight"
PAIRS = [
    *((HALVES, HALVES, angles) for angles in (HALVES, ONCE)),
    *((NEIGHBOURS, NEIGHBOURS, angles) for angles in (NEIGHBOURS, ONCE)),
    (NEIGHBOURS, HALVES, ONCE),
]


@pytest.fixture(autouse=True)
def loops() -> Iterator[None]:
    fused_cpu.register()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])).to(dtype)


def norm_calls(dtype: torch.dtype, *shape: int, rule: str = NORM, groups: int = 1) -> list[tuple[str, tuple[Any, ...]]]:
    x, weight, gradient = draw(dtype, *shape), draw(dtype, shape[-1]) + 1, draw(dtype, *shape) / 2
    gate = draw(dtype, *shape, 2)[..., 1].clone() if fused.NORM_FORMULAS[rule].activation else None
    wide = x.float() if groups > 1 else x
    _, scale = fused.rms_norm_reference(wide, weight, gate, rule, 1e-5, groups)
    backward = gradient.to(wide.dtype), wide, scale, weight, gate, rule, True
    calls = [("rms_norm", (wide, weight, gate, rule, 1e-5, groups)), ("rms_norm_backward", backward)]
    return [*calls, ("sum_parts", (draw(torch.float32, 50, shape[-1]), weight))]


def gated_calls(
    dtype: torch.dtype, *shape: int, activation: str, limit: float = math.inf, offset: float = 0.0
) -> list[tuple[str, tuple[Any, ...]]]:
    gate, up, gradient = 4 * draw(dtype, *shape), draw(dtype, *shape, 1)[..., 0], draw(dtype, *shape)
    how = activation, limit, offset
    both = torch.cat([gate, up], -1)
    calls: list[tuple[str, tuple[Any, ...]]] = []
    for first, second in ((gate, up), (both, None)):
        calls += [("gated", (first, second, *how)), ("gated_backward", (gradient, first, second, *how))]
    return calls


def rotary_calls(dtype: torch.dtype, tokens: int) -> list[tuple[str, tuple[Any, ...]]]:
    q, k = draw(dtype, 2, tokens, 3, 24).transpose(1, 2), draw(dtype, 2, 1, tokens, 24)
    calls: list[tuple[str, tuple[Any, ...]]] = []
    for pairs, rows, angles in product(PAIRS, (2, 1), (24, 10)):
        wide, width = draw(dtype, rows, tokens, angles + 1), angles // 2 if pairs[2] == ONCE else angles
        cos, sin = wide[..., :width], wide.flip(1)[..., :width]
        calls += [
            ("rotary", (q, other, cos, sin, 1, pairs, inverse))
            for other, inverse in ((k, False), (k, True), (None, True))
        ]
        calls.append(("rotary", (q, k, cos.float(), sin.float(), 1, pairs, False)))
    return calls


def tensors(made: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rule", fused.NORM_FORMULAS)
def test_norms_of_no_tokens_have_gradients(rule: str, dtype: torch.dtype) -> None:
    """Float64 takes the reference form. Memory of no elements may have any strides."""
    for x in (draw(dtype, 0, 8), draw(dtype, 3, 0, 16)[..., ::2], draw(dtype, 1, 0, 8).expand(3, 0, 8)):
        gate = x.clone().as_strided(x.shape, x.stride()) if fused.NORM_FORMULAS[rule].activation else None
        leaves = [each.requires_grad_() for each in (x, draw(dtype, 8), gate) if each is not None]
        made = fused.rms_norm(leaves[0], leaves[1], rule, 1e-6, gate)
        for found, like in zip(torch.autograd.grad(made.sum(), leaves), leaves, strict=True):
            assert torch.equal(found, torch.zeros_like(like))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "calls",
    [
        *(lambda dtype, width=width: norm_calls(dtype, 3, 5, width) for width in (3, 31, 64, 1000)),
        *(lambda dtype, rule=rule: norm_calls(dtype, 3, 5, 66, rule=rule) for rule in fused.NORM_FORMULAS),
        *(lambda dtype, rule=rule: norm_calls(dtype, 35, 99, rule=rule, groups=3) for rule in fused.NORM_FORMULAS),
        *(lambda dtype, name=name: gated_calls(dtype, 2, 3, 1030, activation=name) for name in fused.ACTIVATIONS),
        lambda dtype: gated_calls(dtype, 2, 3, 1030, activation="quick_gelu", limit=2.0, offset=1.0),
        lambda dtype: rotary_calls(dtype, 5),
    ],
)
def test_loops_compute_what_the_reference_forms_do(calls: Callable[..., Any], dtype: torch.dtype) -> None:
    """In bfloat16 both round the same number but for float32's own rounding, so that few differ by their last bit."""
    bound = 1e-6 if dtype == torch.float32 else 1e-3
    for name, args in calls(dtype):
        expected = tensors(getattr(fused, f"{name}_reference")(*args))
        for one, other in zip(tensors(getattr(OPS, name)(*args)), expected, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert (one.double() - other).norm() <= bound * other.double().norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    large = norm_calls(dtype, 700, 300) + norm_calls(dtype, 700, 300, rule=GATED, groups=3)
    large += gated_calls(dtype, 300, 700, activation="silu") + rotary_calls(dtype, 900)
    results: list[list[Tensor]] = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append([made for name, args in large for made in tensors(getattr(OPS, name)(*args))])
    for made in results[1:]:
        assert all(map(torch.equal, made, results[0]))


def test_numbers_that_are_not_finite_stay_so() -> None:
    """And a bfloat16 that is not a number does not become one when it is rounded."""
    x = torch.tensor([[float("nan")] * 3, [float("inf")] * 3, [1.0] * 3], dtype=torch.bfloat16)
    made, _ = OPS.rms_norm(x, None, None, NORM, 1e-6, 1)
    assert made.isfinite().all(-1).tolist() == [False, False, True]
    wide = torch.full((1, 3), -1.0).view(torch.int32).bitwise_or(0x7FFFFFFF).view(torch.float32)
    for limit in (math.inf, 7.0):
        assert OPS.gated(wide.bfloat16(), wide.bfloat16(), "silu", limit, 0.0).isnan().all()


@pytest.mark.parametrize("activation", fused.ACTIVATIONS)
def test_activations_of_huge_numbers_are_finite(activation: str) -> None:
    huge = torch.tensor([[3e38, 1e20, -1e20, -3e38]])
    one, limit = torch.ones_like(huge), huge.sign().relu()
    assert torch.allclose(
        OPS.gated(huge, one, activation, math.inf, 0.0), limit if activation == "sigmoid" else huge.relu(), atol=1e-30
    )
    of_gate, _ = OPS.gated_backward(one, huge, one, activation, math.inf, 0.0)
    assert torch.allclose(of_gate, 0 * one if activation == "sigmoid" else limit, atol=1e-30)


def test_other_dtypes_take_the_reference_form() -> None:
    x, args = torch.randn(2, 8, dtype=torch.float16), (torch.randn(8), None, NORM, 1e-6, 1)
    for one, other in zip(OPS.rms_norm(x, *args), fused.rms_norm_reference(x, *args), strict=True):
        assert torch.equal(one, other)


def test_nothing_to_compute_is_no_error() -> None:
    empty = torch.empty(0, 8)
    assert OPS.rms_norm(empty, torch.ones(8), None, NORM, 1e-6, 1)[0].shape == (0, 8)
    assert OPS.gated(empty, empty, "silu", math.inf, 0.0).shape == (0, 8)
    assert OPS.rms_norm_backward(empty, empty, torch.empty(0, 1), torch.ones(8), empty, GATED, True)[2].shape == (0, 8)
    assert OPS.sum_parts(empty, torch.ones(8)).tolist() == [0] * 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_elements_are_asked_for_at_no_address(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has address 0 for an empty tensor, for which numpy before 2.4 raises a `TypeError`."""

    class Refusing:
        def __init__(self, address: int, *_: object) -> None:
            raise TypeError(f"no memory at {address}")

    monkeypatch.setattr(fused_cpu, "_Memory", Refusing)
    assert fused_cpu._array(torch.empty(0, 4, dtype=dtype)).shape == (0,)
