"""The fused functions' reference forms beside autograd's, in float64 where that is possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.model.fuse_layers import PAIRS
from megatrain.model.fused import ACTIVATIONS, HALVES, NEIGHBOURS, NORM_FORMULAS, ONCE, gated, rms_norm, rotary

Function = Callable[..., Tensor | tuple[Tensor, ...]]
DRAW = torch.Generator().manual_seed(0)
NORM = "norm(x) * weight"


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def plainly_normed(
    x: Tensor, weight: Tensor | None, rule: str, eps: float, gate: Tensor | None = None, groups: int = 1
) -> Tensor:
    """As the rule says, word by word."""

    def norm(x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (groups, -1))
        return (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2)

    names = {"norm": norm, "x": x, "gate": gate, "silu": functional.silu, "sigmoid": torch.sigmoid}
    made: Tensor = eval(rule, names | {"weight": 1 if weight is None else weight})
    return made


def plainly_gated(
    gate: Tensor, up: Tensor | None, activation: str, limit: float = math.inf, offset: float = 0.0
) -> Tensor:
    first, second = gate.chunk(2, -1) if up is None else (gate, up)
    return ACTIVATIONS[activation](first.clamp(max=limit)) * (second.clamp(min=-limit, max=limit) + offset)


def plainly_turned(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, heads: int, pairs: Sequence[int] = (HALVES,) * 3
) -> tuple[Tensor, ...]:
    """As published: by way of channels in halves, with an angle for each channel."""
    cos, sin = (in_halves(x, pairs[2]).unsqueeze(heads) for x in (cos, sin))
    angles, made = cos.shape[-1], []
    for x in (q,) if k is None else (q, k):
        turned = in_halves(x[..., :angles], pairs[0])
        turned = turned * cos + rotate_half(turned) * sin
        if pairs[1] == NEIGHBOURS:
            turned = turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        made.append(torch.cat([turned, x[..., angles:]], -1))
    return tuple(made)


def in_halves(x: Tensor, order: int) -> Tensor:
    if order == ONCE:
        return torch.cat([x, x], -1)
    return x if order == HALVES else x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def results(function: Function, *args: object) -> list[Tensor]:
    """Outputs, and the gradients of all leaves for random gradients of the outputs, which every dtype holds."""
    made = function(*args)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    wanted = [torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out) for out in outputs]
    leaves = [each for each in args if isinstance(each, Tensor) and each.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, leaves, wanted)]


def compare(fused: Function, plain: Function, *args: object, dtype: torch.dtype, bound: float) -> None:
    """Errors are relative to the norm of what autograd computes in float64 from the same numbers."""

    def typed(kind: torch.dtype) -> list[object]:
        return [
            each.to(dtype).to(kind).detach().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each
            for each in args
        ]

    found, exact = results(fused, *typed(dtype)), results(plain, *typed(torch.float64))
    assert len(found) == len(exact)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        assert one.shape == other.shape
        assert (one.double() - other).norm() <= bound * other.norm()


BOUNDS = [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)]


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rule", NORM_FORMULAS)
def test_norms_and_their_gradients_are_those_of_float64(rule: str, dtype: torch.dtype, bound: float) -> None:
    """Without and with a weight, in groups, and of a gate whose rows lie apart, in another order, or all in one."""
    inputs = draw(3, 5, 40), draw(2, 7, 3, 36).transpose(1, 2), draw(1, 64).expand(3, 64), draw(4, 30)[:, :20]
    for x, groups in zip(inputs, (1, 3, 2, 4), strict=True):
        gates = draw(*x.shape[:-1], 99)[..., : x.shape[-1]], draw(*x.shape), draw(x.shape[-1]).expand(x.shape)
        for gate in gates if NORM_FORMULAS[rule].activation else (None,):
            gate = None if gate is None else gate.requires_grad_()
            weights = (draw(x.shape[-1]).requires_grad_(), None)
            for weight in weights if not NORM_FORMULAS[rule].offset else weights[:1]:
                args = x.requires_grad_(), weight, rule, 1e-2, gate, groups
                compare(rms_norm, plainly_normed, *args, dtype=dtype, bound=bound)


def test_a_gate_may_have_another_dtype_than_the_input() -> None:
    """State-space layers give float32, whatever the dtype of the gate."""
    x, gate, weight = draw(3, 8).requires_grad_(), draw(3, 8).bfloat16().requires_grad_(), draw(8).bfloat16()
    args = x, weight.requires_grad_(), "norm(x * silu(gate)) * weight", 1e-6, gate
    exact = [each.detach().double().requires_grad_() if isinstance(each, Tensor) else each for each in args]
    for one, other, like in zip(
        results(rms_norm, *args), results(plainly_normed, *exact), (x, x, weight, gate), strict=True
    ):
        assert one.dtype == like.dtype
        assert (one.double() - other).norm() <= (1e-6 if like is x else 4e-3) * other.norm()


def test_a_frozen_weight_of_a_norm_gets_no_gradient() -> None:
    x, weight = draw(3, 8).requires_grad_(), draw(8)
    assert torch.autograd.grad(rms_norm(x, weight, NORM, 1e-6).sum(), x)[0].shape == x.shape
    frozen = draw(3, 8)
    trained = weight.clone().requires_grad_()
    assert torch.autograd.grad(rms_norm(frozen, trained, NORM, 1e-6).sum(), trained)[0].shape == weight.shape


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations_and_gradients_are_those_of_float64(
    activation: str, dtype: torch.dtype, bound: float
) -> None:
    gate, up = 3 * draw(2, 3, 1100), draw(2, 3, 1100)
    both = torch.cat([gate, up], -1)
    for first, second in ((gate, up.requires_grad_()), (both, None)):
        for how in ((activation,), (activation, 3.0, 1.0)):
            compare(gated, plainly_gated, first.requires_grad_(), second, *how, dtype=dtype, bound=bound)


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("pairs", [pairs for pairs, _ in PAIRS])
def test_rotary_embeddings_and_gradients_are_those_of_float64(
    pairs: tuple[int, ...], heads: int, dtype: torch.dtype, bound: float
) -> None:
    for channels, rows in ((16, 2), (8, 1)):  # all of a head or half of it; angles for each row, or for all rows
        q, k = draw(2, 6, 4, 16), draw(2, 6, 1, 16)
        if heads == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        cos, sin = (draw(rows, 6, channels // 2 if pairs[2] == ONCE else channels) for _ in range(2))
        for other in (k.requires_grad_(), None):
            args = q.requires_grad_(), other, cos, sin, heads, pairs
            compare(rotary, plainly_turned, *args, dtype=dtype, bound=bound)


def test_a_graph_keeps_inputs_and_no_intermediate() -> None:
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    def kept(function: Function, *args: object) -> int:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            function(*args)
        return sum(saved)

    x, weight, cos = draw(4, 6, 32).requires_grad_(), draw(32).requires_grad_(), draw(1, 6, 32)
    q = x.unsqueeze(1)
    assert kept(rms_norm, x, weight, NORM, 1e-6) == x.nbytes + weight.nbytes + x.nbytes // 32
    gated_norm = "norm(x) * weight * silu(gate)"
    assert kept(rms_norm, x, weight, gated_norm, 1e-6, x, 4) == 2 * x.nbytes + weight.nbytes + x.nbytes // 8
    assert kept(gated, x, x, "silu") == 2 * x.nbytes
    assert kept(rotary, q, q, cos, cos, 1) == 2 * cos.nbytes
