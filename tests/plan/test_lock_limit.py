"""How weights and gradients cross the bus where not all of them may be page-locked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.plan import Question, find_plan
from megatrain.plan.without_plan import fit_lock_limit
from megatrain.schedule import Use, build_step
from megatrain.schedule.passes.pinned_staging import pinned_nbytes
from megatrain.spec import Hardware, Numerics, Placement, Policy, Work
from tests.small import small_spec

MODEL = small_spec(4)
BUS = Hardware("bus", 1 << 30, 1 << 30, 1e6, 1e6, 1e9, 1e8, host_copy_bandwidth=5e6, pageable_fetch_bandwidth=3e5)
ALL = pinned_nbytes(build_step(MODEL, Numerics(), Policy(), Work((8,)), "all").buffers.values(), "pinned")


def ask(machine: Hardware, limit: int | None, **overrides: object) -> Policy:
    """The plan's policy. It has no device memory to keep state in, and no shards of its own choice."""
    overrides = {"placements": (), "micro_batch": 1, "activations": "recompute", "loss_chunk_tokens": 64, **overrides}
    found = find_plan(Question(MODEL, replace(machine, pinnable_nbytes=limit), 32, 8, overrides=overrides))
    policy, buffers = found.policy, found.timeline.schedule.buffers.values()
    free = limit is None or "transfer" in overrides or machine.shares_memory
    assert free or pinned_nbytes(buffers, policy.transfer) <= limit
    return policy


def test_all_host_buffers_are_pinned_if_allowed() -> None:
    assert ask(BUS, None).transfer == "pinned"
    assert ask(BUS, ALL).transfer == "pinned"
    assert ask(BUS, ALL - 1).transfer != "pinned"


def test_nothing_is_pinned_beyond_the_limit() -> None:
    assert ask(BUS, ALL // 2).transfer == "pageable"
    assert ask(BUS, 16).transfer == "pageable"


def test_a_chosen_transfer_mode_is_kept() -> None:
    assert ask(BUS, 0, transfer="pinned").transfer == "pinned"
    assert ask(BUS, None, transfer="pageable").transfer == "pageable"


def test_nothing_is_pinned_on_shared_memory_devices() -> None:
    assert ask(replace(BUS, shares_memory=True), 0).transfer == "pinned"


@pytest.mark.parametrize(("limit", "transfer"), [(ALL, "pinned"), (ALL - 1, "pageable"), (64, "pageable")])
def test_pinning_is_decided_without_a_planner_too(limit: int, transfer: str) -> None:
    policy = fit_lock_limit(MODEL, Numerics(), Policy(), limit)
    assert policy.transfer == transfer
    buffers = build_step(MODEL, Numerics(), policy, Work((8, 8)), "all").buffers.values()
    assert pinned_nbytes(buffers, policy.transfer) <= limit
    assert fit_lock_limit(MODEL, Numerics(), Policy(shares_memory=True), 0).transfer == "pinned"


WITH_ALL, WITH_MOMENTS = Placement("disk", "disk", "disk", "disk"), Placement(moments="disk")


@pytest.mark.parametrize(("placement", "crosses"), [(WITH_ALL, True), (WITH_MOMENTS, False)])
def test_disk_staging_buffers_count_as_pinned(placement: Placement, *, crosses: bool) -> None:
    """What weights and gradients pass through, on their way to the device and from it."""
    on_disk = Policy(placements=(placement,) * len(MODEL.units))
    buffers = build_step(MODEL, Numerics(), on_disk, Work((8,)), "all").buffers.values()
    ring = sum(buffer.nbytes for buffer in buffers if buffer.use is Use.DISK_STAGING)
    rest = [buffer for buffer in buffers if buffer.use is not Use.DISK_STAGING]
    assert pinned_nbytes(buffers, "pinned") - pinned_nbytes(rest, "pinned") == (ring if crosses else 0)
    assert ring > 0
