"""The largest bytes alive in a run: what they are made of, and that large results need not be computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatrain.model import peak, port_model, profile
from megatrain.model.peak import Living, Run, growth_of, peak_of, recorded_backward
from megatrain.spec.layer_profile import Peak
from tests.tiny import tiny_model

LENGTHS = (8, 16, 32)


def fitted(run: Run) -> Peak:
    return peak_of([recorded_backward(run, tokens) for tokens in LENGTHS], LENGTHS)


def test_two_products_meet_as_they_must() -> None:
    """Of sigmoid(x A) B: autograd keeps the sigmoid; its gradient and that of its input exist with it."""
    up, down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def run(tokens: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        given = torch.zeros(1, tokens, 8, requires_grad=True)
        return down(up(given).sigmoid()), [up.weight, down.weight], [given]

    found = fitted(run)
    assert found.device == found.host  # float32: a cpu's products take nothing beside
    # 800 tokens: those three, and the input, which the run makes; the output has been let go of.
    assert found.nbytes(False, 800, 800) == pytest.approx(4 * 800 * (3 * 32 + 8), rel=0.01)
    # One token: the gradient of a weight counts.
    assert found.nbytes(False, 1, 1) >= 4 * 8 * 32


def test_a_run_that_goes_through_positions_one_by_one_is_told_by_its_largest() -> None:
    def run(tokens: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        given = torch.zeros(tokens, 4, requires_grad=True)
        sums = [given[:place].sum(0) for place in range(1, tokens + 1)]
        return torch.stack(sums), [], [given]

    found, further = fitted(run), recorded_backward(run, 100).peak
    assert further <= found.nbytes(False, 100, 100) <= 1.03 * further


def test_no_fit_is_below_what_it_was_made_of() -> None:
    for sizes in ([10, 10, 10], [100, 120, 200], [5, 200, 210], [900, 700, 400], [0, 64, 320]):
        found = growth_of(sizes, LENGTHS)
        for size, tokens in zip(sizes, LENGTHS, strict=True):
            assert found.nbytes(tokens, tokens) >= size - 1e-6


@pytest.mark.parametrize(("family", "numel"), [("llama", 1500), ("mixtral", 4000)])
def test_what_is_not_computed_is_counted_all_the_same(family: str, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From `numel` elements on, which gradients of weights have and activations of the short runs have not."""
    expected = port_model(tiny_model(family), torch.float32).spec.units[1].profile
    monkeypatch.setattr(peak, "LARGE_NUMEL", numel)
    monkeypatch.setattr(profile, "SHORT", 4)
    monkeypatch.setattr(profile, "FURTHER", 20)
    found = port_model(tiny_model(family), torch.float32).spec.units[1].profile
    for tokens in (1, 100, 10_000):
        largest = [each.backward.nbytes(False, tokens, tokens) for each in (found, expected)]
        assert largest[0] == pytest.approx(largest[1], rel=0.02)


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
