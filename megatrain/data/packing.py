"""Builds rows from training samples, several packed best-fit or one in each, and micro-batches of the rows.

    Windows        plain text, which runs on from window to window (`token_windows.py`)
    PackedRows     several whole samples in a row, each for itself: positions start again at 0
    SampleRows     one sample in a row, in an order that brings like lengths together; of preferences a chosen answer,
                   and in the next row the rejected one; of one that is said to be good or bad the mismatched one

`collate` turns rows into what a Hugging Face model's forward takes. Packed rows bring `position_ids`, and no
attention mask: that is how the library is told that a row holds several sequences, and padding is one more of them.
Whether a model heeds it is another question (`model/packed_sequences.py`). Rows of one sample bring a mask.

The first token of a sample is never a target, so none is predicted from another sample.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from megatrain.data.sample_cache import SampleFile, holds_unpaired
from megatrain.data.sample_formats import NOT_A_TARGET
from megatrain.data.sampler import epoch_order, grouped_order

# Samples into rows of a fixed number of tokens, each sample whole: best-fit decreasing.
#
# The longest sample comes first, and each goes to the fullest row that still has room for it, or opens a row. Of the
# heuristics that are as quick it wastes least: at most 22% more rows than the best packing, and a few percent for the
# lengths that occur (Johnson, "Near-optimal bin packing algorithms", 1973; for language models: Ding et al., "Fewer
# truncations improve language modeling", ICML 2024). A sample takes about a microsecond. Left out: splitting samples.


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


Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

REFERENCE = "reference_log_probs"
"""What a batch of pairs calls the log-probabilities of its rows by the reference."""

DESIRABLE = "desirable"
"""What a batch of answers that are said to be good or bad calls which is which."""

MULTIPLE = 8
"""Padded lengths are multiples of it, which matrix units like."""


@dataclass(frozen=True, eq=False)
class Row:
    """One row, all int64[tokens]. `labels` is `ids` itself where every token is a target."""

    ids: Indices
    labels: Indices
    positions: Indices | None = None
    reference: float | None = None
    """The sum of the log-probabilities that a reference model gives the targets."""
    desirable: bool | None = None
    """What is said of an answer, where something is."""


class Batching(Protocol):
    """Numbered rows that can be read in any order, from several threads."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Row `index`, from 0 on."""

    def order(self, seed: int, epoch: int) -> Indices:
        """In which order an epoch sees them."""

    def targets(self, index: int) -> int:
        """Tokens of row `index` that the loss is a mean over."""

    @property
    def identity(self) -> Mapping[str, str | int]:
        """What makes these rows these and no others, as JSON: for the state of a loader."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Samples `chosen` of a file, packed best-fit into rows of at most `window` tokens."""

    file: SampleFile
    chosen: Indices
    window: int
    seed: int

    @cached_property
    def _bins(self) -> tuple[Indices, Indices]:
        members, starts = best_fit(self.file.lengths[self.chosen].astype(np.int64), self.window, self.seed)
        return self.chosen[members], starts

    def __len__(self) -> int:
        return len(self._bins[1]) - 1

    @property
    def hashes(self) -> npt.NDArray[Any]:
        """Of the samples: equal for copies."""
        return self.file.hashes[self.chosen]

    @property
    def efficiency(self) -> float:
        """The share of the tokens of all rows that samples fill, 0 to 1."""
        return float(self.file.lengths[self.chosen].sum() / (len(self) * self.window)) if len(self) else 0.0

    def members(self, index: int) -> Indices:
        """The samples in row `index`."""
        members, starts = self._bins
        return members[starts[index] : starts[index + 1]]

    def row(self, index: int) -> Row:
        """Its samples one after another, each with positions from 0 on."""
        return packed_row([self.file.sample(int(number)) for number in self.members(index)])

    def order(self, seed: int, epoch: int) -> Indices:
        """A permutation."""
        return epoch_order(seed, epoch, len(self))

    def targets(self, index: int) -> int:
        """Of all its samples."""
        return int(self.file.targets[self.members(index)].sum())

    @property
    def identity(self) -> dict[str, str | int]:
        """The samples and how they are packed."""
        return {**_identity(self.file, self.chosen), "packing": "best_fit", "window": self.window, "packed": self.seed}


@dataclass(eq=False)
class Reference:
    """What a reference model says of a file of samples: float32[samples], once it has been asked."""

    values: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False)
class SampleRows:
    """Samples of a file, each a row; `together` rows that follow one another have like lengths.

    `size` samples that follow one another in the file are one, and do so in any order: pairs, with 2. `chosen` are
    numbers of such; `together` is a multiple of `size`, so that none is torn.
    """

    file: SampleFile
    chosen: Indices
    together: int
    size: int = 1
    reference: Reference = field(default_factory=Reference)

    def __len__(self) -> int:
        return self.size * len(self.chosen)

    def _samples(self, indices: Any) -> Any:
        """The samples in rows `indices`, int64[any] both."""
        return self.size * self.chosen[indices // self.size] + indices % self.size

    def row(self, index: int) -> Row:
        """A sample, with what the reference says of it where that is known."""
        number = int(self._samples(index))
        ids, trained = self.file.sample(number)
        said = None if self.reference.values is None else float(self.reference.values[number])
        good = bool(self.file.marks[number]) if holds_unpaired(self.file) else None
        return Row(ids, _labels(ids, trained), reference=said, desirable=good)

    def order(self, seed: int, epoch: int) -> Indices:
        """See `grouped_order`; pairs go by the longer of their samples."""
        longest = self.file.lengths.astype(np.int64).reshape(-1, self.size).max(axis=1)[self.chosen]
        order = grouped_order(seed, epoch, longest, max(1, self.together // self.size))
        return (self.size * order[:, None] + np.arange(self.size)).ravel()

    def targets(self, index: int) -> int:
        """Of the sample."""
        return int(self.file.targets[self._samples(index)])

    @property
    def hashes(self) -> npt.NDArray[Any]:
        """Of each `size` samples: equal for copies."""
        return _wholes(self.file, self.size)[self.chosen]

    @property
    def efficiency(self) -> float:
        """The share of the tokens of all micro-batches of an epoch that samples fill, 0 to 1."""
        return _filled(self.file.lengths.astype(np.int64)[self._samples(self.order(0, 0))], self.together)

    @property
    def identity(self) -> dict[str, str | int]:
        """The samples and how many go together, which their order depends on."""
        packing = "grouped" if self.size == 1 else "pairs"
        return {**_identity(self.file, self.chosen), "packing": packing, "together": self.together}


def packed_row(samples: Sequence[tuple[Indices, npt.NDArray[np.bool_]]]) -> Row:
    """Samples (ids, which of them are targets) one after another, each with positions from 0 on."""
    return Row(
        np.concatenate([ids for ids, _ in samples]),
        np.concatenate([_labels(ids, trained) for ids, trained in samples]),
        np.concatenate([np.arange(len(ids)) for ids, _ in samples]),
    )


def split_samples(file: SampleFile, validation_fraction: float, size: int = 1) -> tuple[Indices, Indices, int]:
    """(training, validation, copies): evenly spaced samples are held out, one or more where the fraction is above 0.

    Evenly, because files are often sorted by subject. One of which the file holds a copy is trained on instead, and
    counted in `copies`: its loss would tell what was learned by heart. All are trained on where there is one only.
    With `size` 2 all of these are pairs, and numbers of pairs.
    """
    count = len(file) // size
    every = np.arange(count)
    held = min(count - 1, max(1, round(count * validation_fraction))) if validation_fraction else 0
    chosen = np.unique(((np.arange(held) + 0.5) * count / max(1, held)).astype(np.int64))
    if held:
        _, kind, number = np.unique(_wholes(file, size), return_inverse=True, return_counts=True)
        chosen = chosen[number[kind[chosen]] == 1]
    return np.setdiff1d(every, chosen, assume_unique=True), chosen, held - len(chosen)


def _wholes(file: SampleFile, size: int) -> npt.NDArray[Any]:
    """A hash of each `size` samples that follow one another: one that only copies of them share."""
    return np.array([hash(tuple(each)) for each in file.hashes.reshape(-1, size).tolist()]) if size > 1 else file.hashes


def copies(sources: Sequence[npt.NDArray[Any]]) -> list[tuple[int, int]]:
    """Of each source, by the hashes of its samples: (how many repeat one before them there, how many distinct ones
    stand in a source before it)."""
    distinct = [np.unique(hashes) for hashes in sources]
    _, firsts = np.unique(np.concatenate(distinct), return_index=True)
    ends = np.cumsum([0, *map(len, distinct)])
    new = np.histogram(firsts, ends)[0]
    counted = zip(sources, distinct, new.tolist(), strict=True)
    return [(len(hashes) - len(own), len(own) - first) for hashes, own, first in counted]


def collate(rows: Sequence[Row]) -> Arrays:
    """`input_ids` and `labels`, int64[rows, tokens], and `position_ids` or `attention_mask` where they are needed.

    Rows of pairs bring `reference_log_probs`, float32[rows], too, and `desirable`, bool[rows], where it is said.

    Rows of plain text are of one length and one array is both ids and labels. Others are padded on the right.
    """
    if all(row.labels is row.ids for row in rows) and len({len(row.ids) for row in rows}) == 1:
        ids = np.stack([row.ids for row in rows])
        return {"input_ids": ids, "labels": ids}
    width = _rounded(max(len(row.ids) for row in rows))
    shape = (len(rows), width)
    arrays = {"input_ids": np.zeros(shape, np.int64), "labels": np.full(shape, NOT_A_TARGET, np.int64)}
    packed = any(row.positions is not None for row in rows)
    more = np.zeros(shape, np.int64)
    for number, row in enumerate(rows):
        size = len(row.ids)
        arrays["input_ids"][number, :size] = row.ids
        arrays["labels"][number, :size] = row.labels
        if packed:
            more[number, :size] = np.arange(size) if row.positions is None else row.positions
            more[number, size:] = np.arange(width - size)
        else:
            more[number, :size] = 1
    arrays["position_ids" if packed else "attention_mask"] = more
    if all(row.reference is not None for row in rows):
        arrays[REFERENCE] = np.array([row.reference for row in rows], np.float32)
    if all(row.desirable is not None for row in rows):
        arrays[DESIRABLE] = np.array([row.desirable for row in rows], np.bool_)
    return arrays


def _filled(lengths: Indices, together: int) -> float:
    parts = np.split(lengths, range(together, len(lengths), together))
    return float(lengths.sum() / sum(_rounded(int(part.max())) * len(part) for part in parts))


def _labels(ids: Indices, trained: npt.NDArray[np.bool_]) -> Indices:
    return np.where(trained, ids, NOT_A_TARGET)


def _rounded(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE


def _identity(file: SampleFile, chosen: Indices) -> dict[str, str | int]:
    return {"dataset": file.fingerprint, "samples": len(chosen), "of": len(file)}
