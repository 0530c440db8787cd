"""Analyses a plan: what limits the step, when transfers hide, how long a run takes, and what changes would gain.

Everything is read from the plan's timeline, or found by pricing the same question with one thing changed. The
*critical path* is the chain of ops from the start of the step to its end in which each op starts when the one before
ends. Their seconds add up to the step, so they show what limits it; the busy seconds of a stream only show how much it
has to do. `report` and `html` show the results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, count
from math import ceil, inf
from typing import Any

from megatrain.formatting import SECONDS_PER_DAY
from megatrain.plan.cost import (
    disk_bandwidths,
    host_dram_bandwidth,
    packing_bandwidth,
    step_flops,
)
from megatrain.plan.estimates import estimate, examine, examine_rounds, gc_paused, seconds_on
from megatrain.plan.machines import machine, machine_names
from megatrain.plan.question import Choice, Estimate, Plan, Question, usable_nbytes
from megatrain.plan.search import faster_plan, fits, survey
from megatrain.schedule import Timeline
from megatrain.spec import Hardware, Precision
from megatrain.spec.work import MOST_TOKENS

HIDDEN_STALL = 0.02
"""Transfers count as hidden if compute waits for less than this share of the step."""

MOST_REPLAYED_CALLS = 4096
"""Calls of units in the largest step that is replayed to find out when transfers hide."""

REPLAYED_PARTS = 4
"""The step that is then found is too large by one part in so many at the most."""

MOST_GUESSES = 6
"""Interpolations in the search for the smallest step that hides transfers, before it goes on by bisection."""

WORTH_A_SEARCH = 0.99
"""Ratio of estimated step times, with an upgrade over without, below which the upgraded machine is planned for."""

MORE_BY = 1.1
"""Factor by which a resource is increased to see how the step depends on it."""

MIN_GAIN_SHOWN = 0.01
"""A free change that gains less is not shown, and an upgrade has no row of its own."""

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
"""Stream -> its name in output."""

IN_HOST_WORDS = {"fetch": "copies of weights", "grad": "copies of gradients"}
"""As `STREAM_WORDS`, if the device computes in host memory."""

RESOURCES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "compute": (("compute",), ("flops", "flops_fp32", "peak_flops", "peak_flops_fp32", "products", "attention")),
    "device memory": ((), ("device_bandwidth", "elementwise_bandwidth", "fresh_bandwidth", "elementwise")),
    "bus": (
        ("fetch", "grad"),
        (
            *("fetch_bandwidth", "duplex_fetch_bandwidth", "pageable_fetch_bandwidth", "shared_bus_bandwidth"),
            *("grad_bandwidth", "duplex_grad_bandwidth", "pageable_grad_bandwidth"),
        ),
    ),
    "host memory": (
        ("host", "pack", "unpack", "shared"),
        ("host_dram_bandwidth", "host_bandwidth", "optimizer_bandwidth", "norm_bandwidth", "host_copy_bandwidth"),
    ),
    "disk": (
        ("read", "write"),
        (
            *("disk_read_bandwidth", "disk_duplex_read_bandwidth"),
            *("disk_write_bandwidth", "disk_duplex_write_bandwidth"),
        ),
    ),
    "link": (("link",), ("link_bandwidth", "node_bandwidth")),
}
"""Resource of a machine -> (streams that use it, fields of `Hardware` with its rates)."""

MEMORIES = ("device memory", "bus", "host memory")
"""Resources that are a single one, `memory`, if the device computes in host memory."""

GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """How busy one stream is in a step, and how much of the critical path is on it."""

    stream: str
    name: str
    """Its name in output."""
    busy_seconds: float
    chain_seconds: float
    """On the critical path."""
    slack_seconds: float
    """In which the stream is idle."""


@dataclass(frozen=True, slots=True)
class Hiding:
    """The smallest step that hides transfers and updates behind compute (`HIDDEN_STALL`)."""

    tokens_per_step: int
    stall_share: float
    fits: bool
    """With this plan's policy or another."""
    takes_more: bool = False
    """Transfers are not hidden yet: it is the largest step that was looked at."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What the plan's step gains from a machine with `MORE_BY` of one resource."""

    resource: str
    busy: tuple[tuple[str, float], ...]
    """(name of a stream that uses it, share of the step in which it is busy)"""
    saved: float
    """Share of the step's time. Negative if the step takes longer, because different ops overlap."""


@dataclass(frozen=True, slots=True)
class Upgrade:
    """What one change would gain."""

    name: str
    tokens_per_second: float | None
    """`None` if the model does not fit with the change."""
    ratio: float | None
    """To the speed without the change; `None` unless the model fits with it and without."""


@dataclass(frozen=True)
class Outlook:
    """A plan and its analysis. `look` makes it; `advised` adds `hiding`, `upgrades` and `free_changes`."""

    plan: Plan
    token_budget: float | None
    """Tokens of the whole run, if the user gave a number."""
    flops_per_second: float
    """Useful ones: recomputation does not count."""
    loads: tuple[Load, ...]
    """By their share of the critical path, largest first: the first stream limits the step."""
    hiding: Hiding | None = None
    upgrades: tuple[Upgrade, ...] = ()
    """Changes of the machine."""
    free_changes: tuple[Upgrade, ...] = ()
    """Changes of the run, which cost nothing."""
    sensitivities: tuple[Sensitivity, ...] = ()
    """By what they save, largest first."""

    @property
    def peak_flops(self) -> float:
        return peak_flops(self.plan.question.hardware, self.plan.question.precision)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: useful operations per second over the peak of the device."""
        return self.flops_per_second / self.peak_flops

    @property
    def stall_share(self) -> float:
        """Share of the step in which compute waits."""
        return self.plan.timeline.stall_seconds() / self.plan.seconds

    @property
    def stalls(self) -> dict[str, float]:
        """Name of a stream -> share of the step in which compute waits for it, largest first."""
        found, words = stalls(self.plan.timeline), stream_words(self.plan.question.hardware)
        return {words.get(stream, stream): seconds / self.plan.seconds for stream, seconds in found.items()}

    @property
    def run_seconds(self) -> float | None:
        return None if self.token_budget is None else self.token_budget / self.plan.tokens_per_second

    @property
    def seconds_per_billion_tokens(self) -> float:
        return 1e9 / self.plan.tokens_per_second

    @property
    def written_nbytes_per_day(self) -> float:
        """Bytes written to the disk."""
        return written_nbytes_per_day(self.plan)

    @property
    def drive_days(self) -> float | None:
        """Days until the drive reaches its stated endurance; `None` if that is unknown or nothing is written."""
        endurance, per_day = self.plan.question.hardware.disk_endurance_nbytes, self.written_nbytes_per_day
        return None if endurance is None or not per_day else endurance / per_day


def written_nbytes_per_day(plan: Plan) -> float:
    """Bytes that a day of training writes to the disk."""
    return plan.written_nbytes / plan.seconds * SECONDS_PER_DAY


@gc_paused()
def look(plan: Plan, token_budget: float | None = None) -> Outlook:
    """The analysis that needs no further planning. token_budget: tokens of the whole run, if known."""
    question = plan.question
    useful = step_flops(question.model, [(question.sequences, question.length)]) / plan.seconds
    return Outlook(plan, token_budget, useful, loads(plan), sensitivities=sensitivities(plan))


@gc_paused()
def advised(outlook: Outlook) -> Outlook:
    """The outlook with what changes would gain. This plans for other questions and takes longer than the plan."""
    plan = outlook.plan
    return replace(
        outlook, hiding=hiding(plan), upgrades=upgrades(plan.question, plan), free_changes=free_changes(plan)
    )


def peak_flops(hardware: Hardware, precision: Precision) -> float:
    """The device's stated peak of operations per second, or the rate that it achieves if none is stated."""
    if precision == "fp32":
        return hardware.peak_flops_fp32 or hardware.flops_fp32 or hardware.peak_flops or hardware.flops
    return hardware.peak_flops or hardware.flops


# What limits -------------------------------------------------------------------------------------------------------


def stream_words(hardware: Hardware) -> dict[str, str]:
    """Stream -> its name in output, on this machine."""
    return STREAM_WORDS | (IN_HOST_WORDS if hardware.computes_in_host_memory else {})


def loads(plan: Plan) -> tuple[Load, ...]:
    """All streams that are used, by their share of the critical path, largest first."""
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

    Waits are followed back: if compute waits for a fetch that waits for an update that waits for the disk, each of the
    three streams gets the seconds in which it was the one at work.
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
    for index in range(len(ops)):  # ops that end after the last compute
        if timeline.ends[index] > free and ops[index].stream != "compute":
            seconds[ops[index].stream] += timeline.ends[index] - free
            free = timeline.ends[index]
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _chain_seconds(timeline: Timeline) -> dict[str, float]:
    """Stream -> its seconds on the critical path, which is followed back from the last op."""
    ops, causes = timeline.schedule.ops, _Causes(timeline)
    seconds: dict[str, float] = defaultdict(float)
    index = max(range(len(ops)), key=lambda each: timeline.ends[each], default=-1)
    while index >= 0:
        seconds[ops[index].stream] += timeline.ends[index] - timeline.starts[index]
        index = causes.of(index)
    return dict(seconds)


class _Causes:
    """For each op, the op that it waited for."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._before: list[int] = []
        last: dict[str, int] = {}
        for index, op in enumerate(timeline.schedule.ops):
            self._before.append(last.get(op.stream, -1))
            last[op.stream] = index

    def of(self, index: int) -> int:
        """The index of an op that ended when this one started, or -1.

        Candidates are the op before on its stream, then its waits, then any earlier op, since streams may share the
        processor.
        """
        start, waits = self._timeline.starts[index], self._timeline.schedule.waits[index]
        candidates = chain((self._before[index],), reversed(waits), range(index - 1, -1, -1))
        return next((each for each in candidates if each >= 0 and self._timeline.ends[each] == start), -1)


# What the step depends on --------------------------------------------------------------------------------------------


def sensitivities(plan: Plan) -> tuple[Sensitivity, ...]:
    """What the plan's step gains from `MORE_BY` of each resource that it uses, by whole replays."""
    busy = {load.stream: (load.name, load.busy_seconds / plan.seconds) for load in loads(plan)}
    found = []
    for resource, (streams, fields) in _resources(plan).items():
        shares = tuple(busy[stream] for stream in streams if stream in busy)
        found.append(Sensitivity(resource, shares, _saved(plan, fields)))
    return tuple(sorted(found, key=lambda each: -round(each.saved, 4)))


def _resources(plan: Plan) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """The entries of `RESOURCES` that the plan's step may depend on. `MEMORIES` are one entry if the device computes in
    host memory."""
    found = dict(RESOURCES)
    if not _uses_disk(plan):
        del found["disk"]
    if plan.question.model.ranks == 1 or plan.policy.delivery == "shared":
        del found["link"]
    if plan.question.hardware.computes_in_host_memory:
        streams, fields = zip(*(found.pop(name) for name in MEMORIES), strict=True)
        found["memory"] = tuple(chain.from_iterable(streams)), tuple(chain.from_iterable(fields))
    return found


def _saved(plan: Plan, fields: Iterable[str]) -> float:
    """Share of the step's time that `MORE_BY` of these rates saves."""
    hardware = _faster(plan.question.hardware, fields, MORE_BY)
    return 1.0 - seconds_on(plan, replace(plan.question, hardware=hardware)) / plan.seconds


def _with_assumed_rates(hardware: Hardware) -> Hardware:
    """The machine with the rates that `cost` assumes for unknown ones."""
    read, write = disk_bandwidths(hardware)
    return replace(
        hardware,
        host_dram_bandwidth=host_dram_bandwidth(hardware),
        host_copy_bandwidth=packing_bandwidth(hardware),
        disk_read_bandwidth=read,
        disk_write_bandwidth=write,
    )


def _faster(hardware: Hardware, fields: Iterable[str], factor: float) -> Hardware:
    """The machine with `factor` times these rates. A field may be a table of rates."""
    hardware = _with_assumed_rates(hardware)
    changes: dict[str, object] = {}
    for field in fields:
        rate = getattr(hardware, field)
        if isinstance(rate, tuple):
            changes[field] = tuple(_faster_row(row, factor) for row in rate)
        elif rate is not None:
            changes[field] = factor * rate
    return replace(hardware, **changes)  # type: ignore[arg-type]


def _faster_row(row: Any, factor: float) -> Any:
    if isinstance(row, tuple):  # (threads, rate)
        return row[0], factor * row[1]
    rates = [name for name in row.__slots__ if name.endswith(("flops", "bandwidth"))]
    return replace(row, **{name: factor * getattr(row, name) for name in rates})


# When transfers hide -----------------------------------------------------------------------------------------------


def hiding(plan: Plan) -> Hiding | None:
    """The smallest step, in whole sequences of all ranks, that hides transfers and the optimizer behind compute.

    `None` if no step up to `MOST_TOKENS` does, and on a device that shares memory, where nothing overlaps. The policy
    is the plan's, in one round without streamed updates; if kept graphs do not fit, it recomputes.

    Steps are estimated. If the plan's own step waits where its estimate does not, or has state on a drive, they are
    replayed, up to `MOST_REPLAYED_CALLS`; if even the last of these waits, the result says that it takes more.
    """
    question, stalled = plan.question, plan.timeline.stall_seconds()
    if question.hardware.shares_memory:
        return None
    own, is_hidden = question.sequences, stalled < HIDDEN_STALL * plan.seconds
    estimated = _estimated_step(plan, own)
    uses_drive = any(each.uses_drive for each in plan.policy.placements)
    replays = not is_hidden and (uses_drive or estimated.stall_share < HIDDEN_STALL)
    step = cache(partial(_replayed_step if replays else _estimated_step, plan))
    most = MOST_TOKENS // question.length
    if replays:
        most = min(most, max(2 * own, plan.micro_batch * MOST_REPLAYED_CALLS // len(question.model.units)))
    low, first, parts = (own, 2 * own, REPLAYED_PARTS) if replays else (0, own, None)
    waits = _surely_waits(plan) if replays else lambda rows: False
    rows = _hidden_from(low, min(first, most), most, lambda rows: step(rows).stall_share, parts, waits)
    if is_hidden and (rows is None or rows > own):
        return Hiding(question.tokens_of_all, stalled / plan.seconds, fits=True)
    if rows is None and not replays:
        return None
    found, asked = step(rows or most), replace(question, tokens_per_step=(rows or most) * question.length)
    fitting = found.fits or fits(asked)
    return Hiding(asked.tokens_of_all, found.stall_share, fitting, takes_more=rows is None)


@dataclass(frozen=True, slots=True)
class _Step:
    """Seconds of a step, the share of them in which compute waits, and whether it fits."""

    seconds: float
    stall_share: float
    fits: bool


def _estimated_step(plan: Plan, rows: int) -> _Step:
    """A step of so many sequences."""
    asked, choice, micro_batch, found = _with_sequences(plan, rows)
    instant = estimate(replace(asked, hardware=_instant(asked.hardware)), choice, micro_batch)
    return _Step(found.seconds, max(0.0, 1.0 - instant.seconds / found.seconds), found.fits(asked.budgets()))


def _replayed_step(plan: Plan, rows: int) -> _Step:
    """A step of so many sequences."""
    asked, choice, micro_batch, _ = _with_sequences(plan, rows)
    found = examine(asked, choice, micro_batch)
    return _Step(found.seconds, found.timeline.stall_seconds() / found.seconds, found.taken.fits(asked.budgets()))


def _surely_waits(plan: Plan) -> Callable[[int], bool]:
    """Whether compute waits in a step of so many sequences, since another stream alone is busy for much longer."""

    def waits(rows: int) -> bool:
        *_, found = _with_sequences(plan, rows)
        return (1 - 2 * HIDDEN_STALL) * max(found.busy.values()) > found.busy.get("compute", 0.0)

    return waits


def _with_sequences(plan: Plan, rows: int) -> tuple[Question, Choice, int, Estimate]:
    """The plan for a step of so many sequences, in one round: question, choice, micro-batch size and estimate.

    The planner chooses the share of streamed updates for one size of step, so they stay where the state is."""
    asked = replace(plan.question, tokens_per_step=rows * plan.question.length)
    micro_batch = min(plan.micro_batch, rows)
    choice = plan.choice.change(micro_batches_per_round=0)
    if "streamed_updates" not in asked.overrides:
        choice = choice.change(streamed_updates=0.0)
    choice, found = _fitting(asked, choice, micro_batch)
    return asked, choice, micro_batch, found


def _hidden_from(
    low: int,
    rows: int,
    most: int,
    stall_share: Callable[[int], float],
    parts: int | None,
    surely_waits: Callable[[int], bool],
) -> int | None:
    """The fewest sequences, up to `most`, with which compute hardly waits; `None` where none do.

    low: sequences that are too few, or 0. rows: where the search begins. parts: the result may be too high by one part
    in so many; `None`: it is exact.
    """
    while surely_waits(rows) or stall_share(rows) >= HIDDEN_STALL:
        if rows == most:
            return None
        low, rows = rows, min(most, 2 * rows)
    for guesses in count():
        if rows - low <= (1 if parts is None else max(1, rows // parts)):
            return rows
        middle = _interpolated(low, rows, stall_share) if guesses < MOST_GUESSES else (low + rows) // 2
        low, rows = (low, middle) if stall_share(middle) < HIDDEN_STALL else (middle, rows)
    raise AssertionError


def _interpolated(low: int, rows: int, stall_share: Callable[[int], float]) -> int:
    """The number of sequences between `low` and `rows` with a stall of about `HIDDEN_STALL`. The seconds of waiting
    hardly depend on the step, so their share is about inverse to its size."""
    if low == 0:
        return max(1, min(rows // 2, round(rows * stall_share(rows) / HIDDEN_STALL)))
    first, last = (each * (stall_share(each) - HIDDEN_STALL) for each in (low, rows))
    return min(rows - 1, max(low + 1, ceil(low + (rows - low) * first / (first - last))))


def _fitting(question: Question, choice: Choice, micro_batch: int) -> tuple[Choice, Estimate]:
    """The choice if it fits, else the same with recomputation; and its estimate."""
    found = estimate(question, choice, micro_batch)
    if choice.policy.activations == "keep" and not found.fits(question.budgets()):
        choice = choice.change(activations="recompute")
        found = estimate(question, choice, micro_batch)
    return choice, found


def _instant(hardware: Hardware) -> Hardware:
    """The machine with infinitely fast transfers and optimizer."""
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
    """Approximate gains of changes that cost nothing: more sequences in a step, and no gradient clipping.

    Neither makes compute faster, so nothing is tried if compute does not wait. The micro-batch size stays. Each change
    is estimated, relative to the plan's estimate or replay, whichever is less. If the plan uses the disk or streams
    updates, estimates are too far off, and each change is planned for.
    """
    question, found = plan.question, []
    if plan.timeline.stall_seconds() < HIDDEN_STALL * plan.seconds:
        return ()
    today = estimate(question, plan.choice, plan.micro_batch).seconds
    for name, change in _free_changes(question).items():
        asked = replace(change, overrides={**change.overrides, "micro_batch": plan.micro_batch})
        if _uses_disk(plan) or plan.policy.streamed_updates:
            better = faster_plan(asked)
            gained = plan.seconds / better.seconds if better else 0.0
        else:
            (estimated,) = survey(asked, [asked.budgets()])
            gained = min(today, plan.seconds) / estimated.seconds if estimated else 0.0
        if asked.sequences > question.sequences:
            gained = min(gained, 1.0)  # a step of more sequences is not shorter
        ratio = gained * asked.sequences / question.sequences
        if ratio > 1 + MIN_GAIN_SHOWN:
            found.append(Upgrade(name, plan.tokens_per_second * ratio, ratio))
    return tuple(found)


def _free_changes(question: Question) -> dict[str, Question]:
    """Name of a free change -> the changed question."""
    changes, twice = {}, 2 * question.sequences * question.length
    if twice <= MOST_TOKENS:
        changed = replace(question, tokens_per_step=twice)
        changes[f"{changed.tokens_of_all:,} tokens per step, in twice the sequences"] = changed
    if question.clips:
        changes["no gradient clipping (max_grad_norm: null)"] = replace(question, clips=False)
    return changes


def upgrades(question: Question, plan: Plan | None) -> tuple[Upgrade, ...]:
    """What each single upgrade of the machine would gain. plan: `None` if nothing fits the question.

    All speeds are of whole replays, so that they can be compared: of the plan's step on the better machine, and if that
    has more memory, of the best plan for it, which is searched for if an estimate shows a gain. The planner chooses the
    share of streamed updates for one machine, so the plan's step is also replayed without them.
    """
    own = [] if plan is None else [plan]
    if plan is not None and plan.policy.streamed_updates and "streamed_updates" not in question.overrides:
        own.append(examine_rounds(question, plan.choice.change(streamed_updates=0.0), plan.micro_batch))
    today = estimate(question, own[-1].choice, own[-1].micro_batch).seconds if own else inf
    found = []
    for name, change in _upgrades(question, _uses_disk(plan)).items():
        asked = change(question)
        seconds = [seconds_on(each, asked) for each in own]
        more_memory = asked.budgets() != question.budgets()
        better = faster_plan(asked, WORTH_A_SEARCH * today) if more_memory else None
        seconds += [] if better is None else [better.seconds]
        best = min(seconds, default=None)
        rate = None if best is None else question.tokens_of_all / best
        found.append(Upgrade(name, rate, None if plan is None or best is None else plan.seconds / best))
    return tuple(found)


def _uses_disk(plan: Plan | None) -> bool:
    return plan is not None and any(op.kind in DISK_KINDS for op in plan.timeline.schedule.ops)


def _upgrades(question: Question, uses_disk: bool) -> dict[str, Callable[[Question], Question]]:
    """Name of an upgrade -> a function that applies it to the question."""
    hardware, limit = question.hardware, question.limits.device_nbytes
    changes: dict[str, Callable[[Question], Question]]
    if hardware.computes_in_host_memory:
        changes = {"twice the memory": _twice_the_host, "twice the memory's bandwidth": _twice(*MEMORIES)}
        changes["twice the processor's flops"] = _twice("compute")
    else:
        changes = {"twice the host memory": _twice_the_host, "twice the bus": _twice("bus")}
        changes["twice the host's bandwidth"] = _twice("host memory")
        changes["twice the device's flops"] = _twice("compute")
    if not hardware.computes_in_host_memory and not hardware.divided_memory:
        whole = limit is not None and limit < usable_nbytes(hardware.device_nbytes)
        bigger = hardware.device_nbytes if whole else _next_device_size(max(hardware.device_nbytes, limit or 0))
        name = f"{'all ' if whole else ''}{bigger / GB:,.3g} GB of device memory"
        changes[name] = lambda question: _with_device_memory(question, bigger)
    if uses_disk:
        changes["twice the disk"] = _twice("disk")
    if question.model.ranks > 1 and question.overrides.get("delivery") != "shared":
        changes["twice the link"] = _twice("link")
    return changes


def _twice_the_host(question: Question) -> Question:
    """The question with twice the host memory, including the part that ranks on a CPU compute in."""
    hardware, limits = question.hardware, question.limits
    tiers = ("host_nbytes", "device_nbytes") if hardware.slots_in_host else ("host_nbytes",)
    given = {tier: 2 * nbytes for tier in tiers if (nbytes := getattr(limits, tier)) is not None}
    there = {tier: 2 * getattr(hardware, tier) for tier in tiers}
    return replace(question, hardware=replace(hardware, **there), limits=replace(limits, **given))


def _with_device_memory(question: Question, nbytes: int) -> Question:
    """The question with so much device memory, and without a limit, which was meant for the present device."""
    hardware = replace(question.hardware, device_nbytes=nbytes)
    return replace(question, hardware=hardware, limits=replace(question.limits, device_nbytes=None))


def with_more(hardware: Hardware, resource: str, factor: float) -> Hardware:
    """The machine with `factor` times the rates of a resource (a key of `RESOURCES`)."""
    return _faster(hardware, RESOURCES[resource][1], factor)


def _twice(*resources: str) -> Callable[[Question], Question]:
    """A function that changes a question to a machine with twice the rates of these resources."""
    fields = [field for name in resources for field in RESOURCES[name][1]]
    return lambda question: replace(question, hardware=_faster(question.hardware, fields, 2.0))


def _next_device_size(nbytes: int) -> int:
    """The next larger memory of a described device, at least 5% larger; or twice as much, if there is none."""
    devices = [machine(name) for name in machine_names() if not machine(name).shares_memory]
    sizes = sorted({each.device_nbytes for each in devices})
    return next((size for size in sizes if size > 1.05 * nbytes), 2 * nbytes)
