"""What the plan search tries, and when it stops. The search itself is in `search`."""

from __future__ import annotations

from typing import Any

from megatrain.spec import Keep

LEAN: dict[str, Any] = {"weight_slots": 1, "grad_slots": 1, "loss_chunk_tokens": 64}
"""What takes least memory."""

OF_LAST_RESORT = ("activations_by_layer", "mlp_chunk_tokens", "micro_batches_per_round")
"""Fields by which a size fits that fits in no other way."""

OFFLOAD_SLOTS = 3
"""For mixtures that are not lean: one fills while another leaves and a third is in use."""

KNOBS: dict[str, tuple[Any, ...]] = {
    "weight_slots": (1, 2, 3, 4),
    "grad_slots": (1, 2, 3),
    "shard_nbytes": (16 << 20, 64 << 20, 256 << 20, 1 << 30),
    "loss_chunk_tokens": (64, 256, 1024, 4096),
}
"""What is tried one at a time, and which values."""

INPUT: tuple[tuple[Keep, ...], ...] = (("input",),)
ATTENTION: tuple[tuple[Keep, ...], ...] = (("attention",),)
CHOSEN: tuple[tuple[Keep, ...], ...] = (("chosen",),)
OFFLOAD: tuple[tuple[Keep, ...], ...] = (("offload",),)
ALIKE: tuple[tuple[tuple[Keep, ...], ...], ...] = (INPUT, OFFLOAD, ATTENTION, CHOSEN)
"""What all layers may keep where compute waits: the first two where there is a bus, the others where there is anything
to store."""

MLP_CHUNK_TOKENS = 4096
"""Where token-wise parts have to run in chunks: products of so many tokens are as quick as larger ones."""

ROUND_SIZES = (1, 4)
"""Micro-batches of a round that are tried."""

STAGE_SLOTS = (3, 4, 6)
"""Staging buffers that are tried beside the usual two: how far reads from the disk run ahead."""

PHASED_SHARDS = (8, 4, 16)
"""Pieces of the largest unit that are tried where compute waits for shards; the others only where the first promise a
gain."""

LEAST_SHARD = 16 << 20
"""Bytes; a bus is slower in smaller pieces."""

STREAMED = (1.0, 0.75, 1.35)
"""Times the share of updates with which bus and host would be busy for as long as each other; those shares are tried,
and all."""

WORTH_STREAMING = 0.99
"""Of the seconds with all updates where the state is, below which a plan streams some."""

SHARD_TRIES = 2
"""Plans that wait for shards and are replayed whole."""

WORTH_SHARDS = 0.99
"""Of the seconds where compute waits for units, below which a plan has it wait for shards."""

ROOMY_RING, LEAN_RING = 2, 16
"""Which part of a layer comes ahead by a ring: where that is to be quick, and where it is to take little memory."""

RING_SHARDS = 4
"""Pieces of a layer by a ring, or as large as the read-ahead, if that is smaller."""

WORTH_A_RING = 0.99
"""Of the seconds without a ring, below which a plan has one."""

MOST_SHARDS = 4
"""Pieces of the largest unit that candidates are replayed with; smaller shards are not tried."""

TRIES = 4
"""Mixtures that are replayed whole."""

LATE = 1.01
"""Times what it promised that a mixture takes, from which on its way out is taken to be slower."""

FITS = 3
"""Replays of one, to use what the replay before has left or lacked."""

NEAR = 4
"""Times smaller or larger than the best without a mixture that the micro-batches of mixtures are."""

COARSE = 4
"""Sixteenths of the layers by which placements grow beside mixtures."""

NEARLY = 1.02
"""Of the seconds of the quickest so far; what promises less is not replayed."""

COMPUTES = 0.97
"""Of the step; where compute is busy for longer, a mixture is found without placements."""

SLOWER_FOR_FEWER_WRITES, FEWER_WRITES = 1.03, 0.8
"""Of the seconds of the quickest plan, up to which one is preferred that writes less than such a share to the disk."""

MOST_ROUNDS = 12
"""Winners of the search that are replayed and do not fit, until nothing is taken to."""

WORTH_A_CLIMB = 0.99
"""Of the seconds of the best that was found; a size that would not be that much quicker is not looked at again."""

WORTH_A_ROUND = 0.99
"""Of the seconds before a round of moves; after one that gains less, no other is made."""

WORTH_A_REPLAY = 0.995
"""Of the seconds of the usual placements; what does not promise to be that much quicker is not replayed."""
