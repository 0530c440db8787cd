"""Workspace: the memory of layers' arguments, and what ops need besides what they read and pass on.

An op's peak is as measured (`LayerProfile`), or 0 without a measurement: an engine without a plan does not need
it. Added by rule is what measuring does not see: the loss's float32 block, and memory that library kernels
allocate, namely float32 sums of a bfloat16 product on a CPU and of the queries' gradient on an accelerator, and a
CPU's blocks of scores. Real peaks stay below (`tests/integration/test_live.py`, `bench.prediction`).
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
    hidden_sides,
)

LOSS_BLOCK_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Float32 logits at a time, by device type: to fit the cache on a CPU, for few launches on a GPU."""
ANGLE_FLOATS = 256
"""Temporary float32 values per position while rotary tables are computed."""
MASKED = ("sdpa", "eager")
"""Kernels that need a full mask for windows, padding and packing."""
ATTENTION_ROWS, ATTENTION_COLUMNS = ((768, 256), (192, 64), (0, 32)), 512
"""Block of scores in torch's CPU attention kernel: rows by minimum number of tokens, and columns."""
PLACES_NBYTES = 40
"""Bytes per token for the unique rows of an embedding lookup and each token's index among them."""
INDEX_NBYTES = 8
"""Bytes of a target or its position: LOSS has both for a whole micro-batch, on a GPU for a chunk."""
ROW_NBYTES = 4 + 4 + 8 + 4
"""Bytes per row of a float32 block of logits: its sum, its target's exponent, its number, its target's logit."""
SCALARS_NBYTES = 64
"""Float64 sums of losses, and numbers that torch converts to tensors."""
RANDOM_STATE_NBYTES = 5056
"""The random generator's state, which a step restores at its end; on a CPU part of each op's memory."""
PACKED_NBYTES = 1_100_000
"""Bytes per thread that a bfloat16 product takes on a CPU besides its float32 result: operand blocks packed for matrix
units. oneDNN 3.x takes up to 1.06 MB on AMX, 0.35 MB on AVX512_BF16, and nothing without such units
(`tests/integration/test_prediction.py` compares the processor at hand)."""


def _forms(numerics: Numerics, policy: Policy, work: Work) -> bool:
    """Whether gradients are formed in their sum (`engine.autograd`): in one memory, with one dtype."""
    alone = work.micro_batches * work.repeats == 1
    return policy.shares_memory and (numerics.weight_nbytes == 4 or alone)


def profile_of(model: ModelSpec, unit: int, work: Work, length: int) -> LayerProfile:
    """A unit's profile for the step's batching and sequences of `length`."""
    several, images = max(work.tokens, default=0) > length, unit == 0 and work.values_per_token > 0
    return _profile_of(model, unit, work.batching, length, several, images)


@lru_cache(maxsize=4096)
def _profile_of(
    model: ModelSpec, unit: int, batching: Batching, length: int, several: bool, images: bool
) -> LayerProfile:
    profile = model.units[unit].profile
    if images and (with_images := profile.of("images")) is not profile:
        return with_images
    if model.attention in MASKED:
        of = (profile,) if unit else tuple(model.units[layer].profile for layer in model.layers)
        windowed = any(profile.window is not None and profile.window <= length for profile in of)
        profile = profile.of(batching, *(("masked",) if windowed or batching != "uniform" else ()))
    return profile.of("several") if several else profile


def input_nbytes(model: ModelSpec, numerics: Numerics, work: Work, unit: int, micro: int) -> int:
    """Bytes of a unit's input, for a micro-batch or those that it represents; of the prologue's from an encoder."""
    tokens, weight_nbytes = work.tokens[micro], numerics.weight_nbytes
    if 0 < unit <= model.epilogue:
        return round(tokens * work.repeats * model.hidden_size * weight_nbytes)
    return max(1, round(work.repeats * encoded_nbytes(model, numerics, work, tokens)))


def encoded_nbytes(model: ModelSpec, numerics: Numerics, work: Work, tokens: int) -> int:
    """Bytes of the input of an encoder's layer, for a micro-batch of `tokens`."""
    return ceil(tokens * work.values_per_token * model.encoded_per_value) * numerics.weight_nbytes


def arguments_nbytes(model: ModelSpec, numerics: Numerics, work: Work, tokens: int, unit: int = 0) -> int:
    """Bytes of layers' arguments besides the hidden state, for a micro-batch of `tokens`. unit: makes them.

    Rotary tables, positions, and masks if the kernel needs them. Rows share them, unless padded or packed.
    """
    length = min(work.length or tokens, tokens)
    if unit:
        profile, values = model.units[unit].profile, tokens * work.values_per_token
        return max(1, ceil(profile.arguments.nbytes(tokens, length, values=values)))
    profile = profile_of(model, 0, work, length)
    of_rows = profile.row_arguments.nbytes(length, length) * tokens / length
    return max(1, ceil(profile.arguments.nbytes(length, length) + of_rows))


def beside_nbytes(numerics: Numerics, policy: Policy) -> int:
    """Bytes that exist throughout a step in the memory of compute, outside of any op."""
    if not policy.shares_memory:
        return SCALARS_NBYTES
    packed = PACKED_NBYTES * max(1, policy.host_threads) if numerics.weight_nbytes == 2 else 0
    return SCALARS_NBYTES + RANDOM_STATE_NBYTES + packed


def forward_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, unit: int, tokens: int) -> int:
    """Workspace of a forward, besides its output and, for the prologue, besides the arguments of layers."""
    length = min(work.length or tokens, tokens)
    profile = profile_of(model, unit, work, length)
    padded = profile.padded(length)
    values = tokens * work.values_per_token
    peak = profile.forward.nbytes(policy.shares_memory, tokens // length * padded, padded, values=values)
    given = tokens * model.hidden_size * numerics.weight_nbytes
    if unit > model.epilogue:
        given = encoded_nbytes(model, numerics, work, tokens)
    made = arguments_nbytes(model, numerics, work, tokens, unit) if model.is_first(unit) else 0
    return max(0, ceil(peak) - given - made)


def loss_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, micro: int, *, trains: bool) -> int:
    """Workspace of the loss, the larger of two: a chunk's (the head's activations, the gradient of its logits, and
    a float32 block of them or the head's backward), or the router auxiliary loss of a micro-batch."""
    profile, tokens, on_cpu = model.units[model.epilogue].profile, work.tokens[micro], policy.shares_memory
    chunk = min(numerics.loss_chunk_tokens, tokens)
    rows = min(chunk, max(1, LOSS_BLOCK_NUMEL["cpu" if on_cpu else "cuda"] // model.vocab_size))
    block = rows * (4 * model.vocab_size + ROW_NBYTES)
    first = micro == 0 and work.repeats == 1 and tokens <= numerics.loss_chunk_tokens
    formed = (
        largest_nbytes(model, numerics, model.epilogue) if trains and first and _forms(numerics, policy, work) else 0
    )
    made = 0.0
    for peak in profile.backward.on(on_cpu):
        if peak.with_kernel:
            made = max(made, peak.nbytes(chunk, 1) + block)
        elif trains:
            made = max(made, peak.nbytes(chunk, 1) - _not_made(model, numerics, peak, formed))
    made += 2 * INDEX_NBYTES * (tokens if on_cpu else chunk)
    length = min(work.length or tokens, tokens)
    targets = 2 * INDEX_NBYTES * tokens if on_cpu else 0
    if more := len(hidden_sides(model, model.epilogue)):  # all that the head reads, in one tensor, and its gradient
        hidden = tokens * model.hidden_size * numerics.weight_nbytes
        made += (1 + more) * hidden * (2 if trains else 1)
    return ceil(max(made, targets + profile.balance.nbytes(on_cpu, tokens, length), 1))


def _not_made(model: ModelSpec, numerics: Numerics, peak: Growth, formed: int) -> int:
    """The part of the head's peak for a gradient that is formed in its sum, or not needed."""
    head = model.units[model.epilogue]
    params = [param for param in model.units[0].params if param.name in head.borrows]
    largest = max((param.numel for param in (*head.params, *params)), default=0) * numerics.weight_nbytes
    if not 0 < largest <= peak.fixed:
        return 0
    if largest_nbytes(model, numerics, model.epilogue) < largest:
        return int(peak.fixed // largest) * largest
    return formed


def backward_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, unit: int, tokens: int) -> int:
    """Workspace of a unit's backward over a micro-batch of `tokens`, besides what autograd keeps.

    Gradients of activations, plus one parameter's gradient before it is added to the sum. A prologue runs again,
    since it has no graph.
    """
    hidden = tokens * model.hidden_size * numerics.weight_nbytes
    if unit == 0:
        arguments = arguments_nbytes(model, numerics, work, tokens)
        angles = 4 * ANGLE_FLOATS * min(work.length or tokens, tokens)
        largest = largest_nbytes(model, numerics, unit) * (
            3 if policy.shares_memory and numerics.weight_nbytes == 2 else 1
        )
        gradient = min(largest, hidden + tokens * PLACES_NBYTES) if _forms(numerics, policy, work) else largest
        made = forward_nbytes(model, numerics, policy, work, unit, tokens)
        text = hidden + arguments + max(angles, gradient, made)
        length, values = min(work.length or tokens, tokens), tokens * work.values_per_token
        backward = profile_of(model, 0, work, length).backward
        return max(text, ceil(backward.nbytes(policy.shares_memory, tokens, length, values=values)))
    length, chunk = min(work.length or tokens, tokens), numerics.mlp_chunk_tokens
    profile = profile_of(model, unit, work, length)
    if unit > model.epilogue:
        values, largest = tokens * work.values_per_token, largest_nbytes(model, numerics, unit)
        return max(largest, ceil(profile.backward.nbytes(policy.shares_memory, tokens, length, values=values)))
    peak = profile.backward_in_chunks if runs_in_chunks(model.units[unit], numerics, tokens) else profile.backward
    kernel = _attention_nbytes(model.units[unit], numerics, policy, tokens, length)
    padded = profile.padded(length)
    widest = peak.nbytes(policy.shares_memory, tokens // length * padded, padded, chunk, kernel)
    return max(1, ceil(widest) - profile.kept(tokens // length, length, chunk))


def answered_nbytes(
    model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, unit: int, tokens: int, keep: Keep
) -> int:
    """By how much saved outputs lower the peak of a layer's backward: as tensors that the graph also holds, or in
    a slot."""
    length = min(work.length or tokens, tokens)
    profile = profile_of(model, unit, work, length)
    outputs = profile.outputs
    if keep not in NOT_OFFLOADED:
        return int(tokens * (outputs.shared_nbytes if keep == "chosen" else outputs.attention_nbytes))
    peak = outputs.chosen_offloaded if SAVED_BY[keep] == "chosen" else outputs.attention_offloaded
    kernel, padded = _attention_nbytes(model.units[unit], numerics, policy, tokens, length), profile.padded(length)
    whole, less = (
        memory.nbytes(policy.shares_memory, tokens // length * padded, padded, kernel=kernel)
        for memory in (profile.backward, peak)
    )
    return max(0, int(whole - less)) if peak.device else 0


def _attention_nbytes(unit: UnitSpec, numerics: Numerics, policy: Policy, tokens: int, length: int) -> int:
    """Memory that attention's backward kernel allocates.

    On an accelerator, the queries' gradient in float32 (Dao, 2023, FlashAttention-2); on a CPU, one thread's
    blocks of scores.
    """
    if not policy.shares_memory:
        return tokens * round(unit.profile.attention_flops)  # 4 bytes and 4 FLOPs for each channel
    rows = next(rows for least, rows in ATTENTION_ROWS if length >= least)
    return rows * (ATTENTION_COLUMNS * (13 if numerics.weight_nbytes == 2 else 8) + 4)  # plus a sum per row


def runs_in_chunks(unit: UnitSpec, numerics: Numerics, tokens: int) -> bool:
    """Whether a layer's token-wise parts process this many tokens in chunks."""
    return unit.profile.graph_in_chunks is not None and 0 < numerics.mlp_chunk_tokens < tokens


def largest_nbytes(model: ModelSpec, numerics: Numerics, unit: int) -> int:
    """Bytes of the largest gradient of one parameter of a unit."""
    borrowed = [param for param in model.units[0].params if param.name in model.units[unit].borrows]
    trained = [param.numel for param in (*model.units[unit].params, *borrowed) if param.trainable]
    return max(1, max(trained, default=0) * numerics.weight_nbytes)
