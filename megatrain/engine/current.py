"""What is known of the step under way: its micro-batches, what lives between its ops, and what it has found so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatrain.engine.activations import Activations
from megatrain.engine.batch import MicroBatch
from megatrain.engine.gated import OPEN, Gates
from megatrain.engine.gradients import GradSink, UnitSum
from megatrain.engine.losses import Found, LossFn


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
    loss: Tensor | None = None
    """Sum of the losses so far, float64 scalar on the device; made by the first LOSS."""
    reported: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Micro-batch -> what the loss function reports of it, sums, float64 scalars on the device."""
    router_losses: dict[int, Tensor] = field(default_factory=dict)
    """Micro-batch -> its router auxiliary loss without the coefficient, float64 scalars on the device."""
    activations: Activations = field(default_factory=Activations)
    sums: dict[int, UnitSum] = field(default_factory=dict)
    kept: int = 1
    """How many last positions the next logits are wanted at; 0 for all."""
    logits: Tensor | None = None
    """[rows, positions, vocabulary]."""
    loss_is_finite: bool = False
    gates: Gates = OPEN
    """Of the call that is under way."""

    def count(self, micro: int, found: Found) -> None:
        """Add what a LOSS has found to what the step's have so far."""
        self.loss = found.loss if self.loss is None else self.loss + found.loss
        self.reported[micro] = found.sums
