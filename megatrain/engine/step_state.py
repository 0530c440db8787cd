"""What is known of the step under way: its micro-batches, what lives between its ops, the memory that an op holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatrain.engine.activations import Activations
from megatrain.engine.batch import MicroBatch
from megatrain.engine.chunked_loss import LossFn
from megatrain.engine.gradient_sums import GradSink, UnitSum
from megatrain.engine.phased_call import OPEN, Phases
from megatrain.errors import MegaTrainError
from megatrain.memory import Held
from megatrain.schedule import Access
from megatrain.schedule.contents import Gradient, Weights


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
