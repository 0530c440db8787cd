"""Does the engine compute what the stock model computes? The question put to a model's twin, and the answer kept.

The truth is plain autograd through the library's own forward, one micro-batch after another (`truth`). Beside it stand
the engine's loss and every gradient, for several kinds of micro-batches, plans and devices (`compare`). `full_report`
asks everything, for `megatrain verify`; what an engine asks when it first meets an architecture is in `vetted`.

How large is an error? The norm of the difference over the norm of what is expected. A gradient that is zero but for
rounding (the bias of keys, before a softmax) has no scale of its own; so the scale is at least `FLOOR` of the largest
gradient norm of the step. What can hide below that is `tolerance` times `FLOOR` of it: rounding of the largest.

Some gradients are small sums of large terms, so that rounding alone takes more than `tolerance` of them. Before such an
error is called one, the stock model is asked again with the last bit of its weights changed: the engine may be `SLACK`
times as far off as that.

Engines are made by whoever asks (`make_engine`), so that this module does not need `train.engine`, which needs it.
Left out: bfloat16, whose error against the float32 truth says little about a mistake.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from megatrain.engine import MicroBatch
from megatrain.errors import ModelError, typed_line
from megatrain.model.blueprint import refuse_attention, where_of
from megatrain.model.twin import CPU_KERNELS, StockConfig, StockModel, dropout_rates, shrink, twin_from, with_dropout
from megatrain.spec import Policy
from megatrain.train.cases import Case, Setting, full_cases, full_settings, short_cases

TOLERANCE = 1e-5
"""Largest relative error in float32 that is taken for rounding."""

FLOOR = 1e-2
"""The scale of an error is at least this share of the largest gradient norm."""

SLACK = 4.0
EPSILON = torch.finfo(torch.float32).eps


class Computes(Protocol):
    """What is asked of an engine."""

    def gradients(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]: ...

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float: ...

    def close(self) -> None: ...


MakeEngine = Callable[[StockModel, str, Policy], Computes]
"""An engine over a model, on a device, by a policy; without a check of its own."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The worst of one group: parameters that differ in the number of their layer alone, or the loss.

    error: relative. parameter: the member that it was met at, in which case and setting. rounding: how far the stock
    model's answer moves with the last bit of its weights, relative to the same; known where the error is above the
    tolerance.
    """

    group: str
    error: float
    parameter: str
    case: str = ""
    setting: str = ""
    rounding: float = 0.0

    @property
    def where(self) -> str:
        return f"{self.case}; {self.setting}"


@dataclass(frozen=True)
class Report:
    """What a comparison found. `left_out` says which cases the stock model itself cannot do, and why."""

    model: str
    attention: str
    tolerance: float
    findings: tuple[Finding, ...]
    left_out: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(self.agrees(finding) for finding in self.findings)

    @property
    def worst(self) -> Finding:
        """The finding with the largest error, of those that do not agree if there are any."""
        return max(self.findings, key=lambda finding: (not self.agrees(finding), finding.error))

    def agrees(self, finding: Finding) -> bool:
        return finding.error <= max(self.tolerance, SLACK * finding.rounding)

    def raise_if_wrong(self) -> None:
        """Raise `ModelError` naming the parameter that differs most, and what to try."""
        if self.ok:
            return
        worst = self.worst
        what = "its loss" if worst.parameter == LOSS else f"its gradient of {worst.parameter}"
        others = [kernel for kernel in ("eager", "sdpa") if kernel != self.attention]
        raise ModelError(
            f"{what} would be wrong by {worst.error:.0e} ({worst.where}); it is not trained",
            where=f"model {self.model}",
            fix=f"try another attention kernel ({' or '.join(others)}), and please report it",
        )


LOSS = "loss"
REPLAY = "dropout, replayed"
ROUTERS = "router auxiliary loss"


def verify_rows(report: Report) -> list[tuple[str, str, str]]:
    """(parameter group, worst relative error, verdict) for each group in the model's order, for a table."""
    return [
        (each.group, f"{each.error:.1e}", "equal" if report.agrees(each) else f"differs: {each.where}")
        for each in report.findings
    ]


Answers = tuple[float, dict[str, Tensor]]
"""Loss, and gradient by parameter name."""


def truth(model: StockModel, micro_batches: Sequence[MicroBatch]) -> Answers:
    """Loss and every gradient of a step by plain autograd. A parameter that got none has a zero, a frozen one no entry.

    The loss is the mean over all target tokens of the step. A router auxiliary loss counts with the coefficient that
    the model itself gives it, for each micro-batch by its share of the target tokens.
    """
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch, share in _with_shares(micro_batches):
        with torch.enable_grad():
            loss = stock_loss(model, batch) * share
            loss.backward()
        total += loss.item()
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()}
    model.zero_grad(set_to_none=True)
    return total, gradients


def _with_shares(micro_batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, float]]:
    """Each micro-batch, with its share of the target tokens of the step."""
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches]
    return [(batch, count / sum(counts)) for batch, count in zip(micro_batches, counts, strict=True)]


def adds_for_routers(model: StockModel) -> bool:
    """Whether the model's loss holds an auxiliary loss of its routers."""
    return bool(getattr(model.config, "output_router_logits", False))


def stock_loss(model: StockModel, batch: MicroBatch) -> Tensor:
    """What the stock model's loss of a micro-batch is, in its own mode: mean cross-entropy over the target tokens in
    float32, plus what the model adds for its routers. Every comparison with the library's code goes through here.

    There must be no cache of keys and values: with one, the library takes packed sequences for a single one. What the
    routers add is known only where gradients are enabled.
    """
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    routed = adds_for_routers(model)
    output = model(**inputs, **({"labels": batch["labels"]} if routed else {}), use_cache=False)
    logits, targets = output.logits[:, :-1], batch["labels"][:, 1:]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    balance = output.aux_loss if routed else None
    if not isinstance(balance, Tensor) or not balance.requires_grad:
        return loss
    (coefficient,) = torch.autograd.grad(output.loss, balance, retain_graph=True)
    return loss + coefficient * balance


Known = tuple[Case, float, dict[str, Tensor]]
"""A case with the stock model's answers."""

SUSPECT = 1e-3
"""An error above this is not rounding."""


def compare(
    model: StockModel,
    make_engine: MakeEngine,
    cases: Sequence[Case],
    settings: Sequence[Setting],
    tolerance: float = TOLERANCE,
    enough: int | None = None,
) -> Report:
    """Compare the engine's loss and every gradient with the stock model's, for each case in each setting.

    `model` has no dropout; it is not changed. Its mode is what is compared, the loss in evaluation mode. A case that
    the stock model cannot compute, or not to finite numbers, is left out, and the report says so; `enough` others end
    the search. Raises `ModelError` when no case is left, and whatever the engine raises.
    """
    known: list[Known] = []
    left_out: list[str] = []
    for case in cases:
        if len(known) == enough:
            break
        try:
            loss, gradients = _true_answers(model, case)
        except Exception as error:  # the library's own code, on inputs that not every model takes
            left_out.append(f"{case.name}: {typed_line(error)}")
            continue
        if math.isfinite(loss) and all(bool(torch.isfinite(each).all()) for each in gradients.values()):
            known.append((case, loss, gradients))
        else:
            left_out.append(f"{case.name}: the stock model's loss or gradients are not finite")
    if not known:
        raise ModelError(
            f"the stock model computes none of the cases ({left_out[0]})", where=f"model {type(model).__name__}"
        )
    tally = _Tally(model)
    for setting in settings:
        with closing(make_engine(model, setting.device, setting.policy)) as engine:
            for case, loss, gradients in known:
                tally.gradients(engine.gradients(case.micro_batches), gradients, case.name, setting.name)
                tally.loss(engine.evaluate(case.micro_batches), loss, case.name, setting.name)
    suspects = {each.case for each in tally.worst.values() if tolerance < each.error < SUSPECT}
    moved = {case.name: _moved(model, case) for case, *_ in known if case.name in suspects}
    findings = [
        replace(each, rounding=_rounding(each, known, moved)) if tolerance < each.error < SUSPECT else each
        for each in tally.worst.values()
    ]
    kernel = str(model.config._attn_implementation)
    return Report(type(model).__name__, kernel, tolerance, tuple(findings), tuple(left_out))


def _moved(model: StockModel, case: Case) -> Answers:
    """The stock model's answers when each of its weights has moved by its last bit, up or down."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            up = torch.randint(2, parameter.shape, generator=generator).bool()
            parameter.mul_(torch.where(up, 1 + EPSILON, 1 - EPSILON))
    return _true_answers(moved, case)


def _rounding(finding: Finding, known: Sequence[Known], moved: Mapping[str, Answers]) -> float:
    """How far the answer that a finding is about has moved, or its own last bit: it is float32."""
    _, loss, gradients = next(each for each in known if each[0].name == finding.case)
    other_loss, others = moved[finding.case]
    if finding.parameter == LOSS:
        return max(EPSILON, _loss_error(other_loss, loss))
    return max(EPSILON, _gradient_error(others[finding.parameter], gradients[finding.parameter], _floor(gradients)))


def _true_answers(model: StockModel, case: Case) -> Answers:
    """The loss in evaluation mode, and the gradients in the model's mode, of a copy: a forward may leave traces."""
    _, gradients = truth(copy.deepcopy(model), case.micro_batches)
    still = copy.deepcopy(model).eval()
    loss = sum(stock_loss(still, batch).item() * share for batch, share in _with_shares(case.micro_batches))
    return loss, gradients


class _Tally:
    """The worst error of each group so far."""

    def __init__(self, model: StockModel) -> None:
        self.worst: dict[str, Finding] = {LOSS: Finding(LOSS, 0.0, LOSS)}
        for name in (name for name, parameter in model.named_parameters() if parameter.requires_grad):
            self.worst.setdefault(group_of(name), Finding(group_of(name), 0.0, name))

    def loss(self, found: float, expected: float, case: str, setting: str) -> None:
        self._note(LOSS, _loss_error(found, expected), LOSS, case, setting)

    def gradients(self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], case: str, setting: str) -> None:
        floor = _floor(expected)
        for name, value in expected.items():
            given = found.get(name)
            error = math.inf if given is None else _gradient_error(given, value, floor)
            self._note(group_of(name), error, name, case, setting)

    def _note(self, group: str, error: float, parameter: str, case: str, setting: str) -> None:
        error = math.inf if math.isnan(error) else error
        if error > self.worst[group].error:
            self.worst[group] = Finding(group, error, parameter, case, setting)


def _loss_error(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1.0)


def _floor(expected: Mapping[str, Tensor]) -> float:
    return FLOOR * max(_norm(value) for value in expected.values())


def _gradient_error(found: Tensor, expected: Tensor, floor: float) -> float:
    if found.shape != expected.shape:
        return math.inf
    return _norm(found.double() - expected) / (max(_norm(expected), floor) or 1.0)


def _norm(value: Tensor) -> float:
    return float(value.double().norm())


def group_of(name: str) -> str:
    """The name of a parameter with a star for each number: `model.layers.*.mlp.up_proj.weight`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def replay_finding(model: StockModel, make_engine: MakeEngine, case: Case, settings: Sequence[Setting]) -> Finding:
    """With dropout, in training mode: every plan draws the same, so that all gradients are bit-equal.

    The error is zero, or that of the parameter that differs most from the first setting.
    """
    answers: list[tuple[str, dict[str, Tensor]]] = []
    for setting in settings:
        with closing(make_engine(model, setting.device, setting.policy)) as engine:
            answers.append((setting.name, engine.gradients(case.micro_batches)))
    first, expected = answers[0]
    worst = Finding(REPLAY, 0.0, "", case.name, first)
    for name, gradients in answers[1:]:
        for parameter, value in gradients.items():
            error = _gradient_error(value, expected[parameter], 0.0)
            if not torch.equal(value, expected[parameter]) and not error <= worst.error:
                worst = Finding(REPLAY, error, parameter, case.name, f"{first} against {name}")
    return worst


def full_report(
    config: StockConfig,
    make_engine: MakeEngine,
    attention: str | None = None,
    kind: type[StockModel] | None = None,
) -> Report:
    """Every case in every setting on a twin of `config`, dropout replayed, and the router auxiliary loss if it has one.

    attention: the attention kernel, the config's own if it is not given. kind: the class of the model; what
    `AutoModelForCausalLM` chooses if it is not given. Raises `ModelError` for a model that has no twin or that the
    engine refuses, and for a kernel that the model has not or that no cpu has, where both are run.
    """
    if attention is not None:
        where = where_of(config)
        refuse_attention(config, attention, where)
        if attention not in CPU_KERNELS:
            fix = f"use attention={' or '.join(CPU_KERNELS)}"
            raise ModelError(f"is compared on the cpu, which has no attention={attention}", where=where, fix=fix)
    small = shrink(config, kind)
    kernel = attention or config._attn_implementation
    still = twin_from(with_dropout(small, 0.0), 0, kernel, kind)
    report = compare(still, make_engine, full_cases(still), full_settings())
    extra, left_out = [], []
    if dropout_rates(small):
        moving = twin_from(with_dropout(small, 0.2), 0, kernel, kind)
        extra.append(replay_finding(moving, make_engine, full_cases(moving)[-1], full_settings()))
    if getattr(small, "output_router_logits", None) is False:
        small.output_router_logits = True
        routed = twin_from(with_dropout(small, 0.0), 0, kernel, kind)
        try:
            worst = compare(routed, make_engine, short_cases(routed), full_settings(), enough=1).worst
            extra.append(replace(worst, group=ROUTERS))
        except ModelError as refusal:
            left_out.append(f"{ROUTERS}: {refusal.what}")
    return replace(report, findings=(*report.findings, *extra), left_out=(*report.left_out, *left_out))
