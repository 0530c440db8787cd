"""A step's report: loss and metrics over all micro-batches and ranks; refuses what is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch

from megatrain.dist.world import refuse_unlike
from megatrain.engine.chunked_loss import COUNT, StepResult
from megatrain.engine.context import OpContext
from megatrain.engine.gradient_accumulation import for_parameters
from megatrain.engine.step_state import StepInfo, StepState
from megatrain.errors import NonFinite, RankError

NOTHING_UPDATED = "nothing was updated; lower the learning rate, or inspect the batch"
MAYBE_UPDATED = "units before it have been updated; start again from a saved model, or set max_grad_norm"
"""Fixes for a step that is not finite. The second is for several ranks that update during the backward pass."""


def refuse_unlike_steps(infos: Sequence[StepInfo]) -> None:
    """Raise `RankError` if the collectives of ranks do not match or their settings differ."""
    if odd := [rank for rank, info in enumerate(infos) if info.digest != infos[0].digest]:
        what = f"the schedules of ranks 0 and {odd[0]} do not match: their policies or their rounds differ"
        fix = "give all ranks the same policy, and as many micro-batches of each rank to every round"
        raise RankError(what, where="schedule", fix=fix)
    refuse_unlike("trains with", [info.settings for info in infos])


class MicroBatchReport(NamedTuple):
    """The results of one micro-batch in a step."""

    terms: list[float]
    """What it has added to the loss; empty with a single rank."""
    reported: dict[str, float]
    """Sums that the loss function reports."""
    router_loss: float | None
    """Without the coefficient."""


def result_of(context: OpContext, step: StepState) -> StepResult:
    """Loss and metrics of all ranks, once the schedule has run. Raises `NonFinite`."""
    shares: tuple[float, ...] = ()
    if context.world.size > 1:
        reports = reports_of_all_ranks(context, step)
        loss = finite_sum([term for micro in reports for term in micro.terms], step)
        shares = tuple(math.fsum(micro.terms) * step.scale for micro in reports)
    else:
        reports, loss = own_reports(step), finite_loss(step)
    all_divisors = context.world.dealt([info.divisors for info in step.infos])
    total = sum(all_divisors)
    tokens = sum(info.targets for info in step.infos)
    return StepResult(loss / (total or 1.0), tokens, *averaged(reports, all_divisors, step.scale), shares)


def reports_of_all_ranks(context: OpContext, step: StepState) -> list[MicroBatchReport]:
    """The reports of all ranks' micro-batches, in order. Raises `NonFinite`, with the same message on each rank."""
    largest = {unit: torch.stack(landed).amax(dim=0).tolist() for unit, landed in step.largest.items()}
    names = {} if step.receiver is None else step.receiver.not_finite
    mine: Any = ([tuple(report) for report in own_reports(step)], list(largest.items()), list(names.items()))
    received = context.world.exchange("losses", mine)
    reports = [[MicroBatchReport(*report) for report in of_rank] for of_rank, _, _ in received]
    fix = MAYBE_UPDATED if context.policy.update == "during_backward" else NOTHING_UPDATED
    for rank, of_rank in enumerate(reports):
        finite_sum([term for micro in of_rank for term in micro.terms], step, f" on rank {rank}", fix)
    by_receiver = {unit: [dict(magnitudes)[unit] for _, magnitudes, _ in received] for unit in largest}
    for unit, of_unit in sorted(by_receiver.items(), reverse=True):
        for rank, sent in enumerate(zip(*of_unit, strict=True)):
            if not all(map(math.isfinite, sent)):
                named = dict.fromkeys(name for _, _, units in received for name in dict(units).get(unit, ()))
                what = f"the gradient of rank {rank} is not finite{for_parameters(list(named))}"
                raise NonFinite(what, where=context.spec.units[unit].name, fix=fix)
    return context.world.dealt(reports)


def finite_loss(step: StepState) -> float:
    """The loss, once the last LOSS is done. Raises `NonFinite`."""
    return finite_sum([] if step.landed is None else [step.landed.item()], step)


def finite_sum(terms: Sequence[float], step: StepState, on: str = "", fix: str = NOTHING_UPDATED) -> float:
    """The sum of the terms in order, as LOSS ops add them. Raises `NonFinite`, in a training step with `fix`."""
    loss = reduce(add, terms) if terms else 0.0
    if not math.isfinite(loss):
        what = f"the loss is {loss}{on}"
        if step.receiver is None:
            raise NonFinite(what, where="evaluation", fix="inspect the batch and the weights", of_loss=True)
        raise NonFinite(what, fix=fix, of_loss=True)
    return loss


def own_reports(step: StepState) -> list[MicroBatchReport]:
    """The reports of this rank's micro-batches, in order."""
    reports = []
    for micro in range(len(step.micro_batches)):
        names, values = step.reported.get(micro, ((), torch.empty(0)))
        router_loss = step.router_losses.get(micro)
        terms = [term.item() for term in step.terms.get(micro, ())]
        reported = dict(zip(names, values.tolist(), strict=True))
        reports.append(MicroBatchReport(terms, reported, None if router_loss is None else router_loss.item()))
    return reports


def averaged(
    reports: Sequence[MicroBatchReport], divisors: Sequence[float], scale: float
) -> tuple[dict[str, float], tuple[dict[str, float], ...]]:
    """`metrics` and `by_micro_batch` of a `StepResult`."""
    sums: dict[str, float] = {}
    by_micro_batch: tuple[dict[str, float], ...] = tuple({} for _ in divisors)
    for micro, averages, divisor in zip(reports, by_micro_batch, divisors, strict=True):
        for name, number in micro.reported.items():
            sums[name] = sums.get(name, 0.0) + number
        averages.update(_averages(micro.reported, 1 / (divisor or 1.0)))
        if micro.router_loss is not None:
            averages["aux_loss"] = micro.router_loss
    return _averages(sums, scale), by_micro_batch


def _averages(sums: Mapping[str, float], scale: float) -> dict[str, float]:
    """Sums times `scale`; a sum with its own count is divided by that instead, and left out if the count is 0."""
    averages = {}
    for name, number in sums.items():
        count = sums.get(name + COUNT)
        if not name.endswith(COUNT) and count != 0:
            averages[name] = number * scale if count is None else number / count
    return averages
