"""Measures memory and time that all before the first layer needs for rows with images, by running it on zeros.

The encoder of images runs in the prologue, and its activations may exceed all others. How many there are depends on
what a row brings, so the row is given: the largest of the data, or one full of images. It runs forward, and forward and
backward, alone and twice in a micro-batch. From that, bytes are fitted as a constant and a part per value: the number
of floating-point values that a row has besides text. So they are right for rows like the one given, however many.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from megatrain.model.mapped_tensors import lazy_zeros
from megatrain.model.masks import Inputs, NotTaken, arguments_nbytes, captured
from megatrain.model.peak import Recording, Run, measured_of_rows, recorded_backward
from megatrain.model.ports import PortedModel
from megatrain.spec import Growth, LayerProfile


def values_of(row: Mapping[str, Any], names: frozenset[str]) -> int:
    """The number of floating-point values in the entries of a micro-batch that are not among `names`: pixels times
    channels, or features of sound."""
    return sum(
        each.numel()
        for name, each in row.items()
        if name not in names and isinstance(each, Tensor) and each.is_floating_point()
    )


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward as plain values, from which `row_from` makes rows that a model can be measured for:
    integers as they are, and of floating-point values, which are zero there, only the shape."""
    return {
        name: (str(each.dtype), list(each.shape) if each.is_floating_point() else each.tolist())
        for name, each in row.items()
        if isinstance(each, Tensor)
    }


def row_from(plain: Mapping[str, Any]) -> dict[str, Tensor]:
    """See `plain_row`."""
    row = dict[str, Tensor]()
    for name, (kind, told) in plain.items():
        dtype = cast(torch.dtype, getattr(torch, kind.removeprefix("torch.")))
        row[name] = lazy_zeros(told, dtype) if dtype.is_floating_point else torch.tensor(told, dtype=dtype)
    return row


def see(ported: PortedModel, row: Mapping[str, Tensor], values: int) -> None:
    """Have the model measured for rows with images like these, too. values: their `values_of`."""
    ported.image_row = row, values
    vars(ported).pop("spec", None)


def values_per_token(ported: PortedModel) -> float:
    """Of the row that the model is measured for; 0 without one."""
    return 0.0 if ported.image_row is None else ported.image_row[1] / ported.image_row[0]["input_ids"].numel()


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
    """Profile of the prologue for micro-batches of rows like these. row: arguments of the model's forward, int64[rows,
    tokens] among them. values: its `values_of`. Raises `NotTaken` if the model's code does not take it."""
    rows, arguments, forward = (row, _twice(row)), list[int](), list[Recording]()
    for each in rows:
        record = Recording()
        with record:
            capture = captured(ported, each)
        forward.append(record)
        arguments.append(arguments_nbytes(capture))
    trains = any(param.trainable for param in ported.structure.units[0].params)
    backward = [_recorded(_run(ported, each)) for each in rows] if trains else []
    pixels = sum(each.nbytes for each in row.values() if each.is_floating_point()) / values
    apart, (count, tokens) = arguments[1] - arguments[0], row["input_ids"].shape
    return LayerProfile(
        forward=measured_of_rows(forward, values, pixels),
        backward=measured_of_rows(backward, values, pixels),
        arguments=Growth(per_token=(arguments[0] - apart) / tokens),
        row_arguments=Growth(per_token=apart / (count * tokens)),
        value_flops=forward[0].flops / values,
        value_flops_backward=backward[0].flops / values if trains else 0.0,
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
