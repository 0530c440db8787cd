"""Choosing how to stream: candidates, each built and replayed at this machine's prices, and the quickest that fits.

A step is linear in the number of layers of each kind once the pipeline is filled, so candidates are replayed on
shallow versions of the model and extrapolated; only the winner is replayed whole, which also decides whether it fits.
The search goes through every micro-batch size and activation plan, then moves one knob at a time from the best of them
until nothing improves; where memory is short, from the leanest policy of each size that could be quicker too. It draws
nothing at random: the same question has the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isqrt, log2
from typing import Any

from megatrain.errors import DoesNotFit, PlanError
from megatrain.plan.advice import changes
from megatrain.plan.cost import Calibration, op_seconds, shape_of
from megatrain.schedule import Schedule, Timeline, build_step, replay
from megatrain.schedule.build import Pending
from megatrain.spec import Hardware, ModelSpec, Policy, Precision, Work

SHALLOW, MORE = 6, 2
"""Layers of the shallowest version that candidates are replayed on, and how many of one kind are added to price it."""

MOST_TOKENS = 1 << 26
"""Tokens per step beyond which nobody trains."""

MOST_MICRO_BATCHES, MOST_SHARDS = 4, 8
"""Ops that candidates are replayed with: of more micro-batches several are taken for one, smaller shards not tried."""

MOST_SIZES = 8
"""Of a micro-batch that are all tried; where there are more, about every power of two."""

RESERVE_NBYTES = 1 << 30
"""Memory of each tier that is left to the driver, to kernels, to fragmentation and to the process itself."""

LEAN: dict[str, Any] = {"weight_slots": 1, "grad_slots": 1, "loss_chunk_tokens": 64}
"""What takes least memory."""

WORTH_A_CLIMB = 0.99
"""Of the seconds of the best that was found; a size that would not be that much quicker is not looked at again."""

KNOBS: dict[str, tuple[Any, ...]] = {
    "weight_slots": (1, 2, 3, 4),
    "grad_slots": (1, 2, 3),
    "shard_nbytes": (16 << 20, 64 << 20, 256 << 20, 1 << 30),
    "loss_chunk_tokens": (64, 128, 256, 512, 1024, 2048, 4096),
}
"""What is tried one at a time, and which values."""


@dataclass(frozen=True)
class Question:
    """What a plan is wanted for.

    tokens_per_step: of all sequences of a step together. length: tokens of a sequence. clips: by the global norm.
    pinned: fields of `Policy`, and `micro_batch` (sequences), that the user has decided. Budgets are in bytes; `None`
    is what the machine has, less a reserve. Raises `PlanError` for tokens or pinned fields that cannot be.
    """

    model: ModelSpec
    hardware: Hardware
    tokens_per_step: int
    length: int
    precision: Precision = "bf16"
    clips: bool = True
    pinned: Mapping[str, Any] = field(default_factory=dict)
    device_budget_nbytes: int | None = None
    host_budget_nbytes: int | None = None
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.length <= self.tokens_per_step:
            what = f"{self.tokens_per_step:,} tokens per step of sequences of {self.length:,}"
            raise PlanError(what, where="tokens_per_step", fix="give at least one sequence's tokens")
        if self.tokens_per_step > MOST_TOKENS:
            what = f"{self.tokens_per_step:,} tokens per step are more than anyone trains with"
            raise PlanError(what, where="tokens_per_step", fix=f"give {MOST_TOKENS:,} or less")
        size = self.pinned.get("micro_batch", 1)
        if not isinstance(size, int) or size < 1:
            raise PlanError(f"{size!r} is no number of sequences", where="pinned.micro_batch", fix="give 1 or more")

    @property
    def rows(self) -> int:
        """Sequences of a step."""
        return -(-self.tokens_per_step // self.length)

    def budgets(self) -> dict[str, int]:
        """Tier -> bytes that a run may take. A device that shares memory has none of its own."""
        device, host = self.device_budget_nbytes, self.host_budget_nbytes
        if host is None:
            host = usable_nbytes(self.hardware.host_nbytes)
        if self.hardware.shares_memory:
            return {"host": host}
        if device is None:
            device = usable_nbytes(self.hardware.device_nbytes)
        return {"device": device, "host": host}


@dataclass(frozen=True)
class Estimate:
    """A candidate's price: seconds of a step in steady state, and peak bytes by tier."""

    seconds: float
    nbytes: Mapping[str, int]

    def fits(self, budgets: Mapping[str, int]) -> bool:
        return all(self.nbytes[tier] <= budget for tier, budget in budgets.items())

    def short(self, budgets: Mapping[str, int]) -> dict[str, int]:
        """Tier -> bytes that are missing; negative where some are left."""
        return {tier: self.nbytes[tier] - budget for tier, budget in budgets.items()}


@dataclass(frozen=True)
class Plan:
    """The answer: a policy and how a step is cut, with the replayed step and its peak memory by tier."""

    question: Question
    policy: Policy
    work: Work
    timeline: Timeline
    nbytes: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """Of a step in steady state."""
        return self.timeline.seconds

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch."""
        return self.work.tokens[0] // self.question.length

    @property
    def tokens_per_second(self) -> float:
        return sum(self.work.tokens) / self.seconds


def usable_nbytes(nbytes: int) -> int:
    """What a run may take of a tier of that size."""
    return nbytes - min(RESERVE_NBYTES, nbytes // 8)


def find_plan(question: Question) -> Plan:
    """The quickest plan that fits. Raises `DoesNotFit` naming what is short, by how much, and the nearest that fits."""
    return _Search(question).answer()


def examine(question: Question, policy: Policy, micro_batch: int) -> Plan:
    """The plan of this very policy, replayed whole, whether or not it fits or is the best."""
    return _examine(question, policy, cut(question, micro_batch))


def _examine(question: Question, policy: Policy, work: Work) -> Plan:
    return _replayed(question, policy, work, *_built(question.model, policy, work))


def _built(model: ModelSpec, policy: Policy, work: Work) -> tuple[Schedule, dict[str, int]]:
    """The step, and its peak bytes by tier of the schedule."""
    pending: Pending = "all" if policy.update == "next_forward" else "none"
    schedule = build_step(model, policy, work, pending)
    return schedule, {"device": schedule.peak_nbytes("device"), "host": schedule.peak_nbytes("host")}


_remembered = lru_cache(maxsize=256)(_built)
"""For shallow models: what changes between two questions is often the machine or a budget, and no schedule."""


def _replayed(question: Question, policy: Policy, work: Work, schedule: Schedule, peaks: dict[str, int]) -> Plan:
    price = op_seconds(question.model, policy, work, question.hardware, question.calibration)
    timeline = replay(schedule, price, one_processor=question.hardware.shares_memory)
    nbytes = {"host": sum(peaks.values())} if question.hardware.shares_memory else peaks
    return Plan(question, policy, work, timeline, nbytes)


def estimate(question: Question, policy: Policy, micro_batch: int) -> Estimate:
    """What `examine` would find, extrapolated from shallow versions of the model."""
    work = coarse(question, micro_batch)
    seconds, nbytes = 0.0, Counter[str]()
    for weight, model in shallow(question.model):
        plan = _replayed(replace(question, model=model), policy, work, *_remembered(model, policy, work))
        seconds += weight * plan.seconds
        for tier, count in plan.nbytes.items():
            nbytes[tier] += weight * count  # type: ignore[assignment]
    return Estimate(seconds, {tier: round(count) for tier, count in nbytes.items()})


def survey(question: Question, budgets: Iterable[Mapping[str, int]]) -> list[Estimate | None]:
    """What the quickest plan within each of several budgets (tier -> bytes) takes; `None` where nothing fits.

    Prices do not depend on budgets, so they are found once; no winner is replayed whole.
    """
    search = _Search(question)
    found: list[Estimate | None] = []
    for each in budgets:
        search.budgets = dict(each)
        candidate = search.best()
        found.append(None if candidate is None else search.price(*candidate))
    return found


def cut(question: Question, micro_batch: int) -> Work:
    """A step's sequences in micro-batches of `micro_batch`; the last may be smaller."""
    full, rest = divmod(question.rows, micro_batch)
    sizes = [micro_batch] * full + ([rest] if rest else [])
    return Work(tuple(size * question.length for size in sizes), question.length)


def coarse(question: Question, micro_batch: int) -> Work:
    """`cut` with a few micro-batches of the same size that each stand for several: the same total, what is left over
    included."""
    if question.rows <= micro_batch * MOST_MICRO_BATCHES:
        return cut(question, micro_batch)
    repeats = question.rows / micro_batch / MOST_MICRO_BATCHES
    return Work((micro_batch * question.length,) * MOST_MICRO_BATCHES, question.length, repeats)


@lru_cache(maxsize=16)
def shallow(model: ModelSpec) -> tuple[tuple[float, ModelSpec], ...]:
    """Models with few of its layers, and weights: the weighted sum of what they take is what the model takes.

    The first has some layers of each kind, each other one `MORE` of one kind. What is linear in the number of layers of
    each kind is exact; the largest of several such sums, as peak bytes are, is not always. Where they would have as
    many layers together as the model has, it is the model itself.
    """
    kinds: dict[object, list[int]] = {}
    for index in model.layers:
        kinds.setdefault(shape_of(model.units[index]), []).append(index)
    few = {kind: min(len(places), max(MORE, SHALLOW // len(kinds))) for kind, places in kinds.items()}
    base = _with_layers(model, kinds, few)
    weights: list[tuple[float, ModelSpec]] = []
    for kind, places in kinds.items():
        if added := min(MORE, len(places) - few[kind]):
            more = _with_layers(model, kinds, {**few, kind: few[kind] + added})
            weights.append(((len(places) - few[kind]) / added, more))
    if sum(len(each.layers) for each in (base, *(more for _, more in weights))) >= len(model.layers):
        return ((1.0, model),)
    return ((1.0 - sum(weight for weight, _ in weights), base), *weights)


def _with_layers(model: ModelSpec, kinds: Mapping[object, list[int]], counts: Mapping[object, int]) -> ModelSpec:
    """The model with so many layers of each kind, evenly spread over those of the kind."""
    chosen: list[int] = []
    for kind, places in kinds.items():
        last = max(1, counts[kind] - 1)
        chosen += [places[round(place * (len(places) - 1) / last)] for place in range(counts[kind])]
    return replace(model, units=(model.units[0], *(model.units[index] for index in sorted(chosen)), model.units[-1]))


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


Moves = Callable[[Policy, int], Iterator[tuple[Policy, int]]]
"""Candidates near one."""


class _Search:
    """One search: remembers what it has priced."""

    def __init__(self, question: Question) -> None:
        self.question, self.budgets = question, question.budgets()
        self._known: dict[tuple[Policy, int], Estimate] = {}
        pinned = dict(question.pinned)
        self._micro_batch: int | None = pinned.pop("micro_batch", None)
        self._pinned = pinned
        largest = max(unit.numel for unit in question.model.units)
        self._largest = largest * (2 if question.precision == "bf16" else 4)
        self._start = replace(
            Policy(
                precision=question.precision,
                shares_memory=question.hardware.shares_memory,
                update="next_forward" if question.clips else "during_backward",
                shard_nbytes=max(64 << 20, self._largest // MOST_SHARDS),
            ),
            **pinned,
        )
        most = {knob: values[-1] for knob, values in KNOBS.items() if knob != "shard_nbytes"}
        self._lean = replace(self._start, **LEAN | pinned)
        self._rich = replace(self._start, **most | pinned)

    def answer(self) -> Plan:
        """The quickest candidate that fits. Raises `DoesNotFit`.

        Whether a candidate fits is decided by replaying it whole; where that differs from the estimate, it is known
        from then on, and the search goes on.
        """
        while True:
            found = self.best()
            candidate = found or self.leanest()
            plan = examine(self.question, *candidate)
            exact = Estimate(plan.seconds, plan.nbytes)
            fits = exact.fits(self.budgets)
            if fits and found:
                return plan
            if not fits and not found:
                raise self._refusal(exact)
            self._known[candidate] = exact

    def best(self) -> tuple[Policy, int] | None:
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
            if found is None or not self._fits(*start):
                continue
            if self.price(*bound).seconds < WORTH_A_CLIMB * self.price(*found).seconds:
                found = self._least([found, *filter(None, [self._climb([start], self._knobs)])])
        return found

    def leanest(self) -> tuple[Policy, int]:
        """Of the policies with as little memory as possible, the one that is least short of the budgets.

        That is one with the smallest micro-batches, or with all sequences in one, whose gradients need no wide sum.
        """
        sizes = self._micro_batches()
        ends = [(policy, rows) for rows in sorted({sizes[0], sizes[-1]}) for policy in self._activations(self._lean)]
        return min(ends, key=lambda each: max(self.price(*each).short(self.budgets).values()))

    def _every_size(self, policy: Policy) -> list[tuple[Policy, int]]:
        return [(one, rows) for rows in self._micro_batches() for one in self._activations(policy)]

    def _climb(self, starts: list[tuple[Policy, int]], moves: Moves) -> tuple[Policy, int] | None:
        """From the best of these, the best move, until none is better."""
        best = self._least(starts)
        while best is not None:
            better = self._least([best, *moves(*best)])
            if better == best:
                return best
            best = better
        return None

    def _refusal(self, least: Estimate) -> DoesNotFit:
        """What is short, by how much, and the nearest change that would fit."""
        short = least.short(self.budgets)
        tier = max(short, key=lambda name: short[name])
        return DoesNotFit(
            f"needs {least.nbytes[tier]:,} bytes of {tier} memory at the least, {short[tier]:,} more than there are",
            where=f"plan for {self.question.model.name} on {self.question.hardware.name}",
            fix=self._nearest(least),
        )

    def _nearest(self, least: Estimate) -> str:
        """The first of a few changes of the question, least painful first, that makes it fit."""
        for words, other in changes(self.question):
            search = _Search(other)
            candidate = search.leanest()
            if search._fits(*candidate):
                plan = examine(other, *candidate)
                if Estimate(plan.seconds, plan.nbytes).fits(search.budgets):
                    return f"{words} would fit"
        needed = ", ".join(f"{least.nbytes[tier]:,} bytes of {tier} memory" for tier in self.budgets)
        return f"it takes {needed}, or a smaller model"

    def _micro_batches(self) -> list[int]:
        """The sizes that cut the step evenly, where there are many those near a power of two; or what is pinned."""
        rows = self.question.rows
        if self._micro_batch is not None:
            return [min(self._micro_batch, rows)]
        low = [size for size in range(1, isqrt(rows) + 1) if rows % size == 0]
        sizes = sorted({*low, *(rows // size for size in low)})
        if len(sizes) <= MOST_SIZES:
            return sizes
        wanted = {min(sizes, key=lambda size: (abs(log2(size / target)), size)) for target in _powers(rows)}
        return sorted(wanted)

    def _activations(self, policy: Policy) -> Iterator[Policy]:
        if "activations" in self._pinned:
            yield policy
            return
        yield replace(policy, activations="recompute")
        yield replace(policy, activations="keep")

    def _moves(self, policy: Policy, rows: int) -> Iterator[tuple[Policy, int]]:
        """Candidates that differ in one knob, or in the size of a micro-batch."""
        yield from self._knobs(policy, rows)
        sizes = self._micro_batches()
        place = sizes.index(rows)
        for near in (place - 1, place + 1):
            if 0 <= near < len(sizes):
                for other in self._activations(policy):
                    leanest = replace(self._lean, activations=other.activations), sizes[near]
                    if leanest not in self._known or self._fits(*leanest):  # else this one cannot
                        yield other, sizes[near]

    def _knobs(self, policy: Policy, rows: int) -> Iterator[tuple[Policy, int]]:
        for knob, values in KNOBS.items():
            if knob not in self._pinned:
                for value in values:
                    small = knob == "shard_nbytes" and self._largest > MOST_SHARDS * value
                    if value != getattr(policy, knob) and not small:
                        yield replace(policy, **{knob: value}), rows

    def _least(self, candidates: Any) -> tuple[Policy, int] | None:
        """The quickest that fits; of equally quick ones, the first that takes least memory."""
        best, best_cost = None, None
        for policy, rows in candidates:
            found = self.price(policy, rows)
            if found.fits(self.budgets):
                cost = (float(f"{found.seconds:.4g}"), sum(found.nbytes.values()))
                if best_cost is None or cost < best_cost:
                    best, best_cost = (policy, rows), cost
        return best

    def _fits(self, policy: Policy, rows: int) -> bool:
        return self.price(policy, rows).fits(self.budgets)

    def price(self, policy: Policy, rows: int) -> Estimate:
        key = policy, rows
        if key not in self._known:
            self._known[key] = estimate(self.question, policy, rows)
        return self._known[key]
