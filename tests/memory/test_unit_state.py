"""A unit's state reads, changes and moves like an array, in whatever tier it is and however the ranges are cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.device.sim import SimDevice
from megatrain.errors import CorruptRegion, DiskError
from megatrain.memory import PARTS, Disk, Ledger, Pool, Store, UnitState, unit_state
from megatrain.memory.scratch_files import Calls
from megatrain.schedule import build_step
from megatrain.spec import ModelSpec, Numerics, ParamSpec, Part, Placement, Policy, Precision, UnitSpec, Work
from megatrain.spec.hardware import SECTOR, whole_sectors
from megatrain.spec.layout import NORM_BLOCK
from tests.disk_faults import DiskFault, failing

LAYER = ParamSpec("w", (50, 77)), ParamSpec("b", (3,)), ParamSpec("f", (40, 60), trainable=False)
MODEL = ModelSpec(
    "m",
    (
        UnitSpec("p", "prologue", (ParamSpec("e", (9, 8)),)),
        UnitSpec("l", "layer", LAYER),
        UnitSpec("h", "epilogue", (ParamSpec("h", (9, 8), trainable=False),)),
    ),
    hidden_size=8,
    vocab_size=9,
)
PLACEMENTS = [
    Placement(),
    Placement("disk", "disk", "disk"),
    Placement(moments="disk"),
    Placement("device", "device", "device"),
    Placement("disk", moments="disk"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


def placed(*placements: Placement) -> Policy:
    return Policy(placements=placements)


def store_in(folder: Path, precision: Precision, policy: Policy, *faults: DiskFault, model: ModelSpec = MODEL) -> Store:
    numerics, disk = Numerics(precision), Disk([folder], block_nbytes=SECTOR, depth=2, calls=failing(*faults))
    pool = Pool(SimDevice(3), Ledger(), disk, model.names)
    pool.provide(build_step(model, numerics, policy, Work((1,))).buffers.values())
    return Store(model, numerics, policy, pool)


def close(store: Store) -> None:
    store.pool.release()
    store.pool.disk.close()


class Twin:
    """The same values in arrays: masters, m and v."""

    def __init__(self, unit: UnitState, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.unit, self.size = unit, unit.layout.size
        self.masters = draw.standard_normal(self.size, np.float32)
        self.masters[unit.trained :].view(np.uint32)[:] &= 0xFFFF0000  # frozen: held as bfloat16 in bf16
        self.moments = [draw.standard_normal(size, np.float32) for size in unit.layout.own_state_sizes or (0, 0)]
        assert not unit.set_masters(0, self.masters)
        for number, values in enumerate(self.moments):
            unit.write(Part.MOMENTS, 0, values, number)

    def check(self, start: int = 0, stop: int | None = None) -> None:
        stop = self.size if stop is None else stop
        assert np.array_equal(self.unit.masters(start, stop), self.masters[start:stop])
        trained = slice(min(start, self.unit.trained), min(stop, self.unit.trained))
        for number, values in enumerate(self.moments):
            read = self.unit.read(Part.MOMENTS, trained.start, min(trained.stop, values.size), number)
            assert np.array_equal(read, values[trained])


CUTS = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 1 << 16)), max_size=4)


@given(
    precision=st.sampled_from(["bf16", "fp32"]),
    placement=st.sampled_from(PLACEMENTS),
    at_once=st.sampled_from([100, 1 << 20]),
    ranges=CUTS,
)
def test_any_range_is_read_as_it_was_last_written(
    precision: Precision, placement: Placement, at_once: int, ranges: list[tuple[int, int]], place: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_state, "AT_ONCE", at_once)
        store = store_in(place, precision, placed(PLACEMENTS[0], placement, PLACEMENTS[0]))
        unit = store.units[1]
        twin = Twin(unit, 1)
        for number, cuts in enumerate(ranges):
            start, stop = sorted(cut % (twin.size + 1) for cut in cuts)
            twin.masters[start:stop] = 2.0**number
            assert not unit.set_masters(start, twin.masters[start:stop])
            first, last = sorted(cut % (unit.trained + 1) for cut in cuts)
            twin.moments[number % 2][first:last] = -number
            unit.write(Part.MOMENTS, first, twin.moments[number % 2][first:last], number % 2)
            twin.check(start, stop)
        twin.check()
        close(store)


@pytest.mark.parametrize("at_once", [1500, 2000, 1 << 20])
def test_state_that_is_written_from_end_to_end_is_written_once(
    at_once: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ranges that do not fit its blocks, and none of it is read for that."""
    monkeypatch.setattr(unit_state, "AT_ONCE", at_once)
    store = store_in(place, "bf16", placed(Placement(), PLACEMENTS[1], Placement()))
    unit, disk = store.units[1], store.pool.disk
    before = disk.written_nbytes, disk.read_nbytes
    for number in (0, 1):
        for start, stop in unit.ranges(Part.MOMENTS, 0, unit.trained, number):
            assert stop - start <= at_once
            unit.write(Part.MOMENTS, start, np.ones(stop - start, np.float32), number)
    moved = disk.written_nbytes - before[0], disk.read_nbytes - before[1]
    assert moved == (2 * whole_sectors(store.pool.buffers["disk/moments/1"].nbytes // 2), 0)
    close(store)


def test_arrays_of_the_optimizer_may_have_values_of_only_the_first_elements(place: Path) -> None:
    """Here the second has none of the matrix, which comes last."""
    params = [replace(LAYER[0], state=("momentum",), matrices=1), *LAYER[1:]]
    model = replace(MODEL, units=(MODEL.units[0], replace(MODEL.units[1], params=tuple(params)), MODEL.units[2]))
    store = store_in(place, "bf16", placed(*[Placement()] * 3), model=model)
    twin = Twin(store.units[1], 1)
    assert [values.size for values in twin.moments] == [twin.unit.trained, NORM_BLOCK]
    for placement in PLACEMENTS:
        store.move(placed(Placement(), placement, Placement()))
        twin.check()
    close(store)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_values_stay_while_parts_move(precision: Precision, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_state, "AT_ONCE", 1000)
    store = store_in(place, precision, placed(*[Placement()] * 3))
    twins = [Twin(unit, number) for number, unit in enumerate(store.units)]
    held = store.pool.ledger.table()
    for turn in range(1, len(PLACEMENTS) + 1):
        placements = [PLACEMENTS[(turn + number) % len(PLACEMENTS)] for number in range(3)]
        store.pool.keep_state()
        store.move(placed(*placements))
        for twin, placement in zip(twins, placements, strict=True):
            twin.check()
            assert twin.unit.is_on_device == placement.on_device
    store.move(placed(*[Placement()] * 3))
    assert store.pool.ledger.table() == {use: held[use] for use in (("host", "optimizer state"), ("host", "weights"))}
    close(store)


@pytest.mark.parametrize("fault", [DiskFault("full", "disk/moments/1"), DiskFault("write", "disk/weights/1", after=2)])
def test_a_part_that_cannot_be_moved_stays(fault: DiskFault, tmp_path: Path) -> None:
    store = store_in(tmp_path, "bf16", placed(*[Placement()] * 3), fault)
    twins = [Twin(unit, number) for number, unit in enumerate(store.units)]
    everything = placed(*[PLACEMENTS[1]] * 3)
    with pytest.raises(DiskError, match="injected"):
        store.move(everything)
    assert fault.at not in store.pool.buffers
    for twin in twins:
        twin.check()
    store.move(everything)
    assert fault.at in store.pool.buffers
    for twin in twins:
        twin.check()
    close(store)


@pytest.mark.parametrize("then", ["settle", "write"])
@pytest.mark.parametrize("part", PARTS)
def test_a_write_that_fails_loses_nothing(part: Part, then: str, tmp_path: Path) -> None:
    """Neither what was written nor its neighbours, which share grains of the disk with it."""
    faults: list[Calls] = []
    store = store_in(tmp_path, "bf16", placed(Placement(), PLACEMENTS[1], Placement()))
    store.pool.disk._writes._call_of = lambda *request: faults[0](*request) if faults else request[-1]  # type: ignore[attr-defined]
    unit = store.units[1]
    values = unit.read(part, 0, unit.trained)
    values[:] = np.arange(values.size)
    unit.write(part, 0, values)
    faults.append(failing(DiskFault("write", f"disk/{part}/1")))
    values[100:200] = 7
    with pytest.raises(DiskError, match="injected"):
        unit.write(part, 100, values[100:200])
    with pytest.raises(CorruptRegion, match="is torn because its last write failed"):
        unit.read(part, 90, 100)
    if then == "settle":
        store.settle()
    else:
        unit.write(part, 90, values[90:100])
    assert np.array_equal(unit.read(part, 0, unit.trained), values)
    close(store)


def test_what_a_failed_write_keeps_does_not_follow_the_caller(tmp_path: Path) -> None:
    store = store_in(tmp_path, "fp32", placed(Placement(), PLACEMENTS[1], Placement()))
    faults: list[Calls] = [failing(DiskFault("write", "disk/weights/1"))]
    store.pool.disk._writes._call_of = lambda *request: faults[0](*request) if faults else request[-1]  # type: ignore[attr-defined]
    block = np.full(SECTOR // 4, 3, np.float32)  # a whole block, which needs no other bytes
    with pytest.raises(DiskError, match="injected"):
        store.units[1].set_masters(0, block)
    faults.clear()
    block[:] = 9
    store.settle()
    assert np.array_equal(store.units[1].masters(0, block.size), np.full(block.size, 3, np.float32))
    close(store)


@pytest.mark.parametrize("part", PARTS)
def test_an_interrupted_move_does_not_lose_what_has_moved(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path, "bf16", placed(*[Placement()] * 3))
    twin, honest = Twin(store.units[1], 1), store.pool.free

    def freed(name: str) -> None:
        honest(name)
        if name == f"host/{part}/1":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(store.pool, "free", freed)
        store.move(placed(*[PLACEMENTS[1]] * 3))
    twin.check()
    store.move(placed(*[Placement()] * 3))
    twin.check()
    close(store)
