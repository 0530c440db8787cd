"""What layers are called with when rows are padded or packed, or longer than a window: measured, not derived.

The model's own prologue is run on a few tokens once more for each: with the last one masked, with positions that start
again, and with its windows made small, under the names by which the library's masks read them from a config. What
each layer is then given tells which of them attend to a window, and how masks and tables grow, of one row and of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatrain.model.peak import Lengths, Recording, growth_of, measured
from megatrain.model.ports import Capture, PortedModel
from megatrain.spec import LayerProfile

WINDOWS = ("sliding_window", "attention_chunk_size")
"""Fields of a config that the library's masks are made by (`transformers.masking_utils`)."""
SMALL, LARGE = 3, 1 << 30
"""Positions of windows that all the short runs are longer than, and none."""

Inputs = Mapping[str, Tensor]
Batching = Callable[[int, int], Inputs]
"""Arguments of the model's forward, of so many rows and tokens."""


def whole(rows: int, tokens: int) -> Inputs:
    return {"input_ids": torch.zeros(rows, tokens, dtype=torch.long)}


def padded(rows: int, tokens: int) -> Inputs:
    """The last token of each row is none."""
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[:, -1] = 0
    return {**whole(rows, tokens), "attention_mask": mask}


def packed(rows: int, tokens: int) -> Inputs:
    """Two samples in each row."""
    positions = torch.cat([torch.arange(tokens // 2), torch.arange(tokens - tokens // 2)])
    return {**whole(rows, tokens), "position_ids": positions.expand(rows, tokens).contiguous()}


class NotTaken(Exception):
    """The model's code raises something of such rows; that is the cause."""


def captured(ported: PortedModel, inputs: Inputs) -> Capture:
    """What layers are called with. Raises `NotTaken`."""
    capture = Capture(len(ported.ports))
    try:
        with torch.no_grad():
            ported.run(capture, ported.placeholders, inputs)
    except Exception as error:  # whatever foreign code raises
        raise NotTaken from error
    return capture


def profile_prologue(ported: PortedModel, lengths: Lengths) -> LayerProfile:
    """Of whole rows, and of others that the model takes and that differ. Raises what its code raises of whole ones."""
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
        nbytes, of_two = _arguments_nbytes(one), _arguments_nbytes(captured(ported, rows(2, tokens)))
        shared.append(2 * nbytes - of_two)
        apart.append(of_two - nbytes)
        return record

    return LayerProfile(
        forward=measured(recorded, lengths)[0],
        arguments=growth_of(shared, lengths),
        row_arguments=growth_of(apart, lengths),
    )


def _arguments_nbytes(capture: Capture) -> int:
    """Of all that layers are called with, the hidden state apart."""
    assert capture.hidden is not None
    tensors = [tensor for call in capture.calls for tensor in call.tensors()]
    nbytes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    nbytes.pop(capture.hidden.untyped_storage().data_ptr(), None)
    return sum(nbytes.values())


# Windows --------------------------------------------------------------------------------------------------------------


def windows_of(ported: PortedModel, tokens: int) -> dict[int, int]:
    """Layer -> the positions that it attends to at most, of those that are told by a mask, as runs of `tokens` show."""
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
    """In the block, windows of the config are of this size."""
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
    """Whether a layer is called with the same in both."""
    ones, others = one.calls[index].tensors(), other.calls[index].tensors()
    return len(ones) == len(others) and all(
        one.shape == other.shape and bool((one == other).all()) for one, other in zip(ones, others, strict=True)
    )
