"""What the plan search tries, and when it stops. The search itself is in `search`.

`WORTH_...` are ratios of step times: an alternative is taken, or looked at further, if its step takes less than this
share of the time of the step that it is compared with.
"""

from __future__ import annotations

from typing import Any

from megatrain.spec import Keep

# Knobs ----------------------------------------------------------------------------------------------------------------


LEAN: dict[str, Any] = {"weight_slots": 1, "grad_slots": 1, "loss_chunk_tokens": 64}
"""The values that take the least memory."""

KNOBS: dict[str, tuple[Any, ...]] = {
    "weight_slots": (1, 2, 3, 4),
    "grad_slots": (1, 2, 3),
    "shard_nbytes": (16 << 20, 64 << 20, 256 << 20, 1 << 30),
    "loss_chunk_tokens": (64, 256, 512, 1024, 4096),
}
"""Fields that the search changes one at a time, and the values it tries."""

LAST_RESORT_FIELDS = ("activations_by_layer", "mlp_chunk_tokens", "micro_batches_per_round")
"""Fields that are changed if a micro-batch size fits in no other way."""

MOST_SHARDS = 4
"""Shards of the largest unit in candidates. Smaller shards are not tried."""

MLP_CHUNK_TOKENS = 4096
"""Chunk size where token-wise parts have to run in chunks. Products of so many tokens are as fast as larger ones."""

ROUND_SIZES = (1, 4)
"""Micro-batches per round that are tried."""

DISK_STAGING_SLOTS = (3, 4, 6)
"""Numbers of disk staging buffers that are tried beside the default of two. More of them read further ahead."""

WORTH_A_CLIMB = 0.99
"""Lower bound for another micro-batch size, relative to the best candidate: else no climb starts from that size."""

WORTH_A_ROUND = 0.99
"""After a round of moves, relative to before: else the climb ends."""

MOST_CORRECTIONS = 12
"""Candidates whose replay may contradict the estimate before the search gives up."""

SLOWER_FOR_FEWER_WRITES = 1.03
"""A plan that writes less to the disk may take this much longer than the fastest."""

FEWER_WRITES = 0.8
"""Bytes that such a plan may write, relative to the fastest."""

# Placements -----------------------------------------------------------------------------------------------------------


WORTH_A_REPLAY = 0.995
"""Estimate of an alternative, relative to the estimate without it: else it is not replayed whole."""

WORTH_A_SPARING_REPLAY = 0.98
"""Estimated seconds of an alternative, relative to the fastest replay, below which a search in `what_if` goes on."""

FIT_ATTEMPTS = 3
"""Replays of one alternative, each corrected by what the one before left unused or lacked."""

PLACEMENT_STEP = 4
"""Sixteenths of the layers by which the state on the device grows in placements that are combined with mixtures."""

# Activations ----------------------------------------------------------------------------------------------------------


INPUT: tuple[tuple[Keep, ...], ...] = (("input",),)
ATTENTION: tuple[tuple[Keep, ...], ...] = (("attention",),)
CHOSEN: tuple[tuple[Keep, ...], ...] = (("chosen",),)
OFFLOAD: tuple[tuple[Keep, ...], ...] = (("offload",),)
UNIFORM: tuple[tuple[tuple[Keep, ...], ...], ...] = (INPUT, OFFLOAD, ATTENTION, CHOSEN)
"""Activation plans in which all layers keep the same, tried where compute waits: the first two need a bus, the others
layers with outputs to save."""

OFFLOAD_SLOTS = 3
"""Slots for mixtures that are not lean: one is filled, one is copied out and one is in use."""

MIXTURE_REPLAYS = 4
"""Mixtures that are replayed whole."""

NEAR_SIZES = 4
"""Mixtures are tried with micro-batches up to this factor smaller or larger than the best without a mixture."""

NEARLY_AS_FAST = 1.02
"""Estimate of a mixture, relative to the fastest replay so far, up to which it is replayed where compute waits."""

COMPUTE_BOUND = 0.97
"""If compute is busy for at least this share of the step, the step counts as limited by compute."""

WORTH_A_MIXTURE = 0.9995
"""Estimate of a mixture, relative to that of the one before, whose replay has corrected both: else it is not
replayed. Replays gain more than that, since estimates leave out how long streams wait for each other."""

SLOW_OFFLOAD = 1.01
"""Replay of a mixture over its estimate from which offloading is assumed to be slower than estimated."""

# Refinements ----------------------------------------------------------------------------------------------------------


SHARD_COUNTS = (8, 4, 16)
"""Shards of the largest unit that are tried where compute waits for shards. The others are tried only if the first
gains."""

MIN_SHARD_NBYTES = 16 << 20
"""A bus is slower with smaller copies."""

SHARD_REPLAYS = 2
"""Plans in which compute waits for shards that are replayed whole."""

WORTH_SHARDS = 0.99
"""Waiting for shards, relative to waiting for units."""

STREAMED_FACTORS = (1.0, 0.75, 1.35)
"""Factors of the share of streamed updates that keeps bus and host equally busy. These shares are tried, and all."""

WORTH_STREAMING = 0.99
"""Streaming some updates, relative to updating all state where it is placed."""

READ_AHEAD_DIVISORS = (2, 16)
"""The read-ahead holds this fraction of a layer: half of it for speed, or a sixteenth to save memory."""

READ_AHEAD_SHARDS = 4
"""Shards of a layer with a read-ahead, each at most as large as the read-ahead."""

WORTH_A_READ_AHEAD = 0.99
"""One slot with a read-ahead, relative to several slots."""
