"""Slabs: what is not page-locked crosses the bus through what is, shard by shard, and nothing is staged twice."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from megatrain.errors import PlanError
from megatrain.plan import op_seconds
from megatrain.schedule import Schedule, Use, build_step, check, replay
from megatrain.schedule.passes.pinned_staging import is_pinned, pinned_nbytes
from megatrain.spec import Hardware, Numerics, Placement, Policy, Work
from megatrain.testing import executed_timeline, surviving_waits
from tests.schedule.test_disk_staging import random_case, schedules
from tests.small import small_spec

BUS = ("FETCH", "GRAD", "OFFLOAD", "RELOAD")
MACHINE = Hardware("m", 1 << 40, 1 << 40, 1e3, 2e3, 1e9, 1e6, host_copy_bandwidth=500.0, pageable_fetch_bandwidth=250.0)


def moved(schedule: Schedule, kind: str) -> Counter[str]:
    """Host buffer, or region, -> bytes that ops of that kind read from it or write to it, pinned staging left out."""
    counts: Counter[str] = Counter()
    for op in schedule.ops:
        for access in (*op.reads, *op.writes):
            buffer = schedule.buffers[access.buffer]
            if op.kind == kind and buffer.tier == "host" and buffer.use is not Use.PINNED_STAGING:
                counts[access.buffer] += access.stop - access.start
    return counts


def test_any_staging_split_passes_the_checker_and_copies_only_pinned_memory() -> None:
    packed = 0
    for seed in range(16):
        model, numerics, policy, work = random_case(random.Random(seed))
        policy = replace(policy, shares_memory=False, transfer="staged", pinned_staging_slots=1 + seed % 3)
        pinned = replace(policy, transfer="pinned")
        for plain, staged in zip(
            schedules(model, numerics, pinned, work), schedules(model, numerics, policy, work), strict=True
        ):
            check(staged)
            for op in staged.ops:
                sides = [staged.buffers[access.buffer] for access in (*op.reads, *op.writes)]
                host = [buffer for buffer in sides if buffer.tier == "host"]
                assert op.kind not in BUS or all(is_pinned(buffer, "staged") for buffer in host), (seed, op)
            for bus, copy in (("FETCH", "PACK"), ("GRAD", "UNPACK")):
                through, direct = moved(staged, copy), moved(staged, bus)
                whole = moved(plain, bus)
                assert through.keys().isdisjoint(direct), "what is page-locked is not staged again"
                assert (through | direct).keys() == whole.keys()
                assert all(through[name] <= whole[name] for name in through)
                packed += through.total()
    assert packed > 50_000


def test_pinned_memory_is_a_few_shards_for_any_model() -> None:
    sizes = {}
    for layers in (4, 40):
        for transfer in ("pinned", "staged", "pageable"):
            policy = Policy(transfer=transfer, shard_nbytes=256)
            buffers = build_step(small_spec(layers), Numerics(), policy, Work((4,)), "all").buffers
            sizes[transfer, layers] = pinned_nbytes(buffers.values(), transfer)
    assert sizes["pinned", 40] > 5 * sizes["pinned", 4]
    assert sizes["staged", 40] == sizes["staged", 4] == 2 * 2 * 256
    assert sizes["pageable", 40] == 0


def test_no_wait_is_idle_and_the_executed_step_takes_what_replay_says() -> None:
    placements = (Placement(), Placement("disk"), Placement("device"), Placement(gradients="disk"), Placement())
    policy = Policy(transfer="staged", shard_nbytes=300, placements=placements)
    schedule = build_step(small_spec(3), Numerics(), policy, Work((4, 4)), pending="all")
    assert {"PACK", "UNPACK", "READ", "WRITE"} <= {op.kind for op in schedule.ops}
    assert surviving_waits(schedule) == []
    price = op_seconds(small_spec(3), Numerics(), policy, Work((4, 4)), MACHINE)
    replayed = replay(schedule, price)
    for seed in range(4):
        assert executed_timeline(schedule, price, seed).ends == replayed.ends


def test_a_staging_buffer_is_filled_while_the_previous_one_is_copied() -> None:
    """With two, packing and copying overlap shard by shard; with one, they take turns."""
    times = {}
    for pinned_staging_slots in (1, 2):
        policy = Policy(transfer="staged", pinned_staging_slots=pinned_staging_slots, shard_nbytes=64)
        schedule = build_step(small_spec(6), Numerics(), policy, Work((4,)))
        times[pinned_staging_slots] = replay(
            schedule, lambda op: float(op.kind in ("PACK", "FETCH", "GRAD", "UNPACK"))
        ).seconds
    assert times[2] < 0.75 * times[1]


def test_costs_follow_the_transfer_mode() -> None:
    found = {}
    for transfer in ("pinned", "staged", "pageable"):
        policy = Policy(transfer=transfer)
        schedule = build_step(small_spec(3), Numerics(), policy, Work((4,)))
        price = op_seconds(small_spec(3), Numerics(), policy, Work((4,)), MACHINE)
        found[transfer] = {op.kind: op.nbytes / price(op) for op in schedule.ops if op.kind in (*BUS, "PACK", "UNPACK")}
    assert found["pinned"] == {"FETCH": 1e3, "GRAD": 2e3}
    assert found["staged"] == pytest.approx({"FETCH": 1e3, "GRAD": 2e3, "PACK": 500.0, "UNPACK": 500.0})
    assert found["pageable"] == pytest.approx({"FETCH": 250.0, "GRAD": 500.0})  # where not measured, what a copy takes


def test_impossible_transfer_modes_are_refused() -> None:
    with pytest.raises(PlanError, match=r"policy.transfer: 'x' is not valid; use pinned, staged or pageable"):
        Policy(transfer="x")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"policy.pinned_staging_slots: 0 is not valid"):
        Policy(pinned_staging_slots=0)
    with pytest.raises(PlanError, match="nothing crosses a bus"):
        Policy(transfer="staged", shares_memory=True)
