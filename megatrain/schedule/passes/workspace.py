"""Memory that layers' arguments take, and what ops need beside what they read and hand on: their workspace.

An op's peak is as it was measured (`LayerProfile`), and 0 where nothing was: an engine that nobody has planned for
needs no such figure. Added by rule is what was not seen there: the loss's float32 block, and what kernels of a
library take for themselves, namely float32 sums of a product that a cpu multiplies in bfloat16 and of the queries'
gradient on an accelerator, and a cpu's blocks of scores. Real peaks stay below (`tests/integration/test_live.py`,
`bench.prediction`).
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from megatrain.spec import (
    NOT_OFFLOADED,
    SAVED_BY,
    Batching,
    Growth,
    Keep,
    LayerProfile,
    ModelSpec,
    Numerics,
    Policy,
    UnitSpec,
    Work,
)

LOSS_BLOCK_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits that exist in float32 at one time, by device type: a share of the cache on a cpu, few launches on a GPU."""
ANGLE_FLOATS = 256
"""Float32 values per position that exist beside rotary tables while they are made."""
MASKED = ("sdpa", "eager")
"""Kernels that are told of windows, padding and packing by a mask of all positions."""
ATTENTION_ROWS, ATTENTION_COLUMNS = ((768, 256), (192, 64), (0, 32)), 512
"""Rows of a block of scores in a cpu's attention kernel from so many tokens on, and its columns (torch's own)."""
PLACES_NBYTES = 40
"""Per token, for which rows of a table were looked up, and which of those each token is."""
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
(`tests/integration/test_prediction.py` compares the processor at hand)."""


def _forms(numerics: Numerics, policy: Policy, work: Work) -> bool:
    """Whether gradients are formed where they are summed (`engine.autograd`): in one memory, and in one dtype."""
    alone = work.micro_batches * work.repeats == 1
    return policy.shares_memory and numerics.kernels == "stock" and (numerics.weight_nbytes == 4 or alone)


def profile_of(model: ModelSpec, unit: int, work: Work, length: int) -> LayerProfile:
    """The profile of a unit for the step's batching, of sequences of `length`."""
    return _profile_of(model, unit, work.batching, length, max(work.tokens, default=0) > length)


@lru_cache(maxsize=4096)
def _profile_of(model: ModelSpec, unit: int, batching: Batching, length: int, several: bool) -> LayerProfile:
    profile = model.units[unit].profile
    if model.attention in MASKED:
        of = (profile,) if unit else tuple(model.units[layer].profile for layer in model.layers)
        windowed = any(each.window is not None and each.window <= length for each in of)
        profile = profile.of(batching, *(("masked",) if windowed or batching != "uniform" else ()))
    return profile.of("several") if several else profile


def arguments_nbytes(model: ModelSpec, numerics: Numerics, work: Work, tokens: int) -> int:
    """What layers are called with besides the hidden state, of a micro-batch of `tokens`: rotary tables, positions, and
    masks where the kernel takes them. All rows share them, unless they are padded or packed."""
    length = min(work.length or tokens, tokens)
    profile = profile_of(model, 0, work, length)
    of_rows = profile.row_arguments.nbytes(length, length) * tokens / length
    return max(1, ceil(profile.arguments.nbytes(length, length) + of_rows))


def beside_nbytes(numerics: Numerics, policy: Policy) -> int:
    """What exists all through a step in the memory that ops compute in, and belongs to none of them."""
    if not policy.shares_memory:
        return SCALARS_NBYTES
    packed = PACKED_NBYTES * max(1, policy.host_threads) if numerics.weight_nbytes == 2 else 0
    return SCALARS_NBYTES + RANDOM_STATE_NBYTES + packed


def forward_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, unit: int, tokens: int) -> int:
    """What a forward makes beside its output and, of the prologue, beside what it hands on."""
    length = min(work.length or tokens, tokens)
    profile = profile_of(model, unit, work, length)
    padded = profile.padded(length)
    peak = profile.forward.nbytes(policy.shares_memory, tokens // length * padded, padded)
    given = tokens * model.hidden_size * numerics.weight_nbytes
    return max(0, ceil(peak) - given - (0 if unit else arguments_nbytes(model, numerics, work, tokens)))


def loss_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, micro: int, *, trains: bool) -> int:
    """Of a chunk: what the head makes and keeps, the gradient of its logits, and then a float32 block of them or what
    the head's backward makes; or of the micro-batch, what a router's auxiliary loss makes."""
    profile, tokens, on_cpu = model.units[-1].profile, work.tokens[micro], policy.shares_memory
    chunk = min(numerics.loss_chunk_tokens, tokens)
    rows = min(chunk, max(1, LOSS_BLOCK_NUMEL["cpu" if on_cpu else "cuda"] // model.vocab_size))
    block = rows * (4 * model.vocab_size + ROW_NBYTES)
    first = micro == 0 and work.repeats == 1 and tokens <= numerics.loss_chunk_tokens
    formed = (
        largest_nbytes(model, numerics, model.epilogue) if trains and first and _forms(numerics, policy, work) else 0
    )
    made = 0.0
    for each in profile.backward.on(on_cpu):
        if each.with_kernel:
            made = max(made, each.nbytes(chunk, 1) + block)
        elif trains:
            made = max(made, each.nbytes(chunk, 1) - _not_made(model, numerics, each, formed))
    made += 2 * INDEX_NBYTES * (tokens if on_cpu else chunk)
    length = min(work.length or tokens, tokens)
    targets = 2 * INDEX_NBYTES * tokens if on_cpu else 0
    return ceil(max(made, targets + profile.balance.nbytes(on_cpu, tokens, length), 1))


def _not_made(model: ModelSpec, numerics: Numerics, peak: Growth, formed: int) -> int:
    """What a peak of the head has of a gradient that is formed where it is summed, or that nobody wants."""
    params = [param for param in model.units[0].params if param.name in model.units[-1].borrows]
    largest = max((param.numel for param in (*model.units[-1].params, *params)), default=0) * numerics.weight_nbytes
    if not 0 < largest <= peak.fixed:
        return 0
    if largest_nbytes(model, numerics, model.epilogue) < largest:
        return int(peak.fixed // largest) * largest
    return formed


def backward_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, unit: int, tokens: int) -> int:
    """Beside what autograd keeps, in the backward of a unit over a micro-batch of `tokens`: gradients of activations,
    and a parameter's, which exists beside the sum for a moment. A prologue runs again, for it has no graph."""
    hidden = tokens * model.hidden_size * numerics.weight_nbytes
    if unit == 0:
        arguments = arguments_nbytes(model, numerics, work, tokens)
        angles = 4 * ANGLE_FLOATS * min(work.length or tokens, tokens)
        largest = largest_nbytes(model, numerics, unit) * (
            3 if policy.shares_memory and numerics.weight_nbytes == 2 else 1
        )
        gradient = min(largest, hidden + tokens * PLACES_NBYTES) if _forms(numerics, policy, work) else largest
        made = forward_nbytes(model, numerics, policy, work, unit, tokens)
        return hidden + arguments + max(angles, gradient, made)
    length, chunk = min(work.length or tokens, tokens), numerics.mlp_chunk_tokens
    profile = profile_of(model, unit, work, length)
    peak = profile.backward_in_chunks if runs_in_chunks(model.units[unit], numerics, tokens) else profile.backward
    kernel = _attention_nbytes(model.units[unit], numerics, policy, tokens, length)
    padded = profile.padded(length)
    widest = peak.nbytes(policy.shares_memory, tokens // length * padded, padded, chunk, kernel)
    return max(1, ceil(widest) - profile.kept(tokens // length, length, chunk))


def answered_nbytes(
    model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, unit: int, tokens: int, keep: Keep
) -> int:
    """By how much the peak of a layer's backward is lower where outputs that its forward has saved answer for it: as
    tensors that the graph holds as well, or in a slot."""
    length = min(work.length or tokens, tokens)
    profile = profile_of(model, unit, work, length)
    outputs = profile.outputs
    if keep not in NOT_OFFLOADED:
        return int(tokens * (outputs.shared_nbytes if keep == "chosen" else outputs.attention_nbytes))
    peak = outputs.chosen_offloaded if SAVED_BY[keep] == "chosen" else outputs.attention_offloaded
    kernel, padded = _attention_nbytes(model.units[unit], numerics, policy, tokens, length), profile.padded(length)
    whole, less = (
        each.nbytes(policy.shares_memory, tokens // length * padded, padded, kernel=kernel)
        for each in (profile.backward, peak)
    )
    return max(0, int(whole - less)) if peak.device else 0


def _attention_nbytes(unit: UnitSpec, numerics: Numerics, policy: Policy, tokens: int, length: int) -> int:
    """What the kernel of attention's backward takes for itself: on an accelerator, the gradient of the queries summed
    in float32 (Dao 2023, FlashAttention-2); on a cpu, blocks of scores, those of one thread."""
    if not policy.shares_memory:
        return tokens * round(unit.profile.attention_flops)  # 4 bytes for each channel, whose operations are 4
    rows = next(rows for least, rows in ATTENTION_ROWS if length >= least)
    return rows * (ATTENTION_COLUMNS * (13 if numerics.weight_nbytes == 2 else 8) + 4)  # and a sum for each row


def runs_in_chunks(unit: UnitSpec, numerics: Numerics, tokens: int) -> bool:
    """Whether token-wise parts of a layer go through so many tokens in chunks."""
    return unit.profile.graph_in_chunks is not None and 0 < numerics.mlp_chunk_tokens < tokens


def largest_nbytes(model: ModelSpec, numerics: Numerics, unit: int) -> int:
    """The largest gradient of one parameter of a unit."""
    borrowed = [param for param in model.units[0].params if param.name in model.units[unit].borrows]
    trained = [param.numel for param in (*model.units[unit].params, *borrowed) if param.trainable]
    return max(1, max(trained, default=0) * numerics.weight_nbytes)
