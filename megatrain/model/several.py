"""Layers that take more of several rows than as many times what they take of one.

A product of tensors of which one is shared by heads or positions needs no copy of it for one row, and for several it
makes one for each: a layer that is learned of one row is then said to take too little. So each is run once on
two rows, and learned of two where they take more than twice; never less than of one, whose lengths may tell more of
layers that pad.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatrain.model.moments import (
    SHORT,
    Differentiable,
    Recording,
    Sparing,
    forward_moments,
    moments_anywhere,
    recorded,
)
from megatrain.model.profile import kept_growth
from megatrain.model.tokenwise import in_chunks
from megatrain.profiles import LayerProfile
from megatrain.spec import Moment

ROWS = 2
"""Of the runs."""
TOKENS = 32
"""Of each row of the one that shows whether rows take more: enough for what grows with their square to show."""


def with_several(profile: LayerProfile, layer: nn.Module, parts: Sequence[str], twice: Differentiable) -> LayerProfile:
    """The profile, with what the layer takes of several rows. twice: as for `moments_of`, of `ROWS` rows of so many
    tokens each; parts: names of the layer's token-wise parts."""
    if not any(_exceeds(twice, profile)):
        return profile
    device, host, lengths = moments_anywhere(twice, SHORT)
    forward, host_forward = forward_moments(twice, lengths)

    def in_halves(tokens: int) -> tuple[Tensor, Sequence[Tensor], Tensor]:
        with in_chunks(layer, parts, tokens // 2):
            return twice(tokens)

    def run(tokens: int) -> tuple[Tensor, Sequence[Tensor]]:
        with Sparing():  # type: ignore[no-untyped-call]
            return twice(tokens)[:2]

    chunked, host_chunked, _ = moments_anywhere(in_halves, lengths) if parts else ((), (), lengths)
    each, by_length = kept_growth(run, lengths)
    found = replace(
        profile,
        moments=(*profile.moments, *_of_a_row(device)),
        host_moments=(*profile.host_moments, *_of_a_row(host)),
        chunked_moments=(*profile.chunked_moments, *_of_a_row(chunked)),
        host_chunked_moments=(*profile.host_chunked_moments, *_of_a_row(host_chunked)),
        forward_moments=(*profile.forward_moments, *_of_a_row(forward)),
        host_forward_moments=(*profile.host_forward_moments, *_of_a_row(host_forward)),
        kept_nbytes=max(profile.kept_nbytes, each / ROWS),
        kept_nbytes_by_length=max(profile.kept_nbytes_by_length, by_length / ROWS),
        masked=None,
    )
    return replace(profile, several=found)


def _exceeds(twice: Differentiable, profile: LayerProfile) -> Iterator[bool]:
    """Whether a forward makes more than is said, and forward and backward; not where it takes fewer tokens."""

    def forward() -> int:
        record = Recording()
        with torch.no_grad(), record:
            twice(TOKENS)
        return record.peak

    for moments, run in (
        (profile.forward_moments, forward),
        (profile.moments, lambda: recorded(twice, TOKENS).peak),
    ):
        try:
            yield 0 < max((each.nbytes(ROWS * TOKENS, TOKENS, 0) for each in moments), default=0.0) < run()
        except (RuntimeError, IndexError, ValueError):
            yield False


def _of_a_row(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """What grew with the tokens of each row, by tokens of all rows; chunks are of tokens of all rows already."""
    return tuple(
        replace(each, per_token=each.per_token / ROWS, per_token_by_length=each.per_token_by_length / ROWS)
        for each in moments
    )
