"""Triton kernels for the fused functions of layers on a GPU. Imported only if Triton can run.

They are forms of the ops of `model.fused`. A program computes in float32 and rounds once. A norm's weight gradient is
formed in parts of NORM_ROWS rows, which a second kernel adds up in order, so that no result depends on which program
runs first. `fused_forms` compares them with the reference forms before it uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatrain.model import fused

TILE = 4096
"""Elements that a program has at a time, about; at least a row of a norm."""
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
"""Products and sums round separately, whatever a version of Triton does by default."""
COLUMNS, PARTS = 128, 32
"""Columns that a program sums, and parts that it reads at a time."""


@triton.jit
def _rms_forward(tensors, sizes, numbers, FLAGS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """tensors (x, weight, gate, out, scale); sizes (rows, width of a group, distance of the gate's rows); numbers
    (offset of the weight, epsilon); FLAGS (whether there is a weight, whether the gate multiplies the input, its
    activation, or "" without a gate). A program has one group of channels."""
    x, weight, gate, out, scale = tensors
    rows, width, distance = sizes
    offset, eps = numbers
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    channel, place = tl.program_id(1) * width + column, row * tl.num_programs(1) + tl.program_id(1)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = place[:, None] * width + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if FLAGS[2] != "":
        gates = tl.load(gate + row[:, None] * distance + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        factor, _ = _activated(gates, 1.0, 0.0, FLAGS[2])
        if FLAGS[1]:
            values *= factor
    scales = 1.0 / tl.sqrt(tl.sum(values * values, 1) / width + eps)
    tl.store(scale + place, scales, mask=row < rows)
    values = values * scales[:, None]
    if FLAGS[0]:
        values *= (tl.load(weight + channel, mask=column < width, other=0.0).to(tl.float32) + offset)[None, :]
    if FLAGS[2] != "" and not FLAGS[1]:
        values *= factor
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_backward(tensors, sizes, offset, FLAGS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """tensors (gradient, x, scale, weight, gate, gradients of x and of the gate, parts); sizes as in `_rms_forward`,
    and rows of a program; FLAGS as there, and whether the weight trains."""
    gradient, x, scale, weight, gate, out, of_gate, parts = tensors
    rows, width, distance, of_program = sizes
    column = tl.arange(0, BLOCK)
    channel = tl.program_id(1) * width + column
    weights = tl.full([BLOCK], 1.0, tl.float32)
    if FLAGS[0]:
        weights = tl.load(weight + channel, mask=column < width, other=0.0).to(tl.float32) + offset
    of_weight = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * of_program
    for start in range(0, of_program, ROWS):
        row = first + start + tl.arange(0, ROWS)
        place = row * tl.num_programs(1) + tl.program_id(1)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = place[:, None] * width + column[None, :]
        scales = tl.load(scale + place, mask=row < rows, other=0.0)
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        wanted = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        inner, outer = tl.full([ROWS, BLOCK], 1.0, tl.float32), tl.full([ROWS, BLOCK], 1.0, tl.float32)
        if FLAGS[2] != "":
            gates = tl.load(gate + row[:, None] * distance + channel[None, :], mask=inside, other=0.0).to(tl.float32)
            factor, slope = _activated(gates, 1.0, 0.0, FLAGS[2])
            if FLAGS[1]:
                inner = factor
            else:
                outer = factor
        normed = values * inner * scales[:, None]
        if FLAGS[3]:
            of_weight += tl.sum(wanted * outer * normed, 0)
        wanted *= weights[None, :]
        scaled = wanted * outer
        mean = tl.sum(scaled * normed, 1) / width
        of_input = (scaled - normed * mean[:, None]) * scales[:, None]
        tl.store(out + at, (of_input * inner).to(out.dtype.element_ty), mask=inside)
        if FLAGS[2] != "":
            given = of_input * values * slope if FLAGS[1] else wanted * normed * slope
            tl.store(of_gate + at, given.to(of_gate.dtype.element_ty), mask=inside)
    if FLAGS[3]:
        part = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * width + column
        tl.store(parts + part, of_weight, mask=column < width)


@triton.jit
def _sum_parts(parts, out, count, width, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """out [width]: the sum of parts float32[count, width]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part < count)[:, None] & (column < width)[None, :]
        at = part.to(tl.int64)[:, None] * width + column[None, :]
        total += tl.sum(tl.load(parts + at, mask=inside, other=0.0), 0)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _activated(x, LINEAR: tl.constexpr, CUBIC: tl.constexpr, KIND: tl.constexpr):
    """An activation, and its derivative. KIND: by the sigmoid of LINEAR * x + CUBIC * x ** 3, `gelu` or `relu`."""
    if KIND == "relu":
        value = tl.where(x < 0, 0.0, x)
        slope = tl.where(x > 0, 1.0, 0.0)
    elif KIND == "sigmoid":
        near = tl.where(x < -87.0, -87.0, tl.where(x > 87.0, 87.0, x))
        value = 1 / (1 + tl.exp(-near))
        slope = value * (1 / (1 + tl.exp(near)))
    elif KIND == "gelu":
        below = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        value = x * below
        near = tl.minimum(tl.maximum(x, -100.0), 100.0)
        slope = below + near * tl.exp(-0.5 * near * near) * 0.3989422804014327
    else:
        near = tl.where(x < -87.0, -87.0, tl.where(x > 87.0, 87.0, x))
        square = near * near
        z = near * (LINEAR + CUBIC * square)
        share = 1 / (1 + tl.exp(-tl.where(z < -87.0, -87.0, tl.where(z > 87.0, 87.0, z))))
        value = tl.where(near < x, x, near) * share
        slope = share + near * (share * (1 - share)) * (LINEAR + 3 * CUBIC * square)
    return value, slope


@triton.jit
def _gated_forward(
    tensors, sizes, numbers, LINEAR: tl.constexpr, CUBIC: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """tensors (gate, up, out); sizes (width, distance of rows of gate and up); numbers (limit, offset). A program has a
    part of one row."""
    gate, up, out = tensors
    width, stride = sizes
    limit, offset = numbers
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at, place = column < width, row * stride + column, row * width + column
    first = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    value, _ = _activated(tl.where(first > limit, limit, first), LINEAR, CUBIC, KIND)
    value *= _within(factor, limit) + offset
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(
    tensors, sizes, numbers, LINEAR: tl.constexpr, CUBIC: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """tensors (gradient, gate, up, gradient of gate, gradient of up); the others as in `_gated_forward`."""
    gradient, gate, up, of_gate, of_up = tensors
    width, stride = sizes
    limit, offset = numbers
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at, place = column < width, row * stride + column, row * width + column
    first = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    value, slope = _activated(tl.where(first > limit, limit, first), LINEAR, CUBIC, KIND)
    wanted = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    given = tl.where(first > limit, 0.0, wanted * (_within(factor, limit) + offset) * slope)
    tl.store(of_gate + at, given.to(of_gate.dtype.element_ty), mask=inside)
    given = tl.where(tl.abs(factor) > limit, 0.0, wanted * value)
    tl.store(of_up + at, given.to(of_up.dtype.element_ty), mask=inside)


@triton.jit
def _within(x, limit):
    """x, clipped to [-limit, limit]."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def _rotate(tensors, sizes, strides, PAIRS: tl.constexpr, INVERSE: tl.constexpr, BLOCKS: tl.constexpr):
    """tensors (q, k, cos, sin, and the results [batch, tokens, heads, channels]); sizes (tokens, heads of q, heads of
    k, channels, pairs of a head); strides of q and of k by batch, token and head, and of cos and sin by batch and
    token. PAIRS: where the two of a pair lie (`_places`) in q and k, in the results and among the angles. BLOCKS:
    powers of two, at least heads, pairs, and channels that are not turned (1 if there are none). A program has one
    token of q or of k."""
    q, k, cos, sin, out_q, out_k = tensors
    tokens, heads_q, heads_k, channels, half = sizes
    if tl.program_id(1) == 0:
        places = strides[0], strides[1], strides[2], strides[6], strides[7]
        _rotate_token((q, cos, sin, out_q), (tokens, heads_q, channels, half), places, PAIRS, INVERSE, BLOCKS)
    else:
        places = strides[3], strides[4], strides[5], strides[6], strides[7]
        _rotate_token((k, cos, sin, out_k), (tokens, heads_k, channels, half), places, PAIRS, INVERSE, BLOCKS)


@triton.jit
def _places(pair, half, ORDER: tl.constexpr):
    """Where the two of a pair lie in a row. ORDER: 0, 1 and 2 for ONCE, HALVES and NEIGHBOURS."""
    if ORDER == 2:
        first, second = 2 * pair, 2 * pair + 1
    elif ORDER == 1:
        first, second = pair, half + pair
    else:
        first, second = pair, pair
    return first, second


@triton.jit
def _rotate_token(tensors, sizes, strides, PAIRS: tl.constexpr, INVERSE: tl.constexpr, BLOCKS: tl.constexpr):
    """The part of `_rotate` for one of q and k."""
    x, cos, sin, out = tensors
    tokens, heads, channels, half = sizes
    of_batch, of_token, of_head, of_angles, of_angle = strides
    program = tl.program_id(0).to(tl.int64)
    batch, token = program // tokens, program % tokens
    head, pair = tl.arange(0, BLOCKS[0])[:, None], tl.arange(0, BLOCKS[1])
    inside = (head < heads) & (pair < half)[None, :]
    at = batch * of_batch + token * of_token + head * of_head
    to = (program * heads + head) * channels
    angle_1, angle_2 = _places(pair, half, PAIRS[2])
    angle = batch * of_angles + token * of_angle
    cos_1 = tl.load(cos + angle + angle_1, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + angle + angle_2, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + angle + angle_1, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + angle + angle_2, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    from_1, from_2 = _places(pair[None, :], half, PAIRS[0])
    to_1, to_2 = _places(pair[None, :], half, PAIRS[1])
    first = tl.load(x + at + from_1, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + from_2, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        made_1, made_2 = first * cos_1 + second * sin_2, second * cos_2 - first * sin_1
    else:
        made_1, made_2 = first * cos_1 - second * sin_1, second * cos_2 + first * sin_2
    tl.store(out + to + to_1, made_1.to(out.dtype.element_ty), mask=inside)
    tl.store(out + to + to_2, made_2.to(out.dtype.element_ty), mask=inside)
    if BLOCKS[2] > 1:
        channel = 2 * half + tl.arange(0, BLOCKS[2])[None, :]
        inside = (head < heads) & (channel < channels)
        tl.store(out + to + channel, tl.load(x + at + channel, mask=inside, other=0.0), mask=inside)


# Ops ------------------------------------------------------------------------------------------------------------------


def rms_norm(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, rule: str, eps: float, groups: int
) -> tuple[Tensor, Tensor]:
    """As `fused.rms_norm_reference`."""
    out, scale = torch.empty_like(x), fused.numbers_for_rows(x, groups)
    if x.numel():
        offset, flags, sizes, (block, of_tile) = _norm_how(x, weight, gate, rule, groups)
        tensors = x, x if weight is None else weight, x if gate is None else gate, out, scale
        options = {"FLAGS": flags, "ROWS": of_tile, "BLOCK": block, **_warps(block)}
        _rms_forward[(triton.cdiv(sizes[0], of_tile), groups)](tensors, sizes, (offset, eps), **options)
    return out, scale


def rms_norm_backward(
    gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor | None, gate: Tensor | None, rule: str, trains: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `fused.rms_norm_backward_reference`."""
    out, groups, parts = torch.empty_like(x), scale.shape[-1], fused.norm_parts(x, trains)
    of_gate = x.new_empty(0) if gate is None else torch.empty_like(x, dtype=gate.dtype)
    if x.numel():
        offset, flags, sizes, (block, of_tile) = _norm_how(x, weight, gate, rule, groups)
        inputs = gradient, x, scale, x if weight is None else weight, x if gate is None else gate
        tensors, sizes = (*inputs, out, of_gate, parts if trains else scale), (*sizes, fused.NORM_ROWS)
        options = {"FLAGS": (*flags, trains), "ROWS": min(of_tile, fused.NORM_ROWS), "BLOCK": block, **_warps(block)}
        _rms_backward[(triton.cdiv(sizes[0], fused.NORM_ROWS), groups)](tensors, sizes, offset, **options)
    return out, of_gate, parts


def _norm_how(x: Tensor, weight: Tensor | None, gate: Tensor | None, rule: str, groups: int) -> tuple[Any, ...]:
    """(offset, flags, sizes, tile) of a norm's kernels."""
    (rows, channels), (offset, activation, gates_input) = fused.rows_of(x).shape, fused.NORM_FORMULAS[rule]
    distance = 0 if gate is None else fused.row_distance(gate, x)
    flags = weight is not None, gates_input, "" if gate is None else activation
    return offset, flags, (rows, channels // groups, distance), _tile(channels // groups)


def sum_parts(parts: Tensor, weight: Tensor) -> Tensor:
    """As `fused.sum_parts_reference`."""
    out, (count, width) = torch.empty_like(weight), parts.shape
    options = {"PARTS": PARTS, "COLUMNS": COLUMNS, **OPTIONS}
    _sum_parts[(triton.cdiv(width, COLUMNS),)](parts, out, count, width, **options)
    return out


def gated(gate: Tensor, up: Tensor | None, activation: str, limit: float, offset: float) -> Tensor:
    """As `fused.gated_reference`."""
    first, second = _halves(gate, up)
    width, stride = gate.shape[-1] // (2 if up is None else 1), gate.shape[-1]
    out = gate.new_empty((*gate.shape[:-1], width))
    if out.numel():
        grid, block = _grid(out)
        numbers = limit, offset
        _gated_forward[grid]((first, second, out), (width, stride), numbers, **_kind(activation), BLOCK=block)
    return out


def gated_backward(
    gradient: Tensor, gate: Tensor, up: Tensor | None, activation: str, limit: float, offset: float
) -> tuple[Tensor, Tensor]:
    """As `fused.gated_backward_reference`."""
    of_gate, of_up = torch.empty_like(gate), None if up is None else torch.empty_like(up)
    if gradient.numel():
        tensors = gradient, *_halves(gate, up), *_halves(of_gate, of_up)
        grid, block = _grid(gradient)
        sizes = gradient.shape[-1], gate.shape[-1]
        _gated_backward[grid](tensors, sizes, (limit, offset), **_kind(activation), BLOCK=block)
    return of_gate, gate.new_empty(0) if of_up is None else of_up


def rotary(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, heads: int, pairs: Sequence[int], inverse: bool
) -> tuple[Tensor, Tensor]:
    """As `fused.rotary_reference`."""
    both, token = (q, q if k is None else k), 3 - heads
    results = fused.rotary_output(q, heads), q.new_empty(0) if k is None else fused.rotary_output(k, heads)
    tokens, channels, half = q.shape[token], q.shape[-1], cos.shape[-1] // (1 if pairs[2] == fused.ONCE else 2)
    counts = [x.shape[heads] for x in both]
    if q.numel():
        strides = [x.stride(dim) for x in both for dim in (0, token, heads)]
        strides += [0 if len(cos) == 1 else cos.stride(0), cos.stride(1)]
        rest = max(2, channels - 2 * half) if channels > 2 * half else 1
        blocks = tuple(map(triton.next_power_of_2, (max(counts), half, rest)))
        tensors, sizes = (*both, cos, sin, *results), (tokens, *counts, channels, half)
        orders = (pairs[1], pairs[0], pairs[2]) if inverse else tuple(pairs)
        options = {"PAIRS": orders, "INVERSE": inverse, "BLOCKS": blocks, **OPTIONS}
        _rotate[(q.shape[0] * tokens, 1 if k is None else 2)](tensors, sizes, tuple(strides), **options)
    return results


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tensors that begin where the first rows of gate and up do."""
    return (gate, up) if up is not None else (gate, gate[..., gate.shape[-1] // 2 :])


def _grid(out: Tensor) -> tuple[tuple[int, int], int]:
    """Programs for each row and part of a row, and the columns of a part."""
    block = min(1024, triton.next_power_of_2(out.shape[-1]))
    return (out.numel() // out.shape[-1], triton.cdiv(out.shape[-1], block)), block


def _tile(width: int) -> tuple[int, int]:
    """(columns, rows) of the tile that a program has at a time: powers of two."""
    block = triton.next_power_of_2(width)
    return block, max(1, TILE // block)


def _warps(block: int) -> dict[str, int]:
    return {"num_warps": min(16, max(4, block // 512)), **OPTIONS}


def _kind(activation: str) -> dict[str, Any]:
    linear, cubic = fused.SIGMOIDS.get(activation, (0.0, 0.0))
    return {"LINEAR": linear, "CUBIC": cubic, "KIND": activation, **OPTIONS}
