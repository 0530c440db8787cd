"""Writes files of sharded state from rank 0, such that a failure on one rank is raised on all.

All ranks repeatedly agree that nothing has failed, so all end with the same failure and none waits for one that
has ended. If only rank 0 can write, it gathers all ranks' shards one unit at a time over the host's network; each
rank then briefly has a whole unit in memory. If all ranks reach the same files, each writes its own ranges
(`save_from_all_ranks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar, Unpack

import torch

from megatrain.checkpoint import ExportOptions
from megatrain.checkpoint.export import export_units
from megatrain.dist import World
from megatrain.memory import Store
from megatrain.model import PortedModel, written_parameters

T = TypeVar("T")
WHAT = "files that are written together"


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
        found = world.agree(WHAT, make)
        agreed = True
        return found

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


def _raised(error: Exception) -> None:
    raise error


def export_together(
    world: World, ported: PortedModel, store: Store, folder: str | Path, **options: Unpack[ExportOptions]
) -> Path:
    """As `checkpoint.export_model`, of all ranks' state."""
    units, wanted = ported.structure.units, written_parameters(ported)

    def masters(agree: Agree) -> Iterator[dict[str, torch.Tensor]]:
        names = [[param.name for param in unit.params if param.name in wanted] for unit in units]
        each = range(len(units))
        return gathered(agree, each, lambda unit: None, lambda unit: {name: store.master(name) for name in names[unit]})

    return write_together(
        world,
        lambda agree: export_units(ported, masters(agree), folder, **options),
        lambda agree: follow_gathered(masters(agree)),
    )
