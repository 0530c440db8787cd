"""What layers are called with when rows are padded or packed, or longer than a window: seen, not derived.

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

from megatrain.model.moments import Recording, growth, widest_of
from megatrain.model.ported import PortedModel
from megatrain.model.ports import Call, Capture
from megatrain.model.profile import LENGTHS
from megatrain.spec import LayerProfile

WINDOWS = ("sliding_window", "attention_chunk_size")
"""Fields of a config that the library's masks are made by (`transformers.masking_utils`)."""
SMALL = 3
"""Positions of a window that is made small."""

Inputs = Mapping[str, Tensor]
Rows = Callable[[int, int], Inputs]
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
    """What layers are called with. Raises what the model's code raises."""
    capture = Capture(len(ported.ports))
    with torch.no_grad():
        ported.run(capture, ported.placeholders, inputs)
    return capture


def _captured(ported: PortedModel, inputs: Inputs) -> Capture:
    """As `captured`; raises `NotTaken`."""
    try:
        return captured(ported, inputs)
    except Exception as error:  # whatever foreign code raises
        raise NotTaken from error


def of_prologue(ported: PortedModel, rows: Rows) -> LayerProfile:
    """What the prologue hands on, and what it makes. Raises `NotTaken`."""
    records, found = [], []
    for tokens in LENGTHS:
        one = rows(1, tokens)
        records.append(record := Recording())
        with record:
            given = _captured(ported, one)
        found.append((_sizes(given), _sizes(_captured(ported, rows(2, tokens)))))
    (one_short, two_short), (one_long, two_long) = found
    if len({len(each) for each in (one_short, two_short, one_long, two_long)}) > 1:
        one_short, two_short, one_long, two_long = ([sum(each)] for each in (one_short, two_short, one_long, two_long))
    shared, apart = [0.0, 0.0], [0.0, 0.0]
    for less, twice, more in zip(one_short, two_short, one_long, strict=True):
        fixed, each, by_length = growth(less, more, LENGTHS)
        into = apart if twice > less else shared
        into[0] += each + fixed / LENGTHS[0]
        into[1] += by_length
    device, host = widest_of(records, LENGTHS)
    return LayerProfile(
        arguments_nbytes=shared[0],
        arguments_nbytes_by_length=shared[1],
        arguments_row_nbytes=apart[0],
        arguments_row_nbytes_by_length=apart[1],
        forward_moments=device,
        host_forward_moments=host,
    )


def _sizes(capture: Capture) -> list[int]:
    """Bytes of each storage that layers are called with, the hidden state apart."""
    assert capture.hidden is not None
    given = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in _given(capture.calls)}
    given.pop(capture.hidden.untyped_storage().data_ptr(), None)
    return list(given.values())


def _given(calls: list[Call]) -> list[Tensor]:
    return [tensor for call in calls for tensor in call.tensors()]


def with_rows(ported: PortedModel) -> LayerProfile:
    """The profile of the prologue, with those for other rows where the model takes them. Raises what its code raises of
    whole ones."""
    try:
        profile = of_prologue(ported, whole)
    except NotTaken as error:
        raise error.__cause__ or error from None
    others: dict[str, LayerProfile | None] = {}
    for name, rows in (("padded", padded), ("packed", packed)):
        others[name] = _tried(lambda rows=rows: of_prologue(ported, rows))  # type: ignore[misc]
    if windows_of(ported):
        with small_windows(ported):
            others["masked"] = _tried(lambda: of_prologue(ported, whole))
    told = {name: None if other == profile else other for name, other in others.items()}
    return replace(profile, masked=told.get("masked"), padded=told["padded"], packed=told["packed"])


def _tried(run: Callable[[], Any]) -> Any:
    """`None` where the model's code takes no such rows."""
    try:
        return run()
    except NotTaken:
        return None


# Windows --------------------------------------------------------------------------------------------------------------


def windows_of(ported: PortedModel) -> dict[int, int]:
    """Layer -> the positions that it attends to at most, of those that are told by a mask."""
    found: dict[int, int] = {}
    configs = _configs(ported)
    plain = captured(ported, whole(1, LENGTHS[0]))
    for name in WINDOWS:
        sizes = [int(size) for size in (getattr(each, name, 0) for each in configs) if _is_size(size)]
        if not sizes:
            continue
        with small_windows(ported, name):
            small = _tried(lambda: _captured(ported, whole(1, LENGTHS[0])))
        for index in range(len(plain.calls) if small else 0):
            if not alike(plain, small, index):
                found[index] = min(sizes)
    return found


@contextmanager
def small_windows(ported: PortedModel, *names: str) -> Iterator[None]:
    """In the block, windows of the config are smaller than the tiny runs."""
    before = [
        (each, name, getattr(each, name))
        for each in _configs(ported)
        for name in names or WINDOWS
        if _is_size(getattr(each, name, None))
    ]
    try:
        for each, name, size in before:
            setattr(each, name, min(size, SMALL))
        yield
    finally:
        for each, name, size in before:
            setattr(each, name, size)


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
