"""Runs the prologue on zeros, to measure its memory and to record the arguments that it passes to the layers.

The model's own prologue runs on a few tokens: whole rows, rows whose last token is padding, rows of two samples, and
with small windows, set in the config fields that the library's masks read. Comparing the layers' arguments shows which
layers have a window, and how masks and tables grow, with one row and with two.

An encoder of images runs in the prologue or before it, and its activations may exceed all others. How many depends on
what a row brings, so the row is given: the largest of the data, or one full of images. It runs forward, and forward and
backward, alone and twice in a micro-batch. From that, bytes are fitted as a constant and a part per value: the number
of floating-point values that a row has besides text. So they are right for rows like the one given, however many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from megatrain.model.mapped_tensors import lazy_parameters, lazy_zeros
from megatrain.model.peak import (
    Lengths,
    Recording,
    Run,
    growth_of,
    measured,
    measured_of_rows,
    recorded_backward,
    recorded_forward,
)
from megatrain.model.ports import Call, Capture, PortedModel, with_earlier
from megatrain.spec import Growth, LayerProfile

WINDOWS = ("sliding_window", "attention_chunk_size")
"""Config fields for windows that `transformers.masking_utils` reads."""
SMALL, LARGE = 3, 1 << 30
"""Window sizes: one shorter than every run, one longer."""

Inputs = Mapping[str, Tensor]
Batching = Callable[[int, int], Inputs]
"""(rows, tokens) -> arguments of the model's forward."""


def whole(rows: int, tokens: int) -> Inputs:
    return {"input_ids": torch.zeros(rows, tokens, dtype=torch.long)}


def padded(rows: int, tokens: int) -> Inputs:
    """Rows whose last token is padding."""
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[:, -1] = 0
    return {**whole(rows, tokens), "attention_mask": mask}


def packed(rows: int, tokens: int) -> Inputs:
    """Rows that hold two samples each."""
    positions = torch.cat([torch.arange(tokens // 2), torch.arange(tokens - tokens // 2)])
    return {**whole(rows, tokens), "position_ids": positions.expand(rows, tokens).contiguous()}


class NotAccepted(Exception):
    """The model's code raised an error for such rows, which is the cause."""


def captured(ported: PortedModel, inputs: Inputs) -> Capture:
    """The calls of all layers for these inputs. Raises `NotAccepted`."""
    capture = Capture(len(ported.ports))
    try:
        with torch.no_grad():
            ported.run(capture, ported.placeholders, inputs)
    except Exception as error:  # whatever foreign code raises
        raise NotAccepted from error
    capture.calls = with_earlier(ported, capture.calls)
    return capture


def profile_prologue(ported: PortedModel, lengths: Lengths) -> LayerProfile:
    """Profile the prologue for whole rows, and for padded and packed ones if the model accepts them and they differ.

    Raises what the model's code raises for whole rows.
    """
    try:
        profile = _profile(ported, whole, lengths)
    except NotAccepted as error:
        raise error.__cause__ or error from None
    others: dict[str, LayerProfile] = {}
    for name, rows in (("padded", padded), ("packed", packed), ("masked", whole)):
        try:
            if name != "masked":
                others[name] = _profile(ported, rows, lengths)
            else:
                with windows(ported, SMALL):
                    others[name] = _profile(ported, rows, lengths)
        except NotAccepted:
            continue
    return replace(profile, others=tuple((name, other) for name, other in others.items() if other != profile))


def _profile(ported: PortedModel, rows: Batching, lengths: Lengths) -> LayerProfile:
    shared, apart = list[int](), list[int]()

    def recorded(tokens: int) -> Recording:
        inputs, record = rows(1, tokens), Recording()
        with record:
            one = captured(ported, inputs)
        nbytes, of_two = (nbytes_of_arguments(capture) for capture in (one, captured(ported, rows(2, tokens))))
        shared.append(2 * nbytes - of_two)
        apart.append(of_two - nbytes)
        return record

    return LayerProfile(
        forward=measured(recorded, lengths)[0],
        arguments=growth_of(shared, lengths),
        row_arguments=growth_of(apart, lengths),
    )


def nbytes_of_arguments(capture: Capture) -> int:
    """Bytes of all arguments of layers except the hidden state."""
    assert capture.hidden is not None
    return arguments_nbytes(capture.hidden, capture.calls)


def arguments_nbytes(hidden: Tensor, calls: Iterable[Call]) -> int:
    """Bytes of the arguments of these calls of layers, except the hidden state, which the first gets as `hidden`."""
    tensors = [tensor for call in calls for tensor in call.tensors()]
    nbytes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    nbytes.pop(hidden.untyped_storage().data_ptr(), None)
    return sum(nbytes.values())


# Windows --------------------------------------------------------------------------------------------------------------


def windows_of(ported: PortedModel, tokens: int) -> dict[int, int]:
    """Layer -> its attention window in positions, for layers whose masks show one in runs of `tokens` tokens."""
    by_layer: dict[int, int] = {}
    plain = captured(ported, whole(1, tokens))
    for name in WINDOWS:
        sizes = [size for config in _configs(ported) if _is_size(size := getattr(config, name, 0))]
        if not sizes:
            continue
        try:
            with windows(ported, SMALL, name):
                small = captured(ported, whole(1, tokens))
        except NotAccepted:
            continue
        by_layer |= {index: min(sizes) for index in range(len(plain.calls)) if not alike(plain, small, index)}
    return by_layer


@contextmanager
def windows(ported: PortedModel, size: int, *names: str) -> Iterator[None]:
    """In the block, the config's windows have this size."""
    before = [
        (config, name, window)
        for config in _configs(ported)
        for name in names or WINDOWS
        if _is_size(window := getattr(config, name, None))
    ]
    try:
        for config, name, _ in before:
            setattr(config, name, size)
        yield
    finally:
        for config, name, window in before:
            setattr(config, name, window)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _configs(ported: PortedModel) -> list[Any]:
    configs = (getattr(module, "config", None) for module in ported.skeleton.modules())
    return list({id(config): config for config in configs if config}.values())


def alike(one: Capture, other: Capture, index: int) -> bool:
    """Whether a layer gets the same arguments in both captures."""
    ones, others = one.calls[index].tensors(), other.calls[index].tensors()
    return len(ones) == len(others) and all(
        one.shape == other.shape and bool((one == other).all()) for one, other in zip(ones, others, strict=True)
    )


# Rows with images -----------------------------------------------------------------------------------------------------


def values_of(row: Mapping[str, Any], names: frozenset[str]) -> int:
    """The number of floating-point values in the entries of a micro-batch that are not among `names`: pixels times
    channels, or features of sound."""
    return sum(
        tensor.numel()
        for name, tensor in row.items()
        if name not in names and isinstance(tensor, Tensor) and tensor.is_floating_point()
    )


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward as plain values, from which `row_from` makes rows that a model can be measured for:
    integers as they are, and of floating-point values, which are zero there, only the shape."""
    return {
        name: (str(tensor.dtype), list(tensor.shape) if tensor.is_floating_point() else tensor.tolist())
        for name, tensor in row.items()
        if isinstance(tensor, Tensor)
    }


def row_from(plain: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arguments of a forward that `plain_row` has made plain, with zeros for floating-point values."""
    row = dict[str, Tensor]()
    for name, (kind, told) in plain.items():
        dtype = cast(torch.dtype, getattr(torch, kind.removeprefix("torch.")))
        row[name] = lazy_zeros(told, dtype) if dtype.is_floating_point else torch.tensor(told, dtype=dtype)
    return row


def see(ported: PortedModel, row: Mapping[str, Tensor], values: int) -> None:
    """Have the model measured for rows with images like these, too. values: their `values_of`."""
    ported.image_row = row, values
    ported.profiled = None


def values_per_token(ported: PortedModel) -> float:
    """Of the row that the model is measured for; 0 without one."""
    return 0.0 if ported.image_row is None else ported.image_row[1] / ported.image_row[0]["input_ids"].numel()


def longer(row: Inputs, tokens: int) -> dict[str, Tensor]:
    """Rows with this many more tokens of text. What they have for each token is followed by zeros."""
    shape = row["input_ids"].shape
    return {
        name: torch.cat([tensor, tensor.new_zeros(*shape[:1], tokens, *tensor.shape[2:])], 1)
        if tensor.shape[:2] == shape
        else tensor
        for name, tensor in row.items()
    }


def _twice(row: Inputs) -> dict[str, Tensor]:
    return {name: torch.cat([tensor, tensor]) for name, tensor in row.items()}


def profile_images(ported: PortedModel, row: Inputs, values: int) -> LayerProfile:
    """Profile of the prologue for micro-batches of rows like these. row: arguments of the model's forward, int64[rows,
    tokens] among them. values: its `values_of`. Raises `NotAccepted` if the model's code does not take it."""
    rows, arguments, forward = (row, _twice(row)), list[int](), list[Recording]()
    for inputs in rows:
        record = Recording()
        with record:
            capture = captured(ported, inputs)
        forward.append(record)
        arguments.append(nbytes_of_arguments(capture))
    trains = any(param.trainable for param in ported.structure.units[0].params)
    backward = [_recorded(_run(ported, inputs)) for inputs in rows] if trains or _encoder_trains(ported) else []
    pixels = sum(tensor.nbytes for tensor in row.values() if tensor.is_floating_point()) / values
    apart, (count, tokens) = arguments[1] - arguments[0], row["input_ids"].shape
    return LayerProfile(
        forward=measured_of_rows(forward, values, pixels),
        backward=measured_of_rows(backward, values, pixels),
        arguments=Growth(per_token=(arguments[0] - apart) / tokens),
        row_arguments=Growth(per_token=apart / (count * tokens)),
        value_flops=forward[0].flops / values,
        value_flops_backward=backward[0].flops / values if backward else 0.0,
    )


def profile_encoder(ported: PortedModel, row: Inputs, values: int) -> list[LayerProfile]:
    """Profiles of the units of the streamed encoder, if there is one; arguments as for `profile_images`."""
    encoder, spec = ported.encoder, ported.structure
    if encoder is None:
        return []
    begun, arguments, forward = list[tuple[Tensor, list[Call]]](), list[int](), list[Recording]()
    for inputs in (row, _twice(row)):
        record = Recording()
        with torch.no_grad(), record:
            begun.append(_begun(ported, ported.placeholders, inputs))
        forward.append(record)
        arguments.append(arguments_nbytes(*begun[-1]))
    backward = list[Recording]()
    if spec.has_backward(spec.encoder[0]):
        backward = [_recorded(partial(_run_of_start, ported, inputs)) for inputs in (row, _twice(row))]
    slope = arguments[1] - arguments[0]
    size = Growth(max(0.0, arguments[0] - slope), per_value=slope / values)
    pixels = sum(tensor.nbytes for tensor in row.values() if tensor.is_floating_point()) / values
    profiles = [replace(_profile_of(forward, backward, values, pixels), arguments=size)]
    known: dict[object, LayerProfile] = {}
    for index, layer in enumerate(encoder.templates):
        trained = tuple((parameter.shape, parameter.requires_grad) for parameter in layer.parameters())
        shapes = tuple(tensor.shape for tensor in begun[0][1][index].tensors())
        kind, unit = (type(layer), trained, shapes, spec.has_backward(spec.encoder[1 + index])), spec.encoder[1 + index]
        if kind not in known:
            runs = [partial(_run_of_layer, ported, index, hidden, calls[index]) for hidden, calls in begun]
            forward = [recorded_forward(run, 0) for run in runs]
            backward = [_recorded(run) for run in runs] if spec.has_backward(unit) else []
            known[kind] = _profile_of(forward, backward, values, 0.0)
        profiles.append(known[kind])
    return profiles


def _profile_of(
    forward: Sequence[Recording], backward: Sequence[Recording], values: int, value_nbytes: float
) -> LayerProfile:
    return LayerProfile(
        forward=measured_of_rows(forward, values, value_nbytes),
        backward=measured_of_rows(backward, values, value_nbytes),
        value_flops=forward[0].flops / values,
        value_flops_backward=backward[0].flops / values if backward else 0.0,
    )


def _encoder_trains(ported: PortedModel) -> bool:
    return ported.encoder is not None and ported.structure.has_backward(ported.structure.encoder[-1])


def _begun(ported: PortedModel, weights: Mapping[str, Tensor], row: Inputs) -> tuple[Tensor, list[Call]]:
    """The input of an encoder's first layer, and the arguments of its layers. Raises `NotAccepted`."""
    assert ported.encoder is not None
    if (begun := ported.encoder.begin(ported, weights, row)) is None:
        raise NotAccepted
    return begun


def _run_of_start(ported: PortedModel, row: Inputs, _: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    leaves = _leaves(ported, ported.structure.encoder[0])
    return _begun(ported, leaves, row)[0], list(leaves.values()), []


def _run_of_layer(
    ported: PortedModel, index: int, hidden: Tensor, call: Call, _: int
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    assert ported.encoder is not None
    layer = ported.encoder.templates[index]
    weights = lazy_parameters(layer)
    given = hidden.detach().requires_grad_()
    return ported.encoder.layer(ported, index, weights, given, call)[0], list(weights.values()), [given]


def _leaves(ported: PortedModel, unit: int) -> dict[str, Tensor]:
    """Zeros in place of everything outside the layers; those that a unit trains require a gradient."""
    trains = {param.name for param in ported.structure.units[unit].params if param.trainable}
    return {
        name: lazy_zeros(zero.shape, zero.dtype).requires_grad_(name in trains)
        for name, zero in ported.placeholders.items()
    }


def _run(ported: PortedModel, row: Inputs) -> Run:
    """The prologue with gradients for what it trains; its results stay."""
    encoded: list[Tensor] = []
    if ported.encoder is not None:
        with torch.no_grad():
            like = _begun(ported, ported.placeholders, row)[0]
        needing = [
            _encoder_trains(ported),
            *(ported.structure.has_backward(unit - 1) for unit in ported.structure.tapped[1:]),
        ]
        encoded = [like.clone().requires_grad_(needs) for needs in needing]

    def run(_: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        leaves = _leaves(ported, 0)
        hidden, calls = ported.prologue(leaves, row, encoded=encoded)
        held.append((hidden, calls))
        return hidden, list(leaves.values()), [tensor for tensor in encoded if tensor.requires_grad]

    held: list[object] = []
    return run


def _recorded(run: Run) -> Recording:
    try:
        return recorded_backward(run, 0)
    except Exception as error:  # whatever foreign code raises
        raise NotAccepted from error
