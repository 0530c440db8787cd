"""How weights and gradients cross the bus where not all of them may be page-locked.

What a system or a driver lets a process lock is measured by the probe, or known to the device. Within it all is locked,
which is quickest; else slabs of a shard each are weighed against memory that is not locked at all, at the prices of
this machine. Left out: how a policy is chosen otherwise (`search`, `rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from megatrain.errors import DoesNotFit
from megatrain.layout import layout_of
from megatrain.plan.question import Plan, Question
from megatrain.schedule import build_step
from megatrain.schedule.slabs import locked_nbytes
from megatrain.spec import ModelSpec, Policy, Work

LARGEST_SHARD, MOST_SHARDS = 64 << 20, 32
"""Bytes of a slab, where the limit allows as much, and the pieces of the largest unit, with which it is smaller."""

SHARE = 0.5
"""Of what may be locked that slabs are to take."""


def within_lock_limit(question: Question, search: Callable[[Question], Plan]) -> Plan:
    """What `search` finds, page-locking no more than the machine allows. Raises what it raises."""
    plan, limit = search(question), question.hardware.pinnable_nbytes
    if limit is None or "transit" in question.pinned or not locks_too_much(plan):
        return plan
    others = [each for each in _others(question, plan.policy.slabs, limit, search) if not locks_too_much(each)]
    return min(others, key=lambda each: each.seconds)


def _others(question: Question, slabs: int, limit: int, search: Callable[[Question], Plan]) -> Iterator[Plan]:
    """Plans by slabs, if that fits, and with nothing locked."""
    shard = {"shard_nbytes": _shard_nbytes(question.model, question.pinned.get("slabs", slabs), limit)}
    with suppress(DoesNotFit):  # slabs take host memory that may not be there
        yield search(replace(question, pinned={**shard, **question.pinned, "transit": "slabs"}))
    yield search(replace(question, pinned={**question.pinned, "transit": "pageable"}))


def fit_transit(model: ModelSpec, policy: Policy, limit: int) -> Policy:
    """The policy, if it page-locks `limit` bytes or less; else the same by slabs, if that does; else with no locks."""
    if policy.shares_memory:
        return policy
    shard = min(policy.shard_nbytes, _shard_nbytes(model, policy.slabs, limit))
    for each in (policy, replace(policy, transit="slabs", shard_nbytes=shard)):
        schedule = build_step(model, each, Work((1, 1)))
        if locked_nbytes(schedule.buffers.values(), each.transit) <= limit:
            return each
    return replace(policy, transit="pageable")


def _shard_nbytes(model: ModelSpec, slabs: int, limit: int) -> int:
    largest = max(layout_of(unit).size for unit in model.units)
    least = -(-4 * largest // MOST_SHARDS)
    return max(1, least, min(LARGEST_SHARD, int(SHARE * limit) // (2 * slabs)))


def locks_too_much(plan: Plan) -> bool:
    """Whether the plan page-locks more than its machine allows."""
    hardware = plan.question.hardware
    if hardware.shares_memory or hardware.pinnable_nbytes is None:
        return False
    taken = locked_nbytes(plan.timeline.schedule.buffers.values(), plan.policy.transit)
    return taken > hardware.pinnable_nbytes
