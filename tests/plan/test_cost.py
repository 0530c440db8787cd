"""Pieces of a step are priced by what was measured near them, and soundly where nothing was."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu import replanned
from bench.shapes import llama_shape
from megatrain.plan import (
    Question,
    attention_seconds,
    contention,
    cost,
    duplex_bandwidths,
    find_plan,
    machine,
    machine_names,
    op_seconds,
    optimizer_bandwidth,
    product_seconds,
)
from megatrain.plan.cost import ATTENTION_BACKWARD, ELEMENTWISE_PASSES, MEASURED_OVER_PLANNED, elementwise_seconds
from megatrain.schedule import build_step
from megatrain.spec import Hardware, ModelSpec, Numerics, ParamSpec, Policy, Precision, UnitSpec, Work
from megatrain.spec.hardware import PRODUCT_KINDS, AttentionRate, ElementwiseRate, ProductKind, ProductRate

PLAIN = Hardware("plain", 1 << 40, 1 << 40, 1e10, 2e10, 1e15, 3e11, device_bandwidth=3e12, launch_seconds=5e-6)
SIZES = st.integers(5, 15).map(lambda power: 1 << power)


def true_seconds(m: int, k: int, n: int) -> float:
    """A device whose rate saturates with each side of a product, as real ones do, and not as the estimate has it."""
    half = m / (m + 300) * n / (n + 150) * k / (k + 100)
    return max(4e-6, 2 * m * k * n / (9e14 * half))


MEASURED = replace(
    PLAIN,
    flops=9e14,
    products=tuple(
        ProductRate("bf16", m, k, n, 2 * m * k * n / true_seconds(m, k, n))
        for m, (k, n) in product(
            (64, 256, 1024, 4096, 16384),
            ((256, 256), (1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096), (8192, 8192), (2048, 32768)),
        )
    ),
)


def test_measured_matmuls_cost_what_was_measured() -> None:
    for row in MEASURED.products:
        shape = (row.m, row.k, row.n)
        assert product_seconds(MEASURED, "bf16", *shape) == pytest.approx(2 * prod(shape) / row.flops)


@pytest.mark.parametrize(
    "shape", [(2048, 4096, 11008), (8192, 5120, 5120), (4096, 2048, 2048), (16384, 4096, 14336), (1024, 4096, 4096)]
)
def test_interpolated_matmuls_are_priced_within_ten_percent(shape: tuple[int, int, int]) -> None:
    assert product_seconds(MEASURED, "bf16", *shape) == pytest.approx(true_seconds(*shape), rel=0.1)


@given(SIZES, SIZES, SIZES, st.sampled_from([PLAIN, MEASURED, *map(machine, machine_names())]))
def test_no_matmul_is_cheaper_than_the_peak_allows(m: int, k: int, n: int, hardware: Hardware) -> None:
    seconds = product_seconds(hardware, "bf16", m, k, n)
    assert seconds >= 0.5 * 2 * m * k * n / hardware.flops
    assert seconds >= 0.5 * (hardware.launch_seconds or 0)
    assert product_seconds(hardware, "fp32", m, k, n) >= seconds or hardware is MEASURED


def test_unknown_figures_fall_back_on_known_ones() -> None:
    bare = Hardware("bare", 1 << 40, 1 << 40, 1e10, 2e10, 1e12, 3e10)
    assert product_seconds(bare, "fp32", 10, 10, 10) == product_seconds(bare, "bf16", 10, 10, 10) == 2000 / 1e12
    assert duplex_bandwidths(bare) == (1e10, 2e10)
    assert duplex_bandwidths(replace(bare, duplex_fetch_bandwidth=5e9)) == (5e9, 2e10)
    assert optimizer_bandwidth(bare, 3) == 3e10
    forward, backward = attention_seconds(bare, "bf16", tokens=64, length=32, width=16)
    assert forward == pytest.approx(2 * 64 * 32 * 16 / 0.5e12)
    assert backward == pytest.approx(ATTENTION_BACKWARD * forward)


def test_attention_rates_are_interpolated_and_clamped() -> None:
    rows = tuple(AttentionRate("bf16", length, 128, 1e12 * length, 5e11 * length) for length in (4096, 1024))
    hardware = replace(PLAIN, attention=rows)

    def rate(length: int) -> tuple[float, float]:
        forward, backward = attention_seconds(hardware, "bf16", tokens=length, length=length, width=64)
        operations = 2.0 * length * length * 64
        return operations / forward, 2 * operations / backward

    assert rate(1024) == pytest.approx((1024e12, 512e12))
    assert rate(2048) == pytest.approx((2560e12, 1280e12))
    assert rate(256) == pytest.approx(rate(1024))
    assert rate(16384) == pytest.approx(rate(4096))


def test_elementwise_work_is_priced_by_precision() -> None:
    rows = ElementwiseRate("bf16", 4e9, 1e9), ElementwiseRate("fp32", 8e9, 2e9)
    hardware = replace(PLAIN, elementwise=rows)
    assert elementwise_seconds(hardware, "bf16", 8e9) == (2, 8)
    assert elementwise_seconds(hardware, "fp32", 8e9) == (1, 4)
    unknown = replace(hardware, elementwise=rows[:1])
    assert elementwise_seconds(unknown, "fp32", 8e9) == elementwise_seconds(PLAIN, "fp32", 8e9)
    unmeasured = pytest.approx((0.001 * ELEMENTWISE_PASSES, 0.002 * ELEMENTWISE_PASSES))
    assert elementwise_seconds(PLAIN, "bf16", 3e9) == unmeasured
    assert elementwise_seconds(PLAIN, "fp32", 3e9, passes=1) == pytest.approx((0.001, 0.002))


def test_elementwise_work_is_priced_between_measured_layers() -> None:
    """Waking threads takes a small layer longer than what they do."""
    rows = ElementwiseRate("bf16", 5e8, 5e8, 10**9), ElementwiseRate("bf16", 1e9, 1e9, 4 * 10**9)  # in 2 s and in 4 s
    hardware = replace(PLAIN, elementwise=rows[::-1])
    seconds = {2e9: 2 + 2 / 3, 0.5e9: 1, 0: 0, 1e9: 2, 4e9: 4, 7e9: 6}
    for nbytes, expected in seconds.items():
        assert elementwise_seconds(hardware, "bf16", nbytes) == pytest.approx((expected, expected))
    disturbed = replace(PLAIN, elementwise=(*rows, ElementwiseRate("bf16", 8e9 / 3, 8e9 / 3, 8 * 10**9)))  # in 3 s
    for nbytes, expected in {1e9: 2, 4e9: 2.43, 8e9: 3, 15e9: 4}.items():
        assert elementwise_seconds(disturbed, "bf16", nbytes) == pytest.approx((expected, expected), rel=0.01)


def test_attention_backward_is_2x_measured_and_more_unmeasured() -> None:
    """A library's row whose backward was published at 2.5 times the operations has been brought to 2: same seconds."""
    published = 0.5 * PLAIN.flops
    row = AttentionRate("bf16", 4096, 128, published, 2 / ATTENTION_BACKWARD * published)
    of = ("bf16", 8192, 4096, 4096)
    measured = attention_seconds(replace(PLAIN, attention=(row,)), *of)  # type: ignore[arg-type]
    assert measured == pytest.approx(attention_seconds(PLAIN, *of))  # type: ignore[arg-type]


def layer_seconds(model: ModelSpec, hardware: Hardware, kind: str) -> float:
    work = Work((4096,), 4096)
    schedule = build_step(model, Numerics(), Policy(), work)
    price = op_seconds(model, Numerics(), Policy(), work, hardware)
    unit = len(model.units) - 1 if kind == "LOSS" else 1
    return next(price(op) for op in schedule.ops if (op.kind, op.unit) == (kind, unit))


def test_each_product_of_a_layer_is_priced_by_its_own_rate() -> None:
    """As on a processor without bfloat16 instructions, whose backward pass is much slower than its forward."""
    model = llama_shape("small", 4, 1024, vocabulary=4000)
    attention = (AttentionRate("bf16", 4096, 128, 1e30, 1e30),)
    bare = replace(PLAIN, device_bandwidth=None, launch_seconds=None, attention=attention)

    def seconds(flops: dict[ProductKind, float]) -> list[float]:
        rows = tuple(ProductRate("bf16", 1024, 1024, 1024, rate, of) for of, rate in flops.items())
        return [layer_seconds(model, replace(bare, products=rows), kind) for kind in ("FORWARD", "BACKWARD")]

    once, backward = seconds({"output": 1e15})
    assert backward == pytest.approx((1 + 1 + 1) * once)  # it recomputes the outputs
    assert seconds(dict.fromkeys(PRODUCT_KINDS, 1e15)) == pytest.approx([once, backward])
    slow = seconds({"output": 1e15, "input gradient": 1e13, "weight gradient": 5e14})
    assert slow == pytest.approx([once, (1 + 100 + 2) * once])


def test_the_products_of_a_layer_have_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []
    honest = cost.product_seconds

    def recorded(hardware: Hardware, precision: Precision, *shape_and_kind: Any) -> float:
        seen.append(shape_and_kind)
        return honest(hardware, precision, *shape_and_kind)

    monkeypatch.setattr(cost, "product_seconds", recorded)
    model, tokens = llama_shape("small", 4, 1024, vocabulary=4000), 4096

    def expected(unit: UnitSpec, tokens: int) -> dict[str, list[tuple[object, ...]]]:
        weights = [param.shape for param in unit.params if len(param.shape) == 2]
        return {
            "output": [(tokens, k, n, "output") for n, k in weights],
            "input gradient": [(tokens, n, k, "input gradient") for n, k in weights],
            "weight gradient": [(n, tokens, k, "weight gradient") for n, k in weights],
        }

    layer = expected(model.units[1], tokens)
    layer_seconds(model, PLAIN, "FORWARD")
    assert sorted(seen) == sorted(layer["output"])
    seen.clear()
    layer_seconds(model, PLAIN, "BACKWARD")
    assert sorted(seen) == sorted(chain(*layer.values()))
    seen.clear()
    layer_seconds(model, PLAIN, "LOSS")
    assert set(seen) == set(chain(*expected(model.units[-1], Numerics().loss_chunk_tokens).values()))


@pytest.mark.parametrize("kind", ["FORWARD", "BACKWARD"])
def test_expert_dispatch_is_priced_by_tokens_per_expert(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "HOST_LAUNCHES", 0)  # or a layer as small as this one takes as long with and without it
    dense = llama_shape("small", 4, 1024, vocabulary=4000)

    def dispatch(count: int, chosen: int) -> float:
        """Seconds that a layer takes less those of the same with what only experts pay priced at nothing."""
        expert = ParamSpec("mlp.experts.down_proj", (count, 64, 1024), active=chosen / count)
        layer = replace(dense.units[1], params=(*dense.units[1].params, expert))
        model = replace(dense, units=(dense.units[0], layer, *dense.units[2:]))
        whole = layer_seconds(model, PLAIN, kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cost, "DISPATCH_PASSES", 0)
            patch.setattr(cost, "DISPATCH_KERNELS", 0)
            return whole - layer_seconds(model, PLAIN, kind)

    passes, launched = (2, 3) if kind == "BACKWARD" else (1, 1)  # one recomputes; its backward launches twice as many
    launches = launched * cost.DISPATCH_KERNELS * 5e-6
    one, eight = ((dispatch(64, chosen) - launches) / passes for chosen in (1, 8))
    assert one == pytest.approx(cost.DISPATCH_PASSES * 4096 * 1024 * 2 / 3e12)
    assert eight == pytest.approx(8 * one)


@pytest.mark.parametrize("kind", ["FORWARD", "BACKWARD"])
def test_a_gpu_computes_no_layer_quicker_than_the_host_submits_its_kernels(kind: str) -> None:
    small = llama_shape("small", 4, 1024, vocabulary=4000)
    times = 1 if kind == "FORWARD" else 3  # a recomputation, and a backward of twice the kernels
    kernels = times * (cost.KERNELS + cost.KERNELS_PER_PARAM * len(small.units[1].params))

    def seconds(hardware: Hardware, launch: float) -> float:
        return layer_seconds(small, replace(hardware, launch_seconds=launch), kind)

    free = seconds(PLAIN, 0.0)
    slow = 10 * free / (cost.HOST_LAUNCHES * kernels)  # launches with which the host takes ten times as long
    assert seconds(PLAIN, slow) == pytest.approx(10 * free)
    assert seconds(PLAIN, slow / 1000) == pytest.approx(free + kernels * slow / 1000)
    on_cpu = replace(PLAIN, shares_memory=True)
    submitted = kernels * cost.HOST_LAUNCHES * slow  # in turns with what it computes
    assert seconds(on_cpu, slow) == pytest.approx(seconds(on_cpu, 0.0) + submitted, rel=1e-3)  # and one for sums


@pytest.mark.parametrize("size", ["1.5B", pytest.param("7B", marks=pytest.mark.slow)])
def test_plans_for_the_measured_gpu_come_within_15_percent(size: str) -> None:
    """Of the fastest measured step. `HOST_LAUNCHES` is fitted to the same file, so this holds prices where they are."""
    found = json.loads((Path(__file__).parents[2] / "bench/results/gpu.json").read_text())
    found["parts"] = {key: part for key, part in found["parts"].items() if part["size"] == size}
    steps = list(replanned(found))
    assert len(steps) == {"1.5B": 6, "7B": 3}[size]
    for key, tokens, measured, _, planned in steps:
        part = found["parts"][key]
        fastest = min(part["spread"]) if tokens == part["tokens_per_step"] else measured
        assert planned == pytest.approx(fastest, rel=0.15), (key, tokens)


def test_the_plans_error_range_covers_both_sides() -> None:
    assert MEASURED_OVER_PLANNED[0] < 1 < MEASURED_OVER_PLANNED[1]


def test_copies_within_the_device_take_nothing_of_host_memory() -> None:
    """Gradients of state that stays on the device."""
    hardware = replace(machine("h200"), host_dram_bandwidth=1e9)
    plan = find_plan(Question(llama_shape("small", 4, 1024, vocabulary=8000), hardware, 1024, 1024))
    assert all(placement.on_device for placement in plan.policy.placements)
    copies = [op for op in plan.timeline.schedule.ops if op.kind == "GRAD"]
    shared = contention(plan.question.model, plan.numerics, hardware)
    assert copies
    assert not any(shared.dram_nbytes(op) for op in copies)


def test_the_optimizer_pass_is_priced_by_its_threads() -> None:
    hardware = replace(PLAIN, optimizer_bandwidth=((2, 2e10), (4, 3e10)), host_bandwidth=3e10)
    rates = [optimizer_bandwidth(hardware, threads) for threads in (1, 2, 3, 4, 64, 0)]
    assert rates == pytest.approx([1e10, 2e10, 2.5e10, 3e10, 3e10, 3e10])
