"""Whether compute waits for shards in place of units: decided behind everything else, by replay.

Gates at shards change no bit. They let a step begin with its first shard, let a layer that has one slot compute while
it arrives, and let gradients leave while their layer is at work; they cost turns between threads (`cost`) and ops. What
is chosen otherwise hardly depends on them, so the best plan without is tried with: in smaller shards, and in fewer
slots. Shallow replays say which of these promise most, and these are replayed whole. Where no stream but one waits
there is nothing to gain, and nothing is tried. Left out: gates by rows, which change rounding and are the user's.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.plan.estimates import estimate, examine
from megatrain.plan.knobs import GATED_SHARDS, GATED_TRIES, LEAST_SHARD, WORTH_A_REPLAY, WORTH_GATES
from megatrain.plan.question import Plan
from megatrain.schedule.ops import STREAMS
from megatrain.spec import Policy


def with_gates(plan: Plan) -> Plan:
    """The plan, or the same with gates where these make its step shorter by `WORTH_GATES`, and fit."""
    question, budgets = plan.question, plan.question.budgets()
    open_to = "gates" not in question.pinned and plan.policy.kernels == "stock" and not plan.policy.shares_memory
    busiest = max(plan.timeline.busy_seconds(stream) for stream in STREAMS)
    if not open_to or plan.policy.gates != "unit" or busiest > WORTH_GATES * plan.seconds:
        return plan
    worth = _promising(plan)
    plans = [examine(question, each, plan.micro_batch) for each in worth[:GATED_TRIES]]
    best = min((each for each in plans if each.taken.fits(budgets)), key=lambda each: each.seconds, default=plan)
    return best if best.seconds < WORTH_GATES * plan.seconds else plan


def _promising(plan: Plan) -> list[Policy]:
    """The plan's policy with gates, in as many slots or in one, in smaller shards: what shallow replays find quicker,
    the quickest first.

    Where shards of a middling size gain nothing, no others are tried.
    """
    policy, pinned = plan.policy, plan.question.pinned
    largest = max(unit.numel for unit in plan.question.model.units) * policy.weight_nbytes
    slots = [policy.weight_slots, *([1] if "weight_slots" not in pinned else [])]
    pieces = [max(LEAST_SHARD, largest // count) for count in GATED_SHARDS] if "shard_nbytes" not in pinned else []
    shards = [nbytes for nbytes in pieces if nbytes < policy.shard_nbytes] or [policy.shard_nbytes]
    found: dict[Policy, float] = {}

    def promises(shard: int) -> bool:
        for count in dict.fromkeys(slots):
            each = replace(policy, gates="shard", shard_nbytes=shard, weight_slots=count)
            found[each] = estimate(plan.question, each, plan.micro_batch).seconds
        return min(found.values()) < least

    least = WORTH_A_REPLAY * estimate(plan.question, policy, plan.micro_batch).seconds
    if promises(shards.pop(0)):
        for shard in dict.fromkeys((policy.shard_nbytes, *shards)):
            promises(shard)
    worth = [each for each, seconds in found.items() if seconds < least]
    return sorted(worth, key=lambda each: (float(f"{found[each]:.3g}"), -each.shard_nbytes, -each.weight_slots))
