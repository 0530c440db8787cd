"""Files written by ranges in threads hold what was written, and their sums say so."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.checkpoint import manifest, range_writer
from megatrain.checkpoint.manifest import FileSum, differences, sum_of
from megatrain.checkpoint.range_writer import sums_of_files, writing_ranges
from megatrain.checkpoint.safetensors_writer import Shard
from megatrain.memory.checksum import checksum

BLOCK = 8192
SIZES = [0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 77, 40 * BLOCK + 1]


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK_NBYTES", BLOCK)
        yield


def padded_sum(data: bytes) -> int:
    return checksum([np.frombuffer(data + bytes(-len(data) % 8), np.uint8)])


def pattern(nbytes: int, seed: int = 0) -> bytes:
    return bytes((7 * at + at // 251 + seed) % 256 for at in range(nbytes))


def empty(name: str, nbytes: int) -> Shard:
    return Shard(name, b"", {}, nbytes)


def written(folder: Path, name: str, data: bytes, piece: int) -> FileSum:
    """Write a file in pieces of that length, and return its checksums."""
    shard = empty(name, len(data))
    with writing_ranges(folder, [shard]) as writer:
        for start in range(0, len(data), piece):
            writer.write(name, start, data[start : start + piece])
    return sums_of_files(folder, [shard], writer.written)[name]


def test_a_file_system_that_compresses_is_let_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_writer, "compresses_what_is_not_preallocated", lambda _: True)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("space was allocated in advance"))
    opened, honest = list[int](), os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *mode: opened.append(flags) or honest(path, flags, *mode))
    data = pattern(3 * BLOCK)
    written(tmp_path, "a", data, BLOCK)
    assert (tmp_path / "a").read_bytes() == data
    assert not any(flags & os.O_DIRECT for flags in opened)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("piece", [1000, 3 * BLOCK])
def test_any_size_may_be_written_in_any_pieces(nbytes: int, piece: int, tmp_path: Path) -> None:
    data = pattern(nbytes)
    found = written(tmp_path, "a", data, piece)
    assert (tmp_path / "a").read_bytes() == data
    blocks = [data[start : start + BLOCK] for start in range(0, nbytes, BLOCK)]
    assert found == FileSum(nbytes, "".join(f"{padded_sum(block):016x}" for block in blocks)) == sum_of(tmp_path / "a")


@given(st.lists(st.integers(0, 6 * BLOCK), max_size=6), st.integers(1, 6 * BLOCK), st.randoms())
def test_ranges_of_two_files_may_be_written_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], nbytes: int, order: Any
) -> None:
    """A block of several pieces is read back, and each caller's memory is the caller's again after a write."""
    folder = tmp_path_factory.mktemp("two")
    due = {"a": pattern(nbytes), "b": pattern(nbytes, 1)}
    ends = sorted({0, nbytes, *(cut for cut in cuts if cut < nbytes)})
    ranges = [(name, start, stop) for name in due for start, stop in itertools.pairwise(ends)]
    order.shuffle(ranges)
    shards = [empty(name, nbytes) for name in due]
    with writing_ranges(folder, shards) as writer:
        for name, start, stop in ranges:
            data = bytearray(due[name][start:stop])
            writer.write(name, start, data)
            data[:] = bytes(len(data))
    assert {name: (folder / name).read_bytes() for name in due} == due
    assert sums_of_files(folder, shards, writer.written) == {name: sum_of(folder / name) for name in due}


def test_more_files_than_may_be_open_are_written_by_turns(tmp_path: Path) -> None:
    data = pattern(3 * BLOCK)
    shards = [empty(str(number), len(data)) for number in range(3 * range_writer._MOST_OPEN)]
    files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with writing_ranges(tmp_path, shards) as writer:
        buffers = writer._free.qsize()
        for start in range(0, len(data), 3000):
            for shard in shards:
                writer.write(shard.name, start, data[start : start + 3000])
    assert writer._free.qsize() == buffers
    assert not files or len(os.listdir("/proc/self/fd")) == files
    assert {(tmp_path / shard.name).read_bytes() for shard in shards} == {data}
    assert {file.blocks for file in sums_of_files(tmp_path, shards, writer.written).values()} == {
        sum_of(tmp_path / "0").blocks
    }


def test_the_checksum_is_part_of_the_format(tmp_path: Path) -> None:
    """Another one would make every checkpoint that was ever written look damaged: it takes a new format number."""
    (tmp_path / "a").write_bytes(pattern(BLOCK + 77))
    assert sum_of(tmp_path / "a") == FileSum(BLOCK + 77, "7af5b8452caaa6adb4c2ed34e9d1cc53")


@pytest.mark.parametrize("refused", [errno.EOPNOTSUPP, errno.EINVAL])
def test_preallocation_is_optional(refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: int) -> None:
        raise OSError(refused, "refused")

    monkeypatch.setattr(os, "posix_fallocate", refusing)
    written(tmp_path, "a", pattern(BLOCK), BLOCK)
    assert (tmp_path / "a").read_bytes() == pattern(BLOCK)


def test_a_full_disk_is_found_out_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(range_writer, "compresses_what_is_not_preallocated", lambda _: False)
    monkeypatch.setattr(os, "posix_fallocate", full)
    files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with pytest.raises(OSError, match="No space left"), writing_ranges(tmp_path, [empty("a", BLOCK)]):
        pytest.fail("there is no space")
    assert not files or len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("refusals", [0, 1, 1000])
def test_refused_direct_io_falls_back_to_the_page_cache(
    refusals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, refused, direct = os.pwrite, iter(range(refusals)), list[int]()

    def refusing(file: int, data: memoryview, start: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            if next(refused, None) is not None:
                raise OSError(errno.EINVAL, "Invalid argument")
            direct.append(start // BLOCK)
        return honest(file, data, start)

    monkeypatch.setattr(os, "pwrite", refusing)
    found = written(tmp_path, "a", pattern(6 * BLOCK + 5), 1000)
    assert (tmp_path / "a").read_bytes() == pattern(6 * BLOCK + 5)
    assert found == sum_of(tmp_path / "a")
    if not direct and refusals < 6:
        pytest.skip("no direct writes here")
    assert len(direct) == max(0, 6 - refusals), "whole blocks are written past the page cache, and the rest is not"


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, start: honest(file, data[:4096], start))
    written(tmp_path, "a", pattern(3 * BLOCK + 5), 1000)
    assert (tmp_path / "a").read_bytes() == pattern(3 * BLOCK + 5)


@pytest.mark.parametrize("failing", [0, 3, 5])
def test_a_writer_thread_error_is_raised_without_hanging(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = os.pwrite

    def failing_write(file: int, data: memoryview, start: int) -> int:
        if start == failing * BLOCK:
            raise OSError(errno.EIO, "Input/output error")
        return honest(file, data, start)

    monkeypatch.setattr(os, "pwrite", failing_write)
    before = threading.active_count(), len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with (
        pytest.raises(OSError, match="Input/output error"),
        writing_ranges(tmp_path, [empty("a", 6 * BLOCK)]) as writer,
    ):
        for block in range(6):
            writer.write("a", block * BLOCK, pattern(BLOCK, block))
    after = threading.active_count(), len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after == before


def test_checksum_differences_name_block_and_files(tmp_path: Path) -> None:
    data = pattern(40 * BLOCK + 3)
    for name in ("whole", "flipped", "short", "end"):
        (tmp_path / name).write_bytes(data)
    files = {name: sum_of(tmp_path / name) for name in ("whole", "flipped", "short", "end")}
    files |= {"empty": FileSum(0, ""), "gone": files["whole"]}
    (tmp_path / "empty").write_text("")
    changed = bytearray(data)
    changed[20 * BLOCK + 5] ^= 1
    (tmp_path / "flipped").write_bytes(changed)
    (tmp_path / "short").write_bytes(data[: 17 * BLOCK])
    changed = bytearray(data)
    changed[-1] ^= 128
    (tmp_path / "end").write_bytes(changed)
    assert differences(tmp_path, files) == {
        "flipped": f"is damaged between byte {20 * BLOCK:,} and byte {21 * BLOCK:,}",
        "short": f"is damaged between byte {17 * BLOCK:,} and byte {18 * BLOCK:,}",
        "end": f"is damaged between byte {40 * BLOCK:,} and byte {40 * BLOCK + 3:,}",
        "gone": "cannot be read (No such file or directory)",
    }
