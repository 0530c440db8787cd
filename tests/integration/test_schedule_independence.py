"""No number depends on the schedule: slots, shards, activation plans, tiers, the adversary's order (invariant 1)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain import AdamW, Engine, Policy
from megatrain.errors import PlanError
from megatrain.spec import Numerics, Precision
from tests.tiny import batch, equal, tiny_model, unequal_batches

SEEDS = 200


def run(
    device: str, precision: Precision, policy: Policy, family: str = "llama", steps: int = 2, **model: float
) -> dict[str, Tensor]:
    """Gradients, then losses and weights after a few steps, as one comparable mapping."""
    clip = None if policy.update == "during_backward" else 0.5
    with Engine.from_model(
        tiny_model(family, **model),
        device,
        numerics=Numerics(precision, loss_chunk_tokens=5),
        optimizer=AdamW(lr=1e-2),
        max_grad_norm=clip,
        policy=policy,
        seed=4,
    ) as engine:
        result = {f"gradient {name}": g for name, g in engine.gradients(unequal_batches(3)).items()}
        losses = [engine.step(unequal_batches(3)).loss for _ in range(steps)]
        result["losses"] = torch.tensor([*losses, engine.evaluate(unequal_batches(2))], dtype=torch.float64)
        return result | engine.master_weights()


def trained(device: str, precision: Precision, policy: Policy, family: str) -> dict[str, Tensor]:
    """Losses and weights after two steps, the second of which applies the first one's updates."""
    with Engine.from_model(
        tiny_model(family),
        device,
        precision,
        AdamW(lr=1e-2),
        0.5,
        policy,
        seed=4,
        verify=False,
        numerics=Numerics(precision, loss_chunk_tokens=5),
    ) as engine:
        losses = [engine.step(unequal_batches(2)).loss for _ in range(2)]
        return {"losses": torch.tensor(losses, dtype=torch.float64)} | engine.master_weights()


@cache
def reference(
    precision: Precision, update: str = "next_forward", family: str = "llama", **model: float
) -> dict[str, Tensor]:
    """The plainest schedule: host memory, whole units, kept graphs."""
    policy = Policy(shares_memory=True, activations="keep", update=update)  # type: ignore[arg-type]
    return run("cpu", precision, policy, family, **model)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("precision", "family", "seeds"),
    [
        ("fp32", "llama", range(5)),
        ("bf16", "llama-tied", range(10, 15)),
        pytest.param("fp32", "llama", range(5, 10), marks=pytest.mark.slow),
        pytest.param("bf16", "llama-tied", range(15, 20), marks=pytest.mark.slow),
        *(
            pytest.param(precision, family, range(32, 32 + SEEDS // 4), marks=pytest.mark.slow)
            for precision in ("bf16", "fp32")
            for family in ("llama", "llama-tied")
        ),
    ],
)
def test_two_hundred_hostile_schedules_change_no_bit(precision: Precision, family: str, seeds: range) -> None:
    plainest = Policy(shares_memory=True, activations="keep")
    expected = trained("cpu", precision, plainest, family)
    policy = Policy(shard_nbytes=3000)
    for seed in seeds:
        assert equal(trained(f"sim:{seed}", precision, policy, family), expected), f"seed {seed}"


@settings(max_examples=settings.default.max_examples // 5 if settings.default.max_examples > 100 else 1)
@given(
    slots=st.integers(1, 5),
    grad_slots=st.integers(1, 4),
    shard=st.sampled_from([2048, 1, 300, 10**9]),
    activations=st.sampled_from(["keep", "recompute"]),
    update=st.sampled_from(["next_forward", "during_backward"]),
    precision=st.sampled_from(["bf16", "fp32"]),
    seed=st.integers(0, 10**6),
    family=st.sampled_from(["llama", "llama-tied", "gemma4"]),
    in_round=st.integers(0, 2),
)
def test_any_policy_gives_the_same_bits(
    slots: int,
    grad_slots: int,
    shard: int,
    activations: str,
    update: str,
    precision: Precision,
    seed: int,
    family: str,
    in_round: int,
) -> None:
    policy = Policy(
        weight_slots=slots,
        grad_slots=grad_slots,
        shard_nbytes=shard,
        activations=activations,  # type: ignore[arg-type]
        update=update,
        micro_batches_per_round=0 if family == "llama-tied" else in_round,
    )
    expected = reference(precision, update, family)
    assert equal(run(f"sim:{seed}", precision, policy, family), expected)
    assert equal(run("cpu", precision, policy, family), expected)
    assert equal(run("cpu", precision, replace(policy, shares_memory=True), family), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("activations", "device"),
    [
        ("recompute", "cpu"),
        ("keep", "sim:9"),
        pytest.param("keep", "cpu", marks=pytest.mark.slow),
        pytest.param("recompute", "sim:9", marks=pytest.mark.slow),
    ],
)
def test_dropout_is_replayed_exactly_whatever_the_schedule(activations: str, device: str) -> None:
    dropout = {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.1}
    expected = reference("fp32", family="gpt2", **dropout)
    assert not equal(expected, reference("fp32", family="gpt2")), "the dropout must be at work"
    policy = Policy(activations=activations, shard_nbytes=999)  # type: ignore[arg-type]
    assert equal(run(device, "fp32", policy, "gpt2", **dropout), expected)


def test_micro_batch_order_changes_at_most_rounding() -> None:
    two, three = unequal_batches(2), unequal_batches(3)
    with Engine.from_model(tiny_model(), precision="fp32") as engine:
        assert equal(engine.gradients(two), engine.gradients(two[::-1]))
        forward, backward = engine.gradients(three), engine.gradients(three[::-1])
    for name, gradient in forward.items():
        torch.testing.assert_close(backward[name], gradient, rtol=1e-5, atol=1e-8)


def test_replanning_between_steps_changes_no_bit() -> None:
    """Work of another shape, and with it another schedule, in between."""
    policy = Policy(shard_nbytes=2048)
    with Engine.from_model(tiny_model(), "sim:1", "bf16", policy=policy) as left:
        left.step(unequal_batches(1))
        left.evaluate([batch(3, 20, 5)])
        left.step(unequal_batches(3))
        found = left.master_weights()
    with Engine.from_model(tiny_model(), "cpu", "bf16") as right:
        right.step(unequal_batches(1))
        right.step(unequal_batches(3))
        assert equal(found, right.master_weights())


def test_numerics_do_not_change_with_the_policy() -> None:
    numerics = Numerics("fp32", loss_chunk_tokens=5)
    with pytest.raises(PlanError, match="numerics: precision is 'bf16' but the numerics' is 'fp32'"):
        Engine.from_model(tiny_model(), precision="bf16", numerics=numerics)
    with Engine.from_model(tiny_model(), "sim:1", numerics=numerics, verify=False) as engine:
        engine.adopt(replace(engine.policy, weight_slots=3, wait_for="shard", shard_nbytes=3000, activations="keep"))
        assert engine.numerics == numerics
        for stays in ({"update": "during_backward"}, {"transfer": "pageable"}):
            with pytest.raises(PlanError, match="cannot change during training"):
                engine.adopt(replace(engine.policy, **stays))  # type: ignore[arg-type]
