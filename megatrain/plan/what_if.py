"""What if the machine or the step were changed? Plans for the changed question, more cheaply than a first plan.

Only the speed of such a plan is used; it never runs. So it keeps the known plan's number of disk staging buffers, has a
read-ahead only if that has one, and few candidates are replayed. It may miss a plan that is a few percent faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf

from megatrain.errors import DoesNotFit
from megatrain.plan.estimates import estimate, gc_paused
from megatrain.plan.question import Candidate, Estimate, Plan, Question
from megatrain.plan.refinements import preferred, with_leanest_read_ahead, within_lock_limit
from megatrain.plan.search import Search, fastest
from megatrain.plan.search_space import FIT_ATTEMPTS, WORTH_A_SPARING_REPLAY


class SparingSearch(Search):
    """Replays alternatives in the order of their estimates, and stops once none is estimated to be notably faster."""

    def _best_plan(self) -> Plan | None:
        if (found := self._best_candidate_and_tier()) is None:
            return None
        best, fitting = None, list[Plan]()
        for _ in range(FIT_ATTEMPTS):
            all_fit = True
            for promised, replays in sorted(self.alternatives(*found), key=lambda each: each[0].seconds):
                if best and promised.seconds >= WORTH_A_SPARING_REPLAY * best.seconds:
                    break
                now = self._fitting(replays())
                fitting, all_fit = fitting + now, all_fit and bool(now)
                best = preferred(fitting)
            if all_fit:
                break
        return best and replace(best, question=self.question)

    def _replays(self, candidates: Iterable[Candidate], known: Iterable[Plan] = ()) -> list[Plan]:
        """As of any search; if state on the device does not fit, its estimates are corrected."""
        plans = super()._replays(candidates, known)
        for plan in plans:
            promised = self._placed_estimates.get((plan.choice, plan.micro_batch))
            if promised and not plan.taken.fits(self.budgets):
                self._correct_resident_estimates(promised, plan)
        return plans

    def _nearest_change(self, least: Estimate, freed: int) -> str:
        """Nothing, since nobody reads the refusal."""
        return ""


def faster_plan(question: Question, seconds: float, like: Plan | None) -> Plan | None:
    """A fast plan that fits, or `None` if there is none or its estimate is not below `seconds`.

    like: the plan of the question that was changed, or `None` if nothing fits that; the search is thorough then.
    """
    reads_ahead = like is None or like.policy.read_ahead_nbytes > 0
    if like is not None and any(each.uses_drive for each in like.policy.placements):
        staged = {"disk_staging_slots": like.policy.disk_staging_slots}
        question = replace(question, overrides={**staged, **question.overrides})
    search_of = Search if like is None else SparingSearch
    search = search_of(question)
    with gc_paused():
        estimated = _best_estimate(search, question.budgets()) if seconds < inf else None
        if seconds < inf and (estimated is None or estimated.seconds >= seconds):
            return None

        def find(asked: Question) -> Plan:
            own = search if asked is question else search_of(asked)
            return fastest(own, reads_ahead=reads_ahead)

        with suppress(DoesNotFit):
            return within_lock_limit(question, find)
    return None


def fits(question: Question) -> bool:
    """Whether any policy fits by its estimate, with slots or with a read-ahead."""
    with gc_paused():
        search = Search(question)
        return search.may_fit() or _leanest_estimate(search, search.budgets) is not None


def survey(question: Question, budgets: Iterable[Mapping[str, int]]) -> list[Estimate | None]:
    """The estimate of the fastest plan for each of several budgets (tier -> bytes), `None` where nothing fits.

    Faster than a search for each: estimates with all state in host memory are shared, and nothing is replayed whole.
    Compute waits for units, and a read-ahead is tried only where nothing else fits.
    """
    search = Search(question)
    found: list[Estimate | None] = []
    with gc_paused():
        for each in budgets:
            found.append(_best_estimate(search, {**question.budgets(), **each}))
    return found


def _best_estimate(search: Search, budgets: Mapping[str, int]) -> Estimate | None:
    return search.best_estimate(budgets) or _leanest_estimate(search, budgets)


def _leanest_estimate(search: Search, budgets: Mapping[str, int]) -> Estimate | None:
    """The estimate of the leanest choice with a read-ahead, if that fits."""
    choice, micro_batch = search.placed_candidates(*search.leanest())[0]
    taken = estimate(search.question, with_leanest_read_ahead(search.question, choice), micro_batch)
    return taken if taken.fits(budgets) else None
