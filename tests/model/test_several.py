"""Layers that take more of several rows than as many times what they take of one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.model.moments import SHORT, Differentiable, Living, forward_moments, moments_anywhere
from megatrain.model.several import with_several
from megatrain.profiles import LayerProfile

WIDTH = 8


def scored(shares: bool) -> tuple[nn.Module, list[Differentiable]]:
    """Scores of each token's heads with keys that all heads have in common, or with none: of one row, and of two."""
    layer = nn.Linear(WIDTH, 4 * WIDTH, bias=False)

    def of(rows: int) -> Differentiable:
        def run(tokens: int) -> tuple[Tensor, list[Tensor], Tensor]:
            given = torch.zeros(rows, tokens, WIDTH, requires_grad=True)
            heads = layer(given).view(rows, tokens, 4, WIDTH)
            scores = torch.matmul(heads, given.transpose(1, 2).unsqueeze(1)) if shares else heads.sigmoid()
            return given + scores.mean((-1, -2)).unsqueeze(-1), [layer.weight], given

        return run

    return layer, [of(1), of(2)]


def profile_of(one: Differentiable) -> LayerProfile:
    device, host, lengths = moments_anywhere(one, SHORT)
    forward, on_host = forward_moments(one, lengths)
    return LayerProfile(moments=device, host_moments=host, forward_moments=forward, host_forward_moments=on_host)


def test_what_is_copied_for_each_row_is_counted_where_there_are_several() -> None:
    layer, (one, two) = scored(shares=True)
    profile = with_several(profile_of(one), layer, (), two)
    assert profile.several is not None
    living = Living()
    with torch.no_grad(), living:
        two(100)
    said, alone = (max(m.nbytes(200, 100, 0) for m in of.forward_moments) for of in (profile.several, profile))
    assert alone < 0.5 * living.peak
    assert living.peak <= said <= 1.01 * living.peak


def test_a_layer_that_shares_nothing_is_learned_of_one_row() -> None:
    layer, (one, two) = scored(shares=False)
    profile = profile_of(one)
    assert with_several(profile, layer, (), two) == profile
