"""Loads training batches in a seeded order, from a position of a few integers.

The order of an epoch is a permutation that depends on (seed, epoch) alone. Epochs follow one another without a gap: a
batch may contain the last rows of one epoch and the first of the next, so no row is dropped. Several sources are mixed
by weight (`packing.next_source`), each with its own epochs. So the state is the number of rows drawn from each source,
and the micro-batch size may change on resume (except for rows grouped by length, whose order depends on it). A stream
has an order of its own (`stream_rows.py`), and its state includes its position in the data set.

The main thread decides, in order, which rows a step consists of; workers only read and collate them, so they cannot
change the order. At most `workers` + 1 steps are prefetched. Ranks divide a step by micro-batches: each rank draws the
whole step and reads its own part, so the state is equal on all ranks and also fits another number of ranks.

Workers are threads, not processes: reading a step of 65,536 tokens from a cached file takes milliseconds at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from megatrain.data.packing import Batching, SampleRows, TrainingRow, collate, next_source
from megatrain.data.stream_rows import StreamRows
from megatrain.errors import DataError

if TYPE_CHECKING:
    import torch

Batch: TypeAlias = "dict[str, torch.Tensor]"
"""A micro-batch: `input_ids` and `labels`, int64 (rows, tokens), for plain text the same tensor, and what else
`packing.collate` returns."""

STATE_VERSION = 1
STREAM_STATES = "places"
"""Key in the state of a loader: the state of each source, empty if it is not a stream."""


class _DrawnStep(NamedTuple):
    """The rows of a step, before they are read."""

    micro_batches: list[list[tuple[int, int]]]
    """(source, row) of each row of this rank's micro-batches."""
    positions: list[int]
    """Rows drawn from each source, this step's included."""


class Loader:
    """An endless iterator over steps, each a list of this rank's micro-batches.

    micro_batch: rows per micro-batch. micro_batches: micro-batches per step of all ranks together. part: (r, ranks):
    the rank that reads number r, r + ranks, ... targets: if given, a step has instead as many micro-batches as it takes
    to reach this number of target tokens, at least one per rank. weights: the share of each source in the rows; by
    default its number of rows, so that all sources are seen equally often. Steps are read in the foreground, unless
    threads `read_ahead`.
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
        part: tuple[int, int] = (0, 1),
    ) -> None:
        rank, ranks = part
        self.sources: list[Batching] = list(rows) if isinstance(rows, Sequence) else [rows]
        alone = len(self.sources) == 1
        self.weights = [1.0 if alone else float(len(one)) for one in self.sources] if weights is None else list(weights)
        self.micro_batch, self.micro_batches = micro_batch, micro_batches
        self.seed, self.targets, self.rank, self.ranks = seed, targets, rank, ranks
        self.positions = [0] * len(self.sources)  # rows returned from each source so far
        self._orders = [(-1, np.empty(0, dtype=np.int64))] * len(self.sources)  # (epoch, its order), the last one used
        self._pool: ThreadPoolExecutor | None = None
        self._prefetched: deque[tuple[_DrawnStep, Future[list[Batch]]]] = deque()
        self._max_prefetched = 1

    def read_ahead(self, workers: int) -> Loader:
        """Let so many threads read steps ahead, one of streams, which are read in order; 0 for none. Returns the
        loader."""
        if workers:
            self._pool = ThreadPoolExecutor(1 if self.streams else workers, "loader")
            self._max_prefetched = workers + 1
        return self

    @property
    def position(self) -> int:
        """Rows returned so far, of all sources together."""
        return sum(self.positions)

    @property
    def epoch(self) -> float | None:
        """Epochs so far: rows returned over the rows of all sources; None if a source is a stream."""
        return None if self.streams else self.position / sum(map(len, self.sources))

    @property
    def streams(self) -> list[StreamRows]:
        """The sources that are streams, whose length is not known."""
        return [source for source in self.sources if isinstance(source, StreamRows)]

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if self._pool is None:
            drawn = self._draw(self.positions)
            step = self._read(drawn)
        else:
            while len(self._prefetched) < self._max_prefetched:
                before = self._prefetched[-1][0].positions if self._prefetched else self.positions
                drawn = self._draw(before)
                self._prefetched.append((drawn, self._pool.submit(self._read, drawn)))
            drawn, future = self._prefetched.popleft()
            try:
                step = future.result()
            except BaseException:
                self._drop_prefetched()
                raise
        self.positions = drawn.positions  # last, so that a step that cannot be read does not count
        return step

    def steps_in(self, epochs: float) -> int:
        """The number of steps, from step 0 on, that `epochs` epochs of all sources together take.

        The last step is complete, so it may reach into the next epoch. With `targets`, steps are drawn (but not read)
        to count them.
        """
        rows = ceil(Fraction(str(epochs)) * sum(len(source) for source in self.sources))
        if self.targets is None:
            return -(-rows // (self.micro_batches * self.micro_batch))
        steps, positions = 0, [0] * len(self.sources)
        while sum(positions) < rows:
            steps, positions = steps + 1, self._draw(positions).positions
        return steps

    def epochs_in(self, steps: int) -> float | None:
        """The number of epochs in so many steps; None for streams, and with `targets`, where steps differ in rows."""
        rows = steps * self.micro_batches * self.micro_batch
        return None if self.targets is not None or self.streams else rows / sum(map(len, self.sources))

    def passes(self, steps: int) -> list[float]:
        """The number of epochs of each source in so many steps, by the weights; for steps of equal numbers of rows."""
        rows, total = steps * self.micro_batches * self.micro_batch, sum(self.weights)
        shares = zip(self.weights, self.sources, strict=True)
        return [rows * weight / total / len(source) for weight, source in shares]

    def close(self) -> None:
        """Stop the workers. The loader stays usable without them."""
        self._drop_prefetched()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def state_dict(self) -> dict[str, Any]:
        """The position and the identity of the data, as a small JSON object."""
        state: dict[str, Any] = {"version": STATE_VERSION, "seed": self.seed, "position": self.position}
        if self.streams:
            pairs = zip(self.sources, self.positions, strict=True)
            state[STREAM_STATES] = [one.state(at) if isinstance(one, StreamRows) else {} for one, at in pairs]
        if len(self.sources) == 1:
            return {**state, **self.sources[0].identity}
        sources = [dict(source.identity) for source in self.sources]
        return {**state, "positions": list(self.positions), "weights": list(self.weights), "sources": sources}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state` with the rows that followed when it was saved, in the same order.

        Raises `DataError`, without changing anything, if it was saved with other data, window, split, weights or seed.
        """
        for key, value in self.state_dict().items():
            if key not in ("position", "positions", STREAM_STATES) and state.get(key) != value:
                what = f"was saved with {key} = {state.get(key)!r}, and this run has {value!r}"
                fix = "resume with the data, window, split and seed of the saved run, or start a new one"
                raise DataError(what, where="loader state", fix=fix)
        positions: Any = state.get("positions") if len(self.sources) > 1 else [state.get("position")]
        wrong = [one for one in positions or [None] if not isinstance(one, int) or one < 0]
        if wrong or not positions or len(positions) != len(self.sources):
            what = f"position {wrong[0] if wrong else positions!r} is not a number of rows"
            raise DataError(what, where="loader state", fix="resume from another checkpoint")
        self._drop_prefetched()
        stream_states = state.get(STREAM_STATES, [{}] * len(self.sources))
        for source, stream_state in zip(self.sources, stream_states, strict=True):
            if isinstance(source, StreamRows):
                source.restore(stream_state)
        self.positions = list(positions)

    def _draw(self, positions: Sequence[int]) -> _DrawnStep:
        """Draw the step that follows `positions`, and return this rank's part of it."""
        after = list(positions)
        micro_batches: list[list[tuple[int, int]]] = []
        targets = 0
        least = self.micro_batches if self.targets is None else self.ranks
        while len(micro_batches) < least or (self.targets is not None and targets < self.targets):
            chosen = self._draw_micro_batch(after)
            micro_batches.append(chosen)
            if self.targets is not None:
                targets += sum(self.sources[source].targets(row) for source, row in chosen)
        return _DrawnStep(micro_batches[self.rank :: self.ranks], after)

    def _draw_micro_batch(self, positions: list[int]) -> list[tuple[int, int]]:
        """Draw one micro-batch, advancing `positions`. Rows grouped by length stay together, so they come from one
        source."""
        grouped = any(_is_grouped(source) for source in self.sources)
        size = self.micro_batch if grouped or len(self.sources) == 1 else 1
        chosen: list[tuple[int, int]] = []
        while len(chosen) < self.micro_batch:
            source = next_source(positions, self.weights) if len(self.sources) > 1 else 0
            chosen += [(source, row) for row in self._rows_at(source, positions[source], size)]
            positions[source] += size
        return chosen

    def _rows_at(self, source: int, position: int, count: int) -> list[int]:
        """The `count` rows of a source from `position` on, in the order of its epochs."""
        if isinstance(self.sources[source], StreamRows):
            return [*range(position, position + count)]
        rows: list[int] = []
        while len(rows) < count:
            epoch, offset = divmod(position + len(rows), len(self.sources[source]))
            if self._orders[source][0] != epoch:
                # A seed per source, so that a source named twice has two orders.
                self._orders[source] = epoch, self.sources[source].order(source_seed(self.seed, source), epoch)
            rows += self._orders[source][1][offset : offset + count - len(rows)].tolist()
        return rows

    def _read(self, drawn: _DrawnStep) -> list[Batch]:
        return [batch_of([self.sources[source].row(row) for source, row in chosen]) for chosen in drawn.micro_batches]

    def _drop_prefetched(self) -> None:
        """Drop the prefetched steps, which will be drawn again."""
        for _, future in self._prefetched:
            future.cancel()
        self._prefetched.clear()


def evaluation_batches(rows: Batching, micro_batch: int, limit: int | None = None) -> Iterator[Batch]:
    """Batches of the first `limit` rows (None: all), unshuffled; the last one may be smaller."""
    stop = len(rows) if limit is None else min(limit, len(rows))
    for start in range(0, stop, micro_batch):
        yield batch_of([rows.row(row) for row in range(start, min(start + micro_batch, stop))])


def _is_grouped(source: Batching) -> bool:
    """Whether the rows of a micro-batch are grouped by length."""
    return isinstance(source, SampleRows) or (isinstance(source, StreamRows) and source.packing == "grouped")


def source_seed(seed: int, source: int) -> int:
    """The seed of source number `source`, derived from the run's seed."""
    return (seed + source * 0x9E3779B97F4A7C15) % (1 << 63)


def batch_of(rows: Sequence[TrainingRow]) -> Batch:
    """`packing.collate` as tensors that share its memory; an array under two names becomes one tensor.

    Of rows with images, their processor adds its tensors. Raises `DataError` for an image that cannot be read.
    """
    import torch  # here, so that errors in the data are reported before torch is loaded

    arrays = collate(rows)
    tensors: dict[int, torch.Tensor] = {id(array): torch.from_numpy(array) for array in arrays.values()}
    batch = {name: tensors[id(array)] for name, array in arrays.items()}
    if (processor := rows[0].processor) is not None:
        texts = [row.images for row in rows if row.images is not None]
        batch |= processor.micro_batch(texts, [row.ids for row in rows], batch["input_ids"].shape[1])
    return batch
