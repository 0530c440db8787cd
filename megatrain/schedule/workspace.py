"""Memory that layers' arguments take, and what the loss and the backward of a unit need for a moment.

Counted tensor by tensor as the engine and autograd make them, for decoder layers with a gate and a head behind a norm;
measured peaks stay below (`bench.prediction`). Left out: what kernels of a library take for themselves, but for the
float32 sums of a product that a cpu multiplies in bfloat16.
"""

from __future__ import annotations

from math import prod

from megatrain.spec import ModelSpec, Policy, UnitSpec, Work

LOSS_BLOCK_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits that exist in float32 at one time, by device type: a share of the cache on a cpu, few launches on a GPU."""
ARGUMENT_CHANNELS = 256
"""Values per position among the arguments that layers share: rotary tables, a sine and a cosine for 128 channels."""
HEAD_FLOATS = 5
"""Float32 values per token and channel that the norm in front of the head makes and keeps."""


def arguments_nbytes(policy: Policy, work: Work, tokens: int) -> int:
    """What layers are called with besides the hidden state, of a micro-batch of `tokens`."""
    return min(work.length or tokens, tokens) * ARGUMENT_CHANNELS * policy.weight_nbytes


def loss_nbytes(model: ModelSpec, policy: Policy, work: Work, micro: int, *, trains: bool) -> int:
    """Of a chunk: the norm's, logits, their gradient, and then a float32 block of them or the head's own gradient."""
    chunk = min(policy.loss_chunk_tokens, work.tokens[micro])
    logits = chunk * model.vocab_size * policy.weight_nbytes
    numel = LOSS_BLOCK_NUMEL["cpu" if policy.shares_memory else "cuda"]
    block = 4 * min(chunk * model.vocab_size, numel)
    head = _product_nbytes(policy, largest_nbytes(model, policy, model.epilogue)) if trains else 0
    made = max(2 * logits + max(block, head), _product_nbytes(policy, logits))
    return made + HEAD_FLOATS * 4 * chunk * model.hidden_size


def backward_nbytes(model: ModelSpec, policy: Policy, work: Work, unit: int, tokens: int) -> int:
    """Beside the graph: a parameter's gradient, which exists beside the sum for a moment, and gradients of the widest
    activation, of which a gate has two at a time. A prologue runs again, for it has no graph.

    Gradients of activations are counted where the device computes in host memory, which is where they were measured; on
    an accelerator the planner's reserve has to cover them.
    """
    largest = largest_nbytes(model, policy, unit)
    if unit == 0:
        again = tokens * model.hidden_size * policy.weight_nbytes + arguments_nbytes(policy, work, tokens)
        return again + _product_nbytes(policy, largest)
    widest = tokens * _widest(model.units[unit]) * policy.weight_nbytes if policy.shares_memory else 0
    return max(_product_nbytes(policy, largest), largest + _product_nbytes(policy, widest), 2 * widest)


def largest_nbytes(model: ModelSpec, policy: Policy, unit: int) -> int:
    """The largest gradient of one parameter of a unit."""
    borrowed = [param for param in model.units[0].params if param.name in model.units[unit].borrows]
    trained = [param.numel for param in (*model.units[unit].params, *borrowed) if param.trainable]
    return max(1, max(trained, default=0) * policy.weight_nbytes)


def _widest(unit: UnitSpec) -> int:
    """Channels of the widest activation, per token; those of all experts that a token uses."""
    wide = [param for param in unit.params if len(param.shape) > 1]
    used = (max(1, round(prod(param.shape[:-2]) * param.active)) if param.active < 1 else 1 for param in wide)
    return max((count * max(param.shape[-2:]) for count, param in zip(used, wide, strict=True)), default=0)


def _product_nbytes(policy: Policy, nbytes: int) -> int:
    """A product's result, and what is summed in float32 for it where a cpu multiplies in bfloat16."""
    return 3 * nbytes if policy.shares_memory and policy.weight_nbytes == 2 else nbytes
