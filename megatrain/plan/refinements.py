"""Improves the plan that the search found: tries further options and judges each by replaying the step.

The options are one slot for all units with a read-ahead, compute that waits for shards, streamed updates, and pinned
staging buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from megatrain.errors import DoesNotFit
from megatrain.plan.cost import duplex_bandwidths, host_dram_bandwidth, optimizer_bandwidth
from megatrain.plan.estimates import estimate, examine_rounds, seconds_on
from megatrain.plan.question import Candidate, Choice, Estimate, Plan, Question
from megatrain.plan.search_space import (
    FEWER_WRITES,
    FIT_ATTEMPTS,
    MIN_SHARD_NBYTES,
    READ_AHEAD_DIVISORS,
    READ_AHEAD_SHARDS,
    SHARD_COUNTS,
    SHARD_REPLAYS,
    SLOWER_FOR_FEWER_WRITES,
    STREAMED_FACTORS,
    WORTH_A_READ_AHEAD,
    WORTH_A_REPLAY,
    WORTH_SHARDS,
    WORTH_STREAMING,
)
from megatrain.schedule import build_step
from megatrain.schedule.ops import STREAMS
from megatrain.schedule.passes.pinned_staging import pinned_nbytes
from megatrain.schedule.passes.state_buffers import MOMENTS_NBYTES
from megatrain.spec import IN_HOST, ModelSpec, Numerics, Policy, Work
from megatrain.spec.layout import layout_of

# Fewer writes ---------------------------------------------------------------------------------------------------------


def preferred(plans: list[Plan]) -> Plan | None:
    """The fastest plan, or one that is nearly as fast and writes much less to the disk, to save its endurance."""
    fastest = min(plans, key=lambda plan: float(f"{plan.seconds:.4g}"), default=None)
    if fastest is None:
        return None
    most = SLOWER_FOR_FEWER_WRITES * fastest.seconds, FEWER_WRITES * fastest.written_nbytes
    gentle = [plan for plan in plans if plan.seconds <= most[0] and plan.written_nbytes < most[1]]
    return min(gentle, key=lambda plan: plan.written_nbytes, default=fastest)


# One slot with a read-ahead -------------------------------------------------------------------------------------------
#
# Where device memory is short: one slot for all units with a read-ahead (`schedule.passes.prefetch`), if that is worth
# it.
#
# A read-ahead frees about the weights of one layer, and costs little where compute hides its copies. So it can make a
# plan for a larger device fit this one. First the search estimates whether the freed memory would gain anything: larger
# micro-batches, more saved activations, weights that stay on the device. If so, it searches for a plan within the
# larger budget. That plan is replayed with a read-ahead, and taken if it fits and is faster, or if nothing else fits.


Budgets = Mapping[str, int]
"""Tier -> bytes."""

FindPlan = Callable[[Budgets], Plan | None]
"""Finds the fastest plan within budgets that has no read-ahead."""

READ_AHEAD_FIELDS = ("weight_slots", "wait_for", "read_ahead_nbytes", "shard_nbytes")
"""Fields of a policy that a read-ahead determines."""


def read_aheads(question: Question) -> list[dict[str, Any]]:
    """The fields of a policy with a read-ahead, first a fast one, then a lean one.

    Empty if memory is shared, if layers are compiled, or if an override contradicts it.
    """
    overrides = question.overrides
    contradicting = {name for name in READ_AHEAD_FIELDS if name in overrides} - (
        {"wait_for"} if overrides.get("wait_for") == "shard" else set()
    )
    if contradicting or overrides.get("kernels", "stock") != "stock" or question.hardware.shares_memory:
        return []
    size = 2 if question.precision == "bf16" else 4
    layer = size * max(question.model.units[index].numel for index in question.model.layers)
    usual = {"weight_slots": 1, "wait_for": "shard", "shard_nbytes": max(1, layer // READ_AHEAD_SHARDS)}
    return [{**usual, "read_ahead_nbytes": max(1, layer // divisor)} for divisor in READ_AHEAD_DIVISORS]


def with_leanest_read_ahead(question: Question, choice: Choice) -> Choice:
    """The choice with the leanest read-ahead, or unchanged if there may be none."""
    return choice.change(**read_aheads(question)[-1]) if read_aheads(question) else choice


def with_read_ahead(plan: Plan, best_estimate: Callable[[Budgets], Estimate | None], find: FindPlan) -> Plan:
    """The plan, or one with a read-ahead if its step is shorter by `WORTH_A_READ_AHEAD`.

    best_estimate: the estimate of the fastest plan within budgets, without a read-ahead.
    """
    question, budgets = plan.question, plan.question.budgets()
    if not read_aheads(question):
        return plan
    larger = {**budgets, "device": budgets["device"] + _freed(question, plan.choice, plan.micro_batch)}
    now, then = best_estimate(budgets), best_estimate(larger)
    if now is None or then is None or then.seconds >= WORTH_A_READ_AHEAD * now.seconds:
        return plan
    return _find_with_read_ahead(question, larger, find, WORTH_A_READ_AHEAD * plan.seconds) or plan


def only_with_read_ahead(question: Question, leanest: Candidate, freed: int, find: FindPlan) -> Plan | None:
    """A plan with a read-ahead, where nothing fits without one.

    freed: bytes of device memory that a read-ahead saves for the leanest candidate.
    """
    budgets = question.budgets()
    for more in (max(freed, _freed(question, *leanest)), freed):
        if plan := _find_with_read_ahead(question, {**budgets, "device": budgets["device"] + more}, find, inf):
            return plan
    return None


def _find_with_read_ahead(question: Question, larger: Budgets, find: FindPlan, bound: float) -> Plan | None:
    """The best plan for the `larger` budgets, changed to have a read-ahead, if it fits those of the question and takes
    less than `bound` seconds. If it does not fit, the larger budget is lowered by what is missing."""
    budgets = question.budgets()
    for _ in range(FIT_ATTEMPTS):
        found = find(larger)
        if found is None or found.seconds >= bound:
            return None
        choices = (found.choice.change(**fields) for fields in read_aheads(question))
        plans = [examine_rounds(question, each, found.micro_batch) for each in choices]
        if fitting := [each for each in plans if each.taken.fits(budgets)]:
            best = min(fitting, key=lambda each: each.seconds)
            return best if best.seconds < bound else None
        least = min(each.nbytes["device"] for each in plans)
        larger = {**budgets, "device": found.nbytes["device"] - max(1, least - budgets["device"])}
    return None


def _freed(question: Question, choice: Choice, micro_batch: int) -> int:
    """Bytes of device memory that a fast read-ahead saves compared to two slots, or 0 if it takes more."""
    slots = choice.change(placements=(), wait_for="unit", weight_slots=max(2, choice.policy.weight_slots))
    choices = slots, slots.change(**read_aheads(question)[0])
    before, after = (estimate(question, each, micro_batch).nbytes["device"] for each in choices)
    return max(0, before - after)


# Waiting for shards ---------------------------------------------------------------------------------------------------
#
# Whether compute waits for shards rather than units. Decided last, by replay.
#
# Results stay the same to the last bit. The step starts with its first shard, a layer with a single slot computes while
# its weights arrive, and gradients leave while their layer computes. This costs more ops and switches between threads
# (`cost`). The rest of the plan hardly depends on it, so only the best plan is changed: smaller shards, fewer slots.
# The most promising by estimates are replayed whole. Where one stream is busy throughout, there is nothing to gain.


def waiting_for_shards(plan: Plan) -> Plan:
    """The plan, or the same waiting for shards if that fits and its step is shorter by `WORTH_SHARDS`."""
    question, budgets = plan.question, plan.question.budgets()
    is_free = (
        "wait_for" not in question.overrides and plan.numerics.kernels == "stock" and not plan.policy.shares_memory
    )
    busiest = max(plan.busy_seconds(stream) for stream in STREAMS)
    if not is_free or plan.policy.wait_for != "unit" or busiest > WORTH_SHARDS * plan.seconds:
        return plan
    choices = _promising_shards(plan)
    plans = [examine_rounds(question, each, plan.micro_batch) for each in choices[:SHARD_REPLAYS]]
    best = min((each for each in plans if each.taken.fits(budgets)), key=lambda each: each.seconds, default=plan)
    return best if best.seconds < WORTH_SHARDS * plan.seconds else plan


def _promising_shards(plan: Plan) -> list[Choice]:
    """The plan's choice waiting for shards, with as many slots or one, and smaller shards: those with faster estimates,
    the fastest first. If the first shard size does not gain, no others are tried."""
    policy, overrides = plan.policy, plan.question.overrides
    largest = max(unit.numel for unit in plan.question.model.units) * plan.numerics.weight_nbytes
    slots = [policy.weight_slots, *([1] if "weight_slots" not in overrides else [])]
    counts = SHARD_COUNTS if "shard_nbytes" not in overrides else ()
    smaller = [max(MIN_SHARD_NBYTES, largest // count) for count in counts]
    shards = [nbytes for nbytes in smaller if nbytes < policy.shard_nbytes] or [policy.shard_nbytes]
    found: dict[Choice, float] = {}

    def gains(shard: int) -> bool:
        for count in dict.fromkeys(slots):
            each = plan.choice.change(wait_for="shard", shard_nbytes=shard, weight_slots=count)
            found[each] = estimate(plan.question, each, plan.micro_batch).seconds
        return min(found.values()) < bound

    bound = WORTH_A_REPLAY * estimate(plan.question, plan.choice, plan.micro_batch).seconds
    if gains(shards.pop(0)):
        for shard in dict.fromkeys((policy.shard_nbytes, *shards)):
            gains(shard)
    faster = [each for each, seconds in found.items() if seconds < bound]
    return sorted(
        faster, key=lambda each: (float(f"{found[each]:.3g}"), -each.policy.shard_nbytes, -each.policy.weight_slots)
    )


# Streamed updates -----------------------------------------------------------------------------------------------------
#
# Whether some layers are updated on the device while their state stays in host memory. Decided by replay.
#
# This gains where compute waits for the optimizer, as in small steps. How fast bus and host are beside each other
# depends on how they share host memory, so several shares are replayed near the one that would keep both equally busy.


def streaming_updates(plan: Plan) -> Plan:
    """The plan, or the same with a share of its updates streamed, if that fits, page-locks no more than the machine
    allows, and its step is shorter by `WORTH_STREAMING`."""
    question, policy = plan.question, plan.policy
    if "streamed_updates" in question.overrides or policy.shares_memory or policy.transfer != "pinned":
        return plan
    if plan.stall_seconds() <= (1 - WORTH_STREAMING) * plan.seconds or not _waits_for_updates(plan):
        return plan
    balanced, best = _balanced_share(plan), plan
    shares = [min(1.0, round(factor * balanced, 2)) for factor in STREAMED_FACTORS if balanced > 0]
    bases = [*_with_room_for_updates(plan)]
    for share in dict.fromkeys((*shares, 1.0)):
        if share == 1.0 and bases:
            all_streamed = estimate(question, bases[0].change(streamed_updates=share), plan.micro_batch)
            if max(all_streamed.busy.values()) >= best.seconds:
                continue  # some stream alone takes as long. For a part of the layers an estimate would be too far off
        while bases:  # a base that does not fit with one share does not with another, since the slots are the same
            each = examine_rounds(question, bases[0].change(streamed_updates=share), plan.micro_batch)
            if each.taken.fits(question.budgets()) and not locks_too_much(each):
                best = each if each.seconds < best.seconds else best
                break
            bases.pop(0)
    return best if best.seconds < WORTH_STREAMING * plan.seconds else plan


def _waits_for_updates(plan: Plan) -> bool:
    """Whether the step would be shorter by `WORTH_STREAMING` if updates on the host took no time."""
    if not replace(plan.policy, streamed_updates=1.0).updates_streamed(plan.question.model):
        return False
    hardware = plan.question.hardware
    norm, dram = hardware.norm_bandwidth or hardware.host_bandwidth, host_dram_bandwidth(hardware)
    instant = replace(
        hardware, host_bandwidth=inf, optimizer_bandwidth=(), norm_bandwidth=norm, host_dram_bandwidth=dram
    )
    return seconds_on(plan, replace(plan.question, hardware=instant)) < WORTH_STREAMING * plan.seconds


def _with_room_for_updates(plan: Plan) -> Iterator[Choice]:
    """The plan's choice, then choices with more room on the device for the slots of updates: with one weight slot
    less, or with one layer less whose weights, or whose whole state, stays on the device."""
    choice, overrides = plan.choice, plan.question.overrides
    yield choice
    if choice.policy.weight_slots > 2 and "weight_slots" not in overrides:
        yield choice.change(weight_slots=choice.policy.weight_slots - 1)
    placements = choice.policy.placements if "placements" not in overrides else ()
    resident = [unit for unit in plan.question.model.layers if placements and placements[unit].weights == "device"]
    kinds = {placements[unit].on_device: unit for unit in resident}
    for _, unit in sorted(kinds.items()):
        yield choice.change(placements=(*placements[:unit], IN_HOST, *placements[unit + 1 :]))


def _balanced_share(plan: Plan) -> float:
    """The share of streamed updates with which the host takes as long for the other updates as the bus for these and
    for all weights."""
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
# The limit of a system or a driver is measured by the probe, or known to the device. Within it everything is pinned,
# which is fastest. Beyond it, pinned staging buffers are compared with pageable memory, at the prices of this machine.


MAX_STAGING_NBYTES = 64 << 20
"""Largest staging buffer."""

MAX_STAGED_SHARDS = 32
"""Staging buffers are not so small that the largest unit would have more shards than this."""

STAGING_SHARE = 0.5
"""Share of the lock limit that staging buffers may take."""


def within_lock_limit(question: Question, search: Callable[[Question], Plan]) -> Plan:
    """The plan that `search` finds, or the best that page-locks no more than the machine allows.

    Raises what `search` raises.
    """
    plan, limit = search(question), question.hardware.pinnable_nbytes
    if limit is None or "transfer" in question.overrides or not locks_too_much(plan):
        return plan
    others = _with_less_pinned(question, plan.policy.pinned_staging_slots, limit, search)
    return min((each for each in others if not locks_too_much(each)), key=lambda each: each.seconds)


def _with_less_pinned(question: Question, slots: int, limit: int, search: Callable[[Question], Plan]) -> Iterator[Plan]:
    """The plan with pinned staging buffers, if it fits, and the one with nothing pinned."""
    slots = question.overrides.get("pinned_staging_slots", slots)
    shard = {"shard_nbytes": _staging_nbytes(question.model, slots, limit)}
    with suppress(DoesNotFit):  # staging buffers take more host memory
        yield search(replace(question, overrides={**shard, **question.overrides, "transfer": "staged"}))
    yield search(replace(question, overrides={**question.overrides, "transfer": "pageable"}))


def fit_lock_limit(model: ModelSpec, numerics: Numerics, policy: Policy, limit: int) -> Policy:
    """The policy, changed to pin at most `limit` bytes.

    Of these, the first that does: as it is; without streamed updates; with pinned staging buffers; nothing pinned.
    """
    if policy.shares_memory:
        return policy
    shard = min(policy.shard_nbytes, _staging_nbytes(model, policy.pinned_staging_slots, limit))
    unstreamed = replace(policy, streamed_updates=0.0)
    for each in (policy, unstreamed, replace(unstreamed, transfer="staged", shard_nbytes=shard)):
        schedule = build_step(model, numerics, each, Work.of_two_rounds(each.micro_batches_per_round))
        if pinned_nbytes(schedule.buffers.values(), each.transfer) <= limit:
            return each
    return replace(unstreamed, transfer="pageable")


def _staging_nbytes(model: ModelSpec, slots: int, limit: int) -> int:
    """Bytes of one staging buffer, and so of a shard."""
    largest = max(layout_of(unit).size for unit in model.units)
    least = -(-4 * largest // MAX_STAGED_SHARDS)
    return max(1, least, min(MAX_STAGING_NBYTES, int(STAGING_SHARE * limit) // (2 * slots)))


def locks_too_much(plan: Plan) -> bool:
    """Whether the plan page-locks more bytes than its machine allows."""
    hardware = plan.question.hardware
    if hardware.shares_memory or hardware.pinnable_nbytes is None:
        return False
    taken = pinned_nbytes(plan.timeline.schedule.buffers.values(), plan.policy.transfer)
    return taken > hardware.pinnable_nbytes
