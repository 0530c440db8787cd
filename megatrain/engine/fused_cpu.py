"""The fused functions of layers on a CPU: compiled loops over rows, on several threads, in bfloat16 or float32.

They are forms of the ops of `model.fused`, which defines them. A block is a fixed number of rows, whatever the number
of threads, and each sum has a fixed order, so that results do not depend on threads. As in `optim.kernels` nothing
contracts or reorders operations; loops are written such that LLVM vectorizes them: sums go to LANES partial sums, and
the exponential is a polynomial. Other dtypes, and arguments that differ in theirs, take the reference form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.model import fused
from megatrain.optim.kernels import claim, compiled, inlined, rounded_like, run, to_f32

LANES = 32
"""Partial sums of a row; fixed, so that the order of additions is."""
CHUNK = 1024
"""Elements of a row for which an activation and its slope are held at a time: they stay in the cache."""
BLOCK_NUMEL = 1 << 16
"""Elements of a block, about."""
DTYPES = (torch.bfloat16, torch.float32)
SIGMOID, GELU, RELU, SHARE = range(4)
"""Kinds of activations: x * sigmoid(a x + b x^3), that by the error function, max(x, 0), and sigmoid(x)."""

ONE, HALF = np.float32(1), np.float32(0.5)
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
LARGEST = np.float32(87)
"""exp of this, and of its negative, is a normal float32."""
E2, E3, E4, E5, E6 = (np.float32(1 / n) for n in (2, 6, 24, 120, 720))
ROOT_HALF, DENSITY = np.float32(0.5**0.5), np.float32((0.5 / np.pi) ** 0.5)
P, A1, A2, A3, A4, A5 = (
    np.float32(c) for c in (0.3275911, 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
)
"""The error function's approximation 7.1.26 of Abramowitz and Stegun, which is off by 1.5e-7 at most."""


# Loops ----------------------------------------------------------------------------------------------------------------


@inlined
def _exp(x: Any) -> Any:
    """exp(x) for x within +-LARGEST, off by a few units in the last place."""
    n = np.floor(x * LOG2_E + HALF)
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    series = ((((E6 * r + E5) * r + E4) * r + E3) * r + E2) * (r * r) + r + ONE
    return series * to_f32(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))


@inlined
def _clipped(x: Any) -> Any:
    x = -LARGEST if x < -LARGEST else x
    return LARGEST if x > LARGEST else x


@inlined
def _norm(x: Any, weight: Any, out: Any, eps: Any) -> Any:
    """out = x / rms(x) * weight, of one group of channels; returns 1 / rms(x)."""
    width = x.size
    whole = width - width % LANES
    lanes = np.zeros(LANES, np.float32)
    for start in range(0, whole, LANES):
        part = x[start : start + LANES]
        for k in range(LANES):
            value = to_f32(part[k])
            lanes[k] += value * value
    total = np.float32(0)
    for k in range(LANES):
        total += lanes[k]
    for k in range(whole, width):
        value = to_f32(x[k])
        total += value * value
    scale = ONE / np.sqrt(total / np.float32(width) + eps)
    for k in range(width):
        out[k] = rounded_like((to_f32(x[k]) * scale) * weight[k], out)
    return scale


@inlined
def _norm_backward(gradient: Any, x: Any, weight: Any, scale: Any, out: Any, part: Any) -> None:
    """out: the gradient of x, of one group of channels. part: the weight's, added to what it holds, or empty."""
    width = x.size
    whole = width - width % LANES
    lanes = np.zeros(LANES, np.float32)
    for start in range(0, whole, LANES):
        x_b, g_b, w_b = x[start : start + LANES], gradient[start : start + LANES], weight[start : start + LANES]
        for k in range(LANES):
            lanes[k] += (to_f32(g_b[k]) * w_b[k]) * to_f32(x_b[k])
    total = np.float32(0)
    for k in range(LANES):
        total += lanes[k]
    for k in range(whole, width):
        total += (to_f32(gradient[k]) * weight[k]) * to_f32(x[k])
    mean = total * scale / np.float32(width)
    for k in range(width):
        normed = to_f32(x[k]) * scale
        out[k] = rounded_like((to_f32(gradient[k]) * weight[k] - normed * mean) * scale, out)
    if part.size > 0:
        for k in range(width):
            part[k] += to_f32(gradient[k]) * (to_f32(x[k]) * scale)


@compiled
def rms_forward(inputs: Any, outputs: Any, shape: Any, gating: Any, eps: Any, blocks: Any, counter: Any) -> None:
    """inputs (x [rows * groups * width], weight float32[groups * width], gate, whose row r begins at r * distance);
    outputs (as x, scales float32[rows * groups]); shape (width, groups, distance); gating (whether there is a gate,
    whether it multiplies the input, its activation as in `_activate`)."""
    x, weight, gate = inputs
    out, scales = outputs
    width, groups, distance = shape
    gated, gates_input, activation = gating
    values, inside, result = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    while True:
        i = claim(counter)
        if i >= blocks.shape[0]:
            return
        for place in range(blocks[i, 0] * groups, blocks[i, 1] * groups):
            row, channel = place // groups, place % groups * width
            x_r, out_r = x[place * width : (place + 1) * width], out[place * width : (place + 1) * width]
            w_r = weight[channel : channel + width]
            if gated:
                gate_r = gate[row * distance + channel : row * distance + channel + width]
                _activate(gate_r, values, values, activation)
                for k in range(width):
                    inside[k] = to_f32(x_r[k]) * (values[k] if gates_input else ONE)
                scales[place] = _norm(inside, w_r, result, eps)
                for k in range(width):
                    out_r[k] = rounded_like(result[k] * (ONE if gates_input else values[k]), out_r)
            else:
                scales[place] = _norm(x_r, w_r, out_r, eps)


@compiled
def rms_backward(inputs: Any, outputs: Any, shape: Any, gating: Any, blocks: Any, counter: Any) -> None:
    """inputs (gradient as x, and scales before those of `rms_forward`); outputs (the gradients of x and of the gate,
    parts float32[blocks * groups * width], the blocks' terms of the weight's gradient, or empty)."""
    gradient, scales, x, weight, gate = inputs
    out, of_gate, parts = outputs
    width, groups, distance = shape
    gated, gates_input, activation = gating
    values, slopes = np.empty(width, np.float32), np.empty(width, np.float32)
    inside, wanted, given = (np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32))
    while True:
        i = claim(counter)
        if i >= blocks.shape[0]:
            return
        part_of_block = parts[i * groups * width : (i + 1) * groups * width]
        part_of_block[:] = np.float32(0)
        for place in range(blocks[i, 0] * groups, blocks[i, 1] * groups):
            row, channel = place // groups, place % groups * width
            x_r, g_r = x[place * width : (place + 1) * width], gradient[place * width : (place + 1) * width]
            out_r, w_r, scale = (
                out[place * width : (place + 1) * width],
                weight[channel : channel + width],
                scales[place],
            )
            part = part_of_block[channel : channel + width]
            if gated:
                gate_r = gate[row * distance + channel : row * distance + channel + width]
                of_gate_r = of_gate[place * width : (place + 1) * width]
                _activate(gate_r, values, slopes, activation)
                for k in range(width):
                    inside[k] = to_f32(x_r[k]) * (values[k] if gates_input else ONE)
                    wanted[k] = to_f32(g_r[k]) * (ONE if gates_input else values[k])
                _norm_backward(wanted, inside, w_r, scale, given, part)
                for k in range(width):
                    of_value = given[k] * to_f32(x_r[k])
                    if not gates_input:
                        of_value = (to_f32(g_r[k]) * w_r[k]) * (inside[k] * scale)
                    out_r[k] = rounded_like(given[k] * (values[k] if gates_input else ONE), out_r)
                    of_gate_r[k] = rounded_like(of_value * slopes[k], of_gate_r)
            else:
                _norm_backward(g_r, x_r, w_r, scale, out_r, part)


@compiled
def sum_parts(parts: Any, out: Any, blocks: Any, counter: Any) -> None:
    """out [width]: the sum of parts float32[count * width], in order. Blocks are of columns."""
    width = out.size
    sums = np.empty(width, np.float32)
    while True:
        i = claim(counter)
        if i >= blocks.shape[0]:
            return
        first, last = blocks[i, 0], blocks[i, 1]
        sums[first:last] = np.float32(0)
        for start in range(0, parts.size, width):
            part, into = parts[start + first : start + last], sums[first:last]
            for k in range(last - first):
                into[k] += part[k]
        for k in range(first, last):
            out[k] = rounded_like(sums[k], out)


@inlined
def _error_function(z: Any) -> Any:
    """erf(z), and exp(-z * z)."""
    size = abs(z)
    t = ONE / (ONE + P * size)
    bell = _exp(_clipped(-(size * size)))
    value = ONE - ((((A5 * t + A4) * t + A3) * t + A2) * t + A1) * t * bell
    return (-value if z < np.float32(0) else value), bell


@inlined
def _by_sigmoid(x: Any, linear: Any, cubic: Any) -> Any:
    """x * sigmoid(linear * x + cubic * x ** 3), and its derivative."""
    near = _clipped(x)  # beyond, the sigmoid is 0 or 1 in float32, and a square might overflow
    square = near * near
    share = ONE / (ONE + _exp(-_clipped(near * (linear + cubic * square))))
    slope = share + near * (share * (ONE - share)) * (linear + np.float32(3) * cubic * square)
    return (near if x < near else x) * share, slope


@inlined
def _by_error_function(x: Any) -> Any:
    """x times the share of a normal distribution below x, and its derivative."""
    value, bell = _error_function(x * ROOT_HALF)
    below = HALF * (ONE + value)
    return x * below, below + _clipped(x) * bell * DENSITY


@inlined
def _share(x: Any) -> Any:
    """sigmoid(x), and its derivative."""
    share = ONE / (ONE + _exp(-_clipped(x)))
    return share, share * (ONE / (ONE + _exp(_clipped(x))))


@inlined
def _rectified(x: Any) -> Any:
    zero = np.float32(0)
    return (x if not x < zero else zero), (ONE if x > zero else zero)


@inlined
def _at_most(x: Any, limit: Any) -> Any:
    return limit if x > limit else x


@inlined
def _activate(gate: Any, values: Any, slopes: Any, activation: Any) -> None:
    """values, slopes: an activation of min(gate, limit), and its derivative there, which is not computed where both are
    one array. activation: (its kind, two factors, the limit)."""
    kind, linear, cubic, limit = activation
    if kind == SIGMOID:
        for k in range(gate.size):
            value, slopes[k] = _by_sigmoid(_at_most(to_f32(gate[k]), limit), linear, cubic)
            values[k] = value
    elif kind == GELU:
        for k in range(gate.size):
            value, slopes[k] = _by_error_function(_at_most(to_f32(gate[k]), limit))
            values[k] = value
    elif kind == SHARE:
        for k in range(gate.size):
            value, slopes[k] = _share(_at_most(to_f32(gate[k]), limit))
            values[k] = value
    else:
        for k in range(gate.size):
            value, slopes[k] = _rectified(_at_most(to_f32(gate[k]), limit))
            values[k] = value


@compiled
def gated_forward(inputs: Any, out: Any, shape: Any, rule: Any, blocks: Any, counter: Any) -> None:
    """inputs (gate, up), whose row r begins at r * stride, of shape (width, stride); out [rows * width]; rule
    (activation as in `_activate`, offset)."""
    gate, up = inputs
    width, stride = shape
    activation, offset = rule
    limit = activation[3]
    values = np.empty(CHUNK, np.float32)
    while True:
        i = claim(counter)
        if i >= blocks.shape[0]:
            return
        for row in range(blocks[i, 0], blocks[i, 1]):
            for start in range(0, width, CHUNK):
                stop = min(start + CHUNK, width)
                first, last = row * stride + start, row * stride + stop
                gate_b, up_b, out_b = gate[first:last], up[first:last], out[row * width + start : row * width + stop]
                _activate(gate_b, values, values, activation)
                for k in range(stop - start):
                    factor = -_at_most(-_at_most(to_f32(up_b[k]), limit), limit) + offset
                    out_b[k] = rounded_like(values[k] * factor, out_b)


@compiled
def gated_backward(inputs: Any, outputs: Any, shape: Any, rule: Any, blocks: Any, counter: Any) -> None:
    """inputs (gradient [rows * width], gate, up), outputs (gradients of gate and up): rows and rule as in
    `gated_forward`."""
    width, stride = shape
    gradient, gate, up = inputs
    of_gate, of_up = outputs
    activation, offset = rule
    limit, zero = activation[3], np.float32(0)
    values, slopes = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    while True:
        i = claim(counter)
        if i >= blocks.shape[0]:
            return
        for row in range(blocks[i, 0], blocks[i, 1]):
            for start in range(0, width, CHUNK):
                stop = min(start + CHUNK, width)
                first, last = row * stride + start, row * stride + stop
                gate_b, up_b = gate[first:last], up[first:last]
                of_gate_b, of_up_b = of_gate[first:last], of_up[first:last]
                wanted = gradient[row * width + start : row * width + stop]
                _activate(gate_b, values, slopes, activation)
                for k in range(stop - start):
                    g, factor = to_f32(wanted[k]), to_f32(up_b[k])
                    clipped = -_at_most(-_at_most(factor, limit), limit)
                    slope = zero if to_f32(gate_b[k]) > limit else slopes[k]
                    of_gate_b[k] = rounded_like((g * (clipped + offset)) * slope, of_gate_b)
                    of_up_b[k] = rounded_like(zero if abs(factor) > limit else g * values[k], of_up_b)


@compiled
def rotate(inputs: Any, out: Any, shape: Any, pairs: Any, inverse: Any, blocks: Any, counter: Any) -> None:
    """inputs (elements of x, of cos and of sin); out [batch, tokens, heads, channels]; shape (tokens, heads, channels,
    pairs of a head, strides of x by batch, token and head, strides of cos and sin by batch and token); pairs ((second,
    step), ...) in x, in out and among the angles: the distance of the two of a pair, and of one pair from the next.
    inverse: multiply by the transpose. Blocks are of tokens."""
    x, cos, sin = inputs
    tokens, heads, channels, half, of_batch, of_token, of_head, of_angles, of_angle = shape
    (second, step), (second_out, step_out), (second_angle, step_angle) = pairs
    sign = np.float32(-1) if inverse else ONE
    sin_1_at, sin_2_at = (second_angle, 0) if inverse else (0, second_angle)  # from the first angle of a pair
    turned = 2 * half
    while True:
        i = claim(counter)
        if i >= blocks.shape[0]:
            return
        for place in range(blocks[i, 0], blocks[i, 1]):
            batch, token = place // tokens, place % tokens
            at = batch * of_angles + token * of_angle
            for head in range(heads):
                start = batch * of_batch + token * of_token + head * of_head
                end = (place * heads + head) * channels
                if step == 1 and step_out == 1 and step_angle == 1:
                    first, other = x[start : start + half], x[start + half : start + turned]
                    out_1, out_2 = out[end : end + half], out[end + half : end + turned]
                    cos_1, cos_2 = cos[at : at + half], cos[at + second_angle : at + second_angle + half]
                    sin_1, sin_2 = sin[at + sin_1_at : at + sin_1_at + half], sin[at + sin_2_at : at + sin_2_at + half]
                    for k in range(half):
                        a, b = to_f32(first[k]), to_f32(other[k])
                        out_1[k] = rounded_like(a * to_f32(cos_1[k]) - b * (sign * to_f32(sin_1[k])), out_1)
                        out_2[k] = rounded_like(b * to_f32(cos_2[k]) + a * (sign * to_f32(sin_2[k])), out_2)
                else:
                    for k in range(half):
                        source, target, angle = start + k * step, end + k * step_out, at + k * step_angle
                        a, b = to_f32(x[source]), to_f32(x[source + second])
                        sin_a, sin_b = sign * to_f32(sin[angle + sin_1_at]), sign * to_f32(sin[angle + sin_2_at])
                        out[target] = rounded_like(a * to_f32(cos[angle]) - b * sin_a, out)
                        out[target + second_out] = rounded_like(b * to_f32(cos[angle + second_angle]) + a * sin_b, out)
                for k in range(turned, channels):
                    out[end + k] = x[start + k]


# Ops ------------------------------------------------------------------------------------------------------------------


@cache
def register() -> None:
    """Have the ops of `model.fused` computed by these loops on a CPU."""
    forms: dict[str, Callable[..., Any]] = {
        "rms_norm": _rms_norm,
        "rms_norm_backward": _rms_norm_backward,
        "sum_parts": _sum_parts,
        "gated": _gated,
        "gated_backward": _gated_backward,
        "rotary": _rotary,
    }
    for name, function in forms.items():
        fused.LIBRARY.impl(name, function, "CPU")


def _rms_norm(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, rule: str, eps: float, groups: int
) -> tuple[Tensor, Tensor]:
    if not _computes(x) or not (gate is None or _computes(gate)):
        return fused.rms_norm_reference(x, weight, gate, rule, eps, groups)
    out, scales = torch.empty_like(x), fused.numbers_for_rows(x, groups)
    inputs, shape, gating = _norm_inputs(x, weight, gate, rule, groups)
    how: Any = {"blocks": _blocks(*fused.rows_of(x).shape), "threads": torch.get_num_threads()}
    run(rms_forward, inputs, (_array(out), _array(scales)), shape, gating, np.float32(eps), **how)
    return out, scales


def _rms_norm_backward(
    gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor | None, gate: Tensor | None, rule: str, trains: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not _computes(x, gradient) or not (gate is None or _computes(gate)):
        return fused.rms_norm_backward_reference(gradient, x, scale, weight, gate, rule, trains)
    out, parts = torch.empty_like(x), fused.norm_parts(x, trains)
    of_gate = x.new_empty(0) if gate is None else torch.empty_like(x, dtype=gate.dtype)
    inputs, shape, gating = _norm_inputs(x, weight, gate, rule, scale.shape[-1])
    outputs = _array(out), _array(of_gate), _array(parts)
    how: Any = {"blocks": _in_pieces(len(fused.rows_of(x)), fused.NORM_ROWS), "threads": torch.get_num_threads()}
    run(rms_backward, (_array(gradient), _array(scale), *inputs), outputs, shape, gating, **how)
    return out, of_gate, parts


def _norm_inputs(x: Tensor, weight: Tensor | None, gate: Tensor | None, rule: str, groups: int) -> tuple[Any, Any, Any]:
    """inputs, shape and gating, as `rms_forward` takes them."""
    offset, name, gates_input = fused.NORM_FORMULAS[rule]
    weights = np.ones(x.shape[-1], np.float32) if weight is None else (weight.float() + offset).numpy(force=True)
    activation, _ = _rule(name, math.inf, 0.0)
    gates, distance = (_array(x), 0) if gate is None else (_array(gate, _extent(gate)), fused.row_distance(gate, x))
    shape = x.shape[-1] // groups, groups, distance
    return (_array(x), weights, gates), shape, (gate is not None, gates_input, activation)


def _sum_parts(parts: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype not in DTYPES:
        return fused.sum_parts_reference(parts, weight)
    out = torch.empty_like(weight)
    how: Any = {"blocks": _blocks(weight.numel(), len(parts)), "threads": torch.get_num_threads()}
    run(sum_parts, _array(parts), _array(out), **how)
    return out


def _gated(gate: Tensor, up: Tensor | None, activation: str, limit: float, offset: float) -> Tensor:
    if not _computes(gate, *(() if up is None else (up,))):
        return fused.gated_reference(gate, up, activation, limit, offset)
    inputs, shape = _halves(gate, up)
    out = gate.new_empty((*gate.shape[:-1], shape[0]))
    how: Any = {"blocks": _blocks(out.numel() // max(shape[0], 1), shape[0]), "threads": torch.get_num_threads()}
    run(gated_forward, inputs, _array(out), shape, _rule(activation, limit, offset), **how)
    return out


def _gated_backward(
    gradient: Tensor, gate: Tensor, up: Tensor | None, activation: str, limit: float, offset: float
) -> tuple[Tensor, Tensor]:
    if not _computes(gradient, gate, *(() if up is None else (up,))):
        return fused.gated_backward_reference(gradient, gate, up, activation, limit, offset)
    inputs, shape = _halves(gate, up)
    of_gate, of_up = torch.empty_like(gate), None if up is None else torch.empty_like(up)
    outputs, _ = _halves(of_gate, of_up)
    how: Any = {"blocks": _blocks(gradient.numel() // max(shape[0], 1), shape[0]), "threads": torch.get_num_threads()}
    run(gated_backward, (_array(gradient), *inputs), outputs, shape, _rule(activation, limit, offset), **how)
    return of_gate, gate.new_empty(0) if of_up is None else of_up


def _rotary(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, heads: int, pairs: Sequence[int], inverse: bool
) -> tuple[Tensor, Tensor]:
    if not _computes(q, *(() if k is None else (k,))) or not _computes(cos, sin):
        return fused.rotary_reference(q, k, cos, sin, heads, pairs, inverse)
    of_q, *of_k = (_rotated(x, cos, sin, heads, pairs, inverse) for x in (q, k) if x is not None)
    return of_q, of_k[0] if of_k else q.new_empty(0)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, heads: int, pairs: Sequence[int], inverse: bool) -> Tensor:
    """One of the two results."""
    out, token = fused.rotary_output(x, heads), 3 - heads
    tokens, count, channels = x.shape[token], x.shape[heads], x.shape[-1]
    half = cos.shape[-1] // (1 if pairs[2] == fused.ONCE else 2)
    of_angles = 0 if len(cos) == 1 else cos.stride(0), cos.stride(1)
    shape = tokens, count, channels, half, x.stride(0), x.stride(token), x.stride(heads), *of_angles
    places = [{fused.ONCE: (0, 1), fused.HALVES: (half, 1), fused.NEIGHBOURS: (1, 2)}[order] for order in pairs]
    if inverse:
        places[:2] = places[1::-1]
    inputs = tuple(_array(each, _extent(each)) for each in (x, cos, sin))
    how: Any = {"blocks": _blocks(x.shape[0] * tokens, count * channels), "threads": torch.get_num_threads()}
    run(rotate, inputs, _array(out), shape, tuple(places), inverse, **how)
    return out


def _extent(x: Tensor) -> int:
    """Elements of memory from the first of x to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def _computes(*tensors: Tensor) -> bool:
    first = tensors[0].dtype
    return first in DTYPES and all(tensor.dtype == first for tensor in tensors)


class _Memory:
    """Elements of one type from an address on, as numpy asks for them."""

    def __init__(self, address: int, count: int, type_name: str) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (count,), "typestr": type_name, "version": 3}


def _array(tensor: Tensor, count: int | None = None) -> NDArray[Any]:
    """Elements in the order of memory, all of a dense tensor if no `count` is given; bfloat16 as its bits. They exist
    as long as the tensor does. By its address, since views by PyTorch take longer than a loop over a short row."""
    count = tensor.numel() if count is None else count
    type_name = "<u2" if tensor.dtype == torch.bfloat16 else "<f4"
    if count == 0:
        return np.empty(0, type_name)  # its address is 0, which numpy before 2.4 refuses
    return np.asarray(_Memory(tensor.data_ptr(), count, type_name))


def _halves(gate: Tensor, up: Tensor | None) -> tuple[tuple[NDArray[Any], NDArray[Any]], tuple[int, int]]:
    """Arrays of gate and up, and their (channels, distance from row to row)."""
    if up is not None:
        return (_array(gate), _array(up)), (gate.shape[-1], gate.shape[-1])
    both, width = _array(gate), gate.shape[-1] // 2
    return (both, both[width:]), (width, 2 * width)


def _rule(activation: str, limit: float, offset: float) -> tuple[tuple[int, *tuple[np.float32, ...]], np.float32]:
    """((kind of activation, its two factors, limit), offset), as the kernels take them."""
    kind = {"gelu": GELU, "relu": RELU, "sigmoid": SHARE}.get(activation, SIGMOID)
    factors = fused.SIGMOIDS.get(activation, (0.0, 0.0))
    return (kind, *map(np.float32, (*factors, limit))), np.float32(offset)


def _blocks(rows: int, width: int) -> NDArray[np.int64]:
    """Rows [start, stop) of each block, int64[blocks, 2]."""
    return _in_pieces(rows, max(1, BLOCK_NUMEL // max(width, 1)))


@lru_cache(64)
def _in_pieces(rows: int, size: int) -> NDArray[np.int64]:
    starts = np.arange(0, rows, size)
    return np.stack([starts, np.minimum(starts + size, rows)], axis=1)
