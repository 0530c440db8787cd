"""Memory that layers' arguments take, and what the loss and the backward of a unit need for a moment.

A layer's backward is as its own tensors had it in a tiny run (`LayerProfile.moments`), on every device; the head is
counted for one behind a norm. Measured peaks stay below (`tests/system/test_live.py`, `bench.prediction`). Left out:
what kernels of a library take for themselves, but for the float32 sums of a product that a cpu multiplies in bfloat16
and of the queries' gradient on an accelerator, and a cpu's blocks of scores.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, prod

from megatrain.spec import LayerProfile, ModelSpec, Moment, Policy, Rows, UnitSpec, Work

LOSS_BLOCK_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits that exist in float32 at one time, by device type: a share of the cache on a cpu, few launches on a GPU."""
ARGUMENT_CHANNELS = 256
"""Values per position among the arguments that layers share: rotary tables, a sine and a cosine for 128 channels."""
ANGLE_FLOATS = 256
"""Float32 values per position that exist beside rotary tables while they are made."""
MASKED = ("sdpa", "eager")
"""Kernels that are told of windows, padding and packing by a mask of all positions."""
ATTENTION_ROWS, ATTENTION_COLUMNS = ((768, 256), (192, 64), (0, 32)), 512
"""Rows of a block of scores in a cpu's attention kernel from so many tokens on, and its columns (torch's own)."""
PLACES_NBYTES = 40
"""Per token, for which rows of a table were looked up, and which of those each token is."""
HEAD_FLOATS = 5
"""Float32 values per token and channel that the norm in front of a head makes and keeps of which nothing is known."""
INDEX_NBYTES = 8
"""A target, or the place of one: LOSS has both of all tokens of a micro-batch, on a GPU those of a chunk."""
ROW_NBYTES = 4 + 4 + 8 + 4
"""Per row of a float32 block of logits: its sum, its target's exponent, its number, and what is there of its target."""
SCALARS_NBYTES = 64
"""The sums of losses so far, in float64, and numbers that torch takes for tensors."""
RANDOM_STATE_NBYTES = 5056
"""The state of torch's generator, which a step gives back at its end; on a cpu a part of what each op has."""
PACKED_NBYTES = 1_100_000
"""Per thread, what a product in bfloat16 takes on a cpu besides its float32 result: blocks of its operands, packed for
matrix units. oneDNN 3.x takes up to 1.06 MB on AMX, 0.35 MB on AVX512_BF16, and nothing where there are no such units
(`tests/system/test_prediction.py` compares the processor at hand)."""


def _forms(policy: Policy, work: Work) -> bool:
    """Whether gradients are formed where they are summed (`engine.formed`): in one memory, and in one dtype."""
    alone = work.micro_batches * work.repeats == 1
    return policy.shares_memory and policy.kernels == "stock" and (policy.weight_nbytes == 4 or alone)


def profile_of(model: ModelSpec, unit: int, work: Work, length: int) -> LayerProfile:
    """The profile of a unit for the step's rows, of sequences of `length`."""
    return _profile_of(model, unit, work.rows, length, max(work.tokens, default=0) > length)


@lru_cache(maxsize=4096)
def _profile_of(model: ModelSpec, unit: int, rows: Rows, length: int, several: bool) -> LayerProfile:
    profile = model.units[unit].profile
    if model.attention in MASKED:
        of = (profile,) if unit else tuple(model.units[layer].profile for layer in model.layers)
        windowed = any(each.window is not None and each.window <= length for each in of)
        profile = profile.of_rows(rows, windowed=windowed)
    return profile.several or profile if several else profile


def arguments_nbytes(model: ModelSpec, policy: Policy, work: Work, tokens: int) -> int:
    """What layers are called with besides the hidden state, of a micro-batch of `tokens`: rotary tables, positions, and
    masks where the kernel takes them. All rows share them, unless they are padded or packed."""
    length = min(work.length or tokens, tokens)
    profile = profile_of(model, 0, work, length)
    each = profile.arguments_nbytes
    if not profile.forward_moments and not each:  # nothing is known
        each = ARGUMENT_CHANNELS * policy.weight_nbytes
    shared = length * (each + profile.arguments_nbytes_by_length * length)
    return max(
        1, int(shared + tokens * (profile.arguments_row_nbytes + profile.arguments_row_nbytes_by_length * length))
    )


def beside_nbytes(policy: Policy) -> int:
    """What exists all through a step in the memory that ops compute in, and belongs to none of them."""
    if not policy.shares_memory:
        return SCALARS_NBYTES
    packed = PACKED_NBYTES * max(1, policy.host_threads) if policy.weight_nbytes == 2 else 0
    return SCALARS_NBYTES + RANDOM_STATE_NBYTES + packed


def forward_nbytes(model: ModelSpec, policy: Policy, work: Work, unit: int, tokens: int) -> int:
    """What a forward makes beside its output and, of the prologue, beside what it hands on; 0 where it is not known."""
    length = min(work.length or tokens, tokens)
    profile = profile_of(model, unit, work, length)
    moments = profile.host_forward_moments if policy.shares_memory else profile.forward_moments
    if not moments:
        return 0
    widest = max(each.nbytes(tokens, length, tokens) for each in moments)
    given = tokens * model.hidden_size * policy.weight_nbytes
    return max(0, ceil(widest) - given - (0 if unit else arguments_nbytes(model, policy, work, tokens)))


def loss_nbytes(model: ModelSpec, policy: Policy, work: Work, micro: int, *, trains: bool) -> int:
    """Of a chunk: what the head makes and keeps, the gradient of its logits, and then a float32 block of them or what
    the head's backward makes; or of the micro-batch, what a router's auxiliary loss makes.

    As the head's own tensors had it, where a profile tells; else for one behind a norm.
    """
    profile, tokens = model.units[-1].profile, work.tokens[micro]
    chunk = min(policy.loss_chunk_tokens, tokens)
    logits = chunk * model.vocab_size * policy.weight_nbytes
    numel = LOSS_BLOCK_NUMEL["cpu" if policy.shares_memory else "cuda"]
    rows = min(chunk, max(1, numel // model.vocab_size))
    block = rows * (4 * model.vocab_size + ROW_NBYTES)
    largest = largest_nbytes(model, policy, model.epilogue) if trains else 0
    first = micro == 0 and work.repeats == 1 and tokens <= policy.loss_chunk_tokens
    formed = largest if first and _forms(policy, work) else 0
    if not profile.formed_moments:
        made = max(2 * logits + max(block, _product_nbytes(policy, largest) - formed), _product_nbytes(policy, logits))
        return made + HEAD_FLOATS * 4 * chunk * model.hidden_size
    made = ceil(profile.formed_moments[0].nbytes(chunk, 1, chunk)) + block
    if trains:
        moments = profile.host_moments if policy.shares_memory else profile.moments
        made = max(
            made, *(ceil(each.nbytes(chunk, 1, chunk)) - _not_made(model, policy, each, formed) for each in moments)
        )
    made += 2 * INDEX_NBYTES * (tokens if policy.shares_memory else chunk)
    balancing = profile.host_balance_moments if policy.shares_memory else profile.balance_moments
    length = min(work.length or tokens, tokens)
    targets = 2 * INDEX_NBYTES * tokens if policy.shares_memory else 0
    return max(made, *(targets + ceil(each.nbytes(tokens, length, tokens)) for each in balancing), 1)


def _not_made(model: ModelSpec, policy: Policy, moment: Moment, formed: int) -> int:
    """What a moment of the head has of a gradient that is formed where it is summed, or that nobody wants."""
    params = [param for param in model.units[0].params if param.name in model.units[-1].borrows]
    largest = max((param.numel for param in (*model.units[-1].params, *params)), default=0) * policy.weight_nbytes
    if not 0 < largest <= moment.fixed:
        return 0
    if largest_nbytes(model, policy, model.epilogue) < largest:
        return int(moment.fixed // largest) * largest
    return formed


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
        looked_up = tokens * (model.hidden_size * policy.weight_nbytes + PLACES_NBYTES)
        largest = _product_nbytes(policy, largest_nbytes(model, policy, unit))
        again += max(angles, min(largest, looked_up) if _forms(policy, work) else largest)
        made = forward_nbytes(model, policy, work, unit, tokens) + arguments_nbytes(model, policy, work, tokens)
        return max(again, made + tokens * model.hidden_size * policy.weight_nbytes)
    length, chunk = min(work.length or tokens, tokens), policy.mlp_chunk_tokens
    profile = profile_of(model, unit, work, length)
    chunked = runs_in_chunks(model.units[unit], policy, tokens)
    if policy.shares_memory:
        moments = profile.host_chunked_moments if chunked else profile.host_moments
    else:
        moments = profile.chunked_moments if chunked else profile.moments
    if not moments:
        return _unseen_nbytes(model, policy, work, unit, tokens)
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
    return rows * (ATTENTION_COLUMNS * (13 if policy.weight_nbytes == 2 else 8) + 4)  # and a sum for each row


def runs_in_chunks(unit: UnitSpec, policy: Policy, tokens: int) -> bool:
    """Whether token-wise parts of a layer go through so many tokens in chunks."""
    return unit.profile.chunked_nbytes > 0 and 0 < policy.mlp_chunk_tokens < tokens


def _unseen_nbytes(model: ModelSpec, policy: Policy, work: Work, unit: int, tokens: int) -> int:
    """`backward_nbytes` of a layer whose backward nobody has seen run, for one with a gate: the gradient of a
    parameter, and gradients of the hidden state and of the widest activation, of which a gate has two at a time. In
    chunks, the float32 sums of gradients, what autograd keeps of a chunk and the same for that chunk; or the gradients
    of attention's output, of queries, keys and values, less what the parts above have let go of, which the schedule
    still counts."""
    profile, chunk = model.units[unit].profile, policy.mlp_chunk_tokens
    chunked = runs_in_chunks(model.units[unit], policy, tokens)
    largest = largest_nbytes(model, policy, unit)
    widest = (chunk if chunked else tokens) * _widest(model.units[unit]) * policy.weight_nbytes
    made = max(_product_nbytes(policy, largest), largest + _product_nbytes(policy, widest), 2 * widest)
    if not chunked:
        return made + tokens * model.hidden_size * policy.weight_nbytes
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
