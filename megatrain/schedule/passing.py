"""A forward whose weights pass through less device memory than a unit takes.

Where there is no backward pass (`Policy.forward_nbytes`), weights lie nowhere whole. They come in *blocks*, in the
order in which a call uses them, one behind the other into one buffer, and from its end to its begin again: a block is
a few small parameters, a large one, or rows of a matrix that the engine multiplies as they come. Calls are cut into
phases, one for each block that comes, and a phase reads what has come and is not done with; the next block lies over
what the longest ago was. A content says which bytes of a unit it is (`w3@4096`), since a place no longer tells, so
that `check` proves that each phase finds its own. Waits, replay, traces and races need no rule for it.

Micro-batches go through the model one by one, so that a unit's weights are used by one call and then gone; with all of
them in one layer before the next, the first call would have to leave the weights for the last one, whole. Weights come
once for each micro-batch, so fewer and larger ones are quicker. A head that comes by rows does so for each chunk of
tokens (`head_passes`). What stays on the device has a place of its own and is fetched whole.

Left out: what is read when, which the first look at a layer has recorded (`ParamSpec.held`, `by_rows`), and how a
matrix is used whose rows lie apart (`engine.passing`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatrain.errors import PlanError
from megatrain.layout import ALIGNMENT, Field, align, layout_of
from megatrain.schedule.ops import Access, Buffer, Op, passing_content
from megatrain.schedule.slabs import Slabs
from megatrain.schedule.slots import RING, Slots
from megatrain.spec import ModelSpec, ParamSpec, Policy, UnitSpec, Work

SMALL = 16
"""A parameter lies with one beside it that is so many times as large: by itself it would part what is free."""


@dataclass(frozen=True, slots=True)
class Block:
    """Elements [start, stop) of a unit's weights that lie together, and up to which of its call's blocks they stay."""

    unit: int
    start: int
    stop: int
    work: float = 0.0
    """Of the call's products, what is done when it has come."""
    apart: bool = False
    """Whether it is rows of a matrix whose other rows lie elsewhere."""
    until: int = 0

    @property
    def size(self) -> int:
        """Elements that it takes."""
        return align(self.stop - self.start)


@dataclass(frozen=True, slots=True)
class _Placed:
    start: int
    stop: int
    last: int
    """The phase, of all in the schedule, that reads it last."""


def head_passes(policy: Policy, work: Work) -> tuple[int, ...]:
    """For each micro-batch, how many chunks of tokens a head may have to go through."""
    return tuple(-(-tokens // policy.loss_chunk_tokens) for tokens in work.tokens)


# What comes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """A parameter among those of a call."""

    unit: int
    param: ParamSpec
    field: Field
    splits: bool
    stays: bool
    """To the end of the call, with all that come whole."""

    @property
    def work(self) -> float:
        return self.param.active * self.param.numel if len(self.param.shape) > 1 else 0.0


def blocks_of(model: ModelSpec, policy: Policy, units: Sequence[int], passes: int = 1) -> list[Block]:
    """What a call of the first of `units` uses, in the order in which it comes; the other is one that it borrows from.

    Shards are no larger than the policy says where a matrix may be cut into them: by rows, if the first look has seen
    it read once and so. A layer gives up what it has gone on from, and only if it is known when that is.
    """
    unit = model.units[units[0]]
    gives_up = unit.kind == "layer" and not policy.mlp_chunk_tokens and not _is_mixed(unit)
    parts = [part for each in units for part in _parts(model, policy, each, unit, stays=not gives_up)]
    if unit.kind != "layer":
        parts = sorted(parts, key=lambda part: part.splits)  # what stays comes first
    blocks: list[Block] = []
    of: dict[int, list[int]] = {}
    """Part -> the blocks that it lies in."""
    for index in _companions_first(parts):
        come = _with(blocks, parts[index], _most(policy))
        of[index] = list(range(len(come) - max(1, len(come) - len(blocks)), len(come)))
        blocks = come
    until = list(range(len(blocks)))
    for index, part in enumerate(parts):
        beside = range(index, min(len(parts), index + part.param.held + 1)) if part.param.held >= 0 else (index,)
        known = gives_up and part.param.held >= 0
        last = max(max(of[each]) for each in beside) if known else len(blocks) - 1
        for block in (block for each in beside for block in of[each]):
            until[block] = max(until[block], block if blocks[block].apart else last)
    return _in_passes([replace(block, until=last) for block, last in zip(blocks, until, strict=True)], passes)


def _with(blocks: list[Block], part: _Part, most: int) -> list[Block]:
    """The blocks, and those of one parameter more, which may lie with what comes before it."""
    start, stop = part.field.start, align(part.field.stop)
    if part.splits:
        rows = list(_rows(part.field, most))
        return [*blocks, *(Block(part.unit, *row, part.work / len(rows), apart=True) for row in rows)]
    last = blocks[-1] if blocks else None
    if last and not last.apart and (last.unit, last.stop) == (part.unit, start):
        size = stop - start
        ahead = SMALL * last.size <= size
        behind = SMALL * size <= last.size and part.param.held == 0  # else what is before it would stay with it
        if last.size + size <= most or part.stays or ahead or behind:
            return [*blocks[:-1], replace(last, stop=stop, work=last.work + part.work)]
    return [*blocks, Block(part.unit, start, stop, part.work)]


def _in_passes(blocks: list[Block], passes: int) -> list[Block]:
    """Where a head goes through its tokens in chunks, the rows of its matrices come again for each."""
    apart = [block for block in blocks if block.apart]
    if passes == 1 or not apart:
        return blocks
    found = [block for block in blocks if not block.apart]
    found = [replace(block, until=len(found) + passes * len(apart) - 1) for block in found]
    return [*found, *(replace(each, until=len(found) + k) for k, each in enumerate(apart * passes))]


def _parts(model: ModelSpec, policy: Policy, owner: int, user: UnitSpec, *, stays: bool) -> Iterator[_Part]:
    unit = model.units[owner]
    for param, field in zip(unit.params, layout_of(unit).fields, strict=True):
        if unit is user or param.name in user.borrows:
            yield _Part(owner, param, field, _splits(policy, user, param), stays)


def _splits(policy: Policy, user: UnitSpec, param: ParamSpec) -> bool:
    """Whether the rows of a parameter may lie apart."""
    known = param.by_rows and len(param.shape) in (2, 3) and policy.gates == "rows"
    again = user.kind == "layer" and (policy.mlp_chunk_tokens > 0 or _is_mixed(user))
    return known and not again and param.numel > _most(policy) and param.shape[0] > 1


def _is_mixed(unit: UnitSpec) -> bool:
    """Whether it is in part frozen: then parameters are not in order of use."""
    return any(param.trainable != unit.trains for param in unit.params)


def _companions_first(parts: Sequence[_Part]) -> list[int]:
    """The order in which parameters come: theirs, with what is read beside a matrix that comes by rows ahead of it."""
    found: list[int] = []
    for index, part in enumerate(parts):
        if part.splits:
            found += [each for each in range(index + 1, min(len(parts), index + part.param.held + 1))]
        found.append(index)
    return list(dict.fromkeys(found))


def _rows(field: Field, most: int) -> Iterator[tuple[int, int]]:
    """Blocks of whole rows of a matrix, of at most `most` elements each, or one row."""
    row = (field.stop - field.start) // field.shape[0]
    step = max(1, most // row) * row
    for start in range(field.start, field.stop, step):
        yield start, min(start + step, field.stop)


def _most(policy: Policy) -> int:
    """Elements of a shard."""
    return max(ALIGNMENT, policy.shard_nbytes // policy.weight_nbytes // ALIGNMENT * ALIGNMENT)


# Where it lies -------------------------------------------------------------------------------------------------------


class _Ring:
    """Gives blocks their places in so many bytes, one behind the other, in the order in which they come."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._head = nbytes, 0
        self._placed: list[_Placed] = []

    def place(self, nbytes: int, needed: int, last: int) -> tuple[int, list[_Placed]] | None:
        """Where a block begins that is there from the phase `needed` to `last`, and what has lain there; `None` where
        what is still needed then leaves no room."""
        start, turned = self._head, False
        while True:
            if start + nbytes > self._nbytes:
                if turned:
                    return None
                start, turned = 0, True
                continue
            over = [each for each in self._placed if each.start < start + nbytes and start < each.stop]
            if all(each.last < needed for each in over):
                break
            start = max(each.stop for each in over if each.last >= needed)
        self._head = start + nbytes
        self._placed = [each for each in self._placed if not (start <= each.start and each.stop <= self._head)]
        self._placed.append(_Placed(start, self._head, last))
        return start, over


Call = tuple[Op, list[Block]]


def _places(calls: Sequence[Call], nbytes: int, each: int) -> list[tuple[int, list[_Placed]]] | None:
    """Of each block in turn, its first byte and what has lain there; `None` where they do not find room."""
    ring, found, phase = _Ring(nbytes), [], 0
    for _, blocks in calls:
        for index, block in enumerate(blocks):
            place = ring.place(block.size * each, phase + index, phase + block.until)
            if place is None:
                return None
            found.append(place)
        phase += max(1, len(blocks))
    return found


def least_nbytes(calls: Sequence[Call], each: int) -> int:
    """Bytes that would do, and nearly the least: of `each` an element."""
    together, whole = 0, 1
    for _, blocks in calls:
        whole = max(whole, sum(block.size for block in blocks))
        for phase in range(len(blocks)):
            together = max(together, sum(block.size for block in blocks[: phase + 1] if block.until >= phase))
    below, enough = together // ALIGNMENT, together // ALIGNMENT
    while _places(calls, enough * ALIGNMENT * each, each) is None:
        below, enough = enough, min(2 * enough, max(enough + 1, 2 * whole // ALIGNMENT))
    while enough - below > 1:
        half = (below + enough) // 2
        if _places(calls, half * ALIGNMENT * each, each) is None:
            below = half
        else:
            enough = half
    return enough * ALIGNMENT * each


# Ops -----------------------------------------------------------------------------------------------------------------


class Passing:
    """Cuts the calls of a forward into phases and gives them their weights. Enters the buffer into that of `slots`.

    passes: for each micro-batch, how often a head that comes by rows does.
    """

    def __init__(self, slots: Slots, slabs: Slabs, passes: Sequence[int]) -> None:
        self._model, self._policy, self._slots, self._slabs = slots.model, slots.policy, slots, slabs
        self._passes = passes
        self._blocks: dict[tuple[int, int], list[Block]] = {}
        self._numbers: dict[tuple[int, int, int], int] = {}
        """Unit and elements of a copy -> its number."""
        self._whole: set[int] = set()
        """Units that stay on the device and have come."""

    def ops(self, calls: Sequence[Op]) -> list[Op]:
        """All ops of a forward, from its calls one micro-batch behind the other. Raises `PlanError` where the policy's
        bytes are too few."""
        each, policy = self._policy.weight_nbytes, self._policy
        cut = [(call, self._of(call)) for call in calls]
        places = _places(cut, policy.forward_nbytes, each)
        if places is None:
            least = least_nbytes(cut, each)
            places = _places(cut, least, each)  # also of more bytes than enough, some are cut up so that nothing fits
            if least > policy.forward_nbytes or places is None:
                what = f"{policy.forward_nbytes:,} bytes do not hold what is used together"
                fix = f"use {least:,} or more" + (", or policy.gates=rows" if policy.gates == "shard" else "")
                raise PlanError(what, where="policy.forward_nbytes", fix=fix)
        fetches: dict[int, list[Op]] = defaultdict(list)
        phases: list[Op] = []
        remaining, earliest, used = iter(places), 0, 0
        for call, blocks in cut:
            fetches[earliest] += self._resident(call)
            at = [next(remaining) for _ in blocks]
            pieces = [self._pieces(block, start) for block, (start, _) in zip(blocks, at, strict=True)]
            for (_, over), copies in zip(at, pieces, strict=True):
                for number, (place, home) in copies:
                    free = [old.last + 1 for old in over if old.start < place.stop and place.start < old.stop]
                    earliest = max([earliest, *free])
                    fetches[earliest].append(self._fetch(number, place, home))
                    used = max(used, place.stop)
            phases += self._phases(call, blocks, [[place for _, (place, _) in copies] for copies in pieces])
        if used:
            known = self._slots.buffers.get(RING)
            used = max(used, known.nbytes if known else 0)
            self._slots.buffers[RING] = Buffer(RING, "device", used, "weights")
        return [op for index, phase in enumerate(phases) for op in (*fetches[index], phase)]

    def _of(self, call: Op) -> list[Block]:
        passes = self._passes[call.micro] if call.kind == "LOSS" else 1
        if (call.unit, passes) not in self._blocks:
            units = [unit for unit in _users(call) if self._policy.home(unit).weights != "device"]
            units = sorted(units, key=lambda unit: unit != call.unit)
            found: list[Block] = []
            if units:
                found = blocks_of(self._model, self._policy, units, passes)
            self._blocks[call.unit, passes] = found
        return self._blocks[call.unit, passes]

    def _pieces(self, block: Block, start: int) -> list[tuple[int, tuple[Access, Access]]]:
        """Of each copy that brings a block to byte `start`: a number, the place and the home of what it brings."""
        each, step, found = self._policy.weight_nbytes, _most(self._policy), []
        for first in range(block.start, block.stop, step):
            stop = min(first + step, block.stop)
            begin = start + (first - block.start) * each
            size = (stop - first) * each
            place = Access(RING, begin, begin + size, passing_content(block.unit, first * each))
            home = Access(f"host/hi/{block.unit}", first * each, first * each + size, f"w{block.unit}")
            number = self._numbers.setdefault((block.unit, first, stop), len(self._numbers))
            found.append((number, (place, home)))
        return found

    def _fetch(self, number: int, place: Access, home: Access) -> Op:
        unit = int(home.buffer.rpartition("/")[2])
        read = self._slabs.at("fetch", unit, number, home)
        return Op("FETCH", "fetch", unit, shard=number, reads=(read,), writes=(place,))

    def _resident(self, call: Op) -> list[Op]:
        """What brings the weights of units that stay on the device, once."""
        found, each = [], self._policy.weight_nbytes
        for unit in _users(call):
            home = self._policy.home(unit)
            if home.weights != "device" or home.on_device or unit in self._whole:
                continue
            self._whole.add(unit)
            for shard in layout_of(self._model.units[unit]).shards(_most(self._policy)):
                start, stop = shard.start * each, shard.stop * each
                place = self._slots.access(self._slots.of(unit)[0], start, stop, f"w{unit}")
                found.append(self._fetch(shard.index, place, Access(f"host/hi/{unit}", start, stop, f"w{unit}")))
        return found

    def _phases(self, call: Op, blocks: Sequence[Block], places: Sequence[Sequence[Access]]) -> list[Op]:
        """One for each block that comes, which reads what has come and is not done with."""
        reads = [access for access in call.reads if not access.buffer.startswith("?")]
        for access in call.reads:
            unit = int(access.buffer[1:]) if access.buffer.startswith("?") else -1
            if unit >= 0 and self._policy.home(unit).weights == "device":
                slot = self._slots.of(unit)[0]
                reads.append(self._slots.access(slot, access.start, access.stop, access.content))
        if not blocks:
            return [replace(call, reads=tuple(reads))]
        total, found = sum(block.work for block in blocks), []
        for phase, block in enumerate(blocks):
            here = [place for i in range(phase + 1) if blocks[i].until >= phase for place in places[i]]
            writes = call.writes if phase == len(blocks) - 1 else ()
            share = block.work / total if total else 1 / len(blocks)
            found.append(replace(call, shard=phase, reads=(*reads, *here), writes=writes, share=share))
        return found


def _users(call: Op) -> list[int]:
    """Units whose weights a call reads."""
    return [int(access.buffer[1:]) for access in call.reads if access.buffer.startswith("?")]
