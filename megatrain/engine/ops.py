"""`Streamer`: executes each kind of op of a training step.

Each kind of op has a method (`ACTIONS`), which works with the ported model, leased memory and activations. Training
state is not changed here: gradients go to a sink. Randomness inside layers (dropout) depends on (seed, step, unit,
micro-batch) alone, so a recomputed layer draws the same numbers again, under any schedule.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
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
from megatrain.engine.batch import TEXT_ENTRIES, MicroBatch, count_targets, model_entries, model_inputs, targets_of
from megatrain.engine.chunked_loss import (
    COUNT,
    ChunkedHead,
    LossFn,
    MicroBatchLoss,
    StepResult,
    differentiate,
    divisor_of,
    measure,
    own_entries,
)
from megatrain.engine.executor import Executor
from megatrain.engine.gradient_accumulation import GradientAccumulator, GradSink, accumulate_into, for_parameters
from megatrain.engine.resumable_call import (
    NO_PAUSES,
    PausePoints,
    cancelled_on_exit,
    default_torch_modes,
    resumable_calls,
)
from megatrain.engine.step_state import DTYPE_OF_NBYTES, KeptGraph, StepState, bytes_of, find_access, pack, unpack
from megatrain.engine.sync_free_inputs import HostAnswers
from megatrain.engine.weights import BoundWeights, UnitBinder, describe_place, save_weights_by_name
from megatrain.errors import LossError, ModelError, NonFinite, RankError
from megatrain.memory import Lease, Pool
from megatrain.model import Answering, Keeping, PortedModel
from megatrain.schedule import CALLS, Op, Schedule, Timeline
from megatrain.schedule.contents import PART_OF, Gradient, Hidden, LayerGraph, Saved, Weights
from megatrain.schedule.passes.streamed_updates import piece_of
from megatrain.spec import Numerics, Policy, Precision
from megatrain.spec.layout import layout_of

NOTHING_UPDATED = "nothing was updated; lower the learning rate, or inspect the batch"
MAYBE_UPDATED = "units before it have been updated; start again from a saved model, or set max_grad_norm"
"""Fixes for a step that is not finite. The second is for several ranks that update during the backward pass."""

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Streamer:
    """Runs schedules of one model on one device, as one rank of `world`.

    seed: determines all randomness inside layers.
    """

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
        """Entered around the ops of each schedule only, the part of a step that may be interrupted from outside."""
        self._running: Schedule | None = None
        self._judged: set[frozenset[str]] = {frozenset()}
        """Entries with which layers need no gradient but through the hidden state."""
        self._reduces = Counter[int]()
        """Unit -> number of its REDUCE ops in that schedule."""
        self._layouts = [layout_of(unit) for unit in self.spec.units]
        self._binders = [
            UnitBinder(unit, ported.prefix(index - 1) if unit.kind == "layer" else "")
            for index, unit in enumerate(self.spec.units)
        ]
        if numerics.mlp_chunk_tokens:
            _ = ported.parts  # found now, not during a step
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
        """Execute a schedule and return loss and metrics of all ranks. Keeps the caller's random state.

        micro_batches: those of this rank. sink: receives the gradients; `None` for an evaluation. number: the step's
        number, from 0, which randomness depends on. loss_fn: cross-entropy if not given. router_weights: per
        micro-batch, the weight of its router auxiliary loss in the step's loss; by default its share of the divisor.

        Raises `NonFinite` if the loss is not finite, `LossError` if the loss function returns no loss, and whatever an
        op, the sink or the loss function raises.
        """
        self.world.at(f"step {number + 1:,}", self.oldest_op)
        labels = [batch["labels"].cpu() for batch in micro_batches]
        settings: dict[str, object] = {} if sink is None else {"step": number, "seed": self.seed, **sink.settings}
        infos = self._exchange_step_info(schedule, micro_batches, loss_fn, settings)
        divisors, tokens = infos[self.world.rank].divisors, sum(each.targets for each in infos)
        all_divisors = self.world.dealt([each.divisors for each in infos])
        total = sum(all_divisors)
        if micro_batches and not total > 0:
            raise LossError("is 0 for every micro-batch", where="divisor", fix="return more than 0 for at least one")
        own = own_entries(loss_fn)
        inputs = [model_entries(batch, own) for batch in micro_batches]
        scale = 1.0 / (total or 1.0)
        routed = divisors if router_weights is None else [weight * total for weight in router_weights]
        step = StepState(inputs, labels, sink, number, scale, loss_fn, micro_batches, divisors, routed)
        if not self.device.shares_memory:
            staged = iter(self.device.staged([each for found in map(targets_of, labels) for each in found]))
            step.targets = list(zip(staged, staged, strict=True))
        self._execute(schedule, step)
        shares: tuple[float, ...] = ()
        if self.world.size > 1:
            reports = self._reports_of_all_ranks(step)
            loss = _finite_sum([term for micro in reports for term in micro.terms], step)
            shares = tuple(math.fsum(micro.terms) * scale for micro in reports)
        else:
            reports, loss = _own_reports(step), _finite_loss(step)
        return StepResult(loss / (total or 1.0), tokens, *_reports(reports, all_divisors, scale), shares)

    # Other ranks ----------------------------------------------------------------------------------------------------

    def _exchange_step_info(
        self,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        loss_fn: LossFn | None,
        settings: Mapping[str, object],
    ) -> list[StepInfo]:
        """The `StepInfo` of each rank. Raises `RankError` if collectives do not match or settings differ."""

        def own() -> StepInfo:
            targets = sum(count_targets(batch) for batch in micro_batches)
            divisors = [divisor_of(loss_fn, batch) for batch in micro_batches]
            return StepInfo(targets, divisors, schedule.digest if self.world.size > 1 else "", settings)

        found = [StepInfo(*each) for each in self.world.agree("a schedule", own)]
        if odd := [rank for rank, each in enumerate(found) if each.digest != found[0].digest]:
            what = f"the schedules of ranks 0 and {odd[0]} do not match: their policies or their rounds differ"
            fix = "give all ranks the same policy, and as many micro-batches of each rank to every round"
            raise RankError(what, where="schedule", fix=fix)
        refuse_unlike("trains with", [each.settings for each in found])
        return found

    def _reports_of_all_ranks(self, step: StepState) -> list[MicroBatchReport]:
        """The reports of all ranks' micro-batches, in order. Raises `NonFinite`, with the same message on each rank."""
        largest = {unit: torch.stack(found).amax(dim=0).tolist() for unit, found in step.largest.items()}
        names = {} if step.sink is None else step.sink.not_finite
        mine: Any = ([tuple(each) for each in _own_reports(step)], list(largest.items()), list(names.items()))
        received = self.world.exchange("losses", mine)
        reports = [[MicroBatchReport(*each) for each in own] for own, _, _ in received]
        fix = MAYBE_UPDATED if self.policy.update == "during_backward" else NOTHING_UPDATED
        for rank, own in enumerate(reports):
            _finite_sum([term for micro in own for term in micro.terms], step, f" on rank {rank}", fix)
        by_receiver = {unit: [dict(each)[unit] for _, each, _ in received] for unit in largest}
        for unit, magnitudes in sorted(by_receiver.items(), reverse=True):
            for rank, sent in enumerate(zip(*magnitudes, strict=True)):
                if not all(map(math.isfinite, sent)):
                    named = dict.fromkeys(name for _, _, each in received for name in dict(each).get(unit, ()))
                    what = f"the gradient of rank {rank} is not finite{for_parameters(list(named))}"
                    raise NonFinite(what, where=self.spec.units[unit].name, fix=fix)
        return self.world.dealt(reports)

    def _gather(self, step: StepState, op: Op, lease: Lease) -> None:
        """GATHER: assemble a shard of weights from the parts that the ranks own."""
        (own,), (whole,) = op.reads, op.writes
        self.world.gather(bytes_of(lease, whole), bytes_of(lease, own))

    def _barrier(self, step: StepState, op: Op, lease: Lease) -> None:
        """BARRIER: wait until all ranks have updated their parts of a unit."""
        self.world.meet()

    def _reduce(self, step: StepState, op: Op, lease: Lease) -> None:
        """REDUCE: sum over ranks this rank's part of a shard of a gradient, to the dtype that crosses the bus."""
        (terms,), (own, *others) = op.reads, op.writes
        target = bytes_of(lease, own).view(DTYPE_OF_NBYTES[self.numerics.grad_nbytes])
        sent, *received = (bytes_of(lease, each).view(torch.float32) for each in (terms, *others))
        if op.stream == "shared":
            self.world.meet()
            received.insert(self.world.rank, sent)
            largest = self.world.reduce_there(target, received)
            self.world.meet()
        else:
            largest = self.device.landing(self.world.reduce(target, received[0], sent))
        step.largest.setdefault(op.unit, []).append(largest)
        if self.policy.update == "during_backward" and len(step.largest[op.unit]) == self._reduces[op.unit]:
            self._tell_present(step, op)

    def _tell_present(self, step: StepState, op: Op) -> None:
        """After the last REDUCE of a unit, on its stream: tell the sink which parameters got a gradient on any rank."""
        names = [field.name for field in self._layouts[op.unit].trained.fields]
        mine = torch.tensor([name not in step.absent[op.unit] for name in names], dtype=torch.uint8)
        if op.stream == "shared":
            flags = landed = self.world.together(mine).amax(dim=0)
        else:
            (sent,) = self.device.staged([mine])
            whole = torch.empty(self.world.size, len(names), dtype=torch.uint8, device=self.device.torch_device)
            self.world.gather(whole.view(-1), sent.to(self.device.torch_device, non_blocking=True))
            flags = whole.amax(dim=0)
            landed = self.device.landing(flags)
        assert step.sink is not None
        step.sink.present(op.unit, flags, landed)

    def under_way(self) -> tuple[list[tuple[str, str, float]], float]:
        """(op, stream, seconds it has been running) of each busy stream; seconds since any op began or ended."""
        now = time.monotonic()
        running = [(op, stream, now - since) for stream, (op, since) in list(self._executor.under_way.items())]
        return running, now - self._executor.last_progress

    def oldest_op(self) -> str:
        """The op that has been running for longest, as "OP on STREAM"; empty if there is none."""
        ops, _ = self.under_way()
        op, stream, _ = max(ops, key=lambda each: each[2], default=("", "", 0.0))
        return f"{op} on {stream}" if op else ""

    def next_logits(self, schedule: Schedule, inputs: Mapping[str, Any], logits_to_keep: int = 1) -> Tensor:
        """Execute a forward schedule. `inputs` are the arguments of a forward, with `input_ids` int64[rows, length].

        Returns the logits at the last `logits_to_keep` positions (0 for all), float32[rows, positions, vocabulary], on
        the device, in memory that belongs to the caller's own stream. The layers fill a cache among the arguments.
        """
        self.device.synchronize()  # the inputs may come from work that no op waits for
        step = StepState([inputs], [], None, 0, 0.0, logits_to_keep=logits_to_keep)
        self.world.meet()  # by now all ranks have finished their updates of the weights
        self._execute(schedule, step)
        self.world.meet()
        assert step.logits is not None
        found = step.logits.to(torch.float32, copy=True)  # an op's result is in memory of its stream, which would
        self.device.synchronize()  # reuse it without waiting for the caller's
        return found

    def _execute(self, schedule: Schedule, step: StepState) -> None:
        """Run all ops of the schedule. The caller's autocast, inference mode and random state have no effect on it and
        are kept."""

        modes = partial(default_torch_modes, self.device.torch_device.type)

        def perform(op: Op, lease: Lease, phases: PausePoints = NO_PAUSES) -> None:
            if op.kind in CALLS:  # other ops may run between the phases of one
                step.phases = phases
            ACTIONS[op.kind](self, step, op, lease)

        def perform_in_phases(op: Op, lease: Lease, phases: PausePoints) -> None:
            with modes():  # they are each thread's own
                perform(op, lease, phases)

        def act(op: Op, lease: Lease) -> None:
            if id(op) in calls:
                calls[id(op)].run_phase(lease)
            else:
                perform(op, lease)
            for access in schedule.ended.get(id(op), ()):
                step.activations.release(access)

        if schedule is not self._running:
            self._reduces = Counter(op.unit for op in schedule.ops if op.kind == "REDUCE")
            self.device.tidy()  # memory that other work has freed may be fragmented for this one
        self._running = schedule
        calls = resumable_calls(schedule, self._layouts, self.device.alongside, perform_in_phases)
        exact = self.device.exact_float32() if self.numerics.precision == "fp32" else nullcontext()
        with exact, self.device.preserved_random_state(), self.region(), cancelled_on_exit(calls), modes():
            self.timeline = self._executor.walk(schedule, act)
        self._executor.pool.owes_nothing()

    # Disk -----------------------------------------------------------------------------------------------------------

    def _read(self, step: StepState, op: Op, lease: Lease) -> None:
        self._executor.pool.read(op, lease)

    def _write(self, step: StepState, op: Op, lease: Lease) -> None:
        self._executor.pool.write(op, lease)

    # Copies ---------------------------------------------------------------------------------------------------------

    def _copy(self, step: StepState, op: Op, lease: Lease) -> None:
        """FETCH copies a shard of weights to its slot, or to a buffer read ahead, from which PLACE copies it there.
        GRAD copies a shard of gradients to where the optimizer reads it; if that has another dtype, it is first cast
        on the device. OFFLOAD and RELOAD copy what a layer keeps, or a piece of its state, unchanged.
        """
        if len(op.reads) > 1:
            self._executor.pool.overwrites(op)
            for read, write in zip(op.reads, op.writes, strict=True):
                bytes_of(lease, write).copy_(bytes_of(lease, read), non_blocking=True)
            return
        (read,), (write, *cast) = op.reads, op.writes
        source, target = bytes_of(lease, read), bytes_of(lease, write)
        if source.numel() > target.numel():
            source, target = source.view(torch.float32), target.view(torch.bfloat16)
        elif source.numel() < target.numel():
            source, target = source.view(torch.bfloat16), target.view(torch.float32)
        for between in cast:  # otherwise the copy would allocate a buffer that the ledger does not know
            source = bytes_of(lease, between).view(target.dtype).copy_(source)
        target.copy_(source, non_blocking=True)

    def _stage(self, step: StepState, op: Op, lease: Lease) -> None:
        """PACK and UNPACK: copy to and from pinned staging buffers."""
        self._executor.pool.copy(op, lease)

    # Compute --------------------------------------------------------------------------------------------------------

    def _forward(self, step: StepState, op: Op, lease: Lease) -> None:
        unit, micro = op.unit, op.micro
        activations = step.activations
        self._reseed(step, unit, micro)
        written = {access.content: access for access in op.writes}
        output = written[Hidden(unit + 1, micro)].buffer
        if unit == 0:
            inputs, answers = self._inputs(step, micro)
            weights = self._views(op, lease, 0)
            with answers, self._waiting_for_weights(step, op, lease):
                if step.sink is not None:
                    self._refuse_other_gradients(step, op, lease, inputs)
                activations.inputs[output], activations.calls[micro] = self.ported.prologue(weights, inputs)
            return
        hidden = self._input(step, op, lease)
        saved = next((content for content in written if isinstance(content, Saved)), None)
        if LayerGraph(unit, micro) in written:
            activations.graphs[unit, micro], found, sides = self._forward_with_graph(step, op, lease, hidden)
        else:
            call, binder, given = activations.calls[micro][unit - 1], self._binders[unit], hidden
            keeping = Keeping(saved.keep, self.spec.hidden_size) if saved else None
            weights = self._views(op, lease, unit)
            if keeping:
                weights, given = binder.leaves(self._weights(op, lease, unit)), hidden.detach().requires_grad_()
            values = activations.side_values(op, self.ported, call, leaves=keeping is not None)
            with keeping.running() if keeping else nullcontext(), self._waiting_for_weights(step, op, lease):
                found, sides = self.ported.layer(unit - 1, weights, given, call, self.numerics, values)
            if keeping:
                activations.stored[unit, micro] = keeping.stored()
        activations.inputs[output] = found.detach()
        activations.keep_sides(op, sides)
        step.phases.enter_last_phase()  # which declares the offload slots
        if saved and saved.offloaded:
            activations.stored[unit, micro].pack(bytes_of(lease, written[saved]))
        if offloaded := written.get(Hidden(unit, micro)):
            activations.forms[unit, micro] = pack(hidden, bytes_of(lease, offloaded), self.spec.units[unit].name)

    def _refuse_other_gradients(self, step: StepState, op: Op, lease: Lease, inputs: Mapping[str, Any]) -> None:
        """Raise `ModelError` if entries beside a text's make layers need a gradient other than through the hidden
        state. Known for text since the model was split; found out once for other entries."""
        entries = frozenset(inputs) - TEXT_ENTRIES
        if entries in self._judged:
            return
        with torch.enable_grad():
            _, calls = self.ported.prologue(self._binders[0].leaves(self._weights(op, lease, 0)), inputs)
        if self.ported.other_gradients(calls):
            what = f"with {', '.join(sorted(entries))} its layers need a gradient other than through the hidden state"
            fix = "freeze what computes their other arguments, or train it on text alone"
            raise ModelError(what, where=f"model {self.spec.name}", fix=fix)
        self._judged.add(entries)
        self._reseed(step, op.unit, op.micro)

    def _inputs(self, step: StepState, micro: int) -> tuple[dict[str, Any], AbstractContextManager[object]]:
        """A micro-batch on the device, and a context in which its values can be read without waiting for the device."""
        batch = step.micro_batches[micro]
        inputs = model_inputs(batch, self.device.torch_device)
        given = {key: each for key, each in batch.items() if isinstance(each, Tensor) and each.device.type == "cpu"}
        return inputs, self._host_answers((each, given[key]) for key, each in inputs.items() if key in given)

    def _host_answers(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> AbstractContextManager[object]:
        return HostAnswers(pairs) if self.device.torch_device.type == "cuda" else nullcontext()

    def _input(self, step: StepState, op: Op, lease: Lease) -> Tensor:
        """The input of a layer, [batch, length, hidden size], from a slot, another op's output, or a kept graph."""
        activations, key = step.activations, (op.unit, op.micro)
        for access in op.reads:
            if access.content == Hidden(op.unit, op.micro):
                if access.buffer in lease:
                    return unpack(bytes_of(lease, access).data, activations.forms[key])
                return activations.inputs[access.buffer]
        return activations.graphs[key].input.detach()

    def _forward_with_graph(
        self, step: StepState, op: Op, lease: Lease, hidden: Tensor
    ) -> tuple[KeptGraph, Tensor, dict[int, Tensor]]:
        """Run a layer with autograd, which saves weights by their place unless `_weights_stay`.

        Outputs of ops that its forward has kept are not computed again. Returns the graph, the output [batch, length,
        hidden size] and the side values that it has made.
        """
        bound = BoundWeights(self._weights(op, lease, op.unit))
        leaves = self._binders[op.unit].leaves(bound.flat)
        leaf = hidden.detach().requires_grad_()
        call = step.activations.calls[op.micro][op.unit - 1]
        stored = step.activations.stored.pop((op.unit, op.micro), None)
        for access in op.reads:
            if stored and isinstance(access.content, Saved) and access.content.offloaded:
                stored.unpack(bytes_of(lease, access).data)
        answering = Answering(stored) if stored else nullcontext()
        values = step.activations.side_values(op, self.ported, call, leaves=True)
        target = GradientDestination()
        in_place = self._gradients_in_place(self._binders[op.unit].trained(leaves), target)
        with (
            torch.enable_grad(),
            nullcontext() if self._weights_stay(step, op) else save_weights_by_name(bound),
            answering,
            self._waiting_for_weights(step, op, lease),
            in_place,
        ):
            output, sides = self.ported.layer(op.unit - 1, leaves, leaf, call, self.numerics, values)
        if stored:
            stored.finish(self.spec.units[op.unit].name)
        made = {number: get_gradient_edge(side) for number, side in sides.items() if side.requires_grad}
        given = {number: value for number, value in values.items() if value.requires_grad}
        return KeptGraph(bound, leaves, leaf, get_gradient_edge(output), made, given, target), output, sides

    def _weights_stay(self, step: StepState, op: Op) -> bool:
        """Whether autograd may save these weights as they are: they are the state itself, or a BACKWARD recomputes the
        layer and reads them before their slot can change."""
        assert self._running is not None
        home = self._running.buffers[find_access(op.reads, Weights(op.unit)).buffer]
        return step.phases is NO_PAUSES and (op.kind == "BACKWARD" or home.is_state)

    def _gradients_in_place(
        self, trained: Sequence[tuple[str, Tensor]], target: GradientDestination
    ) -> AbstractContextManager[object]:
        """In the block, gradients of weights are computed in `target`, if compute and sums share memory."""
        shared = self.policy.shares_memory and self.numerics.kernels == "stock"
        return GradientsInPlace(trained, target) if shared else nullcontext()

    def _loss(self, step: StepState, op: Op, lease: Lease) -> None:
        unit, micro = op.unit, op.micro
        self._reseed(step, unit, micro)
        hidden = self._input(step, op, lease)
        if step.sink is None:
            weights: dict[str, Tensor] = {}
            for owner in self._head_owners():
                weights |= self._views(op, lease, owner)
            with self._waiting_for_weights(step, op, lease):
                self._loss_or_logits(step, op, weights, hidden)
            return
        flat = hidden.flatten(0, 1)
        leaves: dict[str, Tensor] = {}
        trained: list[Tensor] = []
        in_place: list[AbstractContextManager[object]] = []
        borrowed = self.spec.units[unit].borrows
        for owner in self._head_owners():
            binder = self._binders[owner]
            bound = binder.leaves(self._weights(op, lease, owner))
            used = [(name, leaf) for name, leaf in binder.trained(bound) if owner == unit or name in borrowed]
            if self._layouts[owner].trained.size:
                total = self._accumulator(step, op, lease, owner)
                accumulate_into(total, used)
                in_place.append(self._gradients_in_place(used, GradientDestination(total)))
            trained += [leaf for _, leaf in used]
            leaves |= bound
        chunked = self._chunked_head(step, op, leaves, trained, flat)
        with self._waiting_for_weights(step, op, lease), ExitStack() as around:
            for each in in_place:
                around.enter_context(each)
            found = differentiate(step.loss_fn, chunked, step.own[micro], step.scale)
            self._record_loss(step, micro, found)
            assert found.gradient is not None
            step.activations.gradients[micro] = found.gradient.view_as(hidden)
            self._add_router_loss(step, op, leaves)
            assert step.loss is not None
            step.landed = self.device.landing(step.loss)
        self._finish_complete_gradients(step, op)

    def _record_loss(self, step: StepState, micro: int, found: MicroBatchLoss) -> None:
        """Add the result of a LOSS to the step's."""
        step.loss = found.loss if step.loss is None else step.loss + found.loss
        self._record_term(step, micro, found.loss)
        if found.sums:
            step.reported[micro] = tuple(found.sums), self.device.landing(torch.stack(list(found.sums.values())))

    def _record_term(self, step: StepState, micro: int, term: Tensor) -> None:
        """With several ranks, keep a term of the loss: they add all terms in the order that one rank would."""
        if self.world.size > 1:
            step.terms.setdefault(micro, []).append(self.device.landing(term))

    def _chunked_head(
        self, step: StepState, op: Op, weights: dict[str, Tensor], trained: list[Tensor], flat: Tensor
    ) -> ChunkedHead:
        """The head for a micro-batch whose hidden states are `flat` [tokens, hidden size]."""

        def head(hidden: Tensor) -> Tensor:
            with self._host_answers(()):
                return self.ported.head(weights, hidden)

        positions, targets = step.targets[op.micro] if step.targets else targets_of(step.labels[op.micro])
        rewind = partial(self._reseed, step, op.unit, op.micro)
        return ChunkedHead(head, trained, flat, positions, targets, self.numerics.loss_chunk_tokens, rewind)

    def _add_router_loss(self, step: StepState, op: Op, weights: dict[str, Tensor]) -> None:
        """Add the router auxiliary loss of a micro-batch, and replace its side outputs by their gradients.

        Its weight is the micro-batch's share of the divisor unless `router_weights` were given. So the step's loss is
        the mean, over target tokens, of the losses that the stock model computes for each micro-batch.
        """
        coefficient, activations, micro = self.ported.balance_coefficient, step.activations, op.micro
        if coefficient is None or not step.labels:
            return
        leaves = {number: each.detach().requires_grad_() for number, each in activations.take_sides(op).items()}
        sides = [tuple(leaves[number] for number in port.recorded) for port in self.ported.ports]
        with torch.enable_grad():
            inputs, answers = self._inputs(step, micro)
            with answers:
                plain = self.ported.balance(weights, inputs, sides)
            loss = coefficient * plain * step.router_weights[micro]
            if step.sink is not None:
                wanted = [*leaves.values()]
                found = torch.autograd.grad(loss * step.scale, wanted, allow_unused=True, materialize_grads=True)
                activations.add_side_gradients(op, dict(zip(leaves, found, strict=True)))
        assert step.loss is not None
        term = loss.detach().double()
        step.loss = step.loss + term
        self._record_term(step, micro, term)
        step.router_losses[micro] = self.device.landing(plain.detach().double())

    def _loss_or_logits(self, step: StepState, op: Op, weights: dict[str, Tensor], hidden: Tensor) -> None:
        """Compute the loss, or the logits if there are no labels, without gradients. hidden: [batch, length, ...]."""
        if step.labels:
            chunked = self._chunked_head(step, op, weights, [], hidden.flatten(0, 1))
            self._record_loss(step, op.micro, measure(step.loss_fn, chunked, step.own[op.micro]))
            self._add_router_loss(step, op, weights)
            assert step.loss is not None
            step.landed = self.device.landing(step.loss)
        else:
            last = hidden[:, -step.logits_to_keep :]
            step.logits = self.ported.head(weights, last.flatten(0, 1)).view(*last.shape[:2], -1)

    def _head_owners(self) -> list[int]:
        """Units whose weights the head uses: the epilogue, and the prologue if they are tied."""
        own = [self.spec.epilogue] if self._layouts[self.spec.epilogue].size else []
        return [0, *own] if self.spec.tied else own

    def _backward(self, step: StepState, op: Op, lease: Lease) -> None:
        unit, micro, activations = op.unit, op.micro, step.activations
        if unit == 0:
            self._backward_prologue(step, op, lease)
        else:
            graph = activations.graphs.pop((unit, micro), None)
            if graph is None:
                self._reseed(step, unit, micro)
                graph = self._forward_with_graph(step, op, lease, self._input(step, op, lease))[0]  # frees the output
            else:
                graph.bound.flat = self._weights(op, lease, unit)
                graph.bound.before_read = None if step.phases is NO_PAUSES else step.phases.before_read
            step.phases.before_gradients()
            trained = self._binders[unit].trained(graph.leaves)
            if trained:
                graph.target.accumulator = total = self._accumulator(step, op, lease, unit)
                accumulate_into(total, trained, step.phases.gradient_complete)
            inputs = [graph.input, *(leaf for _, leaf in trained), *graph.given.values()]
            sides = activations.side_gradients(op, graph.made)
            edges = [graph.output, *(graph.made[number] for number in sides)]
            torch.autograd.backward(edges, [activations.gradients.pop(micro), *sides.values()], inputs=inputs)
            assert graph.input.grad is not None
            activations.gradients[micro] = graph.input.grad
            activations.add_side_gradients(op, {number: each.grad for number, each in graph.given.items()})
        self._finish_complete_gradients(step, op)

    def _backward_prologue(self, step: StepState, op: Op, lease: Lease) -> None:
        """Run the prologue again with autograd, then backward, which runs layers of encoders once more."""
        activations = step.activations
        there = any(access.content == Weights(0) for access in op.reads)  # otherwise only their shapes matter
        leaves = self._binders[0].leaves(self._weights(op, lease, 0)) if there else self._placeholder_leaves()
        self._reseed(step, 0, op.micro)
        trained, target = self._binders[0].trained(leaves), GradientDestination()
        inputs, answers = self._inputs(step, op.micro)
        in_place = self._gradients_in_place(trained, target)
        with (
            torch.enable_grad(),
            answers,
            self._waiting_for_weights(step, op, lease),
            in_place,
        ):
            hidden, calls = self.ported.prologue(leaves, inputs, (answers, in_place))
        step.phases.before_gradients()
        target.accumulator = total = self._accumulator(step, op, lease, 0)
        accumulate_into(total, trained)
        outputs, made = [(hidden, activations.gradients.pop(op.micro))], self.ported.prologue_sides(calls)
        outputs += [(made[number], each) for number, each in activations.side_gradients(op, made).items()]
        if outputs := [(output, gradient) for output, gradient in outputs if output.requires_grad]:
            into = [leaf for _, leaf in trained]
            torch.autograd.backward([each for each, _ in outputs], [each for _, each in outputs], inputs=into)

    def _placeholder_leaves(self) -> dict[str, Tensor]:
        """Leaves without memory in place of the prologue's weights."""
        trains = {param.name: param.trainable for param in self.spec.units[0].params}
        return {name: self.ported.placeholders[name].detach().requires_grad_(of) for name, of in trains.items()}

    # Gradients ------------------------------------------------------------------------------------------------------

    def _accumulator(self, step: StepState, op: Op, lease: Lease, unit: int) -> GradientAccumulator:
        """The accumulator for the gradient of `unit`, created by the op that writes the first term."""
        known = step.accumulators.get(unit)
        if known is None or self.policy.shares_memory:  # then a sum may return from the disk to another buffer
            access = find_access(op.writes, Gradient(unit))
            layout = self._layouts[unit].trained
            flat = bytes_of(lease, access).view(DTYPE_OF_NBYTES[(access.stop - access.start) // layout.size])
            if known is None or not known.is_in(flat):
                step.accumulators[unit] = GradientAccumulator(layout, flat, known)
        return step.accumulators[unit]

    def _finish_complete_gradients(self, step: StepState, op: Op) -> None:
        """Finish the gradients whose last term this op has added."""
        for access in op.writes:
            if isinstance(access.content, Gradient) and access.content.is_whole:
                unit = access.content.unit
                step.absent[unit] = step.accumulators.pop(unit).finish()
                assert step.sink is not None
                step.sink.absent(unit, step.absent[unit])

    def _norm(self, step: StepState, op: Op, lease: Lease) -> None:
        assert step.sink is not None
        gradient = self._gradient_of(op, lease)
        if op.stream == "host" and not step.loss_is_finite and self.world.size == 1:  # several ranks check at the end
            _finite_loss(step)  # before any gradient of this step is used
            step.loss_is_finite = True
        step.sink.norm(op.unit, gradient, step.loss)

    def _update(self, step: StepState, op: Op, lease: Lease) -> None:
        assert step.sink is not None
        parts = {}
        for access in op.writes:
            if part := PART_OF.get(type(access.content)):
                parts[part] = bytes_of(lease, access)
        assert self._running is not None
        if op.shard >= 0:
            size = self._layouts[op.unit].trained.own_size
            elements = piece_of(size, self.numerics, self.policy, op.shard)
            step.sink.update(op.unit, self._gradient_of(op, lease), parts, elements)
            self._executor.pool.owes(self._running.takes_home[op.unit, op.shard])
            return
        step.sink.update(op.unit, self._gradient_of(op, lease), parts)
        self._executor.pool.changed(op, lease)
        gradient = self._running.buffers[op.reads[0].buffer]
        if gradient.tier == "host" and gradient.unit == op.unit:  # not shared with units whose gradient may follow
            self._executor.pool.discard(gradient.name)

    def _gradient_of(self, op: Op, lease: Lease) -> Tensor:
        """The flat gradient that a NORM or UPDATE reads."""
        access = op.reads[0]
        return bytes_of(lease, access).view(DTYPE_OF_NBYTES[self.numerics.grad_nbytes])

    # Helpers --------------------------------------------------------------------------------------------------------

    def _weights(self, op: Op, lease: Lease, unit: int) -> Tensor:
        """The flat weights of `unit` that this op reads. It is `data`, so that for autograd copies into the same memory
        do not count as changes."""
        return bytes_of(lease, find_access(op.reads, Weights(unit))).view(self.dtype).data

    def _views(self, op: Op, lease: Lease, unit: int) -> dict[str, Tensor]:
        """The parameters of `unit`, without gradients."""
        return self._binders[unit].bind(self._weights(op, lease, unit))

    def _waiting_for_weights(self, step: StepState, op: Op, lease: Lease) -> AbstractContextManager[object]:
        """While active, each read of the unit's own weights waits until they have arrived."""
        owns = any(access.content == Weights(op.unit) for access in op.reads)
        return step.phases.waiting_for(self._weights(op, lease, op.unit)) if owns else nullcontext()

    def _locate(self, buffer: str, start: int, content: object) -> str:
        return describe_place(self.spec, self._layouts, self._running, buffer, start, content, self.dtype.itemsize)

    def _reseed(self, step: StepState, unit: int, micro: int) -> None:
        self.device.seed(call_seed(self.seed, step.number, unit, self.world.number(micro)))


def call_seed(seed: int, step: int, unit: int, micro: int) -> int:
    """The seed of a unit's call in a step, from 0 to 2**63 - 1.

    These are the first 63 bits of BLAKE2b (RFC 7693) over the four numbers in decimal, separated by spaces. So dropout
    depends on neither the policy nor Python's version.
    """
    digest = hashlib.blake2b(f"{seed} {step} {unit} {micro}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _finite_loss(step: StepState) -> float:
    """The loss, once the last LOSS is done. Raises `NonFinite`."""
    return _finite_sum([] if step.landed is None else [step.landed.item()], step)


def _finite_sum(terms: Sequence[float], step: StepState, on: str = "", fix: str = NOTHING_UPDATED) -> float:
    """The sum of the terms in order, as LOSS ops add them. Raises `NonFinite`, in a training step with `fix`."""
    loss = reduce(add, terms) if terms else 0.0
    if not math.isfinite(loss):
        what = f"the loss is {loss}{on}"
        if step.sink is None:
            raise NonFinite(what, where="evaluation", fix="inspect the batch and the weights", of_loss=True)
        raise NonFinite(what, fix=fix, of_loss=True)
    return loss


class StepInfo(NamedTuple):
    """What one rank tells the others before a step."""

    targets: int
    """Number of target tokens."""
    divisors: list[float]
    """Of each micro-batch."""
    digest: str
    """Of the schedule's collectives, which must match."""
    settings: Mapping[str, object]
    """Step number, seed and optimizer settings, which must be equal."""


class MicroBatchReport(NamedTuple):
    """The results of one micro-batch in a step."""

    terms: list[float]
    """What it has added to the loss; empty with a single rank."""
    reported: dict[str, float]
    """Sums that the loss function reports."""
    router_loss: float | None
    """Without the coefficient."""


def _own_reports(step: StepState) -> list[MicroBatchReport]:
    """The reports of this rank's micro-batches, in order."""
    found = []
    for micro in range(len(step.divisors)):
        names, values = step.reported.get(micro, ((), torch.empty(0)))
        router_loss = step.router_losses.get(micro)
        terms = [term.item() for term in step.terms.get(micro, ())]
        reported = dict(zip(names, values.tolist(), strict=True))
        found.append(MicroBatchReport(terms, reported, None if router_loss is None else router_loss.item()))
    return found


def _reports(
    reports: Sequence[MicroBatchReport], divisors: Sequence[float], scale: float
) -> tuple[dict[str, float], tuple[dict[str, float], ...]]:
    """`metrics` and `by_micro_batch` of a `StepResult`."""
    sums: dict[str, float] = {}
    each: tuple[dict[str, float], ...] = tuple({} for _ in divisors)
    for micro, found, divisor in zip(reports, each, divisors, strict=True):
        for name, number in micro.reported.items():
            sums[name] = sums.get(name, 0.0) + number
        found.update(_averages(micro.reported, 1 / (divisor or 1.0)))
        if micro.router_loss is not None:
            found["aux_loss"] = micro.router_loss
    return _averages(sums, scale), each


def _averages(sums: Mapping[str, float], scale: float) -> dict[str, float]:
    """Sums times `scale`; a sum with its own count is divided by that instead, and left out if the count is 0."""
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
    **dict.fromkeys(("PACK", "UNPACK"), Streamer._stage),
    "FORWARD": Streamer._forward,
    "LOSS": Streamer._loss,
    "BACKWARD": Streamer._backward,
    "GATHER": Streamer._gather,
    "REDUCE": Streamer._reduce,
    "BARRIER": Streamer._barrier,
    "NORM": Streamer._norm,
    "UPDATE": Streamer._update,
}
"""Kind of op -> the method that performs it."""
