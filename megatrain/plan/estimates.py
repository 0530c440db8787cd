"""Estimates time and memory of a policy, by replaying the whole model or extrapolating from a few layers.

A step is linear in the number of layers of each kind once the pipeline is filled, so candidates are replayed on shallow
versions of the model, with few micro-batches and shards. Where some of the state is not in host memory, the time of
each stream is corrected by what that saves or adds to it; only a whole replay tells how well they then overlap.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil, gcd, inf, isqrt, lcm, log2

from megatrain.plan.activation_plan import Counts, Option, mixed, offloads_outputs, round_count, rows_of
from megatrain.plan.cost import DRAM, contention, op_seconds, placement_seconds, shape_of
from megatrain.plan.placement import ON_DEVICE, state_numerics, state_policy
from megatrain.plan.question import Choice, Estimate, Plan, PricedAlike, Question
from megatrain.plan.search_space import FITS, LATE, WORTH_A_REPLAY
from megatrain.schedule import Schedule, Timeline, build_step, nbytes_by_use, replay
from megatrain.schedule.build import with_loss_chunks
from megatrain.schedule.passes.state_buffers import Pending, save_nbytes, state_nbytes
from megatrain.schedule.replay import DISK_STREAMS, replay_priced
from megatrain.spec import ModelSpec, Numerics, Policy, Work
from megatrain.spec.contention import NO_CONTENTION
from megatrain.spec.layout import layout_of

SHALLOW, MORE = 6, 2
"""Layers of the shallowest version that candidates are replayed on, and how many of one kind are added to price it."""

MOST_SIZES = 8
"""Of a micro-batch that are all tried; where there are more, about every power of two."""

MOST_MICRO_BATCHES = 4
"""Ops that candidates are replayed with: of more micro-batches several are taken for one."""

USUAL, USUAL_NUMERICS = Policy(), Numerics()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without the collector of cycles, which would walk through every schedule again and again and find none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def examine(question: Question, choice: Choice, micro_batch: int) -> Plan:
    """The plan of this very policy, replayed whole, whether or not it fits or is the best."""
    return replace(_examined(question.priced_alike, choice, micro_batch), question=question)


@lru_cache(maxsize=32)
def _examined(alike: PricedAlike, choice: Choice, micro_batch: int) -> Plan:
    question = alike.question
    work = cut(question, micro_batch)
    return _replayed(question, choice, work, StepPrices(question, choice, work), *_built(question.model, choice, work))


def fitted(question: Question, budgets: Mapping[str, int], option: Option) -> list[Plan]:
    """A mixture replayed, and then the best one beside what the replay has taken more or less than it promised. Where
    outputs that leave have made it slower than promised, their way is taken to be slower: other streams use host memory
    at some times and not at others, which no sum says."""
    plans: list[Plan] = []
    mixtures = option.mixtures
    counts, layers, tried = option.counts, len(question.model.layers), set[Counts]()
    entries = _entries(question, option)
    while counts not in tried and len(tried) < FITS:
        tried.add(counts)
        mixture = option.choice.change(activations_by_layer=rows_of(counts, layers, entries))
        if not mixture.policy.offloads and "offload_slots" not in question.overrides:
            mixture = mixture.change(offload_slots=USUAL.offload_slots)
        plans.append(examine(question, mixture, option.micro_batch))
        promised, fits = mixtures.promised(counts), plans[-1].taken.fits(budgets)
        if offloads_outputs(counts) and plans[-1].seconds > LATE * promised.seconds:
            mixtures = mixtures.slowed(counts, plans[-1].seconds)
            promised = mixtures.promised(counts)
        left = {tier: budget - plans[-1].nbytes[tier] + promised.nbytes[tier] for tier, budget in budgets.items()}
        for seconds, better in mixtures.best(left, 1, outputs_stay=not option.offloads_outputs):
            counts = better if not fits or seconds < WORTH_A_REPLAY * promised.seconds else counts
    return plans


def _entries(question: Question, option: Option) -> int:
    """Micro-batches after which rows start over: so many that the shares hold for all of them."""
    count = len(cut(question, option.micro_batch).tokens)
    return gcd(option.choice.policy.micro_batches_per_round or count, MOST_MICRO_BATCHES)


def _built(model: ModelSpec, choice: Choice, work: Work) -> tuple[Schedule, dict[str, int]]:
    """The step, and its peak bytes by tier of the schedule."""
    pending: Pending = "all" if choice.policy.update == "next_forward" else "none"
    return _with_peaks(build_step(model, choice.numerics, choice.policy, work, pending))


def _with_peaks(schedule: Schedule) -> tuple[Schedule, dict[str, int]]:
    peaks = {tier: schedule.peak_nbytes(tier) for tier in ("device", "host")}
    return schedule, {**peaks, "disk": schedule.arena_nbytes("disk")}


_remembered = lru_cache(maxsize=1024)(_built)
"""For shallow models: what changes between two questions is often the machine or a budget, and no schedule."""


def _in_chunks(model: ModelSpec, choice: Choice, work: Work) -> tuple[Schedule, dict[str, int]]:
    """As `_remembered`, whatever the size of the loss's chunks."""
    numerics = choice.numerics
    schedule, peaks = _remembered(model, choice.change(loss_chunk_tokens=USUAL_NUMERICS.loss_chunk_tokens), work)
    if numerics.loss_chunk_tokens == USUAL_NUMERICS.loss_chunk_tokens:
        return schedule, peaks
    return _with_peaks(with_loss_chunks(schedule, model, numerics, choice.policy, work))


class StepPrices:
    """Of the ops of one step on a question's machine: seconds of each alone, and what streams share."""

    def __init__(self, question: Question, choice: Choice, work: Work) -> None:
        model, self._hardware = question.model, question.hardware
        self._of = op_seconds(model, choice.numerics, choice.policy, work, self._hardware, question.calibration)
        self._shared = contention(model, choice.numerics, self._hardware)
        self._seconds: list[float] = []
        self._dram_nbytes: list[float] = []
        """Of each op of the schedule that was replayed last, alone."""

    def replay(self, schedule: Schedule) -> Timeline:
        if self._shared is NO_CONTENTION:
            return replay(schedule, self._of, one_processor=self._hardware.shares_memory)
        self._seconds = [self._of(op) for op in schedule.ops]
        self._dram_nbytes = [self._shared.dram_nbytes(op) for op in schedule.ops]
        return replay_priced(schedule, self._seconds, self._dram_nbytes, self._shared)

    def busy(self, timeline: Timeline) -> tuple[dict[str, float], dict[str, float]]:
        """Of the replay before: stream -> seconds that its work takes alone; and of those, the seconds of what begins
        behind the forward pass. `DRAM` is one of them: what all bytes of host memory take at its full bandwidth."""
        busy, late = defaultdict[str, float](float), defaultdict[str, float](float)
        ops, starts, is_late = timeline.schedule.ops, timeline.starts, _passes(timeline)
        alone_each = self._seconds or [end - start for start, end in zip(starts, timeline.ends, strict=True)]
        moved = self._dram_nbytes or [0.0] * len(ops)
        for op, start, alone, nbytes in zip(ops, starts, alone_each, moved, strict=True):
            in_memory = nbytes / self._shared.host_dram_bandwidth
            busy[op.stream] += alone
            busy[DRAM] += in_memory
            behind = is_late(start)
            late[op.stream] += alone if behind else 0.0
            late[DRAM] += in_memory if behind else 0.0
        return busy, late


def _passes(timeline: Timeline) -> Callable[[float], bool]:
    """Whether a moment is in a backward pass: behind the last LOSS of a round, ahead of the next round's first op."""
    turns: list[tuple[float, bool]] = []
    for op, start, end in zip(timeline.schedule.ops, timeline.starts, timeline.ends, strict=True):
        if op.kind == "LOSS":
            turns.append((end, True))
        elif op.kind == "FORWARD" and op.unit == 0:
            turns.append((start, False))
    turns.sort()
    turns = [turn for turn, (_, late) in zip(turns, [*turns[1:], (inf, False)], strict=True) if not (turn[1] and late)]
    times = [when for when, _ in turns]

    def is_late(start: float) -> bool:
        return turns[place - 1][1] if (place := bisect_right(times, start)) else False

    return is_late


def _replayed(
    question: Question, choice: Choice, work: Work, of: StepPrices, schedule: Schedule, peaks: dict[str, int]
) -> Plan:
    nbytes = dict(peaks)
    if question.hardware.shares_memory:
        nbytes["host"] += nbytes.pop("device")
    if question.saves:
        nbytes["host"] += save_nbytes(question.model, choice.numerics, choice.policy)
    return Plan(question, choice, work, of.replay(schedule), nbytes)


def seconds_on(plan: Plan, question: Question) -> float:
    """Of the plan's own step, replayed whole on the machine of another question about the same model."""
    return StepPrices(question, plan.choice, plan.work).replay(plan.timeline.schedule).seconds


def estimate(question: Question, choice: Choice, micro_batch: int) -> Estimate:
    """What `examine` would find, extrapolated from shallow versions of the model."""
    return _estimated(question.priced_alike, _as_priced(choice), micro_batch)


def _as_priced(choice: Choice) -> Choice:
    """With the usual number of the slots that it has no use for."""
    policy, idle = choice.policy, dict[str, int]()
    if not policy.offloads and policy.offload_slots != USUAL.offload_slots:
        idle["offload_slots"] = USUAL.offload_slots
    if policy.disk_staging_slots != USUAL.disk_staging_slots and not any(each.uses_disk for each in policy.placements):
        idle["disk_staging_slots"] = USUAL.disk_staging_slots
    return choice.change(**idle) if idle else choice


@lru_cache(maxsize=4096)
def _estimated(alike: PricedAlike, choice: Choice, micro_batch: int) -> Estimate:
    question = alike.question
    if len(choice.policy.activations_by_layer) > 1:
        inputs = choice.change(activations="recompute", activations_by_layer=())
        return mixed(question, choice, coarse(question, micro_batch), estimate(question, inputs, micro_batch))
    resident = set(choice.policy.placements) == {ON_DEVICE}
    if choice.policy.placements and not resident:
        found = estimate(question, choice.change(placements=()), micro_batch)
        return with_placements(question, choice, micro_batch, found)
    seconds, nbytes, busy, late = 0.0, Counter[str](), Counter[str](), Counter[str]()
    works = _works(question, choice, micro_batch)
    # From one round to the next a layer waits for its slot, so that layers come in turns of as many as there are slots.
    more = lcm(MORE, choice.policy.grad_slots) if len(works) > 1 else MORE
    for (weight, model), (share, work) in product(shallow(question.model, more), works):
        placed = choice.change(placements=(ON_DEVICE,) * len(model.units)) if resident else choice
        asked = replace(question, model=model)
        of = StepPrices(asked, placed, work)
        plan = _replayed(asked, placed, work, of, *_in_chunks(model, placed, work))
        seconds += weight * share * plan.seconds
        for tier, count in plan.nbytes.items() if work is works[-1][1] else ():
            nbytes[tier] += weight * count  # type: ignore[assignment]
        for whole, part in zip((busy, late), of.busy(plan.timeline), strict=True):
            for stream, spent in part.items():
                whole[stream] += weight * share * spent  # type: ignore[assignment]
    return Estimate(seconds, {tier: round(count) for tier, count in nbytes.items()}, dict(busy), dict(late))


def with_placements(question: Question, choice: Choice, micro_batch: int, found: Estimate) -> Estimate:
    """The estimate of a policy with placements, from the one of the same policy with all state in host memory.

    Bytes are exact; of the seconds, what the step takes beyond the busiest stream of each pass is taken to stay. Where
    memory is shared, the disk has each pass to be done in.
    """
    shares, rounds = question.hardware.shares_memory, ceil(round_count(choice.policy, question.sequences / micro_batch))
    threads = choice.policy.host_threads
    state = state_numerics(choice.numerics), replace(state_policy(choice.policy), host_threads=threads)
    more, change, behind = _placed(question.priced_alike, *state, rounds)
    nbytes = {tier: count + more[tier] for tier, count in found.nbytes.items()}
    busy = {stream: found.busy.get(stream, 0.0) + change.get(stream, 0.0) for stream in {**found.busy, **change}}
    late = {stream: max(0.0, found.late.get(stream, 0.0) + behind.get(stream, 0.0)) for stream in busy}
    if shares:
        seconds = found.seconds + sum(_lost(part) for part in (_less(busy, late), late))
    else:
        seconds = found.seconds + _longest(busy, late) - _longest(found.busy, found.late)
    return Estimate(seconds, nbytes, busy, late)


@lru_cache(maxsize=4096)
def _placed(
    alike: PricedAlike, numerics: Numerics, policy: Policy, rounds: int
) -> tuple[dict[str, int], dict[str, float], dict[str, float]]:
    """What placements add: bytes by tier, and seconds by stream, of the step and of those behind the forward pass."""
    question = alike.question
    model, plain = question.model, replace(policy, placements=())
    before, after = state_nbytes(model, numerics, plain), state_nbytes(model, numerics, policy)
    nbytes = {tier: after[tier] - before[tier] for tier in after}
    if question.saves:
        nbytes["host"] += save_nbytes(model, numerics, policy) - save_nbytes(model, numerics, plain)
    if rounds > 1:  # sums of what is on the device wait there
        placed = zip(model.units, policy.placements_of(model), strict=True)
        sums = sum(4 * layout_of(unit).trained.size for unit, placement in placed if placement.on_device)
        nbytes |= {"device": nbytes["device"] + sums, "host": nbytes["host"] - sums}
    return nbytes, *placement_seconds(model, numerics, policy, question.hardware, rounds)


def _longest(busy: Mapping[str, float], late: Mapping[str, float]) -> float:
    """Seconds of the busiest stream of each pass, forward and backward: neither begins before the other has ended. The
    disk, which reads ahead and writes behind, has the whole step."""
    first, second = (
        max((spent for stream, spent in part.items() if stream not in DISK_STREAMS), default=0.0)
        for part in (_less(busy, late), late)
    )
    return max(first + second, *(busy.get(stream, 0.0) for stream in DISK_STREAMS))


def _less(whole: Mapping[str, float], part: Mapping[str, float]) -> dict[str, float]:
    return {stream: spent - part[stream] for stream, spent in whole.items()}


def _lost(busy: Mapping[str, float]) -> float:
    """Seconds by which the disk takes longer for a pass than the processor, which all other streams share."""
    disk = max(busy.get(stream, 0.0) for stream in DISK_STREAMS)
    return max(0.0, disk - sum(spent for stream, spent in busy.items() if stream not in DISK_STREAMS))


def _works(question: Question, choice: Choice, micro_batch: int) -> list[tuple[float, Work]]:
    """Steps with few micro-batches, and weights: the weighted sum of what they take is what the step takes. Of many
    rounds, one is replayed, and two for what each more takes; bytes are those of two."""
    size = choice.policy.micro_batches_per_round
    rounds = ceil(round_count(choice.policy, question.sequences / micro_batch))
    if rounds == 1:
        return [(1.0, coarse(question, micro_batch))]
    one, two = (
        Work((micro_batch * question.length,) * (size * count), question.length, batching=question.batching)
        for count in (1, 2)
    )
    return [(2.0 - rounds, one), (rounds - 1.0, two)]


def cut(question: Question, micro_batch: int) -> Work:
    """A step's sequences in micro-batches of `micro_batch`; the last may be smaller."""
    full, rest = divmod(question.sequences, micro_batch)
    sizes = [micro_batch] * full + ([rest] if rest else [])
    return Work(tuple(size * question.length for size in sizes), question.length, batching=question.batching)


def coarse(question: Question, micro_batch: int) -> Work:
    """`cut` with a few micro-batches of the same size that each stand for several: the same total, what is left over
    included."""
    if question.sequences <= micro_batch * MOST_MICRO_BATCHES:
        return cut(question, micro_batch)
    repeats = question.sequences / micro_batch / MOST_MICRO_BATCHES
    return Work((micro_batch * question.length,) * MOST_MICRO_BATCHES, question.length, repeats, question.batching)


def sizes(rows: int) -> list[int]:
    """The sizes of a micro-batch that cut `rows` evenly; where there are many, those near a power of two."""
    low = [size for size in range(1, isqrt(rows) + 1) if rows % size == 0]
    even = sorted({*low, *(rows // size for size in low)})
    if len(even) <= MOST_SIZES:
        return even
    powers = [*(1 << power for power in range((rows - 1).bit_length())), rows]
    return sorted({min(even, key=lambda size: (abs(log2(size / target)), size)) for target in powers})


@lru_cache(maxsize=16)
def shallow(model: ModelSpec, more: int = MORE) -> tuple[tuple[float, ModelSpec], ...]:
    """Models with few of its layers, and weights: the weighted sum of what they take is what the model takes.

    The first has some layers of each kind, each other one `more` of one kind. What is linear in the number of layers of
    each kind is exact; the largest of several such sums, as peak bytes are, is not always. Where they would have as
    many layers together as the model has, it is the model itself.
    """
    kinds: dict[object, list[int]] = {}
    for index in model.layers:
        kinds.setdefault(shape_of(model.units[index]), []).append(index)
    few = {kind: min(len(places), max(MORE, SHALLOW // len(kinds))) for kind, places in kinds.items()}
    few = {kind: count + (len(kinds[kind]) - count) % more for kind, count in few.items()} if more > MORE else few
    base = _with_layers(model, kinds, few)
    weights: list[tuple[float, ModelSpec]] = []
    for kind, places in kinds.items():
        if added := min(more, len(places) - few[kind]):
            deeper = _with_layers(model, kinds, {**few, kind: few[kind] + added})
            weights.append(((len(places) - few[kind]) / added, deeper))
    if sum(len(each.layers) for each in (base, *(each for _, each in weights))) >= len(model.layers):
        return ((1.0, model),)
    return ((1.0 - sum(weight for weight, _ in weights), base), *weights)


def _with_layers(model: ModelSpec, kinds: Mapping[object, list[int]], counts: Mapping[object, int]) -> ModelSpec:
    """The model with so many layers of each kind, evenly spread over those of the kind."""
    chosen: list[int] = []
    for kind, places in kinds.items():
        last = max(1, counts[kind] - 1)
        chosen += [places[round(place * (len(places) - 1) / last)] for place in range(counts[kind])]
    return replace(model, units=(model.units[0], *(model.units[index] for index in sorted(chosen)), model.units[-1]))


def memory_table(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work) -> dict[tuple[str, str], int]:
    """(tier, use) -> bytes held for the whole run, by tier, largest first: what the ledger will record.

    Activations inside a layer are not in it: they depend on the model's code.
    """
    return nbytes_by_use(build_step(model, numerics, policy, work).buffers.values())
