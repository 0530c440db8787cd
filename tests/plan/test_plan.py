"""Prices, tables and choices on paper."""

from __future__ import annotations

import pytest

from megatrain.plan import (
    available_host_nbytes,
    available_threads,
    choose_policy,
    fit_activations,
    memory_table,
    op_seconds,
    step_flops,
)
from megatrain.schedule import build_step, nbytes_by_owner, replay
from megatrain.spec import Hardware, LayerProfile, ModelSpec, ParamSpec, Policy, UnitSpec, Work


def model(active: float = 1.0, tied: bool = False) -> ModelSpec:
    profile = LayerProfile(attention_flops=4 * 100, kept_nbytes=3400)
    layer = UnitSpec("l", "layer", (ParamSpec("w", (100, 100), active), ParamSpec("norm", (100,))), (), profile)
    head = UnitSpec("h", "epilogue", () if tied else (ParamSpec("head", (50, 100)),), ("embed",) if tied else ())
    return ModelSpec("m", (UnitSpec("p", "prologue", (ParamSpec("embed", (50, 100)),)), layer, head), 100, 50)


def test_flops_are_six_per_multiplied_parameter_and_token_plus_attention() -> None:
    attention = 1 * 100 * (8 + 1)  # a token attends to itself too
    assert step_flops(model(), [(3, 8)]) == 6 * 24 * (100 * 100 + 50 * 100 + attention)
    assert step_flops(model(tied=True), [(3, 8)]) == step_flops(model(), [(3, 8)])
    assert step_flops(model(active=0.25), [(3, 8)]) == 6 * 24 * (2500 + 5000 + attention)


def test_prices_are_bytes_over_bandwidth_and_operations_over_rate() -> None:
    hardware = Hardware("h", 1 << 40, 1 << 40, fetch_bandwidth=1e3, grad_bandwidth=1e3, flops=1e6, host_bandwidth=1e4)
    policy = Policy(activations="keep")
    schedule = build_step(model(), policy, Work((8,)), "all")
    price = op_seconds(model(), policy, Work((8,)), hardware)
    costs = {op.name: price(op) for op in schedule.ops}
    attention = 2 * 8 * 8 * 100 / (0.5 * 1e6)
    assert costs["FORWARD u1 m0"] == pytest.approx(2 * 10_000 * 8 / 1e6 + attention)
    assert costs["BACKWARD u1 m0"] == pytest.approx(2 * costs["FORWARD u1 m0"])
    assert costs["FETCH u1 s0"] == pytest.approx(2 * (10_000 + 128 + 16) / 1e3, rel=0.01)
    assert costs["UPDATE u1"] == pytest.approx(26 * 10_144 / 1e4, rel=0.01)
    recomputing = build_step(model(), Policy(activations="recompute"), Work((8,)))
    backward = next(op for op in recomputing.ops if op.name == "BACKWARD u1 m0")
    assert price(backward) == pytest.approx(3 * costs["FORWARD u1 m0"])
    assert replay(schedule, price).seconds > 0


def test_the_memory_table_is_that_of_the_schedule() -> None:
    work = Work((8, 8))
    assert memory_table(model(), Policy(), work) == nbytes_by_owner(
        build_step(model(), Policy(), work).buffers.values()
    )


def test_graphs_are_kept_where_they_fit_and_recomputed_where_not() -> None:
    assert fit_activations(model(), Policy(), Work((8,)), 1 << 30).activations == "keep"
    assert fit_activations(model(), Policy(), Work((8,)), 1000).activations == "recompute"


def test_clipping_decides_when_updates_happen() -> None:
    clipped = choose_policy("bf16", shares_memory=True, clips=True, host_threads=2)
    free = choose_policy("bf16", shares_memory=False, clips=False, host_threads=2)
    assert (clipped.update, free.update) == ("next_forward", "during_backward")


def test_this_machine_has_memory_and_threads() -> None:
    assert available_host_nbytes() > 1 << 28
    assert available_threads() >= 1
