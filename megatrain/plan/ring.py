"""Whether layers share one slot behind a read-ahead (`schedule.fetches`), where device memory is short.

The ring frees about a layer's weights, and costs little where compute hides its copies. A search with more memory says,
by prices that it knows, whether what would be freed buys anything: larger micro-batches, more that layers keep, weights
that stay. Only then another search is made, with the ring, and its plan is taken if its whole replay is quicker. Where
nothing fits otherwise, the ring with the least read-ahead may; so whoever asks for the least is given it too (`ways`).
What the ring takes is what the schedule's builder says. Left out: the search (`search`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from megatrain.plan.estimates import estimate
from megatrain.plan.knobs import LEAN_RING, RING_SHARDS, ROOMY_RING, WORTH_A_RING
from megatrain.plan.question import Estimate, Plan, Question

DECIDED = ("weight_slots", "gates", "read_ahead_nbytes", "shard_nbytes")
"""Fields of a policy that the ring is made of."""


def ways(question: Question) -> list[Question]:
    """The question, and the same with the ring that takes least, if it is open to one."""
    return [question, *rings(question)[1:]]


def rings(question: Question) -> list[Question]:
    """The same question by a ring, with room to read ahead and then with as little as may be; none where memory is
    shared, where layers are compiled, and where the user has said otherwise."""
    pinned = question.pinned
    told = {name for name in DECIDED if name in pinned} - ({"gates"} if pinned.get("gates") == "shard" else set())
    if told or pinned.get("compile") or question.hardware.shares_memory:
        return []
    size = 2 if question.precision == "bf16" else 4
    layer = size * max(question.model.units[index].numel for index in question.model.layers)
    usual = {"weight_slots": 1, "gates": "shard", "shard_nbytes": max(1, layer // RING_SHARDS)}
    aheads = (max(1, layer // part) for part in (ROOMY_RING, LEAN_RING))
    return [replace(question, pinned={**pinned, **usual, "read_ahead_nbytes": ahead}) for ahead in aheads]


def with_ring(
    plan: Plan,
    promised: Callable[[Mapping[str, int]], Estimate | None],
    search: Callable[[Question], Plan | None],
) -> Plan:
    """The plan, or one by a ring where that makes its step shorter by `WORTH_A_RING`.

    promised: what the quickest plan within budgets (tier -> bytes) takes, without a ring.
    """
    question, budgets = plan.question, plan.question.budgets()
    for ring in rings(question)[:1]:
        now, more = promised(budgets), promised({**budgets, "device": budgets["device"] + _freed(plan, ring)})
        if now and more and more.seconds < WORTH_A_RING * now.seconds:
            other = search(ring)
            if other and other.seconds < WORTH_A_RING * plan.seconds:
                return replace(other, question=question)
    return plan


def _freed(plan: Plan, ring: Question) -> int:
    """Bytes of device memory that the plan would take less by a ring than with two slots; 0 where it takes more."""
    fields = {name: ring.pinned[name] for name in DECIDED}
    whole = replace(plan.policy, gates="unit", weight_slots=max(2, plan.policy.weight_slots))
    taken = [
        estimate(plan.question, replace(each, homes=()), plan.micro_batch).nbytes["device"]
        for each in (whole, replace(whole, **fields))
    ]
    return max(0, taken[0] - taken[1])
