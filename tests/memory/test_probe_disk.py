"""The disk probe: what it measures, what it leaves behind, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain.errors import DiskError, DiskFull
from megatrain.memory import probe_disk, scratch_files


def test_the_disk_probe_leaves_no_files(tmp_path: Path) -> None:
    speed = probe_disk.disk_speed(tmp_path, 16 << 20, 0.4)
    assert os.listdir(tmp_path) == []
    assert speed.file_nbytes in (8 << 20, 16 << 20)
    assert speed.file_nbytes <= speed.written_nbytes <= 17 * speed.file_nbytes + 1e9
    assert 1e4 < speed.duplex_read_bandwidth < 1e12
    assert 1e4 < speed.duplex_write_bandwidth < 1e12
    assert 1e4 < speed.best.read_bandwidth < 1e12
    assert 1e4 < speed.best.write_bandwidth < 1e12


def test_the_largest_of_equally_fast_block_sizes_is_chosen() -> None:
    def rate(kib: int, depth: int, bandwidth: float) -> probe_disk.DiskRate:
        return probe_disk.DiskRate(kib << 10, depth, bandwidth, bandwidth)

    noisy = [rate(128, 8, 1.05), rate(512, 2, 1.0), rate(2048, 4, 1.0), rate(2048, 2, 0.97), rate(8192, 1, 1.0)]
    assert (probe_disk._best(noisy).block_nbytes, probe_disk._best(noisy).depth) == (2 << 20, 2)
    assert probe_disk._best([rate(128, 8, 2.0), *noisy]).block_nbytes == 128 << 10
    assert probe_disk._best([rate(512, 4, 1.0), rate(8192, 1, 1.0)]).block_nbytes == 8 << 20


def test_the_disk_probe_falls_back_to_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_flags = scratch_files.fcntl.fcntl

    def refuse(file: int, command: int, flags: int = 0) -> int:
        if command == scratch_files.fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return int(set_flags(file, command, flags))

    monkeypatch.setattr(scratch_files.fcntl, "fcntl", refuse)
    speed = probe_disk.disk_speed(tmp_path, 8 << 20, 0.1)
    assert not speed.direct
    assert speed.best.read_bandwidth > 0
    assert os.listdir(tmp_path) == []


def test_unwritable_probe_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for measure in (probe_disk.refuse_unwritable, lambda folder: probe_disk.disk_speed(folder, 8 << 20, 0.1)):
        with pytest.raises(DiskError, match=r"file: cannot be written .Not a directory"):
            measure(tmp_path / "file")
    monkeypatch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(DiskFull, match=r"cannot be written .No space left on device.; free space there"):
        probe_disk.disk_speed(tmp_path, 8 << 20, 0.1)
    assert os.listdir(tmp_path) == ["file"]
