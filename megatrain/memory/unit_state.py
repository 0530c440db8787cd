"""The state of one unit: the tier of each part, and its values, read and written by ranges in any tier.

With `bf16` precision a unit has the upper half of each float32 master (which is the bfloat16 weight that streams), the
lower 16 bits, and what the optimizer keeps (for AdamW float32 m and v): 12 bytes per parameter. With `fp32` the weight
is the master and there are no low bits: 12 bytes again. Frozen parameters have only the weight, 2 bytes in `bf16`,
where it replaces the master. Each part (`spec.Part`) has its own buffer, since each may be in another tier; that of the
moments holds the optimizer's arrays one after the other.

Frozen weights may be read from the model's own files (`memory.model_files`): then a unit holds only its other
weights, which come first.

With several ranks the buffers hold this rank's share of the unit, and elements are counted in it (`spec.layout`).

During a step, ops find state in the memory that they lease. Everything here is for the time between steps, except what
says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatrain.device import Errand
from megatrain.errors import PlanError
from megatrain.memory.pool import Pool
from megatrain.optim import join_into, split_into
from megatrain.schedule import Access, Buffer
from megatrain.schedule.contents import Scratch
from megatrain.schedule.passes.state_buffers import reads_files, spare_nbytes, state_name
from megatrain.spec import ModelSpec, Part, Placement, Precision, Tier
from megatrain.spec.layout import Field, Layout, Ownership, layout_of

PARTS = (Part.WEIGHTS, Part.LOW_BITS, Part.MOMENTS)
"""The parts of a unit between steps, except deferred gradients."""
AT_ONCE = 1 << 23
"""Elements that are read, compared, converted or moved at a time."""


def ranges(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split elements [start, stop) into ranges of at most `AT_ONCE`."""
    return ((begin, min(begin + AT_ONCE, stop)) for begin in range(start, stop, AT_ONCE))


Key = TypeVar("Key")


def read_ahead(reads: Iterable[tuple[Key, Callable[[], Any]]]) -> Iterator[tuple[Key, Any]]:
    """For (key, read) in `reads`, (key, what `read()` returns). Another thread reads one pair ahead of the caller.

    Raises what `read` raises.
    """
    with ThreadPoolExecutor(1, "megatrain-read") as thread:
        under_way = ((key, thread.submit(read)) for key, read in reads)
        current = next(under_way, None)
        while current is not None:
            following = next(under_way, None)
            yield current[0], current[1].result()
            current = following


class UnitState:
    """The training state of unit number `unit`, placed as in `placement`, in buffers of the pool."""

    def __init__(self, model: ModelSpec, unit: int, precision: Precision, placement: Placement, pool: Pool) -> None:
        self.layout: Layout = layout_of(model.units[unit])
        self.trained = self.layout.trained.own_size
        """Number of trained elements, which come first."""
        self._state_starts = (0, *accumulate(self.layout.own_state_sizes))
        """First element in the part of moments of each array that the optimizer keeps."""
        self._model, self._unit, self._precision, self._pool = model, unit, precision, pool
        weight = np.dtype(np.float32 if precision == "fp32" else np.uint16)
        self._dtypes = {Part.WEIGHTS: weight, Part.LOW_BITS: np.dtype(np.uint16), Part.MOMENTS: np.dtype(np.float32)}
        self._tiers = {part: self._tier_in(placement, part) for part in PARTS}
        """With weights in "file" a buffer in host memory has the others, if there are any."""

    def _tier_in(self, placement: Placement, part: Part) -> Tier:
        tier = placement.tier(part)
        return "host" if tier == "file" and not reads_files(self.layout, placement) else tier

    @property
    def is_on_device(self) -> bool:
        """Whether any part is only on the device, where only the main thread may read it, between steps."""
        return "device" in self._tiers.values()

    def is_in_files(self, stop: int) -> bool:
        """Whether the element before `stop` is read from the model's files, which hold the last ones of a unit."""
        return self._tiers[Part.WEIGHTS] == "file" and stop > self.layout.files_start

    # Ranges of a part -----------------------------------------------------------------------------------------------

    def ranges(self, part: Part, start: int, stop: int, number: int = 0) -> Iterator[tuple[int, int]]:
        """Split elements [start, stop) of a part into ranges of at most `AT_ONCE`, to be written in this order.

        None has both trained and frozen elements. If the part is on the disk, every range but the last ends with a
        grain of the disk, so that no grain is written twice. number: as in `write`.
        """
        name, nbytes, first = self._name(part), self._dtypes[part].itemsize, self._state_starts[number]
        while start < stop:
            end = min(start + AT_ONCE, self.trained if start < self.trained else stop, stop)
            if end < stop and self._tiers[part] == "disk":
                at = (first + end) * nbytes
                grain_start = self._pool.disk.around(name, at, at + 1)[0] // nbytes - first
                end = grain_start if grain_start > start else end
            yield start, end
            start = end

    def ranges_of(self, field: Field, owned: Ownership, part: Part, number: int = 0) -> Iterator[tuple[int, int, int]]:
        """(start, begin, end) of each of the `ranges` of a rank's share of a parameter: elements [begin, end) of the
        parameter lie in the part from element `start` on."""
        for piece in owned.within(self.layout, field.start, field.stop):
            origin = piece.at - (piece.start - field.start)  # of the parameter, in the rank's own elements
            for start, stop in self.ranges(part, piece.own.start, piece.own.stop, number):
                yield start, start - origin, stop - origin

    def read(self, part: Part, start: int, stop: int, number: int = 0, out: np.ndarray | None = None) -> np.ndarray:
        """Elements [start, stop) of a part: a view where they are in host memory, else a copy.

        Weights are float32, or the bits of bfloat16 as uint16; low bits are uint16, moments float32. number: which
        array of the moments (`ParamSpec.state`). out: memory for a copy of low bits or moments, as uint8. Raises
        `DiskError`.
        """
        dtype = self._dtypes[part]
        if start == stop:
            return np.empty(0, dtype)
        first = self._state_starts[number]
        start, stop = start + first, stop + first
        if part is not Part.WEIGHTS or not self.is_in_files(stop):
            first, last = start * dtype.itemsize, stop * dtype.itemsize
            return _bytes_of(self._pool, self._name(part), first, last, out).view(dtype)
        middle = max(start, self.layout.files_start)
        return np.concatenate([self.read(part, start, middle), self._from_files(middle, stop)])

    def write(self, part: Part, start: int, values: np.ndarray, number: int = 0) -> None:
        """Set elements of a part from `start` on, in the dtype that `read` returns.

        Raises `DiskError`, with which nothing is lost: the next call of `UnsavedState.save` writes them again.
        """
        if values.size:  # an empty part has no buffer
            first = (start + self._state_starts[number]) * self._dtypes[part].itemsize
            _put(self._pool, self._name(part), first, values.view(np.uint8))

    def masters(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """A copy of the float32 masters of elements [start, stop), in `out` if given. Raises `DiskError`."""
        masters = np.empty(stop - start, np.float32) if out is None else out
        for begin, end in self.ranges(Part.WEIGHTS, start, stop):
            weights, piece = self.read(Part.WEIGHTS, begin, end), masters[begin - start : end - start]
            if self._precision == "fp32":
                piece[:] = weights
            elif end <= self.trained:
                join_into(weights, self.read(Part.LOW_BITS, begin, end), piece)
            else:
                np.left_shift(weights, 16, out=piece.view(np.uint32), dtype=np.uint32)
        return masters

    def set_masters(self, start: int, masters: np.ndarray) -> bool:
        """Set the masters of elements from `start` on, float32[n], exactly, or rounded where they are frozen in `bf16`.

        Returns whether rounding has changed any. Raises as `write` does.
        """
        is_rounded = False
        for begin, end in self.ranges(Part.WEIGHTS, start, start + masters.size):
            piece = masters[begin - start : end - start]
            if self._precision == "fp32":
                self.write(Part.WEIGHTS, begin, piece)
                continue
            high, is_trained = self._room(Part.WEIGHTS, begin, end), end <= self.trained
            low = self._room(Part.LOW_BITS, begin, end) if is_trained else np.empty(end - begin, np.uint16)
            split_into(piece, high, low)
            self.write(Part.WEIGHTS, begin, high)
            if is_trained:
                self.write(Part.LOW_BITS, begin, low)
            else:
                is_rounded = is_rounded or bool(low.any())
        return is_rounded

    def view(self, start: int, stop: int) -> Tensor | None:
        """Elements [start, stop) of the weights in place in host memory, float32 or bfloat16.

        `None` if they are elsewhere, or if a device has a copy, which would not follow changes.
        """
        is_copied = state_name("device", Part.WEIGHTS, self._unit) in self._pool.buffers
        if not self._is_in_place(Part.WEIGHTS) or is_copied or self.is_in_files(stop):
            return None
        weights = torch.from_numpy(self.read(Part.WEIGHTS, start, stop))
        return weights if self._precision == "fp32" else weights.view(torch.bfloat16)

    # For saves ------------------------------------------------------------------------------------------------------

    @property
    def spare_nbytes(self) -> int:
        """Bytes of the host memory that `in_float32` needs (see `state_buffers.spare_nbytes`)."""
        away = [part for part in PARTS if not self._is_in_place(part)]
        in_files = self.is_in_files(self.layout.size)
        return spare_nbytes(self._model, self._unit, self._precision, away, in_files=in_files)

    def in_float32(self, array: int, start: int, stop: int, spare: Tensor) -> np.ndarray:
        """Elements [start, stop) of the masters (0) or of the optimizer's n-th array (n), float32 and read-only: in
        place, or a copy in `spare`, uint8.

        Any thread may call it, even during steps that do not change the unit, unless it `is_on_device`. Raises
        `DiskError`.
        """
        copy = spare[: 4 * (stop - start)].numpy()
        if array:
            return self.read(Part.MOMENTS, start, stop, array - 1, copy)
        if self._precision == "fp32" and self._is_in_place(Part.WEIGHTS) and not self.is_in_files(stop):
            return self.read(Part.WEIGHTS, start, stop)
        return self.masters(start, stop, copy.view(np.float32))

    # Where it is ----------------------------------------------------------------------------------------------------

    def move(self, placement: Placement, tier: Tier, buffers: Mapping[str, Buffer]) -> None:
        """Move the parts that `placement` puts in `tier`.

        buffers: those of all state so placed, by name. Raises the tier's error, and `PlanError` for weights that differ
        from the model's files; parts that could not be moved stay where they were.
        """
        for part in PARTS:
            if tier == self._tier_in(placement, part) != self._tiers[part]:
                if tier == "file":
                    self._refuse_other_files()
                self._move_to(part, tier, buffers.get(self._name(part, tier)))

    def _move_to(self, part: Part, tier: Tier, target: Buffer | None) -> None:
        """Move a part to a tier, into the buffer `target`; `None` if it will have none there."""
        before = self._name(part)
        if target is None:
            self._tiers[part] = tier
            return self._pool.free(before)
        is_resized, size = target.name == before, target.nbytes // self._dtypes[part].itemsize
        new = target._replace(name=f"{before}/resized") if is_resized else target
        self._pool.provide([new])
        try:
            for begin, end in ranges(0, size):
                values = self.read(part, begin, end)
                _put(self._pool, new.name, begin * values.itemsize, values.view(np.uint8))
        except BaseException:
            self._pool.free(new.name)
            raise
        self._tiers[part] = tier  # first: an interrupt while memory is freed must not hide where the part is now
        self._pool.free(before)
        if is_resized:
            self._pool.rename(new, target)

    def _refuse_other_files(self) -> None:
        """Raise `PlanError` if the weights differ from those in the model's files."""
        for begin, end in ranges(self.layout.files_start, self.layout.size):
            if not np.array_equal(self.read(Part.WEIGHTS, begin, end), self._from_files(begin, end)):
                what = f"the frozen weights of {self._model.units[self._unit].name} differ from the model's files"
                raise PlanError(what, where="policy.placements", fix="keep them in host memory or on the disk")

    def _from_files(self, start: int, stop: int) -> np.ndarray:
        """These elements of the weights, which are in the model's files; zeros between parameters."""
        assert self._pool.files is not None
        values = np.zeros(stop - start, self._dtypes[Part.WEIGHTS])
        region, first = state_name("file", Part.WEIGHTS, self._unit), start - self.layout.files_start
        label = f"{Part.WEIGHTS.label} of {self._model.units[self._unit].name}"
        self._pool.files.read(region, first * values.itemsize, values.view(np.uint8), label)
        return values

    def _name(self, part: Part, tier: Tier | None = None) -> str:
        """The buffer of a part in a tier; by default where it is."""
        tier = self._tiers[part] if tier is None else tier
        return state_name("host" if tier == "file" else tier, part, self._unit)

    def _is_in_place(self, part: Part) -> bool:
        """Whether the part, without weights in files, is in host memory."""
        return self._tiers[part] in ("host", "file")

    def _room(self, part: Part, start: int, stop: int) -> np.ndarray:
        """Memory for elements [start, stop) of a part that are about to be written: in place in host memory, or new."""
        return self.read(part, start, stop) if self._is_in_place(part) else np.empty(stop - start, self._dtypes[part])


# Bytes of a buffer in any tier, between steps -------------------------------------------------------------------------


def _bytes_of(pool: Pool, name: str, first: int, last: int, out: np.ndarray | None = None) -> np.ndarray:
    """Bytes [first, last) of a buffer: in place in host memory, else a copy, in `out` if given."""
    tier = pool.buffers[name].tier
    if tier == "host":
        return pool.memory(name)[first:last].numpy()
    copy = np.empty(last - first, np.uint8) if out is None else out
    if tier == "disk":
        pool.disk.read(name, copy, first)
    else:
        task = Errand(f"copy of {name}", reads=(Access(name, first, last, Scratch(name)),))
        pool.run(task, lambda lease: torch.from_numpy(copy).copy_(lease[name][first:last]))
    return copy


def _put(pool: Pool, name: str, first: int, values: np.ndarray) -> None:
    """Set bytes of a buffer from byte `first` on."""
    tier, last = pool.buffers[name].tier, first + values.size
    if tier == "host":
        memory = pool.memory(name)[first:last].numpy()
        if memory.ctypes.data != values.ctypes.data:  # it may have been written in place
            memory[:] = values
    elif tier == "disk":
        _put_on_disk(pool, name, first, values)
    else:
        task = Errand(f"copy of {name}", writes=(Access(name, first, last, Scratch(name)),))
        pool.run(task, lambda lease: lease[name][first:last].copy_(torch.from_numpy(values)))


def _put_on_disk(pool: Pool, region: str, first: int, values: np.ndarray) -> None:
    """Write whole grains; those at the ends are read first, and their other bytes stay as they are."""
    pool.unsaved.save()  # or what a failed write has left torn could not be read
    start, stop = pool.disk.around(region, first, first + values.size)
    if stop - start > values.size:
        grains = np.empty(stop - start, np.uint8)
        for begin, end in {pool.disk.around(region, at, at + 1) for at in (first, first + values.size - 1)}:
            pool.disk.read(region, grains[begin - start : end - start], begin)
        grains[first - start : first - start + values.size] = values
        values = grains
    try:
        pool.disk.write(region, values, start)
    except BaseException:
        pool.unsaved.keep(region, values.copy(), start)  # the caller may change them before they are written again
        raise
