"""Improves the plan that the search found: tries further options and judges each by replaying the step.

The options are streamed updates, and pageable memory where not everything may be page-locked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

from megatrain.plan.cost import duplex_bandwidths, host_dram_bandwidth, optimizer_bandwidth
from megatrain.plan.estimates import examine_rounds, seconds_on
from megatrain.plan.question import Plan, Question
from megatrain.plan.search_space import FEWER_WRITES, SLOWER_FOR_FEWER_WRITES, STREAMED_FACTORS, WORTH_STREAMING
from megatrain.schedule.passes.pieces import arrays_of
from megatrain.schedule.passes.pinned_staging import pinned_nbytes
from megatrain.spec.layout import layout_of

# Fewer writes ---------------------------------------------------------------------------------------------------------


def preferred(plans: list[Plan]) -> Plan:
    """The fastest plan, or one that is nearly as fast and writes much less to the disk, to save its endurance."""
    fastest = min(plans, key=lambda plan: float(f"{plan.seconds:.4g}"))
    most = SLOWER_FOR_FEWER_WRITES * fastest.seconds, FEWER_WRITES * fastest.written_nbytes
    gentle = [plan for plan in plans if plan.seconds <= most[0] and plan.written_nbytes < most[1]]
    return min(gentle, key=lambda plan: plan.written_nbytes, default=fastest)


# Streamed updates -----------------------------------------------------------------------------------------------------
#
# Which share of the layers is updated on the device while their state stays in host memory. The search tries none and
# all. This gains where compute waits for the optimizer, as in small steps. How fast bus and host are beside each other
# depends on how they share host memory, so several shares are replayed near the one that would keep both equally busy.


def streaming_some_updates(plan: Plan) -> Plan:
    """The plan, or if it streams all updates, or waits for those on the host, the fastest that streams a share."""
    question, policy = plan.question, plan.policy
    if "streamed_updates" in question.overrides or policy.shares_memory or policy.transfer != "pinned":
        return plan
    if not policy.streamed_updates and (policy.read_ahead_nbytes or not _waits_for_updates(plan)):
        return plan
    balanced = _balanced_share(plan)
    shares = {min(1.0, round(factor * balanced, 2)) for factor in STREAMED_FACTORS if balanced > 0}
    choices = [plan.choice.change(streamed_updates=share) for share in sorted(shares)]
    others = [examine_rounds(question, each, plan.micro_batch) for each in choices]
    fitting = [each for each in others if each.taken.fits(question.budgets()) and not locks_too_much(each)]
    best = min([plan, *fitting], key=lambda each: each.seconds)
    return best if policy.streamed_updates or best.seconds < WORTH_STREAMING * plan.seconds else plan


def _waits_for_updates(plan: Plan) -> bool:
    """Whether the step would be shorter by `WORTH_STREAMING` if updates on the host took no time."""
    if plan.stall_seconds() <= (1 - WORTH_STREAMING) * plan.seconds:
        return False
    hardware = plan.question.hardware
    norm, dram = hardware.norm_bandwidth or hardware.host_bandwidth, host_dram_bandwidth(hardware)
    instant = replace(
        hardware, host_bandwidth=inf, optimizer_bandwidth=(), norm_bandwidth=norm, host_dram_bandwidth=dram
    )
    return seconds_on(plan, replace(plan.question, hardware=instant)) < WORTH_STREAMING * plan.seconds


def _balanced_share(plan: Plan) -> float:
    """The share of streamed updates with which the host takes as long for the other updates as the bus for these and
    for all weights."""
    hardware, model, numerics = plan.question.hardware, plan.question.model, plan.numerics
    trained = [layout_of(unit).trained for unit in model.units]
    arrays = [array for layout in trained for array in arrays_of(layout, numerics)]
    numel = max(1, sum(layout.own_size for layout in trained))
    # Bytes for each element that this rank updates: of state, and of weights that are fetched.
    state = sum(array.nbytes * array.size for array in arrays) / numel - numerics.grad_nbytes
    fetched = numerics.weight_nbytes * (model.ranks if plan.policy.delivery == "shared" else 1)
    bus = duplex_bandwidths(hardware)[0]
    updated = (numerics.grad_nbytes + 2 * state) / optimizer_bandwidth(hardware, plan.policy.host_threads)
    return max(0.0, (updated - fetched / bus) / (updated + state / bus))


# The limit of page-locked memory --------------------------------------------------------------------------------------
#
# How weights and gradients cross the bus where not all of them may be page-locked.
#
# The limit of a system or a driver is measured by the probe, or known to the device. Within it everything is pinned,
# which is fastest. Beyond it updates are not streamed, or nothing is pinned and the driver copies through a buffer of
# its own.


def within_lock_limit(question: Question, search: Callable[[Question], Plan]) -> Plan:
    """The plan that `search` finds, or the best that page-locks no more than the machine allows.

    Raises what `search` raises.
    """
    plan, limit = search(question), question.hardware.pinnable_nbytes
    if limit is None or "transfer" in question.overrides or not locks_too_much(plan):
        return plan
    others = _with_less_pinned(plan, search)
    return min((each for each in others if not locks_too_much(each)), key=lambda each: each.seconds)


def _with_less_pinned(plan: Plan, search: Callable[[Question], Plan]) -> Iterator[Plan]:
    """The plan without streamed updates, if it has any; and with nothing pinned."""
    question = plan.question
    if plan.policy.streamed_updates and "streamed_updates" not in question.overrides:
        yield search(replace(question, overrides={**question.overrides, "streamed_updates": 0.0}))
    yield search(replace(question, overrides={**question.overrides, "transfer": "pageable"}))


def locks_too_much(plan: Plan) -> bool:
    """Whether the plan page-locks more bytes than its machine allows."""
    hardware = plan.question.hardware
    if hardware.shares_memory or hardware.pinnable_nbytes is None:
        return False
    locked = pinned_nbytes(plan.timeline.schedule.buffers.values(), plan.policy.transfer)
    return locked > hardware.pinnable_nbytes
