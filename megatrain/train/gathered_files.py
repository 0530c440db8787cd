"""Save sharded state: rank 0 writes the files, and a rank that fails says so in place of what the others wait for.

All ranks agree, again and again, that nothing has failed: so all end with the same failure, and none waits for one that
has ended. Where rank 0 alone can write, it gathers the shards of all ranks, one unit (a layer, say) at a time: what
ranks own of a unit goes over the host's network and is in one piece in the memory of each for a moment. Where all reach
the same files, each writes its own ranges (`shared_files`).
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
    """What each rank makes, in order; raises on all what is raised on one (`World.agree`)."""

    def __call__(self, make: Callable[[], T], /) -> list[T]: ...


def write_together(world: World, write: Callable[[Agree], Path], follow: Callable[[Agree], object]) -> Path:
    """What `write` returns on rank 0, on all ranks; the others call `follow` meanwhile. Both agree alike.

    Raises on all ranks what is raised on one: its own error there, `RankError` elsewhere.
    """
    agreed = True

    def agree(make: Callable[[], T]) -> list[T]:
        nonlocal agreed
        agreed = False  # what is raised from here on is known to all
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
    """`whole(unit)` of each of `units`, which all ranks call together. prepare: called ahead of it, for what may fail
    on one rank alone."""
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
    """As `checkpoint.export_model`, of what all ranks own."""
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
