"""A file system that takes direct writes and caches them all the same is not called direct."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain.memory import probe_disk, scratch_files
from megatrain.memory.scratch_files import ScratchFile


@pytest.fixture
def journalled(tmp_path: Path) -> Iterator[Path]:
    """An ext4 that journals data."""
    image, place = tmp_path / "image", tmp_path / "place"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    commands = (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop,data=journal", str(image), str(place)])
    for command in commands:
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_ext4_that_journals_data_is_not_called_direct(journalled: Path) -> None:
    file = ScratchFile(journalled)
    assert not file.direct
    file.close()
    assert not probe_disk.disk_speed(journalled, 8 << 20, 0.1).direct


def test_what_is_cached_after_a_direct_write_is_not_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(scratch_files, "is_cached", lambda file, _: not asked.append(file))
    file = ScratchFile(tmp_path)
    assert asked
    assert not file.direct
    file.close()
