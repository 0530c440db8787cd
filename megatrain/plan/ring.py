"""Whether all units share one slot behind a read-ahead (`schedule.fetches`), where device memory is short.

The ring frees about a layer's weights, and costs little where compute hides its copies. So it is what a plan for more
memory needs to fit this one: the search is asked, by prices that it knows, whether what would be freed buys anything
(larger micro-batches, more that layers keep, weights that stay), and only then in earnest. What it finds is replayed by
a ring, and taken if it fits and is quicker, or if nothing fits otherwise. What a ring takes is what the schedule's
builder says. Left out: the search (`search`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

from megatrain.plan.estimates import estimate, examine
from megatrain.plan.knobs import FITS, LEAN_RING, RING_SHARDS, ROOMY_RING, WORTH_A_RING
from megatrain.plan.question import Candidate, Estimate, Plan, Question
from megatrain.spec import Policy

Budgets = Mapping[str, int]
"""Tier -> bytes."""

Answer = Callable[[Budgets], Plan | None]
"""The quickest plan within budgets, without a ring."""

DECIDED = ("weight_slots", "gates", "read_ahead_nbytes", "shard_nbytes")
"""Fields of a policy that the ring is made of."""


def rings(question: Question) -> list[dict[str, Any]]:
    """Fields of a policy with a ring: with room to read ahead, and with as little as may be. None where memory is
    shared, where layers are compiled, and where the user has said otherwise."""
    pinned = question.pinned
    told = {name for name in DECIDED if name in pinned} - ({"gates"} if pinned.get("gates") == "shard" else set())
    if told or pinned.get("kernels", "stock") != "stock" or question.hardware.shares_memory:
        return []
    size = 2 if question.precision == "bf16" else 4
    layer = size * max(question.model.units[index].numel for index in question.model.layers)
    usual = {"weight_slots": 1, "gates": "shard", "shard_nbytes": max(1, layer // RING_SHARDS)}
    return [{**usual, "read_ahead_nbytes": max(1, layer // part)} for part in (ROOMY_RING, LEAN_RING)]


def leaner(question: Question, policy: Policy) -> Policy:
    """The policy by the ring that takes least, or as it is where there may be none."""
    return replace(policy, **rings(question)[-1]) if rings(question) else policy


def with_ring(plan: Plan, promised: Callable[[Budgets], Estimate | None], answer: Answer) -> Plan:
    """The plan, or one by a ring where that makes its step shorter by `WORTH_A_RING`.

    promised: what the quickest plan within budgets should take, without a ring.
    """
    question, there = plan.question, plan.question.budgets()
    if not rings(question):
        return plan
    room = {**there, "device": there["device"] + _freed(question, plan.policy, plan.micro_batch)}
    now, then = promised(there), promised(room)
    if now is None or then is None or then.seconds >= WORTH_A_RING * now.seconds:
        return plan
    return _by_ring(question, room, answer, WORTH_A_RING * plan.seconds) or plan


def only_by_ring(question: Question, leanest: Candidate, freed: int, answer: Answer) -> Plan | None:
    """A plan by a ring where nothing fits without. freed: bytes of device memory that the leanest takes less by it."""
    there = question.budgets()
    for more in (max(freed, _freed(question, *leanest)), freed):
        if plan := _by_ring(question, {**there, "device": there["device"] + more}, answer, inf):
            return plan
    return None


def _by_ring(question: Question, room: Budgets, answer: Answer, bound: float) -> Plan | None:
    """What is found where there is so much room, by a ring that fits the question's budgets, in less than `bound`."""
    there = question.budgets()
    for _ in range(FITS):
        roomier = answer(room)
        if roomier is None or roomier.seconds >= bound:
            return None
        tried = (replace(roomier.policy, **fields) for fields in rings(question))
        found = [examine(question, each, roomier.micro_batch) for each in tried]
        if fitting := [each for each in found if each.taken.fits(there)]:
            best = min(fitting, key=lambda each: each.seconds)
            return best if best.seconds < bound else None
        least = min(each.nbytes["device"] for each in found)
        room = {**there, "device": roomier.nbytes["device"] - max(1, least - there["device"])}
    return None


def _freed(question: Question, policy: Policy, rows: int) -> int:
    """Bytes of device memory that the policy would take less by a ring than with two slots; 0 where it takes more."""
    whole = replace(policy, homes=(), gates="unit", weight_slots=max(2, policy.weight_slots))
    policies = whole, replace(whole, **rings(question)[0])
    slots, ring = (estimate(question, each, rows).nbytes["device"] for each in policies)
    return max(0, slots - ring)
