"""Memory that layers' arguments take, and what the loss and the backward of a unit need for a moment.

Counted tensor by tensor as the engine and autograd make them, for decoder layers with a gate and a head behind a norm;
measured peaks stay below (`bench.prediction`). Where token-wise parts run in chunks, the backward of attention is what
takes most. Left out: what kernels of a library take for themselves, but for the float32 sums of a product that a cpu
multiplies in bfloat16, and blocks of scores.
"""

from __future__ import annotations

from math import ceil, prod

from megatrain.spec import ModelSpec, Policy, UnitSpec, Work

LOSS_BLOCK_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits that exist in float32 at one time, by device type: a share of the cache on a cpu, few launches on a GPU."""
ARGUMENT_CHANNELS = 256
"""Values per position among the arguments that layers share: rotary tables, a sine and a cosine for 128 channels."""
ANGLE_FLOATS = 256
"""Float32 values per position that exist beside rotary tables while they are made."""
MASKED = ("sdpa", "eager")
"""Kernels that are told of a window by a mask of all positions."""
ATTENTION_ROWS, ATTENTION_COLUMNS = ((768, 256), (192, 64), (0, 32)), 512
"""Rows of a block of scores in a cpu's attention kernel from so many tokens on, and its columns (torch's own)."""
HEAD_FLOATS = 5
"""Float32 values per token and channel that the norm in front of the head makes and keeps."""


def arguments_nbytes(model: ModelSpec, policy: Policy, work: Work, tokens: int) -> int:
    """What layers are called with besides the hidden state, of a micro-batch of `tokens`: rotary tables, positions, and
    a mask for each window that is shorter than the sequence, where the kernel takes one. All rows share them, unless
    they are padded or packed."""
    length, profile = min(work.length or tokens, tokens), model.units[0].profile
    each = profile.arguments_nbytes or ARGUMENT_CHANNELS * policy.weight_nbytes
    return int(length * (each + profile.arguments_nbytes_by_length * length)) + sum(
        length * length for _ in _windows(model, length)
    )


def _windows(model: ModelSpec, length: int) -> set[int]:
    """Windows of layers that are shorter than a sequence, and are told by a mask."""
    seen = {model.units[layer].profile.window for layer in model.layers} if model.attention in MASKED else set()
    return {window for window in seen if window is not None and window < length}


def loss_nbytes(model: ModelSpec, policy: Policy, work: Work, micro: int, *, trains: bool) -> int:
    """Of a chunk: the norm's, logits, their gradient, and then a float32 block of them or the head's own gradient."""
    chunk = min(policy.loss_chunk_tokens, work.tokens[micro])
    logits = chunk * model.vocab_size * policy.weight_nbytes
    numel = LOSS_BLOCK_NUMEL["cpu" if policy.shares_memory else "cuda"]
    block = 4 * min(chunk * model.vocab_size, numel)
    head = _product_nbytes(policy, largest_nbytes(model, policy, model.epilogue)) if trains else 0
    made = max(2 * logits + max(block, head), _product_nbytes(policy, logits))
    return made + HEAD_FLOATS * 4 * chunk * model.hidden_size


def backward_nbytes(
    model: ModelSpec, policy: Policy, work: Work, unit: int, tokens: int, *, keeps_graph: bool = False
) -> int:
    """Beside what autograd keeps, in the backward of a unit over a micro-batch of `tokens`: gradients of activations,
    and a parameter's, which exists beside the sum for a moment. A prologue runs again, for it has no graph.

    As the widest moment of the layer's own backward has it, where a profile tells (`LayerProfile.moments`).
    """
    if unit == 0:
        again = tokens * model.hidden_size * policy.weight_nbytes + arguments_nbytes(model, policy, work, tokens)
        angles = 4 * ANGLE_FLOATS * min(work.length or tokens, tokens)
        return again + max(angles, _product_nbytes(policy, largest_nbytes(model, policy, unit)))
    profile, chunk = model.units[unit].profile, policy.mlp_chunk_tokens
    chunked = runs_in_chunks(model.units[unit], policy, tokens)
    if policy.shares_memory:
        moments = profile.host_chunked_moments if chunked else profile.host_moments
    else:
        moments = profile.chunked_moments if chunked else profile.moments
    if not moments:
        return _unseen_nbytes(model, policy, work, unit, tokens)
    length = min(work.length or tokens, tokens)
    kernel = _attention_nbytes(model.units[unit], policy, tokens, length)
    widest = max(each.nbytes(tokens, length, chunk) + (kernel if each.attends else 0) for each in moments)
    # A kept graph's input is among what it keeps, but where the norm has saved a copy of it in float32 (`Activations`).
    given = tokens * model.hidden_size * policy.weight_nbytes if keeps_graph and policy.weight_nbytes == 4 else 0
    return max(1, ceil(widest) + given - profile.kept(tokens // length, length, chunk))


def _attention_nbytes(unit: UnitSpec, policy: Policy, tokens: int, length: int) -> int:
    """What the kernel of attention's backward takes for itself: on an accelerator, the gradient of the queries summed
    in float32 (Dao 2023, FlashAttention-2); on a cpu, blocks of scores, those of one thread."""
    if not policy.shares_memory:
        return tokens * round(unit.profile.attention_flops)  # 4 bytes for each channel, whose operations are 4
    rows = next(rows for least, rows in ATTENTION_ROWS if length >= least)
    return rows * ATTENTION_COLUMNS * (13 if policy.weight_nbytes == 2 else 8)


def runs_in_chunks(unit: UnitSpec, policy: Policy, tokens: int) -> bool:
    """Whether token-wise parts of a layer go through so many tokens in chunks."""
    return unit.profile.chunked_nbytes > 0 and 0 < policy.mlp_chunk_tokens < tokens


def _unseen_nbytes(model: ModelSpec, policy: Policy, work: Work, unit: int, tokens: int) -> int:
    """`backward_nbytes` of a layer whose backward nobody has seen run, for one with a gate: the gradient of a parameter
    and gradients of the widest activation, of which a gate has two at a time. In chunks, the float32 sums of gradients,
    what autograd keeps of a chunk and the same for that chunk; or the gradients of attention's output, of queries,
    keys and values, less what the parts above have let go of, which the schedule still counts."""
    profile, chunk = model.units[unit].profile, policy.mlp_chunk_tokens
    chunked = runs_in_chunks(model.units[unit], policy, tokens)
    largest = largest_nbytes(model, policy, unit)
    widest = (chunk if chunked else tokens) * _widest(model.units[unit]) * policy.weight_nbytes
    made = max(_product_nbytes(policy, largest), largest + _product_nbytes(policy, widest), 2 * widest)
    if not chunked:
        return made
    each = tokens * policy.weight_nbytes
    queries = round(profile.attention_flops / 4)
    gradients = max(0, 4 * queries - 4 * model.hidden_size) * each + model.hidden_size * each // 4
    kernel = _attention_nbytes(model.units[unit], policy, tokens, min(work.length or tokens, tokens))
    return max(4 * profile.chunk_numel + int(chunk * profile.chunk_nbytes) + made, gradients + kernel)


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
