"""Measures what a prologue takes in memory and time for rows with images, by running it on zeros.

The encoder of images runs in the prologue, and its activations may exceed all others. How many there are depends on
what a row brings, so the row is given: the largest of the data, or one full of images. It runs forward, and forward and
backward, as it is, with more text, and twice. From that, every count of bytes is fitted as a constant, a part per token
(and position), and a part per value: the number of floating-point values that a row has besides text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from megatrain.model.mapped_tensors import lazy_zeros
from megatrain.model.masks import Inputs, NotTaken, arguments_nbytes, captured
from megatrain.model.peak import Recording, Run, growth_of, measured_with_values, recorded_backward
from megatrain.model.ports import PortedModel
from megatrain.spec import Growth, LayerProfile

STEP = 16
"""Tokens of text by which the runs with more text differ."""

_ON_A_CPU: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4])
    ),
}
"""Attention on a CPU, whose operations the library does not count."""


def values_of(row: Mapping[str, Any], names: frozenset[str]) -> int:
    """The number of floating-point values in the entries of a micro-batch that are not among `names`: pixels times
    channels, or features of sound."""
    return sum(
        each.numel()
        for name, each in row.items()
        if name not in names and isinstance(each, Tensor) and each.is_floating_point()
    )


def longer(row: Inputs, tokens: int) -> dict[str, Tensor]:
    """Rows with this many more tokens of text. What they have for each token is followed by zeros."""
    shape = row["input_ids"].shape
    return {
        name: torch.cat([each, each.new_zeros(*shape[:1], tokens, *each.shape[2:])], 1)
        if each.shape[:2] == shape
        else each
        for name, each in row.items()
    }


def _twice(row: Inputs) -> dict[str, Tensor]:
    return {name: torch.cat([each, each]) for name, each in row.items()}


def profile_images(ported: PortedModel, row: Inputs, values: int) -> LayerProfile:
    """Profile of the prologue for micro-batches of rows like this one. row: arguments of the model's forward, int64[1,
    tokens] among them. values: its `values_of`. Raises `NotTaken` if the model's code does not take it."""
    length = row["input_ids"].shape[1]
    rows = [longer(row, more * STEP) for more in range(3)]
    rows, lengths = [*rows, _twice(row)], (length, length + STEP, length + 2 * STEP)
    forward, arguments = list[Recording](), list[int]()
    for each in rows:
        record = Recording()
        with record:
            capture = captured(ported, each)
        forward.append(record)
        arguments.append(arguments_nbytes(capture))
    run = partial(_run, ported)
    trains = any(param.trainable for param in ported.structure.units[0].params)
    backward = [_recorded(run(each)) for each in rows] if trains else []
    pixels = sum(each.nbytes for each in row.values() if each.is_floating_point()) / values
    shared, apart = _arguments(arguments, lengths)
    return LayerProfile(
        forward=measured_with_values(forward, lengths, values, pixels),
        backward=measured_with_values(backward, lengths, values, pixels),
        arguments=shared,
        row_arguments=apart,
        value_flops=_flops(lambda: captured(ported, row)) / values,
        value_flops_backward=_flops(lambda: _recorded(run(row))) / values if trains else 0.0,
    )


def _run(ported: PortedModel, row: Inputs) -> Run:
    """The prologue with gradients for what it trains; its results stay."""
    trains = {param.name for param in ported.structure.units[0].params if param.trainable}

    def run(_: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        leaves = {
            name: lazy_zeros(zero.shape, zero.dtype).requires_grad_(name in trains)
            for name, zero in ported.placeholders.items()
        }
        hidden, calls = ported.prologue(leaves, row)
        held.append((hidden, calls))
        return hidden, list(leaves.values()), []

    held: list[object] = []
    return run


def _recorded(run: Run) -> Recording:
    try:
        return recorded_backward(run, 0)
    except Exception as error:  # whatever foreign code raises
        raise NotTaken from error


def _arguments(sizes: list[int], lengths: tuple[int, int, int]) -> tuple[Growth, Growth]:
    """Bytes of layers' arguments that rows share, and those of each row. sizes: of all, for the three lengths, and for
    two rows."""
    shared = max(0, 2 * sizes[0] - sizes[3])
    grown = growth_of(sizes[:3], lengths)
    apart = max(0.0, grown.per_token - shared / lengths[0])
    return Growth(per_token=grown.per_token - apart), Growth(grown.fixed, apart, grown.per_pair)


def _flops(run: Callable[[], object]) -> float:
    """Floating-point operations of the products in a run, none of which is computed if it is large."""
    counter = FlopCounterMode(display=False, custom_mapping=_ON_A_CPU)
    with Recording(), counter:
        run()
    return float(counter.get_total_flops())
