"""Samples into rows of a fixed number of tokens, each sample whole: best-fit decreasing.

The longest sample comes first, and each goes to the fullest row that still has room for it, or opens a row. Of the
heuristics that are as quick it wastes least: at most 22% more rows than the best packing, and a few percent for the
lengths that occur (Johnson, "Near-optimal bin packing algorithms", 1973; for language models: Ding et al., "Fewer
truncations improve language modeling", ICML 2024). A sample takes about a microsecond. Left out: splitting samples.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from megatrain.data.order import epoch_order

Indices = npt.NDArray[np.int64]


def best_fit(lengths: Indices, room: int, seed: int) -> tuple[Indices, Indices]:
    """(members, starts): row r holds samples `members[starts[r] : starts[r + 1]]`, at most `room` tokens together.

    Every sample is in one row. `seed` decides which of several samples of one length goes where. Raises `ValueError`
    for a sample that is longer than a row.
    """
    if lengths.size and int(lengths.max()) > room:
        raise ValueError(f"a sample of {int(lengths.max())} tokens in rows of {room}")
    shuffled = epoch_order(seed, 0, len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    row_of = np.empty(len(lengths), dtype=np.int64)
    by_room: dict[int, list[int]] = {}  # free tokens -> the rows that have them
    rooms: list[int] = []  # the keys of `by_room`, sorted
    rows = 0
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, free = rows, room
            rows += 1
        else:
            free = rooms[place]
            row = by_room[free].pop()
            if not by_room[free]:
                del by_room[free], rooms[place]
        row_of[sample] = row
        rest = free - length
        if rest:
            if rest not in by_room:
                by_room[rest] = []
                insort(rooms, rest)
            by_room[rest].append(row)
    members = np.argsort(row_of, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))]).astype(np.int64)
    return members, starts
