"""The deduplicating drive gives back what was written, wherever blocks begin, and zeros elsewhere."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "deduplicating_drive.sh"
LIBRARIES = ("pkg-config", "--exists", "fuse3", "libxxhash", "libzstd")
NBYTES = 3 << 20


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() or not Path("/dev/fuse").exists() or not all(map(shutil.which, ("g++", "pkg-config", "mkfs.xfs"))):
        pytest.skip("mounts as root, and needs a C++ compiler, /dev/fuse and mkfs.xfs")
    if subprocess.run(LIBRARIES).returncode:
        pytest.skip(f"needs the headers of {LIBRARIES[2:]}")
    subprocess.run([SCRIPT, "begin", tmp_path, "8"], check=True)
    yield tmp_path
    subprocess.run([SCRIPT, "end", tmp_path], check=True)


@pytest.mark.slow
def test_what_was_written_is_read_wherever_blocks_begin(drive: Path) -> None:
    """In a file of the file system above, with writes, holes and repetitions that end anywhere."""
    draw, expected = random.Random(0), bytearray(NBYTES)
    with (drive / "files" / "file").open("w+b", buffering=0) as file:
        os.truncate(file.fileno(), NBYTES)
        for _ in range(60):
            start = draw.randrange(NBYTES)
            stop = min(NBYTES, start + draw.randrange(1, 300_000))
            if draw.random() < 0.2:
                hole = start // 4096 * 4096
                expected[hole:stop] = bytes(stop - hole)
                subprocess.run(["fallocate", "-p", "-o", str(hole), "-l", str(stop - hole), file.name], check=True)
            else:
                period = draw.randbytes(draw.choice([1, 384, 4096, 300_000]))
                written = (period * (stop - start))[: stop - start] if len(period) < 300_000 else period[: stop - start]
                expected[start:stop] = written
                os.pwrite(file.fileno(), written, start)
            if draw.random() < 0.1:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(file.fileno(), NBYTES, 0) == expected


@pytest.mark.slow
def test_a_hundred_copies_take_the_memory_of_one(drive: Path) -> None:
    content = random.Random(1).randbytes(1 << 20)
    begun = memory(drive)
    with (drive / "files" / "file").open("wb", buffering=0) as file:
        for _ in range(100):
            file.write(content)
        os.fsync(file.fileno())
    assert memory(drive) - begun < 40 << 20


def memory(drive: Path) -> int:
    """Bytes of memory that the store's process holds."""
    listed = subprocess.run(["pgrep", "-f", f"{drive}/deduplicating_drive"], capture_output=True, text=True, check=True)
    status = Path(f"/proc/{listed.stdout.split()[0]}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10
