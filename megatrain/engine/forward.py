"""The FORWARD op: the prologue or a layer on one micro-batch, with or without the graph that its backward needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatrain.engine.autograd import graph_without_tensors
from megatrain.engine.batch import TEXT_ENTRIES
from megatrain.engine.context import NOTHING, OpContext
from megatrain.engine.resumable_call import NO_PAUSES
from megatrain.engine.step_state import KeptGraph, StepState, bytes_of, declares, input_in, pack, unpack, weights_in
from megatrain.engine.weights import BoundWeights, save_weights_by_name
from megatrain.memory import Lease
from megatrain.model import Answering, Call, Keeping
from megatrain.model.ports import numbered, taken_from_prologue
from megatrain.schedule import Access, Op
from megatrain.schedule.contents import LayerGraph, Saved
from megatrain.spec import hidden_sides


def forward(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """FORWARD of a layer: leaves its output, and what the op declares to keep for the backward; or of the prologue, or
    of an encoder, which do nothing for text."""
    unit, micro, activations = op.unit, op.micro, step.activations
    role = context.roles[unit]
    context.reseed(step, unit, micro)
    target = input_in(op.writes, role.after, micro)
    assert target is not None
    if role.is_first:
        made = _prologue(context, step, op, lease) if unit == 0 else _begun(context, step, op, lease)
        if made is not None:
            activations.inputs[target.buffer], activations.calls[unit, micro] = made
        return
    if role.in_encoder and micro not in activations.answers:
        return
    hidden = input_of(step, op, lease, unit)
    kind = DifferentiableLayerCall if declares(op.writes, LayerGraph) else LayerCall
    call = kind(context, step, op, lease, hidden)
    with call:
        output, side_values = call.run()
    call.keep(output, side_values)
    activations.inputs[target.buffer] = output.detach()
    step.phases.enter_last_phase()  # which declares the offload slots
    if side_values:
        activations.keep_sides(op, lease, side_values, context.spec.units[unit].name)
    for access in op.writes:
        if type(access.content) is Saved and access.content.offloaded:
            activations.stored[unit, micro].pack(bytes_of(lease, access))
    keep_away(context, step, op, lease, hidden)


def keep_away(context: OpContext, step: StepState, op: Op, lease: Lease, hidden: Tensor) -> None:
    """Put a unit's input into the slot from which it is offloaded, if the op says so."""
    slot = input_in(op.writes, op.unit, op.micro)
    if slot is not None:
        name = context.spec.units[op.unit].name
        step.activations.forms[op.unit, op.micro] = pack(hidden, bytes_of(lease, slot), name)


def encoded_for(context: OpContext, step: StepState, op: Op, lease: Lease) -> list[Tensor]:
    """What the prologue reads of an encoder for a micro-batch, with gradients where the encoder wants some; nothing
    without images."""
    spec, key, features = context.spec, (0, op.micro), list[Tensor]()
    access = input_in(op.reads, *key)
    if access is None or not is_there(step, access, lease, key):
        return features
    for unit in spec.tapped:
        wants = step.receiver is not None and spec.has_backward(unit - 1 if unit else spec.encoder[-1])
        features.append(input_of(step, op, lease, unit).detach().requires_grad_(wants))
    return features


def side_values_of(
    context: OpContext, step: StepState, op: Op, lease: Lease, call: Call, *, leaves: bool
) -> dict[int, Tensor]:
    """The side values that a layer takes, by number; one of an encoder takes none. leaves: those whose gradient a step
    needs require one."""
    spec = context.spec
    if not (spec.sides or call.takes) or context.roles[op.unit].in_encoder:
        return {}
    values = step.activations.sides_read(op, lease)
    values |= {number: input_of(step, op, lease, unit + 1) for unit, number in hidden_sides(spec, op.unit).items()}
    if not leaves:
        return values
    values |= taken_from_prologue(context.ported, op.unit - 1, call)
    wanted = {number for number in values if spec.wants_gradient(spec.sides[number])}
    beyond = {number: leaf for path, leaf in call.places() if (number := call.takes.get(path, 0)) < 0}
    wanted, values = wanted | beyond.keys(), values | beyond
    return {number: value.detach().requires_grad_(number in wanted) for number, value in values.items()}


def is_there(step: StepState, access: Access, lease: Lease, key: tuple[int, int]) -> bool:
    """Whether a unit has left an input: none does for a micro-batch without images. key: (unit, micro-batch)."""
    return access.buffer in step.activations.inputs or (access.buffer in lease and key in step.activations.forms)


def input_of(step: StepState, op: Op, lease: Lease, unit: int) -> Tensor:
    """The input of a unit, [batch, length, hidden size], from a slot, another op's output, or a kept graph."""
    activations, key = step.activations, (unit, op.micro)
    access = input_in(op.reads, unit, op.micro)
    if access is None:
        return activations.graphs[key].input.detach()
    if access.buffer in lease:
        return unpack(bytes_of(lease, access).data, activations.forms[key])
    return activations.inputs[access.buffer]


class WithoutCudnnAttention:
    """Keeps PyTorch from cuDNN's attention kernel, which it prefers on Hopper and Blackwell, for calls with a mask.

    That kernel's backward pass can be NaN for the queries of a row whose length is an odd multiple of 64 (PyTorch 2.11
    to 2.13, pytorch/pytorch issue 196678). PyTorch's other kernels are right, and so is cuDNN's without a mask.
    """

    def __enter__(self) -> None:
        self._before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)

    def __exit__(self, *failure: object) -> None:
        torch.backends.cuda.enable_cudnn_sdp(self._before)


def attention_kernels(call: Call, hidden: Tensor) -> AbstractContextManager[object]:
    """A context in which PyTorch chooses an attention kernel whose gradients are correct for a layer's arguments.
    hidden: its hidden state, [batch, length, hidden size]."""
    if not hidden.is_cuda:
        return NOTHING
    square = (hidden.shape[1],) * 2
    for value in (*call.args, *call.kwargs.values()):
        several = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else (value,)
        if any(isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[2:] == square for mask in several):
            return WithoutCudnnAttention()
    return NOTHING


Run = Callable[[], tuple[Tensor, dict[int, Tensor]]]


class LayerCall:
    """A layer's forward in one op: what the layer is called with, and the context to call it in, once."""

    _contexts: list[AbstractContextManager[object]]
    """What the call is made in, outermost first. Not an `ExitStack`, which makes five calls for each."""

    def __init__(self, context: OpContext, step: StepState, op: Op, lease: Lease, hidden: Tensor) -> None:
        self._step, self._op = step, op
        self._keeping: Keeping | None = None
        for access in op.writes:
            if type(access.content) is Saved:
                self._keeping = Keeping(access.content.keep, context.spec.hidden_size)
        if self._keeping:
            weights = context.leaves(context.weights(op, lease, op.unit), op.unit).by_name
            hidden = hidden.detach().requires_grad_()
        else:
            weights = context.parameters(op, lease, op.unit)
        call = self._call(context)
        values = side_values_of(context, step, op, lease, call, leaves=self._keeping is not None)
        self.run = self._ran_with(context, weights, hidden, call, values)
        """Calls the layer: its output, and the side values that it makes. It has no frame of its own."""
        self._contexts = [
            self._keeping.running() if self._keeping else NOTHING,
            attention_kernels(call, hidden),
            context.waiting_for_weights(step, op, lease),
            step.activations.answers[op.micro] if context.roles[op.unit].in_encoder else NOTHING,
        ]

    def _call(self, context: OpContext) -> Call:
        """The layer's arguments."""
        first = context.roles[self._op.unit].first
        return self._step.activations.calls[first, self._op.micro][self._op.unit - first - 1]

    def _ran_with(
        self, context: OpContext, weights: dict[str, Tensor], hidden: Tensor, call: Call, values: dict[int, Tensor]
    ) -> Run:
        """A function that calls the layer with these values: what `run` becomes."""
        role, encoder = context.roles[self._op.unit], context.ported.encoder
        index = self._op.unit - role.first - 1
        if not role.in_encoder:
            chunk = context.numerics.mlp_chunk_tokens
            return partial(context.ported.layer, index, weights, hidden, call, chunk, values)
        assert encoder is not None
        return partial(encoder.layer, context.ported, index, weights, hidden, call)

    def __enter__(self) -> None:
        contexts, self._contexts = self._contexts, []
        try:
            for context in contexts:
                if context is not NOTHING:
                    context.__enter__()
                    self._contexts.append(context)
        except BaseException:  # Ctrl-C, say: the block is not entered, so nothing else leaves what was
            self.__exit__(None, None, None)
            raise

    def __exit__(self, *failure: Any) -> None:
        """Leave the contexts that were entered, each even if one inside it fails to."""
        if self._contexts:
            try:
                self._contexts.pop().__exit__(*failure)
            finally:
                self.__exit__(*failure)

    def keep(self, output: Tensor, sides: Mapping[int, Tensor]) -> None:
        """Keep for the backward what the op declares. output: [batch, length, hidden size]. sides: the side values that
        the layer has made, by number."""
        if self._keeping:
            self._step.activations.stored[self._op.unit, self._op.micro] = self._keeping.stored()


class DifferentiableLayerCall(LayerCall):
    """A layer's forward with autograd, which saves weights by their place unless they stay where they are.

    Outputs of ops that an earlier forward of the layer has kept are not computed again.
    """

    def __init__(self, context: OpContext, step: StepState, op: Op, lease: Lease, hidden: Tensor) -> None:
        self._step, self._op = step, op
        self._name = context.spec.units[op.unit].name
        self._bound = bound = BoundWeights(context.weights(op, lease, op.unit))
        leaves = context.leaves(bound.weights, op.unit)
        self._leaf = hidden.detach().requires_grad_()
        call = self._call(context)
        self._stored = stored = step.activations.stored.pop((op.unit, op.micro), None)
        for access in op.reads:
            if stored and isinstance(access.content, Saved) and access.content.offloaded:
                stored.unpack(bytes_of(lease, access).data)
        self._values = side_values_of(context, step, op, lease, call, leaves=True)
        self.run = self._ran_with(context, leaves.by_name, self._leaf, call, self._values)
        self._contexts = [
            torch.enable_grad(),
            NOTHING if _weights_stay(step, op) else save_weights_by_name(bound, watched=step.phases is not NO_PAUSES),
            Answering(stored) if stored else NOTHING,
            attention_kernels(call, hidden),
            context.waiting_for_weights(step, op, lease),
            leaves.in_place,
            step.activations.answers[op.micro] if context.roles[op.unit].in_encoder else NOTHING,
        ]

    def keep(self, output: Tensor, sides: Mapping[int, Tensor]) -> None:
        self._step.activations.graphs[self._op.unit, self._op.micro] = self.graph(output, sides)

    def graph(self, output: Tensor, side_values: Mapping[int, Tensor]) -> KeptGraph:
        """The graph of what the layer has returned; see `keep`."""
        if self._stored:
            self._stored.finish(self._name)
        made, given = dict[int, GradientEdge](), dict[int, Tensor]()
        if side_values or self._values:
            made = {number: get_gradient_edge(side) for number, side in side_values.items() if side.requires_grad}
            given = {number: value for number, value in self._values.items() if value.requires_grad}
        return KeptGraph(self._bound, self._leaf, get_gradient_edge(output), made, given)


def _weights_stay(step: StepState, op: Op) -> bool:
    """Whether autograd may save a layer's weights as they are: they are the state itself, or a BACKWARD recomputes the
    layer and reads them before their slot can change."""
    access = weights_in(op.reads, op.unit)
    stays = op.kind == "BACKWARD" or (access is not None and step.schedule.buffers[access.buffer].is_state)
    return step.phases is NO_PAUSES and stays


def _prologue(context: OpContext, step: StepState, op: Op, lease: Lease) -> tuple[Tensor, list[Call]]:
    """The first layer's input, [batch, length, hidden size], and the arguments of all layers.

    A text's gradients are known since the model was split, unless its loop computes between layers. Otherwise a
    graph shows in training what needs one; it keeps no tensor.
    """
    inputs, answers = context.inputs(step, op.micro)
    encoded = encoded_for(context, step, op, lease)
    text, trains = inputs.keys() <= TEXT_ENTRIES, step.receiver is not None
    with answers, context.waiting_for_weights(step, op, lease):
        if not trains or (text and not context.computes_between):
            hidden, calls = context.ported.prologue(context.parameters(op, lease, 0), inputs, encoded=encoded)
            if not trains or all(call.between is None for call in calls):
                return hidden, calls
            context.computes_between = True
            context.reseed(step, op.unit, op.micro)
        with graph_without_tensors():
            leaves = context.leaves(context.weights(op, lease, 0), 0)
            hidden, calls = context.ported.prologue(leaves.by_name, inputs, encoded=encoded)
    calls, _ = numbered(context.ported, calls)
    if encoded:
        keep_away(context, step, op, lease, encoded[0].detach())
    return hidden.detach(), [call.detached() for call in calls]


def _begun(context: OpContext, step: StepState, op: Op, lease: Lease) -> tuple[Tensor, list[Call]] | None:
    """The input of an encoder's first layer, and the arguments of its layers; `None` for text."""
    inputs, answers = context.inputs(step, op.micro)
    if inputs.keys() <= TEXT_ENTRIES:
        return None
    assert context.ported.encoder is not None
    weights = context.parameters(op, lease, op.unit)
    with answers, context.waiting_for_weights(step, op, lease):
        begun = context.ported.encoder.begin(context.ported, weights, inputs)
    if begun is not None:
        step.activations.answers[op.micro] = answers
    return begun
