"""Builds training rows from a streamed data set, block by block and uncached, with an exact position for resume.

A block is at least `BLOCK_ROWS` rows of the data set that follow one another, and so many more that its tokens fill
`BLOCK_SEQUENCES` sequences; only the end of an epoch makes a smaller one. Its samples are packed, and its rows come in
an order that (seed, epoch, place of the block) alone decides: shuffling is within blocks. So a position is the place
where a block begins and a number of rows, and whoever goes on from it reads the block again and has the same rows in
the same order. Of each block there is a hash of its samples: a data set that has changed there is told.

Of plain text that runs on, what remains of a block behind its last whole window is left out. Left out: an order across
blocks, a length known beforehand, pairs, and holding out.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from threading import Lock
from typing import Any, Literal, TypeAlias

import numpy as np

from megatrain.data.encode import EncodedSample, Encoder, Statistics, encode_batch
from megatrain.data.packing import Indices, Row, best_fit, packed_row
from megatrain.data.read_rows import Bad, LeftOut, RowStream
from megatrain.data.read_rows import Row as FileRow
from megatrain.data.sample_formats import Labels, Sample
from megatrain.data.sample_sources import Source, samples_of
from megatrain.data.sampler import epoch_order, grouped_order
from megatrain.errors import DataError

FORMAT = 1  # part of the identity: raise it when the same data set would give other rows
READ_ROWS = 128
"""Rows of the data set that are encoded at once."""
BLOCK_ROWS = 1024
BLOCK_SEQUENCES = 16
KEPT_BLOCKS = 4
"""In memory: who reads ahead may be in another block than who asks for the targets of a row."""
KEPT_PLACES = 4096
"""Blocks of which the beginning is known; further back, reading begins with the data set."""

How: TypeAlias = Literal["windows", "best_fit", "grouped"]


@dataclass(frozen=True)
class _Place:
    """Where a block begins."""

    row: int
    """Training rows before it, since the first epoch began."""
    epoch: int
    samples: int
    """Rows of the data set before it, in its epoch."""
    at: Mapping[str, Any] | None = None
    """The same in the library's words; `None` at the beginning of an epoch."""

    @property
    def key(self) -> tuple[int, int]:
        """What tells it from others."""
        return self.epoch, self.samples


@dataclass(frozen=True, eq=False)
class _Block:
    """Samples, and the training rows that they make, in the order in which they are handed out."""

    place: _Place
    samples: list[EncodedSample]
    rows: list[Indices]
    """Of each the numbers of its samples; of text that runs on, where it begins in `tokens`."""
    tokens: Indices
    """Of text that runs on, all of it."""
    following: _Place
    digest: str


class StreamRows:
    """A source as endless rows, of which any can be asked for, at best in order. A `packing.Batching` without length.

    encoder: cuts what is longer than a row, but not text that runs on. window: tokens of the longest row. together:
    rows that follow one another and have like lengths, where `how` is grouped. Raises `DataError` for what cannot be
    read or used, with its place, when it comes to it.
    """

    def __init__(
        self, source: Source, encoder: Encoder, how: How, *, window: int, together: int, seed: int, bad: Bad = "stop"
    ) -> None:
        if source.limit is not None:
            what, fix = "has num_samples, which a stream does not heed", "leave it or data.streaming out"
            raise DataError(what, where=source.name, fix=fix)
        self.source, self.encoder, self.how = source, encoder, how
        self.window, self.together, self.seed, self.bad = window, together, seed, bad
        self.statistics = Statistics(LeftOut(bad))
        """Of all that has been read so far, in this process."""
        self.first: Sample | None = None
        """The first sample that was read."""
        self.holds_chats = False
        self._stream = RowStream(source.name, source.split, source.subset, source.folder, source.pattern)
        self._labels, self._lock = Labels(), Lock()
        self._places = [_Place(0, 0, 0)]  # by rows; the first one and the latest
        self._blocks: dict[tuple[int, int], _Block] = {}  # the latest read last
        self._known: dict[tuple[int, int], tuple[int, str]] = {}  # of blocks at `_places`: the row behind, and the hash
        self._reading: tuple[tuple[int, int], Iterator[FileRow]] | None = None  # the rows from a place on
        self._counted = (0, 0)  # the place up to which `statistics` are

    def __len__(self) -> int:
        raise DataError("its length is not known beforehand", where=self.source.name, fix="leave data.streaming out")

    def order(self, seed: int, epoch: int) -> Indices:
        """None: rows come in the order that they have."""
        return np.empty(len(self), np.int64)

    def row(self, index: int) -> Row:
        """Row `index`, from 0 on, of the endless sequence of epochs."""
        block, number = self._find(index)
        members = block.rows[number]
        if self.how == "windows":
            ids = block.tokens[members[0] : members[0] + self.window]
            return Row(ids, ids)
        samples = [(block.samples[each].ids.astype(np.int64), block.samples[each].trained) for each in members]
        packed = packed_row(samples)
        return packed if self.how == "best_fit" else replace(packed, positions=None)

    def targets(self, index: int) -> int:
        """Tokens of row `index` that the loss is a mean over."""
        if self.how == "windows":
            return self.window - 1
        block, number = self._find(index)
        return sum(int(block.samples[each].trained.sum()) for each in block.rows[number])

    @property
    def identity(self) -> dict[str, str | int]:
        """How rows are made of the data set; which one it is, is told by the hash of a block, in `state`."""
        schema = self.source.schema
        how = [FORMAT, self.encoder.identity, self.how, self.window, self.bad, READ_ROWS, BLOCK_ROWS, BLOCK_SEQUENCES]
        how += [self.together if self.how == "grouped" else 0, schema.format, dict(schema.columns), dict(schema.tags)]
        return {"stream": hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()[:32]}

    def state(self, position: int) -> dict[str, Any]:
        """What `restore` needs to go on with row `position`, as JSON: where the block of the row before begins."""
        if not position:
            return {}
        place = self._place_of(position - 1)
        if position > self._known.get(place.key, (0, ""))[0]:  # nobody has come so far: another rank has these rows
            self._find(position - 1)
            place = self._place_of(position - 1)
        return {**asdict(place), "hash": self._known[place.key][1], "commit": self._stream.commit}

    @property
    def commit(self) -> str | None:
        """What is read of a data set on the hub."""
        return self._stream.commit

    def keep_to(self, commit: str | None) -> None:
        """Read that commit. Raises `DataError` where the hub does not give it."""
        with self._lock:
            if commit != self._stream.commit:
                self._stream.go_to(commit)
                self._blocks, self._known, self._reading = {}, {}, None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be ready to go on where `state` was told. Raises `DataError`, and changes nothing, for another data set."""
        if not state:
            return
        try:
            place = _Place(*(state[name] for name in ("row", "epoch", "samples", "at")))
            digest, commit = str(state["hash"]), state["commit"]
        except KeyError as error:
            what, fix = f"has no {error} of a stream", "resume from another checkpoint"
            raise DataError(what, where="loader state", fix=fix) from error
        before = self._stream.commit
        with self._lock:
            if commit == before and place in self._places and self._known.get(place.key, (0, ""))[1] == digest:
                return
            kept = self._blocks, self._known
            self._blocks, self._known, self._reading = {}, {}, None
            try:
                if before is not None and commit is not None:
                    self._stream.go_to(commit)
                if self._block(place).digest != digest:
                    what = "holds other samples than it did at this place when the checkpoint was saved"
                    fix = "resume with the data, tokenizer and template of the saved run, or start a new one"
                    raise DataError(what, where=self.source.name, fix=fix)
            except BaseException:
                self._stream.go_to(before)
                (self._blocks, self._known), self._reading = kept, None
                raise
            self._places = [self._places[0], place]

    def _find(self, index: int) -> tuple[_Block, int]:
        """The block that row `index` is in, and its number there; one in memory whoever reads another meanwhile."""
        for block in tuple(self._blocks.values()):
            if block.place.row <= index < block.following.row:
                return block, index - block.place.row
        with self._lock:
            place = began = self._place_of(index)
            while True:
                block = self._block(place)
                if index < block.following.row:
                    return block, index - place.row
                place = block.following
                if place.row == began.row and place.epoch > began.epoch + 1:
                    empty = "it is empty" if self.first is None else "its text fills no row"
                    reasons = "; ".join(self.statistics.left_out.lines()) or empty
                    what, fix = f"no sample is left to train on (left out: {reasons})", "see data.sequence_length"
                    raise DataError(what, where=self.source.name, fix=fix)
                if place.row > self._places[-1].row:
                    first, *others = self._places
                    for forgotten in others[: 1 - KEPT_PLACES]:
                        self._known.pop(forgotten.key, None)
                    self._places = [first, *others[1 - KEPT_PLACES :], place]  # anew: others may be looking at it

    def _place_of(self, index: int) -> _Place:
        """The last known beginning of a block at or before row `index`."""
        return self._places[bisect_right(self._places, index, key=lambda place: place.row) - 1]

    def _block(self, place: _Place) -> _Block:
        """The block that begins at `place`, read where it is not in memory."""
        if place.key not in self._blocks:
            self._blocks[place.key] = block = self._read(place)
            self._known[place.key] = block.following.row, block.digest
            if len(self._blocks) > KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        return self._blocks[place.key]

    def _read(self, place: _Place) -> _Block:
        at, rows = self._reading or ((-1, -1), iter(()))
        if at != place.key:
            rows = self._stream.rows_from(place.samples, place.at)
        self._reading = None  # until all has gone well
        found, counted, taken, ended = list[EncodedSample](), Statistics(LeftOut(self.bad)), 0, False
        while not ended and (taken < BLOCK_ROWS or counted.tokens < BLOCK_SEQUENCES * self.window):
            read = list(islice(rows, READ_ROWS))
            taken, ended = taken + len(read), len(read) < READ_ROWS
            groups = samples_of(read, self.source.schema, counted.left_out, self._labels)
            samples = [sample for group in groups for sample in group]
            self._require_usable(samples)
            found += encode_batch(samples, self.encoder, counted)
        self._labels.refuse_marks()
        after = (place.epoch + 1, 0) if ended else (place.epoch, place.samples + taken)
        if place.key >= self._counted:
            self.statistics.merge(counted)
            self._counted = after
        block = self._made(found, place)
        following = _Place(place.row + len(block.rows), *after, None if ended else self._stream.place())
        self._reading = None if ended else (after, rows)
        return replace(block, following=following)

    def _require_usable(self, samples: Sequence[Sample]) -> None:
        """Raise `DataError` for a sample that is not trained as the others are."""
        for sample in samples:
            self.first = self.first or sample
            self.holds_chats = self.holds_chats or bool(sample.messages)
            if sample.answer:
                what, fix = "is a preference, which is not streamed", "leave data.streaming out"
                raise DataError(what, where=sample.origin, fix=fix)
            if self.how == "windows" and (sample.text is None or sample.prompt):
                what = "is more than plain text, and would be cut anywhere and trained whole"
                raise DataError(what, where=sample.origin, fix="set data.packing to best_fit or grouped")

    def _made(self, samples: list[EncodedSample], place: _Place) -> _Block:
        """The training rows of a block, in their order; what follows is not known yet."""
        lengths = np.array([len(sample) for sample in samples], np.int64)
        seed = (self.seed + place.samples * 0xD1B54A32D192ED03) % (1 << 63)  # another order for each block
        tokens = np.empty(0, np.int64)
        if self.how == "windows":
            tokens = np.concatenate([tokens, *(sample.ids for sample in samples)]).astype(np.int64)
            starts = self.window * np.arange(len(tokens) // self.window)
            rows = [starts[[number]] for number in epoch_order(seed, place.epoch, len(starts))]
        elif self.how == "best_fit":
            members, starts = best_fit(lengths, self.window, seed)
            bins = np.split(members, starts[1:-1])
            rows = [bins[number] for number in epoch_order(seed, place.epoch, len(bins))] if len(members) else []
        else:
            rows = list(grouped_order(seed, place.epoch, lengths, self.together)[:, None])
        digest = hashlib.sha256()
        for sample in samples:
            digest.update(np.array([len(sample), sample.trained.sum()], "<u4").tobytes() + sample.ids.tobytes())
        return _Block(place, samples, rows, tokens, place, digest.hexdigest()[:32])


__all__ = ["StreamRows"]
