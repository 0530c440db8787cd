"""Loads training batches in a seeded order, from a position that a few integers describe.

The order of an epoch is a permutation that (seed, epoch) alone decides, and epochs follow one another without a seam: a
batch may hold the last rows of one and the first of the next, so nothing is dropped. Several sources are mixed by their
weights (`sampler.source_behind`), each through epochs of its own. Hence the rows drawn from each source are the whole
state, and the micro-batch size may change between a save and a resume (but for grouped lengths, which depend on it).
Of a stream the order is its own (`stream_rows.py`), and its place in the data set is part of the state.

What a step holds is decided in the foreground, in order; workers only read and collate it, so they change nothing, and
at most `workers` + 1 steps are under way. A step is divided between ranks by its micro-batches: each rank draws the
whole step and reads its own part, so the state is the same on all, and also fits another number of ranks.

Left out: worker processes, since reading a step of 65,536 tokens of a cached file takes milliseconds at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from megatrain.data.packing import Batching, Row, SampleRows, collate
from megatrain.data.sampler import epoch_order, source_behind
from megatrain.data.stream_rows import StreamRows
from megatrain.errors import DataError

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "Loader", "batch_of", "epoch_order", "evaluation_batches"]

# "input_ids" and "labels", int64 tensors of shape (rows, tokens) and of plain text one and the same; see
# `packing.collate`
Batch: TypeAlias = "dict[str, torch.Tensor]"

STATE_VERSION = 1
PLACES = "places"
"""Of streams, in a state: where each is."""


class _Drawn(NamedTuple):
    """A step before it is read: (source, row) of its micro-batches, and the rows drawn from each source once it is."""

    micro_batches: list[list[tuple[int, int]]]
    positions: list[int]


class Loader:
    """Endless steps: each `next` is a list of micro-batches of `micro_batch` rows.

    A step has `micro_batches` of them on all ranks together, dealt in turns; or, where `targets` is given, as many as
    it takes until they have that many target tokens, and one for each rank at the least. `weights` are the shares of
    several sources; without them each is seen as often as another.
    """

    def __init__(
        self,
        rows: Batching | Sequence[Batching],
        *,
        micro_batch: int,
        micro_batches: int,
        seed: int,
        weights: Sequence[float] | None = None,
        targets: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        workers: int = 0,
    ) -> None:
        self.sources: list[Batching] = list(rows) if isinstance(rows, Sequence) else [rows]
        alone = len(self.sources) == 1
        self.weights = [1.0 if alone else float(len(one)) for one in self.sources] if weights is None else list(weights)
        if micro_batch < 1 or micro_batches < 1:
            what = f"a step of {micro_batches} micro-batches of {micro_batch} windows"
            raise DataError(what, fix="both must be 1 or more")
        if not 0 <= seed < 1 << 63:
            raise DataError(f"a data seed of {seed}", fix="use 0 or more, below 2**63")
        if not 0 <= rank < ranks:
            raise DataError(f"rank {rank} of {ranks}", fix="ranks count from 0")
        if targets is None and micro_batches < ranks:
            what = f"a step of {micro_batches} micro-batches for {ranks} ranks, each of which needs one"
            raise DataError(what, fix="start fewer ranks, or give more or smaller micro-batches")
        if len(self.weights) != len(self.sources) or not all(0 < weight < float("inf") for weight in self.weights):
            what = f"weights {self.weights} for {len(self.sources)} sources"
            raise DataError(what, fix="give each source a weight above 0")
        if targets is not None and targets < 1:
            raise DataError(f"{targets} target tokens a step", fix="use 1 or more")
        self.micro_batch, self.micro_batches = micro_batch, micro_batches
        self.seed, self.targets, self.rank, self.ranks = seed, targets, rank, ranks
        self.positions = [0] * len(self.sources)  # rows handed out from each since its first epoch began
        self._orders = [(-1, np.empty(0, dtype=np.int64))] * len(self.sources)  # (epoch, its order): the last one used
        # A stream is read in its order, so by one thread.
        self._pool = ThreadPoolExecutor(1 if self.streams else workers, "loader") if workers else None
        self._ahead: deque[tuple[_Drawn, Future[list[Batch]]]] = deque()
        self._most_ahead = workers + 1

    @property
    def position(self) -> int:
        """Rows handed out since the beginning, of all sources."""
        return sum(self.positions)

    @property
    def epoch(self) -> float | None:
        """Passes over the data so far: rows handed out, over those of all sources; `None` where one is a stream."""
        return None if self.streams else self.position / sum(map(len, self.sources))

    @property
    def streams(self) -> list[StreamRows]:
        """The sources whose length is not known."""
        return [source for source in self.sources if isinstance(source, StreamRows)]

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if self._pool is None:
            drawn = self._draw(self.positions)
            step = self._read(drawn)
        else:
            while len(self._ahead) < self._most_ahead:
                before = self._ahead[-1][0].positions if self._ahead else self.positions
                drawn = self._draw(before)
                self._ahead.append((drawn, self._pool.submit(self._read, drawn)))
            drawn, future = self._ahead.popleft()
            try:
                step = future.result()
            except BaseException:
                self._forget()
                raise
        self.positions = drawn.positions  # last: a step that could not be read has not been handed out
        return step

    def steps_in(self, epochs: float) -> int:
        """The number of steps, from step 0, that hand out `epochs` times the rows of all sources together.

        The last step is whole, so it may reach into the next epoch. With `targets` the steps are drawn to be counted,
        which reads none of them.
        """
        rows = ceil(Fraction(str(epochs)) * sum(len(source) for source in self.sources))
        if self.targets is None:
            return -(-rows // (self.micro_batches * self.micro_batch))
        steps, positions = 0, [0] * len(self.sources)
        while sum(positions) < rows:
            steps, positions = steps + 1, self._draw(positions).positions
        return steps

    def epochs_in(self, steps: int) -> float | None:
        """Passes over the data in so many steps; None with `targets`, whose steps differ in rows, and for streams."""
        rows = steps * self.micro_batches * self.micro_batch
        return None if self.targets is not None or self.streams else rows / sum(map(len, self.sources))

    def passes(self, steps: int) -> list[float]:
        """Epochs of each source in so many steps that do not differ in rows, by the weights."""
        rows, whole = steps * self.micro_batches * self.micro_batch, sum(self.weights)
        shares = zip(self.weights, self.sources, strict=True)
        return [rows * weight / whole / len(source) for weight, source in shares]

    def close(self) -> None:
        """End the workers; the loader goes on without them."""
        self._forget()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in: small, and JSON."""
        state: dict[str, Any] = {"version": STATE_VERSION, "seed": self.seed, "position": self.position}
        if self.streams:
            placed = zip(self.sources, self.positions, strict=True)
            state[PLACES] = [one.state(at) if isinstance(one, StreamRows) else {} for one, at in placed]
        if len(self.sources) == 1:
            return {**state, **self.sources[0].identity}
        sources = [dict(source.identity) for source in self.sources]
        return {**state, "positions": list(self.positions), "weights": list(self.weights), "sources": sources}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was saved: the same rows in the same order.

        Raises `DataError`, and changes nothing, where it was saved with other data, window, split, weights or seed.
        """
        for key, value in self.state_dict().items():
            if key not in ("position", "positions", PLACES) and state.get(key) != value:
                what = f"was saved with {key} = {state.get(key)!r}, and this run has {value!r}"
                fix = "resume with the data, window, split and seed of the saved run, or start a new one"
                raise DataError(what, where="loader state", fix=fix)
        positions: Any = state.get("positions") if len(self.sources) > 1 else [state.get("position")]
        wrong = [one for one in positions or [None] if not isinstance(one, int) or one < 0]
        if wrong or not positions or len(positions) != len(self.sources):
            what = f"position {wrong[0] if wrong else positions!r} is not a number of windows"
            raise DataError(what, where="loader state", fix="resume from another checkpoint")
        self._forget()
        for source, place in zip(self.sources, state.get(PLACES, [{}] * len(self.sources)), strict=True):
            if isinstance(source, StreamRows):
                source.restore(place)
        self.positions = list(positions)

    def _draw(self, positions: Sequence[int]) -> _Drawn:
        """The step that follows after `positions`, as this rank sees it."""
        after = list(positions)
        micro_batches: list[list[tuple[int, int]]] = []
        targets = 0
        least = self.micro_batches if self.targets is None else self.ranks
        while len(micro_batches) < least or (self.targets is not None and targets < self.targets):
            chosen = self._choose(after)
            micro_batches.append(chosen)
            if self.targets is not None:
                targets += sum(self.sources[source].targets(row) for source, row in chosen)
        return _Drawn(micro_batches[self.rank :: self.ranks], after)

    def _choose(self, positions: list[int]) -> list[tuple[int, int]]:
        """One micro-batch, whose rows are counted in `positions`. Where like lengths go together, so do sources."""
        grouped = any(_is_grouped(source) for source in self.sources)
        size = self.micro_batch if grouped or len(self.sources) == 1 else 1
        chosen: list[tuple[int, int]] = []
        while len(chosen) < self.micro_batch:
            behind = source_behind(positions, self.weights) if len(self.sources) > 1 else 0
            chosen += [(behind, row) for row in self._rows_at(behind, positions[behind], size)]
            positions[behind] += size
        return chosen

    def _rows_at(self, source: int, position: int, count: int) -> list[int]:
        """The rows at `position`, `position` + 1, ... of the endless order of a source, `count` of them."""
        if isinstance(self.sources[source], StreamRows):
            return [*range(position, position + count)]
        rows: list[int] = []
        while len(rows) < count:
            epoch, offset = divmod(position + len(rows), len(self.sources[source]))
            if self._orders[source][0] != epoch:
                # A source that is named twice is seen in two orders.
                self._orders[source] = epoch, self.sources[source].order(seed_of(self.seed, source), epoch)
            rows += self._orders[source][1][offset : offset + count - len(rows)].tolist()
        return rows

    def _read(self, drawn: _Drawn) -> list[Batch]:
        return [batch_of([self.sources[source].row(row) for source, row in chosen]) for chosen in drawn.micro_batches]

    def _forget(self) -> None:
        """Drop what is under way; it will be drawn again."""
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()


def evaluation_batches(rows: Batching, micro_batch: int, limit: int | None = None) -> Iterator[Batch]:
    """The first `limit` rows (None: all) in their own order; the last batch may be smaller."""
    if micro_batch < 1:
        raise DataError(f"a micro-batch of {micro_batch} windows", fix="use 1 or more")
    stop = len(rows) if limit is None else min(limit, len(rows))
    for start in range(0, stop, micro_batch):
        yield batch_of([rows.row(row) for row in range(start, min(start + micro_batch, stop))])


def _is_grouped(source: Batching) -> bool:
    return isinstance(source, SampleRows) or (isinstance(source, StreamRows) and source.how == "grouped")


def seed_of(seed: int, source: int) -> int:
    return (seed + source * 0x9E3779B97F4A7C15) % (1 << 63)


def batch_of(rows: Sequence[Row]) -> Batch:
    """`packing.collate` as tensors over the same memory; what is one array stays one tensor."""
    import torch  # here, so that a mistake in the data is told before it loads

    arrays = collate(rows)
    tensors: dict[int, torch.Tensor] = {id(array): torch.from_numpy(array) for array in arrays.values()}
    return {name: tensors[id(array)] for name, array in arrays.items()}
