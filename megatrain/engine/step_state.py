"""State of the running step: its micro-batches, values that live between ops, and the memory an op holds.

Between a micro-batch's forward and its backward live the calls of the layers, inputs of units, the graphs that the
policy keeps, and the gradient that travels down (`Activations`). An input bears the name of its buffer in the schedule
and is let go of behind the last op that mentions it, so memory follows the schedule; one that is offloaded lies in a
slot as bytes, with its form beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatrain.engine.autograd import GradientDestination
from megatrain.engine.batch import MicroBatch
from megatrain.engine.chunked_loss import LossFn
from megatrain.engine.gradient_sums import GradSink, UnitSum
from megatrain.engine.phased_call import OPEN, Phases
from megatrain.engine.weights import Bound
from megatrain.errors import MegaTrainError, ModelError
from megatrain.memory import Held
from megatrain.model import Call, Sides, Stored
from megatrain.schedule import Access
from megatrain.schedule.contents import Arguments, Gradient, Weights


@dataclass(frozen=True, slots=True)
class Graph:
    """A layer's kept autograd graph, from its input leaf to its output; the output itself is not kept."""

    bound: Bound
    leaves: dict[str, Tensor]
    input: Tensor
    outputs: list[GradientEdge]
    """Of the hidden state, and of each side."""
    target: GradientDestination
    """Where gradients of the weights are summed, once that is known."""


@dataclass(slots=True)
class Activations:
    """Everything of one step, by micro-batch or by (unit, micro-batch)."""

    calls: dict[int, list[Call]] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Transient buffer of the schedule -> the input of a unit, [batch, length, hidden size]."""
    forms: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Shape, strides and dtype of an offloaded input, as a tensor without memory."""
    graphs: dict[tuple[int, int], Graph] = field(default_factory=dict)
    stored: dict[tuple[int, int], Stored] = field(default_factory=dict)
    """Outputs of single ops of a layer, beside its input."""
    sides: dict[tuple[int, int], Sides] = field(default_factory=dict)
    """What a layer recorded for the auxiliary loss, until the loss; from there on, the gradient of each."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Gradient of the input of the unit last visited in the backward pass, [batch, length, hidden size]."""

    def let_go(self, access: Access) -> None:
        """No later op mentions this transient buffer: an input, or the arguments of a micro-batch's layers."""
        self.inputs.pop(access.buffer, None)
        if isinstance(access.content, Arguments):
            self.calls.pop(access.content.micro, None)


def pack(hidden: Tensor, memory: Tensor, where: str) -> Tensor:
    """Copy an input to memory, uint8[at least its bytes], element by element as it lies, and return its form.

    What is computed from it later is then computed from the same strides, and so to the same bit. Raises `ModelError`
    for an input that is larger than the schedule takes it to be (one in float32 between layers in bfloat16).
    """
    form = torch.empty_like(hidden, device="meta")  # the strides of a dense tensor; contiguous ones of any other
    if form.nbytes > memory.nbytes:
        what = f"a layer's input takes {form.nbytes:,} bytes ({form.dtype}), and {memory.nbytes:,} were planned for"
        raise ModelError(what, where=where, fix="keep its inputs on the device: activations='recompute', no rows")
    unpack(memory, form).copy_(hidden)
    return form


def unpack(memory: Tensor, form: Tensor) -> Tensor:
    """The input that lies in memory, as a view of it."""
    return torch.as_strided(memory[: form.nbytes].view(form.dtype), form.shape, form.stride())


@dataclass(slots=True)
class Current:
    """The step under way."""

    micro_batches: Sequence[MicroBatch]
    labels: list[Tensor]
    """Per micro-batch, int64[batch, length] on the host; empty when only the next logits are wanted."""
    sink: GradSink | None
    number: int
    scale: float
    loss_fn: LossFn | None = None
    own: Sequence[MicroBatch] = ()
    """The micro-batches with what is for the loss alone."""
    divisors: Sequence[float] = ()
    """Per micro-batch, what the sum of its losses counts for: its target tokens, or what the loss function says."""
    router_weights: Sequence[float] = ()
    """Per micro-batch, what its router auxiliary loss counts for, in units of the divisors."""
    targets: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Per micro-batch, what `targets_of` says, staged for the device; empty where compute reads host memory."""
    landed: Tensor | None = None
    """The loss on the host, once the last LOSS is done."""
    loss: Tensor | None = None
    """Sum of the losses so far, float64 scalar on the device; made by the first LOSS."""
    terms: dict[int, list[Tensor]] = field(default_factory=dict)
    """Micro-batch -> what it has added to the loss, landed like the loss."""
    largest: dict[int, Tensor] = field(default_factory=dict)
    """Unit -> the largest magnitude that each rank has sent of its gradient, float32[ranks], landed."""
    reported: dict[int, tuple[tuple[str, ...], Tensor]] = field(default_factory=dict)
    """Micro-batch -> names of what the loss function reports of it, and sums, float64[names], landed like the loss."""
    router_losses: dict[int, Tensor] = field(default_factory=dict)
    """Micro-batch -> its router auxiliary loss without the coefficient, float64 scalars, landed like the loss."""
    activations: Activations = field(default_factory=Activations)
    sums: dict[int, UnitSum] = field(default_factory=dict)
    kept: int = 1
    """How many last positions the next logits are wanted at; 0 for all."""
    logits: Tensor | None = None
    """[rows, positions, vocabulary]."""
    loss_is_finite: bool = False
    phases: Phases = OPEN
    """Of the call that is under way."""


# Memory of an op ------------------------------------------------------------------------------------------------------
#
# The memory that an op holds, by what it declares.


DTYPE_OF_NBYTES = {2: torch.bfloat16, 4: torch.float32}


def part_of(held: Held, access: Access) -> Tensor:
    """The bytes of an access, uint8."""
    return held[access.buffer][access.start : access.stop]


def access_of(accesses: Sequence[Access], content: Weights | Gradient) -> Access:
    """The access whose content is `content`, or a partial sum of it."""
    for access in accesses:
        found = access.content
        if isinstance(found, Gradient) and found.terms is not None:
            found = Gradient(found.unit, found.version)
        if found == content:
            return access
    raise MegaTrainError(f"the op declares no {content}")
