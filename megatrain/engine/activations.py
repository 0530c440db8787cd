"""What lives between a micro-batch's forward and its backward, and only there.

Per micro-batch: the calls of the layers, the input of each unit, the graphs that the policy keeps, and the gradient
that travels down. Each is handed out once and dropped with the last use, so that memory follows the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from megatrain.engine.weights import Bound
from megatrain.model import Call, Sides


@dataclass(frozen=True, slots=True)
class Graph:
    """A layer's kept autograd graph, from its input leaf to its output."""

    bound: Bound
    leaves: dict[str, Tensor]
    input: Tensor
    output: Tensor
    sides: Sides


@dataclass(slots=True)
class Activations:
    """Everything of one step, by micro-batch or by (unit, micro-batch)."""

    calls: dict[int, list[Call]] = field(default_factory=dict)
    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Input of a unit, [batch, length, hidden size]."""
    graphs: dict[tuple[int, int], Graph] = field(default_factory=dict)
    sides: dict[tuple[int, int], Sides] = field(default_factory=dict)
    """What a layer recorded for the auxiliary loss, until the loss; from there on, the gradient of each."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Gradient of the input of the unit last visited in the backward pass, [batch, length, hidden size]."""
