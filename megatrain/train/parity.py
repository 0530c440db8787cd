"""Checks that the engine computes the same as the stock model: the steps, the comparison, and the cached result."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from megatrain.engine import MicroBatch
from megatrain.errors import ModelError, typed_line
from megatrain.model.adapters import Adapter, adapter_of
from megatrain.model.forward_arguments import MARKS, arguments_of
from megatrain.model.ports import takes
from megatrain.model.skeleton import on_the_cpu, refuse_attention, where_of
from megatrain.model.tiny import (
    CPU_KERNELS,
    StockConfig,
    StockModel,
    dropout_rates,
    ordinary_tokens,
    perturb,
    shrink,
    twin_from,
    with_dropout,
)
from megatrain.model.user_patches import HOOKS
from megatrain.spec import ActivationPlan, Keep, Kernels, Numerics, Policy

# Cases ----------------------------------------------------------------------------------------------------------------
#
# The steps to compare, and the settings in which to compute them. Padding is on the left too, since with a causal mask
# padding on the right affects nothing that counts; micro-batches are unequal, so that a mean of means is not the mean;
# sequences are longer than a twin's windows and chunks, and shorter and longer than what changes its rotary embedding.


SIM = "sim:7"
FEW = 4
"""Tokens of the shortest sequence: any model can be split with so many."""
ACTIVATION_PLANS: tuple[ActivationPlan, ...] = get_args(ActivationPlan)
MIXTURE: tuple[tuple[Keep, ...], ...] = (("offload", "graph"), ("drop",))
STORED: tuple[tuple[Keep, ...], ...] = (("chosen", "attention"),)
OFFLOADED: tuple[tuple[Keep, ...], ...] = (("offload_chosen", "attention"),)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    device: str
    numerics: Numerics
    policy: Policy


def micro_batch(
    tokens: Sequence[int], rows: int, length: int, seed: int, left: int = 0, right: int = 0
) -> dict[str, Tensor]:
    """Random tokens int64[rows, length]; the first row has `left` padding on the left, the last `right` on the
    right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor(tokens)[torch.randint(len(tokens), (rows, length), generator=generator)]
    if not left and not right:
        return {"input_ids": ids, "labels": ids.clone()}
    mask = torch.ones_like(ids)
    mask[0, :left] = 0
    mask[-1, length - right :] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def _read_by(model: StockModel, cases: Sequence[Case]) -> list[Case]:
    """The cases, without masks if nothing in the model reads one: engines refuse them then. With marks of which tokens
    are parts of an image, none, if the model wants them of text, too."""
    arguments = arguments_of(model, ())
    marks = [name for name in MARKS if name in arguments.own]
    if marks and _computes(model, cases[0].micro_batches[0]):
        marks = []

    def read(batch: MicroBatch) -> dict[str, Tensor]:
        kept = {key: tensor for key, tensor in batch.items() if key != "attention_mask" or key in arguments}
        return kept | {name: torch.zeros_like(batch["input_ids"]) for name in marks}

    return [replace(case, micro_batches=tuple(map(read, case.micro_batches))) for case in cases]


def _computes(model: StockModel, batch: MicroBatch) -> bool:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(**batch)
    except Exception:  # whatever foreign code raises
        return False
    return True


def packed(tokens: Sequence[int], lengths: Sequence[int], seed: int) -> dict[str, Tensor]:
    """One row of several documents, separated by position ids that restart."""
    batch = micro_batch(tokens, 1, sum(lengths), seed)
    batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    return batch


def short_cases(model: StockModel) -> list[Case]:
    """Two unequal micro-batches, the first padded, on the left if possible. One case that the stock model can compute
    is enough."""
    tokens = ordinary_tokens(model.config)
    single = micro_batch(tokens, 1, FEW, 1)
    cases = [
        Case("two micro-batches, padded on both sides", (micro_batch(tokens, 2, 10, 0, left=3, right=2), single)),
        Case("two micro-batches, padded on the right", (micro_batch(tokens, 2, 10, 0, right=3), single)),
        Case("two micro-batches of whole rows", (micro_batch(tokens, 2, 10, 0), single)),
    ]
    return _read_by(model, cases)


def full_cases(model: StockModel) -> list[Case]:
    """Whole rows, padding on either side, packing (if the model takes positions), several unequal micro-batches."""
    tokens = ordinary_tokens(model.config)
    whole, single = micro_batch(tokens, 2, 12, 2), micro_batch(tokens, 1, FEW, 1)
    right, left = micro_batch(tokens, 2, 10, 0, right=3), micro_batch(tokens, 3, 9, 3, left=4)
    cases = [
        Case("whole rows", (whole,)),
        Case("padding on the right", (right,)),
        Case("padding on the left", (left,)),
        Case("several micro-batches", (left, single, right)),
    ]
    if takes(model, "position_ids"):
        cases.append(Case("packed documents", (packed(tokens, (6, 3, 5), 4),)))
    return _read_by(model, cases)


def short_settings(kernels: Kernels = "stock") -> list[Setting]:
    """Keeping graphs; recomputing layers, with token-wise parts in chunks; and recomputing all but some ops."""
    numerics = Numerics("fp32", loss_chunk_tokens=5, kernels=kernels)
    settings = [_setting("cpu", plan, numerics) for plan in ACTIVATION_PLANS]
    numerics, policy = settings[-1].numerics, settings[-1].policy
    chosen = Setting("cpu, chosen outputs", "cpu", numerics, replace(policy, activations_by_layer=STORED))
    chunks = Setting("cpu, recompute, in chunks", "cpu", replace(numerics, mlp_chunk_tokens=4), policy)
    return [*settings[:-1], chunks, chosen]


def full_settings() -> list[Setting]:
    """Every activation plan, and a mixture, on the CPU and the simulated device, with few and many slots and
    pieces."""
    settings = [_setting("cpu", plan) for plan in ACTIVATION_PLANS]
    settings += [_setting(SIM, plan, shard_nbytes=1 << 16) for plan in ACTIVATION_PLANS]
    chunks = replace(CHUNKS, mlp_chunk_tokens=4)
    settings.append(_setting(SIM, "recompute", chunks, shard_nbytes=1 << 14, weight_slots=1, grad_slots=1))
    mixed = replace(settings[-1].policy, activations_by_layer=MIXTURE, offload_slots=1, recompute_slots=1)
    stored = replace(settings[-1].policy, activations_by_layer=OFFLOADED)
    return [
        *settings,
        Setting(f"{SIM}, chosen outputs, offloaded, 1 slot", SIM, chunks, stored),
        Setting(f"{SIM}, a mixture of plans, 1 slot", SIM, chunks, mixed),
    ]


CHUNKS = Numerics("fp32", loss_chunk_tokens=7)


def _setting(device: str, activations: ActivationPlan, numerics: Numerics = CHUNKS, **changes: Any) -> Setting:
    policy = Policy(shares_memory=device == "cpu", activations=activations, host_threads=1, **changes)
    slots = f", {policy.weight_slots} slot" if policy.weight_slots == 1 else ""
    return Setting(f"{device}, {activations}{slots}", device, numerics, policy)


# The comparison -------------------------------------------------------------------------------------------------------
#
# The reference is plain autograd through the library's own forward, one micro-batch after another (`truth`). The
# engine's loss and every gradient are compared with it on a model's small twin, for several kinds of micro-batches,
# plans and devices (`compare`). `full_report` runs everything, for `megatrain verify`; `short_check` is what an engine
# runs when it first meets an architecture.
#
# An error is the norm of the difference over the norm of the reference. A gradient that is zero up to rounding (the
# bias of keys, before a softmax) has no scale of its own, so the scale is at least `FLOOR` times the largest gradient
# norm of the step. Undetected errors are thus at most `tolerance` times `FLOOR` of that: rounding of the largest.
#
# Some gradients are small sums of large terms, so rounding alone exceeds `tolerance`. Before such an error counts, the
# stock model is run `DRAWS` times more, with the last bit of its weights changed at random: the engine may be `SLACK`
# times as far off as these are in the root mean square. (Of a single number, such as a learned scale, one draw tells
# little: apertus' moves by 1e-7 to 5e-6.)
#
# Callers construct engines (`make_engine`), so that this module does not import `train.engine`, which imports it.
# bfloat16 is not compared: its error against a float32 reference says little about mistakes.


TOLERANCE = 1e-5
"""Largest relative error in float32 that counts as rounding."""

FLOOR = 1e-2
"""Minimum scale of an error, relative to the largest gradient norm."""

ALIKE = 1.1
"""Errors of a group within this factor are equal, and the first is reported; else last bits would decide."""

SLACK = 4.0
DRAWS = 4
EPSILON = torch.finfo(torch.float32).eps


class Computes(Protocol):
    def gradients(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]: ...

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float: ...

    def close(self) -> None: ...


MakeEngine = Callable[[StockModel, str, Numerics, Policy], Computes]
"""(model, device, numerics, policy) -> an engine without a check of its own."""


def group_of(name: str) -> str:
    """A parameter's name with a star for each number: `model.layers.*.mlp.up_proj.weight`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


@dataclass(frozen=True, slots=True)
class Finding:
    """The largest error in one group: parameters that differ only in their layer's number, or the loss.

    error: relative. parameter, case, setting: the first member with it. rounding: how far the stock model's answer
    moves with the last bit of its weights, on the same scale; known if the error exceeds the tolerance.
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
    """The results of a comparison. `left_out`: cases that the stock model itself cannot compute, and why."""

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
        """The finding with the largest error, among those that do not agree if there are any."""
        return max(self.findings, key=lambda finding: (not self.agrees(finding), finding.error))

    def agrees(self, finding: Finding) -> bool:
        return finding.error <= max(self.tolerance, SLACK * finding.rounding)

    def raise_if_wrong(self) -> None:
        """Raise `ModelError` naming the parameter with the largest error, and what to try."""
        if self.ok:
            return
        worst = self.worst
        what = "its loss" if worst.parameter == LOSS else f"its gradient of {worst.parameter}"
        others = [kernel for kernel in ("eager", "sdpa") if kernel != self.attention]
        raise ModelError(
            f"{what} would be wrong by {worst.error:.0e} ({worst.where}), so it is not trained",
            where=f"model {self.model}",
            fix=f"try another attention kernel ({' or '.join(others)}), and please report it",
        )


LOSS = "loss"
REPLAY = "dropout, replayed"
ROUTERS = "router auxiliary loss"


def verify_rows(report: Report) -> list[tuple[str, str, str]]:
    """Table rows (parameter group, largest relative error, verdict), in the model's order."""
    return [
        (finding.group, f"{finding.error:.1e}", "equal" if report.agrees(finding) else f"differs: {finding.where}")
        for finding in report.findings
    ]


Answers = tuple[float, dict[str, Tensor]]
"""(loss, parameter name -> gradient)."""


def truth(model: StockModel, micro_batches: Sequence[MicroBatch]) -> Answers:
    """Loss and gradients of a step by plain autograd; zeros for parameters without gradient, frozen ones omitted.

    The loss is the mean over all target tokens of the step. A router auxiliary loss has the model's own coefficient,
    and is weighted by each micro-batch's share of the target tokens.
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
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches]
    return [(batch, count / sum(counts)) for batch, count in zip(micro_batches, counts, strict=True)]


def adds_for_routers(model: StockModel) -> bool:
    return bool(getattr(model.config, "output_router_logits", False))


def stock_loss(model: StockModel, batch: MicroBatch) -> Tensor:
    """The stock model's loss of a micro-batch: mean cross-entropy over the targets in float32, plus any router loss.

    All comparisons with the library use this function. There must be no KV cache: with one, the library treats
    packed sequences as a single one. The router loss is included only if gradients are enabled.
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
"""A case with the stock model's results."""

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

    `model` must be without dropout; it is not changed. Gradients are compared in its mode, the loss in evaluation mode.
    Cases for which the stock model fails or gives non-finite numbers are skipped and reported; `enough` others suffice.
    Raises `ModelError` if no case is left, and whatever the engine raises.
    """
    known: list[Known] = []
    left_out: list[str] = []
    for case in cases:
        if len(known) == enough:
            break
        try:
            loss, gradients = _true_answers(model, case)
        except Exception as error:  # the library's own code, on inputs that some models do not accept
            left_out.append(f"{case.name}: {typed_line(error)}")
            continue
        if math.isfinite(loss) and all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values()):
            known.append((case, loss, gradients))
        else:
            left_out.append(f"{case.name}: the stock model's loss or gradients are not finite")
    if not known:
        raise ModelError(
            f"the stock model computes none of the cases ({left_out[0]})", where=f"model {type(model).__name__}"
        )
    tally = _Tally(model)
    for setting in settings:
        with closing(make_engine(model, setting.device, setting.numerics, setting.policy)) as engine:
            for case, loss, gradients in known:
                tally.gradients(engine.gradients(case.micro_batches), gradients, case.name, setting.name)
                tally.loss(engine.evaluate(case.micro_batches), loss, case.name, setting.name)
    worst = tally.worst()
    suspects = {finding.case for finding in worst if tolerance < finding.error < SUSPECT}
    moved = {
        case.name: [_moved(model, case, seed) for seed in range(DRAWS)] for case, *_ in known if case.name in suspects
    }
    findings = [
        replace(finding, rounding=_rounding(finding, known, moved)) if tolerance < finding.error < SUSPECT else finding
        for finding in worst
    ]
    kernel = str(model.config._attn_implementation)
    return Report(type(model).__name__, kernel, tolerance, tuple(findings), tuple(left_out))


def _moved(model: StockModel, case: Case, seed: int) -> Answers:
    """The stock model's results with the last bit of each weight changed, up or down."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            up = torch.randint(2, parameter.shape, generator=generator).bool()
            parameter.mul_(torch.where(up, 1 + EPSILON, 1 - EPSILON))
    return _true_answers(moved, case)


def _rounding(finding: Finding, known: Sequence[Known], moved: Mapping[str, Sequence[Answers]]) -> float:
    """How far a finding's value moves with the last bit of the weights, or at least its own last float32 bit."""
    _, loss, gradients = next(entry for entry in known if entry[0].name == finding.case)
    name, floor = finding.parameter, _floor(gradients)
    errors = [
        _loss_error(other_loss, loss) if name == LOSS else _gradient_error(others[name], gradients[name], floor)
        for other_loss, others in moved[finding.case]
    ]
    return max(EPSILON, math.hypot(*errors) / math.sqrt(len(errors)))


def _true_answers(model: StockModel, case: Case) -> Answers:
    """The loss in evaluation mode and the gradients in the model's mode, on a copy, since a forward may change
    state."""
    _, gradients = truth(copy.deepcopy(model), case.micro_batches)
    still = copy.deepcopy(model).eval()
    loss = sum(stock_loss(still, batch).item() * share for batch, share in _with_shares(case.micro_batches))
    return loss, gradients


class _Tally:
    """The errors found so far, by group."""

    def __init__(self, model: StockModel) -> None:
        self._met: dict[str, list[Finding]] = {LOSS: [Finding(LOSS, 0.0, LOSS)]}
        for name in (name for name, parameter in model.named_parameters() if parameter.requires_grad):
            self._met.setdefault(group_of(name), [Finding(group_of(name), 0.0, name)])

    def loss(self, computed: float, expected: float, case: str, setting: str) -> None:
        self._note(LOSS, _loss_error(computed, expected), LOSS, case, setting)

    def gradients(self, made: Mapping[str, Tensor], expected: Mapping[str, Tensor], case: str, setting: str) -> None:
        floor = _floor(expected)
        for name, value in expected.items():
            given = made.get(name)
            error = math.inf if given is None else _gradient_error(given, value, floor)
            self._note(group_of(name), error, name, case, setting)

    def _note(self, group: str, error: float, parameter: str, case: str, setting: str) -> None:
        self._met[group].append(Finding(group, error, parameter, case, setting))

    def worst(self) -> list[Finding]:
        """The largest error of each group, reported for the first parameter with about that error."""
        worst = []
        for met in self._met.values():
            largest = max(finding.error for finding in met)
            first = next(finding for finding in met if finding.error * ALIKE >= largest)
            worst.append(replace(first, error=largest))
        return worst


def _error(difference: float, scale: float) -> float:
    """difference / scale, but infinity for NaN: nothing compares as larger or smaller than NaN."""
    return math.inf if math.isnan(difference) else difference / scale


def _loss_error(computed: float, expected: float) -> float:
    return _error(abs(computed - expected), max(abs(expected), 1.0))


def _floor(expected: Mapping[str, Tensor]) -> float:
    return FLOOR * max(_norm(value) for value in expected.values())


def _gradient_error(computed: Tensor, expected: Tensor, floor: float) -> float:
    if computed.shape != expected.shape:
        return math.inf
    return _error(_norm(computed.double() - expected), max(_norm(expected), floor) or 1.0)


def _norm(value: Tensor) -> float:
    return float(value.double().norm())


def replay_finding(model: StockModel, make_engine: MakeEngine, case: Case, settings: Sequence[Setting]) -> Finding:
    """Check that with dropout, in training mode, all plans draw the same numbers, and give the same gradients up to the
    rounding of chunks.

    The error is zero, or that of the parameter that differs most from the first setting.
    """
    answers: list[tuple[str, dict[str, Tensor]]] = []
    for setting in settings:
        with closing(make_engine(model, setting.device, setting.numerics, setting.policy)) as engine:
            answers.append((setting.name, engine.gradients(case.micro_batches)))
    first, expected = answers[0]
    floor = _floor(expected)
    worst = Finding(REPLAY, 0.0, "", case.name, first)
    for name, gradients in answers[1:]:
        for parameter, value in gradients.items():
            error = _gradient_error(value, expected[parameter], floor)
            if not torch.equal(value, expected[parameter]) and error > worst.error:
                worst = Finding(REPLAY, error, parameter, case.name, f"{first} against {name}")
    return worst


def full_report(config: StockConfig, make_engine: MakeEngine, attention: str | None = None) -> Report:
    """Every case in every setting on a twin of `config`, dropout replay, and the router auxiliary loss if it has one.

    attention: the attention kernel; by default the config's. Raises `ModelError` for a model without a twin or that the
    engine refuses, and for a kernel that the model lacks or that does not exist on the CPU, where both run.
    """
    kernel = _kernel_for(config, attention)
    small = shrink(config)
    still = twin_from(with_dropout(small, 0.0), 0, kernel)
    fused = Setting("cpu, keep, fused", "cpu", replace(CHUNKS, kernels="fused"), full_settings()[0].policy)
    report = compare(still, make_engine, full_cases(still), [*full_settings(), fused])
    extra, left_out = [], []
    if dropout_rates(small):
        moving = twin_from(with_dropout(small, 0.2), 0, kernel)
        extra.append(replay_finding(moving, make_engine, full_cases(moving)[-1], full_settings()))
    if getattr(small, "output_router_logits", None) is False:
        small.output_router_logits = True
        routed = twin_from(with_dropout(small, 0.0), 0, kernel)
        try:
            worst = compare(routed, make_engine, short_cases(routed), full_settings(), enough=1).worst
            extra.append(replace(worst, group=ROUTERS))
        except ModelError as refusal:
            left_out.append(f"{ROUTERS}: {refusal.what}")
    return replace(report, findings=(*report.findings, *extra), left_out=(*report.left_out, *left_out))


def _kernel_for(config: StockConfig, attention: str | None) -> str:
    """The attention kernel that was asked for, or the config's. Raises `ModelError` for one that is not here."""
    if attention is None:
        return str(config._attn_implementation)
    where = where_of(config)
    refuse_attention(config, attention, where)
    if attention not in CPU_KERNELS:
        fix = f"use attention={' or '.join(CPU_KERNELS)}"
        raise ModelError(f"is compared on the CPU, which has no attention={attention}", where=where, fix=fix)
    return attention


# The check of a new architecture --------------------------------------------------------------------------------------
#
# An engine calls `short_check` before it trains a model. Success is cached in this process and in a file, not failure.


@dataclass(frozen=True, slots=True)
class Checked:
    """The status of an architecture: `remembered` from an earlier check, `checked` now, or `unchecked`, and `why`."""

    state: Literal["remembered", "checked", "unchecked"]
    why: str = ""


NOT_ASKED = Checked("unchecked", "the check was switched off")

CACHE = Path("~/.cache/megatrain/verified")


def short_check(
    model: nn.Module, make_engine: MakeEngine, cache_folder: Path | None = None, kernels: Kernels = "stock"
) -> Checked:
    """Compare two padded micro-batches in every activation plan on the CPU; raise `ModelError` on a mismatch. kernels:
    stock, or fused for functions that will be fused.

    Checks the twin of `type(model)` and its config, whatever the size of `model`. Success is cached in this process and
    as a file in `cache_folder` (default `CACHE`; without a usable one the check runs each time), as long as the class,
    its source, the small config, the attention kernel, the libraries and MegaTrain itself stay the same. Failure is
    never cached, nor is the result for a model that differs from its class and config (see `customised`), since its
    twin may behave differently.

    The result is `unchecked` if the class cannot be shrunk, or the twin (unlike the model) cannot be streamed.
    """
    if not isinstance(model, StockModel):
        return Checked("unchecked", "not a transformers model")
    folder = Path(os.path.expanduser(cache_folder or CACHE))
    ordinary, adapter = not customised(model), adapter_of(model)
    at_sight = folder, _digest(type(model), model.config, _kernel(model), adapter, kernels)
    if ordinary and at_sight in _SEEN:
        return Checked("remembered")
    try:
        small = shrink(model.config, type(model))
    except ModelError as error:
        return Checked("unchecked", error.what)
    path = folder / f"{_digest(type(model), small, _kernel(model), adapter, kernels)}.json"
    remembered = ordinary and os.path.isfile(path)  # false if its folder is not accessible
    answer = Checked("remembered") if remembered else _check(model, small, adapter, make_engine, kernels)
    if answer.state == "unchecked":
        return answer
    if not ordinary:
        return Checked("unchecked", "its class is computed correctly; this model's own hooks and code are not compared")
    _SEEN.add(at_sight)
    _remember(path, type(model))
    return answer


def _check(
    model: StockModel, small: StockConfig, adapter: Adapter | None, make_engine: MakeEngine, kernels: Kernels
) -> Checked:
    with torch.random.fork_rng(devices=[]), on_the_cpu():  # independent of the caller's default device
        return _compared(model, small, adapter, make_engine, kernels)


def _compared(
    model: StockModel, small: StockConfig, adapter: Adapter | None, make_engine: MakeEngine, kernels: Kernels
) -> Checked:
    kind, kernel, settings = type(model), _kernel(model), short_settings(kernels)
    twin = twin_from(with_dropout(small, 0.0), 0, kernel, kind)
    try:
        if adapter is not None:
            adapter.put_into(twin, drops=False)
            perturb(twin, 0)  # otherwise a fresh adapter adds zero
        report = compare(twin, make_engine, short_cases(twin), settings, enough=1)
        if any(dropout_rates(small)) or (adapter is not None and adapter.drops):
            moving = twin_from(small, 0, kernel, kind)
            if adapter is not None:
                adapter.put_into(moving)
                perturb(moving, 0)
            replayed = replay_finding(moving, make_engine, short_cases(moving)[-1], settings)
            report = replace(report, findings=(*report.findings, replayed))
    except ModelError as refusal:
        return Checked("unchecked", refusal.what)
    except Exception as error:  # from the model's own code, run by the engine
        what = f"a small model of its kind fails in the engine: {typed_line(error)}"
        raise ModelError(what, where=f"model {kind.__name__}", fix="please report it") from error
    report.raise_if_wrong()
    return Checked("checked")


_SEEN: set[tuple[Path, str]] = set()
"""(cache folder, digest) of what this process has found correct."""


def customised(model: nn.Module) -> bool:
    """Whether a model may behave differently from its class and config.

    True with hooks, a `forward` set on an instance or assigned to a class from outside, or modules from neither
    torch, `peft` nor the package of the model's class (replaced layers).
    """
    home = type(model).__module__.partition(".")[0]
    for module in model.modules():
        if "forward" in vars(module) or any(vars(module)[hooks] for hooks in HOOKS):
            return True
        for part in (type(module), type(module).forward):
            if part.__module__.partition(".")[0] not in ("torch", "transformers", "peft", home):
                return True
    return False


def _kernel(model: StockModel) -> str:
    return str(model.config._attn_implementation)


def _digest(kind: type, config: StockConfig, kernel: str, adapter: Adapter | None, kernels: Kernels) -> str:
    """SHA-256 of everything that a result depends on."""
    parts = [
        "" if adapter is None else adapter.facts,
        f"{kind.__module__}.{kind.__qualname__}",
        json.dumps(config.to_dict(), sort_keys=True, default=str),
        kernel,
        kernels,
        str(config._experts_implementation),
        *(version(library) for library in ("transformers", "torch")),
        _source_of(kind),
        own_sources(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def _source_of(kind: type) -> str:
    """Digest of the file that defines a class; empty if there is none (an interactive session)."""
    try:
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""


@cache
def own_sources() -> str:
    package = Path(__file__).resolve().parent.parent
    every = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        every.update(path.read_bytes())
    return every.hexdigest()


def _remember(path: Path, kind: type) -> None:
    """Save a success, atomically; if the folder is not writable, the check simply runs again."""
    told = {"model": kind.__qualname__, "transformers": version("transformers"), "torch": version("torch")}
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(told))
        draft.replace(path)
    except OSError:
        return
