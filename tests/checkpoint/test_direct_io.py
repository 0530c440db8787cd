"""Files written block by block in threads hold what was written, and their sums say so."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.checkpoint import direct_io, manifest
from megatrain.checkpoint.direct_io import DirectWriter
from megatrain.checkpoint.manifest import FileSum, differences, sum_of
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


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize(("piece", "allocated"), [(1000, 1.0), (3 * BLOCK, 1.0), (1000, 0.0), (1000, 2.0)])
def test_any_size_may_be_written_in_any_pieces(nbytes: int, piece: int, allocated: float, tmp_path: Path) -> None:
    data = pattern(nbytes)
    with DirectWriter(tmp_path) as writer:
        file = writer.open(tmp_path / "a", int(allocated * nbytes))
        for start in range(0, nbytes, piece):
            file.seek(start)
            file.write(data[start : start + piece])
        file.close()
    assert (tmp_path / "a").read_bytes() == data
    blocks = [data[start : start + BLOCK] for start in range(0, nbytes, BLOCK)]
    assert writer.sums == {"a": FileSum(nbytes, "".join(f"{padded_sum(block):016x}" for block in blocks))}
    assert sum_of(tmp_path / "a") == writer.sums["a"]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3 * BLOCK)), max_size=12))
def test_two_files_may_be_written_concurrently(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("two")
    due = {"a": b"", "b": b""}
    with DirectWriter(folder) as writer:
        files = {name: writer.open(folder / name, 3 * BLOCK) for name in due}
        for seed, (name, nbytes) in enumerate(writes):
            data = bytearray(pattern(nbytes, seed))
            files[name].write(data)
            due[name] += data
            data[:] = bytes(nbytes)  # the caller's memory is the caller's again
        for file in files.values():
            file.close()
    assert {name: (folder / name).read_bytes() for name in due} == due
    assert writer.sums == {name: sum_of(folder / name) for name in due}


def test_the_checksum_is_part_of_the_format(tmp_path: Path) -> None:
    """Another one would make every checkpoint that was ever written look damaged: it takes a new format number."""
    (tmp_path / "a").write_bytes(pattern(BLOCK + 77))
    assert sum_of(tmp_path / "a") == FileSum(BLOCK + 77, "7af5b8452caaa6adb4c2ed34e9d1cc53")


@pytest.mark.parametrize("refused", [errno.EOPNOTSUPP, errno.EINVAL])
def test_preallocation_is_optional(refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: int) -> None:
        raise OSError(refused, "refused")

    monkeypatch.setattr(os, "posix_fallocate", refusing)
    with DirectWriter(tmp_path) as writer:
        file = writer.open(tmp_path / "a", BLOCK)
        file.write(pattern(BLOCK))
        file.close()
    assert (tmp_path / "a").read_bytes() == pattern(BLOCK)


def test_a_full_disk_is_found_out_when_a_file_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with DirectWriter(tmp_path) as writer, pytest.raises(OSError, match="No space left"):
        writer.open(tmp_path / "a", BLOCK)
    assert not files or len(os.listdir("/proc/self/fd")) == files


def test_writes_only_grow_a_file(tmp_path: Path) -> None:
    with DirectWriter(tmp_path) as writer:
        file = writer.open(tmp_path / "a", 0)
        file.write(b"12345")
        with pytest.raises(ValueError, match="byte 3 of a file that is written front to back, and has 5"):
            file.seek(3)
        file.close()


def test_consecutive_files_reuse_buffers(tmp_path: Path) -> None:
    with DirectWriter(tmp_path) as writer:
        before = writer._free.qsize()
        for name in range(20):
            file = writer.open(tmp_path / str(name), 0)
            file.write(pattern((name % 3) * BLOCK + name))
            file.close()
            file.close()
        assert writer._free.qsize() == before


@pytest.mark.parametrize("refusals", [1, 1000])
def test_refused_direct_io_falls_back_to_the_page_cache(
    refusals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, refused = os.pwrite, iter(range(refusals))

    def refusing(file: int, data: memoryview, start: int) -> int:
        if flags(file) and next(refused, None) is not None:
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(file, data, start)

    def flags(file: int) -> int:
        return direct_io.fcntl.fcntl(file, direct_io.fcntl.F_GETFL) & os.O_DIRECT

    monkeypatch.setattr(os, "pwrite", refusing)
    with DirectWriter(tmp_path) as writer:
        file = writer.open(tmp_path / "a", 0)
        if not flags(file._file):
            pytest.skip("no direct writes here")
        file.write(pattern(6 * BLOCK + 5))
        file.close()
    assert (tmp_path / "a").read_bytes() == pattern(6 * BLOCK + 5)
    assert writer.sums["a"] == sum_of(tmp_path / "a")


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, start: written(file, data[:4096], start))
    with DirectWriter(tmp_path) as writer:
        file = writer.open(tmp_path / "a", 0)
        file.write(pattern(3 * BLOCK + 5))
        file.close()
    assert (tmp_path / "a").read_bytes() == pattern(3 * BLOCK + 5)


@pytest.mark.parametrize("failing", [0, 3, 5])
def test_a_writer_thread_error_is_raised_once_without_hanging(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = os.pwrite

    def failing_write(file: int, data: memoryview, start: int) -> int:
        if start == failing * BLOCK:
            raise OSError(errno.EIO, "Input/output error")
        return written(file, data, start)

    monkeypatch.setattr(os, "pwrite", failing_write)
    threads = threading.active_count()
    with DirectWriter(tmp_path) as writer:
        file = writer.open(tmp_path / "a", 0)
        raised = 0
        for block in range(6):
            try:
                file.write(pattern(BLOCK, block))
            except OSError:
                raised += 1
                break
        try:
            file.close()
        except OSError:
            raised += 1
        file.close()
    assert raised == 1
    assert writer.sums == {}
    assert threading.active_count() == threads


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
