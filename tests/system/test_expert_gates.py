"""Gates inside the products of experts: the first expert is at work before the last one's shard has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain import AdamW, Engine, Policy
from megatrain.engine.gated import _Meeting
from megatrain.spec import Gates
from megatrain.testing import SimDevice
from tests.tiny import FAMILIES, relative_error, tiny_model, unequal_batches

OLMOE = {
    **FAMILIES["mixtral"],
    "model_type": "olmoe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
}
GPT_OSS = {**FAMILIES["mixtral"], "model_type": "gpt_oss", "head_dim": 8, "sliding_window": 4}
"""Its experts are stored the other way around, with biases."""

KINDS: dict[str, dict[str, Any]] = {"mixtral": {}, "qwen3-moe": {}, "olmoe": OLMOE, "gpt-oss": GPT_OSS}


def engine(device: str | SimDevice, kind: str, experts: str, gates: Gates, keeps: str = "input") -> Engine:
    model = tiny_model(kind if kind in FAMILIES else "mixtral", **KINDS[kind])
    model.set_experts_implementation(experts)
    sizes = {"weight_slots": 1, "grad_slots": 1, "shard_nbytes": 2500, "loss_chunk_tokens": 5}
    policy = Policy("fp32", gates=gates, activation_rows=((keeps,),), **sizes)  # type: ignore[arg-type]
    how = {"max_grad_norm": 0.5, "policy": policy, "seed": 4, "verify": False}
    return Engine.from_model(model, device, "fp32", AdamW(lr=1e-2), **how)  # type: ignore[arg-type]


def results(made: Engine) -> dict[str, Tensor]:
    batches = unequal_batches(2)
    found = {f"gradient {name}": gradient for name, gradient in made.gradients(batches).items()}
    found["losses"] = torch.tensor([made.step(batches).loss, made.evaluate(batches)])
    return found | made.master_weights()


@pytest.mark.parametrize(
    ("kind", "experts", "keeps"),
    [
        ("mixtral", "grouped_mm", "input"),
        ("mixtral", "eager", "graph"),
        ("qwen3-moe", "grouped_mm", "graph"),
        ("olmoe", "eager", "input"),
        ("gpt-oss", "grouped_mm", "graph"),
    ],
)
def test_gates_by_shards_change_no_bit_and_by_rows_only_rounding(kind: str, experts: str, keeps: str) -> None:
    with engine("cpu", kind, experts, "unit", keeps) as made:
        expected = results(made)
    for gates, worst in (("shard", 0.0), ("rows", 1e-5)):
        with engine("sim:3", kind, experts, gates, keeps) as made:  # type: ignore[arg-type]
            found = results(made)
        assert max(relative_error(found[name], each) for name, each in expected.items()) <= worst, gates


def come_by(device: SimDevice) -> int:
    """Shards of the second layer that have come."""
    return sum(name.startswith("FETCH u2") for name in device.order)


@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "gpt-oss"])
def test_a_grouped_product_begins_with_the_experts_that_are_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, honest, seen = SimDevice(temperament="late"), torch._grouped_mm, list[tuple[int, int]]()

    def product(x: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        if "BACKWARD" not in " ".join(device.order):
            seen.append((len(weight), come_by(device)))
        return honest(x, weight, **kwargs)

    made = engine(device, kind, "grouped_mm", "rows")
    with made:
        monkeypatch.setattr(torch, "_grouped_mm", product)
        made.evaluate(unequal_batches(1))
    parts = [come for experts, come in seen if experts < 4 and come]
    assert parts[0] < come_by(device) - 3, "the first experts are at work while others have not come"
    assert len(set(parts)) > 3


def test_a_loop_over_experts_waits_for_each_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes no gates by rows: a slice is a view, and a view is what it covers."""
    device, honest, seen = SimDevice(temperament="late"), _Meeting.compute, list[int]()

    def compute(self: _Meeting, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        found = honest(self, func, args, kwargs)
        if func is functional.linear and args[1].shape == (96, 32):  # of one expert
            seen.append(come_by(device))
        return found

    with engine(device, "mixtral", "eager", "shard") as made:
        monkeypatch.setattr(_Meeting, "compute", compute)
        made.evaluate(unequal_batches(1))
    there = [come for come in seen if come]
    assert there[0] < come_by(device) - 3
    assert len(set(there)) > 2
