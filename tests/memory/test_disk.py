"""Regions on the disk: what is written comes back, nothing is left behind, and space is known before it is used."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import DiskError, DiskFull
from megatrain.memory import disk as disk_module
from megatrain.memory import scratch_files
from megatrain.memory.disk import Disk
from megatrain.spec.hardware import SECTOR
from tests.fork_server import Preloaded

BLOCK, GRAIN = 4 * SECTOR, 2 * SECTOR


@pytest.fixture(autouse=True)
def small_grains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "GRAIN_NBYTES", GRAIN)


def aligned(nbytes: int, skip: int = 0) -> np.ndarray:
    """Random bytes, `skip` behind the beginning of a page."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes + skip + 1), np.uint8)[skip : skip + nbytes]
    memory[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    return memory


def folders(parent: Path, count: int) -> list[Path]:
    made = [parent / str(number) for number in range(count)]
    for folder in made:
        folder.mkdir(exist_ok=True)
    return made


@pytest.fixture(params=["direct", "cached"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Past the page cache where the machine can, and through it."""
    if request.param == "cached":
        monkeypatch.setattr(scratch_files, "_DIRECT", 0)
    return str(request.param)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@given(
    sizes=st.lists(st.integers(0, 6 * BLOCK) | st.sampled_from([SECTOR, BLOCK, 3 * BLOCK]), min_size=1, max_size=3),
    skip=st.sampled_from([0, 1, 8, 512]),
    shares=st.lists(st.floats(0.1, 10), min_size=1, max_size=3),
    checksums=st.booleans(),
    direct=st.booleans(),
)
def test_written_bytes_are_read_back(
    sizes: list[int], skip: int, shares: list[float], checksums: bool, direct: bool, place: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not direct:
            patch.setattr(scratch_files, "_DIRECT", 0)
        disk = Disk(folders(place, len(shares)), shares=shares, block_nbytes=BLOCK, depth=2, checksums=checksums)
    disk.provide({str(number): (size, f"region {number}") for number, size in enumerate(sizes)})
    written = [aligned(size, skip) for size in sizes]
    for turn in range(2):
        for number, memory in enumerate(written):
            memory += np.uint8(turn)
            disk.write(str(number), memory)
        for number, memory in enumerate(written):
            back = aligned(memory.size, 0 if turn else skip)  # the alignment of writer and reader may differ
            disk.read(str(number), back)
            assert np.array_equal(back, memory)
    assert disk.nbytes() == sum(sizes)
    disk.close()


def test_tensors_are_accepted_as_buffers(tmp_path: Path, mode: str) -> None:
    disk = Disk([tmp_path])
    disk.provide({"a": (1000, "a")})
    value = torch.randint(0, 256, (10, 100), dtype=torch.uint8)
    disk.write("a", value)
    back = torch.zeros(2000, dtype=torch.uint8)[500:1500]
    disk.read("a", back)
    assert torch.equal(back, value.view(-1))
    disk.close()


def test_an_unwritten_region_is_zeros_without_a_read(tmp_path: Path) -> None:
    disk = Disk([tmp_path], block_nbytes=SECTOR)
    disk.provide({"a": (3 * SECTOR, "a")})
    disk.write("a", aligned(3 * SECTOR))
    disk.forget("a")
    disk.provide({"b": (2 * SECTOR, "b")})  # where the bytes of a still are
    back = aligned(2 * SECTOR)
    disk.read("b", back)
    assert not back.any()
    assert disk.read_nbytes == 0
    assert disk.written_nbytes == 3 * SECTOR
    disk.close()


@pytest.mark.parametrize("kept", [2 * SECTOR + 9, 6 * BLOCK])
def test_kept_data_is_not_moved(kept: int, tmp_path: Path, mode: str) -> None:
    """A region over two drives, of whose 9 sectors in front each write costs as many."""
    disk, first = Disk(folders(tmp_path, 2), block_nbytes=BLOCK, depth=2), 9 * SECTOR
    disk.provide({"a": (first + kept, "a"), "b": (SECTOR, "b")}, cuts={"a": [first]})
    memory, back = aligned(first + kept), aligned(first + kept, 1)
    disk.write("a", memory)
    before = disk.written_nbytes
    for turn in range(2):
        memory[:first] += np.uint8(1 + turn)
        disk.write("a", memory[:first])
        disk.read("a", back)
        assert np.array_equal(back, memory)
    assert disk.written_nbytes - before == 2 * first
    for size in (first - SECTOR, first + SECTOR):
        with pytest.raises(
            DiskError, match=r"a: bytes 0 to .* do not begin and end where grains do; write whole grains"
        ):
            disk.write("a", memory[:size])
    disk.close()


@given(
    nbytes=st.integers(1, 9 * BLOCK),
    kept=st.integers(0, 3),
    beside=st.sampled_from([0, 5]),
    shares=st.lists(st.floats(0.1, 10), min_size=1, max_size=3),
    ranges=st.lists(st.tuples(st.integers(0, 9 * BLOCK), st.integers(0, 9 * BLOCK)), max_size=6),
)
def test_any_range_reads_as_it_was_last_written(
    nbytes: int, kept: int, beside: int, shares: list[float], ranges: list[tuple[int, int]], place: Path
) -> None:
    """Each range is written as far as the grains around it go; what no write has reached reads as zeros."""
    disk = Disk(folders(place, len(shares)), shares=shares, block_nbytes=BLOCK, depth=2)
    disk.provide({"a": (nbytes, "a")}, cuts={"a": [kept * SECTOR * 3, kept * SECTOR * 4 + beside]})
    expected, written = np.zeros(nbytes, np.uint8), 0
    for number, cuts in enumerate(ranges):
        start, stop = sorted(cut % (nbytes + 1) for cut in cuts)
        first, last = disk.around("a", start, stop)
        assert first <= start <= stop <= last
        assert last - first < stop - start + 2 * GRAIN
        expected[first:last] = aligned(last - first) + np.uint8(number)
        disk.write("a", expected[first:last], first)
        written += last - first
        for left, right in ((start, stop), (0, nbytes), (stop, nbytes)):
            back = aligned(right - left, 1)
            disk.read("a", back, left)
            assert np.array_equal(back, expected[left:right])
    partly = 1 + 2 * (beside > 0)  # sectors at the region's end and around a cut that is between sectors
    assert written <= disk.written_nbytes <= written + partly * SECTOR * len(ranges)
    disk.close()


@pytest.mark.parametrize("skip", [0, 8])
@pytest.mark.parametrize(
    ("start", "stop", "grains"),
    [(0, 1, 1), (GRAIN - 1, GRAIN + 1, 2), (BLOCK - 1, BLOCK, 1), (GRAIN, 3 * GRAIN, 2), (1, 2 * BLOCK + 1, 5)],
)
def test_a_range_reads_only_its_grains(start: int, stop: int, grains: int, skip: int, tmp_path: Path) -> None:
    disk = Disk([tmp_path], block_nbytes=BLOCK)
    disk.provide({"a": (3 * BLOCK, "a")})
    memory, back = aligned(3 * BLOCK), aligned(stop - start, skip)
    disk.write("a", memory)
    disk.read("a", back, start)
    assert np.array_equal(back, memory[start:stop])
    assert disk.read_nbytes == grains * GRAIN
    disk.close()


def test_bytes_are_counted(tmp_path: Path) -> None:
    disk = Disk([tmp_path], block_nbytes=BLOCK)
    disk.provide({"a": (BLOCK + 1, "a")})
    memory = aligned(BLOCK + 1)
    disk.write("a", memory)
    disk.write("a", memory)
    disk.read("a", memory)
    assert (disk.written_nbytes, disk.read_nbytes) == (2 * (BLOCK + SECTOR), BLOCK + SECTOR)
    disk.close()


def test_existing_regions_keep_content_and_size(tmp_path: Path) -> None:
    disk = Disk([tmp_path])
    disk.provide({"a": (500, "moments of layer 3")})
    memory, back = aligned(500), aligned(500, 1)
    disk.write("a", memory)
    disk.provide({"a": (500, "moments of layer 3"), "b": (9000, "b")})
    disk.write("b", aligned(9000))
    disk.read("a", back)
    assert np.array_equal(back, memory)
    with pytest.raises(DiskError, match="moments of layer 3: has 500 bytes, not 501; forget it first"):
        disk.provide({"a": (501, "moments of layer 3")})
    disk.close()


def test_reads_and_writes_overlap(tmp_path: Path, mode: str) -> None:
    disk = Disk(folders(tmp_path, 2), block_nbytes=BLOCK, depth=3)
    names = [str(number) for number in range(6)]
    disk.provide({name: (40 * SECTOR + 100 * int(name), name) for name in names})
    values = {name: aligned(40 * SECTOR + 100 * int(name), int(name) % 2) for name in names}

    def visit(name: str) -> None:
        for turn in range(6):
            values[name][turn] ^= 1
            disk.write(name, values[name])
            back = aligned(values[name].size)
            disk.read(name, back)
            assert np.array_equal(back, values[name])

    with ThreadPoolExecutor(len(names)) as threads:
        list(threads.map(visit, names))
    disk.close()


def test_ranges_of_several_regions_move_side_by_side(tmp_path: Path) -> None:
    """Each call waits for two more, so that three blocks of three regions must be in progress together."""
    together = threading.Barrier(3, timeout=5)

    def calls(direction: str, region: str, call: Callable[..., int]) -> Callable[..., int]:
        def met(*args: object) -> int:
            together.wait()
            return call(*args)

        return met

    disk = Disk([tmp_path], block_nbytes=BLOCK, depth=2, calls=calls)
    disk.provide({name: (BLOCK, name) for name in "abc"})
    written, back = {name: aligned(BLOCK, len(name)) for name in "abc"}, {name: aligned(BLOCK) for name in "abc"}
    for number, memory in enumerate(written.values()):
        memory += np.uint8(number)
    disk.write_together([(name, memory, 0) for name, memory in written.items()])
    disk.read_together([(name, memory, 0) for name, memory in back.items()])
    assert all(np.array_equal(back[name], written[name]) for name in "abc")
    disk.close()


def test_short_transfers_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_parts(call: Callable[..., int]) -> Callable[..., int]:
        def some(file: int, views: Sequence[memoryview], place: int, flags: int = 0) -> int:
            return call(file, [views[0][:SECTOR]], place, flags)

        return some

    disk = Disk([tmp_path], block_nbytes=3 * SECTOR)
    monkeypatch.setattr(os, "pwritev", in_parts(os.pwritev))
    monkeypatch.setattr(os, "preadv", in_parts(os.preadv))
    disk.provide({"a": (5 * SECTOR + 9, "a")})
    memory, back = aligned(5 * SECTOR + 9), aligned(5 * SECTOR + 9, 4)
    back[:] = 0
    disk.write("a", memory)
    disk.read("a", back)
    assert np.array_equal(back, memory)
    disk.close()


def test_the_page_cache_is_dropped_after_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_files, "_DIRECT", 0)
    disk = Disk([tmp_path], block_nbytes=BLOCK)
    assert not disk.direct
    disk.provide({"a": (3 * BLOCK, "a")})
    forgotten, flags, write = [], [], os.pwritev

    def forget(file: int, place: int, nbytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        forgotten.append((place, nbytes))

    def through(file: int, views: Sequence[memoryview], place: int, flag: int) -> int:
        flags.append(flag)
        return write(file, views, place, flag)

    monkeypatch.setattr(os, "posix_fadvise", forget)
    monkeypatch.setattr(os, "pwritev", through)
    disk.write("a", aligned(3 * BLOCK))
    assert sorted(forgotten) == [(0, BLOCK), (BLOCK, BLOCK), (2 * BLOCK, BLOCK)]
    assert set(flags) == {os.RWF_DSYNC}, "a page that is not on the drive yet cannot be forgotten"
    disk.read("a", aligned(3 * BLOCK))
    assert len(forgotten) == 6
    disk.close()


# Space --------------------------------------------------------------------------------------------------------------


def has_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=nbytes // 512, f_frsize=512))


def test_too_small_a_disk_is_refused_before_allocating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(folders(tmp_path, 2))  # both on one device
    has_free(monkeypatch, 1 << 20)
    monkeypatch.setattr(scratch_files, "_ALLOCATE", lambda *_: pytest.fail("something was allocated"))
    with pytest.raises(DiskFull) as raised:
        disk.provide({"a": (800_000, "moments of layer 0"), "b": (300_000, "moments of layer 1")})
    assert str(raised.value) == (
        f"{tmp_path / '1'}: moments of layer 0 and 1 more need 1.11 MB of disk, of which 1.04 MB are free; "
        "free space there, give a folder on another drive, or keep less on the disk"
    )
    assert disk.nbytes() == 0
    monkeypatch.undo()
    disk.provide({"a": (800_000, "moments of layer 0"), "b": (300_000, "moments of layer 1")})
    assert disk.nbytes() == 1_100_000
    disk.close()


def test_freed_space_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk([tmp_path], block_nbytes=BLOCK)
    disk.provide({"a": (10 * SECTOR, "a"), "b": (10 * SECTOR, "b")})
    has_free(monkeypatch, 0)
    assert disk.free_nbytes() == 0
    with pytest.raises(DiskFull):
        disk.provide({"c": (10 * SECTOR, "c")})
    disk.forget("a")
    assert disk.free_nbytes() == 10 * SECTOR
    assert disk.nbytes() + disk.free_nbytes() == 20 * SECTOR
    memory, back = aligned(10 * SECTOR), aligned(10 * SECTOR, 1)
    disk.write("b", memory)
    disk.provide({"c": (6 * SECTOR, "c"), "d": (4 * SECTOR, "d")})
    for name, sectors in (("c", 6), ("d", 4)):
        disk.write(name, aligned(sectors * SECTOR))
    disk.read("b", back)
    assert np.array_equal(back, memory)
    disk.close()


def test_free_space_is_limited_by_the_fullest_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(folders(tmp_path, 2), shares=[3, 1])
    has_free(monkeypatch, 1 << 20)
    assert disk.free_nbytes() == 1 << 20, "one device"
    for number, file in enumerate(disk._files):
        file.device = number
    assert disk.free_nbytes() == pytest.approx((1 << 20) * 4 / 3, abs=1), "two devices, three quarters on the first"
    disk.close()


def test_a_partially_failed_allocation_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(folders(tmp_path, 2))
    disk.provide({"a": (2 * SECTOR, "a")})
    memory, back = aligned(2 * SECTOR), aligned(2 * SECTOR, 1)
    disk.write("a", memory)
    allocate = os.posix_fallocate

    def refuse(file: int, start: int, nbytes: int) -> None:
        if file == disk._files[1].number:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, start, nbytes)

    monkeypatch.setattr(scratch_files, "_ALLOCATE", refuse)
    with pytest.raises(DiskFull, match=r"1: cannot allocate 4.10 kB more \(No space left"):
        disk.provide({"b": (2 * SECTOR, "b")})
    assert [os.fstat(file.number).st_size for file in disk._files] == [SECTOR, SECTOR]
    assert disk.nbytes() == 2 * SECTOR
    disk.read("a", back)
    assert np.array_equal(back, memory)
    monkeypatch.undo()
    disk.provide({"b": (2 * SECTOR, "b")})
    disk.close()


def test_file_systems_without_preallocation_are_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, start: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(scratch_files, "_ALLOCATE", refuse)
    disk = Disk([tmp_path])
    disk.provide({"a": (9000, "a")})
    memory, back = aligned(9000), aligned(9000, 1)
    disk.write("a", memory)
    disk.read("a", back)
    assert np.array_equal(back, memory)
    disk.close()


def test_space_is_not_allocated_in_advance_where_that_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk([tmp_path], preallocate=False)
    monkeypatch.setattr(scratch_files, "_ALLOCATE", lambda *_: pytest.fail("space was allocated"))
    disk.provide({"a": (64 * SECTOR, "a")})
    status = os.fstat(disk._files[0].number)
    assert (status.st_size, status.st_blocks) == (64 * SECTOR, 0)
    memory, back = aligned(64 * SECTOR), aligned(64 * SECTOR, 1)
    disk.write("a", memory)
    disk.read("a", back)
    assert np.array_equal(back, memory)
    has_free(monkeypatch, 1 << 10)
    with pytest.raises(DiskFull, match=r"need .* of disk"):
        disk.provide({"b": (64 * SECTOR, "b")})
    disk.close()


# Opening and closing ------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_named_with_its_existing_parent(tmp_path: Path) -> None:
    with pytest.raises(DiskError) as raised:
        Disk([tmp_path, tmp_path / "no" / "such"])
    assert str(raised.value) == f"{tmp_path / 'no' / 'such'}: no such folder; create it in {tmp_path}, which exists"


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EACCES, "that you may write to"), (errno.EROFS, "not read-only"), (errno.ENOSPC, "free space there")],
)
def test_an_unwritable_folder_is_refused(
    number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(DiskError, match=f"cannot be written .{os.strerror(number)}.; .*{advice}") as raised:
        Disk([tmp_path])
    assert raised.value.where == str(tmp_path)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="give a folder, not a file"):
        Disk([tmp_path / "file"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"folders": []}, "no folder"),
        ({"shares": [1.0, 2.0]}, "each needs one above zero"),
        ({"shares": [0.0]}, "each needs one above zero"),
        ({"block_nbytes": 1000}, "not a multiple of 4,096"),
        ({"depth": 0}, "less than one"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, object], problem: str, tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=problem):
        Disk(**({"folders": [tmp_path]} | arguments))  # type: ignore[arg-type]


def test_buffers_must_be_flat_and_match_the_region(tmp_path: Path) -> None:
    disk = Disk([tmp_path])
    disk.provide({"a": (16, "moments of layer 3")})
    for wrong in (np.zeros(17, np.uint8), np.zeros(4, np.float32), np.zeros((16, 2), np.uint8)[:, 0]):
        with pytest.raises(
            DiskError, match=r"moments of layer 3: memory is .*, not uint8 within the region's 16 bytes"
        ):
            disk.write("a", wrong)
    with pytest.raises(DiskError, match=r"moments of layer 3: memory is .* for bytes from 1 on, not uint8 within"):
        disk.read("a", np.zeros(16, np.uint8), 1)
    frozen = np.zeros(16, np.uint8)
    frozen.flags.writeable = False
    disk.write("a", frozen)
    with pytest.raises(DiskError, match="read-only"):
        disk.read("a", frozen)
    with pytest.raises(DiskError, match="b: no such region"):
        disk.read("b", np.zeros(16, np.uint8))
    disk.close()


def _open_files(folder: Path) -> list[str]:
    """The files in `folder` that this process holds open. What earlier tests have left is none of them."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [name for name in found if name.startswith(f"{folder}/")]


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("megatrain-disk")}


def _used(folder: Path) -> Disk:
    disk = Disk(folders(folder, 2), block_nbytes=SECTOR)
    disk.provide({"a": (20 * SECTOR, "a")})
    disk.write("a", aligned(20 * SECTOR))
    disk.read("a", aligned(20 * SECTOR))
    return disk


@pytest.mark.parametrize("unnamed", [True, False])
def test_closing_leaves_nothing_behind(unnamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not unnamed:  # a file system without O_TMPFILE
        monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
    before = _threads()
    disk = _used(tmp_path)
    assert _open_files(tmp_path)
    assert _threads() > before
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    disk.close()
    disk.close()
    assert _open_files(tmp_path) == []
    assert _threads() <= before
    for use in (lambda: disk.provide({}), lambda: disk.write("a", aligned(20 * SECTOR)), disk.free_nbytes):
        with pytest.raises(DiskError, match="is closed"):
            use()
    assert disk.written_nbytes == 20 * SECTOR


def test_a_garbage_collected_disk_closes_itself(tmp_path: Path) -> None:
    before = _threads()
    disk = _used(tmp_path)
    assert _open_files(tmp_path)
    its = _threads() - before
    assert its
    del disk
    gc.collect()
    assert _open_files(tmp_path) == []
    for thread in its:
        thread.join(60)
        assert not thread.is_alive()


def write_and_wait(folder: Path) -> None:
    disk = Disk([folder])
    disk.provide({"a": (1 << 20, "a")})
    disk.write("a", np.ones(1 << 20, np.uint8))
    print("ready", flush=True)
    time.sleep(240)


def test_a_killed_process_leaves_nothing(preloaded: Preloaded, tmp_path: Path) -> None:
    child = preloaded.start(write_and_wait, tmp_path)
    try:
        while child.said != "ready\n":
            assert child.poll() is None, child.said
            time.sleep(0.01)
    finally:
        child.kill()
    child.wait()
    assert list(tmp_path.iterdir()) == []
