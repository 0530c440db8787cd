"""Regions that lie in somebody else's files: the right bytes from anywhere, and nothing but those."""

from __future__ import annotations

import os
import random
from fcntl import F_GETFL, fcntl
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatrain.errors import CorruptRegion, DiskError
from megatrain.memory import model_files
from megatrain.memory.model_files import ModelFiles
from megatrain.spec import FileBytes


@pytest.mark.parametrize("direct", [True, False, None])
def test_any_range_equals_the_files_bytes(direct: bool | None, tmp_path: Path) -> None:
    """Tensors at any place of two files, with gaps between them in the region, in blocks of a sector and more."""
    draw, held = random.Random(3), [os.urandom(50_001), os.urandom(9_000)]
    paths = [tmp_path / f"{number}.bin" for number in range(2)]
    for path, content in zip(paths, held, strict=True):
        path.write_bytes(content)
    extents, whole, start = [], np.zeros(40_000, np.uint8), 0
    for number, place, nbytes in ((0, 8, 9_999), (1, 333, 8_667), (0, 40_000, 10_001), (0, 20_001, 2)):
        start += draw.randrange(100)
        extents.append((start, FileBytes(str(paths[number]), place, nbytes)))
        whole[start : start + nbytes] = np.frombuffer(held[number][place : place + nbytes], np.uint8)
        start += nbytes
    files = ModelFiles({"here": extents}, direct=direct, block_nbytes=4096, depth=2)
    try:
        for first, last in [(0, start), *(sorted(draw.sample(range(start), 2)) for _ in range(30))] * 2:
            memory = np.zeros(last - first, np.uint8)
            files.read("here", first, memory)
            assert np.array_equal(memory, whole[first:last])
        assert files.nbytes == 28_669
        assert files.direct is (direct or False), "so few bytes stay in the page cache"
    finally:
        files.close()


def test_changed_file_bytes_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(10_000))
    then = path.stat()
    files = ModelFiles({"here": [(0, FileBytes(str(path), 100, 9_000))]}, direct=False)
    memory = np.zeros(9_000, np.uint8)
    files.read("here", 0, memory)
    with path.open("r+b") as opened:
        opened.seek(5_000)
        opened.write(b"\x01")
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    with pytest.raises(CorruptRegion, match="other bytes than before"):
        files.read("here", 0, memory)
    files.close()


def test_short_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(100))
    for file, match in ((path, "shorter"), (tmp_path / "none", "is gone")):
        with pytest.raises(DiskError, match=match):
            ModelFiles({"here": [(0, FileBytes(str(file), 90, 20))]})


@pytest.mark.parametrize("direct", [True, False])
def test_the_faster_read_method_is_measured(direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way it is, by a clock that goes on in the slow one only; and its bytes are those of the file."""
    path, content = tmp_path / "weights", os.urandom(20 * 8192)
    path.write_bytes(content)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except (AttributeError, OSError):
        pytest.skip("nothing is read past the page cache here")
    read, ways = os.preadv, list[bool]()

    def recorded(file: int, buffers: list[memoryview], place: int) -> int:
        ways.append(bool(fcntl(file, F_GETFL) & os.O_DIRECT))
        return read(file, buffers, place)

    clock = SimpleNamespace(perf_counter=lambda: float(sum(way != direct for way in ways)))
    monkeypatch.setattr(os, "preadv", recorded)
    monkeypatch.setattr(model_files, "time", clock)
    files = ModelFiles({"here": [(0, FileBytes(str(path), 0, len(content)))]}, block_nbytes=8192)
    memory = np.zeros(len(content), np.uint8)
    files.read("here", 0, memory)
    assert memory.tobytes() == content
    assert files.direct is direct
    assert [ways[:16].count(way) for way in (True, False)] == [8, 8], "samples"
    assert ways[16:] == [direct] * 20
    assert files.read_nbytes == (20 + 16) * 8192
    files.close()
