"""What limits a step, when transfers hide, what a run takes, what an upgrade buys: cases that can be done by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import pytest

from bench.shapes import llama_shape
from megatrain.errors import DoesNotFit
from megatrain.formatting import amount, duration, tokens
from megatrain.plan import (
    Choice,
    Plan,
    Question,
    advised,
    changes,
    estimate,
    examine,
    find_plan,
    hidden_from,
    loads,
    look,
    machine,
    machine_names,
    peak_table,
    stalls,
    step_flops,
)
from megatrain.plan.analysis import RESOURCES, Change, with_more
from megatrain.plan.cost import MEASURED_OVER_PLANNED
from megatrain.plan.estimates import seconds_on
from megatrain.plan.ranks import question_of_one
from megatrain.plan.report import as_content, gains, summary_rows, warning_rows, without_gain
from megatrain.plan.without_plan import nearest_that_fits
from megatrain.schedule import Access, Buffer, Op, Schedule, Timeline, Use, replay
from megatrain.schedule.contents import Moments
from megatrain.schedule.deps import derive_waits
from megatrain.spec import Hardware, LayerProfile, Limits, ModelSpec, Numerics, Policy, Work
from megatrain.spec.hardware import PRODUCT_KINDS, ProductRate

MACHINES = [name for name in machine_names() if machine(name).devices == 1]

LENGTH = 128
FLOPS, BUS = 1e12, 1e9


@cache
def deep(layers: int) -> ModelSpec:
    """Layers that are all products: no attention, no kept bytes, next to nothing around them."""
    model = llama_shape("deep", layers, 256, vocabulary=32)
    bare = [replace(unit, profile=LayerProfile()) for unit in model.units]
    return replace(model, units=tuple(bare))


def computer(**changes: float) -> Hardware:
    """Products at 1 TFLOP/s, everything else at no cost but what `changes` name."""
    rates = {"fetch_bandwidth": 1e15, "grad_bandwidth": 1e15, "host_bandwidth": 1e15} | changes
    return Hardware("paper", 10**12, 10**13, flops=FLOPS, **rates)  # type: ignore[arg-type]


@cache
def planned(tokens_per_step: int, *, layers: int = 16, clips: bool = True, **changes: float) -> Plan:
    """All updates are the host's: a bus that takes no time would have them streamed."""
    question = Question(deep(layers), computer(**changes), tokens_per_step, LENGTH, clips=clips)
    return find_plan(
        replace(question, overrides={"activations": "recompute", "placements": (), "streamed_updates": 0.0})
    )


def told(plan: Plan) -> dict[str, str]:
    return dict(summary_rows(look(plan)))


# What limits -------------------------------------------------------------------------------------------------------


def test_a_bus_ten_times_too_slow_is_the_limit() -> None:
    # a layer's forward of T tokens is 2 P T operations, its fetch 2 P bytes: even at T = flops / bandwidth
    plan = planned(4 * LENGTH, layers=64, fetch_bandwidth=FLOPS / (4 * LENGTH) / 10)
    first, *_ = loads(plan)
    assert first.name == "bus up"
    assert first.busy_seconds > 0.95 * plan.seconds
    compute = next(load for load in loads(plan) if load.name == "compute")
    # 2 fetches of 10 each beside 2 P T of the forward and 6 P T of the backward
    assert compute.busy_seconds / plan.seconds == pytest.approx(4 / 20, rel=0.06)
    assert look(plan).stall_share == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(
    ("change", "limit"),
    [({"grad_bandwidth": 1e7}, "bus down"), ({"host_bandwidth": 1e8}, "optimizer"), ({}, "compute")],
)
def test_the_slowest_resource_is_named(change: dict[str, float], limit: str) -> None:
    plan = planned(4 * LENGTH, **change)
    first, *others = loads(plan)
    assert first.name == limit
    assert first.busy_seconds == max(load.busy_seconds for load in (first, *others))
    assert told(plan)["limit"].startswith(limit)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("clips", [True, False])
def test_the_critical_path_adds_up_to_the_step(name: str, clips: bool) -> None:
    question = Question(llama_shape("small", 6, 1024, vocabulary=4000), machine(name), 4096, 1024, clips=clips)
    for activations in ("keep", "recompute"):
        plan = examine(question, Choice(Numerics(), Policy(activations=activations, weight_slots=1)), 2)  # type: ignore[arg-type]
        assert sum(load.chain_seconds for load in loads(plan)) == pytest.approx(plan.seconds, rel=1e-12)
        for load in loads(plan):
            assert load.chain_seconds <= load.busy_seconds * (1 + 1e-12)


def test_on_one_processor_the_critical_path_is_every_op() -> None:
    shared = replace(computer(host_bandwidth=1e9), shares_memory=True)
    plan = find_plan(Question(deep(4), shared, 4 * LENGTH, LENGTH))
    for load in loads(plan):
        assert load.chain_seconds == pytest.approx(load.busy_seconds)


# What the step depends on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("gh200", "laptop") else pytest.mark.slow) for name in MACHINES]
)
def test_ten_percent_more_of_everything_saves_an_eleventh(name: str) -> None:
    """So no rate of a machine that a step depends on is left out, but what it costs to launch an op."""
    hardware = replace(machine(name), launch_seconds=None)
    plan = find_plan(Question(llama_shape("small", 4, 1024, vocabulary=4000), hardware, 4096, 1024))
    for resource in RESOURCES:
        hardware = with_more(hardware, resource, 1.1)
    assert seconds_on(plan, replace(plan.question, hardware=hardware)) == pytest.approx(plan.seconds / 1.1)


def test_resource_figures_are_machine_fields() -> None:
    named = list(chain.from_iterable(RESOURCES.values()))
    assert len(set(named)) == len(named)
    rates = {name for name in Hardware.__slots__ if name.endswith(("bandwidth", "flops", "flops_fp32"))}
    assert rates | {"products", "attention", "elementwise"} == set(named)


# Hiding ------------------------------------------------------------------------------------------------------------


def test_transfers_hide_where_the_formula_says() -> None:
    # 2 P T operations of the forward hide 2 P bytes of weights from T = flops / bandwidth tokens on
    found = hidden_from(planned(4 * LENGTH, layers=64, fetch_bandwidth=BUS * 0.1, grad_bandwidth=BUS * 0.1))
    assert found == pytest.approx(FLOPS / (BUS * 0.1), rel=0.05)
    assert found % LENGTH == 0


def test_the_optimizer_hides_where_the_formula_says() -> None:
    # 26 P bytes of the update hide behind the same forward with clipping, and behind 6 P T of the backward without
    deferred = hidden_from(planned(4 * LENGTH, layers=64, host_bandwidth=BUS))
    assert deferred == pytest.approx(13 * FLOPS / BUS, rel=0.05)
    direct = hidden_from(planned(4 * LENGTH, layers=64, clips=False, host_bandwidth=BUS))
    assert direct == pytest.approx(28 / 6 * FLOPS / BUS, rel=0.05)  # and 2 P bytes read for the norm


@pytest.mark.parametrize("drive", [False, True])
def test_steps_of_so_many_tokens_hide_transfers_and_steps_of_half_as_many_do_not(drive: bool) -> None:
    if drive:
        limits = Limits(device_nbytes=2 * 10**9, host_nbytes=4 * 10**9)
        question = Question(llama_shape("small", 8, 2048, vocabulary=8000), machine("laptop"), 4 * 4096, 4096)
        plan = find_plan(replace(question, limits=limits))
    else:
        plan = planned(4 * LENGTH, layers=64, fetch_bandwidth=BUS * 0.1, grad_bandwidth=BUS * 0.1)
    count = hidden_from(plan)
    assert count is not None

    def stall_share(tokens_per_step: int) -> float:
        asked = replace(plan.question, tokens_per_step=tokens_per_step)
        step = examine(asked, plan.choice.change(micro_batches_per_round=0), plan.micro_batch)
        return step.stall_seconds() / step.seconds

    length = plan.question.length
    assert stall_share(round(1.2 * count / length) * length) < 0.05
    assert stall_share(count // 2 // length * length) > 0.15


def test_transfers_that_always_or_never_hide_are_stated() -> None:
    never = planned(4 * LENGTH, fetch_bandwidth=1.0)
    assert hidden_from(never) is None
    assert "no number of tokens" in told(never)["hiding"]
    shared = find_plan(Question(deep(4), replace(computer(), shares_memory=True), 4 * LENGTH, LENGTH))
    assert hidden_from(shared) is None
    assert "nothing to hide" in told(shared)["hiding"]
    hidden = planned(64 * LENGTH)
    assert hidden_from(hidden) <= 64 * LENGTH, "a step that does not wait"
    assert "per step on" in told(hidden)["hiding"]


# Runs --------------------------------------------------------------------------------------------------------------


def test_days_of_a_run() -> None:
    plan = planned(4 * LENGTH)
    hardware = replace(plan.question.hardware, peak_flops=2e12)
    known = replace(plan, question=replace(plan.question, hardware=hardware))
    assert look(known).run_seconds is None
    assert dict(summary_rows(look(known)))["run"].startswith("1B tokens take ")
    assert as_content(look(known))["run"]["seconds_per_billion_tokens"] == 1e9 / plan.tokens_per_second
    outlook = look(known, token_budget=1e6)
    assert dict(summary_rows(outlook))["run"].startswith("1,000,000 tokens take ")
    assert outlook.run_seconds == pytest.approx(1e6 / plan.tokens_per_second)
    useful = step_flops(plan.question.model, [(4, LENGTH)])
    assert outlook.mfu == pytest.approx(useful / plan.seconds / 2e12)
    assert outlook.mfu == pytest.approx(
        0.75 / 2, rel=0.01
    )  # 6 of 8 operations are useful where layers are computed again
    assert outlook.written_nbytes_per_day == 0
    assert outlook.drive_days is None
    unknown = replace(outlook, plan=plan)
    assert unknown.mfu == pytest.approx(2 * outlook.mfu)  # of what is reached, where no peak is stated


def test_one_token_is_told_in_the_singular() -> None:
    plan = find_plan(Question(deep(2), computer(), 1, 1))
    assert "for 1 token in 1 micro-batch of 1 x 1" in dict(summary_rows(look(plan)))["step"]


def test_disk_writes_count_as_drive_wear() -> None:
    plan = planned(4 * LENGTH)
    access = Access("disk/m", 0, 1000, Moments(0))
    write = Op("WRITE", "host", 1, reads=(access._replace(buffer="host/m"),), writes=(access,))  # type: ignore[arg-type]
    buffers = {name: Buffer(name, "host", 1000, Use.OPTIMIZER_STATE) for name in ("host/m", "disk/m")}
    timeline = replay(derive_waits(Schedule((write, write), buffers, ("p", "l", "e"))), lambda op: 0.5)
    hardware = replace(plan.question.hardware, disk_endurance_nbytes=172_800_000_000)
    written = Plan(replace(plan.question, hardware=hardware), plan.choice, plan.work, timeline, plan.nbytes)
    outlook = look(written)
    assert outlook.written_nbytes_per_day == pytest.approx(2000 * 86_400)
    assert outlook.written_nbytes_per_billion_tokens == pytest.approx(2000 * 1e9 / (4 * LENGTH))
    assert outlook.drive_days == pytest.approx(1000)
    assert "twice the disk" in [upgrade.name for upgrade in changes(written.question, written)]
    told = (
        f"173 MB written per day, {amount(500e9 / LENGTH)} per billion tokens; the drive's endurance lasts 2.74 years"
    )
    assert told in dict(summary_rows(outlook))["disk"]
    assert warning_rows(outlook) == []
    hardware = replace(hardware, disk_endurance_nbytes=17_280_000_000)
    short = look(replace(written, question=replace(plan.question, hardware=hardware)))
    told = f"173 MB written to disk per day, {amount(500e9 / LENGTH)} per billion tokens: "
    assert warning_rows(short) == [("warning", told + "the drive's endurance lasts 100 days")]
    assert "disk" not in dict(summary_rows(short))
    slow = replace(plan.question.hardware, disk_endurance_nbytes=172_800_000_000, shares_memory=True, flops_fp32=1e20)
    both = look(replace(written, question=replace(plan.question, hardware=slow)))
    assert ["in bf16" in text for _, text in warning_rows(both)] == [True]
    assert "2.74 years" in dict(summary_rows(both))["disk"]


@pytest.mark.parametrize(("times", "told"), [(1.9, None), (21.4, "21 times as long in bf16"), (2.04, "2 times as")])
def test_slow_products_in_bfloat16_are_a_warning(times: float, told: str | None) -> None:
    """Of a processor without instructions for it, where bf16, the default, takes many times as long."""
    plan = planned(4 * LENGTH)
    shape = (1024, 1024, 1024)
    rates = [(kind, "bf16", 1e11) for kind in PRODUCT_KINDS] + [(kind, "fp32", 1e11) for kind in PRODUCT_KINDS]
    rates[1] = ("input gradient", "bf16", 1e11 / (3 * times - 2))
    rows = tuple(ProductRate(precision, *shape, flops, of) for of, precision, flops in rates)  # type: ignore[arg-type]
    processor = replace(plan.question.hardware, products=rows, shares_memory=True)

    def texts(hardware: Hardware, **changes: Any) -> list[str]:
        asked = replace(plan.question, hardware=hardware, **changes)
        return [text for _, text in warning_rows(look(replace(plan, question=asked)))]

    assert [told in text for text in texts(processor)] == ([] if told is None else [True])
    assert all("use precision fp32" in text for text in texts(processor))
    assert texts(replace(processor, shares_memory=False, slots_in_host=True)) == texts(processor)  # of several ranks
    assert as_content(look(replace(plan, question=replace(plan.question, hardware=processor))))["warnings"] == texts(
        processor
    )
    assert texts(replace(processor, shares_memory=False)) == []  # a GPU: other precisions cost other memory
    assert texts(processor, precision="fp32") == []


def test_a_speed_is_called_planned_unless_the_machine_was_probed() -> None:
    plan = planned(4 * LENGTH)
    speed = told(plan)["speed"]
    low, high = (round(factor * plan.tokens_per_second, -2) for factor in MEASURED_OVER_PLANNED)
    assert speed == f"{plan.tokens_per_second:,.0f} tokens/s planned, not measured ({low:,.0f} to {high:,.0f} likely)"
    probed = tuple((field, "measured: here") for field in ("flops", "fetch_bandwidth", "host_bandwidth"))
    hardware = replace(plan.question.hardware, sources=probed)
    measured = replace(plan, question=replace(plan.question, hardware=hardware))
    assert told(measured)["speed"] == f"{plan.tokens_per_second:,.0f} tokens/s"
    assert all("not measured" in told(examined(name))["speed"] for name in MACHINES)


@cache
def examined(name: str) -> Plan:
    question = Question(llama_shape("small", 2, 1024, vocabulary=4000), machine(name), 4096, 1024)
    return examine(question, Choice(Numerics(), Policy()), 2)


# Changes -----------------------------------------------------------------------------------------------------------


def test_more_sequences_are_suggested_only_if_compute_waits() -> None:
    slow = planned(LENGTH, fetch_bandwidth=FLOPS / (8 * LENGTH))  # transfers take eight times as long as a forward
    name = "256 tokens per step, in twice the sequences"
    asked = replace(slow.question, tokens_per_step=2 * LENGTH)
    ratio = ratios(slow)[name]
    assert ratio == pytest.approx(find_plan(asked).tokens_per_second / slow.tokens_per_second, rel=0.01)
    assert 1.5 < (ratio or 0) <= 2
    assert next(row[0] for row in gains(advised(look(slow))).rows) == name
    assert not any("sequences" in name for name in ratios(planned(64 * LENGTH)))


def test_clipping_costs_time_if_updates_wait_for_the_norm() -> None:
    slow, name = planned(8 * LENGTH, host_bandwidth=BUS), "no gradient clipping (max_grad_norm: null)"
    plan = planned(8 * LENGTH, clips=False, host_bandwidth=BUS)
    assert ratios(slow)[name] == pytest.approx(slow.seconds / plan.seconds, rel=0.01)
    assert name not in ratios(plan)


def test_changes_without_gain_are_named_but_have_no_row() -> None:
    found = tuple(Change(name, 100.0 * ratio, ratio) for name, ratio in (("a", 1.0), ("b", 1.5), ("c", 0.99)))
    outlook = replace(look(planned(4 * LENGTH)), changes=found)
    assert gains(outlook).rows == [("b", "150", "+50.0%")]
    assert without_gain(outlook) == "less than 1% each: a, c"
    assert without_gain(look(planned(4 * LENGTH))) == ""


def test_lifting_a_user_limit_on_device_memory_is_suggested_first() -> None:
    plan = find_plan(Question(deep(8), machine("rtx-4090"), 4 * LENGTH, LENGTH, limits=Limits(device_nbytes=10**9)))
    assert "all 25.8 GB of device memory" in ratios(plan)
    whole = replace(plan, question=replace(plan.question, limits=Limits()))
    assert "34.2 GB of device memory" in ratios(whole)


def test_memory_of_machines_without_a_device_is_no_device_to_buy() -> None:
    plan = find_plan(Question(deep(8), machine("mi300x"), 4 * LENGTH, LENGTH))
    assert f"{2 * machine('mi300x').device_nbytes / 1e9:.3g} GB of device memory" in ratios(plan)


def test_plans_for_a_cpu_speak_of_no_bus_and_no_device_memory() -> None:
    """And more of the memory's bandwidth is more of all that the step takes of it."""
    small = llama_shape("small", 4, 1024, vocabulary=8000)
    question = Question(small, machine("cpu-server"), 4096, 1024, limits=Limits(host_nbytes=40 * 10**9))
    for ranks in (1, 2):
        plan = find_plan(question_of_one(question, ranks, ranks))
        outlook = advised(look(plan))
        shown = [*summary_rows(outlook), *gains(outlook).rows, (without_gain(outlook),)]
        text = "\n".join(chain.from_iterable(shown))
        assert not re.search("bus|device(?! computes)", text)
        assert (ratios(plan)["twice the memory's bandwidth"] or 0) > 1.01


def test_advice_needs_less_than_what_failed() -> None:
    model, work = deep(4), Work((LENGTH, LENGTH), LENGTH)
    lots = {"device": 10**15, "host": 10**15}
    usual = nearest_that_fits(model, Numerics(), Policy(weight_slots=2, grad_slots=2), work, lots)
    assert usual == "one weight slot and one gradient slot would fit"
    lean = Policy(weight_slots=1, grad_slots=1, update="during_backward")
    assert nearest_that_fits(model, Numerics(), lean, work, lots) == "no other policy of this model fits"


def ratios(plan: Plan) -> dict[str, float | None]:
    return {change.name: change.ratio for change in changes(plan.question, plan)}


def test_upgrades_help_what_limits() -> None:
    slow_bus = ratios(planned(4 * LENGTH, fetch_bandwidth=1e8, grad_bandwidth=1e8))
    assert slow_bus["twice the bus"] == pytest.approx(2, rel=0.03)
    assert slow_bus["twice the device's flops"] == pytest.approx(1, rel=0.03)
    slow_device = ratios(planned(4 * LENGTH))
    assert slow_device["twice the device's flops"] == pytest.approx(2, rel=0.01)
    assert slow_device["twice the bus"] == pytest.approx(1, rel=0.01)
    slow_host = ratios(planned(4 * LENGTH, host_bandwidth=1e8))
    assert slow_host["twice the host's bandwidth"] == pytest.approx(2, rel=0.03)
    for found in (slow_bus, slow_device, slow_host):
        assert all(ratio is None or ratio >= 1 - 1e-6 for ratio in found.values())


def test_measured_matmuls_and_threads_are_scaled_in_upgrades() -> None:
    laptop = replace(machine("laptop"), launch_seconds=0.0)
    plan = find_plan(Question(deep(48), laptop, LENGTH, LENGTH, overrides={"placements": ()}))
    assert (ratios(plan)["twice the host's bandwidth"] or 0) > 1.05


def test_an_upgrade_is_found_if_nothing_fits() -> None:
    model, host = deep(8), computer()
    streams = find_plan(Question(model, host, 4 * LENGTH, LENGTH)).nbytes["device"]
    short = replace(host, host_nbytes=9 * model.numel, device_nbytes=streams // 2)  # 14 bytes each needed
    question = Question(model, short, 4 * LENGTH, LENGTH)
    with pytest.raises(DoesNotFit):
        find_plan(question)
    helped = {upgrade.name: upgrade.tokens_per_second for upgrade in changes(question, None)}
    enough = find_plan(replace(question, hardware=host))
    for memory in ("twice the host memory", "8.59 GB of device memory"):  # either has room for the state
        assert helped.pop(memory) == pytest.approx(enough.tokens_per_second, rel=0.01)
    assert set(helped.values()) == {None}


def test_upgrades_are_relative_to_the_plan() -> None:
    """Where an estimate is far off the plan, its step replayed whole is what gains are relative to."""
    model = llama_shape("small", 16, 1024, vocabulary=8000)
    device, host = 8 * model.numel + 10**9, 3 * model.numel
    limits, more_host = (Limits(device_nbytes=device, host_nbytes=nbytes) for nbytes in (host, 2 * host))
    plan = find_plan(Question(model, machine("rtx-4090"), 4096, 1024, limits=limits, overrides={"micro_batch": 4}))
    assert abs(estimate(plan.question, plan.choice, 4).seconds / plan.seconds - 1) > 0.03
    found = {upgrade.name: upgrade for upgrade in changes(plan.question, plan)}
    for upgrade in found.values():
        if upgrade.ratio is not None and upgrade.tokens_per_second is not None:
            assert upgrade.ratio >= 1 - 1e-9
            assert upgrade.tokens_per_second == pytest.approx(plan.tokens_per_second * upgrade.ratio, rel=1e-12)
    more = find_plan(replace(plan.question, limits=more_host))
    assert found["twice the host memory"].ratio == pytest.approx(plan.seconds / more.seconds, rel=0.01)


# Tables ---------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("shares", [False, True])
def test_the_table_of_owners_adds_up_to_the_peak(shares: bool) -> None:
    hardware = replace(machine("h100"), shares_memory=shares)
    for tokens_per_step, saves in ((2048, False), (16_384, True)):
        small = llama_shape("small", 8, 1024, vocabulary=8000)
        plan = find_plan(Question(small, hardware, tokens_per_step, 1024, saves=saves))
        table = peak_table(plan)
        tiers = {tier: sum(n for (of, _), n in table.items() if of == tier) for tier in plan.nbytes}
        assert tiers == plan.nbytes
        owners = {owner for _, owner in table}
        assert ("checkpoint" in owners) == saves
        assert {"inputs of layers", "graphs of layers", "optimizer state"} & owners >= {"optimizer state"}
        assert any("graphs" in owner or "loss" in owner for owner in owners)


def test_state_on_the_disk_is_not_listed_as_host_memory_on_a_cpu() -> None:
    small = llama_shape("small", 8, 1024, vocabulary=8000)
    plan = find_plan(Question(small, machine("cpu-server"), 2048, 1024, limits=Limits(host_nbytes=1_200_000_000)))
    assert plan.nbytes["disk"]
    table = peak_table(plan)
    assert {tier: sum(n for (of, _), n in table.items() if of == tier) for tier in plan.nbytes} == plan.nbytes


def test_the_outlook_is_deterministic() -> None:
    question = Question(llama_shape("small", 10, 1024, vocabulary=8000), machine("a6000"), 16_384, 1024)
    (first, again) = (find_plan(question) for _ in range(2))
    assert first == again
    assert advised(look(first)) == advised(look(again))


def test_amounts_have_about_three_digits() -> None:
    assert [amount(n) for n in (0, 999, 1e6, 1.4689e12, 141e9, 1e9 - 1)] == [
        *("0 B", "999 B", "1.00 MB", "1.47 TB", "141 GB", "1.00 GB")
    ]
    assert [duration(s) for s in (0.0, 7.2822, 86_400 * 41, 1e-3, 7200, 94)] == [
        *("0.00 ms", "7.28 s", "41.0 days", "1.00 ms", "2.00 hours", "94.0 s")
    ]
    assert [tokens(n) for n in (65_536, 1e12, 1.5e13, 2.5e9)] == ["65,536", "1T", "15T", "2.5B"]


def test_an_empty_timeline_has_no_critical_path() -> None:
    plan = planned(4 * LENGTH)
    empty = Timeline(Schedule((), {}, ()), (), ())
    assert loads(replace(plan, timeline=empty)) == ()


# Stalls --------------------------------------------------------------------------------------------------------------


def test_wait_causes_add_up_to_the_total_wait() -> None:
    for rates in ({}, {"fetch_bandwidth": 1e8}, {"grad_bandwidth": 1e8}, {"host_bandwidth": 1e9}):
        plan = planned(LENGTH, **rates)
        found = stalls(plan.timeline)
        assert sum(found.values()) == pytest.approx(plan.timeline.stall_seconds(), rel=1e-6)
        assert "compute" not in found


@pytest.mark.parametrize(
    ("rates", "cause"),
    [({"fetch_bandwidth": 1e8}, "fetch"), ({"grad_bandwidth": 1e8}, "grad"), ({"host_bandwidth": 1e9}, "host")],
)
def test_the_slowed_resource_is_the_largest_wait_cause(rates: dict[str, float], cause: str) -> None:
    plan = planned(LENGTH, **rates)
    assert next(iter(stalls(plan.timeline))) == cause
    assert "compute waits" in told(plan)["limit"]


def test_a_slow_disk_is_a_separate_cause() -> None:
    hardware = replace(computer(host_bandwidth=1e12), disk_nbytes=10**13, disk_read_bandwidth=1e7)
    question = Question(deep(16), hardware, LENGTH, LENGTH, overrides={"activations": "recompute"})
    everything = find_plan(replace(question, overrides={"placements": ()})).nbytes["host"]
    plan = find_plan(replace(question, limits=Limits(host_nbytes=everything // 2, device_nbytes=10**7)))
    assert next(iter(stalls(plan.timeline))) == "read"
    assert "for disk in" in told(plan)["limit"]
