"""Suggests changes of a question that would make a plan fit, the least painful first, and words the refusal.

`search` tries them; hardware that would help is found by `analysis.changes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from megatrain.errors import DoesNotFit
from megatrain.formatting import amount, at_least
from megatrain.plan.question import Plan, Question, usable_nbytes
from megatrain.plan.ranks import FIXED, limits_of_machine

KEPT_OVERRIDES = ("micro_batch", "host_threads")
"""Overrides that are not about streaming, and are never advised against."""

SHORTEST = 256
"""Tokens of the shortest sequence that is advised."""


def changes(question: Question) -> Iterator[tuple[str, Question]]:
    """(change in words, changed question) for everything that a user may give up, least painful first."""
    length, unclipped = question.length, replace(question, clips=False)
    fewer = [rows * length for rows in _halves(question.sequences)]
    kept = {*KEPT_OVERRIDES, *(FIXED if question.model.ranks > 1 else ())}
    if set(question.overrides) - kept:
        overrides = {name: value for name, value in question.overrides.items() if name in kept}
        yield "a policy without overrides", replace(question, overrides=overrides)
    if (size := question.overrides.get("micro_batch", 1)) > 1:
        for rows in _halves(size):
            yield f"a micro-batch of {rows:,}", replace(question, overrides={**question.overrides, "micro_batch": rows})
    for tokens in fewer:
        yield f"{tokens:,} tokens per step", replace(question, tokens_per_step=tokens)
    for shorter in _halves(length):
        if shorter >= SHORTEST:
            yield f"one sequence of {shorter:,} tokens", replace(question, tokens_per_step=shorter, length=shorter)
    if question.limits.disk_nbytes == 0 and question.hardware.disk_nbytes:
        yield "state on the disk (disk.folders)", replace(question, limits=replace(question.limits, disk_nbytes=None))
    for tier, total in (("disk", question.hardware.disk_nbytes or 0), ("host", question.hardware.host_nbytes)):
        if 0 < (question.limits.of(tier) or 0) < usable_nbytes(total):
            limits = replace(question.limits, **{f"{tier}_nbytes": None})
            yield f"all of the machine's {tier} memory (no memory.{tier})", replace(question, limits=limits)
    if question.clips:
        yield "no clipping (max_grad_norm=null)", unclipped
        for tokens in fewer:
            yield f"{tokens:,} tokens per step without clipping", replace(unclipped, tokens_per_step=tokens)


def refusal(least: Plan, fix: str) -> DoesNotFit:
    """The error of a question of which not even the `least` plan fits. It names the tier that is short, by how many
    bytes. fix: what would fit, in words."""
    question = least.question
    tier = max(short := least.taken.short(question.budgets()), key=lambda name: short[name])
    saves = f" ({amount(least.save_nbytes)} of it for checkpoints)" if tier == "host" and least.save_nbytes else ""
    disk = ", even with state on the disk" if tier == "host" and least.nbytes["disk"] else ""
    return DoesNotFit(
        f"needs at least {at_least(least.nbytes[tier])} of {tier} memory{saves}{disk}, "
        f"{at_least(short[tier])} more than {question.limit(tier)}",
        where=f"plan for {question.model.name} on {question.hardware.name}{each_of(question)}",
        fix=fix,
        needed=least.nbytes,
    )


def each_of(question: Question) -> str:
    """Whose bytes a refusal is about, of several ranks."""
    ranks, in_host = question.model.ranks, question.hardware.slots_in_host
    halves = ", whose device memory is half of its host memory" if in_host else ""
    return f", each of {ranks} ranks{halves}" if ranks > 1 else ""


def provide(question: Question, nbytes: Mapping[str, int]) -> str:
    """What to have so that a plan fits that takes so much of each tier, where no change of the question helps."""
    needed = limits_of_machine(question, {tier: nbytes[tier] for tier in question.budgets() if nbytes[tier]})
    names = {tier: f"{tier} memory" for tier in needed}
    if question.model.ranks > 1:
        names = {tier: f"{tier} memory on each machine" for tier in needed} | {"device": "memory on each device"}
    amounts = [f"{at_least(needed[tier])} of {names[tier]}" for tier in needed]
    return f"provide {', '.join(amounts)}, or choose a smaller model"


def _halves(number: int) -> Iterator[int]:
    while number := number // 2:
        yield number
