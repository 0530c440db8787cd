"""What ops share across steps: the model's units, their device, and the settings they are computed with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.device import Device
from megatrain.dist import World
from megatrain.engine.autograd import GradientsInPlace
from megatrain.engine.batch import model_inputs
from megatrain.engine.gradient_accumulation import GradientAccumulator, SumBuffer
from megatrain.engine.resumable_call import NO_PAUSES
from megatrain.engine.step_state import DTYPE_OF_NBYTES, StepState, bytes_of, gradient_in, weights_in
from megatrain.engine.sync_free_inputs import HostAnswers
from megatrain.engine.weights import UnitBinder, UnitLeaves, UnitWeights, describe_place
from megatrain.memory import Lease, Pool
from megatrain.model import PortedModel
from megatrain.schedule import Op, Schedule
from megatrain.schedule.contents import Gradient
from megatrain.spec import ModelSpec, Numerics, Policy, Precision
from megatrain.spec.layout import Ownership, layout_of

NOTHING: AbstractContextManager[object] = nullcontext()
"""For blocks without a context."""

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class UnitRole:
    """A unit's place in the model, as every op of every step asks for it."""

    first: int
    """The unit that makes the arguments of its layers' calls: the prologue, or the first unit of an encoder."""
    is_first: bool
    in_encoder: bool
    """Whether it is a unit of an encoder, and computes nothing for a text."""
    after: int
    """The unit that gets what this one makes of its input."""


def role_of(spec: ModelSpec, unit: int) -> UnitRole:
    """The role of a unit."""
    in_encoder = unit > spec.epilogue
    return UnitRole(spec.encoder[0] if in_encoder else 0, spec.is_first(unit), in_encoder, spec.after(unit))


class OpContext:
    """The units of one model on one device, for one rank of `world`.

    seed: determines all randomness inside layers.
    """

    def __init__(
        self,
        ported: PortedModel,
        device: Device,
        pool: Pool,
        numerics: Numerics,
        policy: Policy,
        seed: int,
        world: World,
    ) -> None:
        self.ported, self.device, self.pool, self.seed, self.world = ported, device, pool, seed, world
        self.numerics, self.policy = numerics, policy
        self.spec = ported.structure
        self.owned = Ownership.of(world.rank, numerics, policy)
        self.dtype = DTYPES[numerics.precision]
        self.roles = [role_of(self.spec, unit) for unit in range(len(self.spec.units))]
        self.layouts = [layout_of(unit) for unit in self.spec.units]
        self.binders = [
            UnitBinder(unit, f"{unit.name}." if unit.kind == "layer" and not role.is_first else "")
            for unit, role in zip(self.spec.units, self.roles, strict=True)
        ]
        self.totals = [GradientAccumulator() for _ in self.spec.units]
        """Of each unit's gradients."""
        self.computes_between = False
        """Whether the model's loop has computed anything between layers for a text."""

    # Weights --------------------------------------------------------------------------------------------------------

    def weights(self, op: Op, lease: Lease, unit: int) -> UnitWeights:
        """The weights of a unit that the op reads. They are `data`, so that for autograd copies into the same memory do
        not count as changes."""
        access = weights_in(op.reads, unit)
        assert access is not None
        views, key = self.pool.views[access.buffer], (access.start, access.stop, unit)
        if key not in views:
            views[key] = UnitWeights(bytes_of(lease, access).view(self.dtype).data)
        weights: UnitWeights = views[key]
        return weights

    def parameters(self, op: Op, lease: Lease, unit: int) -> dict[str, Tensor]:
        """The parameters of a unit, without gradients."""
        weights = self.weights(op, lease, unit)
        if weights.parameters is None:
            weights.parameters = self.binders[unit].bind(weights.flat)
        return weights.parameters

    def leaves(self, weights: UnitWeights, unit: int) -> UnitLeaves:
        """The parameters of a unit as leaves."""
        if weights.leaves is None:
            leaves = self.binders[unit].leaves(weights.flat)
            trained = self.binders[unit].trained(leaves)
            self.totals[unit].register_hooks(trained)
            weights.leaves = UnitLeaves(leaves, trained, self.in_place(trained, unit))
        return weights.leaves

    def forget_views(self) -> None:
        """A step has failed: leaves may have been left with a gradient, and sums without their last terms."""
        self.pool.views.clear()
        self.totals = [GradientAccumulator() for _ in self.spec.units]

    def waiting_for_weights(self, step: StepState, op: Op, lease: Lease) -> AbstractContextManager[object]:
        """While active, each read of the unit's own weights waits until they have arrived."""
        if step.phases is NO_PAUSES or weights_in(op.reads, op.unit) is None:
            return NOTHING
        return step.phases.waiting_for(self.weights(op, lease, op.unit).flat)

    # Gradients ------------------------------------------------------------------------------------------------------

    def in_place(self, trained: Sequence[tuple[str, Tensor]], unit: int) -> AbstractContextManager[object]:
        """In the block, gradients of a unit's weights are computed in their sums, if compute and sums share memory."""
        return GradientsInPlace(trained, self.totals[unit]) if self.policy.shares_memory else NOTHING

    def accumulator(self, op: Op, lease: Lease, unit: int) -> GradientAccumulator:
        """The accumulator for the gradient of a unit, which the op that writes the first term has begin."""
        total = self.totals[unit]
        if total.memory is None or self.policy.shares_memory:  # then a sum may return from the disk to another buffer
            access = gradient_in(op.writes, unit)
            views, key = self.pool.views[access.buffer], (access.start, access.stop, unit)
            if key not in views:
                layout = self.layouts[unit].trained
                flat = bytes_of(lease, access).view(DTYPE_OF_NBYTES[(access.stop - access.start) // layout.size])
                views[key] = SumBuffer(layout, flat)
            total.sum_in(views[key])
        return total

    def finish_complete_gradients(self, step: StepState, op: Op) -> None:
        """Finish the gradients whose last term this op has added."""
        for access in op.writes:
            if type(access.content) is Gradient and access.content.is_whole:
                unit = access.content.unit
                step.absent[unit] = self.totals[unit].finish()
                assert step.receiver is not None
                step.receiver.absent(unit, step.absent[unit])

    # Inputs and randomness ------------------------------------------------------------------------------------------

    def inputs(self, step: StepState, micro: int) -> tuple[dict[str, Any], AbstractContextManager[object]]:
        """A micro-batch on the device, and a context in which its values can be read without waiting for the device."""
        batch = step.micro_batches[micro]
        inputs = model_inputs(batch, self.device.torch_device)
        on_host = {key: value for key, value in batch.items() if isinstance(value, Tensor) and not value.is_cuda}
        return inputs, self.host_answers((inputs[key], value) for key, value in on_host.items() if key in inputs)

    def host_answers(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> AbstractContextManager[object]:
        """A context in which values of tensors on the device are read from their copies on the host, given in pairs."""
        return HostAnswers(pairs) if self.device.torch_device.type == "cuda" else NOTHING

    def reseed(self, step: StepState, unit: int, micro: int) -> None:
        """Make the call of a unit on a micro-batch draw the numbers of that call, whenever it runs."""
        self.device.seed(call_seed(self.seed, step.number, unit, self.world.number(micro)))

    def locate(self, schedule: Schedule, buffer: str, start: int, content: object) -> str:
        """The unit and parameter at byte `start` of a buffer, for messages."""
        return describe_place(self.spec, self.layouts, schedule, buffer, start, content, self.dtype.itemsize)


def call_seed(seed: int, step: int, unit: int, micro: int) -> int:
    """The seed of a unit's call in a step, from 0 to 2**63 - 1.

    These are the first 63 bits of BLAKE2b (RFC 7693) over the four numbers in decimal, separated by spaces. So dropout
    depends on neither the policy nor Python's version.
    """
    digest = hashlib.blake2b(f"{seed} {step} {unit} {micro}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
