"""What lives between a micro-batch's forward and its backward, and only there.

Per micro-batch: the calls of the layers, inputs of units, the graphs that the policy keeps, and the gradient that
travels down. An input bears the name of its buffer in the schedule and is let go of behind the last op that mentions
it, so memory follows the schedule; one that is offloaded lies in a slot as bytes, with its form beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatrain.engine.autograd import GradientDestination
from megatrain.engine.weights import Bound
from megatrain.errors import ModelError
from megatrain.model import Call, Sides, Stored
from megatrain.schedule import Access
from megatrain.schedule.contents import Arguments


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
