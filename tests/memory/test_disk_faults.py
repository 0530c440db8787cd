"""What the disk room does on a bad day: typed errors, torn regions, and no harm to any other region."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from megatrain.errors import CorruptRegion, DiskError, DiskFull
from megatrain.memory import disk as disk_module
from megatrain.memory import io_queue
from megatrain.memory.disk import Disk
from megatrain.spec.hardware import SECTOR
from tests.disk_faults import DISK_FAULTS, DiskFault, failing

NBYTES = 7 * SECTOR + 100
OTHER, VALUE, NEW = (np.full(NBYTES, value, np.uint8) for value in (1, 2, 3))


def disk_with(folder: Path, *faults: DiskFault) -> Disk:
    """Two regions, of which only `other` is written; 4 requests each."""
    disk = Disk([folder], block_nbytes=2 * SECTOR, depth=2, calls=failing(*faults))
    disk.provide({"other": (NBYTES, "moments of layer 2"), "region": (NBYTES, "moments of layer 3")})
    disk.write("other", OTHER)
    return disk


def content(disk: Disk, name: str) -> np.ndarray:
    memory = np.full(NBYTES, 77, np.uint8)
    disk.read(name, memory)
    return memory


WRITE_FAILURES = [
    (DiskFault("write", "region"), DiskError, "injected: write error"),
    (DiskFault("full", "region", after=5), DiskFull, "injected: no space left"),
    (DiskFault("short", "region", on="write"), DiskError, "4,096 of 8,192 bytes were transferred"),
    (DiskFault("write", 10), DiskError, "injected: write error"),
]


@pytest.mark.parametrize(("fault", "kind", "cause"), WRITE_FAILURES, ids=str)
def test_a_failed_write_invalidates_its_region_until_rewritten(
    fault: DiskFault, kind: type[DiskError], cause: str, tmp_path: Path
) -> None:
    disk = disk_with(tmp_path, fault)
    with pytest.raises(kind, match=cause) as raised:
        for value in (VALUE, NEW):  # a fault that lets the first write pass fails the second
            disk.write("region", value)
    assert str(raised.value).startswith(f"moments of layer 3: cannot be written in {tmp_path} (")
    assert raised.value.fix
    with pytest.raises(CorruptRegion, match=f"moments of layer 3: is torn .*{tmp_path}.*{cause}"):
        content(disk, "region")
    assert np.array_equal(content(disk, "other"), OTHER)
    disk.write("region", NEW)
    assert np.array_equal(content(disk, "region"), NEW)
    assert np.array_equal(content(disk, "other"), OTHER)
    disk.close()


@pytest.mark.parametrize("after", [1, 2], ids=["of all", "of the first part"])
def test_a_partial_rewrite_restores_only_its_own_part(after: int, tmp_path: Path) -> None:
    """Two requests for all of it, one for its first part; the one or the other fails."""
    disk, first = Disk([tmp_path], calls=failing(DiskFault("write", "region", after=after))), 2 * SECTOR
    disk.provide({"region": (NBYTES, "weights of layer 3")}, cuts={"region": [first]})
    with pytest.raises(DiskError, match="injected"):
        disk.write("region", VALUE)
        disk.write("region", NEW[:first])
    with pytest.raises(CorruptRegion, match="weights of layer 3: is torn"):
        content(disk, "region")
    if after == 1:
        disk.write("region", NEW[:first])
        with pytest.raises(CorruptRegion, match="weights of layer 3: is torn"):
            content(disk, "region")
        disk.write("region", VALUE)
    disk.write("region", NEW[:first])
    assert np.array_equal(content(disk, "region"), np.concatenate([NEW[:first], VALUE[first:]]))
    disk.close()


@pytest.mark.parametrize("grain", [2 * SECTOR, SECTOR], ids=["of a block", "of half a block"])
@pytest.mark.parametrize(("first", "last"), [(2 * SECTOR, 6 * SECTOR), (2 * SECTOR, 4 * SECTOR), (SECTOR, 4 * SECTOR)])
def test_a_failed_write_of_a_range_invalidates_all_of_its_grains_and_no_others(
    first: int, last: int, grain: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of its requests fails, or the only one."""
    monkeypatch.setattr(disk_module, "GRAIN_NBYTES", grain)
    first = first // grain * grain
    requests = -(-last // (2 * SECTOR)) - first // (2 * SECTOR)
    disk = disk_with(tmp_path, DiskFault("write", "region", after=3 + requests))
    disk.write("region", VALUE)
    with pytest.raises(DiskError, match="injected"):
        disk.write("region", NEW[first:last], first)
    for start, stop in ((first, first + 1), (last - 1, last), (0, NBYTES)):
        with pytest.raises(CorruptRegion, match="moments of layer 3: is torn"):
            disk.read("region", NEW[start:stop].copy(), start)
    for start, stop in ((0, first), (last, NBYTES)):
        back = NEW[start:stop].copy()
        disk.read("region", back, start)
        assert np.array_equal(back, VALUE[start:stop])
    disk.write("region", NEW[first:last], first)
    assert np.array_equal(content(disk, "region"), np.concatenate([VALUE[:first], NEW[first:last], VALUE[last:]]))
    disk.close()


@pytest.mark.parametrize(
    ("fault", "kind", "cause"),
    [
        (DiskFault("read", "region"), DiskError, "cannot be read in .*injected: read error"),
        (DiskFault("read", 2), DiskError, "cannot be read in .*injected: read error"),
        (DiskFault("short", "region", after=1), DiskError, "cannot be read in .*bytes were transferred"),
        (DiskFault("flip", "region", after=3), CorruptRegion, "are not what was written in"),
    ],
    ids=str,
)
def test_a_failed_read_leaves_the_region_unchanged(
    fault: DiskFault, kind: type[DiskError], cause: str, tmp_path: Path
) -> None:
    disk = disk_with(tmp_path, fault)
    disk.write("region", VALUE)
    with pytest.raises(kind, match=f"moments of layer 3: .*{cause}"):
        content(disk, "region")
    assert np.array_equal(content(disk, "region"), VALUE)
    assert np.array_equal(content(disk, "other"), OTHER)
    disk.close()


def test_of_a_block_only_the_grain_with_a_flipped_bit_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "GRAIN_NBYTES", SECTOR)
    disk, (first, last) = disk_with(tmp_path, DiskFault("flip", "region", on="write", after=4)), (SECTOR, 2 * SECTOR)
    disk.write("region", VALUE)
    disk.write("region", VALUE[: 2 * SECTOR])
    with pytest.raises(CorruptRegion, match=r"layer 3: bytes 0 to 4,096 are not what was written in"):
        content(disk, "region")
    for start, stop in ((first, last), (last, NBYTES)):
        back = NEW[start:stop].copy()
        disk.read("region", back, start)
        assert np.array_equal(back, VALUE[start:stop])
    disk.write("region", NEW[:first])
    assert np.array_equal(content(disk, "region"), np.concatenate([NEW[:first], VALUE[first:]]))
    disk.close()


@pytest.mark.parametrize("block", range(4))
def test_a_bit_flipped_on_write_is_detected_until_rewritten(block: int, tmp_path: Path) -> None:
    disk = disk_with(tmp_path, DiskFault("flip", "region", on="write", after=block))
    disk.write("region", VALUE)
    assert VALUE.min() == VALUE.max() == 2, "the caller's memory is as it was"
    for _ in range(2):
        with pytest.raises(CorruptRegion, match=r"layer 3: bytes [\d,]+ to [\d,]+ are not what was written in"):
            content(disk, "region")
    disk.write("region", NEW)
    assert np.array_equal(content(disk, "region"), NEW)
    disk.close()


def test_without_checksums_a_flipped_bit_is_not_detected(tmp_path: Path) -> None:
    disk = Disk([tmp_path], checksums=False, calls=failing(DiskFault("flip", "region")))
    disk.provide({"region": (NBYTES, "x")})
    disk.write("region", VALUE)
    assert np.count_nonzero(content(disk, "region") != VALUE) == 1
    disk.close()


@pytest.mark.parametrize("on", ["read", "write"])
def test_slow_requests_are_waited_for(on: str, tmp_path: Path) -> None:
    disk = disk_with(tmp_path, DiskFault("slow", "region", on=on, seconds=0.1))  # type: ignore[arg-type]
    began = time.perf_counter()
    disk.write("region", VALUE)
    assert np.array_equal(content(disk, "region"), VALUE)
    assert time.perf_counter() - began >= 0.1
    disk.close()


def test_an_interrupted_write_is_finished_when_it_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = disk_with(tmp_path, DiskFault("slow", "region", on="write", seconds=0.2))
    wait, running = io_queue.wait, []

    def interrupted(futures: object) -> None:
        if not running:  # Ctrl-C while the foreground waits
            running.append(True)
            time.sleep(0.05)
            raise KeyboardInterrupt
        wait(futures)  # type: ignore[arg-type]

    monkeypatch.setattr(io_queue, "wait", interrupted)
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        disk.write("region", VALUE)
    assert time.perf_counter() - began >= 0.19, "a thread may still be using the caller's memory"
    with pytest.raises(CorruptRegion, match="layer 3: was not written completely in"):
        content(disk, "region")
    disk.write("region", NEW)
    assert np.array_equal(content(disk, "region"), NEW)
    disk.close()


def test_every_fault_kind_is_covered() -> None:
    assert set(DISK_FAULTS) == {"read", "write", "full", "short", "flip", "slow"}
