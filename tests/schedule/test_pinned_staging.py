"""Which host memory is page-locked, what copies cost where it is not, and the buffers that weights on a drive pass."""

from __future__ import annotations

import pytest

from megatrain.errors import PlanError
from megatrain.plan import op_seconds
from megatrain.schedule import build_step, replay
from megatrain.schedule.passes.pinned_staging import pinned_nbytes
from megatrain.spec import Hardware, Numerics, Placement, Policy, Transfer, Work
from megatrain.testing import executed_timeline, surviving_waits
from tests.small import small_spec

BUS = ("FETCH", "GRAD", "OFFLOAD", "RELOAD")
MACHINE = Hardware("m", 1 << 40, 1 << 40, 1e3, 2e3, 1e9, 1e6, host_copy_bandwidth=500.0, pageable_fetch_bandwidth=250.0)
TRANSFERS: tuple[Transfer, ...] = ("pinned", "pageable")


def test_what_crosses_the_bus_is_pinned_or_nothing_is() -> None:
    sizes = {}
    for transfer in TRANSFERS:
        buffers = build_step(small_spec(4), Numerics(), Policy(transfer=transfer), Work((4,)), "all").buffers
        sizes[transfer] = pinned_nbytes(buffers.values(), transfer)
    assert sizes["pinned"] >= 4 * small_spec(4).numel
    assert sizes["pageable"] == 0


def test_no_wait_is_idle_and_the_executed_step_takes_what_replay_says() -> None:
    placements = (Placement(), Placement("disk"), Placement("device"), Placement(gradients="disk"), Placement())
    policy = Policy(transfer="pageable", shard_nbytes=300, placements=placements)
    schedule = build_step(small_spec(3), Numerics(), policy, Work((4, 4)), pending="all")
    assert {"READ", "WRITE"} <= {op.kind for op in schedule.ops}
    assert surviving_waits(schedule) == []
    price = op_seconds(small_spec(3), Numerics(), policy, Work((4, 4)), MACHINE)
    replayed = replay(schedule, price)
    for seed in range(4):
        assert executed_timeline(schedule, price, seed).ends == replayed.ends


def test_a_staging_buffer_is_filled_while_the_previous_one_is_copied() -> None:
    """With two, reads and copies overlap shard by shard; with one, they take turns."""
    times = {}
    for slots in (1, 2):
        policy = Policy(pinned_staging_slots=slots, shard_nbytes=64, placements=(Placement("disk"),) * 8)
        schedule = build_step(small_spec(6), Numerics(), policy, Work((4,)))
        times[slots] = replay(schedule, lambda op: float(op.kind in ("READ", "FETCH") and op.shard >= 0)).seconds
    assert times[2] < 0.75 * times[1]


def test_costs_follow_the_transfer_mode() -> None:
    found = {}
    for transfer in TRANSFERS:
        policy = Policy(transfer=transfer)
        schedule = build_step(small_spec(3), Numerics(), policy, Work((4,)))
        price = op_seconds(small_spec(3), Numerics(), policy, Work((4,)), MACHINE)
        found[transfer] = {op.kind: op.nbytes / price(op) for op in schedule.ops if op.kind in BUS}
    assert found["pinned"] == {"FETCH": 1e3, "GRAD": 2e3}
    assert found["pageable"] == pytest.approx({"FETCH": 250.0, "GRAD": 500.0})  # where not measured, what a copy takes


@pytest.mark.parametrize("transfer", ["x", "staged"])
def test_unknown_transfer_modes_are_refused(transfer: str) -> None:
    """`staged`, through pinned buffers, was one."""
    with pytest.raises(PlanError, match=rf"policy.transfer: '{transfer}' is not valid; use pinned or pageable"):
        Policy(transfer=transfer)  # type: ignore[arg-type]


def test_impossible_transfer_modes_are_refused() -> None:
    with pytest.raises(PlanError, match=r"policy.pinned_staging_slots: 0 is not valid"):
        Policy(pinned_staging_slots=0)
    with pytest.raises(PlanError, match="nothing crosses a bus"):
        Policy(transfer="pageable", shares_memory=True)
