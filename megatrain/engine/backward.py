"""The BACKWARD op: gradients of a layer or of the prologue, from the gradient of what it has made."""

from __future__ import annotations

import torch

from megatrain.engine.autograd import GradientDestination
from megatrain.engine.context import OpContext
from megatrain.engine.forward import DifferentiableLayerCall, input_of
from megatrain.engine.gradient_accumulation import accumulate_into
from megatrain.engine.resumable_call import NO_PAUSES
from megatrain.engine.step_state import StepState, weights_in
from megatrain.memory import Lease
from megatrain.model.ports import numbered, sides_of_prologue
from megatrain.schedule import Op


def backward(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """BACKWARD of a layer, through its kept graph or after its forward has run once more; or of the prologue."""
    if op.unit == 0:
        _backward_of_prologue(context, step, op, lease)
        return
    unit, micro, activations = op.unit, op.micro, step.activations
    graph = activations.graphs.pop((unit, micro), None)
    if graph is None:
        context.reseed(step, unit, micro)
        call = DifferentiableLayerCall(context, step, op, lease, input_of(step, op, lease))
        with call:
            returned = context.ported.layer(unit - 1, *call.arguments)
        graph = call.graph(*returned)
        del call, returned  # the output is not needed, and would be held during the backward
    else:
        graph.bound.flat = context.weights(op, lease, unit)
        graph.bound.before_read = None if step.phases is NO_PAUSES else step.phases.before_read
    step.phases.before_gradients()
    trained = context.binders[unit].trained(graph.leaves)
    if trained:
        graph.target.accumulator = total = context.accumulator(step, op, lease, unit)
        accumulate_into(total, trained, None if step.phases is NO_PAUSES else step.phases.gradient_complete)
    inputs = [graph.input, *(leaf for _, leaf in trained), *graph.given.values()]
    sides = activations.side_gradients(op, graph.made) if graph.made else {}
    edges = [graph.output, *(graph.made[number] for number in sides)]
    torch.autograd.backward(edges, [activations.gradients.pop(micro), *sides.values()], inputs=inputs)
    assert graph.input.grad is not None
    activations.gradients[micro] = graph.input.grad
    if graph.given:
        activations.add_side_gradients(op, {number: value.grad for number, value in graph.given.items()})
    context.finish_complete_gradients(step, op)


def _backward_of_prologue(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    """Run the prologue again with autograd, then backward, which runs layers of encoders once more."""
    activations = step.activations
    if weights_in(op.reads, 0) is None:  # then only their shapes matter
        leaves = context.placeholder_leaves()
    else:
        leaves = context.binders[0].leaves(context.weights(op, lease, 0))
    context.reseed(step, 0, op.micro)
    trained, target = context.binders[0].trained(leaves), GradientDestination()
    inputs, answers = context.inputs(step, op.micro)
    in_place = context.gradients_in_place(trained, target)
    with torch.enable_grad(), answers, context.waiting_for_weights(step, op, lease), in_place:
        hidden, calls = context.ported.prologue(leaves, inputs, (answers, in_place))
    step.phases.before_gradients()
    target.accumulator = total = context.accumulator(step, op, lease, 0)
    accumulate_into(total, trained)
    outputs, made = [(hidden, activations.gradients.pop(op.micro))], sides_of_prologue(context.ported, calls)
    if op.micro in activations.beyond:
        made |= numbered(context.ported, calls)[1]
    outputs += [(made[number], gradient) for number, gradient in activations.side_gradients(op, made).items()]
    if outputs := [(output, gradient) for output, gradient in outputs if output.requires_grad]:
        into = [leaf for _, leaf in trained]
        torch.autograd.backward([output for output, _ in outputs], [gradient for _, gradient in outputs], inputs=into)
    context.finish_complete_gradients(step, op)
