"""Searches for the fastest policy that fits: builds candidate schedules and replays them at the machine's prices.

The search goes through every micro-batch size and activation plan, then moves one knob at a time from the best of
them until nothing improves; where memory is short, from the leanest policy of each size that could be quicker too.
What the host has no room for goes to the disk, and spare device memory to weights and state that stay (`placement`);
the placements that promise most are replayed whole, as is every winner, which also decides whether it fits. Nothing
is drawn at random: the same question has the same answer. Left out: what a candidate takes (`estimates`), and what is
decided behind the search (`refinements`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from math import inf
from typing import Any, TypeVar

from megatrain.errors import DoesNotFit
from megatrain.plan.activation_plan import Batching, Mixtures, Option
from megatrain.plan.advice import changes
from megatrain.plan.estimates import coarse, estimate, examine, fitted, sizes, undisturbed, with_placements
from megatrain.plan.placement import (
    PARTS,
    Homes,
    host_nbytes,
    place_state,
    residents,
    state_numerics,
    state_policy,
    with_more_on_disk,
)
from megatrain.plan.question import Candidate, Choice, Estimate, Plan, Question
from megatrain.plan.ranks import by_delivery
from megatrain.plan.refinements import (
    leaner,
    only_by_ring,
    streaming_updates,
    waiting_for_shards,
    with_ring,
    within_lock_limit,
)
from megatrain.plan.search_space import (
    ALIKE,
    ATTENTION,
    COARSE,
    COMPUTES,
    FEWER_WRITES,
    FITS,
    INPUT,
    KNOBS,
    LEAN,
    MLP_CHUNK_TOKENS,
    MOST_ROUNDS,
    MOST_SHARDS,
    NEAR,
    NEARLY,
    OF_LAST_RESORT,
    OFFLOAD,
    OFFLOAD_SLOTS,
    ROUND_SIZES,
    SLOWER_FOR_FEWER_WRITES,
    STAGE_SLOTS,
    TRIES,
    WORTH_A_CLIMB,
    WORTH_A_REPLAY,
    WORTH_A_ROUND,
)
from megatrain.schedule.passes.state_buffers import state_nbytes
from megatrain.spec import Numerics, Placement, Policy

Found = TypeVar("Found", Plan, Estimate)

Cost = tuple[float, ...]
"""What candidates are compared by: seconds, and of equally quick ones what else counts."""

Costs = Callable[[Choice, int], Cost | None]
"""Of a candidate; `None` if it does not fit."""

Rung = tuple[Estimate, Choice] | None
"""A choice with placements, and what it promises, if it fits."""


class Search:
    """One search: remembers what it has priced."""

    def __init__(self, question: Question) -> None:
        self.question, self.budgets = question, question.budgets()
        self._known: dict[Candidate, Estimate] = {}
        self._estimates: dict[Candidate, Estimate] = {}
        self._placed_estimates: dict[Candidate, Estimate] = {}
        self._estimate_corrections: dict[Hashable, dict[str, int]] = {}
        """Kind of candidate -> bytes by tier that it takes more than is estimated (`_kind`)."""
        self._mixtures: dict[Candidate, Mixtures] = {}
        self._alikes: dict[Batching, Search] = {}
        self._placements: dict[tuple[Policy, int, int, int, bool], tuple[Placement, ...]] = {}
        self._resident: dict[tuple[int, int], int] = {}
        self._resident_excess = 0
        """Bytes of the device that a step with state there takes more than is estimated."""
        self._ladders: dict[Candidate, list[Rung]] = {}
        self._begins_on_disk = False
        """Whether the best candidate before mixtures has state on the disk, or in files."""
        self._files = True
        """Whether weights may be read from files."""
        overrides = dict(question.overrides)
        self._micro_batch: int | None = overrides.pop("micro_batch", None)
        self._overrides = overrides
        largest = max(unit.numel for unit in question.model.units)
        self._largest = largest * (2 if question.precision == "bf16" else 4)
        usual = Policy(
            shares_memory=question.hardware.shares_memory,
            update="next_forward" if question.clips else "during_backward",
            shard_nbytes=max(64 << 20, self._largest // MOST_SHARDS),
        )
        self._start = Choice(Numerics(question.precision), usual).change(**overrides)
        most = {knob: values[-1] for knob, values in KNOBS.items() if knob != "shard_nbytes"}
        self._lean = self._start.change(**LEAN | overrides)
        self._rich = self._start.change(**most | overrides)

    def within(self, budgets: dict[str, int], *, files: bool = True) -> None:
        """Search within these. Prices hold, but for where state has to be."""
        if (budgets, files) != (self.budgets, self._files):
            self._known.clear()
            self._ladders.clear()
            self._resident_excess = 0
        self.budgets, self._files = budgets, files

    def answer(self, budgets: Mapping[str, int] | None = None) -> Plan | None:
        """The quickest candidate that fits these budgets, or the question's, if any does.

        Whether a candidate fits is decided by replaying it whole; where that differs from the estimate, all estimates
        of its kind are corrected by the difference, and the search goes on for `MOST_ROUNDS`.
        """
        return self._by_tiers(dict(budgets or self.question.budgets()), self._answer)

    def _by_tiers(self, budgets: dict[str, int], find: Callable[[], Found | None]) -> Found | None:
        """The quickest within these budgets; without the disk, too, where the search began with state there: it is
        slow, and what is too much for the host may fit the device."""
        self.within(budgets)
        found = find()
        if found and self._begins_on_disk:
            self.within({**budgets, "disk": 0}, files=False)
            other = find() if self._fits(*self.leanest()) else None
            self.within(budgets)
            if other and other.seconds < SLOWER_FOR_FEWER_WRITES * found.seconds:
                found = other
        return found

    def _answer(self) -> Plan | None:
        fitting: list[Plan] = []
        for _ in range(MOST_ROUNDS):
            found = self._best_noted()
            candidate = found or self.leanest()
            plans = [examine(self.question, *each) for each in self.usual(*candidate)]
            usual = min(plan.seconds for plan in plans)
            plans += [*self._filled(*candidate), *self._mixed(*candidate, usual)] if found else []
            plans += self._alike(min(plans, key=lambda plan: plan.seconds)) if found else []
            now = [plan for plan in plans if plan.taken.fits(self.budgets)]
            fitting += now
            if bool(now) == bool(found):  # a winner that fits, or nothing that does
                break
            self._correct_estimates(candidate, plans[0])
        return _with_fewer_writes(fitting)

    def _best_noted(self) -> Candidate | None:
        found = self.best()
        placed = self._placed(found[0], self._plain(*found)).policy.placements if found else ()
        self._begins_on_disk = any(placement.uses_drive for placement in placed)
        return found

    def best(self) -> Candidate | None:
        """The quickest candidate that fits, or `None`.

        Where memory is short, a policy with as little of it as possible is a second place to start from, and again for
        every size that would be quicker if there were more: what slots give up may pay for a larger micro-batch, what a
        smaller one leaves for slots, and one knob at a time would not find that.
        """
        usual = self._every_size(self._start)
        if all(self._fits(*candidate) for candidate in usual):
            return self._climb(usual, self._moves)
        lean, rich = self._every_size(self._lean), self._every_size(self._rich)
        found = self._least([*filter(None, (self._climb(starts, self._moves) for starts in (lean, usual)))])
        for start, bound in zip(lean, rich, strict=True):
            if found and self._fits(*start) and self.price(*bound).seconds < WORTH_A_CLIMB * self.price(*found).seconds:
                found = self._least([found, *filter(None, [self._climb([start], self._knobs)])])
        for start in self._offloading(lean):
            told = {name: start[0].get(name) for name in OF_LAST_RESORT}
            bound = self._rich.change(**told), start[1]
            if found and start[0].policy.micro_batches_per_round and self._may_have_rounds:
                continue  # mixtures in rounds are priced beside those of what is found
            if found is None or self.price(*bound).seconds < WORTH_A_CLIMB * self.price(*found).seconds:
                found = self._least([*filter(None, [found, self._climb([start], self._knobs)])])
        return found

    def leanest(self) -> Candidate:
        """Of the policies with as little memory as possible, the one that is least short of the budgets.

        Micro-batches of any size may be: smaller ones hold less, fewer ones keep less, and a single one has gradients
        that need no wide sum.
        """
        lean = self._every_size(self._lean)
        lean += self._offloading(lean)
        return min(lean, key=lambda each: max(self.price(*each).short(self.budgets).values()))

    def has_lean(self) -> bool:
        """Whether one of these fits: a search finds something then."""
        lean = self._every_size(self._lean)
        return any(self._fits(*each) for each in lean) or any(self._fits(*each) for each in self._offloading(lean))

    def _every_size(self, choice: Choice) -> list[Candidate]:
        return [(one, micro_batch) for micro_batch in self._micro_batches() for one in self._activations(choice)]

    def _climb(
        self,
        starts: list[Candidate],
        moves: Callable[[Choice, int], Iterator[Candidate]],
        costs: Costs | None = None,
    ) -> Candidate | None:
        """From the best of these, the best move, until that gains little."""
        best, costs = self._least(starts, costs), costs or self._costs
        while best is not None:
            before, better = costs(*best), self._least([best, *moves(*best)], costs)
            after = costs(*better) if better else None
            best = better
            if before is None or after is None or after[0] >= WORTH_A_ROUND * before[0]:
                return best
        return None

    def promised(self, budgets: Mapping[str, int]) -> Estimate | None:
        """What the quickest candidate within these budgets should take, if there is one."""
        return self._by_tiers(dict(budgets), self._promised)

    def _promised(self) -> Estimate | None:
        candidate = self._best_noted()
        return None if candidate is None else self.outcome(*candidate)

    @cached_property
    def least(self) -> tuple[Plan, Plan]:
        """The leanest choice, and by a ring, replayed whole."""
        choice, micro_batch = self.usual(*self.leanest())[0]
        plain, ring = (examine(self.question, each, micro_batch) for each in (choice, leaner(self.question, choice)))
        return plain, ring

    def refusal(self) -> DoesNotFit:
        """What is short at the least, by how much, and the nearest change that would fit."""
        plain, _ = self.least
        least = min(self.least, key=lambda each: max(each.taken.short(self.budgets).values()))
        tier = max(short := least.taken.short(self.budgets), key=lambda name: short[name])
        saves = f" ({least.save_nbytes:,} of them for checkpoints)" if tier == "host" and least.save_nbytes else ""
        disk = ", even with state on the disk" if tier == "host" and least.nbytes["disk"] else ""
        return DoesNotFit(
            f"needs {least.nbytes[tier]:,} bytes of {tier} memory at the least{saves}{disk}, "
            f"{short[tier]:,} more than {self.question.limit(tier)}",
            where=f"plan for {self.question.model.name} on {self.question.hardware.name}",
            fix=self._nearest(least.taken, plain.nbytes.get("device", 0) - least.nbytes.get("device", 0)),
        )

    def _nearest(self, least: Estimate, freed: int) -> str:
        """The first of a few changes of the question, least painful first, that makes it fit.

        freed: bytes of device memory that a ring takes less.
        """
        for words, other in changes(self.question):
            search = Search(other)
            short = search.price(*search.leanest()).short(search.budgets)
            may_fit = all(number <= (freed if tier == "device" else 0) for tier, number in short.items())
            if may_fit and any(each.taken.fits(search.budgets) for each in search.least):
                return f"{words} would fit"
        needed = [f"{least.nbytes[tier]:,} bytes of {tier} memory" for tier in self.budgets if least.nbytes[tier]]
        return f"it takes {', '.join(needed)}, or a smaller model"

    def _micro_batches(self) -> list[int]:
        micro_batch = self.question.sequences
        if self._micro_batch is not None:
            return [min(self._micro_batch, micro_batch)]
        return sizes(micro_batch)

    def _activations(self, choice: Choice) -> Iterator[Choice]:
        if self._keeps_as_told:
            yield choice
            return
        yield choice.change(activations="recompute", activations_by_layer=())
        yield choice.change(activations="keep", activations_by_layer=())

    @property
    def _keeps_as_told(self) -> bool:
        """Whether the user has decided what is left of each forward."""
        return not {"activations", "activations_by_layer"}.isdisjoint(self._overrides)

    def _offloading(self, candidates: list[Candidate]) -> list[Candidate]:
        """For sizes that do not fit in any other way: token-wise parts run in chunks, inputs of layers wait in host
        memory, or both; and where that does not fit the device, the smallest in rounds of one micro-batch: the others
        then have nothing there."""
        offloads = not self._keeps_as_told and not self.question.hardware.shares_memory
        chunks = "mlp_chunk_tokens" not in self._overrides
        fit = {micro_batch for choice, micro_batch in candidates if self._fits(choice, micro_batch)}
        policies = {micro_batch: choice for choice, micro_batch in candidates if micro_batch not in fit}
        found: list[Candidate] = []
        for micro_batch, choice in policies.items():
            plain = choice if self._keeps_as_told else choice.change(activations="recompute")
            away = plain.change(activations_by_layer=OFFLOAD)
            found += [(plain.change(mlp_chunk_tokens=MLP_CHUNK_TOKENS), micro_batch)] if chunks else []
            found += [(away, micro_batch)] if offloads else []
            found += [(away.change(mlp_chunk_tokens=MLP_CHUNK_TOKENS), micro_batch)] if chunks and offloads else []
        smallest = min(self._micro_batches())
        several = self._may_have_rounds and 2 * smallest <= self.question.sequences
        small = [each for each in found if several and each[1] == smallest]
        large = [each for each in small if self.price(*each).short(self.budgets).get("device", 0) > 0]
        return found + [(choice.change(micro_batches_per_round=1), smallest) for choice, _ in large]

    def _moves(self, choice: Choice, micro_batch: int) -> Iterator[Candidate]:
        """Candidates that differ in one knob, or in the size of a micro-batch."""
        yield from self._knobs(choice, micro_batch)
        there = self._micro_batches()
        place = there.index(micro_batch)
        for near in (place - 1, place + 1):
            if 0 <= near < len(there):
                for other in self._activations(choice):
                    leanest = self._lean.change(activations=other.policy.activations), there[near]
                    if leanest not in self._known or self._fits(*leanest):  # else this one cannot
                        yield other, there[near]

    def _knobs(self, choice: Choice, micro_batch: int, costs: Costs | None = None) -> Iterator[Candidate]:
        """Candidates that differ in a knob from the best so far: on in both directions for as long as that gains."""
        best = choice, micro_batch
        for knob, values in KNOBS.items():
            if knob in self._overrides:
                continue
            now = choice.get(knob)
            least = self._largest // MOST_SHARDS if knob == "shard_nbytes" else 0
            for ahead in ([v for v in values if v > now], [v for v in reversed(values) if least <= v < now]):
                for value in ahead:
                    other = best[0].change(**{knob: value}), micro_batch
                    yield other
                    if self._least([best, other], costs) != other:
                        break
                    best = other

    def _least(self, candidates: Iterable[Candidate], costs: Costs | None = None) -> Candidate | None:
        """The first that costs least, of those that fit."""
        best: Candidate | None = None
        best_cost: Cost = ()
        for candidate in candidates:
            cost = (costs or self._costs)(*candidate)
            if cost is not None and (best is None or cost < best_cost):
                best, best_cost = candidate, cost
        return best

    def _costs(self, choice: Choice, micro_batch: int) -> Cost | None:
        """Seconds, and memory."""
        found = self.price(choice, micro_batch)
        return (_rounded(found.seconds), sum(found.nbytes.values())) if found.fits(self.budgets) else None

    def _fits(self, choice: Choice, micro_batch: int) -> bool:
        return self.price(choice, micro_batch).fits(self.budgets)

    def price(self, choice: Choice, micro_batch: int) -> Estimate:
        """With its state where there is room (`_placed`)."""
        key = choice, micro_batch
        if key not in self._known:
            found = self._plain(choice, micro_batch)
            placed = self._placed(choice, found)
            self._known[key] = found if placed is choice else with_placements(self.question, placed, micro_batch, found)
        return self._known[key]

    # Placements -----------------------------------------------------------------------------------------------------

    def _plain(self, choice: Choice, micro_batch: int) -> Estimate:
        """With all state in host memory."""
        key = choice, micro_batch
        if key not in self._estimates:
            self._estimates[key] = estimate(self.question, choice, micro_batch)
        found, more = self._estimates[key], self._estimate_corrections.get(_kind(choice, micro_batch))
        return replace(found, nbytes={tier: n + more[tier] for tier, n in found.nbytes.items()}) if more else found

    def _correct_estimates(self, candidate: Candidate, plan: Plan) -> None:
        """Put right what is estimated for all candidates of this one's kind, by what it takes replayed whole."""
        off = {tier: plan.nbytes[tier] - nbytes for tier, nbytes in self.price(*candidate).nbytes.items()}
        kind = _kind(*candidate)
        before: Mapping[str, int] = self._estimate_corrections.get(kind, {})
        self._estimate_corrections[kind] = {tier: nbytes + before.get(tier, 0) for tier, nbytes in off.items()}
        for known in (self._known, self._placed_estimates, self._mixtures, self._ladders):
            known.clear()

    def outcome(self, choice: Choice, micro_batch: int) -> Estimate:
        """What the candidate takes with the most promising placements, or what layers keep."""
        found = [self.price(choice, micro_batch)]
        if filled := self._best_filled(choice, micro_batch):
            *rungs, whole = self._ladder(*filled)
            found += [each[0] for each in rungs if each is not None]
            found += [estimate(self.question, whole[1], micro_batch)] if whole else []
        found += [option.mixtures.promised(option.counts) for option in self._options(choice, micro_batch)[:1]]
        best = min(found, key=lambda each: each.seconds)
        alike = self._all_alike(best.busy.get("compute", 0.0), best.seconds)
        return min([best, *(other.outcome(*there) for other, there in alike)], key=lambda each: each.seconds)

    def usual(self, choice: Choice, micro_batch: int) -> list[Candidate]:
        """The candidate with as little on the disk as must be; then with more buffers to read ahead into."""
        found = self._plain(choice, micro_batch)
        usual = self._placed(choice, found)
        placements, by_unit = usual.policy.placements, choice.policy.shares_memory
        is_staged = any(each.uses_drive if by_unit else each.uses_disk for each in placements)
        if not is_staged or not {"placements", "disk_staging_slots"}.isdisjoint(self._overrides):
            return [(usual, micro_batch)]
        others = (self._placed(choice.change(disk_staging_slots=slots), found) for slots in STAGE_SLOTS)
        return [(usual, micro_batch), *((other, micro_batch) for other in others)]

    def _filled(self, choice: Choice, micro_batch: int) -> list[Plan]:
        """Replays with spare device memory in use, from the most promising on for as long as that gains; and with all
        state there, which is a jump: the ends go too, and estimates from layers in host memory are too high. Where the
        most promising do not fit, what they take beyond their estimates is learnt, for up to `FITS` times.
        """
        plans: list[Plan] = []
        for _ in range(FITS):
            filled = self._best_filled(choice, micro_batch)
            if filled is None:
                break
            rungs, tried = self._ladder(*filled), list[tuple[Estimate, Plan]]()
            seconds, start = min((each[0].seconds, whole) for whole, each in enumerate(rungs) if each)
            gains = seconds < WORTH_A_REPLAY * self.price(choice, micro_batch).seconds
            best = inf
            for way in (rungs[start:], rungs[:start][::-1]) if gains else ():
                for rung in way:
                    if rung is None:
                        break
                    tried.append((rung[0], examine(self.question, rung[1], micro_batch)))
                    now = tried[-1][1].seconds if tried[-1][1].taken.fits(self.budgets) else inf
                    if now > best:
                        break
                    best = now
            whole = rungs[-1]
            if whole and all(plan.choice != whole[1] for _, plan in tried):
                plans.append(examine(self.question, whole[1], micro_batch))
            plans += [plan for _, plan in tried]
            if not tried or tried[0][1].taken.fits(self.budgets):
                break
            promised, plan = tried[0]
            self._resident_excess += max(1, plan.nbytes["device"] - promised.nbytes["device"])
            self._ladders.clear()
        return plans

    def _mixed(self, choice: Choice, micro_batch: int, usual: float) -> list[Plan]:
        """Replays of the mixtures of what layers keep that promise most, and more than `usual` seconds of a replay."""
        plans: list[Plan] = []
        options = self._options(choice, micro_batch)
        tried = options[:TRIES] + [option for option in options[TRIES:] if not option.offloads_outputs][:TRIES]
        for option in tried:
            best = min(plans, key=lambda plan: plan.seconds, default=None)
            waits = best is None or best.timeline.busy_seconds("compute") < COMPUTES * best.seconds
            if option.seconds < (NEARLY if waits else 1.0) * min(usual, best.seconds if best else inf):
                found = fitted(self.question, self.budgets, option)
                plans += [plan for plan in found if plan.taken.fits(self.budgets)]
        if plans:
            quickest = min(plans, key=lambda plan: plan.seconds)
            start = quickest.choice, quickest.micro_batch
            polished = self._climb([start], self._knobs)
            plans += [examine(self.question, *polished)] if polished and polished != start else []
        return plans

    def _options(self, choice: Choice, micro_batch: int) -> list[Option]:
        """The mixtures of each base that promise most, with outputs in host memory and without, the quickest first. Of
        several that promise the same and differ only in where state is, there is one."""
        options: list[Option] = []
        for base, size in () if self._keeps_as_told else self._bases(choice, micro_batch):
            found = self._placed_estimates.get((base, size)) or self.price(base, size)
            placed = base if (base, size) in self._placed_estimates else self._placed(base, self._plain(base, size))
            if (placed, size) not in self._mixtures:
                self._mixtures[placed, size] = Mixtures(self.question, placed, coarse(self.question, size), found)
            mixtures = self._mixtures[placed, size]
            best = [*mixtures.best(self.budgets, 1), *mixtures.best(self.budgets, 1, outputs_stay=True)]
            options += [Option(each, size, of, mixtures, placed) for each, of in dict.fromkeys(best)]
        options.sort(key=lambda each: (_rounded(each.seconds), each.micro_batch, each.counts))
        alike: dict[Hashable, Option] = {}
        for each in options:
            choice = each.choice.change(placements=())
            alike.setdefault((f"{each.seconds:.4g}", each.micro_batch, each.counts, choice), each)
        return list(alike.values())

    def _alike(self, best: Plan) -> list[Plan]:
        """Where compute waits, replays of the best plans by which all layers keep the same, whatever they promise."""
        plans: list[Plan] = []
        for other, found in self._all_alike(best.timeline.busy_seconds("compute"), best.seconds):
            plans += [*(examine(self.question, *each) for each in other.usual(*found)), *other._filled(*found)]
        return plans

    def _all_alike(self, busy: float, seconds: float) -> Iterator[tuple[Search, Candidate]]:
        """Where compute waits, the best by which all layers keep the same, and the search that knows it."""
        waits, stores = busy < COMPUTES * seconds, self.question.model.units[1].profile.outputs.chosen_nbytes > 0
        begin = 2 if self.question.hardware.shares_memory else 0
        for kept in ALIKE[begin : None if stores else 2] if waits and not self._keeps_as_told else ():
            rows: dict[str, Any] = {"activations_by_layer": kept}
            if kept == INPUT:  # the same under a name by which it is priced already
                rows = {"activations": "recompute", "activations_by_layer": ()}
            told = {"micro_batches_per_round": 0, **self.question.overrides, **rows}
            asked = replace(self.question, overrides=told)
            other = self._alikes.setdefault(kept, Search(asked))
            other.within(self.budgets, files=self._files)
            if found := other.best():
                yield other, found

    def _bases(self, choice: Choice, micro_batch: int) -> Iterator[Candidate]:
        """Policies that keep inputs, to be mixed from: as this one and lean, for sizes around it; and with state placed
        otherwise."""
        plain: dict[str, Any] = {"activations": "recompute", "activations_by_layer": ()}
        slots = {} if "offload_slots" in self._overrides else {"offload_slots": OFFLOAD_SLOTS}
        like, lean = choice.change(**plain, **slots), self._lean.change(**plain)
        near = [size for size in self._micro_batches() if micro_batch / NEAR <= size <= NEAR * micro_batch]
        bases = [(base, size) for size in near for base in (like, lean)]
        chunks = KNOBS["loss_chunk_tokens"] if "loss_chunk_tokens" not in self._overrides else ()
        bases += self._in_rounds(like)
        yield from dict.fromkeys([*bases, *((like.change(loss_chunk_tokens=few), micro_batch) for few in chunks)])
        for size in near:
            for placed, found in self._bases_placed(like, size):
                self._placed_estimates.setdefault((placed, size), with_placements(self.question, placed, size, found))
                yield placed, size

    def _bases_placed(self, like: Choice, micro_batch: int) -> Iterator[tuple[Choice, Estimate]]:
        """A policy with more state on the disk than must be there, and with some on the device; with its estimate
        without placements."""
        found, model = self._plain(like, micro_batch), self.question.model
        steps = 0 if "placements" in self._overrides else PARTS
        placed = self._placed(like, found)
        homes = Homes(self.budgets["disk"] > 0, self._files)
        state = state_numerics(placed.numerics), state_policy(placed.policy)
        more = with_more_on_disk(model, *state, steps, saves=self.question.saves, homes=homes)
        yield from ((placed.change(placements=each.placements), found) for each in more)
        if self._gains_by_placement(like, micro_batch):
            room = self.budgets["device"] - found.nbytes["device"]
            for whole, kept in product(range(0, self._most_whole + 1, COARSE), range(0, PARTS + 1, COARSE)):
                if (whole or kept) and self._resident_nbytes(whole, kept) < room:
                    yield self._placed(like.change(placements=residents(model, whole, kept)), found), found

    @property
    def _may_have_rounds(self) -> bool:
        shared = self.question.hardware.shares_memory
        return not (self.question.model.tied or shared or "micro_batches_per_round" in self._overrides)

    def _in_rounds(self, choice: Choice) -> Iterator[Candidate]:
        """The policy with the step in rounds, of which each leaves memory for what layers keep."""
        for size, micro_batches in product(self._micro_batches(), ROUND_SIZES) if self._may_have_rounds else ():
            if size * micro_batches <= self.question.sequences // 2:
                yield choice.change(micro_batches_per_round=micro_batches), size

    def _gains_by_placement(self, choice: Choice, micro_batch: int) -> bool:
        """Whether there is a choice, and anything but compute that takes as long as the step."""
        usual = self.price(choice, micro_batch)
        waits = usual.busy.get("compute", 0.0) < WORTH_A_REPLAY * usual.seconds
        return waits and self._may_keep_state and "placements" not in self._overrides

    @property
    def _may_keep_state(self) -> bool:
        """Whether the device may have weights, or all state of units, between steps."""
        return not (self.question.hardware.shares_memory or self.question.hardware.slots_in_host)

    @property
    def _most_whole(self) -> int:
        """Sixteenths of the layers whose whole state may be there: none where ranks share weights."""
        return 0 if self.question.model.ranks > 1 and self._overrides.get("delivery") == "shared" else PARTS

    def _best_filled(self, choice: Choice, micro_batch: int) -> Candidate | None:
        """The policy that promises most with spare device memory in use: from this one and leaner ones, a knob at a
        time. What slots and chunks give up pays for more that is there."""
        if not self._gains_by_placement(choice, micro_batch):
            return None
        starts = dict.fromkeys(
            [choice, *self._activations(self._lean.change(disk_staging_slots=choice.policy.disk_staging_slots))]
        )
        for rows_of_all in () if self._keeps_as_told else (ATTENTION, OFFLOAD):
            starts[choice.change(activations="recompute", activations_by_layer=rows_of_all)] = None
        knobs = partial(self._knobs, costs=self._filled_costs)
        return self._climb([(start, micro_batch) for start in starts], knobs, self._filled_costs)

    def _filled_costs(self, choice: Choice, micro_batch: int) -> Cost | None:
        """Seconds with as much state on the device as promises most; without, since what the disk takes hides from an
        estimate what else there is to do; and memory."""
        rungs = [each[0] for each in self._ladder(choice, micro_batch) if each]
        if not rungs:
            return None
        best = min(rungs, key=lambda each: each.seconds)
        return _rounded(best.seconds), _rounded(self._plain(choice, micro_batch).seconds), sum(best.nbytes.values())

    def _ladder(self, choice: Choice, micro_batch: int) -> list[Rung]:
        """By how many parts of the layers are on the device: what that promises."""
        key = choice, micro_batch
        if key not in self._ladders:
            parts = range(self._most_whole + 1)
            self._ladders[key] = [self._most_kept(choice, micro_batch, whole) for whole in parts]
        return self._ladders[key]

    def _most_kept(self, choice: Choice, micro_batch: int, whole: int) -> Rung:
        """With so many parts of the layers on the device, the most weights of the others that fit beside them."""
        found = self._plain(choice, micro_batch)
        spare = self.budgets["device"] - found.nbytes["device"] - self._resident_excess
        low, high = int(whole == 0) - 1, PARTS  # the most that is known to fit, and that may
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._resident_nbytes(whole, middle) <= spare else (low, middle - 1)
        if low < int(whole == 0):
            return None
        placed = self._placed(choice.change(placements=residents(self.question.model, whole, low)), found)
        if (placed, micro_batch) not in self._placed_estimates:
            self._placed_estimates[placed, micro_batch] = with_placements(self.question, placed, micro_batch, found)
        taken = self._placed_estimates[placed, micro_batch]
        return (taken, placed) if taken.fits(self.budgets) else None

    def _most_resident(self, found: Estimate) -> int:
        """Sixteenths of the layers that fit the device beside what a choice takes with all state in host memory."""
        spare = self.budgets["device"] - found.nbytes["device"]
        parts = range(self._most_whole + 1)
        return max(0, bisect_right(parts, spare, key=lambda whole: self._resident_nbytes(whole, 0)) - 1)

    def _resident_nbytes(self, whole: int, kept: int) -> int:
        """Device memory that so many sixteenths take."""
        if (whole, kept) not in self._resident:
            placed = self._start.change(placements=residents(self.question.model, whole, kept))
            found = state_nbytes(self.question.model, placed.numerics, placed.policy)
            self._resident[whole, kept] = found["device"]
        return self._resident[whole, kept]

    def _placed(self, choice: Choice, found: Estimate) -> Choice:
        """The choice with its state where there is room (`place_state`).

        found: of the choice with all state in host memory.
        """
        if "placements" in self._overrides:
            return choice
        model = self.question.model
        saves = self.question.saves
        numerics, policy = state_numerics(choice.numerics), state_policy(choice.policy)
        beside = found.nbytes["host"] - host_nbytes(model, numerics, replace(policy, placements=()), saves)
        room = self.budgets["host"] - beside
        most = self._most_resident(found) if self._may_keep_state and not policy.placements else 0
        key = policy, room, self.budgets["disk"], most, self._files
        if key not in self._placements:
            disk = self.budgets["disk"]
            fitted = place_state(model, numerics, policy, room, disk, most, saves=saves, files=self._files)
            self._placements[key] = fitted.placements
        return choice if self._placements[key] == policy.placements else choice.change(placements=self._placements[key])


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _with_fewer_writes(plans: list[Plan]) -> Plan | None:
    """The quickest; or one that is nearly as quick and writes much less to the disk, which wears out."""
    quickest = min(plans, key=lambda plan: _rounded(plan.seconds), default=None)
    if quickest is None:
        return None
    most = SLOWER_FOR_FEWER_WRITES * quickest.seconds, FEWER_WRITES * quickest.written_nbytes
    spared = [plan for plan in plans if plan.seconds <= most[0] and plan.written_nbytes < most[1]]
    return min(spared, key=lambda plan: plan.written_nbytes, default=quickest)


def _kind(choice: Choice, micro_batch: int) -> Hashable:
    """What decides by how much an estimate from a few layers and micro-batches is off."""
    return (
        micro_batch,
        choice.policy.micro_batches_per_round,
        (choice.policy.activations, *choice.policy.activations_by_layer),
    )


def find_plan(question: Question) -> Plan:
    """The quickest plan that fits. Raises `DoesNotFit` naming what is short, by how much, and the nearest that fits."""
    with undisturbed():
        return by_delivery(question, lambda asked: within_lock_limit(asked, lambda each: _quickest(Search(each))))


def _quickest(search: Search) -> Plan:
    question, budgets = search.question, search.question.budgets()
    if plan := search.answer():
        return streaming_updates(with_ring(waiting_for_shards(plan), search.promised, search.answer))
    plain, ring = search.least
    freed = plain.nbytes.get("device", 0) - ring.nbytes.get("device", 0)
    plan = only_by_ring(question, search.leanest(), freed, search.answer) if ring.taken.fits(budgets) else None
    if plan is None:
        search.within(budgets)
        raise search.refusal()
    return plan


def quicker_plan(question: Question, seconds: float) -> Plan | None:
    """The quickest plan that fits, if there is one and it promises to take less than so many seconds."""
    search = Search(question)
    with undisturbed():
        promised = _promised_within(search, question.budgets()) if seconds < inf else None
        if seconds < inf and (promised is None or promised.seconds >= seconds):
            return None
        with suppress(DoesNotFit):
            return within_lock_limit(question, lambda asked: _quickest(search if asked is question else Search(asked)))
    return None


def fits(question: Question) -> bool:
    """Whether any policy should fit, by estimates: one with as little memory as possible, or that by a ring."""
    with undisturbed():
        search = Search(question)
        return search.has_lean() or _leanest(search, search.budgets) is not None


def survey(question: Question, budgets: Iterable[Mapping[str, int]]) -> list[Estimate | None]:
    """What the quickest plan within each of several budgets (tier -> bytes) takes; `None` where nothing fits. Compute
    waits for units, and a ring is tried only where nothing else fits. Prices with all state in host memory are found
    once for all budgets; no winner is replayed whole."""
    search = Search(question)
    found: list[Estimate | None] = []
    with undisturbed():
        for each in budgets:
            found.append(_promised_within(search, {**question.budgets(), **each}))
    return found


def _promised_within(search: Search, budgets: Mapping[str, int]) -> Estimate | None:
    return search.promised(budgets) or _leanest(search, budgets)


def _leanest(search: Search, budgets: Mapping[str, int]) -> Estimate | None:
    """What the leanest choice takes by a ring, if that fits."""
    choice, micro_batch = search.usual(*search.leanest())[0]
    taken = estimate(search.question, leaner(search.question, choice), micro_batch)
    return taken if taken.fits(budgets) else None
