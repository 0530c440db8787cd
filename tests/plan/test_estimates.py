"""What the search extrapolates from shallow models and few micro-batches is what the whole replay finds."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest

from bench.shapes import llama_shape
from megatrain.plan import Choice, Question, estimate, estimates, examine, find_plan, machine, survey
from megatrain.plan.analysis import advised, look
from megatrain.plan.estimates import ROUNDS, StepPrices, examine_rounds
from megatrain.schedule import Schedule, build_step
from megatrain.schedule.ops import STREAMS
from megatrain.spec import IN_HOST, Limits, ModelSpec, Numerics, ParamSpec, Placement, Policy, UnitSpec, Work

ROOMY = replace(machine("h200"), host_nbytes=10**13, device_nbytes=10**12)


def mixed(layers: int, kind: Callable[[int], str]) -> ModelSpec:
    """A Llama of width 1024 in which some layers are `big` (a wide feed-forward) or see only a `window`."""
    plain, big = (llama_shape("mixed", layers, 1024, feed_forward=wide, vocabulary=1000) for wide in (3584, 16384))
    units = list(plain.units)
    for index in plain.layers:
        if kind(index) == "big":
            units[index] = big.units[index]
        elif kind(index) == "window":
            units[index] = replace(units[index], profile=replace(units[index].profile, window=256))
    return replace(plain, units=tuple(units))


@pytest.mark.parametrize(
    "model",
    [
        mixed(26, lambda index: ""),
        mixed(26, lambda index: "big" if index % 4 == 3 else ""),
        mixed(26, lambda index: "" if index % 6 == 0 else "window"),
        mixed(20, lambda index: "big" if index > 16 else ""),
        mixed(20, lambda index: "big" if index == 1 else "window" if index % 2 else ""),
    ],
    ids=["alike", "every fourth big", "one in six sees all", "the last big", "three kinds"],
)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_layer_kinds_are_weighted_by_count(model: ModelSpec, activations: str) -> None:
    question = Question(model, ROOMY, 4 * 8192, 8192)
    policy = Policy(activations=activations)  # type: ignore[arg-type]
    guessed, found = estimate(question, Choice(Numerics(), policy), 2), examine(question, Choice(Numerics(), policy), 2)
    assert guessed.seconds == pytest.approx(found.seconds, rel=0.01)
    assert guessed.nbytes["host"] == pytest.approx(found.nbytes["host"], rel=1e-9)
    # the largest of several sums, which may be another in a shallow model; a winner is replayed whole
    differs = len({unit.numel for unit in model.units[1:-1]}) > 1 and activations == "recompute"
    assert guessed.nbytes["device"] == pytest.approx(found.nbytes["device"], rel=0.15 if differs else 0.01)


def test_many_similar_layer_kinds_are_merged() -> None:
    units = list(llama_shape("all differ", 12, 256, vocabulary=100).units)
    for index in range(1, 13):
        units[index] = UnitSpec(f"layers.{index}", "layer", (ParamSpec(f"w{index}", (256 * index, 256)),))
    model = replace(llama_shape("all differ", 12, 256, vocabulary=100), units=tuple(units))
    guessed, found = (
        tell(Question(model, ROOMY, 64, 64), Choice(Numerics(), Policy()), 1) for tell in (estimate, examine)
    )
    assert guessed.nbytes["host"] == pytest.approx(found.nbytes["host"], rel=0.2)


@pytest.mark.parametrize("rows", [5, 7])
def test_representative_micro_batches_keep_size_and_total(rows: int) -> None:
    model = llama_shape("small", 16, 1024, vocabulary=1000)
    question = Question(model, ROOMY, rows * 2048, 2048)
    for micro_batch in (1, 2):
        for policy in (Policy(activations="keep"), Policy()):
            guessed, found = (
                estimate(question, Choice(Numerics(), policy), micro_batch),
                examine(question, Choice(Numerics(), policy), micro_batch),
            )
            assert guessed.seconds == pytest.approx(found.seconds, rel=0.05)
            assert guessed.nbytes["device"] == pytest.approx(found.nbytes["device"], rel=0.03)


@pytest.mark.parametrize(
    ("gigabytes", "rows"),
    [(5, 5), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((5, 12), (7, 5), (7, 12), (12, 5), (12, 12)))],
)
def test_a_plan_that_fits_also_fits_when_fully_replayed(rows: int, gigabytes: int) -> None:
    model = llama_shape("small", 16, 2048, vocabulary=32_000)
    plan = find_plan(Question(model, ROOMY, rows * 2048, 2048, limits=Limits(device_nbytes=gigabytes * 10**9)))
    assert plan.nbytes["device"] <= gigabytes * 10**9


def test_a_survey_prices_each_budget_independently() -> None:
    question = Question(llama_shape("small", 6, 1024, vocabulary=8000), ROOMY, 4 * 1024, 1024)
    budgets = [{"device": device, "host": 10**13} for device in (10**8, 10**9, 10**11)]
    found = survey(question, budgets)
    assert found[0] is None
    for budget, each in zip(budgets[1:], found[1:], strict=True):
        assert each is not None
        assert each.fits(budget)
        alone = find_plan(replace(question, limits=Limits(device_nbytes=budget["device"])))
        some = any(place.on_device for place in alone.policy.placements) and not all(
            place.on_device for place in alone.policy.placements
        )
        assert each.seconds == pytest.approx(alone.seconds, rel=0.02 if some else 0.01)


def test_a_survey_chooses_disk_state_per_budget() -> None:
    hardware = replace(ROOMY, disk_nbytes=10**13, disk_read_bandwidth=1e8, disk_write_bandwidth=1e8)
    question = Question(llama_shape("small", 12, 1024, vocabulary=8000), hardware, 8 * 1024, 1024)
    needed = find_plan(replace(question, overrides={"placements": ()})).nbytes["host"]
    budgets = [{"device": 10**9, "host": round(share * needed)} for share in (1.5, 0.6, 1.5)]
    found = survey(question, budgets)
    assert found == [*(survey(question, [budget])[0] for budget in budgets[:2]), found[0]]
    roomy, tight, _ = found
    assert roomy is not None
    assert tight is not None
    assert tight.nbytes["disk"] > roomy.nbytes["disk"] == 0
    assert tight.seconds > roomy.seconds


@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
@pytest.mark.parametrize("apart", [1, 3])
@pytest.mark.parametrize(("loss_chunk", "in_round"), [(64, 0), (4096, 0), (4096, 1), (4096, 4)])
def test_estimates_beside_a_drive_are_near_their_replays(
    update: str, apart: int, loss_chunk: int, in_round: int
) -> None:
    """Each pass waits for its part of what is on the disk, of which hardly any is read during the loss, and what is
    done once in a step not during all of its rounds."""
    model = llama_shape("small", 24, 1024, vocabulary=32_000)
    question = Question(model, replace(machine("rtx-4090"), disk_nbytes=10**13), 32 * 1024, 1024)
    on_disk = Placement("disk", "disk", "disk", "disk")
    placements = tuple(IN_HOST if unit % apart else on_disk for unit in range(26))
    policy = Policy(update=update, placements=placements, micro_batches_per_round=in_round)  # type: ignore[arg-type]
    choice = Choice(Numerics(loss_chunk_tokens=loss_chunk), policy)
    replayed = examine(question, choice, 4)
    assert replayed.timeline.busy_seconds("read") > 0
    assert estimate(question, choice, 4).seconds == pytest.approx(replayed.seconds, rel=0.13)


@pytest.mark.parametrize("in_round", [1, 4])
def test_estimates_where_memory_is_shared_count_the_disk_of_every_round(in_round: int) -> None:
    model = llama_shape("small", 12, 1024, vocabulary=8000)
    hardware = replace(machine("cpu-desktop"), disk_nbytes=10**13, disk_read_bandwidth=1e9, disk_write_bandwidth=1e9)
    question = Question(model, hardware, 16 * 1024, 1024)
    placements = (Placement("disk", "disk", "disk", "disk"),) * 14
    choice = Choice(Numerics(), Policy(shares_memory=True, placements=placements, micro_batches_per_round=in_round))
    replayed = examine(question, choice, 1)
    assert estimate(question, choice, 1).seconds == pytest.approx(replayed.seconds, rel=0.13)


ON_DISK = Placement(moments="disk", gradients="disk")
MANY_ROUNDS: dict[str, tuple[str, dict[str, Any]]] = {
    "usual": ("rtx-4090", {}),
    "four micro-batches each": ("rtx-4090", {"micro_batches_per_round": 4, "update": "next_forward"}),
    "offloaded": ("h100", {"activations_by_layer": (("offload", "chosen"),), "update": "next_forward"}),
    "some units on a disk": ("rtx-4090", {"placements": (IN_HOST, *(ON_DISK,) * 4, *(IN_HOST,) * 9)}),
    "some layers on the device": ("rtx-4090", {"placements": (IN_HOST, *(Placement("device"),) * 6, *(IN_HOST,) * 7)}),
    "a read-ahead": ("rtx-3090", {"wait_for": "shard", "weight_slots": 1, "read_ahead_nbytes": 1 << 20}),
    "streamed updates": ("rtx-4090", {"update": "next_forward", "streamed_updates": 0.5, "grad_slots": 3}),
    "bound by the bus": ("4x-rtx-4090", {"shard_nbytes": 1 << 22}),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", MANY_ROUNDS)
def test_rounds_that_are_alike_are_not_all_replayed(name: str) -> None:
    """Bytes and writes of the step are those of the whole replay, and the ops replayed do not grow with its rounds."""
    kind, fields = MANY_ROUNDS[name]
    model, policy = llama_shape("small", 12, 1024, vocabulary=8000), Policy(**{"micro_batches_per_round": 1} | fields)
    size, choice = policy.micro_batches_per_round, Choice(Numerics(), policy)
    question, longer = (Question(model, machine(kind), rounds * size * 4096, 2048) for rounds in (16, 64))
    few, whole = examine_rounds(question, choice, 2), examine(question, choice, 2)
    assert few.left_out == 16 - ROUNDS
    assert few.nbytes == whole.nbytes
    assert few.written_nbytes == whole.written_nbytes
    assert few.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert few.busy_seconds("compute") == pytest.approx(whole.busy_seconds("compute"), rel=1e-3)
    for stream in STREAMS:  # how much copies slow each other down at the ends of a step differs a little
        assert few.busy_seconds(stream) == pytest.approx(whole.busy_seconds(stream), rel=0.05)
    assert len(examine_rounds(longer, choice, 2).timeline.schedule.ops) == len(few.timeline.schedule.ops)


@pytest.mark.parametrize(("sequences", "micro_batch", "in_round"), [(33, 2, 1), (28, 2, 4), (32, 2, 0), (6, 2, 1)])
def test_uneven_or_few_rounds_are_replayed_whole(sequences: int, micro_batch: int, in_round: int) -> None:
    question = Question(llama_shape("small", 4, 1024, vocabulary=8000), machine("h100"), sequences * 1024, 1024)
    choice = Choice(Numerics(), Policy(micro_batches_per_round=in_round))
    assert examine_rounds(question, choice, micro_batch) == examine(question, choice, micro_batch)


@pytest.mark.slow
def test_a_step_of_many_rounds_is_planned_with_few_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 7B with half a million tokens in 32 rounds. A plan and what it says of upgrades once built 750,000 ops, before
    state moved in pieces, of which each has ops of its own."""
    built: list[Schedule] = []
    monkeypatch.setattr(
        estimates, "build_step", lambda *step, **how: built.append(build_step(*step, **how)) or built[-1]
    )
    model = llama_shape("7B", 28, 3584, key_value_heads=4, feed_forward=18_944, vocabulary=152_064)
    limits = Limits(host_nbytes=128 * 10**9)
    question = Question(model, replace(machine("rtx-4090"), disk_nbytes=2 * 10**12), 1 << 19, 4096, limits=limits)
    plan = find_plan(question)
    assert plan.policy.micro_batches_per_round
    assert not plan.left_out
    advised(look(plan))
    assert sum(len(each.ops) for each in built) < 410_000


def test_a_processor_computes_the_next_layer_while_pieces_of_the_last_leave() -> None:
    """With one gradient slot it would wait for the drive in each layer."""
    rates = dict.fromkeys(("read", "write", "duplex_read", "duplex_write"), 1.5e9)
    drive = {f"disk_{name}_bandwidth": rate for name, rate in rates.items()}
    hardware = replace(machine("cpu-desktop"), disk_nbytes=10**11, **drive)  # type: ignore[arg-type]
    model = llama_shape("wide", 6, 2560, feed_forward=6912, vocabulary=4000)
    question = Question(model, hardware, 256, 64, clips=False, limits=Limits(host_nbytes=3_800_000_000))
    plan, waiting = find_plan(question), find_plan(replace(question, overrides={"grad_slots": 1}))
    assert plan.policy.grad_slots > 1
    assert plan.seconds < 0.97 * waiting.seconds


@pytest.mark.slow
def test_a_120b_model_is_planned_in_six_million_calls() -> None:
    """Python and C calls do not depend on the processor's speed. Six million take about two seconds."""
    model = llama_shape("120B", 120, 8704)
    assert model.numel > 1.15e11
    question, profile = Question(model, machine("b200"), 65_536, 4096), cProfile.Profile()
    profile.runcall(find_plan, question)
    calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    assert calls < 6e6, calls


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"update": "next_forward", "activations_by_layer": (("offload",),)},
        {"update": "next_forward", "micro_batches_per_round": 1},
        {"wait_for": "shard", "weight_slots": 1, "shard_nbytes": 1 << 16, "activations": "keep"},
        {"shares_memory": True, "micro_batches_per_round": 4},
    ],
    ids=["usual", "offloaded", "rounds", "shards", "one memory"],
)
def test_schedules_of_other_sizes_are_those_that_would_be_built(
    fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same ops, waits, times and memory, from one build for all sizes that need no other buffers."""
    monkeypatch.setattr(estimates, "_cached_build", lru_cache(estimates._build))
    model, policy = llama_shape("sizes", 3, 256, vocabulary=1000), Policy(**fields)  # type: ignore[arg-type]
    question = Question(model, machine("cpu-desktop" if policy.shares_memory else "rtx-4090"), 4096, 256)
    works = [Work((tokens,) * 4, 256, repeats) for tokens, repeats in ((256, 2.5), (512, 1), (1024, 4))]
    works += [Work((512, 512, 256), 256), Work((1024,), 256)]
    for work, chunk in product(works, (64, 300, 4096)):
        choice = Choice(Numerics(loss_chunk_tokens=chunk), policy)
        derived, peaks = estimates._shallow_build(model, choice, work)
        built, peaks_of_built = estimates._build(model, choice, work)
        assert peaks == peaks_of_built
        assert derived.waits == built.waits
        assert [op[:5] for op in derived.ops] == [op[:5] for op in built.ops]
        assert derived.buffers == built.buffers
        prices = StepPrices(question, choice, work)
        assert prices.replay(derived).ends == prices.replay(built).ends
    assert estimates._cached_build.cache_info().misses == (15 if policy.offloads else 3)
