"""`Streamer`: executes each kind of op of a training step.

The streamer gives every op of a schedule its meaning, in terms of a ported model, leased memory and activations. It
changes no state itself: gradients go to a sink. Randomness inside layers (dropout) is a function of (seed, step, unit,
micro-batch) alone, so a recomputed layer draws what it drew before, and no schedule can change what is drawn.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatrain.device import Device
from megatrain.dist import ALONE, World
from megatrain.dist.world import refuse_unlike
from megatrain.engine.autograd import GradientDestination, GradientsInPlace
from megatrain.engine.batch import MicroBatch, count_targets, for_model, model_inputs, targets_of
from megatrain.engine.chunked_loss import (
    COUNT,
    Chunks,
    Found,
    LossFn,
    StepResult,
    differentiate,
    divisor_of,
    measure,
    own_entries,
)
from megatrain.engine.executor import Executor
from megatrain.engine.gradient_sums import GradSink, UnitSum, of_parameters, send_to_sum
from megatrain.engine.phased_call import OPEN, Phases, calls_of, undisturbed, unwinding
from megatrain.engine.step_state import DTYPE_OF_NBYTES, Current, Graph, access_of, pack, part_of, unpack
from megatrain.engine.sync_free_inputs import HostAnswers
from megatrain.engine.weights import Bound, UnitBinder, names_weights, place_of
from megatrain.errors import LossError, NonFinite, RankError
from megatrain.memory import Held, Pool
from megatrain.model import Answering, Keeping, PortedModel, Sides
from megatrain.schedule import CALLS, Op, Schedule, Timeline
from megatrain.schedule.contents import PART_OF, Gradient, Hidden, LayerGraph, Saved, Weights
from megatrain.schedule.passes.streamed_updates import piece_of
from megatrain.spec import Numerics, Policy, Precision
from megatrain.spec.layout import layout_of

NOTHING = "nothing was updated; lower the learning rate, or inspect the batch"
PERHAPS = "units that came before have been updated; start again from a saved model, or set max_grad_norm"
"""What is said of a step that is not finite: of ranks with updates during the backward pass, each for itself."""

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Streamer:
    """Runs schedules of one model on one device, as one rank of `world`. `seed` decides everything random inside
    layers."""

    def __init__(
        self,
        ported: PortedModel,
        device: Device,
        pool: Pool,
        numerics: Numerics,
        policy: Policy,
        seed: int = 0,
        world: World = ALONE,
    ) -> None:
        self.ported, self.device, self.seed, self.world = ported, device, seed, world
        self.numerics, self.policy = numerics, policy
        self.spec = ported.structure
        self.dtype = DTYPES[numerics.precision]
        self._executor = Executor(device, pool, self._locate)
        self.timeline: Timeline | None = None
        """When the ops of the last schedule ran, if the device is timed."""
        self.region: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered around the ops of each schedule, and nothing else: what may be broken off from outside."""
        self._running: Schedule | None = None
        self._layouts = [layout_of(unit) for unit in self.spec.units]
        self._binders = [
            UnitBinder(unit, ported.prefix(index - 1) if unit.kind == "layer" else "")
            for index, unit in enumerate(self.spec.units)
        ]
        if numerics.mlp_chunk_tokens:
            _ = ported.parts  # found now, and not within a step
        ported.compute_on(device.torch_device)

    def run_schedule(
        self,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        sink: GradSink | None,
        number: int = 0,
        loss_fn: LossFn | None = None,
        router_weights: Sequence[float] | None = None,
    ) -> StepResult:
        """Execute a schedule; `number` is the step's, for randomness. Leaves the caller's random state as it was.

        micro_batches: this rank's; what is returned is of all ranks'. loss_fn: cross-entropy if not given.
        router_weights: per micro-batch, what its router auxiliary loss counts for in the step's loss, if not by its
        share of the divisor. Raises `NonFinite` when the loss is not finite, `LossError` for what is no loss, and
        whatever an op, the sink or the loss function raises.
        """
        self.world.at(f"step {number + 1:,}", self.doing)
        labels = [batch["labels"].cpu() for batch in micro_batches]
        how: dict[str, object] = {} if sink is None else {"step": number, "seed": self.seed, **sink.how}
        counts = self._counts(schedule, micro_batches, loss_fn, how)
        divisors, tokens = counts[self.world.rank].divisors, sum(each.targets for each in counts)
        all_divisors = self.world.dealt([each.divisors for each in counts])
        total = sum(all_divisors)
        if micro_batches and not total > 0:
            raise LossError("every micro-batch counts for nothing", where="divisor", fix="divide by more than 0")
        own = own_entries(loss_fn)
        seen = [for_model(batch, own) for batch in micro_batches]
        scale = 1.0 / (total or 1.0)
        routed = divisors if router_weights is None else [weight * total for weight in router_weights]
        now = Current(seen, labels, sink, number, scale, loss_fn, micro_batches, divisors, routed)
        if not self.device.shares_memory:
            staged = iter(self.device.staged([each for found in map(targets_of, labels) for each in found]))
            now.targets = list(zip(staged, staged, strict=True))
        self._execute(schedule, now)
        shares: tuple[float, ...] = ()
        if self.world.size > 1:
            micros = self._of_all_ranks(now)
            loss = _finite_sum([term for micro in micros for term in micro.terms], now)
            shares = tuple(math.fsum(micro.terms) * scale for micro in micros)
        else:
            micros, loss = _micros(now), _finite_loss(now)
        return StepResult(loss / (total or 1.0), tokens, *_reports(micros, all_divisors, scale), shares)

    # Other ranks ----------------------------------------------------------------------------------------------------

    def _counts(
        self,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        loss_fn: LossFn | None,
        how: Mapping[str, object],
    ) -> list[Counts]:
        """Of each rank. Raises `RankError` where their schedules would not meet, or they would not train alike."""

        def own() -> Counts:
            targets = sum(count_targets(batch) for batch in micro_batches)
            divisors = [divisor_of(loss_fn, batch) for batch in micro_batches]
            return Counts(targets, divisors, schedule.digest if self.world.size > 1 else "", how)

        found = [Counts(*each) for each in self.world.agree("a schedule", own)]
        if odd := [rank for rank, each in enumerate(found) if each.digest != found[0].digest]:
            what = f"the schedules of ranks 0 and {odd[0]} do not meet: their policies or their rounds differ"
            fix = "give all ranks one policy, and every round as many micro-batches of each"
            raise RankError(what, where="schedule", fix=fix)
        refuse_unlike("trains with", [each.how for each in found])
        return found

    def _of_all_ranks(self, now: Current) -> list[Micro]:
        """What is known of the micro-batches of all ranks, in their order. Raises `NonFinite`, the same on each."""
        largest = {unit: found.tolist() for unit, found in now.largest.items()}
        names = {} if now.sink is None else now.sink.not_finite
        mine: Any = ([tuple(each) for each in _micros(now)], list(largest.items()), list(names.items()))
        told = self.world.exchange("losses", mine)
        micros = [[Micro(*each) for each in own] for own, _, _ in told]
        fix = PERHAPS if self.policy.update == "during_backward" else NOTHING
        for rank, own in enumerate(micros):
            _finite_sum([term for micro in own for term in micro.terms], now, f" on rank {rank}", fix)
        heard = {unit: [dict(each)[unit] for _, each, _ in told] for unit in largest}
        for unit, by_owner in sorted(heard.items(), reverse=True):
            for rank, sent in enumerate(zip(*by_owner, strict=True)):
                if not all(map(math.isfinite, sent)):
                    named = dict.fromkeys(name for _, _, each in told for name in dict(each).get(unit, ()))
                    what = f"the gradient of rank {rank} is not finite{of_parameters(list(named))}"
                    where = self.spec.units[unit].name
                    raise NonFinite(what, where=where, fix=fix)
        return self.world.dealt(micros)

    def _gather(self, now: Current, op: Op, held: Held) -> None:
        """GATHER: a shard of weights, of what each rank has brought of it."""
        (own,), (whole,) = op.reads, op.writes
        self.world.gather(part_of(held, whole), part_of(held, own))

    def _barrier(self, now: Current, op: Op, held: Held) -> None:
        """BARRIER: all have updated their parts of a unit."""
        self.world.meet()

    def _reduce(self, now: Current, op: Op, held: Held) -> None:
        """REDUCE: this rank's part of a shard of a gradient, summed over ranks, in the dtype that crosses the bus."""
        (terms,), (own, *heard) = op.reads, op.writes
        target = part_of(held, own).view(DTYPE_OF_NBYTES[self.numerics.grad_nbytes])
        sent, *received = (part_of(held, each).view(torch.float32) for each in (terms, *heard))
        if op.stream == "shared":
            self.world.meet()
            received.insert(self.world.rank, sent)
            largest = self.world.reduce_there(target, received)
            self.world.meet()
        else:
            largest = self.device.landing(self.world.reduce(target, received[0], sent))
        before = now.largest.get(op.unit)
        now.largest[op.unit] = largest if before is None else torch.maximum(before, largest)

    def under_way(self) -> tuple[list[tuple[str, str, float]], float]:
        """(op, stream, seconds) of each stream that is at one, and the seconds since any began or ended."""
        now = time.monotonic()
        at = [(op, stream, now - since) for stream, (op, since) in list(self._executor.under_way.items())]
        return at, now - self._executor.moved

    def doing(self) -> str:
        """The op that has been under way for longest, in words."""
        ops, _ = self.under_way()
        op, stream, _ = max(ops, key=lambda each: each[2], default=("", "", 0.0))
        return f"{op} on {stream}" if op else ""

    def next_logits(self, schedule: Schedule, inputs: Mapping[str, Any], kept: int = 1) -> Tensor:
        """Execute a forward schedule on the arguments of a forward, `input_ids` int64[rows, length] among them.

        Returns the logits at the last `kept` positions (0 for all), float32[rows, positions, vocabulary], on the
        device, in memory of the caller's own stream. A cache among the arguments is filled by the layers as they run.
        """
        self.device.synchronize()  # the inputs may come from work that no op waits for
        now = Current([inputs], [], None, 0, 0.0, kept=kept)
        self.world.meet()  # what others have of the weights is as they leave it
        self._execute(schedule, now)
        self.world.meet()
        assert now.logits is not None
        found = now.logits.to(torch.float32, copy=True)  # the caller's; what ops have made is their stream's,
        self.device.synchronize()  # which takes that memory for the next ones without asking who reads it
        return found

    def _execute(self, schedule: Schedule, now: Current) -> None:
        """Walk the schedule. What surrounds the call (autocast, inference mode, random state) neither counts nor
        changes."""

        def perform(op: Op, held: Held, phases: Phases = OPEN) -> None:
            if op.kind in CALLS:  # between their phases other ops may run
                now.phases = phases
            with undisturbed(self.device.torch_device.type):
                ACTIONS[op.kind](self, now, op, held)

        def act(op: Op, held: Held) -> None:
            if id(op) in calls:
                calls[id(op)].turn(held)
            else:
                perform(op, held)
            for access in schedule.ended.get(id(op), ()):
                now.activations.let_go(access)

        if schedule is not self._running:
            self.device.tidy()  # what other work has freed will not fit this as well
        self._running = schedule
        calls = calls_of(schedule, self._layouts, self.device.alongside, perform)
        exact = self.device.exact_float32() if self.numerics.precision == "fp32" else nullcontext()
        with exact, self.device.preserved_random_state(), self.region(), unwinding(calls):
            self.timeline = self._executor.walk(schedule, act)
        self._executor.pool.owes_nothing()

    # Disk -----------------------------------------------------------------------------------------------------------

    def _read(self, now: Current, op: Op, held: Held) -> None:
        self._executor.pool.read(op, held)

    def _write(self, now: Current, op: Op, held: Held) -> None:
        self._executor.pool.write(op, held)

    # Copies ---------------------------------------------------------------------------------------------------------

    def _copy(self, now: Current, op: Op, held: Held) -> None:
        """FETCH: a shard of weights to its slot, or ahead of it; PLACE: from there. GRAD: a shard of gradients home, in
        the dtype that crosses the bus, by way of a cast on the device. OFFLOAD and RELOAD: what a layer keeps, or a
        piece of its state, as it is.
        """
        if len(op.reads) > 1:
            self._executor.pool.overwrites(op)
            for read, write in zip(op.reads, op.writes, strict=True):
                part_of(held, write).copy_(part_of(held, read), non_blocking=True)
            return
        (read,), (write, *cast) = op.reads, op.writes
        source, target = part_of(held, read), part_of(held, write)
        if source.numel() > target.numel():
            source, target = source.view(torch.float32), target.view(torch.bfloat16)
        elif source.numel() < target.numel():
            source, target = source.view(torch.bfloat16), target.view(torch.float32)
        for between in cast:  # else the copy would make one, which no ledger knows
            source = part_of(held, between).view(target.dtype).copy_(source)
        target.copy_(source, non_blocking=True)

    def _pass(self, now: Current, op: Op, held: Held) -> None:
        self._executor.pool.copy(op, held)

    # Compute --------------------------------------------------------------------------------------------------------

    def _forward(self, now: Current, op: Op, held: Held) -> None:
        unit, micro = op.unit, op.micro
        alive = now.activations
        self._reseed(now, unit, micro)
        written = {access.content: access for access in op.writes}
        output = written[Hidden(unit + 1, micro)].buffer
        if unit == 0:
            inputs, answers = self._inputs(now, micro)
            weights = self._views(now, op, held, 0)
            with answers, self._waits_for_weights(now, op, held):
                alive.inputs[output], alive.calls[micro] = self.ported.prologue(weights, inputs)
            return
        hidden = self._input(now, op, held)
        saved = next((content for content in written if isinstance(content, Saved)), None)
        if LayerGraph(unit, micro) in written:
            alive.graphs[unit, micro], found, sides = self._grown(now, op, held, hidden)
            alive.inputs[output] = found.detach()
            alive.sides[unit, micro] = tuple(side.detach() for side in sides)
        elif saved:
            keeping = Keeping(saved.keep, self.spec.hidden_size)
            leaves = self._binders[unit].leaves(self._weights(op, held, unit))
            leaf = hidden.detach().requires_grad_()
            with keeping.running(), self._waits_for_weights(now, op, held):
                found, sides = self.ported.layer(unit - 1, leaves, leaf, alive.calls[micro][unit - 1], self.numerics)
            alive.inputs[output], alive.stored[unit, micro] = found.detach(), keeping.stored()
            alive.sides[unit, micro] = tuple(side.detach() for side in sides)
        else:
            weights = self._views(now, op, held, unit)
            with self._waits_for_weights(now, op, held):
                found, sides = self.ported.layer(unit - 1, weights, hidden, alive.calls[micro][unit - 1], self.numerics)
            alive.inputs[output] = found
            alive.sides.setdefault((unit, micro), sides)  # once only: after the loss they are gradients
        now.phases.end()  # slots are declared with the last phase
        if saved and saved.offloaded:
            alive.stored[unit, micro].pack(part_of(held, written[saved]))
        if offloaded := written.get(Hidden(unit, micro)):
            alive.forms[unit, micro] = pack(hidden, part_of(held, offloaded), self.spec.units[unit].name)

    def _inputs(self, now: Current, micro: int) -> tuple[dict[str, Any], AbstractContextManager[object]]:
        """A micro-batch on the device, and what answers the model's questions about it."""
        batch = now.micro_batches[micro]
        inputs = model_inputs(batch, self.device.torch_device)
        given = {key: each for key, each in batch.items() if isinstance(each, Tensor) and each.device.type == "cpu"}
        return inputs, self._answers((each, given[key]) for key, each in inputs.items() if key in given)

    def _answers(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> AbstractContextManager[object]:
        return HostAnswers(pairs) if self.device.torch_device.type == "cuda" else nullcontext()

    def _input(self, now: Current, op: Op, held: Held) -> Tensor:
        """The input of a layer, [batch, length, hidden size], from where this op reads it: also from a kept graph."""
        alive, key = now.activations, (op.unit, op.micro)
        for access in op.reads:
            if access.content == Hidden(op.unit, op.micro):
                there = access.buffer in held
                return unpack(part_of(held, access).data, alive.forms[key]) if there else alive.inputs[access.buffer]
        return alive.graphs[key].input.detach()

    def _grown(self, now: Current, op: Op, held: Held, hidden: Tensor) -> tuple[Graph, Tensor, Sides]:
        """Run a layer with its autograd graph; what autograd saves of the weights it saves by name.

        What its forward has stored is not computed again. Returns the graph, the output [batch, length, hidden size]
        and the sides.
        """
        bound = Bound(self._weights(op, held, op.unit))
        leaves = self._binders[op.unit].leaves(bound.flat)
        leaf = hidden.detach().requires_grad_()
        call = now.activations.calls[op.micro][op.unit - 1]
        stored = now.activations.stored.pop((op.unit, op.micro), None)
        for access in op.reads:
            if stored and isinstance(access.content, Saved) and access.content.offloaded:
                stored.unpack(part_of(held, access).data)
        answering = Answering(stored) if stored else nullcontext()
        target = GradientDestination()
        in_place = self._gradients_in_place(self._binders[op.unit].trained(leaves), target)
        with torch.enable_grad(), names_weights(bound), answering, self._waits_for_weights(now, op, held), in_place:
            output, sides = self.ported.layer(op.unit - 1, leaves, leaf, call, self.numerics)
        if stored:
            stored.finish(self.spec.units[op.unit].name)
        edges = [get_gradient_edge(each) for each in (output, *sides)]
        return Graph(bound, leaves, leaf, edges, target), output, sides

    def _gradients_in_place(
        self, trained: Sequence[tuple[str, Tensor]], target: GradientDestination
    ) -> AbstractContextManager[object]:
        """In the block, gradients of weights are formed in `target`, where compute and sums share memory."""
        return (
            GradientsInPlace(trained, target)
            if self.policy.shares_memory and self.numerics.kernels == "stock"
            else nullcontext()
        )

    def _loss(self, now: Current, op: Op, held: Held) -> None:
        unit, micro = op.unit, op.micro
        self._reseed(now, unit, micro)
        hidden = self._input(now, op, held)
        if now.sink is None:
            weights: dict[str, Tensor] = {}
            for owner in self._head_owners():
                weights |= self._views(now, op, held, owner)
            with self._waits_for_weights(now, op, held):
                self._loss_only(now, op, weights, hidden)
            return
        flat = hidden.flatten(0, 1)
        leaves: dict[str, Tensor] = {}
        trained: list[Tensor] = []
        in_place: list[AbstractContextManager[object]] = []
        borrowed = self.spec.units[unit].borrows
        for owner in self._head_owners():
            binder = self._binders[owner]
            bound = binder.leaves(self._weights(op, held, owner))
            used = [(name, leaf) for name, leaf in binder.trained(bound) if owner == unit or name in borrowed]
            if self._layouts[owner].trained.size:
                total = self._sum(now, op, held, owner)
                send_to_sum(used, total)
                in_place.append(self._gradients_in_place(used, GradientDestination(total)))
            trained += [leaf for _, leaf in used]
            leaves |= bound
        chunks = self._chunks(now, op, leaves, trained, flat)
        with self._waits_for_weights(now, op, held), ExitStack() as around:
            for each in in_place:
                around.enter_context(each)
            found = differentiate(now.loss_fn, chunks, now.own[micro], now.scale)
            self._count(now, micro, found)
            assert found.gradient is not None
            now.activations.gradients[micro] = found.gradient.view_as(hidden)
            self._balance(now, leaves, micro)
            assert now.loss is not None
            now.landed = self.device.landing(now.loss)
        self._close_finished(now, op)

    def _count(self, now: Current, micro: int, found: Found) -> None:
        """Add what a LOSS has found to what the step's have so far."""
        now.loss = found.loss if now.loss is None else now.loss + found.loss
        self._note_term(now, micro, found.loss)
        if found.sums:
            now.reported[micro] = tuple(found.sums), self.device.landing(torch.stack(list(found.sums.values())))

    def _note_term(self, now: Current, micro: int, term: Tensor) -> None:
        """The losses of several ranks are added up in the order of one."""
        if self.world.size > 1:
            now.terms.setdefault(micro, []).append(self.device.landing(term))

    def _chunks(self, now: Current, op: Op, weights: dict[str, Tensor], trained: list[Tensor], flat: Tensor) -> Chunks:
        """The head over a micro-batch, whose hidden states are `flat` [tokens, hidden size]."""

        def head(hidden: Tensor) -> Tensor:
            with self._answers(()):
                return self.ported.head(weights, hidden)

        places, targets = now.targets[op.micro] if now.targets else targets_of(now.labels[op.micro])
        rewind = partial(self._reseed, now, op.unit, op.micro)
        return Chunks(head, trained, flat, places, targets, self.numerics.loss_chunk_tokens, rewind)

    def _balance(self, now: Current, weights: dict[str, Tensor], micro: int) -> None:
        """Add the router auxiliary loss of a micro-batch; its sides become gradients.

        It counts by its share of the divisor if nothing else is asked for. So the step's loss is the mean, over target
        tokens, of the losses that the stock model gives each micro-batch.
        """
        alive, layers = now.activations, self.spec.layers
        coefficient = self.ported.balance_coefficient
        if coefficient is None or not now.labels:
            return
        sides = [tuple(side.detach().requires_grad_() for side in alive.sides.pop((unit, micro))) for unit in layers]
        leaves = [side for of_layer in sides for side in of_layer]
        with torch.enable_grad():
            inputs, answers = self._inputs(now, micro)
            with answers:
                plain = self.ported.balance(weights, inputs, sides)
            loss = coefficient * plain * now.router_weights[micro]
            if now.sink is not None:
                found = torch.autograd.grad(loss * now.scale, leaves, allow_unused=True, materialize_grads=True)
                gradients = iter(found)
                alive.sides |= {
                    (unit, micro): tuple(next(gradients) for _ in of_layer)
                    for unit, of_layer in zip(layers, sides, strict=True)
                }
        assert now.loss is not None
        term = loss.detach().double()
        now.loss = now.loss + term
        self._note_term(now, micro, term)
        now.router_losses[micro] = self.device.landing(plain.detach().double())

    def _loss_only(self, now: Current, op: Op, weights: dict[str, Tensor], hidden: Tensor) -> None:
        """The loss, or the next logits, without gradients. `hidden` [batch, length, ...]."""
        if now.labels:
            chunks = self._chunks(now, op, weights, [], hidden.flatten(0, 1))
            self._count(now, op.micro, measure(now.loss_fn, chunks, now.own[op.micro]))
            self._balance(now, weights, op.micro)
            assert now.loss is not None
            now.landed = self.device.landing(now.loss)
        else:
            last = hidden[:, -now.kept :]
            now.logits = self.ported.head(weights, last.flatten(0, 1)).view(*last.shape[:2], -1)

    def _head_owners(self) -> list[int]:
        """Units whose weights the head uses: the epilogue's own, and the prologue's if it borrows."""
        own = [self.spec.epilogue] if self._layouts[self.spec.epilogue].size else []
        return [0, *own] if self.spec.tied else own

    def _backward(self, now: Current, op: Op, held: Held) -> None:
        unit, micro, alive = op.unit, op.micro, now.activations
        if unit == 0:
            self._backward_prologue(now, op, held)
        else:
            graph = alive.graphs.pop((unit, micro), None)
            if graph is None:
                self._reseed(now, unit, micro)
                graph = self._grown(now, op, held, self._input(now, op, held))[0]  # the rest is let go of here
            else:
                graph.bound.flat, graph.bound.need = self._weights(op, held, unit), now.phases.need
            now.phases.add()
            trained = self._binders[unit].trained(graph.leaves)
            if trained:
                graph.target.total = total = self._sum(now, op, held, unit)
                send_to_sum(trained, total, now.phases.finished)
            inputs = [graph.input, *(leaf for _, leaf in trained)]
            gradients = [alive.gradients.pop(micro), *alive.sides.pop((unit, micro), ())]
            torch.autograd.backward(graph.outputs, gradients, inputs=inputs)
            assert graph.input.grad is not None
            alive.gradients[micro] = graph.input.grad
        self._close_finished(now, op)

    def _backward_prologue(self, now: Current, op: Op, held: Held) -> None:
        """Run the prologue again, this time for its gradient; it is cheap, and nothing of it has been kept."""
        alive = now.activations
        there = any(access.content == Weights(0) for access in op.reads)  # else only their shapes matter
        leaves = self._binders[0].leaves(self._weights(op, held, 0)) if there else self._unseen_leaves()
        self._reseed(now, 0, op.micro)
        trained, target = self._binders[0].trained(leaves), GradientDestination()
        inputs, answers = self._inputs(now, op.micro)
        with (
            torch.enable_grad(),
            answers,
            self._waits_for_weights(now, op, held),
            self._gradients_in_place(trained, target),
        ):
            hidden, _ = self.ported.prologue(leaves, inputs)
        now.phases.add()
        target.total = total = self._sum(now, op, held, 0)
        send_to_sum(trained, total)
        gradient = alive.gradients.pop(op.micro)
        if hidden.requires_grad:
            torch.autograd.backward([hidden], [gradient], inputs=[leaf for _, leaf in trained])

    def _unseen_leaves(self) -> dict[str, Tensor]:
        """Zeros that take no memory, for weights of the prologue."""
        trains = {param.name: param.trainable for param in self.spec.units[0].params}
        return {name: self.ported.placeholders[name].detach().requires_grad_(of) for name, of in trains.items()}

    # Gradients ------------------------------------------------------------------------------------------------------

    def _sum(self, now: Current, op: Op, held: Held, unit: int) -> UnitSum:
        """The gradient of `unit` under construction, begun where the schedule says that the first term is written."""
        known = now.sums.get(unit)
        if known is None or self.policy.shares_memory:  # where a sum comes back from the disk, to another place
            access = access_of(op.writes, Gradient(unit))
            layout = self._layouts[unit].trained
            flat = part_of(held, access).view(DTYPE_OF_NBYTES[(access.stop - access.start) // layout.size])
            if known is None or not known.lies_in(flat):
                now.sums[unit] = UnitSum(layout, flat, known)
        return now.sums[unit]

    def _close_finished(self, now: Current, op: Op) -> None:
        """A gradient whose last term this op has added is complete."""
        for access in op.writes:
            if isinstance(access.content, Gradient) and access.content.is_whole:
                now.sums.pop(access.content.unit).close()

    def _norm(self, now: Current, op: Op, held: Held) -> None:
        assert now.sink is not None
        gradient = self._landed(op, held)
        if op.stream == "host" and not now.loss_is_finite and self.world.size == 1:  # else all decide, at the end
            _finite_loss(now)  # before any gradient of this step is used
            now.loss_is_finite = True
        now.sink.norm(op.unit, gradient, now.loss)

    def _update(self, now: Current, op: Op, held: Held) -> None:
        assert now.sink is not None
        parts = {}
        for access in op.writes:
            if part := PART_OF.get(type(access.content)):
                parts[part] = part_of(held, access)
        assert self._running is not None
        if op.shard >= 0:
            size = self._layouts[op.unit].trained.own_size
            elements = piece_of(size, self.numerics, self.policy, op.shard)
            now.sink.update(op.unit, self._landed(op, held), parts, elements)
            self._executor.pool.owes(self._running.takes_home[op.unit, op.shard])
            return
        now.sink.update(op.unit, self._landed(op, held), parts)
        self._executor.pool.changed(op, held)
        gradient = self._running.buffers[op.reads[0].buffer]
        if gradient.tier == "host" and gradient.unit == op.unit:  # others take turns, and the next may be on its way
            self._executor.pool.discard(gradient.name)

    def _landed(self, op: Op, held: Held) -> Tensor:
        access = op.reads[0]
        return part_of(held, access).view(DTYPE_OF_NBYTES[self.numerics.grad_nbytes])

    # Small things ---------------------------------------------------------------------------------------------------

    def _weights(self, op: Op, held: Held, unit: int) -> Tensor:
        """The flat weights of `unit`, where this op reads them; what arrives beside them while it runs is no change."""
        return part_of(held, access_of(op.reads, Weights(unit))).view(self.dtype).data

    def _views(self, now: Current, op: Op, held: Held, unit: int) -> dict[str, Tensor]:
        """The parameters of `unit`, where no gradient is wanted."""
        return self._binders[unit].bind(self._weights(op, held, unit))

    def _waits_for_weights(self, now: Current, op: Op, held: Held) -> AbstractContextManager[object]:
        """While active, the unit's own weights are waited for where they are read."""
        owns = any(access.content == Weights(op.unit) for access in op.reads)
        return now.phases.around(self._weights(op, held, op.unit)) if owns else nullcontext()

    def _locate(self, buffer: str, start: int, content: object) -> str:
        return place_of(self.spec, self._layouts, self._running, buffer, start, content, self.dtype.itemsize)

    def _reseed(self, now: Current, unit: int, micro: int) -> None:
        self.device.seed(call_seed(self.seed, now.number, unit, self.world.number(micro)))


def call_seed(seed: int, step: int, unit: int, micro: int) -> int:
    """The seed of a unit's call in a step, 0 to 2**63 - 1: the first 63 bits of BLAKE2b (RFC 7693) over the four
    numbers as decimal text with a space between. So dropout depends on neither the policy nor Python's version."""
    digest = hashlib.blake2b(f"{seed} {step} {unit} {micro}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _finite_loss(now: Current) -> float:
    """The loss of a step whose last LOSS is done. Raises `NonFinite`."""
    return _finite_sum([] if now.landed is None else [now.landed.item()], now)


def _finite_sum(terms: Sequence[float], now: Current, on: str = "", fix: str = NOTHING) -> float:
    """The sum in that order, as LOSS ops form it. Raises `NonFinite`; `fix` is about a step."""
    loss = reduce(add, terms) if terms else 0.0
    if not math.isfinite(loss):
        what = f"the loss is {loss}{on}"
        if now.sink is None:
            raise NonFinite(what, where="evaluation", fix="inspect the batch and the weights", of_loss=True)
        raise NonFinite(what, fix=fix, of_loss=True)
    return loss


class Counts(NamedTuple):
    """What one rank brings to a step: its target tokens, the divisors of its micro-batches, a digest of what it will do
    together with the others, and what it trains with."""

    targets: int
    divisors: list[float]
    digest: str
    how: Mapping[str, object]


class Micro(NamedTuple):
    """What is known of one micro-batch after a step."""

    terms: list[float]
    """What it has added to the loss, where several ranks add up theirs."""
    reported: dict[str, float]
    """What the loss function reports: sums."""
    router_loss: float | None


def _micros(now: Current) -> list[Micro]:
    """Of this rank, in order."""
    found = []
    for micro in range(len(now.divisors)):
        names, values = now.reported.get(micro, ((), torch.empty(0)))
        router_loss = now.router_losses.get(micro)
        terms = [term.item() for term in now.terms.get(micro, ())]
        reported = dict(zip(names, values.tolist(), strict=True))
        found.append(Micro(terms, reported, None if router_loss is None else router_loss.item()))
    return found


def _reports(
    micros: Sequence[Micro], divisors: Sequence[float], scale: float
) -> tuple[dict[str, float], tuple[dict[str, float], ...]]:
    """`metrics` and `by_micro_batch` of a `StepResult`."""
    sums: dict[str, float] = {}
    each: tuple[dict[str, float], ...] = tuple({} for _ in divisors)
    for micro, found, divisor in zip(micros, each, divisors, strict=True):
        for name, number in micro.reported.items():
            sums[name] = sums.get(name, 0.0) + number
        found.update(_means(micro.reported, 1 / (divisor or 1.0)))
        if micro.router_loss is not None:
            found["aux_loss"] = micro.router_loss
    return _means(sums, scale), each


def _means(sums: Mapping[str, float], scale: float) -> dict[str, float]:
    """Sums times `scale`, or over a count of their own, where that is not 0."""
    found = {}
    for name, number in sums.items():
        count = sums.get(name + COUNT)
        if not name.endswith(COUNT) and count != 0:
            found[name] = number * scale if count is None else number / count
    return found


ACTIONS = {
    "READ": Streamer._read,
    "WRITE": Streamer._write,
    **dict.fromkeys(("FETCH", "PLACE", "GRAD", "OFFLOAD", "RELOAD"), Streamer._copy),
    **dict.fromkeys(("PACK", "UNPACK"), Streamer._pass),
    "FORWARD": Streamer._forward,
    "LOSS": Streamer._loss,
    "BACKWARD": Streamer._backward,
    "GATHER": Streamer._gather,
    "REDUCE": Streamer._reduce,
    "BARRIER": Streamer._barrier,
    "NORM": Streamer._norm,
    "UPDATE": Streamer._update,
}
"""What each kind of op does."""
