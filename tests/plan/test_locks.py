"""How weights and gradients cross the bus where not all of them may be page-locked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.plan import Question, find_plan
from megatrain.plan.refinements import fit_transit
from megatrain.schedule import Use, build_step
from megatrain.schedule.passes.pinned_staging import pinned_nbytes
from megatrain.spec import Hardware, Home, Numerics, Part, Policy, Work
from tests.small import small_spec

MODEL = small_spec(4)
BUS = Hardware("bus", 1 << 30, 1 << 30, 1e6, 1e6, 1e9, 1e8, host_copy_bandwidth=5e6, pageable_fetch_bandwidth=3e5)
SLOW = replace(BUS, host_copy_bandwidth=2e5, pageable_grad_bandwidth=5e5)
ALL = pinned_nbytes(build_step(MODEL, Numerics(), Policy(), Work((8,)), "all").buffers.values(), "locked")


def ask(machine: Hardware, limit: int | None, **pinned: object) -> Policy:
    """The plan's policy. It has no device memory to keep state in, and no shards of its own choice."""
    pinned = {"homes": (), "micro_batch": 1, "activations": "recompute", "loss_chunk_tokens": 64, **pinned}
    found = find_plan(Question(MODEL, replace(machine, pinnable_nbytes=limit), 32, 8, pinned=pinned))
    policy, buffers = found.policy, found.timeline.schedule.buffers.values()
    free = limit is None or "transit" in pinned or machine.shares_memory
    assert free or pinned_nbytes(buffers, policy.transit) <= limit
    return policy


def test_all_is_locked_where_it_may_be() -> None:
    assert ask(BUS, None).transit == "locked"
    assert ask(BUS, ALL).transit == "locked"
    assert ask(BUS, ALL - 1).transit != "locked"


def test_of_the_other_ways_the_quicker_one_is_taken_if_it_fits() -> None:
    assert ask(BUS, ALL // 2).transit == "slabs"
    assert ask(SLOW, ALL // 2).transit == "pageable"
    assert ask(BUS, 16).transit == "pageable", "no room for slabs"


def test_what_is_pinned_is_left_alone() -> None:
    assert ask(BUS, 0, transit="locked").transit == "locked"
    found = ask(SLOW, ALL // 2, transit="slabs", shard_nbytes=128)
    assert (found.transit, found.shard_nbytes) == ("slabs", 128)


def test_where_memory_is_shared_there_is_nothing_to_lock() -> None:
    assert ask(replace(BUS, shares_memory=True), 0).transit == "locked"


@pytest.mark.parametrize(("limit", "transit"), [(ALL, "locked"), (ALL // 2, "slabs"), (64, "pageable")])
def test_without_a_planner_too(limit: int, transit: str) -> None:
    policy = fit_transit(MODEL, Numerics(), Policy(), limit)
    assert policy.transit == transit
    buffers = build_step(MODEL, Numerics(), policy, Work((8, 8)), "all").buffers.values()
    assert pinned_nbytes(buffers, policy.transit) <= limit
    assert fit_transit(MODEL, Numerics(), Policy(shares_memory=True), 0).transit == "locked"


def test_staging_buffers_of_the_disk_count_as_locked() -> None:
    on_disk = Policy(homes=(Home("disk", "disk", "disk", "disk"),) * len(MODEL.units))
    buffers = build_step(MODEL, Numerics(), on_disk, Work((8,)), "all").buffers
    staging = sum(
        buffer.nbytes
        for buffer in buffers.values()
        if buffer.use is Use.DISK_STAGING and buffer.part in (Part.WEIGHTS, Part.GRADIENTS)
    )
    assert pinned_nbytes(buffers.values(), "locked") == pinned_nbytes(buffers.values(), "slabs") == staging > 0
