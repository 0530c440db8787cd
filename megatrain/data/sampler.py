"""Decides the order of rows: seeded epochs, and several sources mixed by weight.

The order comes from Philox's raw output, which NumPy never changes, and not from `Generator.permutation`, which it may:
a run resumes bit-exactly under a later NumPy. It takes 8 bytes per row. Left out: what a row is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

BLOCK = 64
"""Micro-batches whose samples are sorted by length together: much of the gain, and still a random order."""


def epoch_order(seed: int, epoch: int, count: int) -> Indices:
    """A permutation of `count` rows: what sorts the first numbers of Philox under key (seed, epoch).

    Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def grouped_order(seed: int, epoch: int, lengths: Indices, together: int) -> Indices:
    """A permutation in which each `together` rows that follow one another have like lengths.

    Blocks of a random order are sorted by length and cut; the cuts of the whole epoch then come in a random order.
    """
    order = epoch_order(seed, epoch, len(lengths))
    size = together * BLOCK
    for start in range(0, len(order), size):
        block = order[start : start + size]
        order[start : start + size] = block[np.argsort(lengths[block], kind="stable")]
    whole = len(order) // together * together
    cuts = order[:whole].reshape(-1, together)
    # Another key than that of `epoch_order`, whose seeds are below 2**63.
    return np.concatenate([cuts[epoch_order(seed + (1 << 63), epoch, len(cuts))].ravel(), order[whole:]])


def source_behind(positions: Sequence[int], weights: Sequence[float]) -> int:
    """The source to draw from next: the one that is furthest behind its share of what has been drawn.

    Of equal ones it is the first. No random numbers: after any number of draws each source is close to its share.
    """
    drawn = sum(positions) + 1
    total = sum(weights)
    behind = [weight / total * drawn - position for weight, position in zip(weights, positions, strict=True)]
    return behind.index(max(behind))
