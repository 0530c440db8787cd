"""The store: the training state of all units, by the names of parameters.

Where a unit's state is, and how its values are read and written there, is `UnitState`'s. With several ranks a whole
parameter is assembled from all ranks: then every rank must ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.memory.checksum import checksum
from megatrain.memory.pool import Pool
from megatrain.memory.unit_state import UnitState, ranges, read_ahead
from megatrain.schedule import Buffer
from megatrain.schedule.passes.state_buffers import StateBuffers
from megatrain.spec import ModelSpec, Numerics, Part, Policy, Tier
from megatrain.spec.layout import Field, Layout, Ownership

SUMMED_AT_ONCE = 1 << 22
"""Elements in each piece of the frozen values' checksum. Checkpoints hold that sum, which depends on it."""

Gather = Callable[[Tensor], Tensor]
"""All-gather in host memory: this rank's [n] -> [ranks, n]."""


class Store:
    """The state of all units, in the tiers of `policy`, in buffers of the pool.

    owned: this rank's share of each unit; gather: collects the ranks' shares.
    """

    def __init__(
        self,
        model: ModelSpec,
        numerics: Numerics,
        policy: Policy,
        pool: Pool,
        owned: Ownership = Ownership(),  # noqa: B008  # a frozen value
        gather: Gather = lambda own: own[None],
    ) -> None:
        self.model, self.pool, self.owned = model, pool, owned
        self._numerics, self._gather = numerics, gather
        self.units = [
            UnitState(model, unit, numerics.precision, placement, pool)
            for unit, placement in enumerate(policy.placements_of(model))
        ]
        self.layouts: list[Layout] = [unit.layout for unit in self.units]
        self._owner = {field.name: (unit, field) for unit, layout in enumerate(self.layouts) for field in layout.fields}
        self.rounded: set[str] = set()
        """Frozen parameters whose values had to be rounded to bfloat16."""
        self._frozen_sum: str | None = None
        self._shows_frozen = False
        """Whether a caller may have a view of frozen values, and so change them unseen."""

    # Names ----------------------------------------------------------------------------------------------------------

    def names(self) -> Iterator[str]:
        """Parameter names, unit by unit."""
        return iter(self._owner)

    def names_by_unit(self, *, read: bool) -> list[list[str]]:
        """Parameter names of each unit; `read`: including those read from the model's files."""
        units = zip(self.units, self.layouts, strict=True)
        return [[f.name for f in layout.fields if read or not unit.is_in_files(f.stop)] for unit, layout in units]

    def field(self, name: str) -> tuple[int, Field]:
        """The unit and place of a parameter."""
        return self._owner[name]

    # Values of parameters -------------------------------------------------------------------------------------------

    def master(self, name: str) -> Tensor:
        """A copy of a parameter's float32 master, in its shape. With several ranks all must ask for it."""
        self.settle()
        unit, field = self._owner[name]
        return torch.from_numpy(self._masters(unit, field.start, field.stop)).view(field.shape)

    @property
    def is_shared(self) -> bool:
        """Whether this is the share of one of several ranks."""
        return self.model.ranks > 1

    def write_master(self, name: str, value: Tensor) -> None:
        """Set this rank's share of a parameter's float32 master, exactly, or rounded if frozen in `bf16` (`rounded`).

        `value` has the parameter's shape, on the host. Raises as `write_ranges` does.
        """
        flat = value.detach().reshape(-1)
        self.write_ranges(name, lambda start, stop: flat[start:stop])

    def write_ranges(self, name: str, read: Callable[[int, int], Tensor]) -> None:
        """As `write_master`, with the value's elements [start, stop) from `read(start, stop)`, range by range.

        Raises `ModelError` for another value than the one in the model's files, if the parameter is read from them, and
        `DiskError`.
        """
        self.settle()
        number, field = self._owner[name]
        unit = self.units[number]
        is_fixed = unit.is_in_files(field.stop)
        if field.start >= unit.layout.trained.size and not is_fixed:
            self._frozen_sum = None
        self.rounded.discard(name)
        shares = unit.ranges_of(field, self.owned, Part.WEIGHTS)
        for start, part in read_ahead((start, partial(read, begin, end)) for start, begin, end in shares):
            new = part.to(device="cpu", dtype=torch.float32).contiguous().numpy()
            if is_fixed and not np.array_equal(new, unit.masters(start, start + new.size)):
                fix = "place its weights in host memory or on the disk"
                raise ModelError("is read from the model's files, but they hold other values", where=name, fix=fix)
            if not is_fixed and unit.set_masters(start, new):
                self.rounded.add(name)

    def view(self, name: str) -> Tensor | None:
        """A parameter in place in host memory, float32 or the bfloat16 nearest to its master, in its shape.

        `None` if it is elsewhere, if a device has a copy (which would not follow changes), or if ranks share it.
        """
        unit, field = self._owner[name]
        flat = None if self.model.ranks > 1 else self.units[unit].view(field.start, field.stop)
        self._shows_frozen |= flat is not None and field.start >= self.layouts[unit].trained.size
        return None if flat is None else flat.view(field.shape)

    def _masters(self, unit: int, start: int, stop: int) -> np.ndarray:
        """A copy of the masters of elements [start, stop) of a whole unit, from all ranks."""
        state = self.units[unit]
        if self.model.ranks == 1:
            return state.masters(start, stop)
        pieces = [
            state.masters(piece.own.start, piece.own.stop) for piece in self.owned.within(state.layout, start, stop)
        ]
        own = np.concatenate([*pieces, np.empty(0, np.float32)])
        return self.together(torch.from_numpy(own), state.layout, start=start, stop=stop).numpy()

    def together(
        self, mine: Tensor, layout: Layout, gather: Gather | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Assemble elements [start, stop) of an array over a unit, or over its trained part, from the ranks' shares of
        them; by default all, [layout.size], from [layout.own_size].

        All ranks must call it. gather: another way to collect the shares, for a thread of its own.
        """
        stop = layout.size if stop is None else stop
        if start == stop:
            return torch.empty(0, dtype=mine.dtype)
        pieces = [list(rank.within(layout, start, stop)) for rank in self.owned.all_ranks(layout)]
        longest = max(sum(piece.stop - piece.start for piece in of_rank) for of_rank in pieces)
        whole = torch.empty(stop - start, dtype=mine.dtype)
        padded = mine if mine.numel() == longest else torch.nn.functional.pad(mine, (0, longest - mine.numel()))
        shares = (gather or self._gather)(padded)
        for of_rank, share in zip(pieces, shares, strict=True):
            at = 0
            for piece in of_rank:
                nelements = piece.stop - piece.start
                whole[piece.start - start : piece.stop - start] = share[at : at + nelements]
                at += nelements
        return whole

    # All of it ------------------------------------------------------------------------------------------------------

    def non_finite(self) -> list[str]:
        """Names of parameters with non-finite masters in this rank's share. Checks every value."""
        self.settle()
        return [name for name in self.names() if not self._is_finite(name)]

    def _is_finite(self, name: str) -> bool:
        unit, field = self._owner[name]
        pieces = self.owned.within(self.layouts[unit], field.start, field.stop)
        held = (elements for piece in pieces for elements in ranges(piece.own.start, piece.own.stop))
        return all(np.isfinite(self.units[unit].masters(*elements)).all() for elements in held)

    def frozen_checksum(self) -> str:
        """Checksum of all frozen values as float32, in 16 hex digits. Reads every value once, or at every call from the
        first `view` of one on.

        Independent of tier (also files), of precision if the values are equal, and of the number of ranks, all of which
        must ask.
        """
        if self._frozen_sum is None or self._shows_frozen:
            self.settle()
            self._frozen_sum = f"{checksum(self._frozen_words()):016x}"
        return self._frozen_sum

    def _frozen_words(self) -> Iterator[np.ndarray]:
        for unit, layout in enumerate(self.layouts):
            for field in sorted(layout.fields[layout.trained_fields :], key=lambda field: field.name):
                for start in range(field.start, field.stop, SUMMED_AT_ONCE):
                    values = self._masters(unit, start, min(start + SUMMED_AT_ONCE, field.stop))
                    yield np.pad(values, (0, values.size % 2)).view(np.uint8)  # to whole 64-bit words

    def settle(self) -> None:
        """Write what a failed step or write has left unsaved. Call before ops run.

        Raises `DiskError` if the disk fails; the next call tries again.
        """
        self.pool.unsaved.save()

    def move(self, policy: Policy) -> None:
        """Move every part to the tier that `policy` names; what comes to host memory last, when there is room.

        Raises the tier's error. The state stays consistent: some parts are in their new place, the others in the
        old, and another call continues.
        """
        self.settle()
        buffers: dict[str, Buffer] = {}
        StateBuffers(self.model, self._numerics, policy, "none", buffers, {}, {})
        tiers: tuple[Tier, ...] = "disk", "device", "file", "host"
        for tier in tiers:
            for unit, placement in zip(self.units, policy.placements_of(self.model), strict=True):
                unit.move(placement, tier, buffers)
