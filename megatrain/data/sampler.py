"""Decides the order of rows: seeded epochs, and several sources mixed by weight.

Orders are computed from Philox's raw output, which NumPy never changes, and not by `Generator.permutation`, which it
may change: so a run resumes bit-exactly with a later NumPy. An order takes 8 bytes per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

BLOCK = 64
"""Micro-batches whose samples are sorted by length together: enough for little padding, with an order still random."""


def epoch_order(seed: int, epoch: int, count: int) -> Indices:
    """A permutation of `count` rows: the argsort of the first `count` outputs of Philox with the key (seed, epoch).

    Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def grouped_order(seed: int, epoch: int, lengths: Indices, micro_batch: int) -> Indices:
    """A permutation in which each `micro_batch` consecutive rows have similar lengths.

    A random order is divided into blocks, each sorted by length and divided into micro-batches; the micro-batches of
    the epoch are then shuffled. Rows that fill no micro-batch come last.
    """
    order = epoch_order(seed, epoch, len(lengths))
    size = micro_batch * BLOCK
    for start in range(0, len(order), size):
        block = order[start : start + size]
        order[start : start + size] = block[np.argsort(lengths[block], kind="stable")]
    whole = len(order) // micro_batch * micro_batch
    groups = order[:whole].reshape(-1, micro_batch)
    # Seeds are below 2**63, so this key is used nowhere else.
    return np.concatenate([groups[epoch_order(seed + (1 << 63), epoch, len(groups))].ravel(), order[whole:]])


def next_source(positions: Sequence[int], weights: Sequence[float]) -> int:
    """The source to draw from next: the one furthest behind its share of the rows drawn, the first of equals.

    positions: rows drawn from each source. No random numbers, so after any number of draws each source is close to its
    share.
    """
    drawn = sum(positions) + 1
    total = sum(weights)
    behind = [weight / total * drawn - position for weight, position in zip(weights, positions, strict=True)]
    return behind.index(max(behind))
