"""The BACKWARD op: gradients of a layer or of the prologue, from the gradient of what it has made."""

from __future__ import annotations

import torch

from megatrain.engine.context import OpContext
from megatrain.engine.forward import DifferentiableLayerCall, encoded_for, input_of
from megatrain.engine.resumable_call import NO_PAUSES
from megatrain.engine.step_state import StepState
from megatrain.memory import Lease
from megatrain.model.ports import numbered, sides_of_prologue
from megatrain.schedule import Op
from megatrain.spec import hidden_sides


def backward(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """BACKWARD of a layer, through its kept graph or after its forward has run once more; or of the prologue, or of an
    encoder, which add nothing for text."""
    unit, micro, activations = op.unit, op.micro, step.activations
    role = context.roles[unit]
    if role.in_encoder and micro not in activations.gradients:
        _add_nothing(context, step, op, lease)
        return
    if role.is_first:
        _backward_of_first(context, step, op, lease)
        return
    graph = activations.graphs.pop((unit, micro), None)
    if graph is None:
        context.reseed(step, unit, micro)
        call = DifferentiableLayerCall(context, step, op, lease, input_of(step, op, lease, unit))
        with call:
            returned = call.run()
        graph = call.graph(*returned)
        del call, returned  # the output is not needed, and would be held during the backward
    else:
        graph.bound.weights = context.weights(op, lease, unit)
        graph.bound.before_read = None if step.phases is NO_PAUSES else step.phases.before_read
    step.phases.before_gradients()
    if context.layouts[unit].trained.size:
        total = context.accumulator(op, lease, unit)
        total.on_complete = None if step.phases is NO_PAUSES else step.phases.gradient_complete
    side_gradients = activations.side_gradients(op, lease, graph.made) if graph.made else {}
    edges = [graph.output, *(graph.made[number] for number in side_gradients)]
    torch.autograd.backward(edges, [activations.gradients.pop(micro), *side_gradients.values()])
    assert graph.input.grad is not None
    activations.gradients[micro] = graph.input.grad
    if (added := activations.taps.pop((unit, micro), None)) is not None:
        activations.gradients[micro] += added
    if graph.given:
        step.phases.enter_last_phase()  # which declares where their sums are
        terms = {number: value.grad for number, value in graph.given.items()}
        activations.add_side_gradients(op, lease, terms, context.spec.units[unit].name)
    context.finish_complete_gradients(step, op)


def _add_nothing(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """A micro-batch without images: only what no micro-batch has added to is zero."""
    step.phases.before_gradients()
    if context.layouts[op.unit].trained.size:
        context.accumulator(op, lease, op.unit)
        context.finish_complete_gradients(step, op)


def _backward_of_first(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """Run the prologue again with autograd, or the start of an encoder, then backward, which runs layers of encoders
    that are not streamed once more."""
    activations, unit = step.activations, op.unit
    leaves = context.leaves(context.weights(op, lease, unit), unit)
    context.reseed(step, unit, op.micro)
    inputs, answers = context.inputs(step, op.micro)
    around, encoded = (answers, leaves.in_place), encoded_for(context, step, op, lease)
    wants_calls = bool(context.spec.sides) or op.micro in activations.beyond
    with torch.enable_grad(), answers, context.waiting_for_weights(step, op, lease), leaves.in_place:
        if unit == 0:
            prologue = context.ported.prologue
            hidden, calls = prologue(leaves.by_name, inputs, around, encoded, for_first_layer=not wants_calls)
        else:
            assert context.ported.encoder is not None
            begun = context.ported.encoder.begin(context.ported, leaves.by_name, inputs)
            assert begun is not None
            hidden, calls = begun[0], []  # no gradient flows through its layers' arguments
    step.phases.before_gradients()
    if leaves.trained:
        context.accumulator(op, lease, unit)
    outputs, made = [(hidden, activations.gradients.pop(op.micro))], sides_of_prologue(context.ported, calls)
    if (number := hidden_sides(context.spec).get(unit)) is not None:
        made[number] = hidden
    if op.micro in activations.beyond:
        made |= numbered(context.ported, calls)[1]
    outputs += [(made[number], gradient) for number, gradient in activations.side_gradients(op, lease, made).items()]
    if outputs := [(output, gradient) for output, gradient in outputs if output.requires_grad]:
        into = [leaf for _, leaf in leaves.trained]
        into += [feature for feature in encoded if feature.requires_grad]
        torch.autograd.backward([output for output, _ in outputs], [gradient for _, gradient in outputs], inputs=into)
    for tapped, feature in zip(context.spec.tapped, encoded, strict=False):
        if feature.grad is not None:
            activations.taps[tapped, op.micro] = feature.grad
    if encoded and (last := activations.taps.pop((0, op.micro), None)) is not None:
        activations.gradients[op.micro] = last
    context.finish_complete_gradients(step, op)
