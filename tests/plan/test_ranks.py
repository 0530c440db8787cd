"""One rank of several is planned for: what it shares, what collectives cost, and that more ranks are never slower."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.shapes import llama_shape
from megatrain.errors import DoesNotFit, PlanError
from megatrain.plan import Choice, Plan, Question, contention, examine, find_plan, machine, op_seconds, question_of_one
from megatrain.plan.analysis import RESOURCES, changes, look, with_more
from megatrain.plan.cost import link_shares, optimizer_bandwidth
from megatrain.plan.estimates import seconds_on
from megatrain.plan.ranks import FIXED, ranks_on_each, share_of
from megatrain.plan.report import as_content, summary_rows
from megatrain.schedule import Op, build_step
from megatrain.schedule.check_world import check_world
from megatrain.schedule.passes.state_buffers import state_nbytes
from megatrain.spec import Hardware, Limits, ModelSpec, Numerics, Policy, Work
from megatrain.spec.hardware import AttentionRate, ProductRate
from megatrain.spec.layout import layout_of
from megatrain.spec.limits import parse_nbytes
from tests.schedule.test_directions import with_matrices

SMALL = llama_shape("small", 6, 1024, vocabulary=8000)
PLAIN = Hardware("plain", 8 << 30, 32 << 30, 1e10, 1e10, 1e13, 4e10, devices=4, link_bandwidth=4e9)


def asked(
    ranks: int, name: str = "8x-h100", *, model: ModelSpec = SMALL, each: int = 4, length: int = 1024, nodes: int = 1
) -> Question:
    """With so many sequences for each rank. Launches are free: they would decide the time of layers this small."""
    hardware = replace(machine(name), launch_seconds=0.0)
    question = Question(model, hardware, ranks * each * length, length, saves=True)
    return question_of_one(question, ranks, ranks_on_each(ranks, nodes))


# What a rank has ------------------------------------------------------------------------------------------------------


def test_one_rank_plans_like_no_ranks() -> None:
    question = Question(SMALL, machine("h100"), 4096, 1024)
    assert question_of_one(question, 1, 1) is question


def test_ranks_share_their_machines_resources_equally() -> None:
    whole = machine("8x-h100")
    part = share_of(whole, 16, 4)
    assert part.sharing_ranks == 4
    for name in ("host_nbytes", "disk_nbytes", "host_bandwidth", "host_dram_bandwidth", "disk_read_bandwidth"):
        assert getattr(part, name) == pytest.approx(getattr(whole, name) / 4)
    for name in ("device_nbytes", "fetch_bandwidth", "flops", "link_bandwidth", "node_bandwidth"):
        assert getattr(part, name) == getattr(whole, name)
    for threads in (1, 3, 7, 30):
        together = optimizer_bandwidth(whole, 4 * threads)
        assert 4 * optimizer_bandwidth(part, threads) == pytest.approx(together, rel=0.07)


def test_buses_sharing_a_link_split_its_bandwidth() -> None:
    switched = replace(PLAIN, shared_bus_bandwidth=2e10)
    assert [share_of(switched, here, here).fetch_bandwidth for here in (2, 4)] == [1e10, 5e9]


def test_a_ranks_host_memory_is_its_share_of_the_state() -> None:
    """14 bytes a parameter over the ranks, and no more than what pads units to be shared."""
    for ranks, nodes in ((2, 1), (8, 1), (16, 2)):
        plan = examine(asked(ranks, nodes=nodes), Choice(Numerics(), Policy()), 4)
        exact = 14 * SMALL.numel / ranks
        assert exact <= plan.nbytes["host"] - plan.save_nbytes <= 1.02 * exact
        assert plan.question.model.ranks == ranks


def test_limits_apply_per_machine_and_per_device() -> None:
    question = Question(SMALL, PLAIN, 8192, 1024, limits=Limits(1 << 30, 8 << 30, 4 << 30))
    assert question_of_one(question, 4, 4).limits == Limits(1 << 30, 2 << 30, 1 << 30)
    assert question_of_one(question, 2, 1 + 1).limits == Limits(1 << 30, 4 << 30, 2 << 30)


def test_uneven_micro_batches_are_planned_for_the_busiest_rank() -> None:
    question = Question(SMALL, PLAIN, 5 * 2048, 1024, overrides={"micro_batch": 2})
    mine = question_of_one(question, 3, 3)
    assert (mine.sequences, mine.parts) == (4, 2.5)
    plan = find_plan(mine)
    assert plan.tokens_per_second * plan.seconds == pytest.approx(5 * 2048)


def test_ranks_computing_in_host_memory_have_slots_there() -> None:
    """On a cpu: half of a rank's part, and its part of the cores."""
    whole = machine("cpu-server")
    part = share_of(whole, 2, 2)
    assert not part.shares_memory
    assert part.host_nbytes == part.device_nbytes == whole.host_nbytes // 4
    assert part.flops == whole.flops / 2
    assert [row.forward_bandwidth for row in part.elementwise] == [
        row.forward_bandwidth / 2 for row in whole.elementwise
    ]
    rates = ProductRate("bf16", 64, 64, 64, 1e12), AttentionRate("bf16", 64, 64, 1e12, 2e12)
    probed = share_of(replace(whole, products=rates[:1], attention=rates[1:]), 2, 2)
    assert (
        probed.products[0].flops == probed.attention[0].forward_flops == probed.attention[0].backward_flops / 2 == 5e11
    )


# Collectives ----------------------------------------------------------------------------------------------------------


def collectives(question: Question) -> list[Op]:
    plan = examine(question, Choice(Numerics(), Policy()), 4)
    return plan.timeline.schedule.collectives


@pytest.mark.parametrize(("here", "nodes"), [(2, 1), (4, 1), (4, 2), (1, 3)])
def test_collectives_are_priced_by_the_slower_link(here: int, nodes: int) -> None:
    ranks, hardware = here * nodes, replace(PLAIN, node_bandwidth=5e9, link_seconds=1e-3, device_bandwidth=1e12)
    question = question_of_one(Question(SMALL, hardware, ranks * 4096, 1024), ranks, here)
    price = op_seconds(question.model, Numerics(), Policy(), Work((4096,)), question.hardware)
    for op in collectives(question)[:: 1 if nodes == 1 else 3]:
        shard = next(each for each in (*op.reads, *op.writes) if each.stop - each.start >= op.form[3])  # type: ignore[operator]
        size = layout_of(question.model.units[op.unit]).size
        assert shard.stop - shard.start <= 4 * size
        if op.kind == "GATHER":
            whole = op.writes[0].stop - op.writes[0].start
            inside = outside = whole * (ranks - 1) / ranks
            summed = 0.0
        else:
            whole = op.reads[0].stop - op.reads[0].start
            inside, outside = whole * (here - 1) / ranks, here * whole * (ranks - here) / ranks
            summed = 4 * whole / 1e12
        seconds = 1e-3 + max(inside / 4e9 if here > 1 else 0.0, outside / 5e9 if nodes > 1 else 0.0)
        assert price(op) == pytest.approx(seconds + summed)


def test_host_collectives_use_dram_and_bus_and_direct_links_do_not() -> None:
    question = asked(4, "4x-rtx-4090")
    of = contention(question.model, Numerics(), question.hardware)
    own = contention(question.model, Numerics(), replace(question.hardware, link_route="direct"))
    bus = contention(question.model, Numerics(), replace(question.hardware, link_route="bus"))
    for op in collectives(question):
        whole = op.writes[0] if op.kind == "GATHER" else op.reads[0]
        assert of.dram_nbytes(op) == 2 * (whole.stop - whole.start) * 3 / 4
        assert own.dram_nbytes(op) == bus.dram_nbytes(op) == 0
    assert of.linked == bus.linked == {"fetch": 25 / 40, "grad": 25 / 40}
    assert own.linked == link_shares(machine("4x-rtx-4090")) == {}


def test_ranks_share_the_products_of_an_update_and_pay_for_the_slowest() -> None:
    """Each matrix is made orthogonal once, and its parts cross the link twice; the slowest rank has what no cut could
    lessen, a matrix of the largest size."""
    seconds = dict[tuple[int, str], float]()
    for ranks in (1, 4):
        question = asked(ranks, model=with_matrices(SMALL))
        plan = examine(question, Choice(Numerics(), Policy()), 4)
        price = op_seconds(question.model, Numerics(), Policy(), plan.work, question.hardware)
        for kind in ("ORTHOGONALIZE", "ALLTOALL", "REDUCE"):
            seconds[ranks, kind] = sum(price(op) for op in plan.timeline.schedule.ops if op.kind == kind)
    assert seconds[1, "ORTHOGONALIZE"] / 4 <= seconds[4, "ORTHOGONALIZE"] < seconds[1, "ORTHOGONALIZE"] / 3
    assert 0 < seconds[4, "ALLTOALL"] < seconds[4, "REDUCE"]


def test_shared_memory_sums_are_priced_by_bytes_read_and_written() -> None:
    question = question_of_one(Question(SMALL, replace(PLAIN, host_dram_bandwidth=1e11), 16 * 1024, 1024), 4, 4)
    choice = Choice(Numerics(), Policy(delivery="shared"))
    plan = examine(question, choice, 4)
    price = op_seconds(question.model, choice.numerics, choice.policy, plan.work, question.hardware)
    of = contention(question.model, choice.numerics, question.hardware)
    ops = plan.timeline.schedule.ops
    for op in plan.timeline.schedule.collectives:
        if op.kind == "REDUCE":
            moved = sum(each.stop - each.start for each in (op.reads[0], op.writes[0]))
            assert price(op) == pytest.approx(4e-4 + moved / 1e10)  # a fourth of the host's bandwidth
            assert of.dram_nbytes(op) == moved
        else:
            assert (op.kind, price(op), of.dram_nbytes(op)) == ("BARRIER", 2e-4, 0)
    fetched = sum(op.nbytes for op in ops if op.kind == "FETCH" and op.unit == 1) / 2
    assert fetched == 2 * layout_of(question.model.units[1]).size  # whole, in each pass


def test_the_faster_delivery_is_chosen_and_gather_across_machines() -> None:
    for name in ("8x-h100", "8x-rtx-4090"):
        question = asked(4, name, each=1)
        found = find_plan(question)
        each = {
            way: find_plan(replace(question, overrides={**question.overrides, "delivery": way})).seconds
            for way in ("gather", "shared")
        }
        assert found.seconds == min(each.values())
        assert each[found.policy.delivery] == found.seconds
    assert find_plan(asked(16, each=1, nodes=2)).policy.delivery == "gather"


def test_a_link_twice_as_fast_helps_if_the_step_waits_for_it() -> None:
    question = asked(8, "8x-rtx-4090", each=1)
    plan = find_plan(replace(question, overrides={**question.overrides, "delivery": "gather"}))
    gains = {change.name: change.ratio for change in changes(plan.question, plan)}
    assert (gains["twice the link"] or 0) > 1.02


def test_ten_percent_more_of_everything_saves_an_eleventh_of_a_ranks_step() -> None:
    """So no rate that it depends on is left out, but what it costs to launch an op and to begin a collective."""
    question = asked(4, "4x-rtx-4090")
    hardware = replace(question.hardware, launch_seconds=None, link_seconds=None)
    gathers = {**question.overrides, "delivery": "gather"}
    plan = find_plan(replace(question, hardware=hardware, overrides=gathers))
    for resource in RESOURCES:
        hardware = with_more(hardware, resource, 1.1)
    assert seconds_on(plan, replace(question, hardware=hardware)) == pytest.approx(plan.seconds / 1.1)


# Plans ----------------------------------------------------------------------------------------------------------------


def test_plans_for_ranks_use_only_supported_features() -> None:
    """What is on the device is each one's part."""
    for name, ranks, delivery in (("8x-h100", 8, "gather"), ("2x-rtx-5090", 2, "gather"), ("8x-h100", 8, "shared")):
        question = asked(ranks, name)
        plan = find_plan(replace(question, overrides={**question.overrides, "delivery": delivery}))
        assert {field: getattr(plan.policy, field) for field in FIXED} == FIXED
        assert any(placement.weights == "device" for placement in plan.policy.placements)
        assert any(placement.on_device for placement in plan.policy.placements) == (delivery == "gather")
        there = state_nbytes(question.model, plan.numerics, plan.policy)["device"]
        assert there <= 1.02 * (14 if delivery == "gather" else 2 * ranks) * SMALL.numel / ranks
    assert find_plan(replace(asked(2, "2x-rtx-5090"), clips=False)).policy.update == "during_backward"


def test_weights_stay_in_files_for_one_rank_and_never_for_several() -> None:
    """Which is asked of them by a setting alone, and refused in a line that says what to use."""
    names = {param.name for unit in SMALL.units for param in unit.params if "norm" not in param.name}
    units = [
        replace(unit, params=tuple(replace(param, trainable=param.name not in names) for param in unit.params))
        for unit in SMALL.units
    ]
    base = replace(SMALL, units=tuple(units)).with_in_files(names)
    tight = replace(
        asked(2, "2x-rtx-5090").hardware, host_nbytes=100 << 20, device_nbytes=300 << 20, disk_nbytes=1 << 40
    )
    one, two = (find_plan(question_of_one(Question(base, tight, 2048, 1024), ranks, ranks)) for ranks in (1, 2))
    assert any(placement.weights == "file" for placement in one.policy.placements)
    assert all(placement.weights != "file" for placement in two.policy.placements)
    told = r"policy\.placements: with several ranks weights in files cannot be shared by ranks yet; use host, disk"
    with pytest.raises(PlanError, match=told):
        build_step(base.over(2), one.numerics, replace(one.policy, read_ahead_nbytes=0), one.work)


def test_ranks_whose_steps_wait_for_their_hosts_update_on_their_devices() -> None:
    """Own parts of layers whose state has no room there, in small steps."""
    model, less = llama_shape("wide", 12, 4096, vocabulary=8000), replace(machine("8x-h100"), device_nbytes=3 << 30)
    question = question_of_one(Question(model, less, 8 * 1024, 1024, saves=True), 8, 8)
    plan = find_plan(question)
    without = find_plan(replace(question, overrides={**question.overrides, "streamed_updates": 0.0}))
    assert plan.policy.streamed_updates > 0
    assert plan.seconds < 0.9 * without.seconds
    of_all = [build_step(question.model, plan.numerics, plan.policy, plan.work, "all", rank=rank) for rank in range(8)]
    check_world(of_all)


def test_ranks_overflow_state_to_their_shared_drive() -> None:
    """Unless their devices have: then each keeps its part there, and nothing waits for the drive."""
    small = replace(machine("4x-rtx-4090"), host_nbytes=1 << 30, device_nbytes=360 << 20)
    plan, roomy = (
        find_plan(question_of_one(Question(SMALL, hardware, 16 * 1024, 1024), 4, 4))
        for hardware in (small, replace(small, device_nbytes=24 << 30))
    )
    assert 0 < plan.nbytes["disk"] <= 14 * SMALL.numel / 4 * 1.02
    assert plan.nbytes["host"] <= (1 << 30) / 4
    assert roomy.nbytes["disk"] == 0
    assert roomy.seconds < plan.seconds / 10


def test_shared_weights_stay_in_memory_with_state_on_disk() -> None:
    """And where that is too little room, the refusal says what would fit, in words of a plan for ranks."""
    here = replace(machine("4x-rtx-4090"), host_nbytes=(5 << 30) // 4, device_nbytes=360 << 20)
    question = Question(SMALL, here, 16 * 1024, 1024, overrides={"delivery": "shared"})
    plan = find_plan(question_of_one(question, 4, 4))
    assert plan.nbytes["disk"]
    assert all(placement.weights in ("host", "device") for placement in plan.policy.placements)
    less = replace(question, hardware=replace(here, host_nbytes=1 << 30))
    with pytest.raises(DoesNotFit, match="B of host memory, even with state on the disk"):
        find_plan(question_of_one(less, 4, 4))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "ranks", "nodes", "tiers"),
    [("4x-rtx-4090", 4, 1, ["device", "host"]), ("8x-h100", 16, 2, ["device", "host"]), ("cpu-server", 2, 1, ["host"])],
)
def test_the_memory_that_a_refusal_names_is_enough_when_typed(
    name: str, ranks: int, nodes: int, tiers: list[str]
) -> None:
    """Limits are those of a machine, whose ranks divide them."""

    def planned(**limits: int) -> Plan:
        question = Question(SMALL, machine(name), ranks * 1024, 1024, limits=Limits(**limits, disk_nbytes=0))
        return find_plan(question_of_one(question, ranks, ranks // nodes))

    with pytest.raises(DoesNotFit, match=rf"each of {ranks} ranks.*: needs at least") as caught:
        planned(**dict.fromkeys((f"{tier}_nbytes" for tier in tiers), 1 << 22))
    said = re.findall(r"(\S+ [MG]B) of (?:memory on each (device)|(host) memory on each machine)", caught.value.fix)
    typed = {device or host: parse_nbytes(amount, "a limit") for amount, device, host in said}
    assert sorted(typed) == tiers
    assert planned(**{f"{tier}_nbytes": nbytes for tier, nbytes in typed.items()})
    with pytest.raises(DoesNotFit):
        planned(**{f"{tier}_nbytes": nbytes * 9 // 10 for tier, nbytes in typed.items()})


TOGETHER = [
    ("8x-rtx-4090", (2, 8), 4),
    pytest.param("8x-rtx-4090", (2, 4, 8), 4, marks=pytest.mark.slow),
    pytest.param("8x-h100", (1, 2, 8), 8, marks=pytest.mark.slow),
    pytest.param("4x-gh200", (1, 2, 4), 8, marks=pytest.mark.slow),
    pytest.param("2x-rtx-5090", (1, 2), 16, marks=pytest.mark.slow),
    pytest.param("8x-h200", (1, 2, 4, 8), 2, marks=pytest.mark.slow),
    pytest.param("8x-rtx-4090", (1, 2, 4, 8), 32, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "ranks", "each"), TOGETHER)
def test_weak_scaling_is_never_slower_per_rank_added(name: str, ranks: tuple[int, ...], each: int) -> None:
    rates = [find_plan(asked(count, name, each=each)).tokens_per_second for count in ranks]
    assert all(more > fewer for fewer, more in pairwise(rates)), rates


def test_rank_totals_are_shown_for_all_and_per_machine() -> None:
    plan = find_plan(asked(16, nodes=2))
    outlook = look(plan, 1e9)
    told = dict(summary_rows(outlook))
    assert f"{16 * 4096:,} tokens in 1 micro-batch of 4 x 1,024 on each rank" in told["step"]
    assert told["speed"].startswith(f"{16 * 4096 / plan.seconds:,.0f} tokens/s planned")
    assert told["ranks"] == "16 on 2 machines, 8 on each: each with 1/16 of the state and 4,096 tokens of a step"
    assert "by each rank" in told["each host"]
    assert told["link"].startswith("361 GB/s between devices (measured on 8 H200), 384 GB/s between machines (8 times")
    assert outlook.run_seconds == pytest.approx(1e9 * plan.seconds / (16 * 4096))
    content = as_content(outlook)["question"]
    assert (content["tokens_per_step"], content["ranks"], content["nodes"]) == (16 * 4096, 16, 2)


# What cannot be -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks", "nodes", "told"),
    [
        ("8x-h100", 0, 1, "ranks: 0 is not valid; give 1 or more"),
        ("8x-h100", 8, -1, "nodes: -1 is not valid; give 1 or more"),
        ("8x-h100", 8, 3, "nodes: 8 ranks cannot be divided evenly among 3 machines"),
        ("8x-h100", 1, 2, "nodes: 1 rank cannot be divided evenly among 2 machines"),
        ("h100", 8, 1, "ranks: 8 ranks on each machine, and .* has one GPU; .* 8x-h100"),
        ("4x-rtx-4090", 8, 1, "ranks: 8 ranks on each machine, and .* has 4 GPUs; give 4 ranks.* 8x-rtx-4090"),
        ("8x-rtx-4090", 16, 2, "the bandwidth to other machines is unknown; add node_bytes_per_second"),
        ("8x-h100", 3, 1, "tokens_per_step: 8 sequences per step cannot be divided evenly among 3 ranks"),
        ("8x-h200", 8, 1, "tokens_per_step: 4 sequences per step cannot be divided evenly among 8 ranks"),
    ],
)
def test_impossible_rank_counts_are_one_error(name: str, ranks: int, nodes: int, told: str) -> None:
    sequences = 4 if name == "8x-h200" else 8
    with pytest.raises(PlanError, match=told) as caught:
        question_of_one(Question(SMALL, machine(name), sequences * 1024, 1024), ranks, ranks_on_each(ranks, nodes))
    assert "\n" not in str(caught.value)


def test_devices_without_a_known_link_are_refused_by_key() -> None:
    with pytest.raises(
        PlanError, match="bandwidth between its devices is unknown; add link_bytes_per_second to its file"
    ):
        share_of(replace(PLAIN, link_bandwidth=None), 2, 2)
