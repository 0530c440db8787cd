"""Saves and exports the state of several ranks, so that a failure on one rank is raised on all.

All ranks repeatedly agree that nothing has failed, so all end with the same failure and none waits for one that has
ended. If all ranks reach the folder, each writes its share of every unit at its own ranges of shared files: no state is
sent between ranks, only names, and checksums of pieces and blocks (`checkpoint.range_writer`). Rank 0 creates the
folder and all files, and writes the manifest once all ranks have synced and verified their bytes. If only rank 0 can
write, it gathers all ranks' shares piece by piece over the host's network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from megatrain.checkpoint import manifest, range_writer
from megatrain.checkpoint.export import ExportOptions, export_pieces, exported_pieces, writing_to
from megatrain.checkpoint.manifest import FileSum
from megatrain.checkpoint.range_writer import RangeWriter, TensorWriter, Written
from megatrain.checkpoint.safetensors_writer import Shard
from megatrain.checkpoint.save import PlannedCheckpoint, StateReader
from megatrain.dist import World
from megatrain.errors import CheckpointError
from megatrain.memory import Store
from megatrain.model import PortedModel, written_of

T = TypeVar("T")
Values = NDArray[np.float32]
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


def from_all_ranks(
    world: World, agree: Agree, store: Store, read: Callable[[int, int, int, int], Values], *wanted: int
) -> Values:
    """Elements of a whole unit, given as (unit, array, start, stop), of all ranks' shares; all call it together.

    read: reads this rank's share; if that fails on one rank, it is raised on all.
    """
    unit, array, start, stop = wanted
    layout, shares = store.layouts[unit], [np.empty(0, np.float32)]
    if layout.ranks == 1:
        return read(*wanted)
    pieces = store.owned.within(layout, start, stop)
    agree(lambda: shares.extend(read(unit, array, piece.own.start, piece.own.stop).copy() for piece in pieces))
    return store.together(torch.from_numpy(np.concatenate(shares)), layout, world.together, start, stop).numpy()


def export_together(
    world: World, ported: PortedModel, store: Store, folder: str | Path, **options: Unpack[ExportOptions]
) -> Path:
    """As `checkpoint.export_pieces`, of all ranks' state."""

    def share(unit: int, array: int, start: int, stop: int) -> Values:
        return store.units[unit].masters(start, stop)

    def masters(agree: Agree, name: str, start: int, stop: int) -> Values:
        unit, field = store.field(name)
        return from_all_ranks(world, agree, store, share, unit, 0, field.start + start, field.start + stop)

    def follow(agree: Agree) -> None:
        for _ in exported_pieces(written_of(ported, torch.float32), partial(masters, agree)):
            pass

    store.settle()
    return write_together(
        world, lambda agree: export_pieces(ported, partial(masters, agree), folder, **options), follow
    )


# Each rank its share --------------------------------------------------------------------------------------------------


@dataclass
class SharedFiles:
    """One rank's part in writing one checkpoint. All ranks call the same methods in the same order."""

    world: World
    agree: Agree
    planned: PlannedCheckpoint
    state: StateReader
    """Reads this rank's share of a unit."""
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
        if not all(self.agree(lambda: self.planned.are_moved)):
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
        files = [shard for shard in self.planned.arrays if shard.name in names]
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
        """Write this rank's share of these units; of what are not parameters, only rank 0 writes any."""
        tensors = TensorWriter(writer, self.planned.arrays, headers=False)
        for unit in units:
            for piece in self.planned.pieces(unit, self.state, tensors.takes):
                if piece.is_parameter or self.world.rank == 0:
                    tensors.write(piece.tensor, piece.values, piece.at)
                    self.progress(writer.nbytes)
            self.state.written(unit)

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
