"""(ModelSpec, Numerics, Policy, Work) -> Schedule. The training algorithm, written once, as data.

Layer-major order: for each unit all micro-batches run before the next unit; in reverse order in a step's forward pass,
in order in the loss and backward pass. With *rounds* (`Policy.micro_batches_per_round`) the micro-batches of one round
go through all units before those of the next, which keeps the order of terms in each sum. A *visit* is one unit's turn
on the compute stream. Copies come as early in program order as their slot allows, so that streams can run ahead; waits
are derived later from the declared ranges (`deps`).

Contents have versions: `w3` are the weights that this step computes with. If updates of the last step are pending, the
step starts from `w3.old`, and `UPDATE u3` turns it into `w3`; a unit that is updated during the backward pass ends as
`w3.new`. A partial gradient is `g3~2` (two terms summed), and becomes `g3` with the last term.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache, partial

from megatrain.errors import PlanError
from megatrain.schedule.contents import Scratch, TapGradient, Weights
from megatrain.schedule.deps import derive_waits
from megatrain.schedule.ops import Access, Buffer, Op, Schedule, Use
from megatrain.schedule.passes.collectives import Collectives, refuse_what_ranks_lack
from megatrain.schedule.passes.disk_staging import Staged, stage
from megatrain.schedule.passes.gradients import Gradients
from megatrain.schedule.passes.pinned_staging import PinnedStaging
from megatrain.schedule.passes.prefetch import Prefetch, Visit
from megatrain.schedule.passes.recompute import Activations, Recomputation, workspace_name
from megatrain.schedule.passes.side_values import SideValues
from megatrain.schedule.passes.state_buffers import (
    Pending,
    StateBuffers,
    fills_slot,
    reads_files,
    state_name,
    whole_name,
)
from megatrain.schedule.passes.updates import Updates, with_early_reads
from megatrain.schedule.passes.weight_slots import WeightSlots
from megatrain.schedule.passes.workspace import backward_nbytes, beside_nbytes, input_nbytes, loss_nbytes
from megatrain.spec import ModelSpec, Numerics, Part, Policy, Work
from megatrain.spec.layout import Layout, layout_of


def build_step(
    model: ModelSpec,
    numerics: Numerics,
    policy: Policy,
    work: Work,
    pending: Pending = "none",
    *,
    rank: int = 0,
    most_pieces: int | None = None,
) -> Schedule:
    """A whole training step: forward, loss, backward, gradient copies, and updates where the policy puts them.

    rank: the rank whose schedule this is; `work` describes its own micro-batches. most_pieces: of a unit's state on the
    disk, for a schedule that is only replayed: larger ones than fit their slots take as long, and less to plan with.
    """
    builder = Builder(model, numerics, policy, work, pending, trains=True, rank=rank)
    builder.updates.most_pieces = most_pieces or builder.updates.most_pieces
    return builder.step()


def build_forward(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, *, rank: int = 0) -> Schedule:
    """Only the loss, for evaluation: no gradients, no kept activations. Updates must have been flushed."""
    return Builder(model, numerics, policy, work, "none", trains=False, rank=rank).forward()


def build_flush(model: ModelSpec, numerics: Numerics, policy: Policy, *, rank: int = 0) -> Schedule:
    """Only the pending updates, in unit order."""
    return Builder(model, numerics, policy, Work((1,)), "all", trains=True, rank=rank).flush()


def transient_buffers(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work) -> dict[str, Buffer]:
    """Name -> buffer of what `build_step` adds that exists only while compute needs it. Where nothing is offloaded, all
    that depends on the sizes of micro-batches and of loss chunks is in these."""
    builder = Builder(model, numerics, policy, work, "none", trains=True)
    _visits(builder)
    return {name: buffer for name, buffer in builder.buffers.items() if not buffer.arena}


def _loss_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, micro: int, *, trains: bool) -> int:
    return loss_nbytes(model, numerics, policy, work, micro, trains=trains) + beside_nbytes(numerics, policy)


class Builder:
    """Collects visits and the buffers they mention."""

    def __init__(
        self,
        model: ModelSpec,
        numerics: Numerics,
        policy: Policy,
        work: Work,
        pending: Pending,
        *,
        trains: bool,
        rank: int = 0,
    ) -> None:
        refuse_what_ranks_lack(policy, model.ranks)
        self.model, self.numerics, self.policy, self.work = model, numerics, policy, work
        self.pending, self.trains = pending, trains
        self.layouts: list[Layout] = [layout_of(unit) for unit in model.units]
        self.trained: list[Layout] = [layout.trained for layout in self.layouts]
        self.units = range(len(model.units))
        self.rounds = self._rounds() if trains else [range(work.micro_batches)]
        self.placements = policy.placements_of(model)
        self._weights_on_disk = any(placement.weights == "disk" for placement in self.placements)
        self.buffers: dict[str, Buffer] = {}
        self.collectives = Collectives(model.ranks, rank, self.buffers, policy.delivery == "shared")
        self.alive = Activations(model, numerics, policy, work, self.buffers, trains=trains)
        self.sides = SideValues(model, work, self.alive)
        self.staged: dict[str, Staged] = {}
        """Placeholder names of host memory for state on the disk."""
        on_drive: dict[str, tuple[Access, ...]] = {}
        self.pinned_staging = PinnedStaging(policy, on_drive)
        self.slots = WeightSlots(model, numerics, policy, self.layouts, self.buffers)
        self.gradients = Gradients(model, numerics, policy, work, self.buffers)
        self.order = [*(model.encoder if work.beyond_text else ()), *range(model.epilogue)]
        """The units before the epilogue, in order of the forward pass."""
        self._tapped = [unit for unit in model.tapped[1:] if model.has_backward(unit - 1)]
        """Units to the gradient of whose input the prologue adds."""
        self._place = {unit: place for place, unit in enumerate([*self.order, model.epilogue])}
        """Unit -> its first visit."""
        self.state = StateBuffers(model, numerics, policy, pending, self.buffers, self.staged, on_drive)
        self.updates = Updates(model, numerics, policy, self.buffers, self.gradients, self.state, rank)

    def _rounds(self) -> list[range]:
        """The micro-batches of each round."""
        count = self.work.micro_batches
        size = self.policy.micro_batches_per_round or count
        if self.policy.micro_batches_per_round and self.model.tied:
            what = "a tied head and embedding share a gradient, which rounds would sum in another order"
            raise PlanError(what, where="policy.micro_batches_per_round", fix="use 0")
        return [range(start, min(count, start + size)) for start in range(0, count, size)]

    # Whole schedules ------------------------------------------------------------------------------------------------

    def step(self) -> Schedule:
        return self._emit(_visits(self))

    def forward(self) -> Schedule:
        (micros,) = self.rounds
        return self._emit([*self._forward_visits(micros), self._loss_visit(micros)])

    def flush(self) -> Schedule:
        self.updates.streamed = frozenset()  # no pass of a device hides anything
        return self._emit([])

    def _emit(self, visits: list[Visit]) -> Schedule:
        fetched_fresh = frozenset[int]()
        if self.pending == "all":  # an update right before the first fetch brings the fresh weights to their slot
            on_disk = (u for u in self._place if fills_slot(self.layouts[u], self.policy, self.placements[u]))
            fetched_fresh = self.updates.streamed.union(on_disk)
        if self.policy.shares_memory:
            for visit in visits:
                visit.body = [*visit.compute, *visit.after]
        else:
            ready = self._ready if self.pending == "all" else lambda unit: 0
            update = partial(self.updates.ops, before="old", after="")
            Prefetch(self.slots, self.pinned_staging, ready, fetched_fresh, update).place(visits)
        for index, visit in enumerate(visits):
            _restore_early(visits[index - 1] if index else visit, visit)
        updates = [unit for unit in self.units if self.trained[unit].size] if self.pending == "all" else []
        due: dict[int, list[int]] = defaultdict(list)
        for unit in updates:
            if unit not in fetched_fresh:
                due[self._updated_at(unit)].append(unit)
        ops: list[Op] = []
        for index, visit in enumerate(visits):
            ops += [op for unit in due[index] for op in self.updates.ops(unit, "old", "")]
            ops += visit.ops()
        if not visits:
            ops = [op for unit in updates for op in self.updates.ops(unit, "old", "")]
        return self._finished(ops)

    def _finished(self, ops: Sequence[Op]) -> Schedule:
        names = tuple(unit.name for unit in self.model.units)
        whole = with_early_reads(self.collectives.among(self.alive.offloaded(ops, [*self.sides.offloaded.values()])))
        placed = stage(stage(whole, self.staged), self.pinned_staging.from_drive)
        return derive_waits(Schedule(tuple(placed), self.buffers, names))

    def _updated_at(self, unit: int) -> int:
        """The visit before which a pending update is placed: as early as possible, unless weights come from the disk or
        directions over the bus. Then what it reads there comes before what is fetched for the visit before, which waits
        for another update; but not earlier, since that is needed first. In shared memory its weights need a place until
        they are used."""
        place = self._place.get(unit, 0)
        if self.placements[unit].on_device:  # with several ranks, before they gather it
            return place if self.model.ranks == 1 else max(0, place - self.policy.layer_slots + 1)
        if not (self._weights_on_disk or self.updates.fetches_for(unit)):
            return 0
        if not self.policy.shares_memory:
            return max(0, place - 2)
        # The epilogue not before the prologue has left their common slot.
        earliest = self._place[0] + 1 if unit == self.model.epilogue else 0
        return max(earliest, place - self.policy.disk_staging_slots + 1)

    def _ready(self, unit: int) -> int:
        """The visit from which on weights with a pending update may be fetched."""
        on_disk = self.placements[unit].weights == "disk"
        return max(self._updated_at(unit), self._place.get(unit, 0) - 1 if on_disk else 0)

    # Compute --------------------------------------------------------------------------------------------------------

    def _forward_visits(self, micros: range) -> list[Visit]:
        """From the bottom up; the last round visits the prologue again if a tied head no longer finds it."""
        visits = [self._forward_visit(unit, micros) for unit in self.order]
        return [*visits, Visit(0)] if self.slots.again_for_head() else visits

    def _forward_visit(self, unit: int, micros: range) -> Visit:
        visit = Visit(unit)
        for micro in reversed(micros) if self.trains else micros:  # what was kept last is needed first
            reads = [self._weights(unit)] if self.layouts[unit].size else []
            writes = [self.alive.hidden(self.model.after(unit), micro)]
            reads += self._encoded(unit, micro)
            if self.model.is_first(unit):
                writes.append(self.alive.arguments(unit, micro))
            else:
                reads += [self.alive.hidden(unit, micro), self.alive.arguments(unit, micro)]
                reads += self.sides.used(unit, micro)
            writes += [*self.alive.left_by(unit, micro), *self.sides.made(unit, micro)]
            writes += self.alive.made(unit, micro)
            visit.compute.append(Op("FORWARD", "compute", unit, micro, reads=tuple(reads), writes=tuple(writes)))
        return visit

    def _encoded(self, unit: int, micro: int) -> list[Access]:
        """What the encoder has made of images, which the prologue reads."""
        if unit or not (self.model.encoders and self.work.beyond_text):
            return []
        return [self.alive.hidden(0, micro), *(self.alive.found_by(tapped, micro) for tapped in self.model.tapped[1:])]

    def _loss_visit(self, micros: range) -> Visit:
        unit = self.model.epilogue
        visit = Visit(unit, before=self._restored(unit, micros))
        for micro in micros:
            owners = [owner for owner in (unit, *((0,) if self.model.tied else ())) if self.layouts[owner].size]
            reads = [self.alive.hidden(unit, micro), *(self._weights(owner) for owner in owners)]
            nbytes = _loss_nbytes(self.model, self.numerics, self.policy, self.work, micro, trains=self.trains)
            writes = [self.alive.transient(Use.LOSS_WORKSPACE, "all", nbytes, Scratch("loss"))]
            reads += self.sides.used(unit, micro)
            if self.trains:
                writes += [self.alive.dhidden(unit, micro), *self.sides.backward(unit, micro)[1]]
                for owner in owners:
                    if self.trained[owner].size:
                        self.gradients.add(owner, reads, writes)
            visit.compute.append(Op("LOSS", "compute", unit, micro, reads=tuple(reads), writes=tuple(writes)))
        if self.trains:
            visit.after = self._gradient_out(unit)
        return visit

    def _backward_visits(self, micros: range) -> list[Visit]:
        """From the top down, each after the visits that recompute dropped inputs."""
        visits = []
        for unit in filter(self.model.has_backward, reversed(self.order)):
            visits += [self._recomputing_visit(steps) for steps in self.alive.recomputations(unit, micros)]
            visits.append(self._backward_visit(unit, micros))
        if not self.work.beyond_text:
            trained = [unit for unit in self.model.encoder if self.trained[unit].size]
            visits += [_without_images(self, unit, micros) for unit in reversed(trained)]
        return visits

    def _recomputing_visit(self, steps: Sequence[Recomputation]) -> Visit:
        """The forward of one layer again, to recompute the input of the layer above."""
        unit = steps[0].layer
        visit = Visit(unit)
        for step in steps:
            reads = [self._weights(unit)] if self.layouts[unit].size else []
            reads += [step.source, self.alive.arguments(unit, step.micro), *self.sides.used(unit, step.micro)]
            writes = (step.target, *self.alive.made(unit, step.micro, recomputes=True))
            visit.compute.append(Op("FORWARD", "compute", unit, step.micro, reads=tuple(reads), writes=writes))
        return visit

    def _backward_visit(self, unit: int, micros: range) -> Visit:
        visit, name = Visit(unit, reads=self.layouts[unit].size > 0), workspace_name(self.model, unit)
        is_layer, encoded = not self.model.is_first(unit), bool(self._encoded(unit, micros[0]))
        visit.before = self._restored(unit, micros)
        nbytes = cache(partial(backward_nbytes, self.model, self.numerics, self.policy, self.work, unit))
        for micro in micros:
            above = self.alive.dhidden(self.model.after(unit), micro)
            reads = [above, *([self._weights(unit)] if visit.reads else [])]
            gradients, writes = self.sides.backward(unit, micro)
            reads += gradients
            if encoded:
                reads += [self.alive.found_by(tapped, micro) for tapped in self.model.tapped]
                writes += [self.alive.dhidden(unit, micro)] if self.model.has_backward(self.model.encoder[-1]) else []
                writes += [_tap(self, tapped, micro) for tapped in self._tapped]
            if is_layer:
                reads += [self.alive.arguments(unit, micro), *self.alive.taken_up_by(unit, micro)]
                reads += [_tap(self, unit, micro)] if unit in self._tapped else []
                reads += self.sides.used(unit, micro)
                if not self.alive.keeps_graph(unit, micro):
                    writes.append(self.alive.graph(unit, micro))
                writes.append(self.alive.dhidden(unit, micro))
            workspace = nbytes(self.work.tokens[micro]) + beside_nbytes(self.numerics, self.policy)
            writes.append(self.alive.transient(Use.BACKWARD_WORKSPACE, name, workspace, Scratch("partial")))
            if self.trained[unit].size:
                self.gradients.add(unit, reads, writes)
            visit.compute.append(Op("BACKWARD", "compute", unit, micro, reads=tuple(reads), writes=tuple(writes)))
        visit.after = self._gradient_out(unit)
        visit.last_first = is_layer and self.alive.keeps_graph(unit, micros[0])
        return visit

    # Weights --------------------------------------------------------------------------------------------------------

    def _weights(self, unit: int) -> Access:
        """All of a unit's weights as compute reads them; `Prefetch` fills in the slot."""
        if not self.policy.shares_memory:
            return self.slots.unplaced(unit)
        nbytes = self.layouts[unit].size * self.numerics.weight_nbytes
        is_read = reads_files(self.layouts[unit], self.placements[unit])
        name = whole_name(unit) if is_read else state_name("host", Part.WEIGHTS, unit)
        return Access(name, 0, nbytes, Weights(unit))

    # Gradients and updates ------------------------------------------------------------------------------------------

    def _restored(self, unit: int, micros: range) -> list[Op]:
        """Copy back the sum that earlier rounds began."""
        return [] if micros == self.rounds[0] else self.gradients.restore_partial(unit)

    def _gradient_out(self, unit: int) -> list[Op]:
        """What follows a round's sum, which is set aside, or a complete gradient: its copies, norm, and update if not
        deferred."""
        if not self.trained[unit].size:
            return []
        if not self.gradients.is_whole(unit):
            return self.gradients.save_partial(unit)
        return self.updates.gradient_out(unit)


def _visits(builder: Builder) -> list[Visit]:
    """The visits of a step, without copies of weights."""
    visits: list[Visit] = []
    for number, micros in enumerate(builder.rounds):
        builder.alive.round = number
        visits += [*builder._forward_visits(micros), builder._loss_visit(micros), *builder._backward_visits(micros)]
    return visits


def _tap(builder: Builder, unit: int, micro: int) -> Access:
    """What the prologue adds to the gradient of the input of an encoder's layer."""
    nbytes = input_nbytes(builder.model, builder.numerics, builder.work, unit, micro)
    return builder.alive.transient(Use.SIDE_GRADIENTS, f"encoder.{unit}.{micro}", nbytes, TapGradient(unit, micro))


def _without_images(builder: Builder, unit: int, micros: range) -> Visit:
    """The backward of a trained unit of an encoder in a step of text: its parameters have no gradient, which the update
    is told, and its weights are not needed."""
    visit = Visit(unit, reads=False, before=builder._restored(unit, micros))
    for micro in micros:
        reads, writes = list[Access](), list[Access]()
        builder.gradients.add(unit, reads, writes)
        visit.compute.append(Op("BACKWARD", "compute", unit, micro, reads=tuple(reads), writes=tuple(writes)))
    visit.after = builder._gradient_out(unit)
    return visit


def _restore_early(before: Visit, visit: Visit) -> None:
    """Move the copies that restore a sum before the previous visit, unless something leaves the slot then."""
    into = [op.writes[0] for op in visit.before]
    leaves = [read for op in before.after for read in op.reads[:1]]
    at = visit if any(one.overlaps(other) for one in into for other in leaves) else before
    fetched = sum(behind == 0 for behind, _ in at.fetches)
    at.fetches[fetched:fetched] = [(0, op) for op in visit.before]
