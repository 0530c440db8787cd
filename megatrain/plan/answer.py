"""From a question to its plan: the search, and what is decided behind it.

Gates, a ring of shards, and how the bus is crossed are tried with what the search has found, each by replay, since few
plans gain by them. Left out: how each is decided (`search`, `gates`, `ring`, `locks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatrain.plan.estimates import estimate, undisturbed
from megatrain.plan.gates import with_gates
from megatrain.plan.locks import within_lock_limit
from megatrain.plan.question import Estimate, Plan, Question
from megatrain.plan.ring import leaner, only_by_ring, with_ring
from megatrain.plan.search import Search


def find_plan(question: Question) -> Plan:
    """The quickest plan that fits. Raises `DoesNotFit` naming what is short, by how much, and the nearest that fits."""
    with undisturbed():
        return within_lock_limit(question, _quickest)


def _quickest(question: Question) -> Plan:
    search, budgets = Search(question), question.budgets()
    if plan := search.answer():
        return with_ring(with_gates(plan), search.promised, search.answer)
    plain, ring = search.least
    freed = plain.nbytes.get("device", 0) - ring.nbytes.get("device", 0)
    plan = only_by_ring(question, search.leanest(), freed, search.answer) if ring.taken.fits(budgets) else None
    if plan is None:
        search.within(budgets)
        raise search.refusal()
    return plan


def survey(question: Question, budgets: Iterable[Mapping[str, int]]) -> list[Estimate | None]:
    """What the quickest plan within each of several budgets (tier -> bytes) takes, without gates, and by a ring only
    the leanest, where nothing else fits; `None` where nothing does. Prices do not depend on budgets and are found once;
    no winner is replayed whole."""
    search = Search(question)
    found: list[Estimate | None] = []
    with undisturbed():
        for each in budgets:
            within = {**question.budgets(), **each}
            found.append(search.promised(within) or _leanest(search, within))
    return found


def _leanest(search: Search, budgets: Mapping[str, int]) -> Estimate | None:
    """What the leanest policy takes by a ring, if that fits."""
    policy, rows = search.usual(*search.leanest())[0]
    taken = estimate(search.question, leaner(search.question, policy), rows)
    return taken if taken.fits(budgets) else None
