"""Checkpoints that all ranks write together: each writes its share of every unit at its own ranges of shared files.

No state is sent between ranks, only names, checksums of pieces and blocks (`checkpoint.range_writer`), and after each
part of the work that nothing has failed. Rank 0 creates the folder and all files; the others find it at the same
path. Each rank compares the previous checkpoint's frozen files with its share, and they are linked if none
differs. Only once all ranks have synced and verified their bytes does rank 0 write the manifest.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megatrain.checkpoint import Earlier, PlannedCheckpoint, manifest, range_writer
from megatrain.checkpoint.manifest import FileSum
from megatrain.checkpoint.range_writer import RangeWriter, Written
from megatrain.checkpoint.rank_byte_ranges import OwnBytes, RankByteRanges
from megatrain.checkpoint.safetensors_writer import Shard
from megatrain.checkpoint.save import writing_to
from megatrain.dist import World
from megatrain.errors import CheckpointError
from megatrain.optim import HostArrays
from megatrain.spec.layout import Ownership
from megatrain.train.save_from_rank_zero import Agree

STATE_NBYTES = 12
"""Bytes per parameter: float32 master, m and v."""
AT_ONCE_NBYTES = 8 << 30
"""Bytes of all ranks written or checksummed between agreements."""


@dataclass(frozen=True)
class SharedFiles:
    """One rank's part in writing one checkpoint. All ranks call the same methods in the same order."""

    world: World
    agree: Agree
    planned: PlannedCheckpoint
    ranges: RankByteRanges
    owned: Ownership
    read: Callable[[int], HostArrays]
    """Reads this rank's share of a unit as float32, valid until the next is read."""
    once: frozenset[int]
    """Units that can be read only once, so files with any of them are not compared for linking."""
    progress: Callable[[int], object]
    """Called with the bytes written by this rank so far."""
    target: Path
    """The checkpoint's final path."""

    def why_not(self, staging: Path) -> str:
        """Why the ranks cannot write together into rank 0's folder; empty if they can, that is, see each other's
        writes.

        staging: this rank's path of the folder.
        """
        if not all(self.agree(lambda: self.ranges.are_known)):
            return "converting its tensors does more than move their elements"
        nonce, first = os.urandom(range_writer.NONCE_NBYTES), self.world.rank == 0
        self.agree(lambda: range_writer.make_probe(staging, self.world.size) if first else None)
        nonces = self.agree(lambda: range_writer.probe(staging, self.world.rank, nonce))
        all_see = all(self.agree(lambda: range_writer.sees(staging, nonces)))
        if first:
            (staging / range_writer.PROBE).unlink()
        return "" if all_see else "the ranks do not share its folder"

    def write(
        self,
        staging: Path,
        earlier: Earlier | None,
        done: Callable[[int], object],
        shared: Callable[[int], object],
        doubt: Callable[[], object],
    ) -> Mapping[str, FileSum]:
        """Write all files of weights and moments, and return their checksums.

        earlier: rank 0's previous checkpoint in the same folder. done: called with each unit that this rank has
        written. shared: called with the bytes of each linked file. doubt: called on all ranks if one does not find what
        was written. Raises `CheckpointError` then, and if writing fails.
        """
        first, linked = self.world.rank == 0, self._linked(staging, earlier)
        for file in linked.values():
            shared(file.nbytes)
        files = [each for each in (*self.planned.weights, *self.planned.moments) if each.name not in linked]
        self.agree(lambda: self._created(staging, files) if first else None)
        with RangeWriter(staging, files) as writer:
            self.agree(lambda: self._begin(writer, files) if first else None)
            for units in self._groups():
                self.agree(lambda units=units: self._write(writer, units, done))  # type: ignore[misc]
            self.agree(lambda: self._finish(writer))
        of_ranks = [[Written(*row) for row in rows] for rows in self._rows(np.array(writer.written, np.uint64), 4)]
        sums = self._sums(staging, files, of_ranks, doubt)
        all_sums = [row[0] for rows in self._rows(np.array(sums, np.uint64), 1) for row in rows]
        return {**linked, **range_writer.file_sums(files, all_sums)}

    def _created(self, staging: Path, files: Sequence[Shard]) -> None:
        with writing_to(self.target):
            range_writer.create(staging, files)

    def _begin(self, writer: RangeWriter, files: Sequence[Shard]) -> None:
        with writing_to(self.target):
            for shard in files:
                writer.write(range_writer.header_of(shard))
            writer.settle()

    def _write(self, writer: RangeWriter, units: Sequence[int], done: Callable[[int], object]) -> None:
        """Write this rank's share of these units."""
        with writing_to(self.target):
            for unit, pieces in self._units(units):
                for piece in pieces:
                    if writer.takes(piece.file):
                        writer.write(piece)
                        self.progress(writer.nbytes)
                writer.settle()
                done(unit)

    def _finish(self, writer: RangeWriter) -> None:
        with writing_to(self.target):
            writer.finish()

    def _groups(self) -> Iterator[list[int]]:
        """Groups of units written between agreements."""
        group, nbytes = list[int](), 0
        for unit in self.planned.order:
            group.append(unit)
            nbytes += STATE_NBYTES * self.planned.spec.units[unit].numel
            if nbytes >= AT_ONCE_NBYTES:
                yield group
                group, nbytes = [], 0
        yield group

    def _sums(
        self, staging: Path, files: Sequence[Shard], of_ranks: list[list[Written]], doubt: Callable[[], object]
    ) -> list[int]:
        """Checksums of this rank's blocks, with agreements in between. Only a mismatch casts doubt on the folder,
        not a stop."""
        blocks = [range_writer.dealt_blocks(files, rank, self.world.size) for rank in range(self.world.size)]
        mine, nbytes = blocks[self.world.rank], sum(each.nbytes for each in of_ranks[self.world.rank])
        at_once, sums = max(1, AT_ONCE_NBYTES // self.world.size // manifest.BLOCK_NBYTES), list[int]()

        failure: CheckpointError | None = None

        def fails(some: Sequence[tuple[int, int]]) -> bool:
            nonlocal failure
            try:
                with writing_to(self.target):
                    sums.extend(
                        range_writer.sums_of_blocks(staging, files, some, of_ranks, lambda: self.progress(nbytes))
                    )
            except CheckpointError as error:
                failure = error
            return failure is not None

        def tell() -> None:
            if failure is not None:
                raise failure

        for start in range(0, max(map(len, blocks)), at_once):
            if any(self.agree(lambda start=start: fails(mine[start : start + at_once]))):  # type: ignore[misc]
                doubt()
                self.agree(tell)
        return sums

    def _linked(self, staging: Path, earlier: Earlier | None) -> dict[str, FileSum]:
        """The frozen files that are unchanged since the previous checkpoint, which rank 0 has linked."""
        frozen = {shard.name: shard for shard in self.planned.frozen_weights}
        known = {} if earlier is None else {each: earlier.sum_of(each, frozen[each].nbytes) for each in frozen}
        names = [each for each, there in known.items() if there and self.once.isdisjoint(self.ranges.units_in([each]))]
        mine = earlier.folder.name if earlier is not None else "", names
        before, names = self.agree(lambda: mine)[0]
        if not names:
            return {}
        pieces = [range_writer.header_of(frozen[each]) for each in names] if self.world.rank == 0 else []
        own = (piece for _, own in self._units(self.ranges.units_in(names)) for piece in own if piece.file in names)
        differ = self.agree(
            lambda: sorted(range_writer.differing(staging.parent / before, itertools.chain(pieces, own)))
        )
        same = [each for each in names if not any(each in of for of in differ)]

        def link() -> dict[str, tuple[int, str]]:
            if earlier is None or self.world.rank != 0:
                return {}
            return {each: astuple(found) for each in same if (found := earlier.shared_as(each, staging / each))}

        return {name: FileSum(*of) for name, of in self.agree(link)[0].items()}

    def _units(self, units: Iterable[int]) -> Iterator[tuple[int, Iterator[OwnBytes]]]:
        for unit in units:
            yield unit, self.ranges.own(unit, self.read(unit), self.owned)

    def _rows(self, own: NDArray[np.uint64], width: int) -> list[list[list[int]]]:
        """All ranks' rows, from this rank's uint64[n, width], for any n."""
        counts = [count for (count,) in self.world.together(torch.tensor([[len(own)]])).view(-1, 1).tolist()]
        padded = np.zeros((max(counts), width), np.int64)
        padded[: len(own)] = own.reshape(-1, width).view(np.int64)
        whole = self.world.together(torch.from_numpy(padded)).numpy().view(np.uint64)
        return [rows[:count].tolist() for rows, count in zip(whole, counts, strict=True)]
