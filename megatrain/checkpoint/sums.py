"""What a file holds, as its size and a checksum of each block.

The checksum is the one that guards the disk tier (`memory.checksum`): 64 bits, sure to find any change inside one word,
and at memory bandwidth, which matters since it is taken while training goes on (measured: 15 GB/s a core, where CRC-32
did 1.6 and SHA-256 0.2). It is part of the format. One for each block lets several threads share a file, and tells
where the damage is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatrain.memory.checksum import checksum
from megatrain.plan import available_threads

BLOCK_NBYTES = 4 << 20
"""Bytes under one checksum; part of the format (see `manifest.FORMAT`). The last block of a file may be shorter."""

DIGITS = 16
"""Of a checksum."""

_RUN = 16
"""Blocks that a thread reads in one go."""
_READERS = 8
"""Threads at most, so that a slow drive has several requests to work on."""


@dataclass(frozen=True, slots=True)
class FileSum:
    """Bytes in the file, and `DIGITS` hexadecimal digits for each block."""

    nbytes: int
    blocks: str


def file_sum(nbytes: int, sums: Iterable[int]) -> FileSum:
    """The sum of a file of so many bytes, from those of its blocks."""
    return FileSum(nbytes, "".join(digits(each) for each in sums))


def block_sum(memory: NDArray[np.uint8], nbytes: int) -> int:
    """The checksum of the first bytes of `memory`, which is aligned to words; zeros fill the last word."""
    end = -(-nbytes // 8) * 8
    memory[nbytes:end] = 0
    return checksum([memory[:end]])


def sum_of(path: Path) -> FileSum:
    """Read a file, and sum it up. Raises `OSError`."""
    return file_sum(path.stat().st_size, _sums(path, 0))


def differences(folder: Path, files: Mapping[str, FileSum]) -> dict[str, str]:
    """Read all files with several threads. Name -> what is wrong, of those that are not as their sum says.

    Sizes are taken for granted; a file that has another one is reported where it ends too early.
    """
    runs = [(name, first) for name in files for first in range(0, max(_blocks(files[name]), 1), _RUN)]
    with ThreadPoolExecutor(min(_READERS, 2 * available_threads())) as threads:
        found = threads.map(lambda run: _difference(folder / run[0], files[run[0]], run[1]), runs)
        wrong: dict[str, str] = {}
        for (name, _), what in zip(runs, found, strict=True):
            if what and name not in wrong:
                wrong[name] = what
    return wrong


def _difference(path: Path, expected: FileSum, first: int) -> str:
    """What is wrong with the blocks of one run, nothing if nothing is."""
    try:
        found = [digits(each) for each in itertools.islice(_sums(path, first), _RUN)]
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    last = min(first + _RUN, _blocks(expected))
    for block in range(first, last):
        if block - first >= len(found) or found[block - first] != digits_of_block(expected, block):
            start, stop = block * BLOCK_NBYTES, min((block + 1) * BLOCK_NBYTES, expected.nbytes)
            return f"is damaged between byte {start:,} and byte {stop:,}"
    return ""


def _blocks(file: FileSum) -> int:
    return len(file.blocks) // DIGITS


def digits(found: int) -> str:
    """A checksum in hexadecimal."""
    return f"{found:0{DIGITS}x}"


def digits_of_block(file: FileSum, block: int) -> str:
    """The checksum of one block, in hexadecimal digits."""
    return file.blocks[DIGITS * block : DIGITS * (block + 1)]


def _sums(path: Path, first: int) -> Iterator[int]:
    """The checksums of a file's blocks, from block `first` on."""
    size = min(BLOCK_NBYTES, path.stat().st_size)
    memory = np.empty(-(-size // 8) * 8, np.uint8)
    with path.open("rb", buffering=0) as file:
        file.seek(first * BLOCK_NBYTES)
        while nbytes := _fill(memory.data[:size], file):
            yield block_sum(memory, nbytes)


def _fill(buffer: memoryview, file: FileIO) -> int:
    """Read until the buffer is full or the file ends, and return how much that was."""
    filled = 0
    while filled < len(buffer) and (nbytes := file.readinto(buffer[filled:])):
        filled += nbytes
    return filled
