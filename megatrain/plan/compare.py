"""The same step as other systems take it, on the same machine: replayed beside ours, not measured.

Each system is a schedule of our own builder, priced like ours, at the best choices that fit it:

* *ZeRO-3 offload*: one micro-batch after the other through the whole model, recomputing, with gradients summed in host
  memory in float32 and the optimizer at the end; 18 bytes per parameter in the host.
* *MegaTrain as published* (arXiv 2604.05091): layer-major, boundaries kept at an interval, three loads of every weight,
  the optimizer at the end; 12 bytes per parameter, without float32 masters (whose traffic is not charged to it).
* *in memory*: weights, gradients and optimizer state (16 to 18 bytes per parameter) lie on the device, and so does the
  optimizer's work. Where that does not fit, its speed is still shown: that of a model that fits.

Steps are extrapolated from shallow models and few micro-batches, as in `search`. It leaves out what a replay cannot
know: how near each system comes to its own schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from megatrain.layout import layout_of
from megatrain.plan.cost import op_seconds, step_flops
from megatrain.plan.estimates import coarse, cut, estimate, shallow
from megatrain.plan.knobs import ATTENTION, CHOSEN
from megatrain.plan.question import Plan, Question
from megatrain.plan.rates import optimizer_bandwidth
from megatrain.schedule import Op, Schedule, replay
from megatrain.schedule.others import build_interval, build_micro_major
from megatrain.spec import Hardware, Keep, ModelSpec, Policy, Work

FEW, ONE_MORE = 3, 4
"""Micro-batches that a micro-batch-major step is replayed with; each further one costs as much as the last."""

INTERVALS = (2, 4, 8, 16)
"""Of kept boundaries, in layers. At 1 every boundary would be kept, and weights loaded twice."""

LOW_BITS_NBYTES = 2
"""Per parameter in bf16: what a float32 master has beside the weight that streams."""

WORDS: dict[Keep, str] = {
    "graph": "graphs kept",
    "chosen": "chosen outputs kept",
    "attention": "attention's outputs kept",
    "input": "recomputed",
    "offload": "inputs in the host",
    "drop": "inputs dropped",
}
"""What is left of a layer's forward."""

Price = Callable[[Op], float]
Builds = Callable[[ModelSpec, Policy, Work], Schedule]


@dataclass(frozen=True, slots=True)
class Row:
    """One system's step of the same sequences. `fits` is false where its bytes exceed the machine's."""

    name: str
    choices: str
    seconds: float
    tokens_per_second: float
    flops_per_second: float
    """Useful."""
    device_nbytes: int
    host_nbytes: int
    stall_share: float
    """Of the step, in which the device computes neither forward nor backward."""
    fits: bool
    ratio: float
    """Its step over ours."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a step of one system takes with one set of choices."""

    choices: str
    seconds: float
    compute_seconds: float
    device_nbytes: int
    host_nbytes: int

    def fits(self, budgets: Mapping[str, int]) -> bool:
        needed = {"device": self.device_nbytes, "host": self.host_nbytes}
        return all(nbytes <= budgets.get(tier, nbytes) for tier, nbytes in needed.items())


def compare(plan: Plan) -> tuple[Row, ...]:
    """Ours, then the others; on a device that shares memory with the host, where nothing streams, the last alone."""
    question = plan.question
    host = plan.nbytes["host"] - plan.save_nbytes  # the others' tables are of a step alone
    ours = _Taken(_ours(plan), plan.seconds, plan.timeline.busy_seconds("compute"), plan.nbytes.get("device", 0), host)
    rows = [_row("this plan", ours, plan, fits=ours.fits(question.budgets()))]
    if not question.hardware.shares_memory:
        rows.append(_best("ZeRO-3 offload", _zero_offload(plan), plan, ("host", "device")))
        rows.append(_best("MegaTrain as published", _published(plan), plan, ("host", "device")))
    rows.append(_in_memory(plan))
    return tuple(rows)


def _row(name: str, taken: _Taken, plan: Plan, *, fits: bool) -> Row:
    question = plan.question
    useful = step_flops(question.model, [(question.rows, question.length)])
    return Row(
        name,
        taken.choices,
        taken.seconds,
        question.rows * question.length / taken.seconds,
        useful / taken.seconds,
        taken.device_nbytes,
        taken.host_nbytes,
        1.0 - taken.compute_seconds / taken.seconds,
        fits,
        taken.seconds / plan.seconds,
    )


def _best(name: str, candidates: Iterable[_Taken], plan: Plan, spared: tuple[str, ...]) -> Row:
    """The quickest that fits; where none does, that with the budgets of `spared` lifted, one after the other."""
    found, budgets = list(candidates), plan.question.budgets()
    for lifted in range(len(spared) + 1):
        left = {tier: nbytes for tier, nbytes in budgets.items() if tier not in spared[:lifted]}
        if within := [taken for taken in found if taken.fits(left)]:
            return _row(name, min(within, key=lambda taken: taken.seconds), plan, fits=not lifted)
    raise AssertionError("every candidate is within no budget at all")


def _ours(plan: Plan) -> str:
    return f"{_batches(plan.work.micro_batches, plan.micro_batch)}, {_again(plan.policy)}"


def _again(policy: Policy) -> str:
    if policy.activation_rows:
        kept = Counter(keep for row in policy.activation_rows for keep in row)
        return ", ".join(f"{count / kept.total():.0%} {WORDS[keep]}" for keep, count in kept.most_common())
    return "keeps graphs" if policy.activations == "keep" else "recomputes"


def _batches(count: float, micro_batch: int) -> str:
    return f"{count:,.0f} x {micro_batch:,} sequences" if count > 1 else f"{micro_batch:,} sequences at once"


def _sizes(question: Question) -> list[int]:
    """Sequences of a micro-batch: powers of two, and all at once."""
    return sorted({*(1 << power for power in range(question.rows.bit_length())), question.rows})


# ZeRO-3 offload ----------------------------------------------------------------------------------------------------


def _zero_offload(plan: Plan) -> list[_Taken]:
    question = plan.question
    policy = replace(
        replace(plan.policy, homes=(), activation_rows=()),
        activations="recompute",
        update="after_backward",
        masters="whole",
        grad_precision="fp32",
        weight_slots=2,
        read_ahead_nbytes=0,
        grad_slots=2,
    )
    found = []
    for rows in _sizes(question):
        words = f"{_batches(question.rows / rows, rows)}, recomputes"
        found.append(_micro_major(question, policy, rows, words))
    return found


def _micro_major(question: Question, policy: Policy, rows: int, words: str) -> _Taken:
    """Linear in micro-batches and in layers of each kind."""
    count = question.rows / rows
    weights = {FEW: ONE_MORE - count, ONE_MORE: count - FEW} if count > ONE_MORE else {-(-question.rows // rows): 1.0}
    parts = []
    for micro_batches, times in weights.items():
        exact = cut(question, rows)
        alike = Work((rows * question.length,) * micro_batches, question.length)
        work = exact if micro_batches == exact.micro_batches else alike
        parts += [
            (times * weight, _replayed(question, model, policy, work, build_micro_major))
            for weight, model in shallow(question.model)
        ]
    return _sum(words, parts)


# MegaTrain as published --------------------------------------------------------------------------------------------


def _published(plan: Plan) -> list[_Taken]:
    """For each micro-batch the closest interval that fits: it computes least again."""
    question = plan.question
    policy = replace(
        plan.policy, homes=(), activation_rows=(), activations="recompute", update="after_backward", grad_precision=None
    )
    found = []
    for rows in _sizes(question):
        for interval in INTERVALS:
            words = f"{_batches(question.rows / rows, rows)}, a boundary kept every {interval} layers"
            taken = _with_interval(question, policy, rows, interval, words)
            found.append(taken)
            if taken.fits(question.budgets()):
                break
    return found


def _with_interval(question: Question, policy: Policy, rows: int, interval: int, words: str) -> _Taken:
    """Linear in blocks of `interval` layers, but for layers of several kinds, which are taken as they come."""
    build = partial(build_interval, interval=interval)
    work, layers = coarse(question, rows), len(question.model.layers)
    if layers <= 4 * interval:
        return _sum(words, [(1.0, _replayed(question, question.model, policy, work, build, with_masters=False))])
    parts, more = [], (layers - 2 * interval) / interval
    for depth, weight in ((2 * interval, 1.0 - more), (3 * interval, more)):
        model = _thinned(question.model, depth)
        parts.append((weight, _replayed(question, model, policy, work, build, with_masters=False)))
    return _sum(words, parts)


def _thinned(model: ModelSpec, depth: int) -> ModelSpec:
    """The model with `depth` of its layers, evenly spread."""
    places = [model.layers[round(place * (len(model.layers) - 1) / (depth - 1))] for place in range(depth)]
    return replace(model, units=(model.units[0], *(model.units[place] for place in places), model.units[-1]))


# In memory ---------------------------------------------------------------------------------------------------------


def _in_memory(plan: Plan) -> Row:
    """As it fits; else the quickest, with the bytes of the most modest.

    Time is that of all micro-batches, memory that of one: activations of another do not exist beside it.
    """
    question = plan.question
    resident = replace(question, hardware=_on_device(question.hardware))
    budgets = question.budgets()
    budget = budgets.get("device", budgets["host"])
    found: list[_Taken] = []
    for rows in _sizes(question):
        policy = replace(
            replace(plan.policy, homes=(), activation_rows=()),
            shares_memory=True,
            update="after_backward",
            masters="whole",
            grad_precision="fp32" if rows < question.rows else None,
        )
        stores = question.model.units[1].profile.chosen_nbytes > 0
        keeps = [replace(policy, activation_rows=kept) for kept in ((CHOSEN, ATTENTION) if stores else ())]
        for chosen in (replace(policy, activations="keep"), replace(policy, activations="recompute"), *keeps):
            words = f"{_batches(question.rows / rows, rows)}, {_again(chosen)}"
            found.append(_resident(resident, chosen, rows, words, question.hardware.shares_memory))
    within = [taken for taken in found if max(taken.device_nbytes, taken.host_nbytes) <= budget]
    if within:
        return _row("in memory", min(within, key=lambda taken: taken.seconds), plan, fits=True)
    least = min(found, key=lambda taken: taken.device_nbytes + taken.host_nbytes)
    ideal = min(found, key=lambda taken: taken.seconds)
    shown = replace(ideal, device_nbytes=least.device_nbytes, host_nbytes=least.host_nbytes)
    return _row("in memory", shown, plan, fits=False)


def _on_device(hardware: Hardware) -> Hardware:
    """The machine with all that is stored on the device, which runs the optimizer too."""
    if hardware.shares_memory:
        return hardware
    bandwidth = hardware.device_bandwidth or float("inf")
    return replace(
        hardware,
        shares_memory=True,
        host_bandwidth=bandwidth,
        norm_bandwidth=None,
        optimizer_bandwidth=(),
        fetch_bandwidth=bandwidth,
        grad_bandwidth=bandwidth,
    )


def _resident(question: Question, policy: Policy, rows: int, words: str, on_host: bool) -> _Taken:
    found = estimate(question, policy, rows)
    instant = replace(question.hardware, host_bandwidth=float("inf"), norm_bandwidth=None, optimizer_bandwidth=())
    compute = estimate(replace(question, hardware=instant), policy, rows)
    one = replace(question, tokens_per_step=rows * question.length)
    nbytes = estimate(one, policy, rows).nbytes["host"]
    return _Taken(words, found.seconds, compute.seconds, 0 if on_host else nbytes, nbytes if on_host else 0)


# Replays -----------------------------------------------------------------------------------------------------------


def _replayed(
    question: Question, model: ModelSpec, policy: Policy, work: Work, build: Builds, *, with_masters: bool = True
) -> _Taken:
    """One step, whole. Without masters, neither their bytes nor their traffic count."""
    schedule = build(model, policy, work)
    price = op_seconds(model, policy, work, question.hardware, question.calibration)
    spared = 0
    if not with_masters and policy.precision == "bf16":
        price = _less_masters(price, model, optimizer_bandwidth(question.hardware, policy.host_threads))
        spared = LOW_BITS_NBYTES * sum(layout_of(unit).size for unit in model.units)
    timeline = replay(schedule, price)
    host = schedule.peak_nbytes("host") - spared
    return _Taken("", timeline.seconds, timeline.busy_seconds("compute"), schedule.peak_nbytes("device"), host)


def _less_masters(price: Price, model: ModelSpec, bandwidth: float) -> Price:
    """The price of each op but for the low bits that an update would read and write."""

    def seconds(op: Op) -> float:
        spared = 2 * LOW_BITS_NBYTES * layout_of(model.units[op.unit]).trained.size if op.kind == "UPDATE" else 0
        return price(op) - spared / bandwidth

    return seconds


def _sum(words: str, parts: Iterable[tuple[float, _Taken]]) -> _Taken:
    """The weighted sum of what several replays take."""
    parts = list(parts)
    total = [
        sum(weight * amount for weight, amount in zip((w for w, _ in parts), column, strict=True))
        for column in zip(
            *((t.seconds, t.compute_seconds, t.device_nbytes, t.host_nbytes) for _, t in parts), strict=True
        )
    ]
    return _Taken(words, total[0], total[1], round(total[2]), round(total[3]))
