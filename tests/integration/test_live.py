"""What exists while a layer's backward runs is what the schedule says, op by op, whatever the architecture.

On the simulated device, whose ops are followed tensor by tensor: each storage that compute makes, from its making to
its end. What is left out is what kernels take for themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain import Engine, LogitsLoss
from megatrain.device.sim import SimDevice
from megatrain.losses import SmoothedCrossEntropy
from megatrain.spec import Keep, Numerics, Policy
from tests.held import followed, shares
from tests.tiny import batch, tiny_model

WIDER: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
}
GPT2: dict[str, Any] = {"n_embd": 128, "n_positions": 512, "n_layer": 2}
SCALARS = 64
"""Bytes of the loss and its like, which no schedule knows."""
QUICK = [
    ("llama", "fp32", 48, "graph"),
    ("gemma2", "bf16", 0, "input"),  # scores and masks of its own
    ("gpt2", "fp32", 48, "offload"),
    ("llama", "bf16", 0, "offload_chosen"),
]
SLOW = [
    ("llama", "bf16", 0, "attention"),
    ("mixtral-balanced", "bf16", 0, "input"),
    ("llama-tied", "bf16", 0, "input"),
    ("llama", "bf16", 0, "graph"),
    ("llama", "fp32", 0, "chosen"),
    ("llama", "fp32", 0, "drop"),
    ("mixtral", "bf16", 0, "offload_chosen"),
    ("qwen3-moe", "fp32", 0, "offload_attention"),
    ("gpt2", "fp32", 0, "offload_chosen"),
    ("qwen3", "fp32", 48, "input"),
    ("gemma2", "fp32", 48, "graph"),
    ("mixtral", "fp32", 48, "graph"),
    ("qwen3-moe", "bf16", 48, "input"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "precision", "chunk", "keep"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_live_memory_in_backward_is_within_the_schedules_figure(
    family: str, precision: str, chunk: int, keep: str
) -> None:
    numerics = Numerics(precision, mlp_chunk_tokens=chunk, loss_chunk_tokens=64)  # type: ignore[arg-type]
    policy = Policy(activations_by_layer=((keep,),))  # type: ignore[arg-type]
    model = tiny_model(family, **(GPT2 if family == "gpt2" else WIDER))
    micro_batches = [batch(1, 192, 0), batch(1, 192, 1)]
    with (
        followed() as rows,
        Engine.from_model(model, SimDevice(1), numerics=numerics, policy=policy, verify=False) as engine,
    ):
        assert engine.parts.ported.spec  # measured: so schedules know what they hold
        engine.gradients(micro_batches)
    for op, live, declared in rows:
        if op.kind == "BACKWARD" or keep.startswith("offload_"):
            assert live <= declared + SCALARS, op.name
    peak = max(live for _, live, _ in rows)
    assert peak <= max(declared for _, _, declared in rows) <= 1.12 * peak


class LogSumExp(LogitsLoss):
    """Makes more of its logits than most losses do."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (logits.logsumexp(-1) - logits.gather(1, labels[:, None]).squeeze(1)).square().sum()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", [SmoothedCrossEntropy(0.1), LogSumExp()], ids=lambda loss: type(loss).__name__)
def test_a_loss_of_logits_is_within_the_schedules_figure(loss: LogitsLoss, precision: str) -> None:
    numerics = Numerics(precision, loss_chunk_tokens=64)  # type: ignore[arg-type]
    model = tiny_model("llama", vocab_size=16_384, max_position_embeddings=192)
    options: dict[str, Any] = {"numerics": numerics, "policy": Policy(), "verify": False}
    with followed() as rows, Engine.from_model(model, SimDevice(1), **options) as engine:
        assert engine.parts.ported.spec  # measured
        engine.gradients([batch(1, 192, 0), batch(1, 192, 1)], loss)
    losses = [(live, declared) for op, live, declared in rows if op.kind == "LOSS"]
    assert len(losses) == 2
    assert all(live <= declared + SCALARS for live, declared in losses), losses


LOSSES = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
MASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "padded", {}),
    ("llama", "packed", {}),
    ("llama", "uniform", {"model_type": "mistral", "sliding_window": 16}),  # told by a mask alone
    ("mixtral", "padded", LOSSES),
]
SLOW_MASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("gemma2", "uniform", {}),  # a cap on its logits
    ("mixtral", "uniform", LOSSES),
]


def rows_of(rows: str) -> dict[str, Any]:
    """Two rows of 48 tokens, or one of 96 that holds three samples."""
    if rows == "padded":
        return batch(2, 48, 0, padded=5)
    found: dict[str, Any] = batch(1 if rows == "packed" else 2, 96 if rows == "packed" else 48, 0)
    if rows == "packed":
        found["position_ids"] = torch.cat([torch.arange(size) for size in (48, 24, 24)]).unsqueeze(0)
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("family", "rows", "changes"), [*MASKED, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_MASKED)]
)
def test_live_memory_in_any_op_is_within_the_schedules_figure(
    family: str, rows: str, changes: dict[str, Any], precision: str
) -> None:
    """Forward, loss and backward, of masks, windows, capped logits and a router's auxiliary loss."""
    numerics, policy = Numerics(precision, loss_chunk_tokens=32), Policy(activations_by_layer=(("input",),))  # type: ignore[arg-type]
    model = tiny_model(family, **{"num_hidden_layers": 2, "max_position_embeddings": 128, **changes})
    with (
        followed() as found,
        Engine.from_model(model, SimDevice(1), numerics=numerics, policy=policy, verify=False) as engine,
    ):
        assert engine.parts.ported.spec  # measured: so schedules know what they hold
        engine.gradients([rows_of(rows)] * 2)
    for op, live, declared in found:
        assert live <= declared + SCALARS, op.name
        if op.kind == "LOSS":
            assert declared <= 1.03 * live
    peak = max(live for _, live, _ in found)
    assert max(declared for _, _, declared in found) <= 1.06 * peak


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["input", "offload_chosen", "offload_attention"])
@pytest.mark.parametrize("kind", ["axk2", "bloom", "deepseek_v3", "falcon"])
def test_two_rows_take_at_most_twice_the_memory_of_one(kind: str, keep: Keep) -> None:
    """Keys that heads share, and biases of positions, are copied where there is more than one row."""
    found = shares(kind, "bf16", "uniform", keep)
    assert max(found.values()) <= 1.005, found


def test_outputs_are_offloaded_without_a_plan() -> None:
    """The slots have the size of what is saved, which is measured for them."""
    policy = Policy(activations_by_layer=(("offload_chosen",),))
    model = tiny_model("llama", **{**WIDER, "num_hidden_layers": 6})
    with Engine.from_model(model, SimDevice(1), policy=policy, verify=False) as engine:
        engine.gradients([batch(1, 192, 0)])
        assert engine.diagnostics.timeline is not None
        moved = [op.nbytes for op in engine.diagnostics.timeline.schedule.ops if op.kind == "RELOAD"]
        each = engine.parts.ported.spec.units[1].profile.outputs.chosen_nbytes * 192
    assert len(moved) == 2 * (6 - policy.offload_slots)
    assert max(moved) >= each > 100_000
