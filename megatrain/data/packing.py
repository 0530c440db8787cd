"""Builds rows from training samples, several packed best-fit or one in each, and micro-batches of the rows.

    Windows        plain text, which continues from window to window (`text_sources.py`)
    PackedRows     several whole samples per row, independent of each other: positions restart at 0
    SampleRows     one sample per row, grouped by length. Pairs take two rows: a chosen answer and the rejected one, or
                   an answer labelled good or bad and a mismatched one

`collate` turns rows into the arguments of a Hugging Face model's forward. Packed rows get `position_ids` and no
attention mask, which tells transformers that a row contains several sequences; padding counts as one more sequence.
Whether a model separates them is checked in `model/packed_sequences.py`. Rows of one sample get an attention mask.

The first token of a sample is never a target, so no token is predicted from another sample.

Orders of rows are computed from Philox's raw output, which NumPy never changes, and not by `Generator.permutation`,
which it may change: so a run resumes bit-exactly with a later NumPy. An order takes 8 bytes per row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from megatrain.data.processor import ImageText, Processor
from megatrain.data.sample_cache import SampleFile
from megatrain.data.sample_formats import NOT_A_TARGET

Indices = npt.NDArray[np.int64]

# Orders ---------------------------------------------------------------------------------------------------------------

SORTED_TOGETHER = 64
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
    size = micro_batch * SORTED_TOGETHER
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


# Rows -----------------------------------------------------------------------------------------------------------------


def best_fit(lengths: Indices, window: int, seed: int) -> tuple[Indices, Indices]:
    """Pack samples of these lengths into rows of at most `window` tokens by best-fit decreasing, without splitting any.

    Returns (members, starts): row r consists of samples `members[starts[r] : starts[r + 1]]`. The seed decides which of
    several samples of equal length goes where. Raises `ValueError` for a sample that is longer than a row.

    Samples are placed in order of decreasing length, each in the fullest row that has room for it, or in a new row.
    This takes at most 22% more rows than the best packing, and a few percent more for usual lengths (Johnson,
    "Near-optimal bin packing algorithms", 1973; for language models: Ding et al., "Fewer truncations improve language
    modeling", ICML 2024). A sample takes about a microsecond.
    """
    if lengths.size and int(lengths.max()) > window:
        raise ValueError(f"a sample of {int(lengths.max())} tokens in rows of {window}")
    shuffled = epoch_order(seed, 0, len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    row_of = np.empty(len(lengths), dtype=np.int64)
    by_room: dict[int, list[int]] = {}  # free tokens -> the rows with so many
    rooms: list[int] = []  # the keys of `by_room`, sorted
    rows = 0
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fullest = bisect_left(rooms, length)
        if fullest == len(rooms):
            row, free = rows, window
            rows += 1
        else:
            free = rooms[fullest]
            row = by_room[free].pop()
            if not by_room[free]:
                del by_room[free], rooms[fullest]
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
"""Key of a batch: the reference model's log-probability of each row."""

DESIRABLE = "desirable"
"""Key of a batch of labelled answers: whether each row is a good one."""

MULTIPLE = 8
"""Rows are padded to a multiple of it, as tensor cores prefer."""


@dataclass(frozen=True, eq=False)
class TrainingRow:
    """One row of a micro-batch; arrays are int64[tokens]. `labels` is `ids` itself if every token is a target."""

    ids: Indices
    labels: Indices
    positions: Indices | None = None
    reference: float | None = None
    """The reference model's log-probability of the targets (a sum), if there is one."""
    desirable: bool | None = None
    """Whether the answer is labelled good; None if it has no label."""
    images: ImageText | None = None
    """The row's text and images for `processor`, which then makes a part of the micro-batch."""
    processor: Processor | None = None


class Batching(Protocol):
    """A sequence of rows that may be read in any order, by several threads."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> TrainingRow:
        """TrainingRow `index`, counted from 0."""

    def order(self, seed: int, epoch: int) -> Indices:
        """The order of the rows in an epoch: a permutation."""

    def targets(self, index: int) -> int:
        """The number of target tokens of row `index`."""

    @property
    def identity(self) -> Mapping[str, str | int]:
        """What tells these rows from others, as JSON. Compared on resume."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Samples `chosen` of a file, packed best-fit into rows of at most `window` tokens."""

    file: SampleFile
    chosen: Indices
    window: int
    seed: int

    @cached_property
    def _bins(self) -> tuple[Indices, Indices]:
        members, starts = best_fit(self.file.lengths[self.chosen], self.window, self.seed)
        return self.chosen[members], starts

    def __len__(self) -> int:
        return len(self._bins[1]) - 1

    @property
    def hashes(self) -> npt.NDArray[Any]:
        """A hash of each sample, equal for copies."""
        return self.file.hashes[self.chosen]

    @property
    def efficiency(self) -> float:
        """The fraction of the rows' tokens that are not padding, 0 to 1."""
        return float(self.file.lengths[self.chosen].sum() / (len(self) * self.window)) if len(self) else 0.0

    def members(self, index: int) -> Indices:
        """The samples in row `index`."""
        members, starts = self._bins
        return members[starts[index] : starts[index + 1]]

    def row(self, index: int) -> TrainingRow:
        """TrainingRow `index` with the tokens of its samples one after another, each with positions from 0 on."""
        samples = [self.file.sample(int(number)) for number in self.members(index)]
        return TrainingRow(
            np.concatenate([ids for ids, _ in samples]),
            np.concatenate([_labels(ids, trained) for ids, trained in samples]),
            np.concatenate([np.arange(len(ids)) for ids, _ in samples]),
        )

    def order(self, seed: int, epoch: int) -> Indices:
        """A random permutation."""
        return epoch_order(seed, epoch, len(self))

    def targets(self, index: int) -> int:
        """The number of targets of all samples of the row."""
        return int(self.file.targets[self.members(index)].sum())

    @property
    def identity(self) -> dict[str, str | int]:
        """The samples, and how they are packed."""
        return {**_identity(self.file, self.chosen), "packing": "best_fit", "window": self.window, "packed": self.seed}


@dataclass(eq=False)
class Reference:
    """The reference model's log-probabilities of a file's samples, float32[samples]; None until they are computed."""

    values: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False)
class SampleRows:
    """Samples of a file, one per row, ordered so that the rows of a micro-batch have similar lengths.

    group_size: consecutive samples of the file form a group, which any order keeps together: 2 for pairs. chosen: the
    numbers of the groups. micro_batch: rows, a multiple of `group_size`, so that no group is divided.
    """

    file: SampleFile
    chosen: Indices
    micro_batch: int
    group_size: int = 1
    reference: Reference = field(default_factory=Reference)
    processor: Processor | None = None
    """Of samples that were encoded for one."""

    def __len__(self) -> int:
        return self.group_size * len(self.chosen)

    def _samples(self, indices: Any) -> Any:
        """The numbers of the samples in rows `indices`, both int64 of the same shape."""
        return self.group_size * self.chosen[indices // self.group_size] + indices % self.group_size

    def row(self, index: int) -> TrainingRow:
        """A sample, with its reference log-probability and label if it has them."""
        number = int(self._samples(index))
        ids, trained = self.file.sample(number)
        reference = None if self.reference.values is None else float(self.reference.values[number])
        desirable = bool(self.file.marks[number]) if self.file.details.get("unpaired") else None
        images = self.file.image_text(number)
        return TrainingRow(ids, _labels(ids, trained), None, reference, desirable, images, self.processor)

    def order(self, seed: int, epoch: int) -> Indices:
        """See `grouped_order`. The length of a pair is that of its longer sample."""
        size = self.group_size
        longest = self.file.lengths.reshape(-1, size).max(axis=1)[self.chosen]
        order = grouped_order(seed, epoch, longest, max(1, self.micro_batch // size))
        return (size * order[:, None] + np.arange(size)).ravel()

    def targets(self, index: int) -> int:
        """The number of targets of the row's sample."""
        return int(self.file.targets[self._samples(index)])

    @property
    def hashes(self) -> npt.NDArray[Any]:
        """A hash of each group, equal for copies."""
        return _group_hashes(self.file, self.group_size)[self.chosen]

    @property
    def efficiency(self) -> float:
        """The fraction of the tokens of an epoch's micro-batches that are not padding, 0 to 1."""
        lengths = self.file.lengths[self._samples(self.order(0, 0))]
        parts = np.split(lengths, range(self.micro_batch, len(lengths), self.micro_batch))
        return float(lengths.sum() / sum(_padded(int(part.max())) * len(part) for part in parts))

    @property
    def identity(self) -> dict[str, str | int]:
        """The samples, and the micro-batch size, which their order depends on."""
        packing = "grouped" if self.group_size == 1 else "pairs"
        return {**_identity(self.file, self.chosen), "packing": packing, "together": self.micro_batch}


def split_samples(file: SampleFile, validation_fraction: float, group_size: int = 1) -> tuple[Indices, Indices, int]:
    """Hold out evenly spaced groups of samples for validation, at least one if the fraction is above 0.

    Returns (training, validation, copies), the first two as numbers of groups (pairs, with a `group_size` of 2; single
    samples otherwise). Evenly spaced, because files are often sorted by subject. A group of which the file has a copy
    is trained on instead, since its loss would measure memorisation; `copies` counts these. The only group of a file is
    trained on.
    """
    count = len(file) // group_size
    every = np.arange(count)
    held_out = min(count - 1, max(1, round(count * validation_fraction))) if validation_fraction else 0
    chosen = np.unique(((np.arange(held_out) + 0.5) * count / max(1, held_out)).astype(np.int64))
    if held_out:
        hashes = _group_hashes(file, group_size)
        _, kind, number = np.unique(hashes, return_inverse=True, return_counts=True)
        chosen = chosen[number[kind[chosen]] == 1]
    return np.setdiff1d(every, chosen, assume_unique=True), chosen, held_out - len(chosen)


def _group_hashes(file: SampleFile, group_size: int) -> npt.NDArray[Any]:
    """A hash of each group of consecutive samples."""
    if group_size == 1:
        return file.hashes
    return np.array([hash(tuple(group)) for group in file.hashes.reshape(-1, group_size).tolist()])


def copies(sources: Sequence[npt.NDArray[Any]]) -> list[tuple[int, int]]:
    """Count the copies among samples, given the hashes of each source's samples.

    Returns for each source (samples that repeat one before them in it, distinct samples that an earlier source has).
    """
    distinct = [np.unique(hashes) for hashes in sources]
    _, firsts = np.unique(np.concatenate(distinct), return_index=True)
    ends = np.cumsum([0, *map(len, distinct)])
    new = np.histogram(firsts, ends)[0]
    counted = zip(sources, distinct, new.tolist(), strict=True)
    return [(len(hashes) - len(kinds), len(kinds) - first) for hashes, kinds, first in counted]


def collate(rows: Sequence[TrainingRow]) -> Arrays:
    """Collate rows into the arrays of a micro-batch.

    `input_ids` and `labels` are int64[rows, tokens]; windows of plain text are of one length, and one array is both.
    Other rows are padded on the right and have `position_ids` (packed rows) or `attention_mask`. Rows with reference
    log-probabilities or labels also have `reference_log_probs`, float32[rows], or `desirable`, bool[rows].
    """
    if all(row.labels is row.ids for row in rows) and len({len(row.ids) for row in rows}) == 1:
        ids = np.stack([row.ids for row in rows])
        return {"input_ids": ids, "labels": ids}
    width = _padded(max(len(row.ids) for row in rows))
    shape = (len(rows), width)
    arrays = {"input_ids": np.zeros(shape, np.int64), "labels": np.full(shape, NOT_A_TARGET, np.int64)}
    packed = any(row.positions is not None for row in rows)
    extra = np.zeros(shape, np.int64)  # positions, or the mask
    for number, row in enumerate(rows):
        size = len(row.ids)
        arrays["input_ids"][number, :size] = row.ids
        arrays["labels"][number, :size] = row.labels
        if packed:
            extra[number, :size] = np.arange(size) if row.positions is None else row.positions
            extra[number, size:] = np.arange(width - size)
        else:
            extra[number, :size] = 1
    arrays["position_ids" if packed else "attention_mask"] = extra
    if all(row.reference is not None for row in rows):
        arrays[REFERENCE] = np.array([row.reference for row in rows], np.float32)
    if all(row.desirable is not None for row in rows):
        arrays[DESIRABLE] = np.array([row.desirable for row in rows], np.bool_)
    return arrays


def _labels(ids: Indices, trained: npt.NDArray[np.bool_]) -> Indices:
    return np.where(trained, ids, NOT_A_TARGET)


def _padded(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE


def _identity(file: SampleFile, chosen: Indices) -> dict[str, str | int]:
    return {"dataset": file.fingerprint, "samples": len(chosen), "of": len(file)}
