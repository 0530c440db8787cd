"""Which units' state lives where."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from megatrain.plan.placement import ON_DEVICE, host_nbytes, resident_placements, spill, spread, state_policy
from megatrain.plan.placement_cost import placement_seconds
from megatrain.schedule import Use, build_step
from megatrain.schedule.passes.state_buffers import state_nbytes
from megatrain.spec import IN_HOST, Hardware, Numerics, Placement, Policy, Precision, UpdateTime, Work
from tests.small import large_spec, small_spec

MODEL = small_spec(layers=12)
LARGE = large_spec(layers=12)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("shares", [False, True])
def test_the_disk_holds_as_little_as_possible(precision: Precision, shares: bool) -> None:
    numerics, policy = Numerics(precision), Policy(shares_memory=shares)
    everything = state_nbytes(LARGE, numerics, policy)["host"]
    before = -1
    for budget in range(everything, everything * 6 // 10, -everything // 40):
        found = spill(LARGE, numerics, policy, budget)
        nbytes = state_nbytes(LARGE, numerics, found)
        assert nbytes["host"] <= budget
        assert nbytes["disk"] >= before
        before = nbytes["disk"]
        assert nbytes["disk"] <= everything - budget + everything // 3, "staging buffers and one layer's part, no more"
    assert host_nbytes(LARGE, numerics, spill(LARGE, numerics, policy, 1000), saves=False) > 1000


def test_the_least_used_state_moves_to_disk_first() -> None:
    policy = Policy()
    everything = state_nbytes(LARGE, Numerics(), policy)["host"]
    seen: list[str] = []
    for budget in range(everything, 0, -everything // 200):
        found = spill(LARGE, Numerics(), policy, budget)
        if host_nbytes(LARGE, Numerics(), found, saves=False) > budget:
            break
        for field in ("moments", "low_bits", "weights"):
            if any(getattr(placement, field) == "disk" for placement in found.placements) and field not in seen:
                seen.append(field)
    assert seen == ["moments", "low_bits", "weights"]


def test_placement_bytes_equal_the_schedules() -> None:
    policy = spill(LARGE, Numerics(), Policy(), state_nbytes(LARGE, Numerics(), Policy())["host"] * 2 // 3)
    step = build_step(LARGE, Numerics(), policy, Work((8,)))
    assert state_nbytes(LARGE, Numerics(), policy)["disk"] == step.arena_nbytes("disk")
    slots = sum(
        b.nbytes for b in step.buffers.values() if b.tier == "host" and b.arena and b.use is Use.LANDED_GRADIENTS
    )
    assert state_nbytes(LARGE, Numerics(), policy)["host"] == step.arena_nbytes("host") - slots


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ahead", [0, 100])
def test_a_resident_tied_embedding_saves_the_second_fetch(ahead: int, tied: bool) -> None:
    """A frozen one, which no backward pass comes to."""
    model = small_spec(4, tied)
    table = replace(model.units[0], params=tuple(replace(each, trainable=False) for each in model.units[0].params))
    model = replace(model, units=(table, *model.units[1:]))
    policy = Policy(read_ahead_nbytes=ahead, placements=(Placement(weights="device"), *(IN_HOST,) * 5))
    fetched = [
        sum(op.nbytes for op in build_step(model, Numerics(), each, Work((4,))).ops if op.kind == "FETCH")
        for each in (replace(policy, placements=()), policy)
    ]
    slow = Hardware("slow", 1 << 40, 1 << 40, fetch_bandwidth=1.0, grad_bandwidth=1.0, flops=1.0, host_bandwidth=1.0)
    assert placement_seconds(model, Numerics(), policy, slow)[0]["fetch"] == fetched[1] - fetched[0]
    assert (fetched[1] < fetched[0]) == (tied and ahead > 0)


def test_reads_go_at_their_full_rate_once_writes_have_ended() -> None:
    """And from the start where nothing is written, as for weights in files."""
    model, moments = small_spec(4), Placement(moments="disk")
    slow = Hardware("slow", 1 << 40, 1 << 40, fetch_bandwidth=1.0, grad_bandwidth=1.0, flops=1.0, host_bandwidth=1.0)
    drive = replace(slow, disk_read_bandwidth=8.0, disk_write_bandwidth=4.0)
    drive = replace(drive, disk_duplex_read_bandwidth=4.0, disk_duplex_write_bandwidth=2.0)
    nbytes = 8 * model.units[1].numel
    policy = Policy(placements=(IN_HOST, moments, *(IN_HOST,) * 4))
    whole, late = placement_seconds(model, Numerics(), policy, drive)
    assert whole["read"] == nbytes / 4
    assert whole["write"] == nbytes / 4 + (nbytes / 2) / 4  # what is left when all has been read
    assert late.get("write", 0.0) == 0.0
    names = {param.name for unit in model.units for param in unit.params}
    frozen = [
        replace(unit, params=tuple(replace(param, trainable=False) for param in unit.params)) for unit in model.units
    ]
    base = replace(model, units=tuple(frozen)).with_in_files(names)
    only_read = Policy(placements=(IN_HOST, Placement("file"), *(IN_HOST,) * 4))
    weights = 2 * base.units[1].numel
    assert placement_seconds(base, Numerics(), only_read, drive)[0]["read"] == pytest.approx(weights / 8)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
def test_weights_on_the_disk_cost_the_bytes_that_a_step_moves(update: UpdateTime, slots: int) -> None:
    """An update reads them once more, unless it brings them to one of two slots."""
    drive = Hardware("slow", 1 << 40, 1 << 40, 1.0, 1.0, 1.0, 1.0, disk_read_bandwidth=1.0, disk_write_bandwidth=1.0)
    places = (*(IN_HOST,) * 5, Placement("disk"), *(IN_HOST,) * 8)
    shape = {"shard_nbytes": 256, "pinned_staging_slots": 1, "weight_slots": slots}  # no shard is still there
    policy = Policy(update=update, placements=places, **shape)  # type: ignore[arg-type]
    step = build_step(MODEL, Numerics(), policy, Work((4,)), "all" if update == "next_forward" else "none")
    moved = {kind: sum(op.nbytes for op in step.ops if op.kind == kind) for kind in ("READ", "WRITE")}
    assert moved["READ"] == (2 if update == "next_forward" and slots == 2 else 3) * moved["WRITE"] > 0
    seconds = placement_seconds(MODEL, Numerics(), state_policy(policy), drive)[0]
    assert (seconds["read"], seconds["write"]) == (moved["READ"], moved["WRITE"])


def test_resident_layers_are_spread_evenly() -> None:
    assert spread(list(range(12)), 3) == [3, 7, 11]
    for count in range(1, 13):
        chosen = spread(list(range(12)), count)
        assert len(chosen) == count
        gaps = [b - a for a, b in pairwise([-1, *chosen])]
        assert max(gaps) - min(gaps) <= 1


def test_more_resident_layers_take_more_device_memory() -> None:
    policy = Policy()
    taken = [
        [
            state_nbytes(MODEL, Numerics(), replace(policy, placements=resident_placements(MODEL, whole, kept)))[
                "device"
            ]
            for kept in range(17)
        ]
        for whole in range(17)
    ]
    assert all(row == sorted(row) for row in taken)
    assert [row[0] for row in taken] == sorted(row[0] for row in taken)
    assert resident_placements(MODEL, 16, 0) == (ON_DEVICE,) * 14
