"""A machine with more of a resource is never planned to be slower."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import inf
from operator import attrgetter
from typing import Any

import pytest

from bench.elastic import executed_seconds
from bench.shapes import llama_shape
from megatrain.commands.plan import find_model
from megatrain.errors import DoesNotFit
from megatrain.plan import Plan, Question, find_plan, machine
from megatrain.plan.analysis import RESOURCES, with_more
from megatrain.plan.search_space import SLOWER_FOR_FEWER_WRITES
from megatrain.spec import Hardware, Limits

MACHINES = ("h200", "h100", "a100-pcie", "rtx-3090", "rtx-4090", "rtx-5090", "gh200", "a6000")
MACHINES_OF_ROUNDS = (("h200", 141), ("h100", 80), ("h100", 24), ("rtx-5090", 30))
SLOWER = 1.001
"""Seconds with more over those with less that count as slower."""


MEMORIES = ("device_nbytes", "host_nbytes")


def with_more_of(hardware: Hardware, name: str, factor: float) -> Hardware:
    """The machine with `factor` times the rates of a resource, or as many bytes of a memory."""
    if name in MEMORIES:
        return replace(hardware, **{name: int(factor * getattr(hardware, name))})
    return with_more(hardware, name, factor)


def drawn(draw: random.Random) -> Question:
    layers, width = draw.choice([6, 12, 20, 32]), draw.choice([1024, 2048, 4096])
    model = llama_shape(f"{draw.random()}", layers, width, vocabulary=draw.choice([8000, 32_000, 128_256]))
    described = machine(draw.choice(MACHINES))
    hardware = replace(
        described,
        device_nbytes=min(described.device_nbytes, draw.choice([2, 4, 8, 16, 24, 80]) << 30),
        host_nbytes=min(described.host_nbytes, int(14 * model.numel * draw.choice([0.7, 1.2, 2, 4])) + (2 << 30)),
    )
    length = draw.choice([1024, 2048, 8192])
    return Question(model, hardware, draw.choice([1, 2, 4, 8, 16]) * length, length, clips=draw.random() < 0.7)


def slower_with_more(seed: int, seconds: Callable[[Plan], float] = attrgetter("seconds")) -> str:
    """What made a drawn plan slower, and by how much; empty where nothing did, or nothing fits."""
    draw = random.Random(seed)
    question, name, factor = drawn(draw), draw.choice([*RESOURCES, *MEMORIES]), draw.choice([1.1, 1.3, 1.6, 2, 3])
    try:
        before = find_plan(question)
    except DoesNotFit:
        return ""
    after = find_plan(replace(question, hardware=with_more_of(question.hardware, name, factor)))
    ratio = seconds(after) / seconds(before)
    may = SLOWER_FOR_FEWER_WRITES if after.written_nbytes < before.written_nbytes else SLOWER
    return f"seed {seed}: {ratio:.3f} with {factor} x {name}" if ratio > may else ""


@pytest.mark.slow
def test_offloaded_inputs_beside_weights_in_files_leave_no_host_memory_idle() -> None:
    """Of the host, a fixed grid of sixteenths of a large model is too coarse a part."""
    model = find_model("Qwen/Qwen3-235B-A22B", "bf16", adapter="lora:16")
    layer, rates = 2 * model.units[1].numel, []
    for gigabytes in (120, 136):
        limits = Limits(host_nbytes=gigabytes * 10**9, disk_nbytes=0)
        plan = find_plan(Question(model, machine("rtx-4090"), 65536, 4096, limits=limits))
        assert any(placement.weights == "file" for placement in plan.policy.placements)
        assert plan.nbytes["host"] > gigabytes * 10**9 - 1.1 * layer
        rates.append(plan.tokens_per_second)
    assert rates[0] < rates[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h200", "b200"])
def test_more_host_bandwidth_never_slows_a_clipped_step(name: str) -> None:
    """Its forward pass waits for the optimizer, and its backward pass for compute."""
    model, described = llama_shape("8B", 32, 4096), machine(name)
    hosts = [replace(described, host_bandwidth=rate * 1e9, optimizer_bandwidth=()) for rate in (120, 300)]
    seconds = [find_plan(Question(model, hardware, 8192, 8192)).seconds for hardware in hosts]
    assert seconds[1] < 1.002 * seconds[0]  # a faster optimizer takes more of the memory that fetches read, too


def tiny(layers: int, width: int, device: str, length: int, sequences: int = 1, **changes: Any) -> Question:
    """Of a model so small that all of its state may be on the device, without a disk."""
    model = llama_shape("tiny", layers, width, vocabulary=changes.pop("vocabulary", 32_000))
    return Question(model, machine(device), sequences * length, length, limits=Limits(disk_nbytes=0), **changes)


def slower_steps(question: Question, tier: str, top: int, step: float = 0.85, sizes: int = 8) -> list[str]:
    """Where a plan is slower than one with less of a memory, in a series of its sizes up to `top` bytes."""
    found: list[str] = []
    fastest = inf
    for power in reversed(range(sizes)):
        nbytes = int(top * step**power)
        limits = replace(question.limits, **{f"{tier}_nbytes": nbytes})
        with suppress(DoesNotFit):
            seconds = find_plan(replace(question, limits=limits)).seconds
            found += [f"{seconds / fastest:.3f} with {nbytes:,}"] if seconds > SLOWER * fastest else []
            fastest = min(fastest, seconds)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "question",
    [
        tiny(2, 512, "rtx-4090", 2048, clips=False),  # was 80% slower where all state fits just so
        tiny(6, 768, "rtx-5090", 1024, 8, vocabulary=128_256),  # 19%, and with layers in sixteenths 5%
    ],
    ids=["2 layers", "6 layers"],
)
def test_more_device_memory_never_slows_a_tiny_model(question: Question) -> None:
    top = find_plan(question).nbytes["device"]
    assert not slower_steps(question, "device", int(1.05 * top), 0.9, sizes=6)


def drawn_series(seed: int) -> tuple[Question, str, int, float]:
    """A tiny model, a memory, the bytes of it that its plan takes, and the factor between sizes."""
    draw = random.Random(seed)
    layers, width = draw.choice([2, 3, 4, 6, 8, 12]), draw.choice([256, 512, 768, 1024])
    length, sequences = draw.choice([1024, 2048, 4096]), draw.choice([1, 2, 4])
    vocabulary, clips = draw.choice([8000, 32_000, 128_256]), draw.random() < 0.6
    question = tiny(layers, width, draw.choice(MACHINES), length, sequences, vocabulary=vocabulary, clips=clips)
    tier, step, taken = draw.choice(["device", "host"]), draw.choice([0.7, 0.8, 0.85, 0.9]), find_plan(question).nbytes
    if tier == "device":
        return question, tier, int(1.05 * taken["device"]), step
    limits = replace(question.limits, device_nbytes=int(draw.choice([0.3, 0.5, 0.7, 0.9]) * taken["device"]))
    return replace(question, limits=limits), tier, 18 * question.model.numel, step


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_few_drawn_series_of_tiny_models_are_slower_with_more_memory() -> None:
    """Those that are, by a few percent: estimates decide what is replayed, and refinements are tried on the winner."""
    slower = [*filter(None, (slower_steps(*drawn_series(seed)) for seed in range(60)))]
    assert len(slower) <= 4, slower
    assert all(float(each.split()[0]) < 1.05 for steps in slower for each in steps), slower


@pytest.mark.parametrize("seed", [*(pytest.param(each, marks=pytest.mark.slow) for each in (0, 1)), 2])
def test_more_resources_never_slow_a_plan(seed: int) -> None:
    assert not slower_with_more(seed)


def beside_a_disk(part: float, layers: int = 6, **changes: Any) -> Question:
    """On a machine whose host has room for three fifths of the state, and its device for that part of it."""
    model = llama_shape("beside a disk", layers, 2048, vocabulary=8000)
    host, device = (int(each * 14 * model.numel) + (1 << 30) for each in (0.6, part))
    hardware = replace(machine("rtx-4090"), host_nbytes=host, device_nbytes=device)
    return replace(Question(model, hardware, 4096, 4096, clips=False), **changes)


def test_more_device_memory_with_a_disk_is_never_slower() -> None:
    told = {"weight_slots": 1, "grad_slots": 2, "loss_chunk_tokens": 512}
    seconds = [find_plan(beside_a_disk(part, overrides=told)).seconds for part in (0.2, 0.25, 0.3)]
    assert all(more < SLOWER * less for less, more in pairwise(seconds)), seconds


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layers", [6, 12])
@pytest.mark.parametrize("clips", [False, True])
def test_more_device_memory_with_a_disk_is_never_slower_for_fixed_choices(layers: int, clips: bool) -> None:
    parts = (0.2, 0.25, 0.3, 0.4)
    seconds = [find_plan(beside_a_disk(part, layers, clips=clips)).seconds for part in parts]
    assert all(more < SLOWER * less for less, more in pairwise(seconds)), seconds


@pytest.mark.parametrize("seeds", [range(2, 3), pytest.param(range(20), marks=pytest.mark.slow)])
def test_more_resources_never_slow_an_executed_step(seeds: range) -> None:
    """On the simulator's clock, whose streams run in any order that their events allow."""
    assert not [*filter(None, (slower_with_more(seed, executed_seconds) for seed in seeds))]


@pytest.mark.parametrize(
    ("name", "gigabytes", "steps", "layers"),
    [
        ("h200", 141, (1, 4), 8),
        pytest.param("h200", 141, (1, 4), 32, marks=pytest.mark.slow),
        *(pytest.param(*each, (4, 16, 64), 32, marks=pytest.mark.slow) for each in MACHINES_OF_ROUNDS),
    ],
)
def test_more_sequences_per_step_are_never_slower_per_token(
    name: str, gigabytes: int, steps: tuple[int, ...], layers: int
) -> None:
    """In one round, what layers keep would have to fit for all of them. From one micro-batch to several, sums of
    gradients become float32."""
    model, limits = llama_shape("8B", layers, 4096), Limits(device_nbytes=gigabytes << 30)
    rates = [
        find_plan(Question(model, machine(name), sequences * 8192, 8192, limits=limits)).tokens_per_second
        for sequences in steps
    ]
    assert all(more > 0.995 * fewer for fewer, more in pairwise(rates)), rates


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_at_most_one_in_a_hundred_plans_is_slower_with_more() -> None:
    """The refinements behind the search are tried on its winner alone, which may be another with more."""
    slower = [*filter(None, map(slower_with_more, range(100)))]
    assert len(slower) <= 1, slower
