"""One slot and a read-ahead against whole slots, by replay: device bytes of weights, and the time of a step.

    python -m bench.ring [--tokens N] [--layers N]

An 8B shape in bf16 on an H200 as it is described, 4,096 tokens a sequence, in 1, 2 and 8 micro-batches of one sequence
each unless `--tokens` says otherwise, with inputs kept (layers are computed again) and with graphs kept. Nothing here
is measured: each number is a schedule of ours at a described machine's prices. What the step would take with a bus
of infinite speed stands beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from bench.shapes import llama_shape
from megatrain.plan import machine, op_seconds
from megatrain.schedule import Schedule, build_step, check, replay
from megatrain.spec import ActivationPlan, Hardware, ModelSpec, Policy, Work

MIB = 1 << 20
SHARDED = Policy(shard_nbytes=64 * MIB, gates="shard")
POLICIES: dict[str, Policy] = {
    "two slots": replace(SHARDED, gates="unit"),
    "two slots, gates": SHARDED,
    "one slot, gates": replace(SHARDED, weight_slots=1),
    "ring, 64 MiB ahead": replace(SHARDED, read_ahead_nbytes=64 * MIB),
    "ring, 128 MiB ahead": replace(SHARDED, read_ahead_nbytes=128 * MIB),
    "ring, 256 MiB ahead": replace(SHARDED, read_ahead_nbytes=256 * MIB),
}


@dataclass(frozen=True)
class Found:
    """What a policy takes: bytes of device memory that weights pass through, and seconds of a step."""

    nbytes: int
    seconds: float
    unhindered: float
    """With a bus of infinite speed."""


def weights_nbytes(schedule: Schedule) -> int:
    """Slots, and the read-ahead."""
    places = (each for each in schedule.buffers.values() if each.name.startswith("device/weights/"))
    return sum(each.nbytes for each in places)


def found(model: ModelSpec, policy: Policy, work: Work, hardware: Hardware) -> Found:
    """Raises `ScheduleError` for a schedule that is not sound."""
    schedule = build_step(model, policy, work, "all")
    check(schedule)
    free = replace(hardware, fetch_bandwidth=1e18, grad_bandwidth=1e18)
    free = replace(free, duplex_fetch_bandwidth=None, duplex_grad_bandwidth=None)
    seconds = [replay(schedule, op_seconds(model, policy, work, each)).seconds for each in (hardware, free)]
    return Found(weights_nbytes(schedule), *seconds)


def rows(layers: int, tokens: int, micro_batches: Sequence[int]) -> list[str]:
    model, hardware = llama_shape("8B", layers, 4096), machine("h200")
    lines = [
        "| micro-batches | kept | policy | weights | step | of an infinite bus |",
        "|---|---|---|---|---|---|",
    ]
    words: dict[str, ActivationPlan] = {"inputs": "recompute", "graphs": "keep"}
    for count, (kept, plan), name in product(micro_batches, words.items(), POLICIES):
        work = Work((tokens,) * count, min(tokens, 4096))
        each = found(model, replace(POLICIES[name], activations=plan), work, hardware)
        took = f"{each.nbytes / MIB:,.0f} MiB | {1e3 * each.seconds:,.1f} ms | {each.unhindered / each.seconds:.1%}"
        lines.append(f"| {count} x {tokens:,} | {kept} | {name} | {took} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="one slot and a read-ahead against whole slots, by replay")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 8])
    arguments = parser.parse_args()
    print("\n".join(rows(arguments.layers, arguments.tokens, arguments.micro_batches)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
