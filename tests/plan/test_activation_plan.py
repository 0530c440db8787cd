"""What a mixture promises is about what its replay takes; every one is a mixture of all layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from bench.shapes import llama_shape
from megatrain.plan import Choice, Question, estimate, examine, find_plan, machine
from megatrain.plan.activation_plan import BY_LAYER, KINDS, OFFLOADED_OUTPUTS, Mixtures, rows_of
from megatrain.plan.estimates import coarse
from megatrain.plan.placement import PARTS
from megatrain.plan.report import peak_table
from megatrain.schedule import Use
from megatrain.spec import NOT_OFFLOADED, Growth, Hardware, Keep, Numerics, Policy, SideValue

MACHINE = Hardware("m", 1 << 40, 1 << 40, 1e9, 1e9, 2e10, 1e10, device_bandwidth=1e12, launch_seconds=1e-6)


def mixtures(hardware: Hardware) -> tuple[Question, Mixtures]:
    asked = Question(llama_shape("llama", 16, 64, vocabulary=512), hardware, 2048, 128)
    policy = Policy(shares_memory=hardware.shares_memory)
    choice = Choice(Numerics(), policy)
    return asked, Mixtures(asked, choice, 4, coarse(asked, 4), estimate(asked, choice, 4))


@pytest.mark.parametrize("bus", [2e8, pytest.param(1e9, marks=pytest.mark.slow), 1e10])
def test_estimated_savings_are_close_to_replayed_ones(bus: float) -> None:
    asked, found = mixtures(replace(MACHINE, fetch_bandwidth=bus, grad_bandwidth=bus))
    every = found.best({}, 10**6)
    assert len(every) > 2000
    for seconds, counts in every[:: len(every) // 12]:
        assert sum(counts) == PARTS
        plan = examine(asked, Choice(Numerics(), Policy(activations_by_layer=rows_of(counts, 16))), 4)
        assert seconds == pytest.approx(plan.seconds, rel=0.15), counts
        estimated = found.estimate(counts).nbytes
        assert estimated["device"] == pytest.approx(plan.nbytes["device"], rel=0.15), counts
        assert estimated["host"] == pytest.approx(plan.nbytes["host"], rel=0.02), counts


@pytest.mark.parametrize("is_hidden", [False, True])
def test_offloaded_side_values_are_priced(is_hidden: bool) -> None:
    """Keys and values that layers share, or hidden states that later layers and the head read."""
    asked = mixtures(replace(MACHINE, fetch_bandwidth=1e9, grad_bandwidth=1e9))[0]
    size, users = Growth(per_token=asked.model.hidden_size * 2), (9, 13, *((17,) if is_hidden else ()))
    shared = [SideValue(source, users, size=size, is_hidden=is_hidden) for source in ((3, 6) if is_hidden else (6, 6))]
    plain, asked = asked, replace(asked, model=replace(asked.model, sides=tuple(shared)))
    choice, added, device_nbytes = Choice(Numerics(), Policy()), Counter[str](), dict[str, int]()
    for micro_batch in (1, 4):
        found = Mixtures(asked, choice, micro_batch, coarse(asked, micro_batch), estimate(asked, choice, micro_batch))
        for kind in ("input", "offload", "offload_chosen"):
            plan = examine(asked, choice.change(activations_by_layer=((kind,),)), micro_batch)
            estimated = found.estimate(tuple(PARTS if each == kind else 0 for each in KINDS))
            assert estimated.seconds == pytest.approx(plan.seconds, rel=0.15), kind
            assert estimated.nbytes["device"] == pytest.approx(plan.nbytes["device"], rel=0.03), kind
            assert estimated.nbytes["host"] == pytest.approx(plan.nbytes["host"], rel=0.02), kind
            device_nbytes[kind] = plan.nbytes["device"] - examine(plain, plan.choice, micro_batch).nbytes["device"]
            added[kind] = peak_table(plan).get(("host", Use.OFFLOADED_SIDES.value), 0)
        values = 16 * 128 * 64 * 2 * 2
        assert micro_batch > 1 or device_nbytes["offload"] < values / 2, "slots, and what the head reads at once"
        assert not added["input"]
        assert values / 2 <= added["offload"] <= 2 * values


def test_the_fastest_fitting_candidate_comes_first() -> None:
    _, found = mixtures(MACHINE)
    everything = found.best({}, 1)[0]
    least = found.inputs.nbytes["device"] + min(found.added_nbytes["device"])
    budget = 0.5 * found.estimate(everything[1]).nbytes["device"] + 0.5 * least
    fitting = found.best({"device": budget}, 50)
    assert all(found.estimate(counts).nbytes["device"] <= budget for _, counts in fitting)
    rounded = [round(seconds, 12) for seconds, _ in fitting]
    assert rounded == sorted(rounded)
    staying = found.best({"device": budget}, 50, outputs_stay=True)
    assert staying
    assert not any(counts[place] for _, counts in staying for place in OFFLOADED_OUTPUTS)
    assert not found.best({"device": 0.0}, 1)


def test_candidates_slower_than_estimated_are_used_less() -> None:
    _, found = mixtures(replace(MACHINE, fetch_bandwidth=1e10, grad_bandwidth=1e9))
    out = [KINDS.index(kind) for kind in NOT_OFFLOADED]
    least, most = min(found.added_nbytes["device"]), max(found.added_nbytes["device"])
    budget = {"device": found.inputs.nbytes["device"] + least + 0.3 * (most - least)}
    (seconds, counts), *_ = found.best(budget, 1)
    assert sum(counts[place] for place in out) > 2
    slowed = found.slowed(counts, 1.5 * seconds)
    (_, fewer), *_ = slowed.best(budget, 1)
    assert sum(fewer[place] for place in out) < sum(counts[place] for place in out)
    staying = tuple(PARTS if kind == "attention" else 0 for kind in KINDS)
    assert slowed.estimate(staying) == found.estimate(staying)


@pytest.mark.parametrize("kinds", [("graph", "offload", "input", "drop"), ("offload_chosen", "attention")])
@pytest.mark.parametrize("entries", [1, 4])
@pytest.mark.parametrize("layers", [1, 5, 16, 90])
def test_activation_rows_match_layer_counts(layers: int, entries: int, kinds: tuple[Keep, ...]) -> None:
    counts = tuple(PARTS // len(kinds) if kind in kinds else 0 for kind in KINDS)
    rows = rows_of(counts, layers, entries)
    assert len(rows) == layers
    assert all(len(row) == entries for row in rows)
    for kind in KINDS:
        share, found = counts[KINDS.index(kind)] / PARTS, [row.count(kind) for row in rows]
        assert abs(sum(found) - share * layers * entries) <= entries
        assert kind not in BY_LAYER or {0, entries}.issuperset(found), "all micro-batches or none"


@pytest.mark.few(3)
@pytest.mark.parametrize("layers", [2, 5, 16, 36])
@pytest.mark.parametrize("sequences", [4, 16])
def test_mixtures_are_priced_with_whole_layers(layers: int, sequences: int) -> None:
    asked = replace(mixtures(MACHINE)[0], model=llama_shape("llama", layers, 64, vocabulary=512))
    asked = replace(asked, tokens_per_step=sequences * asked.length)
    choice = Choice(Numerics(), Policy())
    found = Mixtures(asked, choice, 4, coarse(asked, 4), estimate(asked, choice, 4))
    every = [counts for _, counts in found.best({}, 10**6)]
    assert len({tuple(found.fields(counts).items()) for counts in every}) == len(every)
    for counts in every[:: -(-len(every) // 200)]:
        rows = rows_of(counts, layers, sequences // 4)
        wide = choice.change(activations_by_layer=rows)
        policy = choice.change(**found.fields(counts)).policy
        cells = [(layer, micro) for layer in range(layers) for micro in range(sequences // 4)]
        assert all(policy.keep(*cell) == wide.policy.keep(*cell) for cell in cells)
        by_rows = estimate(asked, wide, 4)
        assert found.estimate(counts).seconds == pytest.approx(by_rows.seconds)
        assert found.estimate(counts).nbytes == by_rows.nbytes


def test_nothing_is_offloaded_on_shared_memory_devices() -> None:
    _, found = mixtures(replace(MACHINE, shares_memory=True))
    away = [KINDS.index(kind) for kind in NOT_OFFLOADED]
    assert not any(counts[place] for _, counts in found.best({}, 10**6) for place in away)


@pytest.mark.parametrize(
    ("gigabytes", "tokens"),
    [(8, 65_536), pytest.param(16, 65_536, marks=pytest.mark.slow), pytest.param(16, 262_144, marks=pytest.mark.slow)],
)
def test_inputs_are_not_dropped_where_offloading_all_of_them_is_faster(gigabytes: int, tokens: int) -> None:
    """On a bus of 4 GB/s a mixture's sums promise more of dropped inputs than its replay keeps."""
    slow = replace(machine("h200"), device_nbytes=gigabytes * 10**9, host_nbytes=10**13, fetch_bandwidth=4e9)
    slow = replace(slow, grad_bandwidth=4e9, duplex_fetch_bandwidth=None, duplex_grad_bandwidth=None, disk_nbytes=None)
    asked = Question(llama_shape("8B", 32, 4096), slow, tokens, 4096)
    offloading = replace(asked, overrides={"activations_by_layer": (("offload",),)})
    assert find_plan(asked).seconds <= 1.0001 * find_plan(offloading).seconds
