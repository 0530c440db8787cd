"""Runs the schedule of a step on a device: prepares its inputs, runs its ops, and reads its result.

Training state is not changed here: gradients go to a receiver. Randomness inside layers (dropout) depends on (seed,
step, unit, micro-batch) alone, so a recomputed layer draws the same numbers again, under any schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatrain.engine import backward, collectives, copies, forward, loss, update
from megatrain.engine.batch import count_targets, model_entries, targets_of
from megatrain.engine.chunked_loss import StepResult, divisor_of, own_entries
from megatrain.engine.context import OpContext
from megatrain.engine.executor import Action, Executor
from megatrain.engine.gradient_accumulation import GradientReceiver
from megatrain.engine.reports import refuse_unlike_steps, result_of
from megatrain.engine.resumable_call import (
    NO_PAUSES,
    PausePoints,
    cancelled_on_exit,
    default_torch_modes,
    resumable_calls,
)
from megatrain.engine.step_state import StepInfo, StepInput, StepState
from megatrain.errors import LossError
from megatrain.memory import Lease
from megatrain.schedule import Op, Schedule, Timeline
from megatrain.schedule.ops import Kind

RunOp = Callable[[OpContext, StepState, Op, Lease], None]

ACTIONS: dict[Kind, RunOp] = {
    "READ": copies.read,
    "WRITE": copies.write,
    "FETCH": copies.copy,
    "PLACE": copies.copy,
    "GRAD": copies.copy,
    "OFFLOAD": copies.copy,
    "RELOAD": copies.copy,
    "FORWARD": forward.forward,
    "LOSS": loss.loss,
    "BACKWARD": backward.backward,
    "GATHER": collectives.gather,
    "REDUCE": collectives.reduce,
    "BARRIER": collectives.barrier,
    "ALLTOALL": collectives.all_to_all,
    "NORM": update.norm,
    "UPDATE": update.update,
    "MOMENTUM": update.momentum,
    "ORTHOGONALIZE": update.orthogonalize,
    "APPLY": update.apply,
}
"""Kind of op -> the function that runs it."""


class Streamer:
    """Runs schedules of one model on one device, as one rank."""

    def __init__(self, context: OpContext) -> None:
        self.context = context
        self.executor = Executor(context.device, context.pool, self._locate)
        self.region: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered around the ops of each schedule only, the part of a step that may be interrupted from outside."""
        self._running: Schedule | None = None
        if context.numerics.mlp_chunk_tokens:
            _ = context.ported.parts  # found now, not during a step
        context.ported.compute_on(context.device.torch_device)

    @property
    def timeline(self) -> Timeline | None:
        """When the ops of the last schedule ran, if the device is timed."""
        return self.executor.timeline

    def run_schedule(
        self, schedule: Schedule, asked: StepInput, receiver: GradientReceiver | None, number: int = 0
    ) -> StepResult:
        """Run a schedule and return loss and metrics of all ranks. Keeps the caller's random state.

        receiver: of the gradients; `None` for an evaluation. number: the step's number, from 0, which randomness
        depends on. Raises `NonFinite` if the loss is not finite, `LossError` if the loss function returns no loss, and
        whatever an op, the receiver or the loss function raises.
        """
        step = self.begin(schedule, asked, receiver, number)
        with self.running(step) as run:
            run()
        return self.result(step)

    # `Engine.step` does the same by these three, so that few calls lie between it and a layer.

    def begin(
        self, schedule: Schedule, asked: StepInput, receiver: GradientReceiver | None, number: int = 0
    ) -> StepState:
        """The state of a step before its first op. Raises `RankError` if ranks do not fit together, and `LossError`."""
        context, batches = self.context, asked.micro_batches
        context.world.at(f"step {number + 1:,}", self.oldest_op)
        settings: dict[str, object] = {}
        if receiver is not None:
            settings = {"step": number, "seed": context.seed, **receiver.settings}

        def mine() -> StepInfo:
            targets = sum(count_targets(batch) for batch in batches)
            divisors = [divisor_of(asked.loss_fn, batch) for batch in batches]
            return StepInfo(targets, divisors, schedule.digest if context.world.size > 1 else "", settings)

        infos = [StepInfo(*info) for info in context.world.agree("a schedule", mine)]
        refuse_unlike_steps(infos)
        total = sum(context.world.dealt([info.divisors for info in infos]))
        if batches and not total > 0:
            raise LossError("is 0 for every micro-batch", where="divisor", fix="return more than 0 for at least one")
        only_loss = own_entries(asked.loss_fn)
        routed = infos[context.world.rank].divisors
        if asked.router_weights is not None:
            routed = [weight * total for weight in asked.router_weights]
        step = StepState(
            schedule,
            [model_entries(batch, only_loss) for batch in batches],
            [batch["labels"].cpu() for batch in batches],
            receiver,
            number,
            scale=1.0 / (total or 1.0),
            loss_fn=asked.loss_fn,
            own=batches,
            infos=infos,
            router_weights=routed,
        )
        if not context.device.shares_memory:
            on_host = [part for labels in step.labels for part in targets_of(labels)]
            staged = iter(context.device.staged(on_host))
            step.targets = list(zip(staged, staged, strict=True))
        return step

    @contextmanager
    def running(self, step: StepState) -> Iterator[Callable[[], None]]:
        """Yields what runs all ops of a step. The caller's autocast, inference mode and random state have no effect on
        them and are kept."""
        context, schedule = self.context, step.schedule
        if schedule is not self._running:
            context.device.tidy()  # memory that other work has freed may be fragmented for this one
        self._running = schedule
        modes = partial(default_torch_modes, context.device.torch_device.type)

        def run_in_phases(op: Op, lease: Lease, phases: PausePoints) -> None:
            step.phases = phases
            with modes():  # they are each thread's own
                ACTIONS[op.kind](context, step, op, lease)
            step.phases = NO_PAUSES

        calls = resumable_calls(schedule, context.layouts, context.device.alongside, run_in_phases)
        whole: dict[Kind, Action] = {kind: partial(run, context, step) for kind, run in ACTIONS.items()}
        actions = [whole[op.kind] for op in schedule.ops]
        for place, call in calls.items():
            actions[place] = call.run_phase
        exact = context.device.exact_float32() if context.numerics.precision == "fp32" else nullcontext()
        cancelled = cancelled_on_exit(calls)
        try:
            with exact, context.device.preserved_random_state(), self.region(), cancelled, modes():
                yield partial(self.executor.run, schedule, actions, step.activations.release)
        except BaseException:
            context.forget_views()
            raise
        context.pool.unsaved.slots_are_home()

    def result(self, step: StepState) -> StepResult:
        """Loss and metrics of all ranks, once the ops have run. Raises `NonFinite`."""
        return result_of(self.context, step)

    def next_logits(self, schedule: Schedule, inputs: Mapping[str, Any], logits_to_keep: int = 1) -> Tensor:
        """Run a forward schedule. `inputs` are the arguments of a forward, with `input_ids` int64[rows, length].

        Returns the logits at the last `logits_to_keep` positions (0 for all), float32[rows, positions, vocabulary], on
        the device, in memory that belongs to the caller's own stream. The layers fill a cache among the arguments.
        """
        device, world = self.context.device, self.context.world
        device.synchronize()  # the inputs may come from work that no op waits for
        step = StepState(schedule, [inputs], [], None, 0, 0.0, logits_to_keep=logits_to_keep)
        world.meet()  # by now all ranks have finished their updates of the weights
        with self.running(step) as run:
            run()
        world.meet()
        assert step.logits is not None
        logits = step.logits.to(torch.float32, copy=True)  # an op's result is in memory of its stream, which would
        device.synchronize()  # reuse it without waiting for the caller's
        return logits

    def under_way(self) -> tuple[list[tuple[str, str, float]], float]:
        """(op, stream, seconds it has been running) of each busy stream; seconds since any op began or ended."""
        now = time.monotonic()
        running = [(op.name, stream, now - since) for stream, (op, since) in list(self.executor.under_way.items())]
        return running, now - self.executor.last_progress

    def oldest_op(self) -> str:
        """The op that has been running for longest, as "OP on STREAM"; empty if there is none."""
        ops, _ = self.under_way()
        op, stream, _ = max(ops, key=lambda running: running[2], default=("", "", 0.0))
        return f"{op} on {stream}" if op else ""

    def _locate(self, buffer: str, start: int, content: object) -> str:
        return buffer if self._running is None else self.context.locate(self._running, buffer, start, content)
