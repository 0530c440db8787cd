"""The store: the training state of all units, in the tiers that the policy names.

With `bf16` precision a unit has the upper half of each float32 master (which is the bfloat16 weight that streams),
the lower 16 bits, and float32 m and v: 12 bytes per parameter. With `fp32` the weight is the master and there are no
low bits: 12 bytes again. Frozen parameters have only the weight, 2 bytes in `bf16`, where it replaces the master.
Each part (`spec.Part`) has its own buffer, since each may be in another tier; that of the moments holds m, then v.

With several ranks the buffers hold this rank's share of each unit (`spec.layout`), and a whole parameter is assembled
from all ranks: then every rank must ask for it.

Frozen weights may be read from the model's own files (`memory.model_files`): then the store holds only the unit's
other weights, which come first, and reads those in files piece by piece when their values are needed.

During a step, ops find state in the memory that they lease (`unit_state`). Between steps the store brings one unit
at a time to host memory, and `settle` writes back what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatrain.errors import ModelError, PlanError
from megatrain.memory.checksum import checksum
from megatrain.memory.pool import Pool
from megatrain.optim import AdamW, HostArrays, StateArrays
from megatrain.optim.split_master import bf16_to_f32, join_into, split_into
from megatrain.schedule.passes.state_buffers import Spare, reads_files, spare_of, staging_name, state_name
from megatrain.spec import ModelSpec, Numerics, Part, Placement, Policy, Precision, Tier
from megatrain.spec.layout import Field, Layout, Ownership, layout_of

PARTS = (Part.WEIGHTS, Part.LOW_BITS, Part.MOMENTS)
"""The parts of a unit between steps, except deferred gradients."""
_NOTHING = torch.empty(0, dtype=torch.uint8)

AT_ONCE = 1 << 22
"""Frozen elements that are read, compared or rounded at a time."""


def unit_state(parts: Mapping[Part, Tensor], layout: Layout, precision: Precision) -> HostArrays:
    """Views of a unit's arrays in `parts`, each uint8 host memory of at least its size.

    `hi` has `layout.own_size` elements, without those that are read from files (they come last).
    """
    size, trained = layout.own_size, layout.trained.own_size
    hi = parts.get(Part.WEIGHTS, _NOTHING).numpy()
    held = parts.get(Part.MOMENTS, _NOTHING).numpy()[: 4 * trained * len(AdamW.STATE)].view(np.float32)
    moments = tuple(np.split(held, len(AdamW.STATE)))
    if precision == "fp32":
        return StateArrays(hi[: 4 * size].view(np.float32), None, moments)
    low = parts.get(Part.LOW_BITS, _NOTHING).numpy()
    return StateArrays(hi[: 2 * size].view(np.uint16), low[: 2 * trained].view(np.uint16), moments)


Gather = Callable[[Tensor], Tensor]
"""All-gather in host memory: this rank's [n] -> [ranks, n]."""


class Store:
    """The state of all units, in the tiers of `policy`, accessed through the pool.

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
        self.model, self.precision, self.pool = model, numerics.precision, pool
        self.owned, self._gather = owned, gather
        self._units = range(len(model.units))
        self._weight = np.dtype(np.float32 if numerics.precision == "fp32" else np.uint16)
        self.layouts: list[Layout] = [layout_of(unit) for unit in model.units]
        self._owner = {field.name: (unit, field) for unit, layout in enumerate(self.layouts) for field in layout.fields}
        placements = policy.placements_of(model)
        self._tiers = {(unit, part): _tier(placements[unit], part) for unit in self._units for part in PARTS}
        self._in_files = {unit for unit in self._units if reads_files(self.layouts[unit], placements[unit])}
        """Units with some weights read from files; `_tiers` has the tier of the others."""
        self._open: int | None = None
        """The unit whose parts are on the host, in `_brought`."""
        self._brought: dict[Part, Tensor] = {}
        self._changed = False
        self._whole: np.ndarray | None = None
        """The open unit's masters, assembled from all ranks."""
        self.rounded: set[str] = set()
        """Frozen parameters whose values had to be rounded to bfloat16."""
        self._frozen_sum: str | None = None

    def unit(self, unit: int) -> HostArrays:
        """One unit's arrays, read-only; valid until another unit is asked for, or the store settles."""
        return unit_state(self._parts(unit), self.layouts[unit], self.precision)

    def change(self, unit: int) -> HostArrays:
        """As `unit`, writable; `settle` writes back parts that are not in host memory."""
        state = self.unit(unit)
        self._changed, self._whole = True, None
        return state

    def non_finite(self) -> list[str]:
        """Names of parameters with non-finite masters in this rank's share. Checks every value."""
        found = [name for name in self.names() if not all(np.isfinite(each).all() for each in self._own(name))]
        self.settle()
        return found

    def frozen_checksum(self) -> str:
        """Checksum of all frozen values as float32, in 16 hex digits. Reads every value once.

        Independent of tier (also files), of precision if the values are equal, and of the number of ranks, all of which
        must ask.
        """
        if self._frozen_sum is None:
            self._frozen_sum = f"{checksum(self._frozen_words()):016x}"
            self.settle()
        return self._frozen_sum

    def _frozen_words(self) -> Iterator[np.ndarray]:
        for unit, layout in enumerate(self.layouts):
            for field in sorted(layout.fields[layout.trained_fields :], key=lambda field: field.name):
                whole = self._masters(unit) if self.model.ranks > 1 else self.unit(unit).hi
                for at in _pieces(field.start, field.stop):
                    values = _float32(self._from_files(unit, at) if self._is_read(unit, field) else whole[at])
                    yield np.pad(values, (0, values.size % 2)).view(np.uint8)  # to whole 64-bit words

    def settle(self) -> None:
        """Write back changes and release the open unit. Call before ops run, and when reading has ended.

        Raises `DiskError` if the disk fails; the next call tries again.
        """
        self.pool.unsaved.save()
        if self._open is not None and self._changed:
            for part, memory in self._brought.items():
                self.pool.put(self._buffer(self._open, part), memory)
        self._open, self._changed = None, False
        self._brought, self._whole = {}, None

    # Beside a step --------------------------------------------------------------------------------------------------

    def on_device(self, unit: int) -> bool:
        """Whether any part of a unit is only on the device, where only the main thread may read it, between steps."""
        return any(self._tiers[unit, part] == "device" for part in PARTS)

    def spare_nbytes(self, unit: int) -> int:
        """Host memory that `float32_state` needs: at most the unit's masters and moments in float32."""
        return self._spare(unit).nbytes

    def _spare(self, unit: int) -> Spare:
        away = [part for part in PARTS if not self._in_host(unit, part)]
        return spare_of(self.model, unit, self.precision, away, in_files=unit in self._in_files)

    def float32_state(self, unit: int, spare: Tensor) -> HostArrays:
        """The unit with float32 masters as `hi`, read-only: in place, or a copy in `spare`, uint8[spare_nbytes].

        Of the base below an adapter, weights in files are omitted (`Spare.saved`). Any thread may call it, even
        during steps that do not change the unit, unless it is `on_device`. Keeps nothing open. Raises `DiskError`.
        """
        sizes, (saved, made, _) = self._sizes(unit), self._spare(unit)
        if not saved:  # an epilogue that only borrows weights, or is in files
            return unit_state({}, self.layouts[unit], "fp32")
        masters, behind = spare[:made], spare[made:]
        weights = sizes.get(Part.WEIGHTS, 0)
        if self.precision == "fp32" and not made:
            masters = self._at_hand(unit, Part.WEIGHTS, masters)
        elif self.precision == "fp32":
            held = self._at_hand(unit, Part.WEIGHTS, masters[:weights]) if weights else _NOTHING
            if held.data_ptr() != masters.data_ptr():
                masters[: held.numel()].copy_(held)
        else:
            high = self._at_hand(unit, Part.WEIGHTS, behind[:weights]) if weights else _NOTHING
            rest = behind if self._in_host(unit, Part.WEIGHTS) else behind[weights:]
            low_nbytes = sizes.get(Part.LOW_BITS, 0)
            low = self._at_hand(unit, Part.LOW_BITS, rest[:low_nbytes]) if low_nbytes else _NOTHING
            halves = unit_state({Part.WEIGHTS: high, Part.LOW_BITS: low}, self.layouts[unit], "bf16")
            _join(replace(halves, hi=halves.hi[:saved]), masters.numpy().view(np.float32)[: halves.hi.size])
        if self._reads(unit, saved):
            self._read_masters(unit, masters.numpy().view(np.float32))
        parts = {Part.WEIGHTS: masters}
        if Part.MOMENTS in sizes:  # in place of the halves, which are joined by now
            parts[Part.MOMENTS] = self._at_hand(unit, Part.MOMENTS, behind[: sizes[Part.MOMENTS]])
        return unit_state(parts, self.layouts[unit], "fp32")

    def _at_hand(self, unit: int, part: Part, memory: Tensor) -> Tensor:
        name = self._buffer(unit, part)
        if self._in_host(unit, part):
            return self.pool.memory(name)
        self.pool.fetch(name, memory)
        return memory

    def _sizes(self, unit: int) -> dict[Part, int]:
        """Bytes of the parts that a unit has."""
        names = {part: self._buffer(unit, part) for part in PARTS}
        return {part: self.pool.nbytes(name) for part, name in names.items() if self.pool.has(name)}

    def _in_host(self, unit: int, part: Part) -> bool:
        return self._tiers[unit, part] == "host"

    # Files ----------------------------------------------------------------------------------------------------------

    def is_in_files(self, name: str) -> bool:
        """Whether a parameter is read from the model's files."""
        return self._is_read(*self._owner[name])

    def _is_read(self, unit: int, field: Field) -> bool:
        return unit in self._in_files and field.stop > self.layouts[unit].files_start

    def _reads(self, unit: int, stop: int) -> bool:
        """Whether any of a unit's first `stop` elements is read from files."""
        return unit in self._in_files and stop > self.layouts[unit].files_start

    def _from_files(self, unit: int, at: slice) -> np.ndarray:
        """These elements of a unit, which are in files, in the held dtype; zeros between parameters."""
        memory = np.zeros(at.stop - at.start, self._weight)
        first = (at.start - self.layouts[unit].files_start) * memory.itemsize
        self.pool.read_files(state_name("file", Part.WEIGHTS, unit), first, torch.from_numpy(memory.view(np.uint8)))
        return memory

    def _read_masters(self, unit: int, masters: np.ndarray) -> None:
        """Fill in the unit's masters, float32[size], that are in files."""
        for at in _pieces(self.layouts[unit].files_start, masters.size):
            masters[at] = _float32(self._from_files(unit, at))

    def _take_into_files(self, unit: int) -> None:
        """From now on read from files what they hold of a unit's weights, which are in host memory.

        Raises `PlanError` if the weights differ from the files.
        """
        layout, name = self.layouts[unit], state_name("host", Part.WEIGHTS, unit)
        memory, held = self.pool.memory(name), layout.files_start * self._weight.itemsize
        here = memory.numpy().view(self._weight)
        self.pool.enter_files(name, state_name("file", Part.WEIGHTS, unit), memory.numel() - held)
        for at in _pieces(layout.files_start, layout.size):
            if not np.array_equal(here[at], self._from_files(unit, at)):
                self.pool.leave_files(state_name("file", Part.WEIGHTS, unit))
                what = f"the frozen weights of {self.model.units[unit].name} differ from the model's files"
                raise PlanError(what, where="policy.placements", fix="keep them in host memory or on the disk")
        self.pool.cut(name, held)
        self._in_files.add(unit)

    def _take_from_files(self, unit: int) -> None:
        """Load all weights of a unit into host memory. Raises `DoesNotFit`."""
        layout, name = self.layouts[unit], state_name("host", Part.WEIGHTS, unit)
        self.pool.cut(name, layout.size * self._weight.itemsize, like=state_name("file", Part.WEIGHTS, unit))
        here = self.pool.memory(name).numpy().view(self._weight)
        for at in _pieces(layout.files_start, layout.size):
            here[at] = self._from_files(unit, at)
        self.pool.leave_files(state_name("file", Part.WEIGHTS, unit))
        self._in_files.discard(unit)

    # Names ----------------------------------------------------------------------------------------------------------

    def names(self) -> Iterator[str]:
        """Parameter names, unit by unit."""
        return iter(self._owner)

    def names_by_unit(self, *, read: bool) -> list[list[str]]:
        """Parameter names of each unit; `read`: including those read from files."""
        units = [[field.name for field in layout.fields] for layout in self.layouts]
        return [[name for name in unit if read or not self.is_in_files(name)] for unit in units]

    def write_master(self, name: str, value: Tensor) -> None:
        """Set this rank's share of a parameter's float32 master, exactly, or rounded if frozen in `bf16` (`rounded`).

        `value` has the parameter's shape, on the host.
        """
        unit, field = self._owner[name]
        if self._is_read(unit, field):
            return self._refuse_other(name, value)
        flat, state = value.detach().reshape(-1), self.change(unit)
        self.rounded.discard(name)
        if field.start >= self.layouts[unit].trained.size:
            self._frozen_sum = None
        for piece in self.owned.within(self.layouts[unit], field.start, field.stop):
            part = flat[piece.start - field.start : piece.stop - field.start]
            own = part.to(device="cpu", dtype=torch.float32).contiguous().numpy()
            if state.lo is None:
                state.hi[piece.own] = own
            elif piece.at < state.lo.size:
                split_into(own, state.hi[piece.own], state.lo[piece.own])
            elif _round_into(own, state.hi[piece.own]):
                self.rounded.add(name)

    def _refuse_other(self, name: str, value: Tensor) -> None:
        """Raise `ModelError` if the files hold another value of a parameter that is read from them."""
        unit, field = self._owner[name]
        flat = value.detach().reshape(-1)
        for at in _pieces(field.start, field.stop):
            new = flat[at.start - field.start : at.stop - field.start].to(device="cpu", dtype=torch.float32)
            if not np.array_equal(new.numpy(), _float32(self._from_files(unit, at))):
                fix = "place its weights in host memory or on the disk"
                raise ModelError("is read from the model's files, but they hold other values", where=name, fix=fix)

    def master(self, name: str) -> Tensor:
        """A copy of a parameter's float32 master, in its shape. With several ranks all must ask for it."""
        unit, field = self._owner[name]
        if self.model.ranks > 1:
            return _tensor(self._masters(unit)[field.start : field.stop].copy(), field)
        return _tensor(next(iter(self._own(name)), np.empty(0, np.float32)), field)

    def _own(self, name: str) -> list[np.ndarray]:
        """Copies of the float32 masters in this rank's share of a parameter, in order."""
        unit, field = self._owner[name]
        if self._is_read(unit, field):
            return [_float32(self._from_files(unit, slice(field.start, field.stop)))]
        state, pieces = self.unit(unit), self.owned.within(self.layouts[unit], field.start, field.stop)
        return [_joined(state, piece.own) for piece in pieces]

    def _masters(self, unit: int) -> np.ndarray:
        """The float32 masters of a unit, from all ranks."""
        state = self.unit(unit)
        if self._whole is None:
            own = _joined(state, slice(0, state.hi.size))
            self._whole = self.together(torch.from_numpy(own), self.layouts[unit]).numpy()
        return self._whole

    def together(self, own: Tensor, layout: Layout, gather: Gather | None = None) -> Tensor:
        """Assemble an array over a unit, or over its trained part, [layout.size], from the ranks' shares,
        [layout.own_size].

        All ranks must call it. gather: another way to collect the shares, for a thread of its own.
        """
        whole = torch.empty(layout.size, dtype=own.dtype)
        for rank, part in enumerate((gather or self._gather)(own)):
            for piece in replace(self.owned, rank=rank).pieces(layout):
                whole[piece.start : piece.stop] = part[piece.own]
        return whole

    def view(self, name: str) -> Tensor | None:
        """A parameter in place in host memory, float32 or the bfloat16 nearest to its master, in its shape.

        `None` if it is elsewhere, if a device has a copy (which would not follow changes), or if ranks share it.
        """
        unit, field = self._owner[name]
        if (
            self.model.ranks > 1
            or not self._in_host(unit, Part.WEIGHTS)
            or self._is_read(unit, field)
            or self.pool.has(state_name("device", Part.WEIGHTS, unit))
        ):
            return None
        dtype = torch.float32 if self.precision == "fp32" else torch.bfloat16
        flat = self.pool.memory(self._buffer(unit, Part.WEIGHTS)).view(dtype)
        return flat[field.start : field.stop].view(field.shape)

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Set all masters from a mapping name -> tensor of every parameter."""
        for name in self._owner:
            self.write_master(name, parameters[name])
        self.settle()

    def field(self, name: str) -> tuple[int, Field]:
        """The unit and place of a parameter."""
        return self._owner[name]

    def move(self, policy: Policy) -> None:
        """Move every part to the tier that `policy` names; moves to the disk come first, to make room.

        Raises the tier's error. The state stays consistent: some parts are in their new place, the others in the
        old, and another call continues.
        """
        placements = policy.placements_of(self.model)
        self.settle()
        reading = {unit for unit in self._units if reads_files(self.layouts[unit], placements[unit])}
        for unit in sorted(reading - self._in_files):
            if self._in_host(unit, Part.WEIGHTS):
                self._take_into_files(unit)
        for unit in sorted(self._in_files - reading):
            self._take_from_files(unit)
        moves = [
            (unit, part, target)
            for unit in self._units
            for part in PARTS
            if (target := _tier(placements[unit], part)) != self._tiers[unit, part]
        ]
        for unit, part, target in sorted(moves, key=lambda move: ("disk", "device", "host").index(move[2])):
            before = self._buffer(unit, part)
            if self.pool.has(before):
                self.pool.move(before, state_name(target, part, unit), target, self._staging(unit, part))
            self._tiers[unit, part] = target
        for unit in sorted(reading - self._in_files):
            self._take_into_files(unit)

    def _parts(self, unit: int) -> dict[Part, Tensor]:
        """All parts of a unit, usable by the host."""
        if self._open != unit:
            self.settle()
        parts: dict[Part, Tensor] = {}
        for part in PARTS:
            name = self._buffer(unit, part)
            if self.pool.has(name):
                parts[part] = self.pool.memory(name) if self._in_host(unit, part) else self._bring(unit, part, name)
        self._open = unit
        return parts

    def _bring(self, unit: int, part: Part, name: str) -> Tensor:
        """The bytes of a part that is not in host memory, fetched once, into a staging buffer if there is one."""
        if part not in self._brought:
            self._brought[part] = self.pool.get(name, self._staging(unit, part))
        return self._brought[part]

    def _staging(self, unit: int, part: Part) -> str:
        return staging_name(self.model, unit, part)

    def _buffer(self, unit: int, part: Part) -> str:
        return state_name(self._tiers[unit, part], part, unit)


def _tier(placement: Placement, part: Part) -> Tier:
    """The tier of a part; for weights in files, that of those held beside them."""
    tier = placement.tier(part)
    return "host" if tier == "file" else tier


def _pieces(start: int, stop: int) -> Iterator[slice]:
    """Split elements [start, stop) into pieces."""
    return (slice(at, min(at + AT_ONCE, stop)) for at in range(start, stop, AT_ONCE))


def _float32(held: np.ndarray) -> np.ndarray:
    """Held weights as float32 values."""
    return held if held.dtype == np.float32 else bf16_to_f32(held)


def _tensor(flat: np.ndarray, field: Field) -> Tensor:
    return torch.from_numpy(flat).view(field.shape)


def _join(halves: HostArrays, masters: np.ndarray) -> None:
    """Write a unit's `bf16` masters, float32[n]: from both halves if trained, else from the weights, which come
    after."""
    assert halves.lo is not None
    trained = halves.lo.size
    join_into(halves.hi[:trained], halves.lo, masters[:trained])
    np.left_shift(halves.hi[trained:], 16, out=masters[trained:].view(np.uint32), dtype=np.uint32)


def _joined(state: HostArrays, at: slice) -> np.ndarray:
    """A copy of the float32 masters of these elements of a unit."""
    if state.lo is None:
        return state.hi[at].copy()
    masters = np.empty(at.stop - at.start, np.float32)
    _join(replace(state, hi=state.hi[at], lo=state.lo[at]), masters)
    return masters


def _round_into(masters: np.ndarray, hi: np.ndarray) -> bool:
    """Round masters to bfloat16 into `hi`; returns whether any value changed."""
    lost = False
    for at in _pieces(0, masters.size):
        low = np.empty(at.stop - at.start, np.uint16)
        split_into(masters[at], hi[at], low)
        lost = lost or bool(low.any())
    return lost
