"""Improves the plan that the search found: tries further options and judges each by replaying the step.

One slot for all units with a read-ahead, compute that waits for shards, streamed updates, pinned staging buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from megatrain.errors import DoesNotFit
from megatrain.plan.cost import duplex_bandwidths, host_dram_bandwidth, optimizer_bandwidth
from megatrain.plan.estimates import estimate, examine, seconds_on
from megatrain.plan.question import Candidate, Choice, Estimate, Plan, Question
from megatrain.plan.search_space import (
    FITS,
    LEAN_RING,
    LEAST_SHARD,
    PHASED_SHARDS,
    RING_SHARDS,
    ROOMY_RING,
    SHARD_TRIES,
    STREAMED,
    WORTH_A_REPLAY,
    WORTH_A_RING,
    WORTH_SHARDS,
    WORTH_STREAMING,
)
from megatrain.schedule import build_step
from megatrain.schedule.ops import STREAMS
from megatrain.schedule.passes.pinned_staging import pinned_nbytes
from megatrain.schedule.passes.state_buffers import MOMENTS_NBYTES
from megatrain.spec import IN_HOST, ModelSpec, Numerics, Policy, Work
from megatrain.spec.layout import layout_of

# One slot with a read-ahead -------------------------------------------------------------------------------------------
#
# Whether all units share one slot behind a read-ahead (`schedule.passes.prefetch`), where device memory is short.
#
# The ring frees about a layer's weights, and costs little where compute hides its copies. So it is what a plan for more
# memory needs to fit this one: the search is asked, by prices that it knows, whether what would be freed buys anything
# (larger micro-batches, more that layers keep, weights that stay), and only then in earnest. What it finds is replayed
# by a ring, and taken if it fits and is quicker, or if nothing fits otherwise. What a ring takes is what the schedule's
# builder says. Left out: the search (`search`).


Budgets = Mapping[str, int]
"""Tier -> bytes."""

Answer = Callable[[Budgets], Plan | None]
"""The quickest plan within budgets, without a ring."""

DECIDED = ("weight_slots", "wait_for", "read_ahead_nbytes", "shard_nbytes")
"""Fields of a policy that the ring is made of."""


def rings(question: Question) -> list[dict[str, Any]]:
    """Fields of a policy with a ring: with room to read ahead, and with as little as may be. None where memory is
    shared, where layers are compiled, and where the user has said otherwise."""
    overrides = question.overrides
    told = {name for name in DECIDED if name in overrides} - (
        {"wait_for"} if overrides.get("wait_for") == "shard" else set()
    )
    if told or overrides.get("kernels", "stock") != "stock" or question.hardware.shares_memory:
        return []
    size = 2 if question.precision == "bf16" else 4
    layer = size * max(question.model.units[index].numel for index in question.model.layers)
    usual = {"weight_slots": 1, "wait_for": "shard", "shard_nbytes": max(1, layer // RING_SHARDS)}
    return [{**usual, "read_ahead_nbytes": max(1, layer // part)} for part in (ROOMY_RING, LEAN_RING)]


def leaner(question: Question, choice: Choice) -> Choice:
    """The policy by the ring that takes least, or as it is where there may be none."""
    return choice.change(**rings(question)[-1]) if rings(question) else choice


def with_ring(plan: Plan, promised: Callable[[Budgets], Estimate | None], answer: Answer) -> Plan:
    """The plan, or one by a ring where that makes its step shorter by `WORTH_A_RING`.

    promised: what the quickest plan within budgets should take, without a ring.
    """
    question, there = plan.question, plan.question.budgets()
    if not rings(question):
        return plan
    room = {**there, "device": there["device"] + _freed(question, plan.choice, plan.micro_batch)}
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
        tried = (roomier.choice.change(**fields) for fields in rings(question))
        found = [examine(question, each, roomier.micro_batch) for each in tried]
        if fitting := [each for each in found if each.taken.fits(there)]:
            best = min(fitting, key=lambda each: each.seconds)
            return best if best.seconds < bound else None
        least = min(each.nbytes["device"] for each in found)
        room = {**there, "device": roomier.nbytes["device"] - max(1, least - there["device"])}
    return None


def _freed(question: Question, choice: Choice, micro_batch: int) -> int:
    """Bytes of device memory that the policy would take less by a ring than with two slots; 0 where it takes more."""
    whole = choice.change(placements=(), wait_for="unit", weight_slots=max(2, choice.policy.weight_slots))
    choices = whole, whole.change(**rings(question)[0])
    slots, ring = (estimate(question, each, micro_batch).nbytes["device"] for each in choices)
    return max(0, slots - ring)


# Waiting for shards ---------------------------------------------------------------------------------------------------
#
# Whether compute waits for shards in place of units: decided behind everything else, by replay.
#
# It changes no bit. A step begins with its first shard, a layer that has one slot computes while it arrives, and
# gradients leave while their layer is at work; it costs turns between threads (`cost`) and ops. What is chosen
# otherwise hardly depends on it, so the best plan that waits for units is tried so: in smaller shards, and in fewer
# slots. Shallow replays say which of these promise most, and these are replayed whole. Where no stream but one waits
# there is nothing to gain, and nothing is tried.


def waiting_for_shards(plan: Plan) -> Plan:
    """The plan, or the same waiting for shards where that makes its step shorter by `WORTH_SHARDS`, and fits."""
    question, budgets = plan.question, plan.question.budgets()
    open_to = (
        "wait_for" not in question.overrides and plan.numerics.kernels == "stock" and not plan.policy.shares_memory
    )
    busiest = max(plan.timeline.busy_seconds(stream) for stream in STREAMS)
    if not open_to or plan.policy.wait_for != "unit" or busiest > WORTH_SHARDS * plan.seconds:
        return plan
    worth = _promising(plan)
    plans = [examine(question, each, plan.micro_batch) for each in worth[:SHARD_TRIES]]
    best = min((each for each in plans if each.taken.fits(budgets)), key=lambda each: each.seconds, default=plan)
    return best if best.seconds < WORTH_SHARDS * plan.seconds else plan


def _promising(plan: Plan) -> list[Choice]:
    """The plan's policy waiting for shards, in as many slots or in one, in smaller shards: what shallow replays find
    quicker, the quickest first.

    Where shards of a middling size gain nothing, no others are tried.
    """
    policy, overrides = plan.policy, plan.question.overrides
    largest = max(unit.numel for unit in plan.question.model.units) * plan.numerics.weight_nbytes
    slots = [policy.weight_slots, *([1] if "weight_slots" not in overrides else [])]
    pieces = [max(LEAST_SHARD, largest // count) for count in PHASED_SHARDS] if "shard_nbytes" not in overrides else []
    shards = [nbytes for nbytes in pieces if nbytes < policy.shard_nbytes] or [policy.shard_nbytes]
    found: dict[Choice, float] = {}

    def promises(shard: int) -> bool:
        for count in dict.fromkeys(slots):
            each = plan.choice.change(wait_for="shard", shard_nbytes=shard, weight_slots=count)
            found[each] = estimate(plan.question, each, plan.micro_batch).seconds
        return min(found.values()) < least

    least = WORTH_A_REPLAY * estimate(plan.question, plan.choice, plan.micro_batch).seconds
    if promises(shards.pop(0)):
        for shard in dict.fromkeys((policy.shard_nbytes, *shards)):
            promises(shard)
    worth = [each for each, seconds in found.items() if seconds < least]
    return sorted(
        worth, key=lambda each: (float(f"{found[each]:.3g}"), -each.policy.shard_nbytes, -each.policy.weight_slots)
    )


# Streamed updates -----------------------------------------------------------------------------------------------------
#
# Whether some layers are updated on the device while their state stays in host memory: decided by replay.
#
# It gains where compute waits for the optimizer, as in small steps. What bus and host are worth beside each other
# depends on how they share host memory; so shares near that by which both would be done at one time are replayed.


def streaming_updates(plan: Plan) -> Plan:
    """The plan, or the same with a share of its updates streamed where that makes its step shorter by
    `WORTH_STREAMING`, fits, and page-locks no more than the machine allows."""
    question, policy = plan.question, plan.policy
    if "streamed_updates" in question.overrides or policy.shares_memory or policy.transfer != "pinned":
        return plan
    if plan.timeline.stall_seconds() <= (1 - WORTH_STREAMING) * plan.seconds or not _waits_for_updates(plan):
        return plan
    even, best = _even_share(plan), plan
    shares = [min(1.0, round(times * even, 2)) for times in STREAMED if even > 0]
    rooms = [*_with_room(plan)]
    for share in dict.fromkeys((*shares, 1.0)):
        while rooms:  # what is too little for one share is for the next, which has the same slots
            each = examine(question, rooms[0].change(streamed_updates=share), plan.micro_batch)
            if each.taken.fits(question.budgets()) and not locks_too_much(each):
                best = each if each.seconds < best.seconds else best
                break
            rooms.pop(0)
    return best if best.seconds < WORTH_STREAMING * plan.seconds else plan


def _waits_for_updates(plan: Plan) -> bool:
    """Whether its step would be shorter by `WORTH_STREAMING` if updates that can be streamed took the host no time."""
    if not replace(plan.policy, streamed_updates=1.0).updates_streamed(plan.question.model):
        return False
    hardware = plan.question.hardware
    norm, dram = hardware.norm_bandwidth or hardware.host_bandwidth, host_dram_bandwidth(hardware)
    instant = replace(
        hardware, host_bandwidth=inf, optimizer_bandwidth=(), norm_bandwidth=norm, host_dram_bandwidth=dram
    )
    return seconds_on(plan, replace(plan.question, hardware=instant)) < WORTH_STREAMING * plan.seconds


def _with_room(plan: Plan) -> Iterator[Choice]:
    """The plan's choice, and what makes room on the device for the slots of updates: a weight slot less, then a unit
    less of which only the weights live there, or one of which all state does."""
    choice, overrides = plan.choice, plan.question.overrides
    yield choice
    if choice.policy.weight_slots > 2 and "weight_slots" not in overrides:
        yield choice.change(weight_slots=choice.policy.weight_slots - 1)
    placements = choice.policy.placements if "placements" not in overrides else ()
    there = [unit for unit in plan.question.model.layers if placements and placements[unit].weights == "device"]
    kinds = {placements[unit].on_device: unit for unit in there}
    for _, unit in sorted(kinds.items()):
        yield choice.change(placements=(*placements[:unit], IN_HOST, *placements[unit + 1 :]))


def _even_share(plan: Plan) -> float:
    """Of the updates, with which those on the host take as long as the bus for the others and for all weights."""
    weight, low = plan.numerics.weight_nbytes, 0 if plan.numerics.precision == "fp32" else 2
    hardware, ranks = plan.question.hardware, plan.question.model.ranks
    fetched = weight * (ranks if plan.policy.delivery == "shared" else 1)  # for each element that this rank updates
    bus = duplex_bandwidths(hardware)[0]
    updated = (plan.numerics.grad_nbytes + 2 * (weight + low + MOMENTS_NBYTES)) / optimizer_bandwidth(
        hardware, plan.policy.host_threads
    )
    return max(0.0, (updated - fetched / bus) / (updated + (weight + low + MOMENTS_NBYTES) / bus))


# Pinned staging -------------------------------------------------------------------------------------------------------
#
# How weights and gradients cross the bus where not all of them may be page-locked.
#
# What a system or a driver lets a process lock is measured by the probe, or known to the device. Within it all is
# pinned, which is quickest; else staging buffers of a shard each are weighed against memory that is not pinned at all,
# at the prices of this machine. Left out: how a policy is chosen otherwise (`search`, `defaults`).


LARGEST_SHARD, MOST_SHARDS = 64 << 20, 32
"""Bytes of a staging buffer, where the limit allows as much, and the pieces of the largest unit, with which it is
smaller."""

SHARE = 0.5
"""Of what may be pinned that staging buffers are to take."""


def within_lock_limit(question: Question, search: Callable[[Question], Plan]) -> Plan:
    """What `search` finds, page-locking no more than the machine allows. Raises what it raises."""
    plan, limit = search(question), question.hardware.pinnable_nbytes
    if limit is None or "transfer" in question.overrides or not locks_too_much(plan):
        return plan
    others = [
        each for each in _others(question, plan.policy.pinned_staging_slots, limit, search) if not locks_too_much(each)
    ]
    return min(others, key=lambda each: each.seconds)


def _others(question: Question, slots: int, limit: int, search: Callable[[Question], Plan]) -> Iterator[Plan]:
    """Plans with staging buffers, if that fits, and with nothing pinned."""
    shard = {
        "shard_nbytes": _shard_nbytes(question.model, question.overrides.get("pinned_staging_slots", slots), limit)
    }
    with suppress(DoesNotFit):  # staging buffers take host memory that may not be there
        yield search(replace(question, overrides={**shard, **question.overrides, "transfer": "staged"}))
    yield search(replace(question, overrides={**question.overrides, "transfer": "pageable"}))


def fit_lock_limit(model: ModelSpec, numerics: Numerics, policy: Policy, limit: int) -> Policy:
    """The policy, if it pins `limit` bytes or less; else with staging buffers, if that does; else nothing pinned."""
    if policy.shares_memory:
        return policy
    shard = min(policy.shard_nbytes, _shard_nbytes(model, policy.pinned_staging_slots, limit))
    at_home = replace(policy, streamed_updates=0.0)
    for each in (policy, at_home, replace(at_home, transfer="staged", shard_nbytes=shard)):
        schedule = build_step(model, numerics, each, Work.of_two_rounds(each.micro_batches_per_round))
        if pinned_nbytes(schedule.buffers.values(), each.transfer) <= limit:
            return each
    return replace(at_home, transfer="pageable")


def _shard_nbytes(model: ModelSpec, slots: int, limit: int) -> int:
    largest = max(layout_of(unit).size for unit in model.units)
    least = -(-4 * largest // MOST_SHARDS)
    return max(1, least, min(LARGEST_SHARD, int(SHARE * limit) // (2 * slots)))


def locks_too_much(plan: Plan) -> bool:
    """Whether the plan page-locks more than its machine allows."""
    hardware = plan.question.hardware
    if hardware.shares_memory or hardware.pinnable_nbytes is None:
        return False
    taken = pinned_nbytes(plan.timeline.schedule.buffers.values(), plan.policy.transfer)
    return taken > hardware.pinnable_nbytes
