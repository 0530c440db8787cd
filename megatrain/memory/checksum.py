"""A 64-bit sum over a block, to tell whether what came back from the disk is what went there.

Words of 64 bits are mixed into a sum h by h ^= word, h ^= h >> 32, h *= an odd number: the loop of FNV-1a (Fowler,
Noll, Vo) around the step of MurmurHash3's finalizer (Appleby). That is a bijection of h for any word and of the word
for any h, so a single changed word always changes the sum. The shift takes upper bits down to where the product
carries them on; a product alone would keep a changed top bit at the top, where that of a later word cancels it. What
else goes wrong stays unseen with a chance of about 2**-64. Words go to LANES sums side by side, which a processor
takes as vectors, and these are mixed into one at the end.

It guards against drives, cables and lost writes, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.optim.kernels import compiled, inlined

LANES = 64
ODD = np.uint64(0x9E3779B97F4A7C15)  # so that the product is a bijection; its bits look random (the golden ratio's)
HALF = np.uint64(32)


@inlined
def _mix(h: Any, word: Any) -> Any:
    x = h ^ word
    return (x ^ (x >> HALF)) * ODD


@compiled
def _add(words: Any, total: Any) -> None:
    """Mix uint64[n] into `total`, uint64[1]."""
    lanes = np.empty(LANES, np.uint64)
    for k in range(LANES):
        lanes[k] = np.uint64(k + 1) * ODD  # not zero: mixing zeros into zero would leave zero
    whole = words.size - words.size % LANES
    for row in range(0, whole, LANES):
        row_b = words[row : row + LANES]
        for k in range(LANES):
            lanes[k] = _mix(lanes[k], row_b[k])
    h = _mix(total[0], np.uint64(words.size))
    for k in range(LANES):
        h = _mix(h, lanes[k])
    for k in range(whole, words.size):
        h = _mix(h, words[k])
    total[0] = h


def checksum(pieces: Iterable[NDArray[np.uint8]]) -> int:
    """The sum over pieces of memory in order, each at a multiple of 8 bytes and of such a length.

    Depends on where one piece ends and the next begins. Runs without the GIL.
    """
    total = np.zeros(1, np.uint64)
    for piece in pieces:
        _add(piece.view(np.uint64), total)
    return int(total[0])
