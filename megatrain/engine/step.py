"""What each op of a training step does: the streamer.

The streamer gives every op of a schedule its meaning, in terms of a ported model, leased memory and activations. It
changes no state itself: gradients go to a sink. Randomness inside layers (dropout) is a function of (seed, step, unit,
micro-batch) alone, so a recomputed layer draws what it drew before, and no schedule can change what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.device import Device
from megatrain.engine.activations import Activations, Graph
from megatrain.engine.batch import IGNORED, MicroBatch, model_inputs, shifted
from megatrain.engine.executor import Executor
from megatrain.engine.gradients import GradSink, UnitSum, send_to_sum
from megatrain.engine.loss import loss_and_gradients, loss_only
from megatrain.engine.weights import Bound, UnitBinder, names_weights
from megatrain.errors import MegaTrainError, NonFinite
from megatrain.layout import layout_of
from megatrain.memory import Held, Pool
from megatrain.model import PortedModel
from megatrain.schedule import Access, Op, Schedule
from megatrain.spec import Policy, Precision

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
DTYPE_OF_NBYTES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True, slots=True)
class StepResult:
    """`loss` is the mean over all target tokens of the step; `tokens` counts them."""

    loss: float
    tokens: int


@dataclass(slots=True)
class _Current:
    """The step under way."""

    micro_batches: Sequence[MicroBatch]
    targets: list[Tensor]
    """Per micro-batch, int64[batch x length] on the host; empty when only the next logits are wanted."""
    sink: GradSink | None
    number: int
    scale: float
    loss: Tensor
    """Sum over target tokens so far, float64 scalar on the device."""
    activations: Activations
    sums: dict[int, UnitSum]
    logits: Tensor | None = None


class Streamer:
    """Runs schedules of one model on one device. `seed` decides everything random inside layers."""

    def __init__(self, ported: PortedModel, device: Device, pool: Pool, policy: Policy, seed: int = 0) -> None:
        self.ported, self.device, self.policy, self.seed = ported, device, policy, seed
        self.spec = ported.spec
        self.dtype = DTYPES[policy.precision]
        self._executor = Executor(device, pool)
        self._layouts = [layout_of(unit) for unit in self.spec.units]
        self._binders = [
            UnitBinder(layout, ported.prefix(unit - 1) if unit in self.spec.layers else "")
            for unit, layout in enumerate(self._layouts)
        ]
        self._actions = {
            "FETCH": self._copy,
            "GRAD": self._copy,
            "FORWARD": self._forward,
            "LOSS": self._loss,
            "BACKWARD": self._backward,
            "NORM": self._norm,
            "UPDATE": self._update,
        }
        ported.to_device(device.torch_device)

    def run(
        self, schedule: Schedule, micro_batches: Sequence[MicroBatch], sink: GradSink | None, number: int = 0
    ) -> StepResult:
        """Execute a schedule; `number` is the step's, for randomness. Leaves the caller's random state as it was.

        Raises `NonFinite` when the loss is not finite, and whatever an op or the sink raises.
        """
        targets = [shifted(batch["labels"].cpu()).reshape(-1) for batch in micro_batches]
        tokens = sum(int((target != IGNORED).sum()) for target in targets)
        with self._begun(micro_batches, targets, sink, number, 1.0 / max(tokens, 1)):
            self._executor.run(schedule, self._act)
            return StepResult(self._finite_loss() / max(tokens, 1), tokens)

    def next_logits(self, schedule: Schedule, input_ids: Tensor) -> Tensor:
        """Execute a forward schedule on `input_ids` int64[1, length]; logits after the last, float32[vocabulary]."""
        with self._begun([{"input_ids": input_ids}], [], None, 0, 0.0) as now:
            self._executor.run(schedule, self._act)
            assert now.logits is not None
            return now.logits[0].float().cpu()

    @contextmanager
    def _begun(
        self,
        micro_batches: Sequence[MicroBatch],
        targets: list[Tensor],
        sink: GradSink | None,
        number: int,
        scale: float,
    ) -> Iterator[_Current]:
        """The step under way, until the end of the block; the caller's random state is restored."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
        random_state = torch.get_rng_state()
        self._now = _Current(micro_batches, targets, sink, number, scale, loss, Activations(), {})
        try:
            yield self._now
        finally:
            del self._now
            torch.set_rng_state(random_state)

    def _act(self, op: Op, held: Held) -> None:
        with torch.no_grad():
            self._actions[op.kind](op, held)

    # Copies ---------------------------------------------------------------------------------------------------------

    def _copy(self, op: Op, held: Held) -> None:
        """FETCH: a shard of weights to its slot. GRAD: a shard of gradients home, in the dtype that crosses the bus."""
        (read,), (write,) = op.reads, op.writes
        source, target = _part(held, read), _part(held, write)
        if source.numel() > target.numel():
            source, target = source.view(torch.float32).to(torch.bfloat16), target.view(torch.bfloat16)
        elif source.numel() < target.numel():
            source, target = source.view(torch.bfloat16).to(torch.float32), target.view(torch.float32)
        target.copy_(source, non_blocking=True)

    # Compute --------------------------------------------------------------------------------------------------------

    def _forward(self, op: Op, held: Held) -> None:
        unit, micro = op.unit, op.micro
        alive = self._now.activations
        self._reseed(unit, micro)
        if unit == 0:
            inputs = model_inputs(self._now.micro_batches[micro], self.device.torch_device)
            weights = self._binders[0].bind(self._weights(op, held, 0))
            alive.inputs[1, micro], alive.calls[micro] = self.ported.prologue(weights, inputs)
            return
        keeps = any(access.buffer.startswith("device/graph/") for access in op.writes)
        hidden = alive.inputs[unit, micro]
        if keeps:
            graph = self._grown(op, held, hidden)
            alive.graphs[unit, micro] = graph
            alive.inputs[unit + 1, micro] = graph.output.detach()
        else:
            weights = self._binders[unit].bind(self._weights(op, held, unit))
            call = alive.calls[micro][unit - 1]
            alive.inputs[unit + 1, micro] = self.ported.layer(unit - 1, weights, hidden, call)
        if keeps or self._now.sink is None:
            del alive.inputs[unit, micro]

    def _grown(self, op: Op, held: Held, hidden: Tensor) -> Graph:
        """Run a layer with its autograd graph; what autograd saves of the weights it saves by name."""
        bound = Bound(self._weights(op, held, op.unit))
        leaves = self._binders[op.unit].leaves(bound.flat)
        leaf = hidden.detach().requires_grad_()
        call = self._now.activations.calls[op.micro][op.unit - 1]
        with torch.enable_grad(), names_weights(bound):
            output = self.ported.layer(op.unit - 1, leaves, leaf, call)
        return Graph(bound, leaves, leaf, output)

    def _loss(self, op: Op, held: Held) -> None:
        unit, micro, now = op.unit, op.micro, self._now
        self._reseed(unit, micro)
        hidden = now.activations.inputs.pop((unit, micro))
        flat = hidden.reshape(-1, hidden.shape[-1])
        chunk = self.policy.loss_chunk_tokens
        owners = [0, unit] if self.spec.tied else [unit]
        if now.sink is None:
            weights = {k: v for o in owners for k, v in self._binders[o].bind(self._weights(op, held, o)).items()}
            if now.targets:
                now.loss += loss_only(lambda part: self.ported.head(weights, part), flat, now.targets[micro], chunk)
            else:
                now.logits = self.ported.head(weights, flat[-1:])
            return
        leaves: dict[str, Tensor] = {}
        borrowed = self.spec.units[unit].borrows
        for owner in owners:
            bound = self._binders[owner].leaves(self._weights(op, held, owner))
            used = {name: leaf for name, leaf in bound.items() if owner == unit or name in borrowed}
            send_to_sum(used.items(), self._sum(op, held, owner))
            leaves |= used
        loss, gradient = loss_and_gradients(
            lambda part: self.ported.head(leaves, part),
            list(leaves.values()),
            flat,
            now.targets[micro],
            chunk,
            now.scale,
        )
        now.loss += loss
        now.activations.gradients[micro] = gradient.view_as(hidden)
        self._close_finished(op)

    def _backward(self, op: Op, held: Held) -> None:
        unit, micro, alive = op.unit, op.micro, self._now.activations
        total = self._sum(op, held, unit)
        if unit == 0:
            self._backward_prologue(op, held, total)
        else:
            graph = alive.graphs.pop((unit, micro), None)
            if graph is None:
                self._reseed(unit, micro)
                graph = self._grown(op, held, alive.inputs.pop((unit, micro)))
            else:
                graph.bound.flat = self._weights(op, held, unit)
            send_to_sum(self._full_names(unit, graph.leaves), total)
            inputs = [graph.input, *graph.leaves.values()]
            torch.autograd.backward([graph.output], [alive.gradients.pop(micro)], inputs=inputs)
            assert graph.input.grad is not None
            alive.gradients[micro] = graph.input.grad
        self._close_finished(op)

    def _backward_prologue(self, op: Op, held: Held, total: UnitSum) -> None:
        """Run the prologue again, this time for its gradient; it is cheap, and nothing of it has been kept."""
        alive = self._now.activations
        leaves = self._binders[0].leaves(self._weights(op, held, 0))
        self._reseed(0, op.micro)
        with torch.enable_grad():
            inputs = model_inputs(self._now.micro_batches[op.micro], self.device.torch_device)
            hidden, _ = self.ported.prologue(leaves, inputs)
        send_to_sum(leaves.items(), total)
        torch.autograd.backward([hidden], [alive.gradients.pop(op.micro)], inputs=list(leaves.values()))
        del alive.calls[op.micro]

    # Gradients ------------------------------------------------------------------------------------------------------

    def _sum(self, op: Op, held: Held, unit: int) -> UnitSum:
        """The gradient of `unit` under construction, begun where the schedule says that the first term is written."""
        if unit not in self._now.sums:
            access = _access_of(op.writes, f"g{unit}")
            size = self._layouts[unit].size
            flat = _part(held, access).view(DTYPE_OF_NBYTES[(access.stop - access.start) // size])
            self._now.sums[unit] = UnitSum(self._layouts[unit], flat)
        return self._now.sums[unit]

    def _close_finished(self, op: Op) -> None:
        """A gradient whose last term this op has added is complete."""
        for access in op.writes:
            if access.content.startswith("g") and "~" not in access.content:
                self._now.sums.pop(int(access.content[1:])).close()

    def _full_names(self, unit: int, leaves: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return zip((field.name for field in self._layouts[unit].fields), leaves.values(), strict=True)

    def _norm(self, op: Op, held: Held) -> None:
        if op.unit == self.spec.epilogue:
            self._finite_loss()  # before any gradient of this step is used
        assert self._now.sink is not None
        self._now.sink.norm(op.unit, self._landed(op, held))

    def _update(self, op: Op, held: Held) -> None:
        assert self._now.sink is not None
        self._now.sink.update(op.unit, self._landed(op, held))

    def _landed(self, op: Op, held: Held) -> Tensor:
        access = op.reads[0]
        return _part(held, access).view(DTYPE_OF_NBYTES[self.policy.grad_nbytes])

    # Small things ---------------------------------------------------------------------------------------------------

    def _weights(self, op: Op, held: Held, unit: int) -> Tensor:
        """The flat weights of `unit`, where this op reads them."""
        return _part(held, _access_of(op.reads, f"w{unit}")).view(self.dtype)

    def _finite_loss(self) -> float:
        loss = self._now.loss.item()
        if not math.isfinite(loss):
            raise NonFinite(
                f"the loss is {loss}",
                where=f"step {self._now.number}",
                fix="nothing was updated; lower the learning rate or inspect the batch",
            )
        return loss

    def _reseed(self, unit: int, micro: int) -> None:
        self.device.seed(hash((self.seed, self._now.number, unit, micro)) & 0x7FFF_FFFF_FFFF_FFFF)


def _part(held: Held, access: Access) -> Tensor:
    return held[access.buffer][access.start : access.stop]


def _access_of(accesses: Sequence[Access], content: str) -> Access:
    """The access whose content is `content`, or a partial sum of it."""
    for access in accesses:
        if access.content.partition("~")[0] == content:
            return access
    raise MegaTrainError(f"the op declares no {content}")
