"""Analyses a plan: what limits the step, when transfers hide, how long a run takes, and what changes would gain.

Everything is read from the plan's timeline and its estimate, or found by pricing the same question with one thing
changed. The *critical path* is the chain of ops from the start of the step to its end in which each op starts when the
one before ends. Their seconds add up to the step, so they show what limits it; the busy seconds of a stream only show
how much it has to do. `report` shows the results.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil, inf

from megatrain.formatting import SECONDS_PER_DAY
from megatrain.plan.cost import copy_bandwidth, disk_bandwidths, host_dram_bandwidth, step_flops
from megatrain.plan.estimates import estimate, examine_rounds, gc_paused, seconds_on
from megatrain.plan.machines import machine, machine_names
from megatrain.plan.question import Plan, Question, usable_nbytes
from megatrain.plan.search import faster_plan
from megatrain.schedule import Timeline
from megatrain.spec import Hardware, Precision
from megatrain.spec.work import MOST_TOKENS

HIDDEN_STALL = 0.02
"""Transfers count as hidden if compute waits for less than this share of the step."""

WORTH_A_SEARCH = 0.99
"""Ratio of estimated step times, with a change over without, below which the changed question is planned for."""

MIN_GAIN_SHOWN = 0.01
"""A change that gains less is named, but has no row of its own."""

DISK_KINDS: tuple[str, ...] = ("READ", "WRITE")
"""Kinds of ops that use the disk tier."""

STREAM_WORDS = {
    "compute": "compute",
    "fetch": "bus up",
    "grad": "bus down",
    "host": "optimizer",
    "read": "disk in",
    "write": "disk out",
    "link": "link",
    "shared": "sums of ranks",
    "products": "matrices of updates",
}
"""Stream -> its name in output."""

IN_HOST_WORDS = {"fetch": "copies of weights", "grad": "copies of gradients"}
"""As `STREAM_WORDS`, if the device computes in host memory."""

RESOURCES: dict[str, tuple[str, ...]] = {
    "compute": ("flops", "flops_fp32", "peak_flops", "peak_flops_fp32", "products", "attention"),
    "device memory": ("device_bandwidth", "fresh_bandwidth", "elementwise"),
    "bus": (
        *("fetch_bandwidth", "duplex_fetch_bandwidth", "pageable_fetch_bandwidth", "shared_bus_bandwidth"),
        *("grad_bandwidth", "duplex_grad_bandwidth", "pageable_grad_bandwidth"),
    ),
    "host memory": (
        *("host_dram_bandwidth", "host_bandwidth", "optimizer_bandwidth", "norm_bandwidth", "host_copy_bandwidth"),
    ),
    "disk": (
        *("disk_read_bandwidth", "disk_duplex_read_bandwidth"),
        *("disk_write_bandwidth", "disk_duplex_write_bandwidth"),
    ),
    "link": ("link_bandwidth", "node_bandwidth"),
}
"""Resource of a machine -> fields of `Hardware` with its rates."""

MEMORIES = ("device memory", "bus", "host memory")
"""Resources that are a single one, the memory, if the device computes in host memory."""

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


@dataclass(frozen=True, slots=True)
class Change:
    """What one change of the run or of the machine would gain."""

    name: str
    tokens_per_second: float | None
    """`None` if the model does not fit with the change."""
    ratio: float | None
    """To the speed without the change; `None` unless the model fits with it and without."""


@dataclass(frozen=True)
class Outlook:
    """A plan and its analysis. `look` makes it; `advised` adds `changes`."""

    plan: Plan
    token_budget: float | None
    """Tokens of the whole run, if the user gave a number."""
    flops_per_second: float
    """Useful ones: recomputation does not count."""
    loads: tuple[Load, ...]
    """By their share of the critical path, largest first: the first stream limits the step."""
    changes: tuple[Change, ...] = ()
    """First those of the run, which cost nothing, then those of the machine."""

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
        words = stream_words(self.plan.question.hardware)
        seconds_by_stream = stalls(self.plan.timeline)
        return {words.get(stream, stream): spent / self.plan.seconds for stream, spent in seconds_by_stream.items()}

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
    def written_nbytes_per_billion_tokens(self) -> float:
        """Bytes that one rank writes to the disk while all ranks train on a billion tokens."""
        return self.plan.written_nbytes * 1e9 / self.plan.question.tokens_of_all

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
    return Outlook(plan, token_budget, useful, loads(plan))


@gc_paused()
def advised(outlook: Outlook) -> Outlook:
    """The outlook with what changes would gain. This plans for other questions and takes longer than the plan."""
    return replace(outlook, changes=changes(outlook.plan.question, outlook.plan))


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
    streams = [
        Load(stream, words.get(stream, stream), seconds, chained.get(stream, 0.0)) for stream, seconds in busy.items()
    ]
    return tuple(sorted(streams, key=lambda load: (-load.chain_seconds, -load.busy_seconds, load.stream)))


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
    index = max(range(len(ops)), key=lambda place: timeline.ends[place], default=-1)
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
        return next((place for place in candidates if place >= 0 and self._timeline.ends[place] == start), -1)


# When transfers hide -----------------------------------------------------------------------------------------------


def hidden_from(plan: Plan) -> int | None:
    """About how many tokens per step, in whole sequences of all ranks, hide transfers and updates behind compute.

    `None` if no step up to `MOST_TOKENS` does, and on a device that shares memory, where nothing overlaps. Compute
    takes longer with more tokens, other streams do not: each pass needs as many tokens as make compute its busiest
    stream, by the plan's estimate. It leaves out that copies of activations grow with the tokens, too.
    """
    question = plan.question
    if question.hardware.shares_memory:
        return None
    choice = plan.choice.change(micro_batches_per_round=0)  # rounds repeat transfers
    if "streamed_updates" not in question.overrides:  # whose share is chosen for one size of step
        choice = choice.change(streamed_updates=0.0)
    needed = 0.0
    for busy in estimate(question, choice, plan.micro_batch).passes():
        compute = busy.pop("compute", 0.0)
        needed = max(needed, max(busy.values(), default=0.0) / compute if compute else inf)
    is_hidden = plan.stall_seconds() < HIDDEN_STALL * plan.seconds
    sequences = question.sequences * (min(needed, 1.0) if is_hidden else needed)
    if sequences * question.length > MOST_TOKENS:
        return None
    return round(question.parts * ceil(sequences)) * question.length


# Changes -----------------------------------------------------------------------------------------------------------


def changes(question: Question, plan: Plan | None) -> tuple[Change, ...]:
    """What each change of the run or of the machine would gain. plan: `None` if nothing fits the question.

    All speeds are of whole replays, so that they can be compared: of the plan's step on the better machine; and if the
    step changes or the machine has more memory, of the best plan for that, which is searched for if an estimate shows
    a gain. The planner chooses the share of streamed updates for one machine, so the plan's step is also replayed
    without them.
    """
    plans = [] if plan is None else [plan]
    if plan is not None and plan.policy.streamed_updates and "streamed_updates" not in question.overrides:
        plans.append(examine_rounds(question, plan.choice.change(streamed_updates=0.0), plan.micro_batch))
    today = estimate(question, plans[-1].choice, plans[-1].micro_batch).seconds if plans else inf
    of_the_run, of_the_machine = _changes_of_the_run(plan), _changes_of_the_machine(question, plan)
    gains = []
    for name, asked in {**of_the_run, **of_the_machine}.items():
        seconds: list[float] = []
        if name in of_the_machine:  # with more memory alone, ops cost what they did
            same = asked.cost_key == question.cost_key
            seconds += [known.seconds if same else seconds_on(known, asked) for known in plans]
        if name in of_the_run or asked.budgets() != question.budgets():
            times_longer = asked.tokens_per_step / question.tokens_per_step
            better = faster_plan(asked, WORTH_A_SEARCH * times_longer * today)
            seconds += [] if better is None else [better.seconds]
        best = min(seconds, default=None)
        rate = None if best is None else asked.tokens_of_all / best
        gains.append(Change(name, rate, None if plan is None or rate is None else rate / plan.tokens_per_second))
    return tuple(gains)


def _changes_of_the_run(plan: Plan | None) -> dict[str, Question]:
    """Name of a change that costs nothing -> the changed question, in which the micro-batch stays: more sequences in a
    step, and no gradient clipping. Neither makes compute faster, so there is none if compute does not wait."""
    if plan is None or plan.stall_seconds() < HIDDEN_STALL * plan.seconds:
        return {}
    question = replace(plan.question, overrides={**plan.question.overrides, "micro_batch": plan.micro_batch})
    changed, twice = {}, replace(question, tokens_per_step=2 * question.sequences * question.length)
    if twice.tokens_per_step <= MOST_TOKENS:
        changed[f"{twice.tokens_of_all:,} tokens per step, in twice the sequences"] = twice
    if question.clips:
        changed["no gradient clipping (max_grad_norm: null)"] = replace(question, clips=False)
    return changed


def _changes_of_the_machine(question: Question, plan: Plan | None) -> dict[str, Question]:
    """Name of an upgrade -> the question on the upgraded machine."""
    hardware, limit = question.hardware, question.limits.device_nbytes

    def twice(*resources: str) -> Question:
        rates = chain.from_iterable(RESOURCES[name] for name in resources)
        return replace(question, hardware=_with_assumed_rates(hardware).scaled(rates, 2.0))

    if hardware.computes_in_host_memory:
        changed = {"twice the memory": _twice_the_host(question), "twice the memory's bandwidth": twice(*MEMORIES)}
        changed["twice the processor's flops"] = twice("compute")
    else:
        changed = {"twice the host memory": _twice_the_host(question), "twice the bus": twice("bus")}
        changed["twice the host's bandwidth"] = twice("host memory")
        changed["twice the device's flops"] = twice("compute")
    if not hardware.computes_in_host_memory and not hardware.divided_memory:
        whole = limit is not None and limit < usable_nbytes(hardware.device_nbytes)
        bigger = hardware.device_nbytes if whole else _next_device_size(max(hardware.device_nbytes, limit or 0))
        # The limit was meant for the present device.
        limits = replace(question.limits, device_nbytes=None)
        larger = replace(question, hardware=replace(hardware, device_nbytes=bigger), limits=limits)
        changed[f"{'all ' if whole else ''}{bigger / GB:,.3g} GB of device memory"] = larger
    if plan is not None and any(op.kind in DISK_KINDS for op in plan.timeline.schedule.ops):
        changed["twice the disk"] = twice("disk")
    if question.model.ranks > 1 and question.overrides.get("delivery") != "shared":
        changed["twice the link"] = twice("link")
    return changed


def _twice_the_host(question: Question) -> Question:
    """The question with twice the host memory, including the part that ranks on a CPU compute in."""
    hardware, limits = question.hardware, question.limits
    tiers = ("host_nbytes", "device_nbytes") if hardware.slots_in_host else ("host_nbytes",)
    given = {tier: 2 * nbytes for tier in tiers if (nbytes := getattr(limits, tier)) is not None}
    installed = {tier: 2 * getattr(hardware, tier) for tier in tiers}
    return replace(question, hardware=replace(hardware, **installed), limits=replace(limits, **given))


def _next_device_size(nbytes: int) -> int:
    """The next larger memory of a described device, at least 5% larger; or twice as much, if there is none."""
    devices = [machine(name) for name in machine_names() if not machine(name).shares_memory]
    sizes = sorted({device.device_nbytes for device in devices})
    return next((size for size in sizes if size > 1.05 * nbytes), 2 * nbytes)


def with_more(hardware: Hardware, resource: str, factor: float) -> Hardware:
    """The machine with `factor` times the rates of a resource (a key of `RESOURCES`)."""
    return _with_assumed_rates(hardware).scaled(RESOURCES[resource], factor)


def _with_assumed_rates(hardware: Hardware) -> Hardware:
    """The machine with the rates that `cost` assumes for unknown ones."""
    read, write = disk_bandwidths(hardware)
    return replace(
        hardware,
        host_dram_bandwidth=host_dram_bandwidth(hardware),
        host_copy_bandwidth=copy_bandwidth(hardware),
        disk_read_bandwidth=read,
        disk_write_bandwidth=write,
    )
