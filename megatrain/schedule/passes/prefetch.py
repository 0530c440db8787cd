"""Prefetch: decides which slot the weights of each visit go to, and when they are fetched.

A *visit* is one unit's turn on the compute stream. Among several slots, the one whose content is needed again last is
overwritten (Belady, 1966). With two slots for layers, each layer is fetched while the one before computes; if that is
a backward visit that reloads offloaded inputs or outputs, its calls and the fetches take turns.

With `Policy.read_ahead_nbytes` there is one slot for all units, and a buffer of shards, the *read-ahead*. While a
layer computes, the first shards of the next arrive in the read-ahead, and a PLACE on the compute stream copies each
to its place in the slot when that is free. The other shards are fetched straight into the slot once their place is
given up: at the end of the visit, or, if compute waits for shards, piece by piece during a last backward (`phases`).
All this is declared ranges, so waits, proofs, replay and traces only need the price of a PLACE. The work is linear in
shards and visits.

The location of slots is decided in `weight_slots`; copies from further away are added by `disk_staging` and
`pinned_staging`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from megatrain.schedule.contents import Weights
from megatrain.schedule.ops import Access, Buffer, Op, Use, declare
from megatrain.schedule.passes.phases import Arrival, gated
from megatrain.schedule.passes.pinned_staging import PinnedStaging
from megatrain.schedule.passes.state_buffers import state_name, weight_shards
from megatrain.schedule.passes.weight_slots import IN_SLOT, WeightSlots
from megatrain.spec import Part, Tier
from megatrain.spec.layout import Shard

READ_AHEAD = "device/read-ahead"
"""Holds shards one after the other, in the order in which their unit uses them."""

Position = tuple[int, int]
"""(visit, number of its ops that come before)."""
START: Position = (0, 0)


@dataclass(slots=True)
class Visit:
    """One unit's turn on the compute stream, with the ops that follow its compute."""

    unit: int
    compute: list[Op] = field(default_factory=list)
    after: list[Op] = field(default_factory=list)
    before: list[Op] = field(default_factory=list)
    """Copies that bring back sums to which its compute adds."""
    reads: bool = True
    """Whether it needs the unit's weights."""
    last_first: bool = False
    """Whether it uses the weights in reverse order: a backward through a kept graph."""
    slot: str = ""
    body: list[Op] = field(default_factory=list)
    """Its ops as emitted, including phases and PLACEs."""
    fetches: list[tuple[int, Op]] = field(default_factory=list)
    """(number of its ops before, fetch) of the fetches, for any visit, among its ops."""

    def ops(self) -> list[Op]:
        ordered: list[Op] = []
        done = 0
        for behind, fetch in self.fetches:
            ordered += [*self.body[done:behind], fetch]
            done = behind
        return [*ordered, *self.body[done:]]


class Prefetch:
    """Assigns slots, fetches and phases to the visits of one schedule.

    ready: unit -> the visit before which its last update is placed, and after which it may be fetched. streamed:
    units whose last update comes before their first fetch instead, as the ops that `update` returns
    (`streamed_updates`).
    """

    def __init__(
        self,
        slots: WeightSlots,
        pinned_staging: PinnedStaging,
        ready: Callable[[int], int],
        streamed: Iterable[int] = (),
        update: Callable[..., list[Op]] = lambda unit, place: [],
    ) -> None:
        self._model, self._layouts = slots.model, slots.layouts
        self._numerics, self._policy = slots.numerics, slots.policy
        self._slots, self._pinned_staging, self._ready = slots, pinned_staging, ready
        self._streamed, self._update = {*streamed}, update
        self._reloads = slots.policy.offloads_in(slots.model)
        self._visits: list[Visit] = []
        self._uses: dict[int, list[int]] = defaultdict(list)
        """Unit -> the visits that use its weights."""
        self._holds: dict[str, int] = {}
        """Slot -> the unit in it."""
        self._last_visit: dict[str, int] = {}
        """Slot -> the last visit that used it."""
        self._earliest = START
        """Fetches keep the order of visits: one that waits for a late unit's update must not block earlier units in the
        fetch stream's queue."""
        self._in_ahead: list[tuple[int, int, Position]] = []
        """Bytes [start, stop) of the read-ahead in order, and the position of their PLACE."""

    def place(self, visits: list[Visit]) -> None:
        """Fill in `slot`, `body` and `fetches` of each visit.

        The slot whose content is needed again last is overwritten, so the layers around the turn from forward to
        backward are not fetched twice; among equals the one unused longest, so that the copy overlaps the visit in
        between.
        """
        self._visits = visits
        resident = [unit for unit in range(len(self._layouts)) if self._slots.updated_there(unit)]
        self._holds = {self._slots.of(unit)[0]: unit for unit in resident}
        for index, visit in enumerate(visits):
            if visit.reads:
                self._uses[visit.unit].append(index)
            if self._is_tied_head(visit):
                self._uses[0].append(index)
        for index, visit in enumerate(visits):
            if self._is_tied_head(visit):
                self._last_visit[self._slots.of(0)[0]] = index
            if visit.reads and self._layouts[visit.unit].size:
                self._place(index, visit)
            else:
                visit.body = [*(self._with_slots(op, visit) for op in visit.compute), *visit.after]

    def _is_tied_head(self, visit: Visit) -> bool:
        return self._model.tied and visit.unit == self._model.epilogue

    def _place(self, index: int, visit: Visit) -> None:
        slots = self._slots.of(visit.unit)
        held = [slot for slot in slots if self._holds.get(slot) == visit.unit]
        visit.slot = held[0] if held else max(slots, key=lambda slot: self._worth(slot, index))
        visit.compute = [self._with_slots(op, visit) for op in visit.compute]
        placed: dict[int, Op] = {}
        if not held:
            self._earliest = max(self._earliest, (self._ready(visit.unit), 0))
            is_fresh = visit.unit in self._streamed and self._updated(visit)
            placed = {} if is_fresh else self._fetch(visit)
            for slot in self._slots.over(visit.slot):
                self._holds.pop(slot, None)
            self._holds[visit.slot] = visit.unit
        visit.body = self._body(index, arrives=not held, placed=placed)
        if placed:
            places = [(op.reads[0], (index, i + 1)) for i, op in enumerate(visit.body) if op.kind == "PLACE"]
            self._in_ahead = [(read.start, read.stop, at) for read, at in places]
        self._last_visit[visit.slot] = index

    def _worth(self, slot: str, now: int) -> tuple[float, int]:
        """The larger, the sooner the slot is overwritten: (next use of its content, time since its last use)."""
        uses = self._uses[self._holds[slot]] if slot in self._holds else []
        following = bisect_right(uses, now)
        return uses[following] if following < len(uses) else float("inf"), -self._last_visit.get(slot, -1)

    def _with_slots(self, op: Op, visit: Visit) -> Op:
        """The op with the slots of weights filled in."""
        if IN_SLOT not in [access.buffer for access in op.reads]:
            return op
        reads = tuple([self._in_slot(access, visit) if access.buffer == IN_SLOT else access for access in op.reads])
        return Op(op.kind, op.stream, op.unit, op.micro, op.shard, reads, op.writes, op.share)

    def _in_slot(self, access: Access, visit: Visit) -> Access:
        assert isinstance(access.content, Weights)
        owner = access.content.unit
        slot = visit.slot if owner == visit.unit else self._slots.of(owner)[0]
        return self._slots.access(slot, access.start, access.stop, access.content)

    # Fetches --------------------------------------------------------------------------------------------------------

    def _updated(self, visit: Visit) -> bool:
        """Place a unit's streamed update before its first visit; returns whether it leaves fresh weights in the slot.

        It does if there are several slots: with only one, the update would start when nothing computes. With
        several ranks each updates its part, and fetches that.
        """
        self._streamed.discard(visit.unit)
        place = None
        alone = self._layouts[visit.unit].ranks == 1
        if alone and (self._policy.layer_slots > 1 or self._slots.stays(visit.unit)):
            nbytes = self._layouts[visit.unit].size * self._numerics.weight_nbytes
            place = self._slots.access(visit.slot, 0, nbytes, Weights(visit.unit))
            self._earliest = max([self._earliest, *((index + 1, 0) for index in self._before(visit))])
        index, behind = self._earliest
        self._visits[index].fetches += [(behind, op) for op in self._update(visit.unit, place=place)]
        return place is not None

    def _fetch(self, visit: Visit) -> dict[int, Op]:
        """Place the fetches of a visit, in its order of use as far as slots are free.

        Returns index of a shard -> its PLACE, for shards that come through the read-ahead.
        """
        order = list(self._shards(visit)[:: -1 if visit.last_first else 1])
        places = {shard.index: self._access(visit, shard) for shard in order}
        free = self._free_from(visit, places)
        placed: dict[int, Op] = {}
        start = 0
        while len(placed) < len(order) and self._reads_ahead(visit):
            shard = order[len(placed)]
            place = places[shard.index]
            stop = start + place.stop - place.start
            here = max(self._earliest, self._placed_by(start, stop))
            if stop > self._policy.read_ahead_nbytes or here >= max(self._earliest, free[shard.index]):
                break
            ahead = place._replace(buffer=READ_AHEAD, start=start, stop=stop)
            self._put(visit, shard, ahead, here)
            placed[shard.index] = Op("PLACE", "compute", visit.unit, shard=shard.index, reads=(ahead,), writes=(place,))
            start = stop
        if placed:
            declare(self._slots.buffers, Buffer(READ_AHEAD, "device", start, Use.READ_AHEAD, part=Part.WEIGHTS))
        late = _as_given_up(order[len(placed) :], free)
        for number, shard in enumerate(late):
            position = self._among_reloads(visit, free[shard.index], number / len(late))
            self._put(visit, shard, places[shard.index], position)
        return placed

    def _among_reloads(self, visit: Visit, earliest: Position, share: float) -> Position:
        """Where a fetch for `visit` goes, no earlier than `earliest`. share: of the visit's fetches, those before it.

        If an earlier backward visit reloads offloaded inputs or outputs, fetches are spread among its calls: one that
        waits for the disk would block the reloads behind it in the queue of the stream.
        """
        index, behind = earliest
        beside = self._visits[index]
        is_alone = beside is visit or not beside.compute or beside.compute[0].kind != "BACKWARD"
        if behind or is_alone or not self._reloads:
            return earliest
        return index, int(share * len(beside.compute))

    def _put(self, visit: Visit, shard: Shard, target: Access, earliest: Position) -> None:
        self._earliest = max(self._earliest, earliest)
        ranks, weight_nbytes = self._layouts[visit.unit].ranks, self._numerics.weight_nbytes
        start, size = shard.start * weight_nbytes // ranks, (target.stop - target.start) // ranks  # of this rank's part
        tier: Tier = "device" if self._policy.placement(visit.unit).on_device else "host"
        home = Access(state_name(tier, Part.WEIGHTS, visit.unit), start, start + size, Weights(visit.unit))
        read = home if tier == "device" else self._pinned_staging.at(visit.unit, shard.index, home)
        op = Op("FETCH", "fetch", visit.unit, shard=shard.index, reads=(read,), writes=(target,))
        index, behind = self._earliest
        self._visits[index].fetches.append((behind, op))

    def _access(self, visit: Visit, shard: Shard) -> Access:
        """The place of a shard in the visit's slot."""
        size = self._numerics.weight_nbytes
        return self._slots.access(visit.slot, shard.start * size, shard.stop * size, Weights(visit.unit))

    def _reads_ahead(self, visit: Visit) -> bool:
        """Whether shards of this visit may arrive before its slot is free."""
        through = self._slots.in_one_buffer and self._model.units[visit.unit].kind == "layer"
        return through and not self._slots.stays(visit.unit) and bool(self._before(visit))

    def _before(self, visit: Visit) -> list[int]:
        """The last visits that used this one's slot memory."""
        return [self._last_visit[slot] for slot in self._slots.over(visit.slot) if slot in self._last_visit]

    def _free_from(self, visit: Visit, places: dict[int, Access]) -> dict[int, Position]:
        """Shard -> the op after which earlier visits no longer need its place in this slot."""
        before = self._before(visit)
        if not self._policy.gives_up_shards:
            free = max(((index + 1, 0) for index in before), default=START)
            return dict.fromkeys(places, free)
        last_uses = [_LastUses(index, self._visits[index].body) for index in before]
        return {
            index: max((earlier.of(place) for earlier in last_uses), default=START) for index, place in places.items()
        }

    def _placed_by(self, start: int, stop: int) -> Position:
        """The op after which these bytes of the read-ahead are free."""
        last = bisect_left(self._in_ahead, stop, key=lambda piece: piece[0]) - 1
        return self._in_ahead[last][2] if last >= 0 and start < self._in_ahead[last][1] else START

    # Ops ------------------------------------------------------------------------------------------------------------

    def _body(self, index: int, *, arrives: bool, placed: dict[int, Op]) -> list[Op]:
        """The ops of a visit, split into phases if compute waits for shards, each PLACE before what needs it."""
        visit = self._visits[index]
        if not visit.compute:
            return []
        ops = [*visit.compute, *visit.after]
        arrival = Arrival(self._shards(visit), self._numerics.weight_nbytes, visit.last_first)
        if self._policy.wait_for != "unit":
            unit, gives_up = self._model.units[visit.unit], self._gives_up(index)
            ops = gated(unit, visit.compute, visit.after, arrival, arrives=arrives, gives_up=gives_up)
        waiting = [placed[shard.index] for shard in arrival.ordered if shard.index in placed]
        body: list[Op] = []
        done = 0
        for op in ops:
            in_first = op.kind == visit.compute[0].kind and op.micro == visit.compute[0].micro and op.shard >= 0
            due = max(done, op.shard + 1) if in_first else len(waiting)  # one more shard in each phase
            body += [*waiting[done:due], op]
            done = due
        return body

    def _gives_up(self, index: int) -> bool:
        """Whether the visit's last call, a backward, gives up shards, because another unit will use the slot next."""
        visit = self._visits[index]
        is_backward = self._model.units[visit.unit].kind == "layer" and visit.compute[-1].kind == "BACKWARD"
        if not (self._policy.gives_up_shards and is_backward):
            return False
        following = (self._visits[i] for i in range(index + 1, len(self._visits)))
        units = (later.unit for later in following if later.reads and self._layouts[later.unit].size)
        over = (unit for unit in units if {*self._slots.of(unit)} & {*self._slots.over(visit.slot)})
        return next(over, visit.unit) != visit.unit  # a slot counts from its first `of` on

    def _shards(self, visit: Visit) -> tuple[Shard, ...]:
        unit, tier = visit.unit, self._policy.placement(visit.unit).weights
        return weight_shards(self._layouts[unit], self._model.units[unit].kind, self._numerics, self._policy, tier)


def _as_given_up(order: Sequence[Shard], free: dict[int, Position]) -> list[Shard]:
    """The order of fetches, given shards in order of use and when their places become free.

    A backward pass gives up the last shards first, which the next layer's recomputation uses last. So its second
    half is fetched as it is given up, before the first half, most of which is given up only at the end.
    """
    positions = [free[shard.index] for shard in order]
    if positions == sorted(positions):
        return list(order)
    half = len(order) // 2
    late = sorted(range(half, len(order)), key=lambda place: (positions[place], place))
    return [*(order[place] for place in late), *order[:half]]


class _LastUses:
    """Knows the last op of one visit that needs each byte of a buffer."""

    def __init__(self, visit: int, body: Sequence[Op]) -> None:
        self._visit, self._body = visit, body
        self._known: dict[str, tuple[list[int], list[int], int]] = {}
        """Buffer -> (offsets where uses begin or end, in order; the last op that uses the bytes after each, -1 for
        none; the last of all)."""

    def of(self, place: Access) -> Position:
        if place.buffer not in self._known:
            self._known[place.buffer] = self._look(place.buffer)
        points, last, end = self._known[place.buffer]
        first = max(0, bisect_right(points, place.start) - 1)
        index = max(last[first : bisect_left(points, place.stop)], default=-1)
        return (self._visit + 1, 0) if index == end >= 0 else (self._visit, index + 1)

    def _look(self, buffer: str) -> tuple[list[int], list[int], int]:
        """Paint uses over each other, the last on top."""
        uses = [
            (index, access)
            for index, op in enumerate(self._body)
            if op.stream == "compute"
            for access in (*op.reads, *op.writes)
            if access.buffer == buffer
        ]
        points = sorted({point for _, access in uses for point in (access.start, access.stop)})
        last = [-1] * len(points)
        for index, access in uses:
            start, stop = bisect_left(points, access.start), bisect_left(points, access.stop)
            last[start:stop] = [index] * (stop - start)
        return points, last, max(last, default=-1)
