"""Memory that layers' arguments take, and what the loss and the backward of a unit need for a moment.

Counted tensor by tensor as the engine and autograd make them, for decoder layers with a gate and a head behind a norm;
measured peaks stay below (`bench.prediction`). Where token-wise parts run in chunks, the backward of attention is what
takes most. Left out: what kernels of a library take for themselves, but for the float32 sums of a product that a cpu
multiplies in bfloat16, and blocks of scores.
"""

from __future__ import annotations

from math import prod

from megatrain.spec import ModelSpec, Policy, UnitSpec, Work

LOSS_BLOCK_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits that exist in float32 at one time, by device type: a share of the cache on a cpu, few launches on a GPU."""
ARGUMENT_CHANNELS = 256
"""Values per position among the arguments that layers share: rotary tables, a sine and a cosine for 128 channels."""
ATTENTION_ROWS, ATTENTION_COLUMNS = ((768, 256), (192, 64), (0, 32)), 512
"""Rows of a block of scores in a cpu's attention kernel from so many tokens on, and its columns (torch's own)."""
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
    if runs_in_chunks(model.units[unit], policy, tokens):
        return max(_chunk_nbytes(model, policy, unit), _attention_nbytes(model, policy, work, unit, tokens))
    widest = tokens * _widest(model.units[unit]) * policy.weight_nbytes if policy.shares_memory else 0
    return max(_product_nbytes(policy, largest), largest + _product_nbytes(policy, widest), 2 * widest)


def runs_in_chunks(unit: UnitSpec, policy: Policy, tokens: int) -> bool:
    """Whether token-wise parts of a layer go through so many tokens in chunks."""
    return unit.profile.chunked_nbytes > 0 and 0 < policy.mlp_chunk_tokens < tokens


def _chunk_nbytes(model: ModelSpec, policy: Policy, unit: int) -> int:
    """The backward of a token-wise part in chunks: the float32 sums of its weights' gradients, and of one chunk what
    autograd keeps, with the gradient of a weight or those of activations. Small, so it is counted everywhere."""
    profile, chunk = model.units[unit].profile, policy.mlp_chunk_tokens
    largest = largest_nbytes(model, policy, unit)
    widest = chunk * _widest(model.units[unit]) * policy.weight_nbytes
    made = max(_product_nbytes(policy, largest), largest + _product_nbytes(policy, widest), 2 * widest)
    return 4 * profile.chunk_numel + int(chunk * profile.chunk_nbytes) + made


def _attention_nbytes(model: ModelSpec, policy: Policy, work: Work, unit: int, tokens: int) -> int:
    """The backward of attention, the widest moment of a layer whose other parts run in chunks: the gradients of its
    output, of queries, keys and values, less what the parts above it have let go of, which the schedule still counts.

    An accelerator's kernel sums the gradient of the queries in float32 (Dao 2023, FlashAttention-2); that of a cpu
    has blocks of scores, those of one thread.
    """
    each = tokens * policy.weight_nbytes
    queries = round(model.units[unit].profile.attention_flops / 4)
    gradients = max(0, 4 * queries - 4 * model.hidden_size) * each + model.hidden_size * each // 4
    if not policy.shares_memory:
        return gradients + 4 * queries * tokens
    length = min(work.length or tokens, tokens)
    rows = next(rows for least, rows in ATTENTION_ROWS if length >= least)
    return gradients + rows * ATTENTION_COLUMNS * (13 if policy.weight_nbytes == 2 else 8)


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
