"""Gradients under way on the device: the ends pass through the memory of the layers' slots, at offsets."""

from __future__ import annotations

import pytest

from megatrain.engine.weights import describe_place
from megatrain.schedule import build_step, check
from megatrain.schedule.contents import Gradient
from megatrain.schedule.ops import Schedule, Use
from megatrain.spec import Numerics, Policy, WaitFor, Work
from megatrain.spec.layout import layout_of
from megatrain.testing import SimDevice, run_idle
from tests.small import small_spec

WORK = Work((4, 4))


def sums(schedule: Schedule) -> dict[str, int]:
    return {name: buffer.nbytes for name, buffer in schedule.buffers.items() if buffer.use is Use.GRADIENT_SLOTS}


def extents(schedule: Schedule, kind: str) -> dict[int, tuple[int, int]]:
    """Unit -> bytes that its gradient leaves from."""
    found: dict[int, tuple[int, int]] = {}
    for op in schedule.ops:
        if op.kind == kind:
            (read,) = op.reads
            start, stop = found.get(op.unit, (read.start, read.stop))
            found[op.unit] = min(start, read.start), max(stop, read.stop)
    return found


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_embedding_and_head_share_the_layers_slots(slots: int) -> None:
    spec = small_spec(6)
    layer, *ends = (4 * layout_of(spec.units[unit]).trained.size for unit in (1, 0, 7))
    schedule = build_step(spec, Numerics(), Policy(grad_slots=slots), WORK)
    assert sums(schedule) == {"device/gradient_slots/all": max(slots * layer, *ends)}


def test_a_tied_heads_gradient_waits_in_its_own_buffer() -> None:
    assert set(sums(build_step(small_spec(6, tied=True), Numerics(), Policy(), WORK))) >= {
        "device/gradient_slots/all",
        "device/gradient_slots/prologue",
    }


def test_the_top_layer_does_not_wait_for_the_head_with_enough_slots() -> None:
    spec = small_spec(6)
    layer, ends = (4 * layout_of(spec.units[unit]).trained.size for unit in (1, 7))
    slots = 1 + -(-ends // layer)
    (begin, _), (_, end) = (
        extents(build_step(spec, Numerics(), Policy(grad_slots=slots), WORK), "GRAD")[unit] for unit in (7, 6)
    )
    assert end <= begin


@pytest.mark.parametrize("wait_for", ["unit", "shard"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_gradients_at_offsets_pass_the_checker_without_races(slots: int, wait_for: WaitFor) -> None:
    schedule = build_step(
        small_spec(4), Numerics(), Policy(grad_slots=slots, wait_for=wait_for, shard_nbytes=256), WORK, "all"
    )
    check(schedule)
    for seed in range(3):
        run_idle(schedule, SimDevice(seed))


def test_a_gradient_at_an_offset_is_named_by_its_parameter() -> None:
    spec = small_spec(4)
    schedule = build_step(spec, Numerics(), Policy(grad_slots=2), WORK)
    layouts = [layout_of(unit) for unit in spec.units]
    for unit, (begin, _) in extents(schedule, "GRAD").items():
        for field in layouts[unit].trained.fields:
            named = describe_place(
                spec, layouts, schedule, "device/gradient_slots/all", begin + 4 * field.start, Gradient(unit)
            )
            assert named == f"unit {spec.units[unit].name}, {field.name}"
