"""From a question to its plan: the search, and what is decided behind it.

Gates, a ring of shards, and how the bus is crossed are tried with what the search has found, each by replay, since few
plans gain by them. Left out: how each is decided (`search`, `gates`, `ring`, `locks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from megatrain.plan.estimates import undisturbed
from megatrain.plan.gates import with_gates
from megatrain.plan.locks import within_lock_limit
from megatrain.plan.question import Estimate, Plan, Question
from megatrain.plan.ring import rings, ways, with_ring
from megatrain.plan.search import Search


def find_plan(question: Question) -> Plan:
    """The quickest plan that fits. Raises `DoesNotFit` naming what is short, by how much, and the nearest that fits."""
    with undisturbed():
        return within_lock_limit(question, _quickest)


def _quickest(question: Question) -> Plan:
    search = Search(question)
    if plan := search.answer():
        return with_ring(with_gates(plan), search.promised, search.answer)
    others = [Search(each) for each in rings(question)]
    fits = others and others[-1].least.fits(question.budgets())
    found = [*filter(None, (each.answer() for each in others if fits))]
    if not found:
        raise search.refusal()
    return replace(min(found, key=lambda plan: plan.seconds), question=question)


def survey(question: Question, budgets: Iterable[Mapping[str, int]]) -> list[Estimate | None]:
    """What the quickest plan within each of several budgets (tier -> bytes) takes, without gates, and by a ring only
    where nothing else fits; `None` where nothing does. Prices do not depend on budgets and are found once; no winner is
    replayed whole."""
    searches = [Search(each) for each in ways(question)]
    found: list[Estimate | None] = []
    with undisturbed():
        for each in budgets:
            within = {**question.budgets(), **each}
            found.append(next(filter(None, (search.promised(within) for search in searches)), None))
    return found
