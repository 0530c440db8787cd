"""Searches for the fastest policy that fits: one price, one climb, a few starts.

A `Point` says how a step is run, except what layers keep and where state is. Its price is the estimated time of a step
with state on the disk only if it does not fit elsewhere (`placement`), and with the mixture of what layers keep that
fits and is the fastest (`activation_plan`). The climb changes one knob at a time, for as long as that gains. The best
points that it came by are then replayed whole, which decides. Nothing is random: the same question has the same answer.

`refinements` has what is decided after the search, `advice` what a refusal suggests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf

from megatrain.errors import DoesNotFit
from megatrain.plan.activation_plan import Mixtures, Option, offloads_outputs
from megatrain.plan.advice import changes, provide, refusal
from megatrain.plan.estimates import coarse, estimate, examine, examine_rounds, fitted, gc_paused
from megatrain.plan.placement import host_nbytes, place_state, resident_placements, state_numerics, state_policy
from megatrain.plan.question import Choice, Estimate, Plan, Question
from megatrain.plan.ranks import by_delivery
from megatrain.plan.refinements import preferred, streaming_some_updates, within_lock_limit
from megatrain.plan.search_space import (
    COMPUTE_BOUND,
    MOST_CORRECTIONS,
    MOST_REPLAYED,
    NEARLY_AS_FAST,
    WORTH_A_ROUND,
    Point,
    SearchSpace,
)
from megatrain.schedule.passes.state_buffers import state_nbytes
from megatrain.spec import Placement


def find_plan(question: Question) -> Plan:
    """The fastest plan that fits.

    Raises `DoesNotFit`, naming the tier that is short, by how many bytes, and the nearest question that fits.
    """
    with gc_paused():
        plan = by_delivery(question, lambda asked: within_lock_limit(asked, lambda each: _best_plan(Search(each))))
        return examine(plan.question, plan.choice, plan.micro_batch) if plan.left_out else plan


def _best_plan(search: Search) -> Plan:
    if plans := search.plans():
        best = preferred(plans)
        if not best.nbytes["disk"] and any(plan.nbytes["disk"] for plan in plans):  # without the disk's starts
            best = preferred([best, *Search(search.question, {"disk": 0}).plans()])
        return streaming_some_updates(best)
    raise refused(search)


CostFunction = Callable[[Point], tuple[float, int]]
"""Point -> (seconds, bytes), by which points are compared; infinite if it does not fit."""


class Search:
    """A search for the fastest plan of one question, within its budgets or others (tier -> bytes)."""

    def __init__(self, question: Question, budgets: Mapping[str, int] | None = None) -> None:
        self.question, self.budgets = question, {**question.budgets(), **(budgets or {})}
        self._known: dict[Point, list[Option]] = {}
        self._placements: dict[Hashable, tuple[Placement, ...]] = {}
        self._resident: dict[tuple[int, int], int] = {(0, 0): 0}
        """(`Point.layer_parts`, `weight_parts`) -> `_resident_nbytes`."""
        self._excess: dict[tuple[int, int], dict[str, int]] = {}
        """(micro-batch, micro-batches of a round) -> bytes by tier that a replay took beyond its estimate."""
        self._space = SearchSpace(question)

    # The search, top down ---------------------------------------------------------------------------------------------

    def plans(self) -> list[Plan]:
        """Replays of the most promising options, of those that fit these budgets; empty if nothing fits.

        A whole replay decides whether an option fits. If that contradicts the estimates, all similar ones are corrected
        by the difference and the search is repeated, up to `MOST_CORRECTIONS` times. A question within whose budgets
        the leanest plan fits has that plan, at least.
        """
        fitting_plans: list[Plan] = []
        for _ in range(MOST_CORRECTIONS):
            options = self.options()
            first = options[0][1] if options else self.leanest(self.budgets)
            tried = self._replays(options) if options else [self.leanest_plan]
            now = fitting(tried, self.budgets)
            fitting_plans += now
            if bool(now) == bool(options):  # the replays agree with the estimates
                break
            self._correct(first, tried[0])
        return fitting_plans or fitting([self.leanest_plan], self.budgets)

    def options(self) -> list[tuple[Point, Option]]:
        """The options that fit by their estimates, of all points that climbs from a few starts came by, the fastest
        first. There is one of a kind."""
        for starts in self._starts():
            self._climb(starts)
        options = [(_cost(option), point, option) for point, each in self._known.items() for option in each]
        distinct: dict[Hashable, tuple[Point, Option]] = {}
        for _, point, option in sorted(options, key=lambda each: each[0]):
            policy, on_device = option.choice.policy, (point.layer_parts > 0, point.weight_parts > 0)
            streams = len(policy.updates_streamed(self.question.model)) > 0
            kind = option.micro_batch, policy.micro_batches_per_round, policy.read_ahead_nbytes, streams
            distinct.setdefault((*kind, offloads_outputs(option.counts), on_device), (point, option))
        # Estimates of state on the device are the roughest, so the first of each kind of that comes first.
        first = {(point.layer_parts > 0, point.weight_parts > 0): point for point, _ in reversed(distinct.values())}
        return sorted(distinct.values(), key=lambda each: each[0] not in first.values())

    def _starts(self) -> Iterator[list[Point]]:
        """Groups of points, of each of which the fastest is where a climb starts: the usual policy with each size of
        micro-batch, the leanest, and where state may stay on the device, as much of it as fits."""
        starts = [self._space.every_size(self._space.usual)]
        if not all(map(self.price, starts[0])):
            starts.append(self._space.every_size(self._space.lean))
            if not any(map(self.price, starts[1])):
                starts[1:] = [[*self._space.every_size(self._space.leanest), *self._space.last_resorts]]
        yield from starts
        for knob, points in product(("layer_parts", "weight_parts"), starts):
            yield [point.change(**{knob: self._space.knobs[knob][-1]}) for point in points]
            yield [point.change(**{knob: self._most_parts(point, knob)}) for point in points]

    def _climb(self, starts: list[Point]) -> None:
        """From the fastest of these points, change one knob at a time for as long as that gains."""
        best, before = min(starts, key=self._point_cost), inf
        while (option := self.price(best)) and option.seconds < WORTH_A_ROUND * before:
            before, knobs = option.seconds, set(self._space.knobs)
            if all(map(self.price, self._space.every_size(self._space.usual))):
                knobs.discard("read_ahead_nbytes")  # memory is not short
            if option.estimate.busy["compute"] > COMPUTE_BOUND * option.seconds:
                knobs.discard("streamed_updates")
            for knob in filter(knobs.__contains__, self._space.knobs):
                best = self._along(best, knob)

    def _along(self, best: Point, knob: str, cost: CostFunction | None = None) -> Point:
        """The best point in both directions along one knob, as far as each step gains."""
        cost = cost or self._point_cost
        now, values = best.get(knob), self._space.knobs[knob]
        for ahead in ([each for each in values if each > now], [each for each in reversed(values) if each < now]):
            for value in ahead:
                other = self._space.turned(best, knob, value)
                if cost(other) < cost(best):
                    best = other
                elif knob != "micro_batches_per_round":  # rounds of one and of several have little in common
                    break
        return best

    def _replays(self, options: list[tuple[Point, Option]]) -> list[Plan]:
        """Replays of the fastest of these options, with their mixtures corrected until they fit; and then climbs over
        replays along what only they tell: how much state stays on the device, if any does, and if pieces of gradients
        leave for the disk, what slots for gradients gain."""
        plans: list[Plan] = []
        seconds: dict[Point, float] = {}

        def replayed(point: Point, option: Option | None) -> tuple[float, int]:
            if option and point not in seconds:
                plans.extend(now := fitted(self.question, self.budgets, option))
                seconds[point] = min((plan.seconds for plan in fitting(now, self.budgets)), default=inf)
            return seconds.get(point, inf), 0

        for point, option in options[:MOST_REPLAYED]:
            fastest = max(options[0][1].seconds, min(seconds.values(), default=inf))
            if option.seconds < NEARLY_AS_FAST * fastest:
                replayed(point, option)
        best = min(seconds, key=lambda each: seconds[each])
        on_disk = any(placement.gradients == "disk" for plan in plans for placement in plan.policy.placements)
        for knob in ("layer_parts", "weight_parts", "grad_slots"):
            if on_disk and knob in self._space.knobs if knob == "grad_slots" else best.get(knob):
                best = self._along(best, knob, lambda point: replayed(point, self.price(point)))
        if best.layer_parts:  # with all of it there, no update runs on the host: slower steps may lie before that
            whole = best.change(layer_parts=self._space.knobs["layer_parts"][-1])
            replayed(whole, self.price(whole))
        return plans

    def _correct(self, option: Option, plan: Plan) -> None:
        """Correct the bytes of all points like this one by what it took when it was replayed whole."""
        key = option.micro_batch, option.choice.policy.micro_batches_per_round
        before: Mapping[str, int] = self._excess.get(key, {})
        more = {tier: plan.nbytes[tier] - nbytes for tier, nbytes in option.estimate.nbytes.items()}
        self._excess[key] = {tier: nbytes + before.get(tier, 0) for tier, nbytes in more.items()}
        self._known.clear()

    # Prices -----------------------------------------------------------------------------------------------------------

    def price(self, point: Point) -> Option | None:
        """The fastest option of a point that fits by its estimate, or `None`."""
        if point not in self._known:
            self._known[point] = self._options_of(point)
        return min(self._known[point], key=_cost, default=None)

    def _options_of(self, point: Point) -> list[Option]:
        """The options of a point that fit: the fastest mixture, and the fastest that offloads no outputs of ops."""
        rounds = 0 if "micro_batches_per_round" in self._space.overrides else point.get("micro_batches_per_round")
        has_rounds = 2 * point.micro_batch * rounds <= self.question.sequences  # several, or is not asked for them
        if not has_rounds or self._resident_nbytes(point) > self.budgets.get("device", 0):
            return []
        if not self._space.mixes:
            option = self._placed(point)
            return [option] if option.estimate.fits(self.budgets) else []
        options: dict[Hashable, Option] = {}
        for mixtures in self._mixtures_of(point):
            for outputs_stay in (False, True):
                for _, counts in mixtures.best(self.budgets, 1, outputs_stay=outputs_stay):
                    options[mixtures.choice, counts] = mixtures.option(counts)
        return list(options.values())

    def _mixtures_of(self, point: Point) -> list[Mixtures]:
        """The mixtures of a point with as much state in host memory as fits, and with less where there would be no
        room for half of its inputs, or for all, if they were offloaded."""
        option, work = self._placed(point), coarse(self.question, point.micro_batch)
        mixtures = Mixtures(self.question, option.choice, point.micro_batch, work, option.estimate)
        by_choice = {option.choice: mixtures}
        needed, left = mixtures.host_nbytes("offload"), self.budgets["host"] - option.estimate.nbytes["host"]
        for more in (needed // 2, needed):
            option = self._placed(point, more) if more > left else option
            if option.choice not in by_choice and option.estimate.nbytes["disk"] <= self.budgets["disk"]:
                more_mixtures = Mixtures(self.question, option.choice, point.micro_batch, work, option.estimate)
                by_choice[option.choice] = more_mixtures
        return list(by_choice.values())

    def _placed(self, point: Point, more: int = 0) -> Option:
        """The point as it is, with its state where there is room, whether or not it fits.

        more: bytes of host memory that state leaves free, in addition to what the point takes.
        """
        choice = point.choice
        if "placements" not in self._space.overrides:
            room = self.budgets["host"] - self._host_beside(point) - more
            choice = choice.change(placements=self._placements_of(point, room))
        return Option(choice, point.micro_batch, self._estimate(choice, point.micro_batch))

    def _placements_of(self, point: Point, room: int) -> tuple[Placement, ...]:
        model, choice, asked = self.question.model, point.choice, (point.layer_parts, point.weight_parts)
        placements = resident_placements(model, *asked) if any(asked) else ()
        numerics = state_numerics(choice.numerics)
        policy = replace(state_policy(choice.policy), placements=placements)
        spare = 0 if any(asked) else self._most_parts(point, "layer_parts")
        key = policy, room, spare
        if key not in self._placements:
            tiers = room, self.budgets["disk"], spare
            placed = place_state(model, numerics, policy, *tiers, saves=self.question.saves)
            self._placements[key] = placed.placements
        return self._placements[key]

    def _host_beside(self, point: Point) -> int:
        """Bytes of host memory for everything but state."""
        numerics, policy = state_numerics(point.choice.numerics), state_policy(point.choice.policy)
        state = host_nbytes(self.question.model, numerics, policy, self.question.saves)
        return self._estimate(point.choice, point.micro_batch).nbytes["host"] - state

    def _estimate(self, choice: Choice, micro_batch: int) -> Estimate:
        estimated = estimate(self.question, choice, micro_batch)
        if more := self._excess.get((micro_batch, choice.policy.micro_batches_per_round)):
            return replace(estimated, nbytes={tier: nbytes + more[tier] for tier, nbytes in estimated.nbytes.items()})
        return estimated

    def _point_cost(self, point: Point) -> tuple[float, int]:
        option = self.price(point)
        return _cost(option) if option else (inf, 0)

    def leanest(self, budgets: Mapping[str, int], *, mixes: bool = True) -> Option:
        """The option that exceeds these budgets least, of those with as little memory as possible.

        Any micro-batch size may be the leanest: smaller micro-batches need less memory each, fewer of them keep less
        for the backward, and a single one needs no float32 sum of gradients. mixes: with mixtures of what layers keep.
        """
        points = [*self._space.every_size(self._space.leanest), *self._space.last_resorts]
        options = [self._placed(point) for point in points]
        if mixes and self._space.mixes:
            mixed = [mixtures for point in points for mixtures in self._mixtures_of(point)]
            options = [each.option(each.leanest(budgets)) for each in mixed]
        return min(options, key=lambda each: max(each.estimate.short(budgets).values()))

    def _most_parts(self, point: Point, knob: str) -> int:
        """The largest value of `layer_parts` or `weight_parts` with which the point, as it is, fits on the device."""
        values = self._space.knobs[knob]
        if len(values) == 1:
            return 0
        spare = self.budgets["device"] - self._estimate(point.choice, point.micro_batch).nbytes["device"]
        fitting = bisect_right(values, spare, key=lambda parts: self._resident_nbytes(point.change(**{knob: parts})))
        return max(0, fitting - 1)

    def _resident_nbytes(self, point: Point) -> int:
        """Device bytes of the state that stays there between steps."""
        asked = point.layer_parts, point.weight_parts
        if asked not in self._resident:
            placed = replace(self._space.usual.policy, placements=resident_placements(self.question.model, *asked))
            nbytes = state_nbytes(self.question.model, self._space.usual.numerics, placed)
            self._resident[asked] = nbytes["device"]
        return self._resident[asked]

    @property
    def leanest_plan(self) -> Plan:
        """The plan that exceeds the budgets least by its replay: of the leanest for these budgets, and for as little as
        possible of a memory, which is the same however much is short; of mixtures, whose replays may take more than
        their estimates, and of layers that keep the same."""
        plans = []
        for budgets in (self.budgets, *({**self.budgets, tier: 0} for tier in self.budgets if tier != "disk")):
            for mixes in (True, False):
                least = Search(self.question, budgets).leanest(self.budgets, mixes=mixes)
                plans.append(examine_rounds(self.question, least.chosen, least.micro_batch))
        return min(plans, key=lambda each: max(each.taken.short(self.budgets).values()))


def fitting(plans: Iterable[Plan], budgets: Mapping[str, int]) -> list[Plan]:
    """The plans that fit these budgets."""
    return [plan for plan in plans if plan.taken.fits(budgets)]


def _cost(option: Option) -> tuple[float, int]:
    return float(f"{option.seconds:.4g}"), sum(option.estimate.nbytes.values())


# Refusals -------------------------------------------------------------------------------------------------------------


def refused(search: Search) -> DoesNotFit:
    """The error that names the tier that is short, by how many bytes, and the nearest change that would fit."""
    least = search.leanest_plan
    return refusal(least, _nearest_change(least))


def _nearest_change(least: Plan) -> str:
    """The first change of the question that makes it fit, least painful first, in words."""
    for words, other in changes(least.question):
        search = Search(other)
        if _promises(search) and search.plans():
            return f"{words} would fit"
    return provide(least.question, least.nbytes)


# What if the machine or the step were changed -------------------------------------------------------------------------


def fits(question: Question) -> bool:
    """Whether any policy fits by its estimate."""
    with gc_paused():
        return _promises(Search(question))


def survey(question: Question, budgets: Iterable[Mapping[str, int]]) -> list[Estimate | None]:
    """The estimate of the fastest plan for each of several budgets (tier -> bytes), `None` where nothing fits. Nothing
    is replayed whole."""
    with gc_paused():
        return [_promised(Search(question, each)) for each in budgets]


def _promises(search: Search) -> bool:
    """Whether any option fits by its estimate."""
    usual = search._space.every_size(search._space.usual)
    return any(map(search.price, usual)) or search.leanest(search.budgets).estimate.fits(search.budgets)


def _promised(search: Search) -> Estimate | None:
    """The estimate of the fastest plan, `None` if nothing fits."""
    options = [option.estimate for _, option in search.options()[:1]] or [search.leanest(search.budgets).estimate]
    return next((each for each in options if each.fits(search.budgets)), None)


def faster_plan(question: Question, seconds: float = inf) -> Plan | None:
    """The fastest plan that fits, or `None` if there is none or its estimate is not below `seconds`."""
    with gc_paused(), suppress(DoesNotFit):
        search = Search(question)
        promised = _promised(search)
        if promised is not None and (promised.seconds < seconds or seconds == inf):
            return within_lock_limit(question, lambda each: _best_plan(search if each is question else Search(each)))
    return None
