"""Builds training rows from a streamed data set, block by block and uncached, with an exact position for resume.

A block is at least `BLOCK_ROWS` consecutive rows of the data set, and as many more as it takes to fill
`BLOCK_SEQUENCES` sequences; only the last one of an epoch may be smaller. Its samples are packed, and its training rows
come in an order that depends on (seed, epoch, position of the block) alone: shuffling is within blocks. A position is
the start of a block and a number of training rows. To resume, the block is read again, which gives the same rows in the
same order; a hash of the block's samples detects that the data set has changed there.

With `windows`, the tokens after the last whole window of a block are unused. Not supported: shuffling across blocks, a
known length, pairs, and held-out data.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from threading import Lock
from typing import Any, Literal, TypeAlias

import numpy as np

from megatrain.data.encode import EncodedSample, Encoder, Statistics, encode_batch
from megatrain.data.packing import Batching, Indices, PackedRows, SampleRows, TrainingRow
from megatrain.data.read_rows import Bad, LeftOut, SourceRow
from megatrain.data.sample_cache import SampleFile, samples_in_memory
from megatrain.data.sample_formats import LabelCheck, Sample
from megatrain.data.sample_sources import Source, samples_of
from megatrain.data.text_sources import Windows
from megatrain.errors import DataError

FORMAT = 1  # part of the identity: raise it when the same data set would give other rows
READ_ROWS = 128
"""Rows of the data set that are read and encoded at once."""
BLOCK_ROWS = 1024
BLOCK_SEQUENCES = 16
CACHED_BLOCKS = 4
"""Blocks in memory: several, since prefetching and counting targets may be in different ones."""
CACHED_STARTS = 4096
"""Blocks whose start is remembered; an earlier row is found by reading from the beginning of the data set."""

Packing: TypeAlias = Literal["windows", "best_fit", "grouped"]


@dataclass(frozen=True)
class _BlockStart:
    """Where a block starts. Its fields are saved in checkpoints."""

    row: int
    """Number of training rows before it, over all epochs."""
    epoch: int
    samples: int
    """Number of rows of the data set before it, in its epoch."""
    at: Mapping[str, Any] | None = None
    """The state of `datasets` there; None at the beginning of an epoch."""

    @property
    def key(self) -> tuple[int, int]:
        """The key of the block in caches."""
        return self.epoch, self.samples


@dataclass(frozen=True, eq=False)
class _Block:
    """The training rows of a block, and their shuffled order."""

    start: _BlockStart
    rows: Batching
    order: Indices
    stop: _BlockStart
    """The start of the next block."""
    digest: str


class StreamRows:
    """A streamed source as endless rows: a `packing.Batching` without a length. Any row may be read, fastest in order.

    encoder: truncates samples to a row, except with `windows`. window: tokens of the longest row. micro_batch: with
    `grouped`, this many consecutive rows have similar lengths. Raises `DataError` for data that cannot be read or used
    when it is reached.
    """

    def __init__(
        self,
        source: Source,
        encoder: Encoder,
        packing: Packing,
        *,
        window: int,
        micro_batch: int,
        seed: int,
        bad: Bad = "stop",
    ) -> None:
        if source.limit is not None:
            what, fix = "has num_samples, which streams do not support", "leave it or data.streaming out"
            raise DataError(what, where=source.name, fix=fix)
        self.source, self.encoder, self.packing = source, encoder, packing
        self.window, self.micro_batch, self.seed, self.bad = window, micro_batch, seed, bad
        self.statistics = Statistics(LeftOut(bad))
        """Of everything that this process has read so far."""
        self.first: Sample | None = None
        """The first sample that was read."""
        self.holds_chats = False
        self._unusable = LeftOut(bad)  # of the rows that are being read
        self._stream = source.opened(self._unusable)
        if self._stream.holds_texts:
            what, fix = "is plain text, of which each file would be a sample", "leave data.streaming out"
            raise DataError(what, where=source.name, fix=fix)
        self._labels, self._lock = LabelCheck(), Lock()
        self._starts = [_BlockStart(0, 0, 0)]  # sorted: the first block's, and the latest ones
        self._blocks: dict[tuple[int, int], _Block] = {}  # in the order in which they were read
        self._known: dict[tuple[int, int], tuple[int, str]] = {}  # of blocks at `_starts`: the row after it, its hash
        self._reader: tuple[tuple[int, int], Iterator[SourceRow]] | None = None  # the key of a start, its rows
        self._counted = (0, 0)  # the key of the start up to which `statistics` count

    def __len__(self) -> int:
        raise DataError("its length is not known beforehand", where=self.source.name, fix="leave data.streaming out")

    def order(self, seed: int, epoch: int) -> Indices:
        """Not supported: raises `DataError`, as `len` does."""
        return np.empty(len(self), np.int64)

    def row(self, index: int) -> TrainingRow:
        """TrainingRow `index`, counted from 0 over all epochs."""
        block, number = self._find(index)
        return block.rows.row(number)

    def targets(self, index: int) -> int:
        """The number of target tokens of row `index`."""
        block, number = self._find(index)
        return block.rows.targets(number)

    @property
    def identity(self) -> dict[str, str | int]:
        """A hash of how rows are made. The data set itself is compared by the hash of a block, in `state`."""
        schema = self.source.schema
        parts = [FORMAT, self.encoder.identity, self.packing, self.window, self.bad]
        parts += [READ_ROWS, BLOCK_ROWS, BLOCK_SEQUENCES, self.micro_batch if self.packing == "grouped" else 0]
        parts += [schema.format, dict(schema.columns), dict(schema.tags)]
        return {"stream": hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]}

    def state(self, position: int) -> dict[str, Any]:
        """What `restore` needs to continue with row `position`, as JSON: the start and hash of the previous row's
        block."""
        if not position:
            return {}
        start = self._start_before(position - 1)
        if position > self._known.get(start.key, (0, ""))[0]:  # not read yet, since another rank has these rows
            self._find(position - 1)
            start = self._start_before(position - 1)
        return {**asdict(start), "hash": self._known[start.key][1], "commit": self._stream.commit}

    @property
    def commit(self) -> str | None:
        """The commit that is read of a data set on the hub; None for other sources."""
        return self._stream.commit

    def use_commit(self, commit: str | None) -> None:
        """Read this commit from now on. Raises `DataError` if the hub does not provide it."""
        with self._lock:
            if commit != self._stream.commit:
                self._stream.go_to(commit)
                self._blocks, self._known, self._reader = {}, {}, None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Prepare to continue from `state`. Raises `DataError`, without changing anything, if the data set differs."""
        if not state:
            return
        try:
            start = _BlockStart(*(state[name] for name in ("row", "epoch", "samples", "at")))
            digest, commit = str(state["hash"]), state["commit"]
        except KeyError as error:
            what, fix = f"has no {error}, which the state of a stream has", "resume from another checkpoint"
            raise DataError(what, where="loader state", fix=fix) from error
        before = self._stream.commit
        with self._lock:
            if commit == before and start in self._starts and self._known.get(start.key, (0, ""))[1] == digest:
                return
            kept = self._blocks, self._known
            self._blocks, self._known, self._reader = {}, {}, None
            try:
                if before is not None and commit is not None:
                    self._stream.go_to(commit)
                if self._block(start).digest != digest:
                    what = "holds other samples at this position than when the checkpoint was saved"
                    fix = "resume with the data, tokenizer and template of the saved run, or start a new one"
                    raise DataError(what, where=self.source.name, fix=fix)
            except BaseException:
                self._stream.go_to(before)
                (self._blocks, self._known), self._reader = kept, None
                raise
            self._starts = [self._starts[0], start]

    def _find(self, index: int) -> tuple[_Block, int]:
        """(the block of row `index`, the row's number in its `rows`). Blocks in memory are found without the lock, so
        while another thread reads a block."""
        for block in tuple(self._blocks.values()):
            if block.start.row <= index < block.stop.row:
                return block, int(block.order[index - block.start.row])
        with self._lock:
            start = first_start = self._start_before(index)
            while True:
                block = self._block(start)
                if index < block.stop.row:
                    return block, int(block.order[index - start.row])
                start = block.stop
                if start.row == first_start.row and start.epoch > first_start.epoch + 1:  # an epoch without a row
                    empty = "it is empty" if self.first is None else "its text fills no row"
                    reasons = "; ".join(self.statistics.left_out.lines()) or empty
                    what, fix = f"no sample is left to train on (left out: {reasons})", "see data.sequence_length"
                    raise DataError(what, where=self.source.name, fix=fix)
                if start.row > self._starts[-1].row:
                    first, *others = self._starts
                    for forgotten in others[: 1 - CACHED_STARTS]:
                        self._known.pop(forgotten.key, None)
                    self._starts = [first, *others[1 - CACHED_STARTS :], start]  # a new list, since threads read it

    def _start_before(self, index: int) -> _BlockStart:
        """The last known start of a block at or before row `index`."""
        return self._starts[bisect_right(self._starts, index, key=lambda start: start.row) - 1]

    def _block(self, start: _BlockStart) -> _Block:
        """The block that starts at `start`, from memory or read."""
        if start.key not in self._blocks:
            self._blocks[start.key] = block = self._read(start)
            self._known[start.key] = block.stop.row, block.digest
            if len(self._blocks) > CACHED_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        return self._blocks[start.key]

    def _read(self, start: _BlockStart) -> _Block:
        at, rows = self._reader or ((-1, -1), iter(()))
        self._unusable.clear()
        if at != start.key:
            rows = self._stream.rows_from(start.samples, start.at)
        self._reader = None  # until the block has been read without an error
        encoded, counted, rows_read, ended = list[EncodedSample](), Statistics(LeftOut(self.bad)), 0, False
        while not ended and (rows_read < BLOCK_ROWS or counted.tokens < BLOCK_SEQUENCES * self.window):
            read = list(islice(rows, READ_ROWS))
            rows_read, ended = rows_read + len(read), len(read) < READ_ROWS
            groups = samples_of(read, self.source.schema, counted.left_out, self._labels)
            samples = [sample for group in groups for sample in group]
            self._require_usable(samples)
            encoded += encode_batch(samples, self.encoder, counted)
        counted.left_out.merge(self._unusable)
        self._labels.refuse_labels()
        after = (start.epoch + 1, 0) if ended else (start.epoch, start.samples + rows_read)
        if start.key >= self._counted:
            self.statistics.merge(counted)
            self._counted = after
        file = samples_in_memory(encoded)
        packed, order = self._pack(file, start)
        stop = _BlockStart(start.row + len(order), *after, None if ended else self._stream.state())
        self._reader = None if ended else (after, rows)
        return _Block(start, packed, order, stop, file.fingerprint)

    def _require_usable(self, samples: Sequence[Sample]) -> None:
        """Raise `DataError` for a sample that streams do not support, or that needs another packing."""
        for sample in samples:
            self.first = self.first or sample
            self.holds_chats = self.holds_chats or bool(sample.messages)
            if sample.answer:
                what, fix = "is a preference, which streams do not support", "leave data.streaming out"
                raise DataError(what, where=sample.origin, fix=fix)
            if self.packing == "windows" and (sample.text is None or sample.prompt):
                what = "is not plain text, but would be divided into windows, with every token a target"
                raise DataError(what, where=sample.origin, fix="set data.packing to best_fit or grouped")

    def _pack(self, file: SampleFile, start: _BlockStart) -> tuple[Batching, Indices]:
        """The training rows of a block of these samples, and their shuffled order."""
        every = np.arange(len(file))
        rows: Batching = Windows(file.tokens, self.window, 0, len(file.tokens) // self.window)
        seed = (self.seed + start.samples * 0xD1B54A32D192ED03) % (1 << 63)  # each block has its own order
        if self.packing == "best_fit":
            rows = PackedRows(file, every, self.window, seed)
        elif self.packing == "grouped":
            rows = SampleRows(file, every, self.micro_batch)
        return rows, rows.order(seed, start.epoch)
