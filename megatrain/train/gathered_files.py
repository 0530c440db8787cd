"""Save sharded state: rank 0 gathers the shards of all ranks, one unit (a layer, say) at a time, and writes the files.

What ranks own of a unit goes over the host's network and is in one piece in the memory of each for a moment. A rank
that fails says so in place of the next unit, so all end with the same failure, and none waits for one that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar, Unpack

import torch

from megatrain.checkpoint import ExportOptions
from megatrain.checkpoint.export import export_units
from megatrain.dist import World
from megatrain.memory import Store
from megatrain.model import PortedModel, written_of

T = TypeVar("T")
WHAT = "files that are written together"


def write_together(
    world: World,
    units: Iterable[int],
    prepare: Callable[[int], object],
    whole: Callable[[int], T],
    write: Callable[[Iterator[T]], Path],
) -> Path:
    """What `write` returns on rank 0, which is given `whole(unit)` of each of `units`; on all ranks.

    prepare: called ahead of `whole`, for what may fail on one rank alone. whole: called on all. Raises on all ranks
    what is raised on one: its own error there, `RankError` elsewhere.
    """
    agreed = True

    def agree(make: Callable[[], object]) -> list[object]:
        nonlocal agreed
        agreed = False  # what is raised from here on is known to all
        found = world.agree(WHAT, make)
        agreed = True
        return found

    def given() -> Iterator[T]:
        for unit in units:
            agree(lambda unit=unit: prepare(unit) and None)  # type: ignore[misc]  # a default makes it this unit's
            yield whole(unit)

    path = Path()
    try:
        if world.rank == 0:
            path = write(given())
        else:
            for _ in given():
                pass
    except Exception as error:
        if agreed:
            agree(lambda error=error: _raised(error))  # type: ignore[misc]
        raise
    return Path(str(agree(lambda: str(path))[0]))


def _raised(error: Exception) -> None:
    raise error


def export_together(
    world: World, ported: PortedModel, store: Store, folder: str | Path, **options: Unpack[ExportOptions]
) -> Path:
    """As `checkpoint.export_model`, of what all ranks own."""
    units, wanted = ported.structure.units, written_of(ported, torch.float32).writes
    return write_together(
        world,
        range(len(units)),
        lambda unit: None,
        lambda unit: {param.name: store.master(param.name) for param in units[unit].params if wanted(param.name)},
        lambda masters: export_units(ported, masters, folder, **options),
    )
