"""How much of a drive's speed the disk room reaches: `Disk.read` and `Disk.write` beside plain direct I/O.

    python -m bench.disk --folder FOLDER [--mib N] [--rounds N] [--block-kib N] [--depth N] [--out FOLDER]

Contenders, each on as many bytes of its own, in files without names that are gone afterwards:

    sequential     one thread, one call after the other, in blocks of 8 MiB
    raw            bare calls from several threads, with the block and depth that the probe finds best here
    disk           `Disk` with checksums, with the same block and depth unless others are given
    disk, no sums  `Disk` without

Each reads, writes, and (but for sequential) does both at once. They run in turn, a round at a time, in an order that
rotates, and a ratio is the median over rounds of the ratio within a round: what slows the drive for a while slows all
of them. The claim is for `disk`: 0.9 of `raw` at least, reading and writing. Beside it stand the speed of the checksum
on one core, and of a region's first write, for which the file system has to do more. Left out: how long a drive keeps
its speed up, which a few seconds cannot tell.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.memory.checksum import checksum
from megatrain.memory.disk import Disk
from megatrain.memory.probe_disk import disk_speed
from megatrain.memory.scratch_files import ScratchFile
from megatrain.plan.host_resources import processor_name

Bytes = NDArray[np.uint8]
Seconds = dict[tuple[str, str], list[float]]
"""(contender, way) -> of each round."""
SEQUENTIAL_NBYTES = 8 << 20
RAW, SEQUENTIAL = "raw", "sequential"
GOAL = 0.9


@dataclass(frozen=True)
class Contender:
    """Something to time: each call moves all bytes once."""

    name: str
    read: Callable[[Bytes], None]
    write: Callable[[Bytes], None]


@dataclass(frozen=True)
class Row:
    """Medians over rounds, in bytes per second; `both` counts what is read and what is written."""

    name: str
    way: str
    bandwidth: float
    ratio_to_raw: float
    ratio_to_sequential: float | None


class RawFile:
    """Bare direct calls on one file."""

    def __init__(self, folder: Path, nbytes: int, block_nbytes: int, depth: int) -> None:
        self.file = ScratchFile(folder)
        self.file.resize(0, nbytes)
        self._nbytes, self._block_nbytes, self._depth = nbytes, block_nbytes, depth
        self._threads = ThreadPoolExecutor(2 * depth)

    def read(self, memory: Bytes) -> None:
        self._each(lambda part, place: os.preadv(self.file.number, [part], place), memory)

    def write(self, memory: Bytes) -> None:
        self._each(lambda part, place: os.pwritev(self.file.number, [part], place), memory)

    def _each(self, call: Callable[[memoryview, int], int], memory: Bytes) -> None:
        def work(thread: int) -> None:
            for place in range(thread * self._block_nbytes, self._nbytes, self._depth * self._block_nbytes):
                part = memory[place : place + self._block_nbytes].data
                if call(part, place) != len(part):
                    raise OSError("the disk moved less than it was asked to")

        list(self._threads.map(work, range(self._depth)))

    def close(self) -> None:
        self._threads.shutdown()
        self.file.close()


def measure(
    folder: Path,
    nbytes: int,
    rounds: int,
    block_nbytes: int | None = None,
    depth: int | None = None,
    probe_seconds: float = 4.0,
) -> dict[str, Any]:
    """Probe `folder`, then time the contenders in turn, `rounds` times after one untimed round."""
    probed = disk_speed(folder, nbytes, probe_seconds)
    block_nbytes, depth = block_nbytes or probed.best.block_nbytes, depth or probed.best.depth
    raw = RawFile(folder, nbytes, probed.best.block_nbytes, probed.best.depth)
    sequential = RawFile(folder, nbytes, SEQUENTIAL_NBYTES, 1)
    disks = {
        name: Disk([folder], block_nbytes=block_nbytes, depth=depth, checksums=sums)
        for name, sums in (("disk", True), ("disk, no sums", False))
    }
    field = [Contender(SEQUENTIAL, sequential.read, sequential.write), Contender(RAW, raw.read, raw.write)]
    source, target = _pages(nbytes), _pages(nbytes)
    checksum([source])
    began = time.perf_counter()
    checksum([source])
    sum_seconds = time.perf_counter() - began
    first: dict[str, float] = {}
    for name, disk in disks.items():
        disk.provide({"region": (nbytes, "region"), "other": (nbytes, "other")})
        first[name] = _seconds(lambda disk=disk: disk.write("region", source))  # type: ignore[misc]
        disk.write("other", source)
        field.append(_on(disk, name))
    seconds = _rounds(field, rounds, source, target)
    closing: list[RawFile | Disk] = [raw, sequential, *disks.values()]
    for each in closing:
        each.close()
    rows = [_row(one.name, way, nbytes, seconds) for way in ("read", "write", "both") for one in field]
    rows = [row for row in rows if (row.name, row.way) != (SEQUENTIAL, "both")]
    return {
        "machine": processor_name(),
        "cpus": os.cpu_count(),
        "nbytes": nbytes,
        "rounds": rounds,
        "direct": probed.direct,
        "raw": asdict(probed.best),
        "disk": {"block_nbytes": block_nbytes, "depth": depth},
        "checksum_bandwidth": nbytes / sum_seconds,
        "first_write_bandwidth": {name: nbytes / took for name, took in first.items()},
        "rows": [asdict(row) for row in rows],
    }


def holds(result: dict[str, Any]) -> bool:
    """Whether the claim is true here."""
    ours = [row for row in result["rows"] if row["name"] == "disk" and row["way"] != "both"]
    return all(row["ratio_to_raw"] >= GOAL for row in ours)


def show(result: dict[str, Any]) -> str:
    """The measurement as text."""
    raw, disk = result["raw"], result["disk"]
    lines = [
        f"{result['nbytes'] >> 20} MiB, medians of {result['rounds']} rounds; raw {raw['block_nbytes'] >> 10} KiB x "
        f"{raw['depth']}, disk {disk['block_nbytes'] >> 10} KiB x {disk['depth']}"
        + ("" if result["direct"] else "; no direct I/O here: through the page cache"),
        f"{'':15}{'':7}{'GB/s':>7}{'/ raw':>8}{'/ sequential':>14}",
    ]
    for row in result["rows"]:
        to_sequential = row["ratio_to_sequential"]
        last = f"{to_sequential:14.2f}" if to_sequential else ""
        lines.append(f"{row['name']:15}{row['way']:7}{row['bandwidth'] / 1e9:7.2f}{row['ratio_to_raw']:8.2f}{last}")
    first = ", ".join(f"{name} {value / 1e9:.2f}" for name, value in result["first_write_bandwidth"].items())
    lines.append(f"checksum, one core {result['checksum_bandwidth'] / 1e9:.1f} GB/s; first write of a region: {first}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.disk", description="the disk room beside plain direct I/O")
    parser.add_argument("--folder", type=Path, required=True, help="on the drive to measure")
    parser.add_argument("--mib", type=int, default=192, help="of each of six regions and files")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    parser.add_argument(
        "--block-kib", type=int, default=None, help="of the disk room, if not what the probe finds best"
    )
    parser.add_argument("--depth", type=int, default=None, help="of the disk room, if not what the probe finds best")
    parser.add_argument("--out", type=Path, default=None, help="folder for disk.json")
    given = parser.parse_args(arguments)
    block_nbytes = given.block_kib << 10 if given.block_kib else None
    result = measure(given.folder, given.mib << 20, given.rounds, block_nbytes, given.depth)
    print(show(result))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "disk.json").write_text(json.dumps(result, indent=2) + "\n")
    if not holds(result):
        raise SystemExit(f"less than {GOAL} of what bare calls reach")


def _on(disk: Disk, name: str) -> Contender:
    return Contender(name, lambda memory: disk.read("region", memory), lambda memory: disk.write("other", memory))


def _rounds(
    field: Sequence[Contender], rounds: int, source: Bytes, target: Bytes
) -> dict[tuple[str, str], list[float]]:
    """(contender, way) -> seconds of each round."""
    seconds: dict[tuple[str, str], list[float]] = {}
    with ThreadPoolExecutor(2) as threads:

        def both(one: Contender) -> None:
            for future in (threads.submit(one.read, target), threads.submit(one.write, source)):
                future.result()

        for turn in range(rounds + 1):
            for one in [*field[turn % len(field) :], *field[: turn % len(field)]]:
                took = {
                    "read": _seconds(lambda one=one: one.read(target)),  # type: ignore[misc]
                    "write": _seconds(lambda one=one: one.write(source)),  # type: ignore[misc]
                    "both": _seconds(lambda one=one: both(one)),  # type: ignore[misc]
                }
                for way, value in took.items():
                    seconds.setdefault((one.name, way), []).extend([value] if turn else [])
    return seconds


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _row(name: str, way: str, nbytes: int, seconds: Seconds) -> Row:
    mine = seconds[name, way]

    def to(other: str) -> float:
        return median(theirs / t for theirs, t in zip(seconds[other, way], mine, strict=True))

    moved = 2 * nbytes if way == "both" else nbytes
    return Row(name, way, moved / median(mine), to(RAW), None if way == "both" else to(SEQUENTIAL))


def _pages(nbytes: int) -> Bytes:
    """Random bytes, which no drive can compress, at the beginning of a page."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    memory[:] = np.frombuffer(np.random.default_rng(0).bytes(nbytes), np.uint8)
    return memory


if __name__ == "__main__":
    main()
