"""One slot and a read-ahead against whole slots, by replay: device bytes of weights, and the time of a step.

    python -m bench.read_ahead [--tokens N] [--layers N]
    python -m bench.read_ahead --plans [--docs FOLDER]

An 8B shape in bf16 on an H200 as it is described, 4,096 tokens a sequence, in 1, 2 and 8 micro-batches of one sequence
each unless `--tokens` says otherwise, with inputs kept (layers are computed again) and with graphs kept. Nothing here
is measured: each number is a schedule of ours at a described machine's prices. What the step would take with a bus
of infinite speed stands beside it.

The second is what the planner makes of it: the least device memory of a step, and the quickest plan on small devices,
with a read-ahead allowed and without, for an 8B, a 70B and a mixture of experts; it fills the tables of
docs/benchmarks/planning.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path

from bench.scaling import ENOUGH_HOST, GB, filled
from bench.shapes import llama_shape
from megatrain.errors import DoesNotFit
from megatrain.plan import Plan, Question, contention, find_plan, machine, op_seconds
from megatrain.plan.search import Search
from megatrain.schedule import Schedule, Use, build_step, check, replay
from megatrain.spec import ActivationPlan, Hardware, Limits, ModelSpec, Numerics, ParamSpec, Policy, Work

MIB = 1 << 20
SHARDED = Policy(shard_nbytes=64 * MIB, wait_for="shard")
POLICIES: dict[str, Policy] = {
    "two slots": replace(SHARDED, wait_for="unit"),
    "two slots, by shard": SHARDED,
    "one slot, by shard": replace(SHARDED, weight_slots=1),
    "one slot, 64 MiB ahead": replace(SHARDED, read_ahead_nbytes=64 * MIB),
    "one slot, 128 MiB ahead": replace(SHARDED, read_ahead_nbytes=128 * MIB),
    "one slot, 256 MiB ahead": replace(SHARDED, read_ahead_nbytes=256 * MIB),
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
    places = (each for each in schedule.buffers.values() if each.use in (Use.WEIGHT_SLOTS, Use.READ_AHEAD))
    return sum(each.nbytes for each in places)


def found(model: ModelSpec, policy: Policy, work: Work, hardware: Hardware) -> Found:
    """Raises `ScheduleError` for a schedule that is not sound."""
    schedule = build_step(model, Numerics(), policy, work, "all")
    check(schedule)
    free = replace(hardware, fetch_bandwidth=1e18, grad_bandwidth=1e18)
    free = replace(free, duplex_fetch_bandwidth=None, duplex_grad_bandwidth=None)
    seconds = [
        replay(schedule, op_seconds(model, Numerics(), policy, work, each), contention(model, Numerics(), each)).seconds
        for each in (hardware, free)
    ]
    return Found(weights_nbytes(schedule), *seconds)


def rows(layers: int, tokens: int, micro_batches: Sequence[int]) -> list[str]:
    model, hardware = llama_shape("8B", layers, 4096), machine("h200")
    lines = ["| micro-batches | kept | policy | weights | step | of an infinite bus |", "|---|---|---|---|---|---|"]
    words: dict[str, ActivationPlan] = {"inputs": "recompute", "graphs": "keep"}
    for count, (kept, plan), name in product(micro_batches, words.items(), POLICIES):
        work = Work((tokens,) * count, min(tokens, 4096))
        each = found(model, replace(POLICIES[name], activations=plan), work, hardware)
        took = f"{each.nbytes / MIB:,.0f} MiB | {1e3 * each.seconds:,.1f} ms | {each.unhindered / each.seconds:.1%}"
        lines.append(f"| {count} x {tokens:,} | {kept} | {name} | {took} |")
    return lines


# Plans ---------------------------------------------------------------------------------------------------------------

PLANNED_TOKENS, MEMORIES = 16_384, (8, 12, 16, 24)


def planned_shapes() -> dict[str, ModelSpec]:
    """The mixture has Mixtral's sizes; what its layers keep of a token is taken to be a dense layer's."""
    mixture = llama_shape("8x7B", 32, 4096, vocabulary=32_000)
    units = [replace(unit, params=tuple(map(_by_expert, unit.params))) for unit in mixture.units]
    return {
        "8B": llama_shape("8B", 32, 4096),
        "70B": llama_shape("70B", 80, 8192),
        "8x7B experts": replace(mixture, units=tuple(units)),
    }


def _by_expert(param: ParamSpec) -> ParamSpec:
    """Eight experts in place of a feed-forward, of which a token uses two."""
    return replace(param, shape=(8, *param.shape), active=0.25) if ".mlp." in param.name else param


def plans() -> dict[str, list[str]]:
    least = ["| model | least device memory, without | with a read-ahead |", "|---|---|---|"]
    quickest = ["| model | device | without | with | gain | micro-batch | chosen |", "|---|---|---|---|---|---|---|"]
    for name, model in planned_shapes().items():
        hardware = replace(machine("rtx-4090"), host_nbytes=ENOUGH_HOST)
        question = Question(model, hardware, PLANNED_TOKENS, 4096)
        tiny = replace(question, limits=Limits(device_nbytes=1))
        allowed = [Search(replace(tiny, overrides=overrides)) for overrides in ({"read_ahead_nbytes": 0}, {})]
        taken = [each.leanest_plan.nbytes["device"] / GB for each in allowed]
        least.append(f"| {name} | {taken[0]:.2f} GB | {taken[1]:.2f} GB |")
        for memory in MEMORIES:
            asked = replace(question, hardware=replace(hardware, device_nbytes=round(memory * GB)))
            found = [_planned(replace(asked, overrides=overrides)) for overrides in ({"read_ahead_nbytes": 0}, {})]
            if any(found):
                quickest.append(f"| {name} | {memory} GB | {_row(*found)} |")
    return {"least": least, "quickest": quickest}


def _planned(question: Question) -> Plan | None:
    try:
        return find_plan(question)
    except DoesNotFit:
        return None


def _row(without: Plan | None, chosen: Plan | None) -> str:
    speeds = (f"{each.tokens_per_second:,.1f} tokens/s" if each else "does not fit" for each in (without, chosen))
    sizes = " to ".join(dict.fromkeys(str(each.micro_batch) for each in (without, chosen) if each))
    gain, ahead = "", chosen.policy.read_ahead_nbytes if chosen else 0
    if without and chosen and ahead:
        gain = f"{without.seconds / chosen.seconds - 1:.1%}"
    return f"{' | '.join(speeds)} | {gain} | {sizes} | {f'{ahead / MIB:,.0f} MiB ahead' if ahead else 'slots'}"


def main() -> int:
    parser = argparse.ArgumentParser(description="one slot and a read-ahead against whole slots, by replay")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--plans", action="store_true", help="what the planner makes of it")
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks"), help="folder of planning.md")
    arguments = parser.parse_args()
    if arguments.plans:
        tables, page = plans(), arguments.docs / "planning.md"
        if page.exists():
            page.write_text(filled(page.read_text(), tables, "bench.read_ahead"))
        print("\n".join(chain.from_iterable(tables.values())))
        return 0
    print("\n".join(rows(arguments.layers, arguments.tokens, arguments.micro_batches)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
