"""Long sequences: token-wise parts in chunks, inputs that wait in host memory, and memory by the layer input alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.prediction import Case, allocated_nbytes, fields
from bench.shapes import llama_shape
from megatrain import AdamW, Engine, Policy
from megatrain.device.cpu import CpuDevice
from megatrain.errors import DoesNotFit
from megatrain.model import port_model
from megatrain.plan import Choice, Plan, Question, examine, find_plan
from megatrain.spec import Hardware, Keep, Numerics
from tests.tiny import batch, equal, relative_error, stock_gradients, tiny_model

LONG = [batch(1, 61, 0), batch(1, 48, 1)]
"""Micro-batches of one long sequence each."""


def results(device: str, numerics: Numerics, policy: Policy, family: str = "llama") -> dict[str, Tensor]:
    """Every gradient of a step, the losses of two more, and the weights after them."""
    with Engine.from_model(
        tiny_model(family),
        device,
        numerics.precision,
        AdamW(lr=1e-2),
        0.5,
        policy,
        numerics=numerics,
        seed=4,
        verify=False,
    ) as engine:
        found = {f"gradient {name}": gradient for name, gradient in engine.gradients(LONG).items()}
        found["losses"] = torch.tensor([engine.step(LONG).loss for _ in range(2)], dtype=torch.float64)
        return found | engine.master_weights()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "activations"), [("llama", "keep"), ("gpt2", "recompute"), ("mixtral-balanced", "recompute")]
)
def test_chunked_gradients_equal_the_stock_model(family: str, activations: str) -> None:
    numerics = Numerics("fp32", loss_chunk_tokens=16, mlp_chunk_tokens=7)
    policy = Policy(shares_memory=True, activations=activations)  # type: ignore[arg-type]
    model = tiny_model(family)
    loss, expected = stock_gradients(model, LONG)
    with Engine.from_model(
        model, "cpu", "fp32", AdamW(lr=1e-2), policy=policy, verify=False, numerics=numerics
    ) as engine:
        found = engine.gradients(LONG)
        assert engine.step(LONG).loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in expected.items():
        assert relative_error(found[name], gradient) < 1e-5, name


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_schedules_change_no_bit_with_chunks(precision: str) -> None:
    """Kept graphs whose weights have left their slot, one slot for all, inputs in host memory or dropped, and stored
    outputs of single ops."""
    numerics = Numerics(precision, loss_chunk_tokens=16, mlp_chunk_tokens=7)  # type: ignore[arg-type]
    plain = Policy(shares_memory=True)
    expected = results("cpu", numerics, plain)
    rows: tuple[tuple[Keep, ...], ...] = (("offload", "attention"), ("drop", "graph"), ("chosen", "offload"))
    lean = replace(plain, shares_memory=False, weight_slots=1, grad_slots=1, shard_nbytes=3000)
    policies = {
        "cpu": replace(plain, activations="keep"),
        "sim:1": replace(lean, activations_by_layer=rows, offload_slots=1),
    }
    for device, policy in policies.items():
        assert equal(results(device, numerics, policy), expected), device
    whole = results("cpu", replace(numerics, mlp_chunk_tokens=0), plain)
    worst = max(relative_error(found, whole[name]) for name, found in expected.items() if name.startswith("gradient"))
    assert 0 < worst < (1e-5 if precision == "fp32" else 2e-2)


def test_no_layer_argument_is_quadratic_in_length() -> None:
    """Whole rows behind a causal mask need none that exists."""
    ported = port_model(tiny_model(max_position_embeddings=1 << 12), torch.float32)
    with torch.no_grad():
        _, calls = ported.prologue(ported.placeholders, {"input_ids": torch.zeros(1, 1 << 12, dtype=torch.long)})
    largest = max(tensor.numel() for call in calls for tensor in call.tensors())
    assert largest <= 8 << 12  # heads of 8 channels


# 512k tokens ----------------------------------------------------------------------------------------------------------

CPU = Hardware("cpu", 1 << 40, 1 << 40, 1e9, 1e9, 1e11, 1e10, shares_memory=True, fresh_bandwidth=2e9)
MACHINE = Hardware("96 GB", 96 * 10**9, 3 * 10**12, 5e10, 5e10, 5e14, 3e11)


def plan_8b(tokens: int, **changes: object) -> Plan:
    asked = Question(llama_shape("8B", 32, 4096), MACHINE, tokens, tokens)
    return find_plan(replace(asked, **changes))  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_8b_shape_at_512k_tokens_fits_96_gb_and_would_not_without_chunks() -> None:
    plan = plan_8b(1 << 19)
    assert plan.nbytes["device"] <= plan.question.budgets()["device"] < 96 * 10**9
    assert plan.numerics.mlp_chunk_tokens > 0
    assert plan.policy.offloads
    with pytest.raises(DoesNotFit, match="device memory"):
        plan_8b(1 << 19, overrides={"mlp_chunk_tokens": 0})


def test_memory_grows_with_length_by_layer_inputs_and_one_layer() -> None:
    """Host: an input per layer, less those that never leave their slot. Device: no term by the number of layers."""
    overrides = {"mlp_chunk_tokens": 4096, "activations_by_layer": (("offload",),), "weight_slots": 1, "grad_slots": 1}
    overrides |= {"placements": ()}  # else the short one has room for some state on the device
    short, long = (plan_8b(tokens, overrides=overrides) for tokens in (1 << 18, 1 << 19))
    more, each = 1 << 18, 2 * 4096
    slots = short.policy.offload_slots
    assert long.nbytes["host"] - short.nbytes["host"] == (32 - slots) * each * more
    on_device = long.nbytes["device"] - short.nbytes["device"]
    assert on_device < 16 * each * more


CHOICE = Choice(Numerics("fp32", mlp_chunk_tokens=128, loss_chunk_tokens=128), Policy(shares_memory=True))


def measured(length: int, layers: int, planned: bool = False) -> tuple[int, int]:
    """Bytes that a step over one sequence allocates at its peak beside what the ledger knows of; and if it is
    `planned`, the plan's peak of such a step, less what the ledger knows of."""
    case = Case(WIDTH, layers, "fp32", rows=1, micro_batch=1, length=length, vocabulary=64)
    device, predicted = CpuDevice(), 0
    with Engine.from_config(
        fields(case), device=device, numerics=CHOICE.numerics, policy=CHOICE.policy, max_grad_norm=1.0, verify=False
    ) as engine:
        ids = torch.randint(64, (1, length))
        engine.step([{"input_ids": ids[:, :16], "labels": ids[:, :16]}])
        found = allocated_nbytes(lambda: engine.step([{"input_ids": ids, "labels": ids}]))
        if planned:
            asked = Question(engine.parts.ported.spec, CPU, length, length, "fp32")
            predicted = examine(asked, CHOICE, 1).nbytes["host"] - sum(engine.diagnostics.memory_table().values())
    device.close()
    return found, predicted


WIDTH = 64


@pytest.mark.parametrize(("short", "long"), [(1024, 1536), pytest.param(8192, 16384, marks=pytest.mark.slow)])
def test_each_layer_adds_its_input_per_token(short: int, long: int) -> None:
    """Measured on the cpu, where an input stays where it is: all else is of one layer, whatever the depth."""
    shallow, deep = (measured(long, layers)[0] - measured(short, layers)[0] for layers in (1, 2))
    one_input = 4 * WIDTH * (long - short)
    assert deep - shallow == pytest.approx(one_input, rel=0.02)
    assert shallow < 16 * one_input  # of which rotary tables take 4


@pytest.mark.slow
def test_predictions_hold_over_lengths() -> None:
    """With one thread, since each has blocks of scores of its own. Peaks grow in a straight line."""
    threads, lengths = torch.get_num_threads(), (2048, 4096, 8192, 16384)
    torch.set_num_threads(1)
    try:
        found = [measured(length, 2, planned=True) for length in lengths]
    finally:
        torch.set_num_threads(threads)
    for real, predicted in found:
        assert real <= predicted <= 1.001 * real, found
    each = [
        (more[0] - less[0]) / less_tokens for less, more, less_tokens in zip(found, found[1:], lengths, strict=False)
    ]
    assert max(each) <= 1.05 * min(each)
