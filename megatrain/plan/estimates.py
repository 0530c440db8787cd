"""Estimates time and memory of a policy, by replaying the whole model or extrapolating from a few layers.

Once the pipeline is filled, the time of a step is linear in the number of layers of each kind. So candidates are
replayed on shallow versions of the model, with few micro-batches and shards. Where some state is not in host memory,
the busy time of each stream is corrected by what that adds or saves; only a whole replay shows how well the streams
then overlap.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil, inf, isqrt, lcm, log2

from megatrain.plan.activation_plan import Counts, Option, drops_inputs, estimate_rows, offloads_outputs, round_count
from megatrain.plan.cost import DRAM, contention, op_seconds, unit_cost_key
from megatrain.plan.placement import ON_DEVICE, state_numerics, state_policy
from megatrain.plan.placement_cost import placement_seconds
from megatrain.plan.question import Choice, CostKey, Estimate, Plan, Question, plus
from megatrain.schedule import Schedule, Timeline, build_step, nbytes_by_use, replay
from megatrain.schedule.build import transient_buffers
from megatrain.schedule.passes.pieces import MOST_PIECES, SLOTS, disk_pieces
from megatrain.schedule.passes.state_buffers import Pending, save_nbytes, state_nbytes
from megatrain.schedule.replay import DISK_STREAMS, replay_priced
from megatrain.spec import ModelSpec, Numerics, Policy, Work
from megatrain.spec.contention import NO_CONTENTION
from megatrain.spec.layout import layout_of

SHALLOW = 6
"""Layers of the shallowest version of a model."""

MORE = 2
"""Layers of one kind that are added to it, to see what they cost."""

MOST_SIZES = 8
"""Micro-batch sizes that are all tried. If there are more, only those near powers of two are."""

MOST_MICRO_BATCHES = 4
"""Micro-batches of a step that is replayed for an estimate. Each stands for several if there are more."""

ROUNDS = 3
"""Rounds of a step that are replayed to compare it with others: between the losses of the last two, a step of any
number of rounds repeats itself."""

FIT_ATTEMPTS = 3
"""Replays of one option, each with a mixture corrected by what the one before left unused or lacked."""

WORTH_A_MIXTURE = 0.9995
"""Estimate of a mixture, relative to that of the one before, whose replay has corrected both: else it is not
replayed. Replays gain more than that, since estimates leave out how long streams wait for each other."""

SLOW_OFFLOAD = 1.01
"""Replay of a mixture over its estimate from which offloading is assumed to be slower than estimated."""

DEFAULTS, DEFAULT_NUMERICS = Policy(), Numerics()

OF_COMPUTE = (
    *("activations", "activations_by_layer", "recompute_slots", "micro_batches_per_round"),
    *("shares_memory", "host_threads"),
)
"""Fields of a policy that decide what compute needs of memory while a step runs, where nothing is offloaded."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Without Python's cyclic garbage collector, which would traverse all schedules again and again and find
    nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def examine(question: Question, choice: Choice, micro_batch: int) -> Plan:
    """The plan with exactly this choice, replayed whole, whether or not it fits.

    micro_batch: its sequences.
    """
    return replace(_examine(question.cost_key, choice, micro_batch), question=question)


def examine_rounds(question: Question, choice: Choice, micro_batch: int) -> Plan:
    """As `examine`, and of many rounds that are all alike, only the first `ROUNDS` are replayed."""
    return replace(_examine_rounds(question.cost_key, choice, micro_batch), question=question)


@lru_cache(maxsize=32)
def _examine(key: CostKey, choice: Choice, micro_batch: int) -> Plan:
    question = key.question
    work = cut(question, micro_batch)
    return _replay(question, choice, work, StepPrices(question, choice, work), *_build(question.model, choice, work))


@lru_cache(maxsize=64)
def _examine_rounds(key: CostKey, choice: Choice, micro_batch: int) -> Plan:
    question, size = key.question, choice.policy.micro_batches_per_round
    work = cut(question, micro_batch)
    rounds, rest = divmod(work.micro_batches, size) if size else (1, 0)
    if rounds <= ROUNDS or rest or work.tokens[-1] != work.tokens[0]:
        return _examine(key, choice, micro_batch)
    few = replace(work, tokens=work.tokens[: ROUNDS * size])
    plan = _replay(question, choice, work, StepPrices(question, choice, work), *_build(question.model, choice, few))
    return replace(plan, left_out=rounds - ROUNDS)


def fitted(question: Question, budgets: Mapping[str, int], option: Option, *, drops: bool = True) -> list[Plan]:
    """Replays of an option, then of better mixtures, until the choice agrees with the replay.

    After each replay the best mixture is chosen again, with the budgets corrected by the error of its estimate. If
    offloaded outputs made it slower than estimated, offloading is assumed to be slower: when other streams use host
    memory at the same time does not show in sums. Nor does, on a slow bus, the time that ops wait for dropped inputs:
    if a mixture that drops some was slower than estimated, mixtures that drop none are tried, too. drops: whether
    mixtures that drop inputs may be chosen.
    """
    if option.mixtures is None:
        return [examine_rounds(question, option.choice, option.micro_batch)]
    plans: list[Plan] = []
    mixtures, stays, keeps_too = option.mixtures, not offloads_outputs(option.counts), False
    counts, tried = option.counts, set[Counts]()
    while counts not in tried and len(tried) < FIT_ATTEMPTS:
        tried.add(counts)
        mixture = option.choice.change(**mixtures.fields(counts))
        if not mixture.policy.offloads and "offload_slots" not in question.overrides:
            mixture = mixture.change(offload_slots=DEFAULTS.offload_slots)
        plans.append(examine_rounds(question, mixture, option.micro_batch))
        estimated, fits = mixtures.estimate(counts), plans[-1].taken.fits(budgets)
        is_slow = plans[-1].seconds > SLOW_OFFLOAD * estimated.seconds
        keeps_too |= is_slow and drops_inputs(counts)
        if is_slow and offloads_outputs(counts):
            mixtures = mixtures.slowed(counts, plans[-1].seconds)
            estimated = mixtures.estimate(counts)
        left = {tier: budget - plans[-1].nbytes[tier] + estimated.nbytes[tier] for tier, budget in budgets.items()}
        for seconds, better in mixtures.best(left, 1, outputs_stay=stays, drops=drops):
            counts = better if not fits or seconds < WORTH_A_MIXTURE * estimated.seconds else counts
    for _, without in option.mixtures.best(left, int(keeps_too), outputs_stay=stays, drops=False):
        plans += fitted(question, budgets, option.mixtures.option(without), drops=False)
    return plans


PLANNED_PIECES = 4
"""Pieces of a unit's state on the disk in a plan: enough for them to overlap as the smaller ones of a step do. They are
read further ahead, by up to three quarters of a unit at the end of a pass: 2% of a step with 32 layers. Where memory is
shared, that would hide that compute waits for them in each layer, so there a plan has all pieces."""


def _build(model: ModelSpec, choice: Choice, work: Work) -> tuple[Schedule, dict[str, int]]:
    """The schedule of a step, and its peak bytes by tier."""
    pending: Pending = "all" if choice.policy.update == "next_forward" else "none"
    pieces = 2 * MOST_PIECES if choice.policy.shares_memory else PLANNED_PIECES
    schedule = build_step(model, choice.numerics, choice.policy, work, pending, most_pieces=pieces)
    return _with_peaks(schedule)


def _with_peaks(schedule: Schedule) -> tuple[Schedule, dict[str, int]]:
    peaks = {tier: schedule.peak_nbytes(tier) for tier in ("device", "host")}
    return schedule, {**peaks, "disk": schedule.arena_nbytes("disk")}


_cached_build = lru_cache(maxsize=1024)(_build)
"""For shallow models. Two questions often differ only in the machine or a budget, and share their schedules."""

_transient_buffers = lru_cache(maxsize=4096)(transient_buffers)


def _shallow_build(model: ModelSpec, choice: Choice, work: Work) -> tuple[Schedule, dict[str, int]]:
    """As `_build`, to be replayed only, from one cached schedule for all sizes of micro-batches and of loss chunks."""
    policy, first = choice.policy, work.tokens[0]
    if policy.offloads_in(model):
        return _cached_build(model, choice, work)
    length = work.length or 1
    alike = replace(work, tokens=tuple(2 * length if each == first else length for each in work.tokens))
    if work.micro_batches > 1:
        alike = replace(alike, repeats=1)
    choice_alike = choice.change(loss_chunk_tokens=DEFAULT_NUMERICS.loss_chunk_tokens)
    if policy.micro_batches_per_round >= work.micro_batches:
        choice_alike = choice_alike.change(micro_batches_per_round=0)
    plain = replace(DEFAULTS, **{name: getattr(policy, name) for name in OF_COMPUTE})
    known = _transient_buffers(model, choice_alike.numerics, plain, alike)
    sizes = _transient_buffers(model, choice.numerics, plain, work)
    if known.keys() != sizes.keys():  # a size of no bytes has no buffer
        return _cached_build(model, choice, work)
    schedule, _ = _cached_build(model, choice_alike, alike)
    return _with_peaks(schedule.resized(sizes))


class StepPrices:
    """Prices of the ops of one step on a question's machine, and the bandwidths that its streams share."""

    def __init__(self, question: Question, choice: Choice, work: Work) -> None:
        model, self._hardware = question.model, question.hardware
        self._price = op_seconds(model, choice.numerics, choice.policy, work, self._hardware, question.calibration)
        self._shared = contention(model, choice.numerics, self._hardware)
        # Of each op in the last replayed schedule; empty without contention.
        self._seconds: list[float] = []
        self._dram_nbytes: list[float] = []

    def replay(self, schedule: Schedule) -> Timeline:
        if self._shared is NO_CONTENTION:
            return replay(schedule, self._price, one_processor=self._hardware.shares_memory)
        self._seconds = [self._price(op) for op in schedule.ops]
        self._dram_nbytes = [self._shared.dram_nbytes(op) for op in schedule.ops]
        return replay_priced(schedule, self._seconds, self._dram_nbytes, self._shared)

    def busy(self, timeline: Timeline) -> tuple[dict[str, float], dict[str, float], float]:
        """(busy, late, loss) of the timeline that `replay` returned last: stream -> seconds that its ops take without
        contention, of the whole step, and of the ops that start after a forward pass; and those of the loss.

        The entry `DRAM` is what all bytes read from or written to host memory take at its full bandwidth.
        """
        busy, late = defaultdict[str, float](float), defaultdict[str, float](float)
        ops, starts, is_late = timeline.schedule.ops, timeline.starts, _in_backward(timeline)
        alone_each = self._seconds or [end - start for start, end in zip(starts, timeline.ends, strict=True)]
        moved, loss = self._dram_nbytes or [0.0] * len(ops), 0.0
        for op, start, alone, nbytes in zip(ops, starts, alone_each, moved, strict=True):
            in_memory = nbytes / self._shared.host_dram_bandwidth
            busy[op.stream] += alone
            busy[DRAM] += in_memory
            starts_late = is_late(start)
            late[op.stream] += alone if starts_late else 0.0
            late[DRAM] += in_memory if starts_late else 0.0
            loss += alone if op.kind == "LOSS" else 0.0
        return busy, late, loss


def _in_backward(timeline: Timeline) -> Callable[[float], bool]:
    """A function that says whether a time is in a backward pass: between the last LOSS of a round and the first op of
    the next round."""
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


def _replay(
    question: Question, choice: Choice, work: Work, prices: StepPrices, schedule: Schedule, peaks: dict[str, int]
) -> Plan:
    nbytes = dict(peaks)
    if question.hardware.shares_memory:
        nbytes["host"] += nbytes.pop("device")
    if question.saves:
        nbytes["host"] += save_nbytes(question.model, choice.numerics, choice.policy)
    return Plan(question, choice, work, prices.replay(schedule), nbytes)


def seconds_on(plan: Plan, question: Question) -> float:
    """Seconds of the plan's step, replayed as by `examine_rounds` on the machine of another question about the same
    model."""
    if plan.policy.micro_batches_per_round:
        plan = examine_rounds(plan.question, plan.choice, plan.micro_batch)
    prices = StepPrices(question, plan.choice, plan.work)
    return replace(plan, timeline=prices.replay(plan.timeline.schedule)).seconds


def estimate(question: Question, choice: Choice, micro_batch: int) -> Estimate:
    """What `examine` would find, extrapolated from shallow versions of the model."""
    return _estimate(question.cost_key, _without_unused_slots(choice), micro_batch)


def _without_unused_slots(choice: Choice) -> Choice:
    """The choice with default numbers of the slots that it does not use, for cache hits."""
    policy, unused = choice.policy, dict[str, int]()
    if not policy.offloads and policy.offload_slots != DEFAULTS.offload_slots:
        unused["offload_slots"] = DEFAULTS.offload_slots
    if not policy.uses_disk and policy.disk_staging_slots != DEFAULTS.disk_staging_slots:
        unused["disk_staging_slots"] = DEFAULTS.disk_staging_slots
    return choice.change(**unused) if unused else choice


@lru_cache(maxsize=4096)
def _estimate(key: CostKey, choice: Choice, micro_batch: int) -> Estimate:
    question = key.question
    if len(choice.policy.activations_by_layer) > 1:
        inputs = choice.change(activations="recompute", activations_by_layer=())
        return estimate_rows(question, choice, coarse(question, micro_batch), estimate(question, inputs, micro_batch))
    resident = set(choice.policy.placements) == {ON_DEVICE}
    if choice.policy.placements and not resident:
        in_host = estimate(question, choice.change(placements=()), micro_batch)
        return with_placements(question, choice, micro_batch, in_host)
    seconds, loss, nbytes, busy, late = 0.0, 0.0, Counter[str](), Counter[str](), Counter[str]()
    works, further = _works(question, choice, micro_batch), (Counter[str](), Counter[str]())
    # With several rounds, layers wait for gradient slots, so added layers have to be a multiple of these.
    more = lcm(MORE, choice.policy.grad_slots) if len(works) > 1 else MORE
    for (weight, model), (share, work) in product(shallow(question.model, more), works):
        placed = choice.change(placements=(ON_DEVICE,) * len(model.units)) if resident else choice
        asked = replace(question, model=model)
        prices = StepPrices(asked, placed, work)
        plan = _replay(asked, placed, work, prices, *_shallow_build(model, placed, work))
        seconds += weight * share * plan.seconds
        for tier, count in plan.nbytes.items() if work is works[-1][1] else ():
            nbytes[tier] += weight * count  # type: ignore[assignment]
        *parts, more_loss = prices.busy(plan.timeline)
        loss += weight * share * more_loss
        for whole, repeated, part in zip((busy, late), further, parts, strict=True):
            for stream, spent in part.items():
                whole[stream] += weight * share * spent  # type: ignore[assignment]
                repeated[stream] += weight * (share - (work is works[0][1])) * spent  # type: ignore[assignment]
    taken, rounds = {tier: round(count) for tier, count in nbytes.items()}, _rounds(question, choice, micro_batch)
    return Estimate(seconds, taken, busy, late, loss, rounds=rounds, further=further)


def with_placements(question: Question, choice: Choice, micro_batch: int, in_host: Estimate) -> Estimate:
    """The estimate of a policy with placements. in_host: of the same policy with all state in host memory.

    The change of bytes is exact. For the seconds, whatever the step took beyond the busiest stream of each pass, it
    still takes. Where memory is shared, the step also takes longer by what the disk exceeds each pass, or by what
    compute waits for in the backward pass.
    """
    shares, rounds = question.hardware.shares_memory, _rounds(question, choice, micro_batch)
    threads = choice.policy.host_threads
    state = state_numerics(choice.numerics), replace(state_policy(choice.policy), host_threads=threads)
    more, *changes = _added_by_placements(question.cost_key, *state, rounds)
    nbytes = {tier: count + more[tier] for tier, count in in_host.nbytes.items()}
    busy, late = (plus(taken, change) for taken, change in zip((in_host.busy, in_host.late), changes, strict=True))
    late = {stream: max(0.0, spent) for stream, spent in late.items()}
    movable, further = 0.0 if shares else _movable(choice.policy), in_host.further
    if rounds > 1:
        once = _added_by_placements(question.cost_key, *state, 1)[1:]
        repeated = (plus(change, less, -1.0) for change, less in zip(changes, once, strict=True))
        more_busy, more_late = (plus(taken, change) for taken, change in zip(further, repeated, strict=True))
        further = more_busy, more_late
    placed = replace(in_host, nbytes=nbytes, busy=busy, late=late, movable=movable, further=further)
    if not shares:
        return replace(placed, seconds=in_host.seconds + placed.least_seconds() - in_host.least_seconds())
    passes, seconds, awaited = placed.passes(), in_host.seconds, _awaited(question.model, choice)
    for early, backward in zip(passes[::2], passes[1::2], strict=True):
        waits = awaited * max(backward.get(stream, 0.0) for stream in DISK_STREAMS)
        seconds += _disk_excess(early) + max(waits, _disk_excess(backward))
    return replace(placed, seconds=seconds)


def _awaited(model: ModelSpec, choice: Choice) -> float:
    """The share of the disk's work in the backward pass for which compute waits where memory is shared.

    With one gradient slot a layer waits until that above has been updated. The staging ring has its first pieces then.
    """
    if choice.policy.grad_slots > 1:
        return 0.0
    largest = max((layout_of(model.units[layer]).trained for layer in model.layers), key=lambda each: each.size)
    return max(0.0, 1.0 - SLOTS / max(1, len(disk_pieces(largest, choice.numerics, choice.policy))))


def _movable(policy: Policy) -> float:
    """The share of the disk's work in a pass that may as well be in the other one.

    At the end of a pass the staging buffers hold some units of the next, on average half of what they can. What units
    further away need is read later: so if all of many units are on the disk, each pass waits for its own part.
    """
    staged = sum(placement.uses_disk for placement in policy.placements)
    return min(1.0, policy.disk_staging_slots / (2 * staged)) if staged else 0.0


@lru_cache(maxsize=4096)
def _added_by_placements(
    key: CostKey, numerics: Numerics, policy: Policy, rounds: int
) -> tuple[dict[str, int], dict[str, float], dict[str, float]]:
    """What placements add: bytes by tier, seconds by stream, and of these the seconds after the forward pass."""
    question = key.question
    model, plain = question.model, replace(policy, placements=())
    before, after = state_nbytes(model, numerics, plain), state_nbytes(model, numerics, policy)
    nbytes = {tier: after[tier] - before[tier] for tier in after}
    if question.saves:
        nbytes["host"] += save_nbytes(model, numerics, policy) - save_nbytes(model, numerics, plain)
    if rounds > 1:  # units on the device keep their sums of gradients there
        placed = zip(model.units, policy.placements_of(model), strict=True)
        sums = sum(4 * layout_of(unit).trained.size for unit, placement in placed if placement.on_device)
        nbytes |= {"device": nbytes["device"] + sums, "host": nbytes["host"] - sums}
    return nbytes, *placement_seconds(model, numerics, policy, question.hardware, rounds)


def _disk_excess(busy: Mapping[str, float]) -> float:
    """Seconds that the disk takes longer for a pass than the processor, which all other streams share."""
    disk = max(busy.get(stream, 0.0) for stream in DISK_STREAMS)
    return max(0.0, disk - sum(spent for stream, spent in busy.items() if stream not in DISK_STREAMS))


def _rounds(question: Question, choice: Choice, micro_batch: int) -> int:
    return ceil(round_count(choice.policy, question.sequences / micro_batch))


def _works(question: Question, choice: Choice, micro_batch: int) -> list[tuple[float, Work]]:
    """(weight, work) of steps with few micro-batches; the weighted sum of their seconds is the step's. If there are
    several rounds, these are steps of one round and of two, and the bytes are those of two."""
    size, rounds = choice.policy.micro_batches_per_round, _rounds(question, choice, micro_batch)
    if rounds == 1:
        return [(1.0, coarse(question, micro_batch))]
    one, two = (_work(question, (micro_batch,) * (size * count)) for count in (1, 2))
    return [(2.0 - rounds, one), (rounds - 1.0, two)]


def cut(question: Question, micro_batch: int) -> Work:
    """A step's sequences in micro-batches of `micro_batch`; the last may be smaller."""
    full, rest = divmod(question.sequences, micro_batch)
    sizes = [micro_batch] * full + ([rest] if rest else [])
    return _work(question, sizes)


def _work(question: Question, sizes: Sequence[int], repeats: float = 1) -> Work:
    """Micro-batches of so many sequences."""
    tokens, values = tuple(size * question.length for size in sizes), question.values_per_token
    return Work(tokens, question.length, repeats, question.batching, values > 0, values)


def coarse(question: Question, micro_batch: int) -> Work:
    """As `cut`, with a few micro-batches of equal size, each of which stands for several. The total is the same,
    including the smaller last one."""
    if question.sequences <= micro_batch * MOST_MICRO_BATCHES:
        return cut(question, micro_batch)
    repeats = question.sequences / micro_batch / MOST_MICRO_BATCHES
    return _work(question, (micro_batch,) * MOST_MICRO_BATCHES, repeats)


def sizes(rows: int) -> list[int]:
    """The micro-batch sizes to be tried: the divisors of `rows` sequences, or of many those near powers of two."""
    low = [size for size in range(1, isqrt(rows) + 1) if rows % size == 0]
    even = sorted({*low, *(rows // size for size in low)})
    if len(even) <= MOST_SIZES:
        return even
    powers = [*(1 << power for power in range((rows - 1).bit_length())), rows]
    return sorted({min(even, key=lambda size: (abs(log2(size / target)), size)) for target in powers})


@lru_cache(maxsize=16)
def shallow(model: ModelSpec, more: int = MORE) -> tuple[tuple[float, ModelSpec], ...]:
    """(weight, model) of versions with few layers; the weighted sum of their costs is the cost of the whole model.

    The first has some layers of each kind, each of the others `more` of one kind. Exact for what is linear in the
    number of layers of each kind; peak bytes are a maximum of such sums, and not always exact. If the versions would
    have as many layers together as the model, the only one is the model itself.
    """
    kinds: dict[object, list[int]] = {}
    for index in model.layers:
        kinds.setdefault(unit_cost_key(model.units[index]), []).append(index)
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
    """The model with so many layers of each kind, evenly spaced among those of the kind.

    It has all side values, made by the next layer below if theirs is left out, for those of their readers that stay.
    """
    chosen: list[int] = []
    for kind, places in kinds.items():
        last = max(1, counts[kind] - 1)
        chosen += [places[round(place * (len(places) - 1) / last)] for place in range(counts[kind])]
    units, kept = model.units, [0, *sorted(chosen), model.epilogue]
    side_values = []
    for side in model.sides:
        source = bisect_right(kept, side.source) - 1
        users = tuple(kept.index(user) for user in side.users if user in kept) or (source + 1,)
        side_values.append(replace(side, source=source, users=users))
    layers = (units[index] for index in kept[1:-1])
    return replace(model, units=(units[0], *layers, *units[model.epilogue :]), sides=tuple(side_values))


def memory_table(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work) -> dict[tuple[str, str], int]:
    """(tier, use) -> bytes that are allocated for the whole run, by tier, largest first: what the ledger will record.

    Without activations inside a layer, which depend on the model's code.
    """
    return nbytes_by_use(build_step(model, numerics, policy, work).buffers.values())
