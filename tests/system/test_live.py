"""What exists while a layer's backward runs is what the schedule says, op by op, whatever the architecture.

On the simulated device, whose ops are followed tensor by tensor: each storage that compute makes, from its making to
its end. What is left out is what kernels take for themselves.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatrain import Engine
from megatrain.device.sim import SimDevice
from megatrain.engine import step
from megatrain.model.moments import Living
from megatrain.schedule import Op
from megatrain.spec import Policy
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
    ("llama-tied", "bf16", 0, "input"),
    ("llama", "fp32", 48, "graph"),
    ("llama", "bf16", 0, "attention"),
    ("gemma2", "bf16", 0, "input"),  # scores and masks of its own
    ("gpt2", "fp32", 48, "offload"),
    ("mixtral-balanced", "bf16", 0, "input"),
]
SLOW = [
    ("llama", "bf16", 0, "graph"),
    ("llama", "fp32", 0, "chosen"),
    ("llama", "fp32", 0, "drop"),
    ("qwen3", "fp32", 48, "input"),
    ("gemma2", "fp32", 48, "graph"),
    ("mixtral", "fp32", 48, "graph"),
    ("qwen3-moe", "bf16", 48, "input"),
]


def followed(
    engine: Engine, micro_batches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Op, int, int]]:
    """Each compute op of a step, the most bytes that existed while it ran, and those that the schedule has there."""
    living, rows = Living(), []

    def following(act: Any) -> Any:
        def run(streamer: Any, now: Any, op: Op, held: Any) -> None:
            living.peak = 0
            with living:
                act(streamer, now, op, held)
            schedule = streamer._running
            at = next(index for index, each in enumerate(schedule.ops) if each is op)
            there = (
                schedule.buffers[name].nbytes
                for name, (first, last) in schedule.lifetimes.items()
                if first <= at <= last and schedule.buffers[name].tier == "device"
            )
            rows.append((op, living.peak, sum(there)))

        return run

    for kind in ("FORWARD", "LOSS", "BACKWARD"):
        monkeypatch.setitem(step.ACTIONS, kind, following(step.ACTIONS[kind]))
    engine.gradients(micro_batches)
    return rows


@pytest.mark.parametrize(
    ("family", "precision", "chunk", "keep"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_no_more_exists_in_a_backward_than_the_schedule_says(
    family: str, precision: str, chunk: int, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(precision, mlp_chunk_tokens=chunk, activation_rows=((keep,),), loss_chunk_tokens=64)  # type: ignore[arg-type]
    model = tiny_model(family, **(GPT2 if family == "gpt2" else WIDER))
    micro_batches = [batch(1, 192, 0), batch(1, 192, 1)]
    with Engine.from_model(model, SimDevice(1), policy.precision, policy=policy, verify=False) as engine:
        rows = followed(engine, micro_batches, monkeypatch)
    for op, live, declared in rows:
        if op.kind == "BACKWARD":
            assert live <= declared + SCALARS, op.name
    peak = max(live for _, live, _ in rows)
    assert peak <= max(declared for _, _, declared in rows) <= 1.12 * peak
