"""Layers with fused functions: beside the stock model in float64, for any schedule, and refused where wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatrain import AdamW, Engine, Numerics, Policy
from megatrain.engine import fused_cpu
from megatrain.errors import ModelError
from megatrain.model import fuse_layers
from megatrain.model.fused import rms_norm
from megatrain.spec import Kernels, Precision
from megatrain.train import parity
from tests.tiny import tiny_model, unequal_batches

STEP = unequal_batches(3)
KINDS = ("llama", "qwen3", "gemma2", "gemma4", "mixtral")
FINE: dict[str, Any] = {"weight_slots": 1, "wait_for": "shard", "shard_nbytes": 1 << 12}
SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu, recompute": ("cpu", {"activations": "recompute"}),
    "weights by shard": ("sim:1", {"activations": "recompute", **FINE}),
    "kept graphs, weights by shard": ("sim:2", {"activations": "keep", **FINE}),
    "chosen outputs, offloaded": ("sim:3", {"activations_by_layer": (("offload_chosen",),), "offload_slots": 1}),
    "offloaded and dropped inputs": (
        "sim:4",
        {"activations_by_layer": (("offload", "graph"), ("drop",)), "offload_slots": 1, "recompute_slots": 1},
    ),
}


def engine(kind: str, kernels: Kernels, precision: Precision, device: str = "cpu", **policy: Any) -> Engine:
    numerics = Numerics(precision, kernels=kernels, mlp_chunk_tokens=policy.pop("chunk", 0))
    how = Policy(shares_memory=device == "cpu", **policy)
    return Engine.from_model(
        tiny_model(kind), device, None, AdamW(lr=1e-2), numerics=numerics, policy=how, verify=False
    )


def gradients(kind: str, kernels: Kernels, precision: Precision) -> dict[str, Tensor]:
    with engine(kind, kernels, precision) as made:
        return made.gradients(STEP)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_as_near_to_float64_as_the_librarys(kind: str) -> None:
    model = tiny_model(kind).double()
    model.set_experts_implementation("eager")  # torch's grouped product refuses float64
    _, exact = parity.truth(model, STEP)

    def error(found: dict[str, Tensor]) -> float:
        return float(sum((found[name] - exact[name]).square().sum() for name in exact)) ** 0.5

    size = float(sum(value.square().sum() for value in exact.values())) ** 0.5
    for precision, bound in (("fp32", 1e-6), ("bf16", 3e-2)):
        found = gradients(kind, "fused", precision)  # type: ignore[arg-type]
        stock = gradients(kind, "stock", precision)  # type: ignore[arg-type]
        assert not all(torch.equal(found[name], stock[name]) for name in stock)
        assert error(found) <= max(bound * size, 1.25 * error(stock))


@pytest.mark.few(5)
@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_schedule_changes_no_bit(schedule: str, chunk: int) -> None:
    def trained(device: str, **policy: Any) -> dict[str, Tensor]:
        with engine("qwen3", "fused", "bf16", device, chunk=chunk, **policy) as made:
            made.step(STEP)
            return made.gradients(STEP)

    device, policy = SCHEDULES[schedule]
    expected, found = trained("cpu"), trained(device, **policy)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_names_and_files_are_those_of_the_stock_model(tmp_path: Path) -> None:
    with engine("llama", "fused", "fp32") as made:
        made.save_pretrained(tmp_path)
    expected = tiny_model("llama").state_dict()
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


@pytest.mark.parametrize("kernels", ["stock", "fused"])
def test_a_wrong_fused_function_is_refused_before_it_trains(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def wrong(x: Tensor, weight: Tensor | None, rule: str, eps: float, *rest: Any) -> Tensor:
        return rms_norm(x, weight, rule, eps + 1e-3, *rest)

    monkeypatch.setattr(fuse_layers, "rms_norm", wrong)
    monkeypatch.setattr(parity, "CACHE", tmp_path)
    how: Any = {"numerics": Numerics("bf16", kernels=kernels)}
    if kernels == "stock":
        Engine.from_model(tiny_model("llama"), **how).close()
        return
    with pytest.raises(ModelError, match=r"would be wrong .* so it is not trained"):
        Engine.from_model(tiny_model("llama"), **how)


def test_loops_are_registered_before_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference forms would compute the same up to rounding, several times slower."""
    calls: list[str] = []

    def noted(kernel: Any, *args: Any, **options: Any) -> None:
        calls.append(kernel.__name__)
        run(kernel, *args, **options)

    run = fused_cpu.run
    monkeypatch.setattr(fused_cpu, "run", noted)
    with engine("llama", "fused", "bf16") as made:
        made.gradients(STEP)
    names = {"rms_forward", "rms_backward", "sum_parts", "gated_forward", "gated_backward", "rotate"}
    assert set(calls) == names
