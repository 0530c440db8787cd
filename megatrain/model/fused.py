"""Fused elementwise functions of layers: RMS norm, gated activation and rotary embedding, forward and backward.

Each is an op of PyTorch's dispatcher, `torch.ops.megatrain`, so that whatever watches ops (memory profiles, stored
outputs, counts of kernels) sees one op with its inputs and outputs. Here are their reference forms, plain tensor code
in float32 that runs on any device. `engine.fused_cpu` and `engine.fused_triton` register faster forms, which compute
the same up to rounding. Every form computes in float32 and rounds once, when it writes.

For the backward pass are saved: of a norm its inputs and one number for each row and group, of a gated activation its
two inputs, of a rotary embedding nothing but the angles. Tensors are [..., channels]; ops take dense ones, whose other
dimensions may be in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

LIBRARY = torch.library.Library("megatrain", "DEF")
OPS: Any = torch.ops.megatrain
Form = TypeVar("Form", bound=Callable[..., Any])
NORM_ROWS = 32
"""Rows of which a norm's weight gradient is formed, before these parts are summed."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
}
"""Name -> the function, in any precision."""

REFERENCES: dict[str, Callable[..., Any]] = {}
"""Name of an op -> its reference form."""


def _op(schema: str) -> Callable[[Form], Form]:
    """Registers a function as the reference form of an op."""
    LIBRARY.define(schema)

    def register(function: Form) -> Form:
        name = schema.partition("(")[0]
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        REFERENCES[name] = function
        return function

    return register


# RMS norm -------------------------------------------------------------------------------------------------------------


class NormRule(NamedTuple):
    """offset: what is added to the weight. activation: of the gate, "" for a norm without one. gates_input: whether the
    gate multiplies what is normed, rather than the result."""

    offset: float = 0.0
    activation: str = ""
    gates_input: bool = False


NORM_FORMULAS = {
    "norm(x) * weight": NormRule(),
    "norm(x) * (1 + weight)": NormRule(offset=1.0),
    "norm(x) * weight * silu(gate)": NormRule(activation="silu"),
    "norm(x) * weight * sigmoid(gate)": NormRule(activation="sigmoid"),
    "norm(x * silu(gate)) * weight": NormRule(activation="silu", gates_input=True),
}


@_op("rms_norm(Tensor x, Tensor? weight, Tensor? gate, str rule, float eps, int groups) -> (Tensor, Tensor)")
def rms_norm_reference(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, rule: str, eps: float, groups: int
) -> tuple[Tensor, Tensor]:
    """What `rms_norm` describes, in the dtype of x, and 1 / rms, float32[..., groups], by rows."""
    scale, (weights, inner, outer, _) = numbers_for_rows(x, groups), _norm_factors(weight, gate, rule)
    inside = x.float() * inner
    scale.copy_(torch.rsqrt(in_groups(inside, groups).square().mean(-1) + eps))
    return (_times(inside, scale) * weights * outer).to(x.dtype), scale


@_op(
    "rms_norm_backward(Tensor gradient, Tensor x, Tensor scale, Tensor? weight, Tensor? gate, str rule, bool trains)"
    " -> (Tensor, Tensor, Tensor)"
)
def rms_norm_backward_reference(
    gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor | None, gate: Tensor | None, rule: str, trains: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the input, that of the gate, empty if there is none, and, if the weight trains, terms of its
    gradient float32[parts, channels], one for NORM_ROWS rows each, in the order of memory."""
    weights, inner, outer, slope = _norm_factors(weight, gate, rule)
    normed, wanted = _times(x.float() * inner, scale), gradient.float() * outer
    scaled = wanted * weights
    of_inside = _times(scaled - _times(normed, in_groups(scaled * normed, scale.shape[-1]).mean(-1)), scale)
    parts, of_gate = norm_parts(x, trains), x.new_empty(0)
    if trains:
        terms = rows_of(_as_laid_out(wanted * normed, x))
        terms = functional.pad(terms, (0, 0, 0, len(parts) * NORM_ROWS - len(terms)))
        parts.copy_(terms.view(len(parts), NORM_ROWS, x.shape[-1]).sum(1))
    if gate is not None:
        of_gate = of_inside * x.float() if NORM_FORMULAS[rule].gates_input else gradient.float() * normed * weights
        of_gate = _as_laid_out((of_gate * slope).to(gate.dtype), x)
    return _as_laid_out((of_inside * inner).to(x.dtype), x), of_gate, parts


def _norm_factors(weight: Tensor | None, gate: Tensor | None, rule: str) -> tuple[Any, Any, Any, Any]:
    """Factors float32[channels] by the weight, [..., channels] of the input and of the result, and the activation's
    derivative."""
    offset, activation, gates_input = NORM_FORMULAS[rule]
    weights = 1.0 if weight is None else weight.float() + offset
    if gate is None:
        return weights, 1.0, 1.0, 0.0
    value, slope = ACTIVATIONS[activation](gate.float()), _slope(activation, gate.float())
    return (weights, value, 1.0, slope) if gates_input else (weights, 1.0, value, slope)


def in_groups(x: Tensor, groups: int) -> Tensor:
    """A view [..., groups, channels of a group] of x [..., channels]."""
    return x.view(*x.shape[:-1], groups, x.shape[-1] // groups)


def _times(x: Tensor, numbers: Tensor) -> Tensor:
    """x [..., channels] with each group of channels multiplied by one of the numbers [..., groups]."""
    return (in_groups(x, numbers.shape[-1]) * numbers.unsqueeze(-1)).flatten(-2)


def norm_parts(x: Tensor, trains: bool) -> Tensor:
    """Memory for the terms of a weight's gradient; empty if it does not train."""
    rows = x.numel() // max(1, x.shape[-1])
    shape = (-(-rows // NORM_ROWS), x.shape[-1]) if trains else (0,)
    return torch.empty(shape, dtype=torch.float32, device=x.device)


@_op("sum_parts(Tensor parts, Tensor weight) -> Tensor")
def sum_parts_reference(parts: Tensor, weight: Tensor) -> Tensor:
    """The sum of terms float32[parts, channels], in the dtype of the weight."""
    return parts.sum(0).to(weight.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, gate: Tensor | None, *rule: Any) -> Tensor:
        out, scale = OPS.rms_norm.default(x, weight, gate, *rule)
        ctx.save_for_backward(x, scale, weight, gate)
        ctx.rule = rule[0]
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight, gate = ctx.saved_tensors
        trains = ctx.needs_input_grad[1]
        inputs = _as_laid_out(gradient, x), x, scale, weight, None if gate is None else _with_rows_as(gate, x)
        of_x, of_gate, parts = OPS.rms_norm_backward.default(*inputs, ctx.rule, trains)
        of_weight = OPS.sum_parts.default(parts, weight) if trains else None
        return of_x, of_weight, None if gate is None else of_gate, None, None, None


def rms_norm(
    x: Tensor, weight: Tensor | None, rule: str, eps: float, gate: Tensor | None = None, groups: int = 1
) -> Tensor:
    """x / sqrt(mean(x * x) + eps) over the last dimension, or over each of equal groups of channels there, times weight
    and gate as the rule says (a key of `NORM_FORMULAS`), in the dtype of x.

    x, gate [..., channels]; weight [channels], 1 if it is None. The gate's dtype may be another than that of x.
    """
    x = _dense(x)
    gate = None if gate is None else _with_rows_as(gate, x)
    normed: Tensor = _RmsNorm.apply(x, weight, gate, rule, eps, groups)  # type: ignore[no-untyped-call]
    return normed


# Gated activation -----------------------------------------------------------------------------------------------------


def halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """The two inputs, which are the halves of `gate` if there is no `up`."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return first, second


@_op("gated(Tensor gate, Tensor? up, str activation, float limit, float offset) -> Tensor")
def gated_reference(gate: Tensor, up: Tensor | None, activation: str, limit: float, offset: float) -> Tensor:
    """The product that `gated` describes."""
    first, second = (half.float() for half in halves(gate, up))
    return (ACTIVATIONS[activation](first.clamp(max=limit)) * (second.clamp(-limit, limit) + offset)).to(gate.dtype)


@_op(
    "gated_backward(Tensor gradient, Tensor gate, Tensor? up, str activation, float limit, float offset)"
    " -> (Tensor, Tensor)"
)
def gated_backward_reference(
    gradient: Tensor, gate: Tensor, up: Tensor | None, activation: str, limit: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, zero where these are beyond the limit; the second is empty if they are one tensor."""
    first, second = (half.float() for half in halves(gate, up))
    wanted, clipped = gradient.float(), first.clamp(max=limit)
    of_first = wanted * (second.clamp(-limit, limit) + offset) * _slope(activation, clipped)
    of_second = wanted * ACTIVATIONS[activation](clipped)
    if limit < math.inf:
        of_first, of_second = of_first * (first <= limit), of_second * (second.abs() <= limit)
    if up is None:
        return torch.cat([of_first, of_second], -1).to(gate.dtype), gate.new_empty(0)
    return of_first.to(gate.dtype), of_second.to(gate.dtype)


def _slope(activation: str, x: Tensor) -> Tensor:
    """The derivative of an activation."""
    if activation == "relu":
        slope = (x > 0).to(x.dtype)
    elif activation == "sigmoid":
        slope = torch.sigmoid(x) * torch.sigmoid(-x)
    elif activation == "gelu":
        slope = 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) * (0.5 / math.pi) ** 0.5
    else:
        linear, cubic = SIGMOIDS[activation]
        share = torch.sigmoid(x * (linear + cubic * x * x))
        slope = share * (1 + x * (1 - share) * (linear + 3 * cubic * x * x))
    return slope


SIGMOIDS = {
    "silu": (1.0, 0.0),
    "quick_gelu": (1.702, 0.0),
    "gelu_tanh": (2 * (2 / math.pi) ** 0.5, 2 * (2 / math.pi) ** 0.5 * 0.044715),
}
"""Name -> (a, b) of the activations that are x * sigmoid(a * x + b * x ** 3)."""


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, *rule: Any) -> Tensor:
        ctx.save_for_backward(gate, *(() if up is None else (up,)))
        ctx.rule = rule
        result: Tensor = OPS.gated.default(gate, up, *rule)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, *rest = ctx.saved_tensors
        up = rest[0] if rest else None
        of_gate, of_up = OPS.gated_backward.default(gradient.contiguous(), gate, up, *ctx.rule)
        return of_gate, None if up is None else of_up, None, None, None


def gated(gate: Tensor, up: Tensor | None, activation: str, limit: float = math.inf, offset: float = 0.0) -> Tensor:
    """activation(min(gate, limit)) * (min(max(up, -limit), limit) + offset), [..., channels] in the dtype of gate.

    gate and up are [..., channels]; without `up`, gate [..., 2 * channels] holds both, one after the other. activation:
    a key of `ACTIVATIONS`.
    """
    gate, up = gate.contiguous(), None if up is None else up.contiguous()
    product: Tensor = _Gated.apply(gate, up, activation, limit, offset)  # type: ignore[no-untyped-call]
    return product


# Rotary embedding -----------------------------------------------------------------------------------------------------

ONCE, HALVES, NEIGHBOURS = 0, 1, 2
"""Where the two of a pair lie in a row: in one place, in the two halves of the row, or side by side."""


@_op("rotary(Tensor q, Tensor? k, Tensor cos, Tensor sin, int heads, int[] pairs, bool inverse) -> (Tensor, Tensor)")
def rotary_reference(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, heads: int, pairs: Sequence[int], inverse: bool
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of channels of q and k [batch, ...] by angles cos, sin [batch or 1, tokens, angles], whose strides
    are the same. heads: the dimension of heads, 1 or 2; tokens are the other one. pairs: where a pair lies among the
    channels, in the result, and among the angles. inverse: multiply by the transpose. The results lie in memory as
    [batch, tokens, heads, channels]; the second is empty if there is no k."""
    of_k = q.new_empty(0) if k is None else rotated(k, cos, sin, heads, pairs, inverse)
    return rotated(q, cos, sin, heads, pairs, inverse), of_k


def rotated(x: Tensor, cos: Tensor, sin: Tensor, heads: int, pairs: Sequence[int], inverse: bool) -> Tensor:
    """One of the two results of `rotary_reference`."""
    of_x, of_out, of_angles = pairs
    (cos_1, cos_2), (sin_1, sin_2) = (_pairs(angle.float().unsqueeze(heads), of_angles) for angle in (cos, sin))
    if inverse:
        of_x, of_out, sin_1, sin_2 = of_out, of_x, -sin_2, -sin_1
    channels, out = 2 * cos_1.shape[-1], rotary_output(x, heads)
    first, second = _pairs(x[..., :channels].float(), of_x)
    made_1, made_2 = _pairs(out[..., :channels], of_out)
    made_1.copy_(first * cos_1 - second * sin_1)
    made_2.copy_(second * cos_2 + first * sin_2)
    out[..., channels:] = x[..., channels:]
    return out


def _pairs(x: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second of each pair."""
    if order == HALVES:
        first, second = x.chunk(2, -1)
        return first, second
    return (x, x) if order == ONCE else (x[..., ::2], x[..., 1::2])


def rotary_output(x: Tensor, heads: int) -> Tensor:
    """Memory for a result: [batch, tokens, heads, channels], seen in the order of the dimensions of x."""
    if heads == 2:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *layout: Any) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        of_q, of_k = OPS.rotary.default(q, k, cos, sin, *layout, False)
        return of_q if k is None else (of_q, of_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_q, *rest = map(_with_whole_rows, gradients)
        of_q, of_k = OPS.rotary.default(of_q, rest[0] if rest else None, *_alike(*ctx.saved_tensors), *ctx.layout, True)
        return of_q, of_k if rest else None, None, None, None, None


def rotary(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, heads: int, pairs: Sequence[int] = (HALVES,) * 3
) -> Any:
    """Turn the first channels of each head in pairs, so that (a, b) becomes (a * cos_1 - b * sin_1, b * cos_2 + a *
    sin_2). Returns q and k turned, or q alone if `k` is None.

    q, k [batch, heads, tokens, channels], or heads after tokens if `heads` is 2 rather than 1; cos, sin [batch or 1,
    tokens, angles]. pairs: where the two of a pair lie in a head, in a head of the result and in a row of angles:
    `HALVES`, `NEIGHBOURS`, or for angles `ONCE`, if both have the same.
    """
    q, k = _with_whole_rows(q), None if k is None else _with_whole_rows(k)
    return _Rotary.apply(q, k, *_alike(cos, sin), heads, pairs)  # type: ignore[no-untyped-call]


def _alike(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines with whole rows and equal strides."""
    cos, sin = _with_whole_rows(cos), _with_whole_rows(sin)
    return (cos, sin) if cos.stride() == sin.stride() else (cos.contiguous(), sin.contiguous())


# Layout in memory -----------------------------------------------------------------------------------------------------


def rows_of(x: Tensor) -> Tensor:
    """A view [rows, channels] of a dense tensor, in the order of memory."""
    return (x if x.is_contiguous() else x.permute(_order(x))).view(-1, x.shape[-1])


def numbers_for_rows(x: Tensor, count: int) -> Tensor:
    """Memory for float32 numbers for each row of a dense tensor, [..., count], in the order in which the rows lie."""
    width = max(1, x.shape[-1])
    strides = [stride // width * count for stride in x.stride()[:-1]] + [1]
    return torch.empty_strided((*x.shape[:-1], count), strides, dtype=torch.float32, device=x.device)


def row_distance(gate: Tensor, x: Tensor) -> int | None:
    """Elements from each row of the gate to the next, in the order of the rows of x; None if they lie otherwise."""
    width = x.shape[-1]
    if not x.numel():
        return width
    sizes = zip(gate.stride(), x.stride(), x.shape[:-1], strict=False)
    distances = {stride / (of_x // width) for stride, of_x, size in sizes if size > 1} or {width}
    distance = distances.pop()
    return None if distances or distance % 1 or gate.stride(-1) != 1 else int(distance)


def _dense(x: Tensor) -> Tensor:
    """The tensor, or a copy if its channels are not dense in memory. Broadcast and sliced tensors are copied."""
    if x.is_contiguous():
        return x
    order = _order(x)
    return x if order[-1] == x.dim() - 1 and x.permute(order).is_contiguous() else x.contiguous()


def _order(x: Tensor) -> list[int]:
    """Its dimensions by their strides, the largest first."""
    strides = list(x.stride())
    return sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim))


def _as_laid_out(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient with the strides of x."""
    if gradient.stride() == x.stride():
        return gradient
    return torch.empty_like(x, dtype=gradient.dtype).copy_(gradient)


def _with_rows_as(gate: Tensor, x: Tensor) -> Tensor:
    """The gate, or a copy if its rows do not lie in the order of those of x."""
    return gate if row_distance(gate, x) is not None else _as_laid_out(gate, x)


def _with_whole_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
