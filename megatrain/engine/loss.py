"""The LOSS op: head and loss of a micro-batch in chunks of tokens, and the gradient of its hidden states; or logits."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch
from torch import Tensor

from megatrain.engine.batch import targets_of
from megatrain.engine.chunked_loss import ChunkedHead, MicroBatchLoss, differentiate, measure
from megatrain.engine.context import OpContext
from megatrain.engine.forward import input_of
from megatrain.engine.step_state import StepState
from megatrain.errors import ModelError
from megatrain.memory import Lease
from megatrain.schedule import Op
from megatrain.spec import hidden_sides


def loss(context: OpContext, step: StepState, op: Op, lease: Lease) -> None:
    unit, micro = op.unit, op.micro
    context.reseed(step, unit, micro)
    hidden = input_of(step, op, lease, op.unit)
    if step.receiver is None:
        weights: dict[str, Tensor] = {}
        for owner in _head_owners(context):
            weights |= context.parameters(op, lease, owner)
        with context.waiting_for_weights(step, op, lease):
            _loss_or_logits(context, step, op, lease, weights, hidden)
        return
    flat = _read_by_head(context, step, op, lease, hidden).flatten(0, 1)
    leaves: dict[str, Tensor] = {}
    trained: list[Tensor] = []
    in_place: list[AbstractContextManager[object]] = []
    borrowed = context.spec.units[unit].borrows
    for owner in _head_owners(context):
        bound = context.leaves(context.weights(op, lease, owner), owner)
        if context.layouts[owner].trained.size:
            context.accumulator(op, lease, owner)
            in_place.append(bound.in_place)
        trained += [leaf for name, leaf in bound.trained if owner == unit or name in borrowed]
        leaves |= bound.by_name
    chunked = _chunked_head(context, step, op, leaves, trained, flat)
    with context.waiting_for_weights(step, op, lease), ExitStack() as around:
        for each in in_place:
            around.enter_context(each)
        result = differentiate(step.loss_fn, chunked, step.own[micro], step.scale)
        _record_loss(context, step, micro, result)
        assert result.gradient is not None
        _hand_down(context, step, op, lease, result.gradient.view(*hidden.shape[:2], *result.gradient.shape[1:]))
        _add_router_loss(context, step, op, lease, leaves)
        assert step.loss is not None
        step.landed = context.device.landing(step.loss)
    context.finish_complete_gradients(step, op)


def _read_by_head(context: OpContext, step: StepState, op: Op, lease: Lease, hidden: Tensor) -> Tensor:
    """What the head reads, [batch, length, *head_shape], if the last layer has returned `hidden`. Raises `ModelError`
    for hidden states of several dtypes."""
    earlier = hidden_sides(context.spec, op.unit)
    if not earlier:
        return hidden
    read = [hidden, *(input_of(step, op, lease, unit + 1) for unit in earlier)]
    if any(each.dtype != hidden.dtype for each in read):
        what = f"its head reads hidden states in {', '.join(sorted({str(each.dtype) for each in read}))}"
        raise ModelError(what, where=context.spec.name, fix="precision=fp32 may work")
    return torch.stack(read, dim=2)


def _hand_down(context: OpContext, step: StepState, op: Op, lease: Lease, gradient: Tensor) -> None:
    """Leave the gradient of what the head has read, [batch, length, *head_shape], to the units that made it."""
    numbers = hidden_sides(context.spec, op.unit).values()
    if not numbers:
        step.activations.gradients[op.micro] = gradient
        return
    last, *earlier = (each.contiguous() for each in gradient.unbind(2))
    step.activations.gradients[op.micro] = last
    terms = dict(zip(numbers, earlier, strict=True))
    step.activations.add_side_gradients(op, lease, terms, context.spec.units[op.unit].name)


def _record_loss(context: OpContext, step: StepState, micro: int, result: MicroBatchLoss) -> None:
    """Add the result of a LOSS to the step's."""
    step.loss = result.loss if step.loss is None else step.loss + result.loss
    _record_term(context, step, micro, result.loss)
    if result.sums:
        step.reported[micro] = tuple(result.sums), context.device.landing(torch.stack(list(result.sums.values())))


def _record_term(context: OpContext, step: StepState, micro: int, term: Tensor) -> None:
    """With several ranks, keep a term of the loss: they add all terms in the order that one rank would."""
    if context.world.size > 1:
        step.terms.setdefault(micro, []).append(context.device.landing(term))


def _chunked_head(
    context: OpContext, step: StepState, op: Op, weights: dict[str, Tensor], trained: list[Tensor], flat: Tensor
) -> ChunkedHead:
    """The head for a micro-batch whose hidden states are `flat` [tokens, hidden size]."""

    def head(hidden: Tensor) -> Tensor:
        with context.host_answers(()):
            return context.ported.head(weights, hidden)

    positions, targets = step.targets[op.micro] if step.targets else targets_of(step.labels[op.micro])
    rewind = partial(context.reseed, step, op.unit, op.micro)
    return ChunkedHead(head, trained, flat, positions, targets, context.numerics.loss_chunk_tokens, rewind)


def _add_router_loss(context: OpContext, step: StepState, op: Op, lease: Lease, weights: dict[str, Tensor]) -> None:
    """Add the router auxiliary loss of a micro-batch, and replace its side outputs by their gradients.

    Its weight is the micro-batch's share of the divisor unless `router_weights` were given. So the step's loss is
    the mean, over target tokens, of the losses that the stock model computes for each micro-batch.
    """
    coefficient, activations, micro = context.ported.balance_coefficient, step.activations, op.micro
    if coefficient is None or not step.labels:
        return
    numbers = {number for port in context.ported.ports for number in port.recorded}
    leaves = {number: each.detach().requires_grad_() for number, each in activations.take_sides(op, numbers).items()}
    recorded = [tuple(leaves[number] for number in port.recorded) for port in context.ported.ports]
    with torch.enable_grad():
        inputs, answers = context.inputs(step, micro)
        with answers:
            plain = context.ported.balance(weights, inputs, recorded)
        loss = coefficient * plain * step.router_weights[micro]
        if step.receiver is not None:
            wanted = [*leaves.values()]
            found = torch.autograd.grad(loss * step.scale, wanted, allow_unused=True, materialize_grads=True)
            terms = dict(zip(leaves, found, strict=True))
            activations.add_side_gradients(op, lease, terms, context.spec.units[op.unit].name)
    assert step.loss is not None
    term = loss.detach().double()
    step.loss = step.loss + term
    _record_term(context, step, micro, term)
    step.router_losses[micro] = context.device.landing(plain.detach().double())


def _loss_or_logits(
    context: OpContext, step: StepState, op: Op, lease: Lease, weights: dict[str, Tensor], hidden: Tensor
) -> None:
    """Compute the loss, or the logits if there are no labels, without gradients. hidden: [batch, length, ...]."""
    if step.labels:
        read = _read_by_head(context, step, op, lease, hidden)
        chunked = _chunked_head(context, step, op, weights, [], read.flatten(0, 1))
        _record_loss(context, step, op.micro, measure(step.loss_fn, chunked, step.own[op.micro]))
        _add_router_loss(context, step, op, lease, weights)
        assert step.loss is not None
        step.landed = context.device.landing(step.loss)
    else:
        last = _read_by_head(context, step, op, lease, hidden)[:, -step.logits_to_keep :]
        step.logits = context.ported.head(weights, last.flatten(0, 1)).view(*last.shape[:2], -1)


def _head_owners(context: OpContext) -> list[int]:
    """Units whose weights the head uses: the epilogue, and the prologue if they are tied."""
    own = [context.spec.epilogue] if context.layouts[context.spec.epilogue].size else []
    return [0, *own] if context.spec.tied else own
