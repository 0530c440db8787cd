"""Parameters that are swapped for a call give what `torch.func.functional_call` gives, and are back afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.model.swapped_parameters import SwappedParameters


class Tied(nn.Module):
    """One parameter under two names, and one module at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, given: Tensor) -> Tensor:
        output: Tensor = self.again(self.second(self.first(given)))
        return output


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn_like(parameter).requires_grad_() for name, parameter in module.named_parameters()}


def named(module: nn.Module) -> dict[str, int]:
    """Every name of a parameter -> which one it is."""
    return {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}


def test_outputs_and_gradients_equal_functional_calls() -> None:
    module, given = Tied(), torch.ones(2, 4)
    weights = weights_of(module)
    before = named(module)
    with SwappedParameters(module).holding(weights):
        output = module(given)
    assert named(module) == before
    expected = functional_call(module, weights, (given,))  # which leaves them in a module that is at two places
    assert torch.equal(output, expected)
    ours, theirs = (torch.autograd.grad(each.sum(), [*weights.values()]) for each in (output, expected))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_failing_call_puts_the_parameters_back() -> None:
    module = Tied()
    before = module.first.weight
    with pytest.raises(RuntimeError), SwappedParameters(module).holding(weights_of(module)):
        module(torch.ones(2, 3))
    assert module.first.weight is before is module.second.weight


def test_another_name_is_refused_before_anything_is_swapped() -> None:
    module = Tied()
    before = module.first.weight
    with pytest.raises(KeyError):
        SwappedParameters(module).holding({"first.weight": torch.zeros(4, 4), "third": torch.zeros(1)})
    assert module.first.weight is before
