"""A fast 64-bit checksum that detects data which comes back changed from the disk.

Words of 64 bits are mixed into a sum h by h ^= word, h ^= h >> 32, h *= an odd number: the loop of FNV-1a (Fowler,
Noll, Vo) around the step of MurmurHash3's finalizer (Appleby). Each step is a bijection in h and in the word, so a
single changed word always changes the sum. The shift moves upper bits down to where the product spreads them; a
product alone would keep a changed top bit at the top, where that of a later word could cancel it. Any other error
goes undetected with a probability of about 2**-64. Words go to LANES sums side by side, which vectorizes, and these
are mixed into one at the end.

It protects against drives, cables and lost writes, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.optim.kernels import compiled, inlined

LANES = 64
ODD = np.uint64(0x9E3779B97F4A7C15)  # odd, so that the product is a bijection; random-looking bits (golden ratio)
HALF = np.uint64(32)


@inlined
def _mix(h: Any, word: Any) -> Any:
    x = h ^ word
    return (x ^ (x >> HALF)) * ODD


@compiled
def _add(words: Any, grain: Any, totals: Any) -> None:
    """Mix the first `grain` words of uint64[n] into the first of `totals`, the next into the next, and so on."""
    lanes = np.empty(LANES, np.uint64)
    for number in range(totals.size):
        some = words[number * grain : (number + 1) * grain]
        for k in range(LANES):
            lanes[k] = np.uint64(k + 1) * ODD  # not zero: mixing zeros into zero would give zero
        whole = some.size - some.size % LANES
        for row in range(0, whole, LANES):
            row_b = some[row : row + LANES]
            for k in range(LANES):
                lanes[k] = _mix(lanes[k], row_b[k])
        h = _mix(totals[number], np.uint64(some.size))
        for k in range(LANES):
            h = _mix(h, lanes[k])
        for k in range(whole, some.size):
            h = _mix(h, some[k])
        totals[number] = h


def checksum(pieces: Iterable[NDArray[np.uint8]]) -> int:
    """The checksum over pieces of memory in order; each is 8-byte aligned, and its length is a multiple of 8 bytes.

    Depends on where one piece ends and the next begins. Runs without the GIL.
    """
    total = np.zeros(1, np.uint64)
    for piece in pieces:
        _add(piece.view(np.uint64), piece.size, total)
    return int(total[0])


def checksums(memory: NDArray[np.uint8], grain_nbytes: int) -> NDArray[np.uint64]:
    """The checksum of every `grain_nbytes` of memory, uint64[n]; the last may be of fewer bytes. See `checksum`."""
    totals = np.zeros(-(-memory.size // grain_nbytes), np.uint64)
    _add(memory.view(np.uint64), grain_nbytes // 8, totals)
    return totals
