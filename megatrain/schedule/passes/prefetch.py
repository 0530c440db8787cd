"""Where each visit finds its unit's weights, and when they are copied there: slots, prefetch order, read-ahead.

A unit passes through a *slot* whole: parameters are views at fixed offsets of one buffer, so nothing fragments and no
model code knows. Of several slots the one whose content is needed again last is overwritten (Belady 1966). With two
slots for layers, each layer is fetched while the one before computes.

With `Policy.read_ahead_nbytes` there is one slot for all, and a ring of shards in front of it. While a layer
computes, the first shards of the next one come into the *read-ahead*, and a PLACE on the compute stream copies each
to its place in the slot when that is free. The others are fetched straight into the slot, each as soon as its place
is given up: at the end of the visit, or, where there are gates, piece by piece within its last call (`phases`). All
of it is declared ranges, so that waits, proofs, replay and traces need no rule for it but the price of a PLACE.

Left out: phases (`phases`), and what is on the way from further away (`disk_staging`, `pinned_staging`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megatrain.schedule.contents import Content, Weights
from megatrain.schedule.ops import Access, Buffer, Op
from megatrain.schedule.passes.phases import Arrival, gated
from megatrain.spec import ModelSpec, Numerics, Policy
from megatrain.spec.layout import Layout, Shard

if TYPE_CHECKING:
    from megatrain.schedule.passes.pinned_staging import Slabs


AHEAD = "device/weights/ahead"
"""The read-ahead: shards lie in it one behind the other, in the order in which their unit uses them."""

Position = tuple[int, int]
"""A visit, and how many of its ops stand before."""


@dataclass(slots=True)
class Visit:
    """One unit's turn on the compute stream, with the ops that follow its compute."""

    unit: int
    compute: list[Op] = field(default_factory=list)
    after: list[Op] = field(default_factory=list)
    reads: bool = True
    """Whether it needs the unit's weights."""
    last_first: bool = False
    """Whether it uses the weights in reverse: a backward pass through a kept graph."""
    slot: str = ""
    body: list[Op] = field(default_factory=list)
    """Its ops as they are emitted, phases and PLACEs among them."""
    fetches: list[tuple[int, Op]] = field(default_factory=list)
    """Fetches, for whatever visit, that stand among its ops: behind so many of them."""

    def ops(self) -> list[Op]:
        found: list[Op] = []
        done = 0
        for behind, fetch in self.fetches:
            found += [*self.body[done:behind], fetch]
            done = behind
        return [*found, *self.body[done:]]


class Fetches:
    """Gives the visits of one schedule their slots, their fetches and their phases.

    ready: unit -> the visit in front of which the last step's update of it stands, and behind which it may be fetched.
    """

    def __init__(self, slots: Slots, slabs: Slabs, ready: Callable[[int], int]) -> None:
        self._model, self._layouts = slots.model, slots.layouts
        self._numerics, self._policy = slots.numerics, slots.policy
        self._slots, self._slabs, self._ready, self._buffers = slots, slabs, ready, slots.buffers
        self._visits: list[Visit] = []
        self._uses: dict[int, list[int]] = {}
        """Unit -> the visits that use its weights."""
        self._last_visit: dict[str, int] = {}
        self._earliest: Position = (0, 0)
        """Fetches keep the order of the visits: one that has to wait for the update of a late unit must not stand
        before those of earlier units in the queue of the fetch stream."""
        self._in_ahead: list[tuple[int, int, Position]] = []
        """Bytes [start, stop) of the read-ahead, and where they have been placed."""

    def place(self, visits: list[Visit], resident: dict[str, int]) -> None:
        """Fill in `slot`, `body` and `fetches` of each visit. resident: slot -> the unit that is in it for good.

        The slot whose content is needed again last is overwritten, so the layers around the turn from forward to
        backward are not fetched twice; of several such slots, the one left longest ago, so that the copy overlaps the
        visit in between.
        """
        self._visits = visits
        for index, visit in enumerate(visits):
            if visit.reads:
                self._uses.setdefault(visit.unit, []).append(index)
            if self._model.tied and visit.unit == self._model.epilogue:
                self._uses[0].append(index)
        content = dict(resident)
        for index, visit in enumerate(visits):
            if self._model.tied and visit.unit == self._model.epilogue:
                self._last_visit[self._slots.of(0)[0]] = index
            if not (visit.reads and self._layouts[visit.unit].size):
                visit.body = [*(self._with_slots(op, visit) for op in visit.compute), *visit.after]
                continue
            slots = self._slots.of(visit.unit)
            held = [slot for slot in slots if content.get(slot) == visit.unit]
            visit.slot = held[0] if held else max(slots, key=lambda slot: self._worth(slot, content, index))
            visit.compute = [self._with_slots(op, visit) for op in visit.compute]
            placed: dict[int, Op] = {}
            if not held:
                self._earliest = max(self._earliest, (self._ready(visit.unit), 0))
                placed = self._fetch(visit)
                content = {slot: unit for slot, unit in content.items() if slot not in self._slots.over(visit.slot)}
                content[visit.slot] = visit.unit
            visit.body = self._body(index, arrives=not held, placed=placed)
            self._note_placed(index)
            self._last_visit[visit.slot] = index

    def _worth(self, slot: str, content: dict[str, int], now: int) -> tuple[float, int]:
        """The larger, the sooner the slot is overwritten: its content's next use, then how long ago it was left."""
        unit = content.get(slot)
        uses = self._uses[unit] if unit is not None else []
        return next((visit for visit in uses if visit > now), float("inf")), -self._last_visit.get(slot, -1)

    def _with_slots(self, op: Op, visit: Visit) -> Op:
        """The op with the names of slots, in place of units (`?3`)."""
        if not any(access.buffer[0] == "?" for access in op.reads):
            return op
        reads = []
        for access in op.reads:
            if access.buffer[0] == "?":
                owner = int(access.buffer[1:])
                slot = visit.slot if owner == visit.unit else self._slots.of(owner)[0]
                access = self._slots.access(slot, access.start, access.stop, access.content)
            reads.append(access)
        return Op(op.kind, op.stream, op.unit, op.micro, op.shard, tuple(reads), op.writes, op.share)

    # Fetches --------------------------------------------------------------------------------------------------------

    def _fetch(self, visit: Visit) -> dict[int, Op]:
        """Put the fetches of a visit where they belong, in the order in which it uses its shards as far as places are
        free. Returns a PLACE for each shard that comes through the read-ahead, by its index."""
        order = list(self._shards(visit)[:: -1 if visit.last_first else 1])
        placed: dict[int, Op] = {}
        start = 0
        while len(placed) < len(order) and self._reads_ahead(visit):
            shard = order[len(placed)]
            there = self._access(visit, shard)
            stop = start + there.stop - there.start
            here = max(self._earliest, self._placed_by(start, stop))
            if stop > self._policy.read_ahead_nbytes or here >= max(self._earliest, self._free_from(visit, there)):
                break
            ahead = replace(there, buffer=AHEAD, start=start, stop=stop)
            self._put(visit, shard, ahead, here)
            placed[shard.index] = Op("PLACE", "compute", visit.unit, shard=shard.index, reads=(ahead,), writes=(there,))
            start = stop
        if placed:
            known = self._buffers.get(AHEAD)
            nbytes = max(start, known.nbytes if known else 0)
            self._buffers[AHEAD] = Buffer(AHEAD, "device", nbytes, "weights")
        for shard in self._as_given_up(visit, order[len(placed) :]):
            there = self._access(visit, shard)
            self._put(visit, shard, there, self._free_from(visit, there))
        return placed

    def _as_given_up(self, visit: Visit, order: list[Shard]) -> list[Shard]:
        """In which order the rest of a visit's shards are fetched, given that in which they are used.

        A backward pass gives up the last ones first, which the next layer's recomputation uses last. So its second half
        comes as it is given up, ahead of the first half, most of which is only given up when nothing computes.
        """
        free = [self._free_from(visit, self._access(visit, shard)) for shard in order]
        if free == sorted(free):
            return order
        half = len(order) // 2
        late = sorted(range(half, len(order)), key=lambda place: (free[place], place))
        return [*(order[place] for place in late), *order[:half]]

    def _put(self, visit: Visit, shard: Shard, target: Access, earliest: Position) -> None:
        self._earliest = max(self._earliest, earliest)
        start, size = shard.start * self._numerics.weight_nbytes, target.stop - target.start
        home = Access(f"host/hi/{visit.unit}", start, start + size, Weights(visit.unit))
        read = self._slabs.at("fetch", visit.unit, shard.index, home)
        op = Op("FETCH", "fetch", visit.unit, shard=shard.index, reads=(read,), writes=(target,))
        index, behind = self._earliest
        self._visits[index].fetches.append((behind, op))

    def _access(self, visit: Visit, shard: Shard) -> Access:
        """The place of a shard in the visit's slot."""
        size = self._numerics.weight_nbytes
        return self._slots.access(visit.slot, shard.start * size, shard.stop * size, Weights(visit.unit))

    def _reads_ahead(self, visit: Visit) -> bool:
        """Whether shards of this visit may come before its slot is free."""
        through = self._slots.in_ring and self._model.units[visit.unit].kind == "layer"
        over = self._slots.over(visit.slot)
        return through and visit.slot.startswith("device/weights/") and any(slot in self._last_visit for slot in over)

    def _free_from(self, visit: Visit, place: Access) -> Position:
        """Behind which op the visits before no longer need these bytes of the slot of this one."""
        before = (self._last_visit[slot] for slot in self._slots.over(visit.slot) if slot in self._last_visit)
        return max((self._left_by(index, place) for index in before), default=(0, 0))

    def _left_by(self, index: int, place: Access) -> Position:
        """Behind which op a visit no longer needs these bytes."""
        if not self._policy.gives_up_shards:
            return index + 1, 0
        body = self._visits[index].body
        uses = [i for i, op in enumerate(body) if op.stream == "compute" and _mentions(op, place.buffer)]
        last = next((i for i in reversed(uses) if any(map(place.overlaps, (*body[i].reads, *body[i].writes)))), -1)
        return (index + 1, 0) if uses and last == uses[-1] else (index, last + 1)

    def _placed_by(self, start: int, stop: int) -> Position:
        """Behind which op these bytes of the read-ahead are free."""
        return max((at for first, last, at in self._in_ahead if first < stop and start < last), default=(0, 0))

    def _note_placed(self, index: int) -> None:
        places = [(i, op.reads[0]) for i, op in enumerate(self._visits[index].body) if op.kind == "PLACE"]
        if places:
            self._in_ahead = [(read.start, read.stop, (index, i + 1)) for i, read in places]

    # Ops ------------------------------------------------------------------------------------------------------------

    def _body(self, index: int, *, arrives: bool, placed: dict[int, Op]) -> list[Op]:
        """The ops of a visit, in phases where the policy has gates at shards, each PLACE ahead of what needs it."""
        visit = self._visits[index]
        if not visit.compute:
            return []
        ops = [*visit.compute, *visit.after]
        arrival = Arrival(self._shards(visit), self._numerics.weight_nbytes, visit.last_first)
        if self._policy.gates != "unit":
            unit, gives_up = self._model.units[visit.unit], self._gives_up(index)
            ops = gated(unit, visit.compute, visit.after, arrival, arrives=arrives, gives_up=gives_up)
        waiting = [placed[shard.index] for shard in arrival.ordered if shard.index in placed]
        found: list[Op] = []
        done = 0
        for op in ops:
            in_first = op.kind == visit.compute[0].kind and op.micro == visit.compute[0].micro and op.shard >= 0
            due = max(done, op.shard + 1) if in_first else len(waiting)  # one shard more in each phase
            found += [*waiting[done:due], op]
            done = due
        return found

    def _gives_up(self, index: int) -> bool:
        """Whether the visit's last call gives up shards: others are to come into the slot next."""
        visit = self._visits[index]
        if not self._policy.gives_up_shards or self._model.units[visit.unit].kind != "layer":
            return False
        if self._numerics.mlp_chunk_tokens and visit.compute[-1].kind == "FORWARD":
            return False  # a chunk of tokens comes back to what the chunk before has used
        following = (each.unit for each in self._visits[index + 1 :] if each.reads and self._layouts[each.unit].size)
        over = (unit for unit in following if {*self._slots.of(unit)} & {*self._slots.over(visit.slot)})
        return next(over, visit.unit) != visit.unit  # a slot counts from its first `of` on

    def _shards(self, visit: Visit) -> tuple[Shard, ...]:
        """No larger than the read-ahead, where they are to come through it."""
        nbytes = self._policy.shard_nbytes
        if self._policy.read_ahead_nbytes and self._model.units[visit.unit].kind == "layer":
            nbytes = min(nbytes, self._policy.read_ahead_nbytes)
        return self._layouts[visit.unit].shards(max(1, nbytes // self._numerics.weight_nbytes))


def _mentions(op: Op, buffer: str) -> bool:
    return any(access.buffer == buffer for access in (*op.reads, *op.writes))


# Slots ----------------------------------------------------------------------------------------------------------------
#
# Where weights lie on the device while they pass through: slots by name, and the bytes that each stands for.
#
# Layers have slots of their own, and so have the ends: one for both, or, where the head is tied to the prologue and
# needs it, one each. A read-ahead (`Policy.read_ahead_nbytes`) is for those who are short of memory: then all of them
# lie in one buffer, the *ring*, as large as the largest, and each overwrites what lies where it comes. An embedding and
# a head are often larger than a layer, so the weights of a model take one unit and the read-ahead. What it costs is
# that the first layer waits for the embedding's end, the head for the top layer's, and the top layer is fetched twice.
#
#


RING = "device/weights/ring"


@dataclass
class Slots:
    """The slots of one schedule. Enters the buffers of those that are asked for into `buffers`."""

    model: ModelSpec
    numerics: Numerics
    policy: Policy
    layouts: Sequence[Layout]
    buffers: dict[str, Buffer]
    _spans: dict[str, tuple[str, int, int]] = field(default_factory=dict, init=False)
    """Slot -> its buffer, and its bytes [start, stop) there."""
    _named: dict[int, list[str]] = field(default_factory=dict, init=False)

    def of(self, unit: int) -> list[str]:
        """Names of the slots that a unit may use; what stays on the device has one that is its own."""
        if unit not in self._named:
            self._named[unit] = self._declared(unit)
        return self._named[unit]

    def _declared(self, unit: int) -> list[str]:
        if self._stays(unit):
            name = f"device/hi/{unit}"
            self._spans[name] = name, 0, self._nbytes(unit)
            return [name]
        if self.model.units[unit].kind == "layer":
            users = list(self.model.layers)
            names = [f"layer{k}" for k in range(min(self.policy.layer_slots, len(users)))]
        else:
            users = [unit] if self.model.tied else [0, self.model.epilogue]
            names = [self.model.units[unit].kind if self.model.tied else "ends"]
        nbytes = max(self._nbytes(user) for user in users if not self._stays(user))
        behind = self._nbytes(0) if self.again_for_head() and unit == self.model.epilogue else 0
        return [self._declare(f"device/weights/{name}", behind, nbytes) for name in names]

    @property
    def in_ring(self) -> bool:
        """Whether all of them lie in one buffer."""
        return self.policy.read_ahead_nbytes > 0

    def again_for_head(self) -> bool:
        """Whether the prologue, which a tied head needs, has made room for the layers by then."""
        return self.in_ring and self.model.tied and not self.policy.shares_memory and not self._stays(0)

    def access(self, slot: str, start: int, stop: int, content: Content) -> Access:
        """Bytes [start, stop) of a slot that has been asked for."""
        buffer, begin, _ = self._spans[slot]
        return Access(buffer, begin + start, begin + stop, content)

    def over(self, slot: str) -> list[str]:
        """The slots that share memory with one, itself among them."""
        buffer, start, stop = self._spans[slot]
        others = self._spans.items()
        return [name for name, (of, first, last) in others if of == buffer and first < stop and start < last]

    def _declare(self, slot: str, start: int, nbytes: int) -> str:
        buffer = RING if self.in_ring else slot
        self._spans[slot] = buffer, start, start + nbytes
        known = self.buffers.get(buffer)
        if known is None or known.nbytes < start + nbytes:
            self.buffers[buffer] = Buffer(buffer, "device", start + nbytes, "weights")
        return slot

    def _stays(self, unit: int) -> bool:
        return self.policy.home(unit).weights == "device"

    def _nbytes(self, unit: int) -> int:
        return self.layouts[unit].size * self.numerics.weight_nbytes
