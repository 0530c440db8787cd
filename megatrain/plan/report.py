"""A plan as a person reads it: bytes by tier and use, and what follows from it, in rows of words.

Amounts are decimal (1 GB is 1e9 bytes), as machines are described. It leaves out colours, columns and files: the
terminal has `commands.plan`, a page has `html`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from megatrain.plan.analysis import Outlook, Sweep, Upgrade
from megatrain.plan.question import Plan
from megatrain.schedule import Schedule, Use

SMALLEST_STALL = 0.005
"""Of a step, below which a cause of waiting is not named."""

SMALLEST_SHARE = 10_000
"""Of a tier's bytes, a use with less than one in so many is not shown."""


def peak_table(plan: Plan) -> dict[tuple[str, str], int]:
    """(tier, use) -> bytes at the moment when most of the tier is in use, by tier, largest first.

    Activations, graphs and workspaces included; each tier adds up to its peak. A device that shares memory with the
    host has no tier of its own.
    """
    schedule, shares = plan.timeline.schedule, plan.question.hardware.shares_memory
    table: Counter[tuple[str, str]] = Counter()
    for tier in dict.fromkeys(buffer.tier for buffer in schedule.buffers.values()):
        for use, nbytes in _at_peak(schedule, tier).items():
            table["host" if shares else tier, use] += nbytes
    if plan.save_nbytes:
        table["host", Use.CHECKPOINT.value] += plan.save_nbytes
    return dict(sorted(table.items(), key=lambda item: (item[0][0], -item[1], item[0][1])))


def _at_peak(schedule: Schedule, tier: str) -> Counter[str]:
    """Owner -> bytes of one tier where the sum is largest, in schedule order."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, op in enumerate(schedule.ops):
        for access in (*op.reads, *op.writes):
            first.setdefault(access.buffer, index)
            last[access.buffer] = index
    held: Counter[str] = Counter()
    changes: list[tuple[int, int, str]] = []  # index of an op, bytes from there on, use
    for buffer in schedule.buffers.values():
        if buffer.tier != tier:
            continue
        if buffer.arena:
            held[buffer.use.value] += buffer.nbytes
        elif buffer.name in first:
            changes += [(first[buffer.name], buffer.nbytes, buffer.use.value)]
            changes += [(last[buffer.name] + 1, -buffer.nbytes, buffer.use.value)]
    peak, total = held.copy(), held.total()
    most = total
    for _, nbytes, use in sorted(changes):  # of one op, what is given up comes first
        held[use] += nbytes
        total += nbytes
        if total > most:
            most, peak = total, held.copy()
    return +peak


def use_rows(plan: Plan) -> dict[str, list[tuple[str, int]]]:
    """Tier -> uses and bytes at the peak, but for those too small to be seen."""
    table = peak_table(plan)
    tiers: dict[str, list[tuple[str, int]]] = {}
    for (tier, use), nbytes in table.items():
        if nbytes * SMALLEST_SHARE >= plan.nbytes[tier]:
            tiers.setdefault(tier, []).append((use, nbytes))
    return tiers


# Amounts -----------------------------------------------------------------------------------------------------------


def _three(number: float) -> str:
    """About three digits, thousands marked."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _scaled(number: float, units: tuple[tuple[float, str], ...]) -> str:
    size, unit = next(((size, unit) for size, unit in units if number >= size * 0.9995), units[-1])
    return f"{_three(number / size)} {unit}"


def amount(nbytes: float) -> str:
    """`1.47 TB`"""
    if nbytes < 1000:
        return f"{nbytes:,.0f} B"
    return _scaled(nbytes, ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def duration(seconds: float) -> str:
    """`7.28 s`, `94.0 s`, `41.0 days`: a larger unit from two of it on."""
    for size, unit in ((31_557_600.0, "years"), (86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{_three(seconds / size)} {unit}"
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms")))


def tokens(count: float) -> str:
    """`1T`, `65,536`"""
    for size, unit in ((1e12, "T"), (1e9, "B")):
        if count >= size:
            return f"{count / size:,.4g}{unit}"
    return f"{count:,.0f}"


def flops(per_second: float) -> str:
    return f"{_three(per_second / 1e12)} TFLOP/s" if per_second >= 1e10 else f"{_three(per_second / 1e9)} GFLOP/s"


# Rows --------------------------------------------------------------------------------------------------------------


def summary_rows(outlook: Outlook) -> list[tuple[str, str]]:
    """Name and fact: speed, limit, hiding, run, disk."""
    plan = outlook.plan
    hardware = plan.question.hardware
    stated = (hardware.peak_flops, hardware.peak_flops_fp32)
    peak = "the maker's peak" if outlook.peak_flops in stated else "what large products reach"
    rows = [
        ("step", f"{duration(plan.seconds)} for {sum(plan.work.tokens):,} tokens in {_cut(plan)}"),
        ("speed", f"{plan.tokens_per_second:,.0f} tokens/s, {flops(outlook.flops_per_second)} useful"),
        ("MFU", f"{outlook.mfu:.1%} of {peak} ({flops(outlook.peak_flops)})"),
        ("limit", _limit(outlook)),
        ("hiding", _hiding(outlook)),
        ("run", f"{tokens(outlook.token_budget)} tokens take {duration(outlook.run_seconds)}"),
    ]
    return [*rows, ("disk", _disk(outlook))]


def _cut(plan: Plan) -> str:
    count, size = plan.work.micro_batches, plan.micro_batch
    batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    return f"{batches} of {size} x {plan.question.length:,}"


def _limit(outlook: Outlook) -> str:
    first, *others = outlook.loads
    share = first.chain_seconds / outlook.plan.seconds
    causes = ", ".join(f"{share:.1%} for {name}" for name, share in outlook.stalls.items() if share >= SMALLEST_STALL)
    waits = f"compute waits {outlook.stall_share:.1%}{f' ({causes})' if causes else ''}"
    text = f"{first.name}, {share:.1%} of the step; {waits}"
    if not others:
        return text
    second = max(others, key=lambda load: load.busy_seconds)
    return f"{text}; next is {second.name}, busy {second.busy_seconds / outlook.plan.seconds:.1%}"


def _hiding(outlook: Outlook) -> str:
    found = outlook.hiding
    if outlook.plan.question.hardware.shares_memory:
        return "nothing to hide: the device computes in host memory"
    if found is None:
        return "no number of tokens per step hides the transfers"
    fits = "" if found.fits else ", more than fits here"
    return f"transfers and updates hide from {found.tokens_per_step:,} tokens per step on{fits}"


def _disk(outlook: Outlook) -> str:
    written = outlook.written_nbytes_per_day
    if not written:
        return "nothing is written to disk"
    days = outlook.drive_days
    wear = "its endurance is not known" if days is None else f"the drive's endurance lasts {duration(days * 86_400)}"
    return f"{amount(written)} written per day; {wear}"


def load_rows(outlook: Outlook) -> list[tuple[str, str, str, str, str]]:
    """Stream, share of the step's length, busy share, busy seconds, slack."""
    total = outlook.plan.seconds
    return [
        (
            load.name,
            f"{load.chain_seconds / total:.1%}",
            f"{load.busy_seconds / total:.1%}",
            duration(load.busy_seconds),
            f"{load.slack_seconds / total:.1%}",
        )
        for load in outlook.loads
    ]


def upgrade_rows(upgrades: tuple[Upgrade, ...]) -> list[tuple[str, str, str]]:
    """Name, tokens per second, gain."""
    rows = []
    for upgrade in upgrades:
        if upgrade.tokens_per_second is None:
            rows.append((upgrade.name, "does not fit", ""))
        else:
            gain = "makes it fit" if upgrade.ratio is None else f"{upgrade.ratio - 1:+.1%}"
            rows.append((upgrade.name, f"{upgrade.tokens_per_second:,.0f}", gain))
    return rows


# For programs ------------------------------------------------------------------------------------------------------


def as_content(outlook: Outlook, swept: Sweep | None = None) -> dict[str, Any]:
    """Everything that is shown, and the model as a specification that can be planned for again; for `json.dump`."""
    plan = outlook.plan
    question = plan.question
    return {
        "model": asdict(question.model),
        "hardware": asdict(question.hardware),
        "question": {
            "tokens_per_step": sum(plan.work.tokens),
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
        "stall_share": outlook.stall_share,
        "stalls": outlook.stalls,
        "nbytes": dict(plan.nbytes),
        "memory": [{"tier": tier, "use": use, "nbytes": nbytes} for (tier, use), nbytes in peak_table(plan).items()],
        "loads": [{"name": load.name, **asdict(load)} for load in outlook.loads],
        "hiding": None if outlook.hiding is None else asdict(outlook.hiding),
        "run": {
            "tokens": outlook.token_budget,
            "seconds": outlook.run_seconds,
            "disk_written_nbytes_per_day": outlook.written_nbytes_per_day,
            "drive_days": outlook.drive_days,
        },
        "upgrades": [asdict(upgrade) for upgrade in outlook.upgrades],
        "sweep": None if swept is None else asdict(swept),
    }
