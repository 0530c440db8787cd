"""Searches for the fastest policy that fits: builds candidate schedules and replays them at the machine's prices.

The search is a hill climb. It estimates every micro-batch size and activation plan, then changes one knob at a time
from the best of them until nothing improves. Where memory is short, it also starts from the leanest policy of each
size that could be faster. State that does not fit into host memory goes to the disk, and spare device memory holds
weights and state (`placement`). The most promising placements and every winner are replayed whole, which also decides
whether they fit. Nothing is random: the same question has the same answer.

Estimates of time and memory are made in `estimates`; what is decided after the search is in `refinements`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from math import inf
from typing import Any, TypeVar

from megatrain.errors import DoesNotFit
from megatrain.plan.activation_plan import MixtureOption, Mixtures
from megatrain.plan.advice import changes, provide, refusal
from megatrain.plan.estimates import (
    coarse,
    error_key,
    estimate,
    examine,
    examine_rounds,
    fitted,
    gc_paused,
    sizes,
    with_placements,
)
from megatrain.plan.placement import (
    PARTS,
    SpillTargets,
    host_nbytes,
    place_state,
    resident_placements,
    state_numerics,
    state_policy,
    with_less_on_disk,
    with_more_on_disk,
)
from megatrain.plan.question import Candidate, Choice, Estimate, Plan, Question
from megatrain.plan.ranks import by_delivery
from megatrain.plan.refinements import (
    only_with_read_ahead,
    preferred,
    streaming_updates,
    waiting_for_shards,
    with_leanest_read_ahead,
    with_read_ahead,
    within_lock_limit,
)
from megatrain.plan.search_space import (
    ATTENTION,
    COMPUTE_BOUND,
    DISK_STAGING_SLOTS,
    FIT_ATTEMPTS,
    INPUT,
    KNOBS,
    LAST_RESORT_FIELDS,
    LEAN,
    MIXTURE_REPLAYS,
    MLP_CHUNK_TOKENS,
    MOST_CORRECTIONS,
    MOST_SHARDS,
    NEAR_SIZES,
    NEARLY_AS_FAST,
    OFFLOAD,
    OFFLOAD_SLOTS,
    PLACEMENT_STEP,
    ROUND_SIZES,
    SLOWER_FOR_FEWER_WRITES,
    UNIFORM,
    WORTH_A_CLIMB,
    WORTH_A_REPLAY,
    WORTH_A_ROUND,
)
from megatrain.schedule.passes.state_buffers import state_nbytes
from megatrain.spec import Numerics, Placement, Policy

Found = TypeVar("Found", Plan, Estimate)

Cost = tuple[float, ...]
"""What candidates are compared by: seconds, then tie-breakers."""

CostFunction = Callable[[Choice, int], Cost | None]
"""(choice, micro-batch) -> cost of this candidate, `None` if it does not fit."""

Alternative = tuple[Estimate, Callable[[], list[Plan]]]
"""The estimate of an alternative, and a function that returns replays of it."""

PlacedEstimate = tuple[Estimate, Choice] | None
"""A choice with placements and its estimate; `None` if it does not fit."""


class Search:
    """A search for the fastest plan of one question. Caches all estimates."""

    def __init__(self, question: Question) -> None:
        self.question, self.budgets = question, question.budgets()
        self._prices: dict[Candidate, Estimate] = {}
        self._host_estimates: dict[Candidate, Estimate] = {}
        """With all state in host memory."""
        self._placed_estimates: dict[Candidate, Estimate] = {}
        self._estimate_corrections: dict[Hashable, dict[str, int]] = {}
        """Key of `error_key` -> bytes by tier that a replay took beyond the estimate."""
        self._mixtures: dict[Candidate, Mixtures] = {}
        self._narrower: dict[Hashable, Search] = {}
        self._placements: dict[tuple[Policy, int, int, int, bool], tuple[Placement, ...]] = {}
        self._resident_sizes: dict[tuple[int, int], int] = {}
        self._resident_excess = 0
        """Bytes of device memory that a step with state on the device took beyond its estimate."""
        self._resident_estimates: dict[Candidate, list[PlacedEstimate]] = {}
        self._starts_on_disk = False
        """Whether the best candidate, before mixtures, has state on the disk or in files."""
        self._files = True
        """Whether weights may be read from the model's files."""
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

    def set_budgets(self, budgets: dict[str, int], *, files: bool = True) -> None:
        """Search within these bytes by tier from now on. Keeps the estimates that do not depend on them.

        files: whether weights may be read from the model's files.
        """
        if (budgets, files) != (self.budgets, self._files):
            self._prices.clear()
            self._resident_estimates.clear()
            self._resident_excess = 0
        self.budgets, self._files = budgets, files

    def best_plan(self, budgets: Mapping[str, int] | None = None) -> Plan | None:
        """The fastest plan that fits these budgets (by default the question's), or `None` if nothing fits.

        A whole replay decides whether a candidate fits. If that contradicts its estimate, all similar estimates are
        corrected by the difference and the search is repeated, up to `MOST_CORRECTIONS` times.
        """
        return self._with_and_without_disk(dict(budgets or self.question.budgets()), self._best_plan)

    def _with_and_without_disk(self, budgets: dict[str, int], find: Callable[[], Found | None]) -> Found | None:
        """The fastest that `find` finds within these budgets. If it began with state on the disk, it also searches
        without a disk: a disk is slow, and what does not fit into host memory may fit on the device."""
        self.set_budgets(budgets)
        found = find()
        if found and self._starts_on_disk:
            self.set_budgets({**budgets, "disk": 0}, files=False)
            other = find() if self._fits(*self.leanest()) else None
            self.set_budgets(budgets)
            if other and other.seconds < SLOWER_FOR_FEWER_WRITES * found.seconds:
                found = other
        return found

    def _best_plan(self) -> Plan | None:
        fitting: list[Plan] = []
        for _ in range(MOST_CORRECTIONS):
            found = self._best_candidate_and_tier()
            candidate = found or self.leanest()
            plans = self._replays(self.placed_candidates(*candidate))
            fastest = min((plan.seconds for plan in self._fitting(plans)), default=inf)
            if on_device := self._all_on_device(*candidate, fastest):
                fitting += filter(None, [on_device.best_plan(self.budgets)])
            usual = min(plan.seconds for plan in [*fitting, *plans])
            plans += [*self._resident_plans(*candidate), *self._mixture_plans(*candidate, usual)] if found else []
            plans += self._uniform_plans([*fitting, *plans]) if found else []
            now = self._fitting(plans)
            fitting += now
            if bool(now) == bool(found):  # the replay agrees with the estimate
                break
            self._correct_estimates(candidate, plans[0])
        best = preferred(fitting)
        return best and replace(best, question=self.question)  # some are of searches with further overrides

    def _replays(self, candidates: Iterable[Candidate], known: Iterable[Plan] = ()) -> list[Plan]:
        """Replays of these candidates, without those whose busiest stream alone takes longer than what
        `preferred` would take instead: the fastest that fits, of these and the `known` plans."""
        plans: list[Plan] = []
        fastest = min((plan.seconds for plan in self._fitting(known)), default=inf)
        for each in candidates:
            least = max(estimate(self.question, *each).busy.values(), default=0.0)
            if least <= SLOWER_FOR_FEWER_WRITES * fastest:
                plans.append(examine_rounds(self.question, *each))
                fastest = min([fastest, *(plan.seconds for plan in self._fitting(plans[-1:]))])
        return plans

    def _fitting(self, plans: Iterable[Plan]) -> list[Plan]:
        return [plan for plan in plans if plan.taken.fits(self.budgets)]

    def _best_candidate_and_tier(self) -> Candidate | None:
        """`best_candidate`; also sets `_starts_on_disk`."""
        found = self.best_candidate()
        placed = self._place(found[0], self._host_estimate(*found)).policy.placements if found else ()
        self._starts_on_disk = any(placement.uses_drive for placement in placed)
        return found

    def best_candidate(self) -> Candidate | None:
        """The fastest candidate that fits by its estimate, or `None`.

        Where memory is short, the climb starts a second time from the leanest policy, and once more for every
        micro-batch size that would be faster with more memory. Fewer slots may pay for a larger micro-batch, and a
        smaller micro-batch for more slots; changing one knob at a time would not find that.
        """
        usual = self._every_size(self._start)
        if all(self._fits(*candidate) for candidate in usual):
            return self._climb(usual, self._moves)
        lean, rich = self._every_size(self._lean), self._every_size(self._rich)
        found = self._cheapest([*filter(None, (self._climb(starts, self._moves) for starts in (lean, usual)))])
        for start, bound in zip(lean, rich, strict=True):
            if found and self._fits(*start) and self.price(*bound).seconds < WORTH_A_CLIMB * self.price(*found).seconds:
                found = self._cheapest([found, *filter(None, [self._climb([start], self._knob_moves)])])
        for start in self._last_resorts(lean):
            fixed = {name: start[0].get(name) for name in LAST_RESORT_FIELDS}
            bound = self._rich.change(**fixed), start[1]
            if found and start[0].policy.micro_batches_per_round and self._may_have_rounds:
                continue  # `_mixture_bases` tries rounds
            if found is None or self.price(*bound).seconds < WORTH_A_CLIMB * self.price(*found).seconds:
                found = self._cheapest([*filter(None, [found, self._climb([start], self._knob_moves)])])
        return found

    def leanest(self) -> Candidate:
        """The candidate that exceeds the budgets least, of those with as little memory as possible.

        Any micro-batch size may be the leanest: smaller micro-batches need less memory each, fewer of them keep less
        for the backward, and a single one needs no float32 sum of gradients.
        """
        lean = self._every_size(self._lean)
        lean += self._last_resorts(lean)
        return min(lean, key=lambda each: max(self.price(*each).short(self.budgets).values()))

    def may_fit(self) -> bool:
        """Whether any lean candidate fits, so that the search will find something."""
        lean = self._every_size(self._lean)
        return any(self._fits(*each) for each in lean) or any(self._fits(*each) for each in self._last_resorts(lean))

    def _every_size(self, choice: Choice) -> list[Candidate]:
        return [(one, size) for size in self._micro_batch_sizes() for one in self._activation_plans(choice)]

    def _climb(
        self,
        starts: list[Candidate],
        moves: Callable[[Choice, int], Iterator[Candidate]],
        cost: CostFunction | None = None,
    ) -> Candidate | None:
        """Start at the cheapest of `starts` and take the best move, until a round of moves gains little."""
        best, cost = self._cheapest(starts, cost), cost or self._cost
        while best is not None:
            before, better = cost(*best), self._cheapest([best, *moves(*best)], cost)
            after = cost(*better) if better else None
            best = better
            if before is None or after is None or after[0] >= WORTH_A_ROUND * before[0]:
                return best
        return None

    def best_estimate(self, budgets: Mapping[str, int]) -> Estimate | None:
        """The estimate of the fastest candidate within these budgets, or `None` if nothing fits."""
        return self._with_and_without_disk(dict(budgets), self._best_estimate)

    def _best_estimate(self) -> Estimate | None:
        candidate = self._best_candidate_and_tier()
        return self._full_estimate(*candidate) if candidate else None

    @cached_property
    def leanest_plans(self) -> tuple[Plan, Plan]:
        """The leanest choice, with slots and with a read-ahead, replayed whole."""
        choice, micro_batch = self.placed_candidates(*self.leanest())[0]
        choices = choice, with_leanest_read_ahead(self.question, choice)
        slots, read_ahead = (examine_rounds(self.question, each, micro_batch) for each in choices)
        return slots, read_ahead

    def refusal(self) -> DoesNotFit:
        """The error that names the tier that is short, by how many bytes, and the nearest change that would fit."""
        slots, _ = self.leanest_plans
        least = min(self.leanest_plans, key=lambda each: max(each.taken.short(self.budgets).values()))
        freed = slots.nbytes.get("device", 0) - least.nbytes.get("device", 0)
        return refusal(least, self._nearest_change(least.taken, freed))

    def _nearest_change(self, least: Estimate, freed: int) -> str:
        """The first change of the question that makes it fit, least painful first, in words.

        freed: bytes of device memory that a read-ahead saves.
        """
        for words, other in changes(self.question):
            search = Search(other)
            short = search.price(*search.leanest()).short(search.budgets)
            may_fit = all(number <= (freed if tier == "device" else 0) for tier, number in short.items())
            if may_fit and any(each.taken.fits(search.budgets) for each in search.leanest_plans):
                return f"{words} would fit"
        return provide(self.question, least.nbytes)

    def _micro_batch_sizes(self) -> list[int]:
        sequences = self.question.sequences
        if self._micro_batch is not None:
            return [min(self._micro_batch, sequences)]
        return sizes(sequences)

    def _activation_plans(self, choice: Choice) -> Iterator[Choice]:
        if self._activations_fixed:
            yield choice
            return
        yield choice.change(activations="recompute", activations_by_layer=())
        yield choice.change(activations="keep", activations_by_layer=())

    @property
    def _activations_fixed(self) -> bool:
        """Whether the user has chosen the activation plan."""
        return not {"activations", "activations_by_layer"}.isdisjoint(self._overrides)

    def _last_resorts(self, candidates: list[Candidate]) -> list[Candidate]:
        """Leaner candidates for the micro-batch sizes of which none of these fits.

        They run token-wise parts in chunks, offload the inputs of layers to host memory, or both. If that does not fit
        on the device, the smallest size also runs in rounds of one micro-batch, so that nothing is kept of the others.
        """
        offloads = not self._activations_fixed and not self.question.hardware.shares_memory
        chunks = "mlp_chunk_tokens" not in self._overrides
        fit = {micro_batch for choice, micro_batch in candidates if self._fits(choice, micro_batch)}
        policies = {micro_batch: choice for choice, micro_batch in candidates if micro_batch not in fit}
        found: list[Candidate] = []
        for micro_batch, choice in policies.items():
            plain = choice if self._activations_fixed else choice.change(activations="recompute")
            offloaded = plain.change(activations_by_layer=OFFLOAD)
            found += [(plain.change(mlp_chunk_tokens=MLP_CHUNK_TOKENS), micro_batch)] if chunks else []
            found += [(offloaded, micro_batch)] if offloads else []
            both = [(offloaded.change(mlp_chunk_tokens=MLP_CHUNK_TOKENS), micro_batch)] if chunks and offloads else []
            found += both
        smallest = min(self._micro_batch_sizes())
        several = self._may_have_rounds and 2 * smallest <= self.question.sequences
        small = [each for each in found if several and each[1] == smallest]
        large = [each for each in small if self.price(*each).short(self.budgets).get("device", 0) > 0]
        return found + [(choice.change(micro_batches_per_round=1), smallest) for choice, _ in large]

    def _moves(self, choice: Choice, micro_batch: int) -> Iterator[Candidate]:
        """Candidates that differ in one knob, or have the next smaller or larger micro-batch."""
        yield from self._knob_moves(choice, micro_batch)
        usable = self._micro_batch_sizes()
        place = usable.index(micro_batch)
        for near in (place - 1, place + 1):
            if 0 <= near < len(usable):
                for other in self._activation_plans(choice):
                    leanest = self._lean.change(activations=other.policy.activations), usable[near]
                    if leanest not in self._prices or self._fits(*leanest):  # else `other` cannot fit
                        yield other, usable[near]

    def _knob_moves(self, choice: Choice, micro_batch: int, cost: CostFunction | None = None) -> Iterator[Candidate]:
        """Candidates that differ in one knob from the best so far. Each knob goes on in both directions for as long as
        that gains."""
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
                    if self._cheapest([best, other], cost) != other:
                        break
                    best = other

    def _cheapest(self, candidates: Iterable[Candidate], cost: CostFunction | None = None) -> Candidate | None:
        """The first of the cheapest candidates that fit."""
        best: Candidate | None = None
        lowest: Cost = ()
        for candidate in candidates:
            found = (cost or self._cost)(*candidate)
            if found is not None and (best is None or found < lowest):
                best, lowest = candidate, found
        return best

    def _cost(self, choice: Choice, micro_batch: int) -> Cost | None:
        """(seconds, bytes)"""
        found = self.price(choice, micro_batch)
        return (_rounded(found.seconds), sum(found.nbytes.values())) if found.fits(self.budgets) else None

    def _fits(self, choice: Choice, micro_batch: int) -> bool:
        return self.price(choice, micro_batch).fits(self.budgets)

    def price(self, choice: Choice, micro_batch: int) -> Estimate:
        """The estimate of this candidate with its state placed by `_place`."""
        key = choice, micro_batch
        if key not in self._prices:
            found = self._host_estimate(choice, micro_batch)
            placed = self._place(choice, found)
            if placed is not choice:
                found = with_placements(self.question, placed, micro_batch, found)
            self._prices[key] = found
        return self._prices[key]

    def _host_estimate(self, choice: Choice, micro_batch: int) -> Estimate:
        """With all state in host memory."""
        key = choice, micro_batch
        if key not in self._host_estimates:
            self._host_estimates[key] = estimate(self.question, choice, micro_batch)
        found = self._host_estimates[key]
        more = self._estimate_corrections.get(error_key(choice, micro_batch))
        return replace(found, nbytes={tier: n + more[tier] for tier, n in found.nbytes.items()}) if more else found

    def _correct_estimates(self, candidate: Candidate, plan: Plan) -> None:
        """Correct the bytes of all similar candidates by what this one took when it was replayed whole."""
        off = {tier: plan.nbytes[tier] - nbytes for tier, nbytes in self.price(*candidate).nbytes.items()}
        key = error_key(*candidate)
        before: Mapping[str, int] = self._estimate_corrections.get(key, {})
        self._estimate_corrections[key] = {tier: nbytes + before.get(tier, 0) for tier, nbytes in off.items()}
        for known in (self._prices, self._placed_estimates, self._mixtures, self._resident_estimates):
            known.clear()

    def _full_estimate(self, choice: Choice, micro_batch: int) -> Estimate:
        """The estimate of the candidate with the most promising placements or activation plan."""
        return min((found for found, _ in self.alternatives(choice, micro_batch)), key=lambda each: each.seconds)

    def alternatives(self, choice: Choice, micro_batch: int) -> list[Alternative]:
        """The candidate, and the same with other placements and activation plans that fit by their estimates."""
        estimates = [(self.price(choice, micro_batch), self._place(choice, self._host_estimate(choice, micro_batch)))]
        if best_resident := self._best_resident(choice, micro_batch):
            estimates += [each for each in self._by_resident_layers(*best_resident) if each]
        found: list[Alternative] = []
        for each, placed in estimates:
            found.append((each, partial(self._replays, [(placed, micro_batch)])))
        on_device = self._all_on_device(choice, micro_batch, estimates[0][0].seconds)
        if on_device and (promised := on_device.best_estimate(self.budgets)):
            found.append((promised, lambda: list(filter(None, [on_device.best_plan(self.budgets)]))))
        for option in self._mixture_options(choice, micro_batch):
            replays = partial(fitted, self.question, self.budgets, option)
            found.append((option.mixtures.estimate(option.counts), replays))
        best = min((each for each, _ in found), key=lambda each: each.seconds)
        for search, candidate in self._uniform_candidates(best.busy.get("compute", 0.0), best.seconds):
            found += search.alternatives(*candidate)
        return found

    # Activations ----------------------------------------------------------------------------------------------------

    def _mixture_plans(self, choice: Choice, micro_batch: int, usual: float) -> list[Plan]:
        """Replays of the most promising mixtures of what layers keep, if they may be faster than `usual` seconds."""
        plans: list[Plan] = []
        options = self._mixture_options(choice, micro_batch)
        others = [option for option in options[MIXTURE_REPLAYS:] if not option.offloads_outputs]
        for option in options[:MIXTURE_REPLAYS] + others[:MIXTURE_REPLAYS]:
            best = min(plans, key=lambda plan: plan.seconds, default=None)
            if option.seconds < NEARLY_AS_FAST * min(usual, best.seconds if best else inf):
                found = fitted(self.question, self.budgets, option)
                plans += self._fitting(found)
        if plans:
            fastest = min(plans, key=lambda plan: plan.seconds)
            start = fastest.choice, fastest.micro_batch
            polished = self._climb([start], self._knob_moves)
            plans += [examine_rounds(self.question, *polished)] if polished and polished != start else []
        return plans

    def _mixture_options(self, choice: Choice, micro_batch: int) -> list[MixtureOption]:
        """The most promising mixtures of each base, with offloaded outputs and without, the fastest first. Of options
        with equal estimates that differ only in placements, there is one."""
        options: list[MixtureOption] = []
        for base, size in () if self._activations_fixed else self._mixture_bases(choice, micro_batch):
            is_placed = (base, size) in self._placed_estimates
            found = self._placed_estimates[base, size] if is_placed else self.price(base, size)
            placed = base if is_placed else self._place(base, self._host_estimate(base, size))
            mixtures = self._mixtures_of(placed, size, found)
            best = [*mixtures.best(self.budgets, 1), *mixtures.best(self.budgets, 1, outputs_stay=True)]
            there = [MixtureOption(each, size, of, mixtures, placed) for each, of in dict.fromkeys(best)]
            options += [self._with_host_filled(each) for each in there]
        options.sort(key=lambda each: (_rounded(each.seconds), each.micro_batch, each.counts))
        distinct: dict[Hashable, MixtureOption] = {}
        for each in options:
            choice = each.choice.change(placements=())
            distinct.setdefault((f"{each.seconds:.4g}", each.micro_batch, each.counts, choice), each)
        return list(distinct.values())

    def _mixtures_of(self, placed: Choice, micro_batch: int, found: Estimate) -> Mixtures:
        key = placed, micro_batch
        if key not in self._mixtures:
            self._mixtures[key] = Mixtures(self.question, placed, coarse(self.question, micro_batch), found)
        return self._mixtures[key]

    def _with_host_filled(self, option: MixtureOption) -> MixtureOption:
        """The mixture with weights brought back from files into the host memory that it leaves, if that is faster. For
        state on the disk alone, the grid of `_mixture_bases` is fine enough."""
        choice, size = option.choice, option.micro_batch
        if "placements" in self._overrides or all(each.weights != "file" for each in choice.policy.placements):
            return option
        taken = option.mixtures.estimate(option.counts)
        if (left := self.budgets["host"] - taken.nbytes["host"]) <= 0:
            return option
        state = state_numerics(choice.numerics), state_policy(choice.policy)
        asked: dict[str, Any] = {"saves": self.question.saves, "targets": self._spill_targets}
        placed = choice.change(placements=with_less_on_disk(self.question.model, *state, left, **asked).placements)
        if placed == choice:
            return option
        base = self._host_estimate(choice.change(placements=()), size)
        mixtures = self._mixtures_of(placed, size, with_placements(self.question, placed, size, base))
        filled = MixtureOption(mixtures.estimate(option.counts).seconds, size, option.counts, mixtures, placed)
        return min(option, filled, key=lambda each: each.seconds)

    @property
    def _spill_targets(self) -> SpillTargets:
        return SpillTargets(self.budgets["disk"] > 0, self._files)

    def _mixture_bases(self, choice: Choice, micro_batch: int) -> Iterator[Candidate]:
        """The policies whose layers mixtures are applied to: all keep inputs. Like `choice` and lean, with similar
        micro-batch sizes; in rounds; with other loss chunks; and with other placements."""
        plain: dict[str, Any] = {"activations": "recompute", "activations_by_layer": ()}
        slots = {} if "offload_slots" in self._overrides else {"offload_slots": OFFLOAD_SLOTS}
        like, lean = choice.change(**plain, **slots), self._lean.change(**plain)
        low, high = micro_batch / NEAR_SIZES, NEAR_SIZES * micro_batch
        near = [size for size in self._micro_batch_sizes() if low <= size <= high]
        bases = [(base, size) for size in near for base in (like, lean)]
        chunks = KNOBS["loss_chunk_tokens"] if "loss_chunk_tokens" not in self._overrides else ()
        bases += self._in_rounds(like)
        yield from dict.fromkeys([*bases, *((like.change(loss_chunk_tokens=few), micro_batch) for few in chunks)])
        for size in near:
            for placed, found in self._placed_bases(like, size):
                self._placed_estimates.setdefault((placed, size), with_placements(self.question, placed, size, found))
                yield placed, size

    def _placed_bases(self, like: Choice, micro_batch: int) -> Iterator[tuple[Choice, Estimate]]:
        """`like` with more state on the disk than necessary, and with some on the device; each with the estimate for
        all state in host memory."""
        found, model = self._host_estimate(like, micro_batch), self.question.model
        steps = 0 if "placements" in self._overrides else PARTS
        placed = self._place(like, found)
        state = state_numerics(placed.numerics), state_policy(placed.policy)
        more = with_more_on_disk(model, *state, steps, saves=self.question.saves, targets=self._spill_targets)
        yield from ((placed.change(placements=each.placements), found) for each in more)
        if self._placement_may_gain(like, micro_batch):
            room = self.budgets["device"] - found.nbytes["device"]
            grid = product(range(0, self._most_layer_parts + 1, PLACEMENT_STEP), range(0, PARTS + 1, PLACEMENT_STEP))
            for layer_parts, weight_parts in grid:
                if (layer_parts or weight_parts) and self._resident_nbytes(layer_parts, weight_parts) < room:
                    placements = resident_placements(model, layer_parts, weight_parts)
                    yield self._place(like.change(placements=placements), found), found

    def _uniform_plans(self, known: list[Plan]) -> list[Plan]:
        """Where compute waits in the fastest of the `known` plans, replays of the best plans in which all layers keep
        the same."""
        best = min(known, key=lambda plan: plan.seconds)
        plans: list[Plan] = []
        for search, found in self._uniform_candidates(best.busy_seconds("compute"), best.seconds):
            plans += self._replays(search.placed_candidates(*found), [*known, *plans])
            plans += search._resident_plans(*found)
        return plans

    def _uniform_candidates(self, busy: float, seconds: float) -> Iterator[tuple[Search, Candidate]]:
        """Where compute waits, the best candidate for each activation plan of `UNIFORM`, with the search that found
        it.

        busy: seconds in which compute is busy, of a step of `seconds`.
        """
        waits = busy < COMPUTE_BOUND * seconds
        saves_outputs = self.question.model.units[1].profile.outputs.chosen_nbytes > 0
        first, last = 2 if self.question.hardware.shares_memory else 0, None if saves_outputs else 2
        for rows in UNIFORM[first:last] if waits and not self._activations_fixed else ():
            fields: dict[str, Any] = {"activations_by_layer": rows}
            if rows == INPUT:  # the same as this, of which estimates are cached
                fields = {"activations": "recompute", "activations_by_layer": ()}
            usual = {} if "micro_batches_per_round" in self._overrides else {"micro_batches_per_round": 0}
            search = self._with_overrides(**usual, **fields)
            if found := search.best_candidate():
                yield search, found

    @property
    def _may_have_rounds(self) -> bool:
        shared = self.question.hardware.shares_memory
        return not (self.question.model.tied or shared or "micro_batches_per_round" in self._overrides)

    def _in_rounds(self, choice: Choice) -> Iterator[Candidate]:
        """Candidates that run the step in rounds, each of which leaves more memory for activations."""
        for size, micro_batches in product(self._micro_batch_sizes(), ROUND_SIZES) if self._may_have_rounds else ():
            if size * micro_batches <= self.question.sequences // 2:
                yield choice.change(micro_batches_per_round=micro_batches), size

    # Placements -----------------------------------------------------------------------------------------------------

    def placed_candidates(self, choice: Choice, micro_batch: int) -> list[Candidate]:
        """The candidate with its state placed by `_place`, and if some is on the disk, also with more staging buffers,
        to read further ahead."""
        found = self._host_estimate(choice, micro_batch)
        usual = self._place(choice, found)
        placements, by_unit = usual.policy.placements, choice.policy.shares_memory
        is_staged = any(each.uses_drive if by_unit else each.uses_disk for each in placements)
        if not is_staged or not {"placements", "disk_staging_slots"}.isdisjoint(self._overrides):
            return [(usual, micro_batch)]
        others = (self._place(choice.change(disk_staging_slots=slots), found) for slots in DISK_STAGING_SLOTS)
        return [(usual, micro_batch), *((other, micro_batch) for other in others)]

    def _place(self, choice: Choice, found: Estimate) -> Choice:
        """The choice with its state where there is room (`place_state`).

        found: the estimate of the choice with all state in host memory.
        """
        if "placements" in self._overrides:
            return choice
        model = self.question.model
        saves = self.question.saves
        numerics, policy = state_numerics(choice.numerics), state_policy(choice.policy)
        beside = found.nbytes["host"] - host_nbytes(model, numerics, replace(policy, placements=()), saves)
        room = self.budgets["host"] - beside
        most = self._fitting_layer_parts(found) if self._device_may_hold_state and not policy.placements else 0
        key = policy, room, self.budgets["disk"], most, self._files
        if key not in self._placements:
            disk = self.budgets["disk"]
            fitted = place_state(model, numerics, policy, room, disk, most, saves=saves, files=self._files)
            self._placements[key] = fitted.placements
        return choice if self._placements[key] == policy.placements else choice.change(placements=self._placements[key])

    def _resident_plans(self, choice: Choice, micro_batch: int) -> list[Plan]:
        """Replays with state on the device where memory is spare.

        They start at the most promising number of resident layers and go on in both directions for as long as that
        gains. If the most promising does not fit, all estimates are corrected by what it took beyond its own, up to
        `FIT_ATTEMPTS` times.
        """
        plans: list[Plan] = []
        for _ in range(FIT_ATTEMPTS):
            best_resident = self._best_resident(choice, micro_batch)
            if best_resident is None:
                break
            estimates, tried = self._by_resident_layers(*best_resident), list[tuple[Estimate, Plan]]()
            seconds, start = min((each[0].seconds, parts) for parts, each in enumerate(estimates) if each)
            gains = seconds < WORTH_A_REPLAY * self.price(choice, micro_batch).seconds
            best = inf
            for direction in (estimates[start:], estimates[:start][::-1]) if gains else ():
                for each in direction:
                    if each is None:
                        break
                    tried.append((each[0], examine_rounds(self.question, each[1], micro_batch)))
                    now = tried[-1][1].seconds if tried[-1][1].taken.fits(self.budgets) else inf
                    if now > best:
                        break
                    best = now
            plans += [plan for _, plan in tried]
            if not tried or tried[0][1].taken.fits(self.budgets):
                break
            self._correct_resident_estimates(*tried[0])
        return plans

    def _correct_resident_estimates(self, estimated: Estimate, plan: Plan) -> None:
        """Correct all estimates with state on the device by what a plan takes beyond its own."""
        self._resident_excess += max(1, plan.nbytes["device"] - estimated.nbytes["device"])
        self._resident_estimates.clear()

    def _all_on_device(self, choice: Choice, micro_batch: int, seconds: float) -> Search | None:
        """A search with all state on the device, or `None` if that cannot fit or would hardly beat the candidate's
        `seconds`: it has as much to compute, and the updates, with less memory for activations.

        Estimates from layers in host memory are too high for it: prologue and epilogue are on the device, too. Its
        weight slots are not used, and shards make hardly a difference.
        """
        may_hold = self._device_may_hold_state and self._most_layer_parts and "placements" not in self._overrides
        if not may_hold or self._resident_nbytes(PARTS, 0) >= self.budgets["device"]:
            return None
        placed = choice.change(placements=resident_placements(self.question.model, PARTS, 0))
        found = with_placements(self.question, placed, micro_batch, self._host_estimate(choice, micro_batch))
        if found.busy["compute"] >= WORTH_A_CLIMB * seconds:
            return None
        fixed = {name: self._start.get(name) for name in ("weight_slots", "shard_nbytes")}
        return self._with_overrides(**fixed, placements=placed.policy.placements)

    def _with_overrides(self, **fields: Any) -> Search:
        """A search with further overrides, within the same budgets. Kept, with its estimates."""
        key = tuple(fields.items())
        if key not in self._narrower:
            question = replace(self.question, overrides={**self.question.overrides, **fields})
            self._narrower[key] = type(self)(question)
        self._narrower[key].set_budgets(self.budgets, files=self._files)
        return self._narrower[key]

    def _placement_may_gain(self, choice: Choice, micro_batch: int) -> bool:
        """Whether state may be placed on the device, and compute alone does not limit the step."""
        usual = self.price(choice, micro_batch)
        waits = usual.busy.get("compute", 0.0) < WORTH_A_REPLAY * usual.seconds
        return waits and self._device_may_hold_state and "placements" not in self._overrides

    @property
    def _device_may_hold_state(self) -> bool:
        """Whether weights, or the whole state of units, may stay on the device between steps."""
        return not self.question.hardware.computes_in_host_memory

    @property
    def _most_layer_parts(self) -> int:
        """Sixteenths of the layers whose whole state may be on the device: none where ranks share weights."""
        return 0 if self.question.model.ranks > 1 and self._overrides.get("delivery") == "shared" else PARTS

    def _best_resident(self, choice: Choice, micro_batch: int) -> Candidate | None:
        """The most promising policy with state on the device where memory is spare.

        Climbs from `choice` and leaner ones, since fewer slots and smaller chunks leave room for more state.
        """
        if not self._placement_may_gain(choice, micro_batch):
            return None
        lean = self._lean.change(disk_staging_slots=choice.policy.disk_staging_slots)
        starts = dict.fromkeys([choice, *self._activation_plans(lean)])
        for rows in () if self._activations_fixed else (ATTENTION, OFFLOAD):
            starts[choice.change(activations="recompute", activations_by_layer=rows)] = None
        moves = partial(self._knob_moves, cost=self._resident_cost)
        return self._climb([(start, micro_batch) for start in starts], moves, self._resident_cost)

    def _resident_cost(self, choice: Choice, micro_batch: int) -> Cost | None:
        """(seconds with the best amount of state on the device, seconds with all state in host memory, bytes)

        The second matters where the disk takes longest: other differences do not show in the first.
        """
        fitting = [each[0] for each in self._by_resident_layers(choice, micro_batch) if each]
        if not fitting:
            return None
        best = min(fitting, key=lambda each: each.seconds)
        in_host = self._host_estimate(choice, micro_batch)
        return _rounded(best.seconds), _rounded(in_host.seconds), sum(best.nbytes.values())

    def _by_resident_layers(self, choice: Choice, micro_batch: int) -> list[PlacedEstimate]:
        """For 0, 1, ... sixteenths of the layers on the device: `_with_resident_weights`."""
        key = choice, micro_batch
        if key not in self._resident_estimates:
            parts = range(self._most_layer_parts + 1)
            self._resident_estimates[key] = [self._with_resident_weights(choice, micro_batch, each) for each in parts]
        return self._resident_estimates[key]

    def _with_resident_weights(self, choice: Choice, micro_batch: int, layer_parts: int) -> PlacedEstimate:
        """With so many sixteenths of the layers on the device, and as many weights of the others as fit."""
        found = self._host_estimate(choice, micro_batch)
        spare = self.budgets["device"] - found.nbytes["device"] - self._resident_excess
        fewest = int(layer_parts == 0)
        low, high = fewest - 1, PARTS  # sixteenths that are known to fit, and that may fit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._resident_nbytes(layer_parts, middle) <= spare else (low, middle - 1)
        if low < fewest:
            return None
        placements = resident_placements(self.question.model, layer_parts, low)
        placed = self._place(choice.change(placements=placements), found)
        if (placed, micro_batch) not in self._placed_estimates:
            self._placed_estimates[placed, micro_batch] = with_placements(self.question, placed, micro_batch, found)
        taken = self._placed_estimates[placed, micro_batch]
        return (taken, placed) if taken.fits(self.budgets) else None

    def _fitting_layer_parts(self, found: Estimate) -> int:
        """Sixteenths of the layers that fit on the device in addition to the bytes of this estimate."""
        spare = self.budgets["device"] - found.nbytes["device"]
        parts = range(self._most_layer_parts + 1)
        return max(0, bisect_right(parts, spare, key=lambda each: self._resident_nbytes(each, 0)) - 1)

    def _resident_nbytes(self, layer_parts: int, weight_parts: int) -> int:
        """Device bytes of the state that `resident_placements` puts there."""
        key = layer_parts, weight_parts
        if key not in self._resident_sizes:
            placed = self._start.change(placements=resident_placements(self.question.model, *key))
            found = state_nbytes(self.question.model, placed.numerics, placed.policy)
            self._resident_sizes[key] = found["device"]
        return self._resident_sizes[key]


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def find_plan(question: Question) -> Plan:
    """The fastest plan that fits.

    Raises `DoesNotFit`, naming the tier that is short, by how many bytes, and the nearest question that fits.
    """
    with gc_paused():
        found = by_delivery(question, lambda asked: within_lock_limit(asked, lambda each: fastest(Search(each))))
        return examine(found.question, found.choice, found.micro_batch) if found.left_out else found


def fastest(search: Search, *, reads_ahead: bool = True) -> Plan:
    """The best plan of the search, with all refinements. Raises `DoesNotFit`.

    reads_ahead: whether a read-ahead is tried where something fits without.
    """
    question, budgets = search.question, search.question.budgets()
    if plan := search.best_plan():
        plan = waiting_for_shards(plan)
        ahead = with_read_ahead(plan, search.best_estimate, search.best_plan) if reads_ahead else plan
        plans = [plan] if ahead is plan else [ahead, plan]  # which of them streams updates better is known afterwards
        return min(map(streaming_updates, plans), key=lambda each: each.seconds)
    slots, read_ahead = search.leanest_plans
    freed = slots.nbytes.get("device", 0) - read_ahead.nbytes.get("device", 0)
    if read_ahead.taken.fits(budgets):
        plan = only_with_read_ahead(question, search.leanest(), freed, search.best_plan)
    if plan is None:
        search.set_budgets(budgets)
        raise search.refusal()
    return plan
