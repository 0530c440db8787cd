"""The engine computes what the stock model computes: loss, every gradient, and the weights after many steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatrain import AdamW, Engine, LogProbLoss, Policy
from megatrain.engine import MicroBatch
from megatrain.optim.split_master import split
from megatrain.spec import Numerics, Placement
from tests.references import reference_update
from tests.tiny import (
    FAMILIES,
    batch,
    equal,
    relative_error,
    stock_gradients,
    target_tokens,
    tiny_model,
    unequal_batches,
)

TOLERANCE = 1e-6


NUMERICS = Numerics("fp32", loss_chunk_tokens=7)


def policy_for(device: str, **changes: object) -> Policy:
    small = {"shares_memory": device == "cpu", "shard_nbytes": 4096}
    return Policy(**{**small, **changes})  # type: ignore[arg-type]


PAIRS = [(("cpu", "keep"), ("sim:5", "recompute")), (("cpu", "recompute"), ("sim:5", "keep"))]
CASES = [(family, *how) for place, family in enumerate(FAMILIES) for how in PAIRS[place % 2]]
"""Each family on both devices and in both plans; the first one in all four ways."""


@pytest.mark.few(8)
@pytest.mark.parametrize(("family", "device", "activations"), [*CASES, *(("llama", *how) for how in PAIRS[1])])
def test_loss_and_every_gradient_equal_the_stock_model(family: str, device: str, activations: str) -> None:
    model = tiny_model(family)
    batches = unequal_batches()
    loss, expected = stock_gradients(model, batches)
    policy = policy_for(device, activations=activations)
    with Engine.from_model(model, device=device, numerics=NUMERICS, policy=policy, verify=False) as engine:
        found = engine.gradients(batches)
        assert engine.evaluate(batches) == pytest.approx(loss, rel=TOLERANCE)
        assert engine.step(batches).loss == pytest.approx(loss, rel=TOLERANCE)
    assert found.keys() == expected.keys()
    worst = max(expected, key=lambda name: relative_error(found[name], expected[name]))
    assert relative_error(found[worst], expected[worst]) < TOLERANCE, worst


def test_unused_experts_have_zero_gradients() -> None:
    model = tiny_model("qwen3-moe", num_experts=32)
    one_token = [{"input_ids": torch.full((1, 3), 7), "labels": torch.full((1, 3), 7)}]
    _, expected = stock_gradients(model, one_token)
    idle = [name for name, gradient in expected.items() if "experts" in name and bool((gradient == 0).any())]
    assert idle, "the test must have an idle expert"
    with Engine.from_model(model, numerics=NUMERICS, policy=policy_for("cpu"), verify=False) as engine:
        engine.gradients(unequal_batches())  # leaves other gradients behind in every buffer
        found = engine.gradients(one_token)
    for name in idle:
        assert torch.equal(found[name] == 0, expected[name] == 0)


def test_parameters_outside_the_graph_have_zero_gradients() -> None:
    model = tiny_model("llama")
    model.model.unused = torch.nn.Parameter(torch.ones(5))
    with Engine.from_model(
        model, numerics=NUMERICS, policy=policy_for("sim:1"), device="sim:1", verify=False
    ) as engine:
        assert not engine.gradients(unequal_batches())["model.unused"].any()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "device", "clip"),
    [
        pytest.param("llama", "sim:2", 0.5, marks=pytest.mark.slow),
        pytest.param("llama", "cpu", None, marks=pytest.mark.slow),
        ("qwen3-tied", "sim:2", 0.5),
        ("gpt2", "cpu", None),
    ],
)
def test_twenty_steps_equal_a_plain_pytorch_loop(family: str, device: str, clip: float | None) -> None:
    """Clipping, weight decay on some parameters, accumulation over micro-batches, a learning rate that moves."""
    model = tiny_model(family)
    settings = AdamW(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, no_decay=("*norm*", "*bias"))
    plain = tiny_model(family)
    decays = [p for n, p in plain.named_parameters() if settings.decays(n, p.shape)]
    others = [p for n, p in plain.named_parameters() if not settings.decays(n, p.shape)]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    update = "during_backward" if clip is None else "next_forward"
    with Engine.from_model(
        model,
        device,
        "fp32",
        settings,
        max_grad_norm=clip,
        policy=policy_for(device, update=update),
        verify=False,
        numerics=NUMERICS,
    ) as engine:
        for step in range(20):
            batches = [batch(2, 9, 100 + step, padded=2), batch(1, 12, 200 + step)]
            rate = 3e-3 * (1 + step) / 20
            loss, gradients = stock_gradients(plain, batches)
            for name, parameter in plain.named_parameters():
                parameter.grad = gradients[name]
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or math.inf).item()
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            out = engine.step(batches, lr=rate)
            assert out.loss == pytest.approx(loss, rel=2e-4)
            assert out.grad_norm == pytest.approx(norm, rel=2e-3)
        masters = engine.master_weights()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(masters[name], parameter.detach(), rtol=2e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    ("device", "placements"), [("cpu", ()), ("sim:2", (Placement("device", "device", "device"),) * 5)]
)
def test_unclipped_gradients_of_1e20_train_as_in_pytorch(device: str, placements: tuple[Placement, ...]) -> None:
    """A sum that is not divided by the target tokens, scaled up: no weight dies of it, on the host or on the device."""
    batches = [batch(2, 9, 0)]
    plain = tiny_model()
    _, gradients = stock_gradients(plain, batches)
    for name, parameter in plain.named_parameters():
        parameter.grad = gradients[name] * target_tokens(batches) * 1e20
    assert max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None) > 2e19
    torch.optim.AdamW(plain.parameters(), lr=1e-2).step()

    class Sum(LogProbLoss):
        def __call__(self, log_probs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
            return -1e20 * log_probs.sum()

        def divisor(self, batch: MicroBatch) -> float:
            return 1.0

    policy = policy_for(device, placements=placements)
    with Engine.from_model(
        tiny_model(), device, "fp32", AdamW(lr=1e-2), max_grad_norm=None, policy=policy, verify=False, numerics=NUMERICS
    ) as engine:
        engine.step(batches, loss_fn=Sum())
        masters = engine.master_weights()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(masters[name], parameter.detach(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "llama-tied"])
def test_bf16_weights_are_bit_equal_to_a_run_with_whole_float32_masters(family: str) -> None:
    """The reference holds float32 masters, rounds them for each step, and updates them with numpy AdamW."""
    model = tiny_model(family)
    settings = AdamW(lr=2e-3, weight_decay=0.1)
    masters = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    moments = {name: (np.zeros_like(w.reshape(-1)), np.zeros_like(w.reshape(-1))) for name, w in masters.items()}
    with Engine.from_model(model, "cpu", "bf16", settings, max_grad_norm=0.5, verify=False) as engine:
        for step in range(10):
            batches = [batch(2, 9, step), batch(2, 5, 50 + step, padded=1)]
            gradients = _gradients_at(model, masters, batches)
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
            scalars = settings.scalars(lr=2e-3, step=step + 1, grad_scale=min(1.0, 0.5 / (norm + 1e-6)))
            out = engine.step(batches)
            assert out.grad_norm == pytest.approx(norm, rel=1e-12)
            for name, gradient in gradients.items():
                m, v = moments[name]
                flat = masters[name].reshape(-1)
                reference_update(flat, m, v, gradient.reshape(-1).numpy(), scalars, [(0, flat.size, True)])
        found = engine.master_weights()
    assert equal(found, {name: torch.from_numpy(w) for name, w in masters.items()})


def _gradients_at(
    model: torch.nn.Module, masters: dict[str, np.ndarray], batches: list[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Gradients in bf16 at rounded masters, from a fresh engine on another device with another schedule."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            hi, _ = split(masters[name].reshape(-1))
            rounded = torch.from_numpy(hi.view(np.int16)).view(torch.bfloat16).float()
            parameter.copy_(rounded.view(parameter.shape))
    policy = Policy(weight_slots=1, grad_slots=1, shard_nbytes=512, activations="recompute")
    with Engine.from_model(model, "sim:11", "bf16", policy=policy, verify=False) as engine:
        return engine.gradients(batches)


def test_bf16_gradients_are_close_to_the_stock_model() -> None:
    """Not just to themselves: within bfloat16's rounding of the float32 truth."""
    model = tiny_model("llama")
    _, expected = stock_gradients(model, unequal_batches())
    with Engine.from_model(model, precision="bf16") as engine:
        found = engine.gradients(unequal_batches())
    assert max(relative_error(found[name], expected[name]) for name in expected) < 0.03


def test_the_step_leaves_the_users_random_state_alone() -> None:
    with Engine.from_model(tiny_model(), precision="fp32") as engine:
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        engine.step(unequal_batches())
        assert torch.equal(torch.rand(4), expected)


def test_the_users_model_is_left_as_it_was() -> None:
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Engine.from_model(model, precision="bf16", optimizer=AdamW(lr=0.1)) as engine:
        engine.step(unequal_batches())
        assert not equal(engine.master_weights(), before)
    assert equal({name: p.detach() for name, p in model.named_parameters()}, before)
