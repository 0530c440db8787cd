"""Lion trains as the loop that its authors published, and needs little code: what all optimizers share is theirs."""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from megatrain.optim import kernels, lion
from tests.stock.test_without_gradients import LION, STEPS, at_times, trained
from tests.tiny import stock_gradients


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.slow), 0.5])
def test_twenty_steps_equal_the_authors_loop(clip: float | None) -> None:
    """google/automl, lion/lion_pytorch.py; a parameter without a gradient is left. All but a few elements, at whose
    step rounding decides about a sign, are equal."""
    model, steps = at_times(), [STEPS[number % len(STEPS)] for number in range(20)]
    start, momenta = dict(at_times().named_parameters()), {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for batches in steps:
        _, gradients = stock_gradients(model, batches)
        for name, p in model.named_parameters():
            p.grad = gradients[name] if gradients[name].any() else None
        nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        for name, p in model.named_parameters():
            if p.grad is not None:
                p.data.mul_(1 - LION.lr * (LION.weight_decay if LION.decays(name, p.shape) else 0))
                update = momenta[name] * 0.9 + p.grad * (1 - 0.9)
                p.data.add_(update.sign_(), alpha=-LION.lr)
                momenta[name].mul_(0.97).add_(p.grad, alpha=1 - 0.97)
    found = trained("cpu" if clip is None else "cpu, clipped", Path(), LION, steps=steps)
    for name, p in model.named_parameters():
        assert ((found[name] - p).abs() > 1e-6).sum() <= 2e-3 * p.numel(), name
        assert torch.equal(p, start[name]) == ("never" in name or not p.numel()), name


def test_the_seam_asks_little_of_an_optimizer() -> None:
    """Less than 150 lines with its kernel and these tests."""
    sources = Path(__file__).read_text(), inspect.getsource(lion), inspect.getsource(kernels.lion)
    assert sum(source.count("\n") for source in sources) < 150
