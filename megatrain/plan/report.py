"""Shows a plan: as rows and tables of text, and as JSON.

Amounts are decimal (1 GB is 1e9 bytes), as in descriptions of machines. `commands.plan` lays the tables out for the
terminal and writes the files.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from megatrain.formatting import SECONDS_PER_DAY, amount, counted, duration, flops, metric, rate, tokens
from megatrain.plan.analysis import MIN_GAIN_SHOWN, Change, Outlook, hidden_from
from megatrain.plan.cost import MEASURED_OVER_PLANNED, product_seconds, step_flops
from megatrain.plan.question import Plan, Question
from megatrain.plan.spec_file import as_fields
from megatrain.schedule import Schedule, Use
from megatrain.schedule.passes.pieces import STATE_NBYTES
from megatrain.spec import Hardware, Precision
from megatrain.spec.hardware import PRODUCT_KINDS

MIN_STALL_SHOWN = 0.005
"""Share of the step. What compute waits for less is not named."""

SHORTEST_LIFE_DAYS = 365.0
"""If a drive would wear out sooner, the plan shows a warning."""

SLOW_BF16_RATIO, COMPARED_SHAPE = 2.0, (1024, 1024, 1024)
"""If matrix products in bfloat16 take so many times as long as in float32, the plan shows a warning; and tokens, inputs
and outputs of the layer that is compared."""

SMALLEST_USE = 10_000
"""A use of less than one part in so many of a tier's bytes is not shown."""

IN_PARTS = {"device": "host, to compute in", "host": "host, for state"}
"""Tier -> its name if ranks compute in one part of host memory and keep their state in the other."""


def peak_table(plan: Plan) -> dict[tuple[str, str], int]:
    """(tier, use) -> bytes at the time of the tier's peak, by tier, largest first.

    Includes activations, graphs and workspaces; the rows of a tier add up to its peak. The bytes of a device that
    shares memory with the host count as host memory.
    """
    schedule, shares = plan.timeline.schedule, plan.question.hardware.shares_memory
    table: Counter[tuple[str, str]] = Counter()
    tiers = (each.tier for each in schedule.buffers.values() if each.peer is None and each.tier != "file")
    for tier in dict.fromkeys(tiers):
        for use, nbytes in _at_peak(schedule, tier).items():
            table["host" if shares and tier == "device" else tier, use] += nbytes
    if plan.save_nbytes:
        table["host", Use.CHECKPOINT.value] += plan.save_nbytes
    return dict(sorted(table.items(), key=lambda item: (item[0][0], -item[1], item[0][1])))


def _at_peak(schedule: Schedule, tier: str) -> Counter[str]:
    """Use -> bytes of one tier, when their sum is largest in the order of the schedule."""
    live: Counter[str] = Counter()
    changes: list[tuple[int, int, str]] = []  # (index of an op, bytes allocated from there on, use)
    for buffer in schedule.buffers.values():
        if buffer.tier == tier and buffer.arena:
            live[buffer.use.value] += buffer.nbytes
        elif buffer.tier == tier and buffer.name in schedule.lifetimes:
            first, last = schedule.lifetimes[buffer.name]
            changes += [(first, buffer.nbytes, buffer.use.value), (last + 1, -buffer.nbytes, buffer.use.value)]
    peak, total = live.copy(), live.total()
    most = total
    for _, nbytes, use in sorted(changes):  # at one op, frees come first
        live[use] += nbytes
        total += nbytes
        if total > most:
            most, peak = total, live.copy()
    return +peak


def tier_name(plan: Plan, tier: str) -> str:
    """The name of a tier in output. Ranks that compute in host memory divide it."""
    in_parts = plan.question.hardware.slots_in_host and tier in IN_PARTS
    return IN_PARTS[tier] if in_parts else tier


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text below heads. words: the leading columns that hold words; the others hold numbers."""

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]
    words: int = 1


def memory(plan: Plan) -> Table:
    """The bytes of each tier at its peak, by use, without uses too small to be shown."""
    budgets, rows = plan.question.budgets(), list[tuple[str, ...]]()
    uses = peak_table(plan)
    for tier in dict.fromkeys(tier for tier, _ in uses):
        name, total, budget = tier_name(plan, tier), plan.nbytes[tier], budgets[tier]
        rows += [
            (name, use, amount(nbytes), f"{nbytes / budget:.1%}")
            for (of_tier, use), nbytes in uses.items()
            if of_tier == tier and nbytes * SMALLEST_USE >= total
        ]
        rows.append((name, f"total of {amount(budget)}", amount(total), f"{total / budget:.1%}"))
    title = "memory at its peak" + (", of each rank" if plan.question.model.ranks > 1 else "")
    return Table(title, ("tier", "use", "bytes", "of the limit"), rows, words=2)


def gains(outlook: Outlook) -> Table:
    """What each change gains, of those that gain at least `MIN_GAIN_SHOWN`."""
    rows: list[tuple[str, ...]] = [
        (change.name, rate(change.tokens_per_second), f"{change.ratio - 1:+.1%}")
        for change in outlook.changes
        if change.tokens_per_second is not None and change.ratio is not None and _is_worth_a_row(change)
    ]
    return Table("what one change would gain", ("change", "tokens/s", "gain"), rows)


def without_gain(outlook: Outlook) -> str:
    """A line with the changes that `gains` leaves out."""
    names = [change.name for change in outlook.changes if not _is_worth_a_row(change)]
    return f"less than {MIN_GAIN_SHOWN:.0%} each: {', '.join(names)}" if names else ""


def _is_worth_a_row(change: Change) -> bool:
    return change.ratio is not None and change.ratio >= 1 + MIN_GAIN_SHOWN


# Rows --------------------------------------------------------------------------------------------------------------


def warning_rows(outlook: Outlook) -> list[tuple[str, str]]:
    """(name, text) of the warnings, which stand before all other rows."""
    return [("warning", text) for text in (slow_precision_warning(outlook.plan.question), _wear(outlook)) if text]


def _wear(outlook: Outlook) -> str:
    """The warning of a drive that wears out soon, else ""."""
    days = outlook.drive_days
    if days is None or days > SHORTEST_LIFE_DAYS:
        return ""
    return f"{_written(outlook, 'written to disk per day')}: {_endurance(days)}"


def slow_precision_warning(question: Question) -> str:
    """The warning that this processor is slow in bfloat16, for which many have no instructions, else ""."""
    hardware = question.hardware
    if question.precision != "bf16" or not hardware.computes_in_host_memory:
        return ""
    times = _layer_seconds(hardware, "bf16") / _layer_seconds(hardware, "fp32")
    if times < SLOW_BF16_RATIO:
        return ""
    return (
        f"matrix products take this processor {_two_digits(times)} times as long in bf16 as in fp32: use precision fp32"
    )


def _layer_seconds(hardware: Hardware, precision: Precision) -> float:
    """Seconds of the matrix products of a linear layer of `COMPARED_SHAPE`, forward and backward."""
    return sum(product_seconds(hardware, precision, *COMPARED_SHAPE, kind) for kind in PRODUCT_KINDS)


def summary_rows(outlook: Outlook) -> list[tuple[str, str]]:
    """(name, text) for the step, speed, ranks, MFU, limit, hiding, run, files and disk."""
    plan = outlook.plan
    hardware = plan.question.hardware
    stated = (hardware.peak_flops, hardware.peak_flops_fp32)
    peak = "the maker's peak" if outlook.peak_flops in stated else "what large products reach"
    count, seconds = 1e9, outlook.seconds_per_billion_tokens
    if outlook.token_budget is not None and outlook.run_seconds is not None:
        count, seconds = outlook.token_budget, outlook.run_seconds
    step_tokens = counted(plan.question.tokens_of_all, "token")
    rows = [
        ("step", f"{duration(plan.seconds)} for {step_tokens} in {_micro_batches(plan)}"),
        ("speed", f"{rate(plan.tokens_per_second)} tokens/s{_uncertainty(plan)}"),
        *_rank_rows(plan),
        ("MFU", f"{outlook.mfu:.1%}: {flops(outlook.flops_per_second)} useful of {peak}, {flops(outlook.peak_flops)}"),
        ("limit", _limit(outlook)),
        ("hiding", _hiding(plan)),
        ("run", f"{tokens(count)} tokens take {duration(seconds)}"),
    ]
    if plan.read_from_files_nbytes:
        rows.append(("files", _files(plan)))
    if outlook.written_nbytes_per_day and not _wear(outlook):
        rows.append(("disk", _disk(outlook)))
    return rows


def _of_machine(plan: Plan, amount_of_one: float) -> float:
    """The sum over all ranks of a machine, of which one has `amount_of_one`."""
    return plan.question.hardware.sharing_ranks * amount_of_one


def _rank_rows(plan: Plan) -> list[tuple[str, str]]:
    """For several ranks: where they run, the host memory of all ranks of a machine, and the links between them."""
    hardware, ranks = plan.question.hardware, plan.question.model.ranks
    if ranks == 1:
        return []
    here, nodes = hardware.sharing_ranks, ranks // hardware.sharing_ranks
    tokens_of_rank = counted(sum(plan.work.tokens), "token")
    where = "on one machine" if nodes == 1 else f"on {nodes} machines, {here} on each"
    tiers = ("host", "device") if hardware.slots_in_host else ("host",)
    nbytes, own_budget = (sum(each[tier] for tier in tiers) for each in (plan.nbytes, plan.question.budgets()))
    of_machine, budget = _of_machine(plan, nbytes), _of_machine(plan, own_budget)
    by_each, sources = f", {amount(nbytes)} by each rank", dict(hardware.sources)
    within = "processes" if hardware.slots_in_host else "devices"
    links = [(within, "link_bandwidth", here > 1), ("machines", "node_bandwidth", nodes > 1)]
    bandwidths = [
        f"{amount(getattr(hardware, field))}/s between {what} ({_first_clause(sources.get(field, 'no source'))})"
        for what, field, is_used in links
        if is_used
    ]
    link = f"{', '.join(bandwidths)}; in use {plan.timeline.utilisation('link'):.1%} of the step"
    if plan.policy.delivery == "shared":
        share = plan.timeline.utilisation("shared")
        link = f"not used: weights and sums go through host memory; sums take {share:.1%} of the step"
    return [
        ("ranks", f"{ranks} {where}: each with 1/{ranks} of the state and {tokens_of_rank} of a step"),
        ("each host", f"{amount(of_machine)} of {amount(budget)}{by_each if here > 1 else ''}"),
        ("link", link),
    ]


def _uncertainty(plan: Plan) -> str:
    """The likely range of a speed that is planned from rates not measured on this machine."""
    if is_measured(plan.question.hardware):
        return ""
    low, high = (_two_digits(factor * plan.tokens_per_second) for factor in MEASURED_OVER_PLANNED)
    return f" planned, not measured ({low} to {high} likely)"


def is_measured(hardware: Hardware) -> bool:
    """Whether `megatrain probe` has measured the most important rates."""
    sources = dict(hardware.sources)
    bus = () if hardware.computes_in_host_memory else ("fetch_bandwidth",)
    return all(sources.get(field, "").startswith("measured:") for field in ("flops", *bus, "host_bandwidth"))


def _two_digits(number: float) -> str:
    rounded = float(f"{number:.1e}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def _micro_batches(plan: Plan) -> str:
    batches = counted(plan.work.micro_batches, "micro-batch")
    on_ranks = " on each rank" if plan.question.model.ranks > 1 else ""
    return f"{batches} of {plan.micro_batch} x {plan.question.length:,}{on_ranks}"


def _limit(outlook: Outlook) -> str:
    first = outlook.loads[0]
    share = first.chain_seconds / outlook.plan.seconds
    causes = ", ".join(f"{share:.1%} for {name}" for name, share in outlook.stalls.items() if share >= MIN_STALL_SHOWN)
    waits = f"compute waits {outlook.stall_share:.1%}{f' ({causes})' if causes else ''}"
    return f"{first.name}, {share:.1%} of the critical path; {waits}"


def _hiding(plan: Plan) -> str:
    """From how many tokens per step compute does not wait for transfers and updates."""
    if plan.question.hardware.shares_memory:
        return "nothing to hide: the device computes in host memory"
    if (count := hidden_from(plan)) is None:
        return "no number of tokens per step hides the transfers"
    return f"transfers and updates hide behind compute from about {counted(count, 'token')} per step on"


def _files(plan: Plan) -> str:
    schedule = plan.timeline.schedule
    stored = sum(buffer.nbytes for buffer in schedule.buffers.values() if buffer.tier == "file")
    read = amount(plan.read_from_files_nbytes)
    return f"{amount(stored)} of frozen weights stay in the model's files; a step reads {read} of them, and writes none"


def _disk(outlook: Outlook) -> str:
    return f"{_written(outlook, 'written per day')}; {_endurance(outlook.drive_days)}"


def _written(outlook: Outlook, what: str) -> str:
    """What the machine writes to the disk tier, in a day and for a billion tokens."""
    day, tokens = outlook.written_nbytes_per_day, outlook.written_nbytes_per_billion_tokens
    of_day, of_tokens = (amount(_of_machine(outlook.plan, nbytes)) for nbytes in (day, tokens))
    return f"{of_day} {what}, {of_tokens} per billion tokens"


def _endurance(days: float | None) -> str:
    """How long the drive lasts."""
    if days is None:
        return "its endurance is unknown"
    return f"the drive's endurance lasts {duration(days * SECONDS_PER_DAY)}"


def _first_clause(source: str) -> str:
    """The first words of a source: up to a comma, a semicolon or a bracket."""
    return re.split(r"[,;] | \(", source, maxsplit=1)[0]


# For programs ------------------------------------------------------------------------------------------------------


def as_content(outlook: Outlook) -> dict[str, Any]:
    """Everything that is shown, for `json.dump`. `spec_file.read_model` reads the model from it again."""
    plan = outlook.plan
    question = plan.question
    return {
        "model": as_fields(question.asked_model or question.model),
        "hardware": asdict(question.hardware),
        "question": {
            "tokens_per_step": plan.question.tokens_of_all,
            "ranks": question.model.ranks,
            "nodes": question.model.ranks // question.hardware.sharing_ranks,
            "length": question.length,
            "precision": question.precision,
            "clips": question.clips,
            "saves": question.saves,
            "budgets": question.budgets(),
        },
        "policy": asdict(plan.numerics) | asdict(plan.policy),
        "work": {"micro_batches": plan.work.micro_batches, "sequences": plan.micro_batch},
        "seconds": plan.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "useful_flops_per_second": outlook.flops_per_second,
        "peak_flops_per_second": outlook.peak_flops,
        "mfu": outlook.mfu,
        "warnings": [text for _, text in warning_rows(outlook)],
        "stall_share": outlook.stall_share,
        "stalls": outlook.stalls,
        "nbytes": dict(plan.nbytes),
        "memory": [{"tier": tier, "use": use, "nbytes": nbytes} for (tier, use), nbytes in peak_table(plan).items()],
        "loads": [asdict(load) for load in outlook.loads],
        "hidden_from_tokens": hidden_from(plan),
        "run": {
            "tokens": outlook.token_budget,
            "seconds": outlook.run_seconds,
            "seconds_per_billion_tokens": outlook.seconds_per_billion_tokens,
            "disk_written_nbytes_per_day": outlook.written_nbytes_per_day,
            "disk_written_nbytes_per_billion_tokens": outlook.written_nbytes_per_billion_tokens,
            "drive_days": outlook.drive_days,
        },
        "changes": [asdict(change) for change in outlook.changes],
    }


def describe_matrices(plan: Plan) -> list[tuple[str, str]]:
    """(name, fact) about parameters that are updated as whole matrices, if there are any: which, what their optimizer
    keeps less of them than AdamW does, and what making directions orthogonal adds to a step."""
    from megatrain.optim import AdamW, matrix_shape, orthogonalize_flops  # which imports numba, for seconds

    question, directions = plan.question, Use.DIRECTIONS.value
    model, form = question.model, question.model.newton_schulz
    whole = [param for unit in model.units for param in unit.params if param.trainable and param.matrices]
    if not whole:
        return []
    names = (param.name.removesuffix(".weight").removesuffix(".default") for param in whole)  # an adapter's own name
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in names)
    saved = sum(STATE_NBYTES * param.numel * (len(AdamW.STATE) - len(param.state)) for param in whole)
    slots = sum(nbytes for (tier, use), nbytes in peak_table(plan).items() if tier == "host" and use == directions)
    products = sum(
        orthogonalize_flops(param.matrices, *matrix_shape(param.shape, param.matrices), form.steps) for param in whole
    )
    share = products / question.parts / step_flops(model, [(question.sequences, question.length)])
    numel, matrices = sum(param.numel for param in whole), sum(param.matrices for param in whole)
    words = (
        f"{matrices:,} updated whole ({', '.join(kinds)}), {metric(numel)} of {metric(model.trained_numel)} parameters",
        f"{amount(saved)} less of optimizer state than AdamW's, {amount(slots)} of host memory for directions",
        f"{form.steps} iterations of Newton-Schulz in {form.precision} add {share:.1%} to the operations of a step",
    )
    return [("matrices", "; ".join(words))]


def describe_images(plan: Plan) -> list[tuple[str, str]]:
    """(name, fact) about what images take in the plan, if there are any."""
    question = plan.question
    if not question.values_per_token:
        return []
    if question.model.units[0].profile.of("images") is question.model.units[0].profile:
        return [("images", "not in the plan, since the model's code cannot be run on them alone: leave memory free")]
    values = f"{round(question.values_per_token * question.length):,} values in a sequence"
    return [("images", f"{values}, and {amount(question.images_nbytes)} of host memory for those read ahead")]
