"""The widest moments of a layer's backward: what they are made of, and that large results need not be computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatrain.model import likeness, moments, port_model
from megatrain.model.moments import Living, moments_of
from tests.tiny import tiny_model


def test_two_products_meet_as_they_must() -> None:
    """Of sigmoid(x A) B: autograd keeps the sigmoid; its gradient and that of its input exist with it."""
    up, down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def run(tokens: int) -> tuple[Tensor, list[Tensor], Tensor]:
        given = torch.zeros(1, tokens, 8, requires_grad=True)
        return down(up(given).sigmoid()), [up.weight, down.weight], given

    device, host = moments_of(run, (8, 16))
    assert device == host  # float32: a cpu's products take nothing beside
    # 800 tokens: those three, and the input, which the run makes; the output has been let go of.
    assert max(each.nbytes(800, 800, 0) for each in device) == pytest.approx(4 * 800 * (3 * 32 + 8), rel=0.01)
    # One token: the gradient of a weight counts.
    assert max(each.nbytes(1, 1, 0) for each in device) >= 4 * 8 * 32


@pytest.mark.parametrize(("family", "numel"), [("llama", 1500), ("mixtral", 4000)])
def test_what_is_not_computed_is_counted_all_the_same(family: str, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From `numel` elements on, which gradients of weights have and activations have not."""
    expected = port_model(tiny_model(family), torch.float32).spec.units[1].profile
    monkeypatch.setattr(moments, "LARGE_NUMEL", numel)
    monkeypatch.setattr(likeness, "_LEARNED", {})
    found = port_model(tiny_model(family), torch.float32).spec.units[1].profile
    for tokens in (1, 100, 10_000):
        widest = [max(each.nbytes(tokens, tokens, 0) for each in profile.moments) for profile in (found, expected)]
        assert widest[0] == pytest.approx(widest[1], rel=0.02)


def test_what_lives_is_followed_to_its_end() -> None:
    living = Living()
    with living:
        kept = torch.ones(100)
        view = kept[:10]
        torch.ones(1000)
    assert (living.peak, living.nbytes) == (4400, 400)
    del kept
    assert living.nbytes == 400
    del view
    assert living.nbytes == 0
