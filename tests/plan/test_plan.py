"""Prices, tables and choices on paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from megatrain.plan import (
    Choice,
    available_host_nbytes,
    available_threads,
    calibrate,
    choose_policy,
    fit_activations,
    memory_table,
    op_seconds,
    step_flops,
)
from megatrain.plan.cost import KERNELS
from megatrain.schedule import Schedule, Timeline, build_step, nbytes_by_use, replay
from megatrain.spec import Growth, Hardware, LayerProfile, ModelSpec, Numerics, ParamSpec, Policy, UnitSpec, Work
from megatrain.spec.hardware import ElementwiseRate

SLOW = Hardware("h", 1 << 40, 1 << 40, fetch_bandwidth=1e3, grad_bandwidth=1e3, flops=1e6, host_bandwidth=1e4)
FORWARDS = "FORWARD u0 m0", "FORWARD u1 m0"


def model(active: float = 1.0, tied: bool = False) -> ModelSpec:
    profile = LayerProfile(attention_flops=4 * 100, graph=Growth(per_token=3400))
    layer = UnitSpec("l", "layer", (ParamSpec("w", (100, 100), active), ParamSpec("norm", (100,))), (), profile)
    head = UnitSpec("h", "epilogue", () if tied else (ParamSpec("head", (50, 100)),), ("embed",) if tied else ())
    return ModelSpec("m", (UnitSpec("p", "prologue", (ParamSpec("embed", (50, 100)),)), layer, head), 100, 50)


def test_flops_are_six_per_multiplied_parameter_and_token_plus_attention() -> None:
    attention = 1 * 100 * (8 + 1)  # a token attends to itself too
    assert step_flops(model(), [(3, 8)]) == 6 * 24 * (100 * 100 + 50 * 100 + attention)
    assert step_flops(model(tied=True), [(3, 8)]) == step_flops(model(), [(3, 8)])
    assert step_flops(model(active=0.25), [(3, 8)]) == 6 * 24 * (2500 + 5000 + attention)


@pytest.mark.parametrize("tied", [False, True])
def test_only_target_tokens_need_the_head(tied: bool) -> None:
    whole, head = step_flops(model(tied=tied), [(3, 8)]), 6 * 50 * 100
    assert step_flops(model(tied=tied), [(3, 8)], 24) == whole
    assert step_flops(model(tied=tied), [(3, 8)], 5) == whole - (24 - 5) * head


def test_prices_are_bytes_over_bandwidth_and_operations_over_rate() -> None:
    hardware = Hardware("h", 1 << 40, 1 << 40, fetch_bandwidth=1e3, grad_bandwidth=1e3, flops=1e6, host_bandwidth=1e4)
    policy = Policy(activations="keep")
    schedule = build_step(model(), Numerics(), policy, Work((8,)), "all")
    price = op_seconds(model(), Numerics(), policy, Work((8,)), hardware)
    costs = {op.name: price(op) for op in schedule.ops}
    attention = 2 * 8 * 8 * 100 / (0.5 * 1e6)
    assert costs["FORWARD u1 m0"] == pytest.approx(2 * 10_000 * 8 / 1e6 + attention)
    assert costs["BACKWARD u1 m0"] == pytest.approx(2 * costs["FORWARD u1 m0"] + 0.5 * attention)
    assert costs["FETCH u1 s0"] == pytest.approx(2 * (10_000 + 128 + 16) / 1e3, rel=0.01)
    assert costs["UPDATE u1"] == pytest.approx(26 * 10_144 / 1e4, rel=0.01)
    recomputing = build_step(model(), Numerics(), Policy(activations="recompute"), Work((8,)))
    backward = next(op for op in recomputing.ops if op.name == "BACKWARD u1 m0")
    assert price(backward) == pytest.approx(3 * costs["FORWARD u1 m0"] + 0.5 * attention)
    assert replay(schedule, price).seconds > 0


@pytest.mark.parametrize("name", ["FORWARD u1 m0", "BACKWARD u1 m0"])
def test_fused_elementwise_ops_move_two_fifths_of_the_bytes(name: str) -> None:
    prices = []
    for kernels, speed in (("stock", 1e3), ("stock", 2.5e3), ("fused", 1e3)):
        hardware = replace(SLOW, elementwise=(ElementwiseRate("bf16", speed, speed / 2),))
        numerics, policy = Numerics(kernels=kernels), Policy(activations="keep")  # type: ignore[arg-type]
        schedule = build_step(model(), numerics, policy, Work((8,)))
        price = op_seconds(model(), numerics, policy, Work((8,)), hardware)
        prices.append(price(next(op for op in schedule.ops if op.name == name)))
    assert prices[0] > prices[1] == pytest.approx(prices[2])


@pytest.mark.parametrize(("name", "share"), [("FORWARD u1 m0", 0.37), ("BACKWARD u1 m0", 0.37), ("LOSS u2 m0", 1.0)])
def test_a_fused_layer_launches_fewer_kernels_and_the_head_as_many(name: str, share: float) -> None:
    """Where the host decides."""
    hardware, policy, prices = replace(SLOW, launch_seconds=1e6), Policy(activations="keep"), []
    for kernels in ("stock", "fused"):
        numerics = Numerics(kernels=kernels)
        price = op_seconds(model(), numerics, policy, Work((8,)), hardware)
        schedule = build_step(model(), numerics, policy, Work((8,)))
        prices.append(price(next(op for op in schedule.ops if op.name == name)))
    assert prices[1] == pytest.approx(share * prices[0], rel=0.01)


def test_the_prologue_is_priced_by_its_op_launches() -> None:
    hardware = replace(SLOW, launch_seconds=1.0)
    schedule = build_step(model(), Numerics(), Policy(), Work((8,)))
    price = op_seconds(model(), Numerics(), Policy(), Work((8,)), hardware)
    prologue, layer = (price(next(op for op in schedule.ops if op.name == name)) for name in FORWARDS)
    assert prologue > 5 * KERNELS
    assert layer < prologue


def test_page_faults_are_priced_on_host_memory_devices() -> None:
    work = Work((8, 8))

    def seconds(shares_memory: bool, fresh: float | None) -> dict[str, float]:
        numerics, policy = Numerics("fp32"), Policy(shares_memory=shares_memory)
        hardware = replace(SLOW, shares_memory=shares_memory, fresh_bandwidth=fresh)
        price = op_seconds(model(), numerics, policy, work, hardware)
        return {op.name: price(op) for op in build_step(model(), numerics, policy, work).ops}

    without, with_them = seconds(True, None), seconds(True, 1e3)
    extra = {name: with_them[name] - without[name] for name in without}
    logits = 8 * 50 * 4 / 1e3
    assert extra.pop("LOSS u2 m0") == pytest.approx(logits, rel=0.01)
    assert set(extra.values()) == {0.0}, "what has been freed is used again"
    assert seconds(False, 1e3) == seconds(False, None)


def timeline_of(schedule: Schedule, seconds: Mapping[str, float]) -> Timeline:
    """Each kind of op takes its seconds; the host stream starts with the compute stream."""
    return replay(schedule, lambda op: seconds.get(op.kind, 1.0))


def test_each_ops_median_over_measured_steps_is_used() -> None:
    schedule = build_step(model(), Numerics(), Policy(), Work((8,)))
    steps = [timeline_of(schedule, {"FORWARD": each, "BACKWARD": 2.0}) for each in (3.0, 90.0, 2.0)]
    found = calibrate(model(), steps, lambda op: 1.0)
    assert found.factors["FORWARD", "layer"] == pytest.approx(3)
    assert found.factors["BACKWARD", "layer"] == pytest.approx(2)
    assert calibrate(model(), steps[0], lambda op: 1.0).factors["FORWARD", "layer"] == pytest.approx(3)


def test_concurrent_ops_on_one_processor_share_it() -> None:
    policy, work = Policy(shares_memory=True), Work((8,))
    schedule = build_step(model(), Numerics(), policy, work, "all")
    seconds = {"UPDATE": 4.0, "FORWARD": 6.0, "LOSS": 5.0, "BACKWARD": 8.0}
    overlapped = timeline_of(schedule, seconds)
    found = calibrate(model(), overlapped, lambda op: 1.0, one_processor=True)
    price = lambda op: found.factor(op, model())  # noqa: E731
    again = replay(schedule, price, one_processor=True)
    assert overlapped.seconds < sum(seconds.get(op.kind, 1.0) for op in schedule.ops)
    assert again.seconds == pytest.approx(overlapped.seconds)
    apart = calibrate(model(), overlapped, lambda op: 1.0)
    assert replay(schedule, lambda op: apart.factor(op, model()), one_processor=True).seconds > overlapped.seconds


def test_the_memory_table_equals_the_schedules() -> None:
    work = Work((8, 8))
    assert memory_table(model(), Numerics(), Policy(), work) == nbytes_by_use(
        build_step(model(), Numerics(), Policy(), work).buffers.values()
    )


def test_graphs_are_kept_if_they_fit_and_recomputed_otherwise() -> None:
    assert fit_activations(model(), Numerics(), Policy(), Work((8,)), 1 << 30).activations == "keep"
    assert fit_activations(model(), Numerics(), Policy(), Work((8,)), 1000).activations == "recompute"


def test_clipping_decides_when_updates_happen() -> None:
    clipped = choose_policy(shares_memory=True, clips=True, host_threads=2)
    free = choose_policy(shares_memory=False, clips=False, host_threads=2)
    assert (clipped.update, free.update) == ("next_forward", "during_backward")


def test_this_machine_reports_memory_and_threads() -> None:
    assert available_host_nbytes() > 1 << 28
    assert available_threads() >= 1


def test_choices_set_the_right_policy_fields() -> None:
    plain = Choice(Numerics(), Policy())
    other = plain.change(loss_chunk_tokens=7, weight_slots=3)
    assert other == Choice(Numerics(loss_chunk_tokens=7), Policy(weight_slots=3))
    assert (other.get("loss_chunk_tokens"), other.get("weight_slots")) == (7, 3)
