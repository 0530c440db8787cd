"""Analyses a plan: what limits the step, when transfers hide, how long a run takes, and what changes would gain.

Everything is read off the plan's own timeline, or found by pricing the same question again with one thing changed.
Seconds of the *chain* are those of the ops that follow each other without a gap from the start of the step to its end:
they add up to the step, so they say what it is made of, where busy seconds only say what each stream has to do. It
leaves out how any of it is shown (`report`, `html`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, count
from math import ceil, inf
from typing import Any

from megatrain.plan.cost import (
    attention_seconds,
    disk_bandwidths,
    host_dram_bandwidth,
    packing_bandwidth,
    product_flops,
    step_flops,
)
from megatrain.plan.estimates import estimate, examine, gc_paused, seconds_on
from megatrain.plan.machines import machine, machine_names
from megatrain.plan.question import MOST_TOKENS, Choice, Estimate, Plan, Question, usable_nbytes
from megatrain.plan.ranks import OF_CORES, SHARED
from megatrain.plan.search import faster_plan, fits, survey
from megatrain.schedule import Timeline
from megatrain.spec import Hardware, Precision

HIDDEN_STALL = 0.02
"""Share of a step that compute may wait while transfers still count as hidden."""

MOST_GUESSES = 6
"""At the step from which on transfers hide, ahead of halving what is left between one that is too small and one that is
not."""

WORTH_A_SEARCH = 0.99
"""Promised seconds, to those that are estimated of the plan, from which on a better machine is planned for anew."""

MORE_BY = 1.1
"""Times as much of a resource, in what is said of how the step depends on it."""

MIN_DECISIVE_SAVING = 0.02
"""Of the step: a figure of the machine decides where `MORE_BY` of it saves more."""

MIN_GAIN_SHOWN = 0.01
"""Gain of a change that costs nothing, below which it is not named."""

BILLION = 1_000_000_000

SECONDS_PER_DAY = 86_400.0

DISK_KINDS: tuple[str, ...] = ("READ", "WRITE")
"""Kinds of ops that use the disk tier."""

STREAM_WORDS = {
    "compute": "compute",
    "fetch": "bus up",
    "grad": "bus down",
    "host": "optimizer",
    "read": "disk in",
    "write": "disk out",
    "pack": "into pinned staging",
    "unpack": "out of pinned staging",
    "link": "link",
    "shared": "sums of ranks",
}
"""Stream -> what it is to a person."""

IN_HOST_WORDS = {"fetch": "copies of weights", "grad": "copies of gradients"}
"""The same where nothing crosses a bus."""

RESOURCES: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "compute": (
        ("compute",),
        {
            "large products": ("flops", "flops_fp32", "peak_flops", "peak_flops_fp32", "products"),
            "attention": ("attention",),
        },
    ),
    "device memory": (
        (),
        {
            "device memory": ("device_bandwidth", "elementwise_bandwidth", "fresh_bandwidth"),
            "elementwise ops": ("elementwise",),
        },
    ),
    "bus": (
        ("fetch", "grad"),
        {
            "bus up": ("fetch_bandwidth", "duplex_fetch_bandwidth", "pageable_fetch_bandwidth", "shared_bus_bandwidth"),
            "bus down": ("grad_bandwidth", "duplex_grad_bandwidth", "pageable_grad_bandwidth"),
        },
    ),
    "host memory": (
        ("host", "pack", "unpack", "shared"),
        {
            "host memory": ("host_dram_bandwidth",),
            "optimizer": ("host_bandwidth", "optimizer_bandwidth"),
            "gradient norm": ("norm_bandwidth",),
            "copies of one thread": ("host_copy_bandwidth",),
        },
    ),
    "disk": (
        ("read", "write"),
        {
            "disk in": ("disk_read_bandwidth", "disk_duplex_read_bandwidth"),
            "disk out": ("disk_write_bandwidth", "disk_duplex_write_bandwidth"),
        },
    ),
    "link": (
        ("link",),
        {"link between devices": ("link_bandwidth",), "link between machines": ("node_bandwidth",)},
    ),
}
"""Resource of a machine -> the streams that are busy with it, and its rates: the fields of each, the first of them the
one that is shown."""

MEMORIES = ("device memory", "bus", "host memory")
"""Resources that are one where nothing crosses a bus."""

IN_HOST_RATES = {"device memory": "memory", "bus up": "copies of weights", "bus down": "copies of gradients"}
"""Rate -> its name where nothing crosses a bus, and all memory is the host's."""

GB = 1_000_000_000
DEVICE_SIZES = tuple(size * GB for size in (8, 12, 16, 24, 32, 48, 80, 96, 141, 192))
HOST_SIZES = tuple(size * GB for size in (16, 32, 64, 128, 192, 256, 384, 512, 768, 1000, 1500, 2000, 3000, 4000))


@dataclass(frozen=True, slots=True)
class Load:
    """What one stream has to do in a step, and how much of the step's length is its own."""

    stream: str
    name: str
    """In a person's words."""
    busy_seconds: float
    chain_seconds: float
    slack_seconds: float
    """Of the step in which the stream has nothing to do."""


@dataclass(frozen=True, slots=True)
class Hiding:
    """The fewest tokens per step with which compute waits for less than `HIDDEN_STALL` of it; whether they fit, by this
    plan's policy or another."""

    tokens_per_step: int
    stall_share: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What the plan's own step gains from a machine with `MORE_BY` of one resource."""

    resource: str
    busy: tuple[tuple[str, float], ...]
    """Streams that use it, in a person's words, and the share of the step in which each has something to do."""
    saved: float
    """Share of the step's time; negative where a step takes longer, because its ops meet at another time."""


@dataclass(frozen=True, slots=True)
class HardwareRate:
    """One rate of the machine, what the step gains from `MORE_BY` of it, and where it is from."""

    name: str
    per_second: float
    unit: str
    """FLOP or B."""
    source: str
    saved: float


@dataclass(frozen=True, slots=True)
class Upgrade:
    """What one change would gain; `None` where the model does not fit with it either."""

    name: str
    tokens_per_second: float | None
    ratio: float | None
    """To what the machine does today; `None` where it does nothing today."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Tokens per second by memory budgets in bytes: a row per host budget, a column per device budget."""

    device_nbytes: tuple[int, ...]
    host_nbytes: tuple[int, ...]
    tokens_per_second: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class Outlook:
    """A plan, and what follows from it for a run of `token_budget` tokens, where a user has said how many."""

    plan: Plan
    token_budget: float | None
    flops_per_second: float
    """Useful: what is recomputed does not count."""
    loads: tuple[Load, ...]
    """By their share of the chain, largest first: the first is what limits."""
    hiding: Hiding | None = None
    upgrades: tuple[Upgrade, ...] = ()
    free_changes: tuple[Upgrade, ...] = ()
    """Of the run, not of the machine. These three are what `advised` adds."""
    sensitivities: tuple[Sensitivity, ...] = ()
    """What `MORE_BY` of it saves most of first."""
    decisive_rates: tuple[HardwareRate, ...] = ()
    """Those that decide, in the same order."""

    @property
    def peak_flops(self) -> float:
        return peak_flops(self.plan.question.hardware, self.plan.question.precision)

    @property
    def mfu(self) -> float:
        """Useful operations over what the device could do at its peak."""
        return self.flops_per_second / self.peak_flops

    @property
    def stall_share(self) -> float:
        """Of the step, in which compute waits."""
        return self.plan.timeline.stall_seconds() / self.plan.seconds

    @property
    def stalls(self) -> dict[str, float]:
        """What compute waits for, in a person's words -> share of the step, largest first."""
        found, words = stalls(self.plan.timeline), stream_words(self.plan.question.hardware)
        return {words.get(stream, stream): seconds / self.plan.seconds for stream, seconds in found.items()}

    @property
    def run_seconds(self) -> float | None:
        return None if self.token_budget is None else self.token_budget / self.plan.tokens_per_second

    @property
    def seconds_per_billion_tokens(self) -> float:
        return BILLION / self.plan.tokens_per_second

    @property
    def written_nbytes_per_day(self) -> float:
        """Bytes written to disk."""
        return written_nbytes_per_day(self.plan)

    @property
    def drive_days(self) -> float | None:
        """Days until the drive has been written as often as its maker promises; `None` where nothing tells."""
        endurance, per_day = self.plan.question.hardware.disk_endurance_nbytes, self.written_nbytes_per_day
        return None if endurance is None or not per_day else endurance / per_day


def written_nbytes_per_day(plan: Plan) -> float:
    """Bytes that a day of steps writes to the disk."""
    return plan.written_nbytes / plan.seconds * SECONDS_PER_DAY


@gc_paused()
def look(plan: Plan, token_budget: float | None = None) -> Outlook:
    """What follows from a plan itself, and for a run of `token_budget` tokens."""
    question = plan.question
    useful = step_flops(question.model, [(question.sequences, question.length)]) / plan.seconds
    found = sensitivities(plan)
    rates = decisive_rates(plan, found)
    return Outlook(plan, token_budget, useful, loads(plan), sensitivities=found, decisive_rates=rates)


@gc_paused()
def advised(outlook: Outlook) -> Outlook:
    """With what a change would gain: other questions are planned for, which takes longer than the plan itself."""
    plan = outlook.plan
    return replace(
        outlook, hiding=hiding(plan), upgrades=upgrades(plan.question, plan), free_changes=free_changes(plan)
    )


def peak_flops(hardware: Hardware, precision: Precision) -> float:
    """What the maker states of the device, or what it achieves where nothing is stated."""
    if precision == "fp32":
        return hardware.peak_flops_fp32 or hardware.flops_fp32 or hardware.peak_flops or hardware.flops
    return hardware.peak_flops or hardware.flops


# What limits -------------------------------------------------------------------------------------------------------


def stream_words(hardware: Hardware) -> dict[str, str]:
    """Stream -> what it is to a person, on this machine."""
    return STREAM_WORDS | (IN_HOST_WORDS if hardware.computes_in_host_memory else {})


def loads(plan: Plan) -> tuple[Load, ...]:
    """Every stream with something to do, by its share of the chain, largest first."""
    timeline = plan.timeline
    busy: dict[str, float] = defaultdict(float)
    for op, start, end in zip(timeline.schedule.ops, timeline.starts, timeline.ends, strict=True):
        busy[op.stream] += end - start
    chained, words = _chain_seconds(timeline), stream_words(plan.question.hardware)
    found = [
        Load(stream, words.get(stream, stream), seconds, chained.get(stream, 0.0), timeline.seconds - seconds)
        for stream, seconds in busy.items()
    ]
    return tuple(sorted(found, key=lambda load: (-load.chain_seconds, -load.busy_seconds, load.stream)))


def stalls(timeline: Timeline) -> dict[str, float]:
    """Stream -> seconds in which compute waited for it, largest first.

    A wait is walked back: a product that waits for a fetch that waits for an update that waits for the disk waited for
    each of them in turn.
    """
    ops, causes = timeline.schedule.ops, _Causes(timeline)
    seconds: dict[str, float] = defaultdict(float)
    free = 0.0
    for index, op in enumerate(ops):
        if op.stream != "compute":
            continue
        now, cause = timeline.starts[index], causes.of(index)
        while now > free and cause >= 0:
            began = max(free, timeline.starts[cause])
            seconds[ops[cause].stream] += now - began
            now, cause = began, causes.of(cause)
        free = timeline.ends[index]
    for index in range(len(ops)):  # what is left to do when compute is done
        if timeline.ends[index] > free and ops[index].stream != "compute":
            seconds[ops[index].stream] += timeline.ends[index] - free
            free = timeline.ends[index]
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _chain_seconds(timeline: Timeline) -> dict[str, float]:
    """Stream -> its seconds of the chain, walked from the last op back to whatever each op had to wait for."""
    ops, causes = timeline.schedule.ops, _Causes(timeline)
    seconds: dict[str, float] = defaultdict(float)
    index = max(range(len(ops)), key=lambda each: timeline.ends[each], default=-1)
    while index >= 0:
        seconds[ops[index].stream] += timeline.ends[index] - timeline.starts[index]
        index = causes.of(index)
    return dict(seconds)


class _Causes:
    """For each op, the one that it had to wait for."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._before: list[int] = []
        last: dict[str, int] = {}
        for index, op in enumerate(timeline.schedule.ops):
            self._before.append(last.get(op.stream, -1))
            last[op.stream] = index

    def of(self, index: int) -> int:
        """An op that ended when this one began, -1 where none did.

        Some op before it in order, where streams share the processor.
        """
        start, waits = self._timeline.starts[index], self._timeline.schedule.waits[index]
        candidates = chain((self._before[index],), reversed(waits), range(index - 1, -1, -1))
        return next((each for each in candidates if each >= 0 and self._timeline.ends[each] == start), -1)


# What the step depends on --------------------------------------------------------------------------------------------


def sensitivities(plan: Plan) -> tuple[Sensitivity, ...]:
    """What the plan's own step gains from `MORE_BY` of each resource, replayed whole; of the disk, where it is used."""
    busy = {load.stream: (load.name, load.busy_seconds / plan.seconds) for load in loads(plan)}
    found = []
    for resource, (streams, parts) in _resources(plan).items():
        shares = tuple(busy[stream] for stream in streams if stream in busy)
        found.append(Sensitivity(resource, shares, _saved(plan, chain.from_iterable(parts.values()))))
    return tuple(sorted(found, key=lambda each: -round(each.saved, 4)))


def decisive_rates(plan: Plan, found: tuple[Sensitivity, ...]) -> tuple[HardwareRate, ...]:
    """The rates of the machine that decide how long the step takes."""
    hardware, resources = _complete(plan.question.hardware), _resources(plan)
    decisive = []
    for resource in (each.resource for each in found if each.saved > MIN_DECISIVE_SAVING):
        for name, fields in resources[resource][1].items():
            if (saved := _saved(plan, fields)) > MIN_DECISIVE_SAVING:
                field, per_second, unit = _rate(plan, hardware, fields)
                source = dict(hardware.sources).get(field, "")
                if not source and not getattr(plan.question.hardware, field):
                    source = "assumed: nobody has measured it"
                decisive.append(HardwareRate(name, per_second, unit, source or "no source is given", saved))
    return tuple(decisive)


def _resources(plan: Plan) -> dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]]:
    """Those that the plan's step may depend on. Where nothing crosses a bus, memory is one of them."""
    found = dict(RESOURCES)
    if not _uses_disk(plan):
        del found["disk"]
    if plan.question.model.ranks == 1 or plan.policy.delivery == "shared":
        del found["link"]
    if plan.question.hardware.computes_in_host_memory:
        memories = [found.pop(name) for name in MEMORIES]
        streams = tuple(chain.from_iterable(streams for streams, _ in memories))
        rates = {IN_HOST_RATES.get(name, name): fields for _, parts in memories for name, fields in parts.items()}
        found["memory"] = streams, rates
    return found


def _saved(plan: Plan, fields: Iterable[str]) -> float:
    """Share of the step's time that `MORE_BY` of these rates saves."""
    hardware = _faster(plan.question.hardware, fields, MORE_BY)
    return 1.0 - seconds_on(plan, replace(plan.question, hardware=hardware)) / plan.seconds


def _rate(plan: Plan, hardware: Hardware, fields: tuple[str, ...]) -> tuple[str, float, str]:
    """The field that a figure is shown by, its rate and its unit."""
    precision, length = plan.question.precision, plan.question.length
    field = next((each for each in fields if getattr(hardware, each)), fields[0])
    parts = hardware.sharing_ranks  # a figure is the machine's, as its source says it
    cores = parts if hardware.slots_in_host else 1
    if fields[0] == "flops":
        field = "flops_fp32" if precision == "fp32" and hardware.flops_fp32 else "flops"
        return field, cores * product_flops(hardware, precision), "FLOP"
    if fields[0] == "attention":
        return field, cores * 2.0 * length / attention_seconds(hardware, precision, 1, length, 1)[0], "FLOP"
    if fields[0] == "elementwise":
        rows = [row.forward_bandwidth for row in hardware.elementwise if row.precision == precision]
        return field, cores * max(rows, default=0.0), "B"
    rate = getattr(hardware, field)
    if rate is not None:
        rate *= parts if field in SHARED else cores if field in OF_CORES else 1
    return field, rate, "B"


def _complete(hardware: Hardware) -> Hardware:
    """With rates that `cost` assumes where they are not known, or takes from others."""
    read, write = disk_bandwidths(hardware)
    return replace(
        hardware,
        host_dram_bandwidth=host_dram_bandwidth(hardware),
        host_copy_bandwidth=packing_bandwidth(hardware),
        disk_read_bandwidth=read,
        disk_write_bandwidth=write,
    )


def _faster(hardware: Hardware, fields: Iterable[str], factor: float) -> Hardware:
    """The machine with `factor` times each of these rates, those of tables included."""
    hardware = _complete(hardware)
    changes: dict[str, object] = {}
    for field in fields:
        rate = getattr(hardware, field)
        if isinstance(rate, tuple):
            changes[field] = tuple(_faster_row(row, factor) for row in rate)
        elif rate is not None:
            changes[field] = factor * rate
    return replace(hardware, **changes)  # type: ignore[arg-type]


def _faster_row(row: Any, factor: float) -> Any:
    if isinstance(row, tuple):  # threads, and the rate with so many
        return row[0], factor * row[1]
    rates = [name for name in row.__slots__ if name.endswith(("flops", "bandwidth"))]
    return replace(row, **{name: factor * getattr(row, name) for name in rates})


# When transfers hide -----------------------------------------------------------------------------------------------


def hiding(plan: Plan) -> Hiding | None:
    """The smallest step, in whole sequences, that hides every transfer and the optimizer behind compute; of several
    ranks, the step of all.

    `None` where none of up to `MOST_TOKENS` does, and on a device that shares memory, where nothing overlaps. The
    policy is the plan's, in one round; where kept graphs no longer fit, it recomputes.
    """
    question = plan.question
    if question.hardware.shares_memory:
        return None

    @cache
    def at(rows: int) -> Hiding:
        tokens = rows * question.length
        asked = replace(question, tokens_per_step=tokens)
        micro_batch = min(plan.micro_batch, rows)
        choice, found = _fitting(asked, plan.choice.change(micro_batches_per_round=0), micro_batch)
        instant = estimate(replace(asked, hardware=_instant(question.hardware)), choice, micro_batch)
        return Hiding(tokens, max(0.0, 1.0 - instant.seconds / found.seconds), found.fits(asked.budgets()))

    low, rows = 0, question.sequences  # not hidden, or no step at all; and hidden
    while at(rows).stall_share >= HIDDEN_STALL:
        if 2 * rows * question.length > MOST_TOKENS:
            return None
        low, rows = rows, 2 * rows
    for guesses in count():
        if rows - low <= 1:
            break
        middle = _between(low, rows, at) if guesses < MOST_GUESSES else (low + rows) // 2
        low, rows = (low, middle) if at(middle).stall_share < HIDDEN_STALL else (middle, rows)
    found = at(rows)
    asked = replace(question, tokens_per_step=found.tokens_per_step)
    there = found.fits or fits(asked)
    return replace(found, tokens_per_step=round(question.parts * found.tokens_per_step), fits=there)


def _between(low: int, rows: int, at: Callable[[int], Hiding]) -> int:
    """Where between two steps transfers should begin to hide: seconds of waiting hardly depend on sequences, so the
    share is about inverse to them."""
    if low == 0:
        return max(1, min(rows // 2, round(rows * at(rows).stall_share / HIDDEN_STALL)))
    first, last = (each * (at(each).stall_share - HIDDEN_STALL) for each in (low, rows))
    return min(rows - 1, max(low + 1, ceil(low + (rows - low) * first / (first - last))))


def _fitting(question: Question, choice: Choice, micro_batch: int) -> tuple[Choice, Estimate]:
    """The policy if it fits, else the same with recomputation, and what it takes."""
    found = estimate(question, choice, micro_batch)
    if choice.policy.activations == "keep" and not found.fits(question.budgets()):
        choice = choice.change(activations="recompute")
        found = estimate(question, choice, micro_batch)
    return choice, found


def _instant(hardware: Hardware) -> Hardware:
    """The machine with a bus, a host and a disk that take no time."""
    return replace(
        hardware,
        fetch_bandwidth=inf,
        grad_bandwidth=inf,
        host_bandwidth=inf,
        host_dram_bandwidth=inf,
        norm_bandwidth=inf,
        optimizer_bandwidth=(),
        disk_read_bandwidth=inf,
        disk_write_bandwidth=inf,
        disk_duplex_read_bandwidth=inf,
        disk_duplex_write_bandwidth=inf,
        host_copy_bandwidth=inf,
        pageable_fetch_bandwidth=inf,
        pageable_grad_bandwidth=inf,
        link_bandwidth=inf,
        node_bandwidth=inf,
    )


# Changes -----------------------------------------------------------------------------------------------------------


def free_changes(plan: Plan) -> tuple[Upgrade, ...]:
    """What costs nothing, and what it would gain, about: more sequences in a step, and gradients that are not clipped.

    Neither makes compute itself quicker, so nothing is tried where it does not wait. With micro-batches as they are,
    each is priced by an estimate, relative to the plan's own estimate or its replay, whichever is less; where the disk
    is used, or updates are streamed, of which estimates are too far off, it is planned for.
    """
    question, found = plan.question, []
    if plan.timeline.stall_seconds() < HIDDEN_STALL * plan.seconds:
        return ()
    today = estimate(question, plan.choice, plan.micro_batch).seconds
    for name, change in _free(question).items():
        asked = replace(change, overrides={**change.overrides, "micro_batch": plan.micro_batch})
        if _uses_disk(plan) or plan.policy.streamed_updates:
            better = faster_plan(asked, inf)
            gained = plan.seconds / better.seconds if better else 0.0
        else:
            (promised,) = survey(asked, [asked.budgets()])
            gained = min(today, plan.seconds) / promised.seconds if promised else 0.0
        if asked.sequences > question.sequences:
            gained = min(gained, 1.0)  # a step of more sequences is no shorter
        ratio = gained * asked.sequences / question.sequences
        if ratio > 1 + MIN_GAIN_SHOWN:
            found.append(Upgrade(name, plan.tokens_per_second * ratio, ratio))
    return tuple(found)


def _free(question: Question) -> dict[str, Question]:
    """Name of a change -> the question with it."""
    changes, twice = {}, 2 * question.sequences * question.length
    if twice <= MOST_TOKENS:
        name = f"{round(question.parts * twice):,} tokens per step, in twice the sequences"
        changes[name] = replace(question, tokens_per_step=twice)
    if question.clips:
        changes["no gradient clipping (max_grad_norm: null)"] = replace(question, clips=False)
    return changes


def upgrades(question: Question, plan: Plan | None) -> tuple[Upgrade, ...]:
    """What each single change of the machine would buy at the same question; `plan` is `None` where nothing fits.

    Every speed is that of a step replayed whole, as the plan's own is, so that they can be compared: of the plan's own
    step on the better machine, and where that has more memory, of the best plan for it, which is searched for where an
    estimate promises a gain. A share of streamed updates is chosen for the host and the bus of one machine: where it is
    the planner's, estimates are without, and so is the step on the better machine where that is quicker.
    """
    own = [] if plan is None else [plan]
    if plan is not None and plan.policy.streamed_updates and "streamed_updates" not in question.overrides:
        own.append(examine(question, plan.choice.change(streamed_updates=0.0), plan.micro_batch))
    today = estimate(question, own[-1].choice, own[-1].micro_batch).seconds if own else None
    found = []
    for name, change in _changes(question, _uses_disk(plan)).items():
        asked = change(question)
        seconds = [seconds_on(each, asked) for each in own]  # what fits, fits a better machine
        more_memory = asked.budgets() != question.budgets()
        better = faster_plan(asked, inf if today is None else WORTH_A_SEARCH * today) if more_memory else None
        seconds += [] if better is None else [better.seconds]
        best = min(seconds, default=None)
        rate = None if best is None else question.parts * question.sequences * question.length / best
        found.append(Upgrade(name, rate, None if plan is None or best is None else plan.seconds / best))
    return tuple(found)


def _uses_disk(plan: Plan | None) -> bool:
    return plan is not None and any(op.kind in DISK_KINDS for op in plan.timeline.schedule.ops)


def _changes(question: Question, uses_disk: bool) -> dict[str, Callable[[Question], Question]]:
    """Name of an upgrade -> the question with it."""
    hardware, limit = question.hardware, question.limits.device_nbytes
    changes: dict[str, Callable[[Question], Question]]
    if hardware.computes_in_host_memory:
        changes = {"twice the memory": _twice_the_host, "twice the memory's bandwidth": _twice(*MEMORIES)}
        changes["twice the processor's flops"] = _twice("compute")
    else:
        changes = {"twice the host memory": _twice_the_host, "twice the bus": _twice("bus")}
        changes["twice the host's bandwidth"] = _twice("host memory")
        whole = limit is not None and limit < usable_nbytes(hardware.device_nbytes)
        bigger = hardware.device_nbytes if whole else _next_device_size(max(hardware.device_nbytes, limit or 0))
        name = f"{'all ' if whole else ''}{bigger / GB:,.3g} GB of device memory"
        changes[name] = lambda question: _with_device_memory(question, bigger)
        changes["twice the device's flops"] = _twice("compute")
    if uses_disk:
        changes["twice the disk"] = _twice("disk")
    if question.model.ranks > 1 and question.overrides.get("delivery") != "shared":
        changes["twice the link"] = _twice("link")
    return changes


def _twice_the_host(question: Question) -> Question:
    """What ranks compute in, too, where that is host memory."""
    hardware, limits = question.hardware, question.limits
    tiers = ("host_nbytes", "device_nbytes") if hardware.slots_in_host else ("host_nbytes",)
    given = {tier: 2 * nbytes for tier in tiers if (nbytes := getattr(limits, tier)) is not None}
    there = {tier: 2 * getattr(hardware, tier) for tier in tiers}
    return replace(question, hardware=replace(hardware, **there), limits=replace(limits, **given))


def _with_device_memory(question: Question, nbytes: int) -> Question:
    """A budget of the user's was for the device as it is."""
    hardware = replace(question.hardware, device_nbytes=nbytes)
    return replace(question, hardware=hardware, limits=replace(question.limits, device_nbytes=None))


def with_more(hardware: Hardware, resource: str, factor: float) -> Hardware:
    """The machine with `factor` times the rates of a resource (a key of `RESOURCES`)."""
    return _faster(hardware, chain.from_iterable(RESOURCES[resource][1].values()), factor)


def _twice(*resources: str) -> Callable[[Question], Question]:
    """The question on a machine with twice the rates of these resources."""
    fields = [each for name in resources for fields in RESOURCES[name][1].values() for each in fields]
    return lambda question: replace(question, hardware=_faster(question.hardware, fields, 2.0))


def _next_device_size(nbytes: int) -> int:
    """Of the devices of the library, the next that is bigger by more than a few percent; else twice as much."""
    devices = [machine(name) for name in machine_names() if not machine(name).shares_memory]
    sizes = sorted({each.device_nbytes for each in devices})
    return next((size for size in sizes if size > 1.05 * nbytes), 2 * nbytes)


# Budgets -----------------------------------------------------------------------------------------------------------


def sweep(plan: Plan) -> Sweep:
    """Tokens per second with as much memory as the plan takes, the machine has, and the usual sizes around.

    A plan that fits into less fits into more, so a larger budget is never slower. Estimates, in proportion to the one
    for the memory that there is, which stands for the plan's own speed.
    """
    question = plan.question
    hardware, tiers = question.hardware, question.budgets()
    given = {tier: question.limits.of(tier) for tier in ("host", "device")}
    there = {"host": given["host"] or hardware.host_nbytes, "device": given["device"] or hardware.device_nbytes}
    hosts = _sizes_around(HOST_SIZES, plan.nbytes["host"], there["host"])
    devices: tuple[int, ...] = (0,)
    if "device" in tiers:
        devices = _sizes_around(DEVICE_SIZES, plan.nbytes["device"], there["device"])
    pairs = [{"host": host, "device": device} for host in hosts for device in devices]

    def usable(tier: str, nbytes: int) -> int:
        return nbytes if nbytes == given[tier] else usable_nbytes(nbytes)

    cells = survey(question, [{tier: usable(tier, pair[tier]) for tier in pair if tier in tiers} for pair in pairs])
    rates: list[list[float | None]] = []
    for row in range(len(hosts)):
        rates.append([])
        for column in range(len(devices)):
            cell = cells[row * len(devices) + column]
            known = [1 / cell.seconds] if cell is not None else []
            less = [rates[row - 1][column] if row else None, rates[row][column - 1] if column else None]
            rates[row].append(max([*known, *(rate for rate in less if rate is not None)], default=None))
    here = rates[hosts.index(there["host"])][devices.index(there["device"]) if "device" in tiers else 0]
    scale = plan.tokens_per_second / here if here else float(question.sequences * question.length)
    told = tuple(tuple(None if rate is None else scale * rate for rate in row) for row in rates)
    return Sweep(devices, hosts, told)


def _sizes_around(sizes: tuple[int, ...], taken: int, there: int) -> tuple[int, ...]:
    """The usual sizes from a quarter of what a plan takes to four times as much, and what is there."""
    return tuple(sorted({there, *(size for size in sizes if taken / 4 <= size <= 4 * taken)}))
