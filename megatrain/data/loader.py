"""Batches for training in a seeded order, from a position that one integer describes.

The order of an epoch is a permutation that (seed, epoch) alone decides, and epochs follow one another without
a seam: a batch may hold the last windows of one and the first of the next, so nothing is dropped. Hence the
position, counted in windows, is the whole state, and the micro-batch size may change between a save and a
resume.

The order comes from Philox's raw output, which NumPy never changes, and not from `Generator.permutation`,
which it may: a run resumes bit-exactly under a later NumPy. It takes 8 bytes per window.
Left out: a prefetch thread (a step of 65,536 tokens is copied out of a cached file in 0.2 ms), and the
division of a step between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from megatrain.data.pack import Windows
from megatrain.errors import DataError

# "input_ids" and "labels", which are one and the same int64 tensor of shape (windows, tokens)
Batch: TypeAlias = dict[str, torch.Tensor]

STATE_VERSION = 1


def epoch_order(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    """A permutation of `count` windows: what sorts the first numbers of Philox under key (seed, epoch).

    Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


class Loader:
    """Endless steps: each `next` is a list of `micro_batches` batches of `micro_batch` windows."""

    def __init__(self, windows: Windows, *, micro_batch: int, micro_batches: int, seed: int) -> None:
        if micro_batch < 1 or micro_batches < 1:
            what = f"a step of {micro_batches} micro-batches of {micro_batch} windows"
            raise DataError(what, fix="both must be 1 or more")
        if not 0 <= seed < 1 << 63:
            raise DataError(f"a data seed of {seed}", fix="use 0 or more, below 2**63")
        self.windows = windows
        self.micro_batch = micro_batch
        self.micro_batches = micro_batches
        self.seed = seed
        self.position = 0  # windows handed out since the first epoch began
        self._order = (-1, np.empty(0, dtype=np.int64))  # (epoch, its order): the last one used

    @property
    def epochs(self) -> float:
        """How many times the data has been seen."""
        return self.position / len(self.windows)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        size = self.micro_batch
        chosen = self._choose(self.position, size * self.micro_batches)
        step = [_batch(self.windows, chosen[i : i + size]) for i in range(0, len(chosen), size)]
        self.position += len(chosen)  # last: a step that could not be read has not been handed out
        return step

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in: small, and JSON."""
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "position": self.position,
            **self.windows.identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was saved: the same windows in the same order.

        Raises `DataError`, and changes nothing, where it was saved with other data, window, split or seed.
        """
        for key, value in self.state_dict().items():
            if key != "position" and state.get(key) != value:
                what = f"was saved with {key} = {state.get(key)!r}, and this run has {value!r}"
                fix = "resume with the data, window, split and seed of the saved run, or start a new one"
                raise DataError(what, where="loader state", fix=fix)
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            what = f"position {position!r} is not a number of windows"
            raise DataError(what, where="loader state", fix="resume from another checkpoint")
        self.position = position

    def _choose(self, position: int, count: int) -> npt.NDArray[np.int64]:
        """The windows at `position`, `position` + 1, ... of the endless order, `count` of them."""
        parts: list[npt.NDArray[np.int64]] = []
        while count > 0:
            epoch, offset = divmod(position, len(self.windows))
            if self._order[0] != epoch:
                self._order = epoch, epoch_order(self.seed, epoch, len(self.windows))
            parts.append(self._order[1][offset : offset + count])
            position += len(parts[-1])
            count -= len(parts[-1])
        return np.concatenate(parts)


def evaluation_batches(windows: Windows, micro_batch: int, limit: int | None = None) -> Iterator[Batch]:
    """The first `limit` windows (None: all) in their own order; the last batch may be smaller."""
    if micro_batch < 1:
        raise DataError(f"a micro-batch of {micro_batch} windows", fix="use 1 or more")
    stop = len(windows) if limit is None else min(limit, len(windows))
    for start in range(0, stop, micro_batch):
        yield _batch(windows, np.arange(start, min(start + micro_batch, stop)))


def _batch(windows: Windows, indices: npt.NDArray[np.int64]) -> Batch:
    ids = torch.from_numpy(windows.read(indices))
    return {"input_ids": ids, "labels": ids}
