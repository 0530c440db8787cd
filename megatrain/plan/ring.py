"""Whether layers share one slot behind a read-ahead (`schedule.fetches`), where device memory is short.

The ring frees about a layer's weights, and costs little where compute hides its copies. A search with more memory says,
by prices that it knows, whether what would be freed buys anything: larger micro-batches, more that layers keep, weights
that stay. Only then is it searched in earnest, and what is found is taken if it fits by a ring, and its whole replay is
quicker. Where nothing fits otherwise, the ring with the least read-ahead may; so whoever asks for the least is given it
too (`ways`). What a ring takes is what the schedule's builder says. Left out: the search (`search`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatrain.plan.estimates import estimate, examine
from megatrain.plan.knobs import FITS, LEAN_RING, RING_SHARDS, ROOMY_RING, WORTH_A_RING
from megatrain.plan.question import Estimate, Plan, Question

Budgets = Mapping[str, int]
"""Tier -> bytes."""

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
    plan: Plan, promised: Callable[[Budgets], Estimate | None], answer: Callable[[Budgets], Plan | None]
) -> Plan:
    """The plan, or one by a ring where that makes its step shorter by `WORTH_A_RING`.

    promised: what the quickest plan within budgets should take, without a ring; and answer: that plan.
    """
    question, there = plan.question, plan.question.budgets()
    fields = [{name: ring.pinned[name] for name in DECIDED} for ring in rings(question)]
    if not fields:
        return plan
    room = there["device"] + _freed(plan, fields[0])
    now, then = promised(there), promised({**there, "device": room})
    gains = now and then and then.seconds < WORTH_A_RING * now.seconds
    for _ in range(FITS if gains else 0):
        roomier = answer({**there, "device": room})
        if roomier is None or roomier.seconds >= WORTH_A_RING * plan.seconds:
            break
        found = [examine(question, replace(roomier.policy, **each), roomier.micro_batch) for each in fields]
        fitting = [each for each in found if each.taken.fits(there)]
        if fitting:
            best = min(fitting, key=lambda each: each.seconds)
            return best if best.seconds < WORTH_A_RING * plan.seconds else plan
        room = roomier.nbytes["device"] - min(each.nbytes["device"] for each in found) + there["device"]
    return plan


def _freed(plan: Plan, fields: Mapping[str, Any]) -> int:
    """Bytes of device memory that the plan would take less by a ring than with two slots; 0 where it takes more."""
    whole = replace(plan.policy, homes=(), gates="unit", weight_slots=max(2, plan.policy.weight_slots))
    policies = whole, replace(whole, **fields)
    slots, ring = (estimate(plan.question, each, plan.micro_batch).nbytes["device"] for each in policies)
    return max(0, slots - ring)
