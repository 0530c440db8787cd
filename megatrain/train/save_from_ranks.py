"""Saves and exports the state of several ranks, so that a failure on one rank is raised on all.

All ranks repeatedly agree that nothing has failed, so all end with the same failure and none waits for one that has
ended. If all ranks reach the folder, each writes its share of every unit at its own ranges of shared files: no state is
sent between ranks, only names, and checksums of pieces and blocks (`checkpoint.range_writer`). Rank 0 creates the
folder and all files, and writes the manifest once all ranks have synced and verified their bytes. If only rank 0 can
write, it gathers all ranks' shares one unit at a time over the host's network; each rank then briefly has a whole unit
in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from megatrain.checkpoint import ExportOptions, export_units, manifest, range_writer
from megatrain.checkpoint.export import writing_to
from megatrain.checkpoint.manifest import FileSum
from megatrain.checkpoint.range_writer import RangeWriter, Written
from megatrain.checkpoint.rank_byte_ranges import RankByteRanges
from megatrain.checkpoint.safetensors_writer import Shard
from megatrain.dist import World
from megatrain.errors import CheckpointError
from megatrain.memory import Store
from megatrain.model import PortedModel, written_parameters
from megatrain.optim import HostArrays

T = TypeVar("T")
WHAT = "files that are written together"
STATE_NBYTES = 12
"""Bytes per parameter: float32 master, m and v."""
AT_ONCE_NBYTES = 8 << 30
"""Bytes of all ranks written or checksummed between agreements."""


class Agree(Protocol):
    """Collects what each rank makes, in order; an error on one rank is raised on all (`World.agree`)."""

    def __call__(self, make: Callable[[], T], /) -> list[T]: ...


def write_together(world: World, write: Callable[[Agree], Path], follow: Callable[[Agree], object]) -> Path:
    """On all ranks, what `write` returns on rank 0; the others call `follow` meanwhile, which must agree equally
    often.

    A failure on one rank is raised on all: the error itself there, `RankError` elsewhere.
    """
    agreed = True

    def agree(make: Callable[[], T]) -> list[T]:
        nonlocal agreed
        agreed = False  # errors from here on are known to all ranks
        results = world.agree(WHAT, make)
        agreed = True
        return results

    path = Path()
    try:
        if world.rank == 0:
            path = write(agree)
        else:
            follow(agree)
    except Exception as error:
        if agreed:
            agree(lambda error=error: _raised(error))  # type: ignore[misc]
        raise
    return Path(agree(lambda: str(path))[0])


def _raised(error: Exception) -> None:
    raise error


# All of it from rank 0 ------------------------------------------------------------------------------------------------


def gathered(
    agree: Agree, units: Iterable[int], prepare: Callable[[int], object], whole: Callable[[int], T]
) -> Iterator[T]:
    """`whole(unit)` for each of `units`; all ranks call it together. prepare: called first, for what may fail on
    one rank only."""
    for unit in units:
        agree(lambda unit=unit: prepare(unit) and None)  # type: ignore[misc]  # a default makes it this unit's
        yield whole(unit)


def follow_gathered(units: Iterator[object]) -> None:
    """Take part in what rank 0 gathers."""
    for _ in units:
        pass


def export_together(
    world: World, ported: PortedModel, store: Store, folder: str | Path, **options: Unpack[ExportOptions]
) -> Path:
    """As `checkpoint.export_units`, of all ranks' state."""
    units, wanted = ported.structure.units, written_parameters(ported)

    def masters(agree: Agree) -> Iterator[dict[str, torch.Tensor]]:
        names = [[param.name for param in unit.params if param.name in wanted] for unit in units]
        numbers = range(len(units))
        return gathered(agree, numbers, lambda unit: None, lambda unit: {n: store.master(n) for n in names[unit]})

    return write_together(
        world,
        lambda agree: export_units(ported, masters(agree), folder, **options),
        lambda agree: follow_gathered(masters(agree)),
    )


# Each rank its share --------------------------------------------------------------------------------------------------


@dataclass
class SharedFiles:
    """One rank's part in writing one checkpoint. All ranks call the same methods in the same order."""

    world: World
    agree: Agree
    ranges: RankByteRanges
    read: Callable[[int], HostArrays]
    """Reads this rank's share of a unit as float32, valid until the next is read."""
    written: Callable[[int], object]
    """Called with each unit that this rank has written."""
    progress: Callable[[int], object]
    """Called with the bytes written by this rank so far."""
    target: Path
    """The checkpoint's final path."""
    lost_writes: bool = False
    """Whether a rank did not find in the files what was written."""

    def why_not(self, staging: Path) -> str:
        """Why the ranks cannot write together into rank 0's folder; empty if they can, that is, see each other's
        writes.

        staging: this rank's path of the folder.
        """
        if not all(self.agree(lambda: self.ranges.are_known)):
            return "converting its tensors does more than move their elements"
        nonce, first = os.urandom(range_writer.NONCE_NBYTES), self.world.rank == 0
        self.agree(lambda: (staging / range_writer.PROBE).touch() if first else None)
        nonces = self.agree(lambda: range_writer.probe(staging, self.world.rank, nonce))
        all_see = all(self.agree(lambda: range_writer.sees(staging, nonces)))
        if first:
            (staging / range_writer.PROBE).unlink()
        return "" if all_see else "the ranks do not share its folder"

    def write(self, staging: Path, names: Sequence[str]) -> Mapping[str, FileSum]:
        """Write these files of weights and moments, and return their checksums.

        Raises `CheckpointError` if writing fails, or if a rank does not find what was written (`lost_writes`).
        """
        files = [shard for shard in self.ranges.planned.arrays if shard.name in names]
        first = self.world.rank == 0
        self._agree(lambda: range_writer.create(staging, files) if first else None)
        with RangeWriter(staging, files, direct=False) as writer:
            self._agree(lambda: self._write_headers(writer, files) if first else None)
            for units in self._groups():
                self._agree(lambda units=units: self._write_units(writer, units))  # type: ignore[misc]
            self._agree(writer.finish)
        of_ranks = [[Written(*row) for row in rows] for rows in self._rows(np.array(writer.written, np.uint64), 4)]
        sums = self._sums(staging, files, of_ranks)
        all_sums = [row[0] for rows in self._rows(np.array(sums, np.uint64), 1) for row in rows]
        return range_writer.file_sums(files, all_sums)

    def _agree(self, work: Callable[[], None]) -> None:
        """Do the work on all ranks, turning errors of the file system into `CheckpointError`."""

        def guarded() -> None:
            with writing_to(self.target, CheckpointError):
                work()

        self.agree(guarded)

    def _write_headers(self, writer: RangeWriter, files: Sequence[Shard]) -> None:
        for shard in files:
            writer.write(shard.name, 0, shard.header)

    def _write_units(self, writer: RangeWriter, units: Sequence[int]) -> None:
        """Write this rank's share of these units."""
        for unit in units:
            for name, start, data in self.ranges.of_unit(unit, self.read(unit)):
                if writer.takes(name):
                    writer.write(name, start, data)
                    self.progress(writer.nbytes)
            self.written(unit)

    def _groups(self) -> Iterator[list[int]]:
        """Groups of units written between agreements."""
        group, nbytes = list[int](), 0
        for unit in self.ranges.planned.order:
            group.append(unit)
            nbytes += STATE_NBYTES * self.ranges.planned.spec.units[unit].numel
            if nbytes >= AT_ONCE_NBYTES:
                yield group
                group, nbytes = [], 0
        yield group

    def _sums(self, staging: Path, files: Sequence[Shard], of_ranks: list[list[Written]]) -> list[int]:
        """Checksums of this rank's blocks, with agreements in between. Only a mismatch counts as lost writes, not a
        stop."""
        ranks, nbytes = self.world.size, sum(piece.nbytes for piece in of_ranks[self.world.rank])
        dealt = [range_writer.dealt_blocks(files, rank, ranks) for rank in range(ranks)]
        at_once, sums = max(1, AT_ONCE_NBYTES // ranks // manifest.BLOCK_NBYTES), list[int]()
        failure: CheckpointError | None = None

        def fails(blocks: Sequence[tuple[int, int]]) -> bool:
            nonlocal failure
            try:
                with writing_to(self.target, CheckpointError):
                    sums.extend(
                        range_writer.sums_of_blocks(staging, files, blocks, of_ranks, lambda: self.progress(nbytes))
                    )
            except CheckpointError as error:
                failure = error
            return failure is not None

        def tell() -> None:
            if failure is not None:
                raise failure

        for start in range(0, max(map(len, dealt)), at_once):
            blocks = dealt[self.world.rank][start : start + at_once]
            if any(self.agree(lambda blocks=blocks: fails(blocks))):  # type: ignore[misc]
                self.lost_writes = True
                self.agree(tell)
        return sums

    def _rows(self, rows: NDArray[np.uint64], width: int) -> list[list[list[int]]]:
        """All ranks' rows, from this rank's uint64[n, width], for any n."""
        counts = [count for (count,) in self.world.together(torch.tensor([[len(rows)]])).view(-1, 1).tolist()]
        padded = np.zeros((max(counts), width), np.int64)
        padded[: len(rows)] = rows.reshape(-1, width).view(np.int64)
        whole = self.world.together(torch.from_numpy(padded)).numpy().view(np.uint64)
        return [of_rank[:count].tolist() for of_rank, count in zip(whole, counts, strict=True)]
