"""Rotary embeddings of every kind, among them those that change with the length of a sequence, as the library computes
them.

The library keeps what it has computed for one sequence until the next. With `dynamic` a shorter sequence after a longer
one is then rotated by the longer one's frequencies, so that a loss depends on what came before. Here each micro-batch
is computed as the library computes it first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain import Engine, Policy
from megatrain.errors import BatchError
from megatrain.spec import Numerics
from megatrain.train.parity import stock_loss
from tests.tiny import causal_lm_from_config, tiny_model

ORIGINAL = 16
FACTORS: dict[str, Any] = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 3.0, 6.0, 12.0]}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "low_freq_factor": 1.0}
    | {"high_freq_factor": 4.0},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, **FACTORS},
}
CHANGES_WITH_LENGTH = ("dynamic", "longrope")
ORDERS = ((8, 40), (40, 8), (40, 24), (24, 40), (40, 16, 17))
"""Tokens of each micro-batch of a step, below and above `ORIGINAL`."""


def some_slow(values: Iterable[Any]) -> list[Any]:
    """The values as parameters of slow cases; the other cases stay in the quick suite."""
    return [pytest.param(each, marks=pytest.mark.slow) for each in values]


def model_with(rope: str) -> PreTrainedModel:
    parameters = {"rope_type": rope, "rope_theta": 1e4, **ROPES[rope]}
    positions = ORIGINAL if rope == "dynamic" else 4 * ORIGINAL
    model: PreTrainedModel = tiny_model(
        max_position_embeddings=positions, num_hidden_layers=2, rope_parameters=parameters
    )
    return model


def batches(order: Sequence[int]) -> list[dict[str, Tensor]]:
    ids = [torch.randint(3, 96, (1, each), generator=torch.Generator().manual_seed(each)) for each in order]
    return [{"input_ids": each, "labels": each.clone()} for each in ids]


def stock(models: Sequence[PreTrainedModel], order: Sequence[int]) -> dict[str, Tensor]:
    """Loss and gradients of a step, each micro-batch computed by a model of its own, or all by one."""
    targets = sum(order) - len(order)
    total: dict[str, Tensor] = {"loss": torch.zeros(())}
    for model in models:
        model.zero_grad()
    for place, each in enumerate(batches(order)):
        model = models[place % len(models)]
        loss = stock_loss(model, each) * (order[place] - 1) / targets
        loss.backward()
        total["loss"] += loss.detach()
    for name in dict(models[0].named_parameters()):
        gradients = [model.get_parameter(name).grad for model in models]
        total[name] = torch.stack([each for each in gradients if each is not None]).sum(0)
    return total


def ours(model: PreTrainedModel, order: Sequence[int], device: str = "cpu", **policy: Any) -> dict[str, Tensor]:
    numerics, how = Numerics("fp32", loss_chunk_tokens=7), Policy(shares_memory=device == "cpu", **policy)
    with Engine.from_model(model, device, numerics=numerics, policy=how, verify=False) as engine:
        gradients = engine.gradients(batches(order))
        return {"loss": torch.tensor(engine.step(batches(order)).loss), **gradients}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= 2e-6 * max(1e-2, float(value.norm())), name


@pytest.mark.parametrize("order", [*ORDERS[:2], *some_slow(ORDERS[2:])], ids=str)
@pytest.mark.parametrize("rope", CHANGES_WITH_LENGTH)
def test_each_micro_batch_is_rotated_for_its_own_length(rope: str, order: tuple[int, ...]) -> None:
    model = model_with(rope)
    assert_equal(ours(model, order), stock([copy.deepcopy(model) for _ in order], order))


@pytest.mark.parametrize("rope", [*some_slow(("default", "linear")), "dynamic", "yarn", "llama3", "longrope"])
def test_every_kind_of_rotary_embedding_equals_the_library(rope: str) -> None:
    model = model_with(rope)
    assert_equal(ours(model, (40,)), stock([copy.deepcopy(model)], (40,)))
    assert_equal(ours(model, (8,)), stock([copy.deepcopy(model)], (8,)))


@pytest.mark.parametrize("order", [(8, 40), *some_slow(((40, 8), (40, 16, 17)))], ids=str)
def test_a_published_longrope_config_equals_one_model_that_sees_all(order: tuple[int, ...]) -> None:
    """Phi-4-mini's fields: part of each head rotated, a tied head, a factor that follows from the positions. Of what
    the library keeps between calls, nothing counts with `longrope`."""
    fields: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    fields |= {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "tie_word_embeddings": True}
    fields |= {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.5}
    fields |= {
        "sliding_window": 262144,
        "pad_token_id": 0,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "longrope", **FACTORS},
    }
    model = causal_lm_from_config({"model_type": "phi3", **fields}, 0)
    assert_equal(ours(model, order), stock([copy.deepcopy(model)], order))


@pytest.mark.parametrize("rope", [*some_slow(("dynamic",)), "longrope"])
def test_no_schedule_and_nothing_seen_before_changes_a_bit(rope: str) -> None:
    """Recomputing, rounds and another device call the model's code in another order."""
    model, order = model_with(rope), (40, 24, 8, 17)
    expected = ours(model, order, activations="keep")
    used = copy.deepcopy(model)
    stock_loss(used, batches((50,))[0])
    variants = [
        ours(used, order),
        ours(model, order, activations_by_layer=(("drop", "graph"), ("input",))),
        ours(model, order, "sim:3", micro_batches_per_round=1, weight_slots=1, shard_nbytes=1 << 10),
        ours(model, order, "sim:4", wait_for="shard"),
    ]
    for found in variants:
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    alone = ours(model, (24,))
    with Engine.from_model(model, policy=Policy(shares_memory=True), numerics=Numerics("fp32"), verify=False) as engine:
        engine.evaluate(batches((60,)))
        assert engine.evaluate(batches((24,))) == pytest.approx(float(alone["loss"]), rel=1e-6)


class WithTable(nn.Module):
    """A part of a layer with a table of its own, made anew for longer texts, by which it scales: older code and code
    from the hub compute rotary tables so."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.length = inner, ORIGINAL
        self.register_buffer("table", torch.ones(ORIGINAL), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.register_buffer("table", torch.full((self.length,), self.length / ORIGINAL), persistent=False)
        scaled: Tensor = self.inner(x) * self.table[: x.shape[1], None]
        return scaled


@pytest.mark.parametrize("policy", [{}, {"micro_batches_per_round": 1}, {"activations": "keep"}], ids=str)
def test_tables_inside_layers_are_those_of_the_micro_batch_alone(policy: dict[str, Any]) -> None:
    model, order = tiny_model(num_hidden_layers=2, max_position_embeddings=64), (8, 40, 24, 12)
    for layer in model.model.layers:
        layer.mlp = WithTable(layer.mlp)
    expected = stock([copy.deepcopy(model) for _ in order], order)
    assert_equal(ours(model, order, **policy), expected)
    assert_equal(ours(model, order, "sim:5", weight_slots=1, **policy), expected)


def test_dynamic_embeddings_reach_as_far_as_their_factor_stretches_them() -> None:
    model = model_with("dynamic")
    ours(model, (4 * ORIGINAL,))
    with pytest.raises(BatchError, match="65 tokens long, but the model has 64 positions"):
        ours(model, (4 * ORIGINAL + 1,))


@pytest.mark.parametrize("rope", [*some_slow(("dynamic",)), "longrope"])
def test_generation_beyond_the_original_length_equals_the_library(rope: str) -> None:
    model = model_with(rope).eval()
    prompt = batches((12,))[0]["input_ids"]
    with Engine.from_model(model, precision=None, numerics=Numerics("fp32"), verify=False) as engine:
        answers = engine.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(answers, copy.deepcopy(model).generate(prompt, max_new_tokens=12, do_sample=False))
