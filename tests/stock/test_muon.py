"""Training with Muon equals `torch.optim.Muon` and `torch.optim.AdamW` in a plain loop, matrix by matrix.

torch makes directions orthogonal in bfloat16 only. For a comparison without its noise, the loop is made to do so in
float32, as `Muon(newton_schulz="fp32")` does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain import AdamW, Engine, Policy
from megatrain.optim import Muon
from tests.kinds import stock_model, tiny_config
from tests.tiny import relative_error, stock_gradients, tiny_model, unequal_batches

FAMILIES = ["llama", "llama-tied", "gpt2", "mixtral", "phi3", "bamba"]
"""Dense, tied, with weights of inputs first, stacked experts, fused projections, and layers of two kinds."""
STEPS = 20
CLIP = 1.0


def model_of(family: str) -> PreTrainedModel:
    if family in ("phi3", "bamba"):
        return stock_model(tiny_config(family), 0)
    return tiny_model(family)


def muon(form: str, **changes: Any) -> Muon:
    return Muon(lr=1e-2, adamw=AdamW(lr=3e-3, weight_decay=0.1), newton_schulz=form, **changes)  # type: ignore[arg-type]


@cache
def in_a_plain_loop(
    family: str, steps: int, matrices: tuple[tuple[str, int], ...], dtype: torch.dtype = torch.float32
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights. matrices: (name, how many are stacked) of the parameters that are updated whole."""
    model, algorithm, stacked = model_of(family).to(dtype), muon("bf16"), dict(matrices)
    if dtype == torch.float64 and hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation("eager")  # the grouped products know no float64
    named = dict(model.named_parameters())
    parts = {name: named[name].data.view(count, -1, named[name].shape[-1]) for name, count in matrices}
    whole = {(name, i): nn.Parameter(part) for name, stack in parts.items() for i, part in enumerate(stack)}
    adamw, keys = algorithm.elementwise, ("lr", "weight_decay", "momentum", "nesterov", "adjust_lr_fn")
    optimizers = [
        torch.optim.Muon(list(whole.values()), **{key: getattr(algorithm, key) for key in keys}),
        torch.optim.AdamW(
            [parameter for name, parameter in named.items() if name not in stacked],
            lr=adamw.lr,
            weight_decay=adamw.weight_decay,
        ),
    ]
    losses = []
    for _ in range(steps):
        loss, gradients = stock_gradients(model, unequal_batches(2))
        for name, parameter in named.items():
            parameter.grad = gradients[name]
        nn.utils.clip_grad_norm_(list(named.values()), CLIP)
        for (name, index), part in whole.items():
            gradient = named[name].grad
            assert gradient is not None
            part.grad = gradient.view(parts[name].shape)[index].clone()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss)
    return losses, {name: parameter.detach().clone() for name, parameter in named.items()}


def trained(family: str, device: str, form: str, steps: int) -> tuple[list[float], dict[str, Tensor], dict[str, int]]:
    policy = Policy(shares_memory=device == "cpu")
    with Engine.from_model(model_of(family), device, "fp32", muon(form), CLIP, policy, verify=False) as engine:
        losses = [engine.step(unequal_batches(2)).loss for _ in range(steps)]
        params = [param for unit in engine.structure.units for param in unit.params]
        return losses, engine.master_weights(), {param.name: param.matrices for param in params if param.matrices}


def largest_error(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of a parameter. The biases of GPT-2's keys are left out: their gradients are nothing
    but rounding, which AdamW makes steps of."""
    return max(relative_error(weights[name], expected[name]) for name in expected if "c_attn.bias" not in name)


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_plain_loop.cache_clear()
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)


def quick_only(*quick: str) -> list[Any]:
    """All families, of which the others are slow."""
    return [pytest.param(family, marks=() if family in quick else pytest.mark.slow) for family in FAMILIES]


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "sim:3"])
@pytest.mark.parametrize("family", quick_only("llama"))
def test_twenty_steps_in_float32_are_as_exact_as_those_of_torch(family: str, device: str) -> None:
    """Of the same loop in float64, both miss some 1e-5 of a weight: Newton-Schulz makes a small singular value, which
    is mostly rounding, up to 3.4445**5 times larger. Which of the two is nearer is chance."""
    losses, weights, matrices = trained(family, device, "fp32", STEPS)
    stock, exact = (
        in_a_plain_loop(family, STEPS, tuple(matrices.items()), dtype) for dtype in (torch.float32, torch.float64)
    )
    assert losses[-1] < losses[0] - 0.5
    assert losses == pytest.approx(exact[0], rel=1e-5)
    assert largest_error(weights, exact[1]) < 3 * largest_error(stock[1], exact[1]) < 1e-4


@pytest.mark.parametrize("family", quick_only("mixtral"))
def test_a_step_in_bfloat16_equals_that_of_torch_but_for_rounding(family: str) -> None:
    """Directions differ by a few of the last bits of bfloat16, of which a step makes less than a tenth of a weight."""
    in_a_plain_loop.cache_clear()
    losses, weights, matrices = trained(family, "cpu", "bf16", 1)
    expected, stock = in_a_plain_loop(family, 1, tuple(matrices.items()))
    assert losses == pytest.approx(expected, rel=1e-2)
    assert largest_error(weights, stock) < 5e-3
