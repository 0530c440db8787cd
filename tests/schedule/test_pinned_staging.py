"""Slabs: what is not page-locked crosses the bus through what is, shard by shard, and nothing is staged twice."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from megatrain.errors import PlanError
from megatrain.plan import op_seconds
from megatrain.schedule import Schedule, build_step, check, replay
from megatrain.schedule.passes.pinned_staging import is_locked, locked_nbytes
from megatrain.spec import Hardware, Home, Numerics, Policy, Work
from megatrain.testing import executed_timeline, surviving_waits
from tests.schedule.test_disk_staging import random_case, schedules
from tests.small import small_spec

BUS = ("FETCH", "GRAD", "OFFLOAD", "RELOAD")
MACHINE = Hardware("m", 1 << 40, 1 << 40, 1e3, 2e3, 1e9, 1e6, host_copy_bandwidth=500.0, pageable_fetch_bandwidth=250.0)


def moved(schedule: Schedule, kind: str) -> Counter[str]:
    """Host buffer, or region, -> bytes that ops of that kind read from it or write to it, slabs left out."""
    counts: Counter[str] = Counter()
    for op in schedule.ops:
        for access in (*op.reads, *op.writes):
            if op.kind == kind and access.buffer.startswith("host/") and not access.buffer.startswith("host/slab/"):
                counts[access.buffer] += access.stop - access.start
    return counts


def test_any_split_is_proven_and_only_locked_memory_meets_the_bus() -> None:
    packed = 0
    for seed in range(16):
        model, numerics, policy, work = random_case(random.Random(seed))
        policy = replace(policy, shares_memory=False, transit="slabs", slabs=1 + seed % 3)
        for plain, slabs in zip(
            schedules(model, numerics, replace(policy, transit="locked"), work),
            schedules(model, numerics, policy, work),
            strict=True,
        ):
            check(slabs)
            for op in slabs.ops:
                sides = [access.buffer for access in (*op.reads, *op.writes) if access.buffer.startswith("host/")]
                assert op.kind not in BUS or all(is_locked(name, "slabs") for name in sides), (seed, op)
            for bus, copy in (("FETCH", "PACK"), ("GRAD", "UNPACK")):
                through, direct = moved(slabs, copy), moved(slabs, bus)
                whole = moved(plain, bus)
                assert through.keys().isdisjoint(direct), "what is page-locked is not staged again"
                assert (through | direct).keys() == whole.keys()
                assert all(through[name] <= whole[name] for name in through)
                packed += through.total()
    assert packed > 50_000


def test_what_is_locked_is_a_few_shards_whatever_the_size_of_the_model() -> None:
    sizes = {}
    for layers in (4, 40):
        for transit in ("locked", "slabs", "pageable"):
            policy = Policy(transit=transit, shard_nbytes=256)
            buffers = build_step(small_spec(layers), Numerics(), policy, Work((4,)), "all").buffers
            sizes[transit, layers] = locked_nbytes(buffers.values(), transit)
    assert sizes["locked", 40] > 5 * sizes["locked", 4]
    assert sizes["slabs", 40] == sizes["slabs", 4] == 2 * 2 * 256
    assert sizes["pageable", 40] == 0


def test_no_wait_is_idle_and_the_executed_step_takes_what_replay_says() -> None:
    homes = (Home(), Home("disk"), Home("device"), Home(gradients="disk"), Home())
    policy = Policy(transit="slabs", shard_nbytes=300, homes=homes)
    schedule = build_step(small_spec(3), Numerics(), policy, Work((4, 4)), pending="all")
    assert {"PACK", "UNPACK", "READ", "WRITE"} <= {op.kind for op in schedule.ops}
    assert surviving_waits(schedule) == []
    price = op_seconds(small_spec(3), Numerics(), policy, Work((4, 4)), MACHINE)
    replayed = replay(schedule, price)
    for seed in range(4):
        assert executed_timeline(schedule, price, seed).ends == replayed.ends


def test_a_slab_is_filled_while_the_one_before_it_is_copied() -> None:
    """With two, packing and copying overlap shard by shard; with one, they take turns."""
    times = {}
    for slabs in (1, 2):
        policy = Policy(transit="slabs", slabs=slabs, shard_nbytes=64)
        schedule = build_step(small_spec(6), Numerics(), policy, Work((4,)))
        times[slabs] = replay(schedule, lambda op: float(op.kind in ("PACK", "FETCH", "GRAD", "UNPACK"))).seconds
    assert times[2] < 0.75 * times[1]


def test_prices_are_those_of_the_way_that_is_taken() -> None:
    found = {}
    for transit in ("locked", "slabs", "pageable"):
        policy = Policy(transit=transit)
        schedule = build_step(small_spec(3), Numerics(), policy, Work((4,)))
        price = op_seconds(small_spec(3), Numerics(), policy, Work((4,)), MACHINE)
        found[transit] = {op.kind: op.nbytes / price(op) for op in schedule.ops if op.kind in (*BUS, "PACK", "UNPACK")}
    assert found["locked"] == {"FETCH": 1e3, "GRAD": 2e3}
    assert found["slabs"] == pytest.approx({"FETCH": 1e3, "GRAD": 2e3, "PACK": 500.0, "UNPACK": 500.0})
    assert found["pageable"] == pytest.approx({"FETCH": 250.0, "GRAD": 500.0})  # where not measured, what a copy takes


def test_ways_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match=r"policy.transit: 'x' is not valid; use locked, slabs or pageable"):
        Policy(transit="x")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"policy.slabs: 0 is not valid"):
        Policy(slabs=0)
    with pytest.raises(PlanError, match="nothing crosses a bus"):
        Policy(transit="slabs", shares_memory=True)
