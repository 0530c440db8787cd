"""Measures which arguments layers get when rows are padded, packed, or longer than an attention window.

The model's own prologue is run on a few tokens again: with the last one masked, with positions that restart, and
with small windows, set in the config fields that the library's masks read. Comparing the layers' arguments shows
which layers have a window, and how masks and tables grow, with one row and with two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatrain.model.peak import Lengths, Recording, growth_of, measured
from megatrain.model.ports import Call, Capture, PortedModel
from megatrain.spec import LayerProfile

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


class NotTaken(Exception):
    """The model's code raised an error for such rows, which is the cause."""


def captured(ported: PortedModel, inputs: Inputs) -> Capture:
    """The calls of all layers for these inputs. Raises `NotTaken`."""
    capture = Capture(len(ported.ports))
    try:
        with torch.no_grad():
            ported.run(capture, ported.placeholders, inputs)
    except Exception as error:  # whatever foreign code raises
        raise NotTaken from error
    return capture


def profile_prologue(ported: PortedModel, lengths: Lengths) -> LayerProfile:
    """Profile the prologue for whole rows, and for padded and packed ones if the model accepts them and they differ.

    Raises what the model's code raises for whole rows.
    """
    try:
        profile = _profile(ported, whole, lengths)
    except NotTaken as error:
        raise error.__cause__ or error from None
    found: dict[str, LayerProfile] = {}
    for name, rows in (("padded", padded), ("packed", packed), ("masked", whole)):
        try:
            if name != "masked":
                found[name] = _profile(ported, rows, lengths)
            else:
                with windows(ported, SMALL):
                    found[name] = _profile(ported, rows, lengths)
        except NotTaken:
            continue
    return replace(profile, others=tuple((name, other) for name, other in found.items() if other != profile))


def _profile(ported: PortedModel, rows: Batching, lengths: Lengths) -> LayerProfile:
    shared, apart = list[int](), list[int]()

    def recorded(tokens: int) -> Recording:
        inputs, record = rows(1, tokens), Recording()
        with record:
            one = captured(ported, inputs)
        nbytes, of_two = (nbytes_of_arguments(each) for each in (one, captured(ported, rows(2, tokens))))
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
    """The same, of these calls, the first of which gets `hidden`."""
    tensors = [tensor for call in calls for tensor in call.tensors()]
    nbytes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    nbytes.pop(hidden.untyped_storage().data_ptr(), None)
    return sum(nbytes.values())


# Windows --------------------------------------------------------------------------------------------------------------


def windows_of(ported: PortedModel, tokens: int) -> dict[int, int]:
    """Layer -> its attention window in positions, for layers whose masks show one in runs of `tokens` tokens."""
    found: dict[int, int] = {}
    plain = captured(ported, whole(1, tokens))
    for name in WINDOWS:
        sizes = [size for each in _configs(ported) if _is_size(size := getattr(each, name, 0))]
        if not sizes:
            continue
        try:
            with windows(ported, SMALL, name):
                small = captured(ported, whole(1, tokens))
        except NotTaken:
            continue
        found |= {index: min(sizes) for index in range(len(plain.calls)) if not alike(plain, small, index)}
    return found


@contextmanager
def windows(ported: PortedModel, size: int, *names: str) -> Iterator[None]:
    """In the block, the config's windows have this size."""
    before = [
        (each, name, own)
        for each in _configs(ported)
        for name in names or WINDOWS
        if _is_size(own := getattr(each, name, None))
    ]
    try:
        for each, name, _ in before:
            setattr(each, name, size)
        yield
    finally:
        for each, name, own in before:
            setattr(each, name, own)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _configs(ported: PortedModel) -> list[Any]:
    found = {id(each): each for module in ported.skeleton.modules() if (each := getattr(module, "config", None))}
    return list(found.values())


def alike(one: Capture, other: Capture, index: int) -> bool:
    """Whether a layer gets the same arguments in both captures."""
    ones, others = one.calls[index].tensors(), other.calls[index].tensors()
    return len(ones) == len(others) and all(
        one.shape == other.shape and bool((one == other).all()) for one, other in zip(ones, others, strict=True)
    )
