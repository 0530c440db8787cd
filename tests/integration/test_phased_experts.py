"""Experts wait for their own shards: the first expert runs before the last one's shard has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain import AdamW, Engine, Policy
from megatrain.engine.resumable_call import _ReadWatcher
from megatrain.spec import Numerics, WaitFor
from megatrain.testing import SimDevice
from tests.tiny import FAMILIES, batch, equal, tiny_model, unequal_batches

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


def engine(device: str | SimDevice, kind: str, experts: str, wait_for: WaitFor, keeps: str = "input") -> Engine:
    model = tiny_model(kind if kind in FAMILIES else "mixtral", **KINDS[kind])
    model.set_experts_implementation(experts)
    sizes = {"weight_slots": 1, "grad_slots": 1, "shard_nbytes": 2500}
    policy = Policy(wait_for=wait_for, activations_by_layer=((keeps,),), **sizes)  # type: ignore[arg-type]
    how = {
        "max_grad_norm": 0.5,
        "policy": policy,
        "numerics": Numerics("fp32", loss_chunk_tokens=5),
        "seed": 4,
        "verify": False,
    }
    return Engine.from_model(model, device, "fp32", AdamW(lr=1e-2), **how)  # type: ignore[arg-type]


def results(made: Engine) -> dict[str, Tensor]:
    batches = unequal_batches(2)
    found = {f"gradient {name}": gradient for name, gradient in made.gradients(batches).items()}
    found["losses"] = torch.tensor([made.step(batches).loss, made.evaluate(batches)])
    return found | made.master_weights()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "experts", "keeps"),
    [
        ("mixtral", "grouped_mm", "input"),
        ("mixtral", "eager", "graph"),
        pytest.param("qwen3-moe", "grouped_mm", "graph", marks=pytest.mark.slow),
        pytest.param("olmoe", "eager", "input", marks=pytest.mark.slow),
        ("gpt-oss", "grouped_mm", "graph"),
    ],
)
def test_waiting_for_shards_changes_no_bit(kind: str, experts: str, keeps: str) -> None:
    with engine("cpu", kind, experts, "unit", keeps) as made:
        expected = results(made)
    with engine("sim:3", kind, experts, "shard", keeps) as made:
        found = results(made)
    assert all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "keeps",
    [
        "offload_chosen",
        "offload",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("chosen", "offload_attention")),
    ],
)
def test_unused_shards_delay_nothing(keeps: str) -> None:
    """The last phases of a forward are of experts that are not used, but the last declares the outputs to keep."""
    found = []
    for device, wait_for in (("cpu", "unit"), ("sim:3", "shard")):
        model = tiny_model("mixtral", num_local_experts=16)
        model.set_experts_implementation("eager")
        policy = Policy(wait_for=wait_for, activations_by_layer=((keeps,),), shard_nbytes=600)  # type: ignore[arg-type]
        with Engine.from_model(model, device, "fp32", policy=policy, seed=4, verify=False) as made:
            found.append(made.gradients([batch(1, 2, 0), batch(1, 2, 3)]))
    assert equal(*found)


def arrived(device: SimDevice) -> int:
    """Number of shards of the second layer that have arrived."""
    return sum(name.startswith("FETCH u2") for name in device.order)


def test_a_loop_over_experts_waits_for_one_expert_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice reads only the elements it spans."""
    device, honest, seen = SimDevice(temperament="late"), _ReadWatcher._on_read, list[int]()

    def on_read(self: _ReadWatcher, func: Any, tensors: Sequence[Tensor]) -> None:
        honest(self, func, tensors)
        if func is functional.linear and tensors[1].shape == (96, 32):  # of one expert
            seen.append(arrived(device))

    with engine(device, "mixtral", "eager", "shard") as made:
        monkeypatch.setattr(_ReadWatcher, "_on_read", on_read)
        made.evaluate(unequal_batches(1))
    counts = [count for count in seen if count]
    assert counts[0] < arrived(device) - 3
    assert len(set(counts)) > 2
