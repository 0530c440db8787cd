"""State of the running step: its micro-batches, values that live between ops, and the memory an op uses.

Between the forward and backward of a micro-batch, `Activations` keeps the arguments of the layers' calls, inputs of
units, the autograd graphs that the policy keeps, and the gradient on its way down. An input has the name of its buffer
in the schedule and is released after the last op that names it, so memory follows the schedule. An offloaded input is
bytes in a slot, with its shape and strides kept beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatrain.engine.batch import MicroBatch
from megatrain.engine.chunked_loss import LossFn
from megatrain.engine.gradient_accumulation import GradientReceiver
from megatrain.engine.resumable_call import NO_PAUSES, PausePoints
from megatrain.engine.weights import BoundWeights
from megatrain.errors import MegaTrainError, ModelError
from megatrain.memory import Lease
from megatrain.model import Call, Stored
from megatrain.schedule import Access, Op, Schedule
from megatrain.schedule.contents import Arguments, Content, Gradient, Hidden, Side, SideGradient, Weights
from megatrain.spec import Work


@dataclass(frozen=True, slots=True)
class KeptGraph:
    """A layer's autograd graph, from its input leaf to its output, which itself is not kept."""

    bound: BoundWeights
    input: Tensor
    output: GradientEdge
    """Of the hidden state."""
    made: dict[int, GradientEdge]
    """Of side values that the layer has made, by number."""
    given: dict[int, Tensor]
    """Side values that it was given, as leaves."""


@dataclass(slots=True)
class Activations:
    """Values between ops of one step, by micro-batch or by (unit, micro-batch)."""

    calls: dict[tuple[int, int], list[Call]] = field(default_factory=dict)
    """(unit that makes them, micro-batch) -> the arguments of each layer's call; of an encoder only with images."""
    answers: dict[int, AbstractContextManager[object]] = field(default_factory=dict)
    """Micro-batch with images -> the context in which values of an encoder's arguments are read on the host."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Transient buffer of the schedule -> input of a unit, [batch, length, hidden size]."""
    forms: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Shape, strides and dtype of an offloaded input, as a tensor without memory."""
    graphs: dict[tuple[int, int], KeptGraph] = field(default_factory=dict)
    stored: dict[tuple[int, int], Stored] = field(default_factory=dict)
    """Outputs of single ops in a layer, kept in addition to its input."""
    sides: dict[str, Tensor] = field(default_factory=dict)
    """Transient buffer of the schedule -> side value, or the gradient of one."""
    side_forms: dict[tuple[type[Content], int, int], Tensor] = field(default_factory=dict)
    """(kind, number, micro-batch) -> shape, strides and dtype of an offloaded one, as a tensor without memory."""
    beyond: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    """Micro-batch -> gradients of what only some have (`Call.takes`), which no schedule knows."""
    taps: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """(unit, micro-batch) -> what the prologue adds to the gradient of the input of an encoder's layer."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Gradient with respect to the input of the unit whose backward ran last, [batch, length, hidden size]."""

    def release(self, access: Access) -> None:
        """Free a transient buffer that no later op names: an input, or the arguments of a micro-batch's layers."""
        for kept in (self.inputs, self.sides):
            if access.buffer in kept:
                del kept[access.buffer]
        if type(access.content) is Arguments:
            self.calls.pop((access.content.of, access.content.micro), None)
            if access.content.of:
                self.answers.pop(access.content.micro, None)

    def sides_read(self, op: Op, lease: Lease) -> dict[int, Tensor]:
        """The side values that an op reads and that are not the input of a unit, by number."""
        return {side.number: self._side(side, access, lease) for side, access in sides_in(op.reads, Side)}

    def keep_sides(self, op: Op, lease: Lease, made: Mapping[int, Tensor], where: str) -> None:
        """Keep the side values that the op writes; others are known from an earlier run of the layer. Raises
        `ModelError` for one that is larger than its slot."""
        for side, access in sides_in(op.writes, Side):
            value = made[side.number].detach()
            alone = value.untyped_storage().nbytes() == value.nbytes  # else it would keep more than was planned
            self._keep_side(side, access, lease, value if alone or access.buffer in lease else value.clone(), where)

    def take_sides(self, op: Op, numbers: Collection[int]) -> dict[int, Tensor]:
        """Those of these side values that the op reads, by number, which nothing needs after it."""
        read = sides_in(op.reads, Side)
        return {side.number: self.sides.pop(access.buffer) for side, access in read if side.number in numbers}

    def side_gradients(self, op: Op, lease: Lease, made: Collection[int]) -> dict[int, Tensor]:
        """Take the gradients of what a unit has made, by number; none where no later unit has used it."""
        gradients = dict[int, Tensor]()
        for sum_, access in sides_in(op.reads, SideGradient):
            if sum_.number in made and self._has(sum_, access):
                gradients[sum_.number] = self._side(sum_, access, lease)
                self.sides.pop(access.buffer, None)
                self.side_forms.pop(_key(sum_), None)
        return gradients | self.beyond.pop(op.micro) if op.unit == 0 and op.micro in self.beyond else gradients

    def add_side_gradients(self, op: Op, lease: Lease, terms: Mapping[int, Tensor | None], where: str) -> None:
        """Add to the gradients of what a unit has used. Raises `ModelError` for one that is larger than its slot."""
        for sum_, access in sides_in(op.writes, SideGradient):
            term = terms.get(sum_.number)
            if term is not None and self._has(sum_, access):
                self._side(sum_, access, lease).add_(term)
            elif term is not None:
                self._keep_side(sum_, access, lease, term, where)
        for number, term in terms.items():
            if number < 0 and term is not None:
                into = self.beyond.setdefault(op.micro, {})
                into[number] = into[number].add_(term) if number in into else term

    def _has(self, side: Side | SideGradient, access: Access) -> bool:
        return access.buffer in self.sides or _key(side) in self.side_forms

    def _side(self, side: Side | SideGradient, access: Access, lease: Lease) -> Tensor:
        """A side value, or the gradient of one, from a slot or as another op has left it."""
        if access.buffer in lease:
            return unpack(bytes_of(lease, access).data, self.side_forms[_key(side)])
        return self.sides[access.buffer]

    def _keep_side(self, side: Side | SideGradient, access: Access, lease: Lease, value: Tensor, where: str) -> None:
        if access.buffer in lease:
            self.side_forms[_key(side)] = pack(value, bytes_of(lease, access), where)
        else:
            self.sides[access.buffer] = value


SideContent = TypeVar("SideContent", Side, SideGradient)


def sides_in(accesses: Sequence[Access], kind: type[SideContent]) -> list[tuple[SideContent, Access]]:
    """The accesses of side values, or of their gradients, with what they access."""
    return [(access.content, access) for access in accesses if isinstance(access.content, kind)]


def _key(side: Side | SideGradient) -> tuple[type[Content], int, int]:
    return type(side), side.number, side.micro


def pack(hidden: Tensor, memory: Tensor, where: str) -> Tensor:
    """Copy an input with its strides to memory, uint8[at least its bytes]; return its form, a tensor without memory.

    The strides are kept because the same computation on other strides may differ in bits. Raises `ModelError` for an
    input that is larger than planned, as of a model in bfloat16 that passes float32 between layers.
    """
    form = torch.empty_like(hidden, device="meta")  # the strides of a dense tensor; contiguous ones of any other
    if form.nbytes > memory.nbytes:
        what = f"a layer's input takes {form.nbytes:,} bytes ({form.dtype}), but {memory.nbytes:,} were planned"
        raise ModelError(what, where=where, fix="keep its inputs on the device: activations='recompute', no rows")
    unpack(memory, form).copy_(hidden)
    return form


def unpack(memory: Tensor, form: Tensor) -> Tensor:
    """The input that `pack` put in memory, as a view of it."""
    return torch.as_strided(memory[: form.nbytes].view(form.dtype), form.shape, form.stride())


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


@dataclass(frozen=True)
class StepInput:
    """What a step is asked: checked micro-batches, and the loss that they have."""

    micro_batches: Sequence[MicroBatch] = ()
    """Of this rank, staged for the device."""
    work: Work = field(default_factory=partial(Work, (1,)))
    loss_fn: LossFn | None = None
    """Cross-entropy if `None`."""
    router_weights: Sequence[float] | None = None
    """Per micro-batch, the weight of its router auxiliary loss in the step's loss; by default its share of the
    divisor."""


@dataclass(slots=True)
class StepState:
    """Inputs, options and partial results of the running step."""

    schedule: Schedule
    micro_batches: Sequence[MicroBatch]
    """What the model gets of each."""
    labels: list[Tensor]
    """Per micro-batch, int64[batch, length] on the host; empty if only logits are computed."""
    receiver: GradientReceiver | None
    """`None` if no gradients are computed."""
    number: int
    """The step's number, from 0."""
    scale: float
    """Factor of the loss: 1 / the step's divisor."""
    loss_fn: LossFn | None = None
    own: Sequence[MicroBatch] = ()
    """The micro-batches with the entries that only the loss gets."""
    infos: Sequence[StepInfo] = ()
    """Of each rank."""
    router_weights: Sequence[float] = ()
    """Per micro-batch, the weight of its router auxiliary loss, in units of the divisors."""
    targets: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Per micro-batch, the result of `targets_of` in staging buffers; empty if compute reads host memory."""
    landed: Tensor | None = None
    """The loss on the host; valid when the last LOSS is done."""
    loss: Tensor | None = None
    """Sum of the losses so far, float64 scalar on the device; `None` before the first LOSS."""
    terms: dict[int, list[Tensor]] = field(default_factory=dict)
    """Micro-batch -> the terms it has added to the loss, on the host; only with several ranks."""
    largest: dict[int, list[Tensor]] = field(default_factory=dict)
    """Unit -> for each shard of its gradient the largest magnitude that each rank has sent, float32[ranks] on the host;
    valid when the step is done, since a device may still be copying them."""
    reported: dict[int, tuple[tuple[str, ...], Tensor]] = field(default_factory=dict)
    """Micro-batch -> names and values of the sums that the loss function reports, float64[names] on the host."""
    router_losses: dict[int, Tensor] = field(default_factory=dict)
    """Micro-batch -> its router auxiliary loss without the coefficient, float64 scalar on the host."""
    activations: Activations = field(default_factory=Activations)
    absent: dict[int, list[str]] = field(default_factory=dict)
    """Unit -> trained parameters without a gradient, once its sum is complete."""
    logits_to_keep: int = 1
    """At how many last positions to compute logits; 0 for all."""
    logits: Tensor | None = None
    """[rows, positions, vocabulary]."""
    loss_is_finite: bool = False
    phases: PausePoints = NO_PAUSES
    """Of the call that is running."""


# Memory of an op ------------------------------------------------------------------------------------------------------
#
# Finds the memory that an op has leased by what it declares.


DTYPE_OF_NBYTES = {2: torch.bfloat16, 4: torch.float32}
"""Bytes per element of a gradient -> its dtype."""


def bytes_of(lease: Lease, access: Access) -> Tensor:
    """The leased bytes of an access, uint8."""
    return lease[access.buffer][access.start : access.stop]


def weights_in(accesses: Sequence[Access], unit: int) -> Access | None:
    """The access of a unit's weights, if there is one. For each op of each step, hence no comparison of contents."""
    for access in accesses:
        content = access.content
        if type(content) is Weights and content.unit == unit and not content.version:
            return access
    return None


def declares(accesses: Sequence[Access], kind: type[Content]) -> bool:
    """Whether one of these accesses has a content of that kind."""
    return kind in [type(access.content) for access in accesses]


def input_in(accesses: Sequence[Access], unit: int, micro: int) -> Access | None:
    """The access of a unit's input for a micro-batch, if there is one."""
    for access in accesses:
        content = access.content
        if type(content) is Hidden and content.unit == unit and content.micro == micro:
            return access
    return None


def gradient_in(accesses: Sequence[Access], unit: int) -> Access:
    """The access of a unit's gradient, or of a partial sum of it."""
    for access in accesses:
        content = access.content
        if type(content) is not Gradient or content.unit != unit or content.version:
            continue
        if content.terms is not None or not content.changing:
            return access
    raise MegaTrainError(f"the op declares no gradient of unit {unit}")
