"""Replaces functions of a layer by fused ones (`model.fused`), found by what they compute.

No list of classes: a module, or a function that an attention module calls, is run on random data and weights in
float32, and replaced if a formula of a small table gives the same there:

* RMS norms (with a weight, with 1 + weight, without; over groups of channels; with a gate) and layer norms that a
  module spells out;
* MLPs of the form down(activation(gate(x)) * up(x)), also with gate and up in one product, clipped, or with up + 1;
* the same activations between the two products of stacked experts;
* rotary embeddings that turn the two halves of a head, or neighbouring channels.

What fits no formula stays as it is. Children of an MLP are called as before, so that adapters on them count, and
parameters keep their names.

A replaced module has a `forward` of its own, and stacked experts have an `_apply_gate` of their own. A function that
attention calls is replaced for that module alone, by a copy of its `forward` that looks the name up elsewhere; the
library's module is not touched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from megatrain.model.chunked_layers import MOST_RANDOM_NUMEL, ExpandedRowLinear, in_mode, random_like
from megatrain.model.fused import (
    ACTIVATIONS,
    HALVES,
    NEIGHBOURS,
    NORM_FORMULAS,
    ONCE,
    gated,
    halves,
    in_groups,
    rms_norm,
    rotary,
    rotated,
)
from megatrain.model.peak import LimitNumel
from megatrain.model.ports import PortedModel, roots_of

TOLERANCE = 2e-6
"""Largest difference that counts as rounding in float32, relative to the largest value."""
ROWS = (3, 5)
SCALES = (1e-4, 1e-3, 1.0, 30.0, 1e4)
"""Of inputs: the smallest tell the epsilon of a norm, the largest a limit."""
WIDTH, OTHER_WIDTH = 24, 40
"""Channels of what any number would do for; a norm without a weight must be the same for both."""
EPSILONS = (1e-6, 1e-5, 1e-8, 1e-12, torch.finfo(torch.float32).eps, 0.0)
FORWARD, GATE = "forward", "_apply_gate"
"""Methods that are replaced; the second is what the library's stacked experts call between their two products."""
HEADS = "unsqueeze_dim"
"""The argument of the library's rotary functions that says which dimension is the heads'."""
PAIRS = (
    ((HALVES, HALVES, HALVES), False),
    ((HALVES, HALVES, ONCE), False),  # gpt-oss
    ((NEIGHBOURS, NEIGHBOURS, NEIGHBOURS), False),  # Cohere
    ((NEIGHBOURS, NEIGHBOURS, ONCE), True),  # GLM, Ernie
    ((NEIGHBOURS, HALVES, ONCE), True),  # DeepSeek
)
"""Forms to try: `pairs` of `rotary`, and whether only the first half of each row of angles is read."""
WIDE = torch.bfloat16, torch.float32
"""Dtypes of channels and of their angles in Ernie 4.5."""
MOST_CHILDREN = 8
"""Modules with more are no MLP."""


def fuse_layers(ported: PortedModel) -> None:
    """Fuse what can be fused in all layers of a model, encoders' too, which is then measured anew when needed."""
    layers = roots_of(ported)[1:]
    if [name for layer in layers for name in fuse(layer)]:
        ported.profiled = None


def unfuse_layers(ported: PortedModel) -> None:
    """Undo `fuse_layers`."""
    for layer in roots_of(ported)[1:]:
        for module in layer.modules():
            for name in (FORWARD, GATE):
                if getattr(vars(module).get(name), "is_fused", False):
                    delattr(module, name)
                    ported.profiled = None


def fuse(layer: nn.Module) -> dict[str, str]:
    """Replace what can be fused in a layer; returns the name of each module that was changed and what it computes.

    The layer may be on the meta device. Raises nothing for foreign code that fails: it stays as it is.
    """
    changed: dict[str, str] = {}
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        for name, module in layer.named_modules():
            for method, fused_form in ((FORWARD, _fused_forward), (GATE, _fused_gate)):
                if method not in vars(module) and (fused := fused_form(module)) is not None:
                    setattr(module, method, fused)
                    changed[name] = "rotary embedding" if isinstance(fused, MethodType) else str(fused)
    return changed


def _fused_forward(module: nn.Module) -> Callable[..., Any] | None:
    children = list(module.children())
    if not children:
        return _norm_of(module)
    if len(children) <= MOST_CHILDREN and (found := _mlp_of(module)) is not None:
        return found
    return _with_fused_rotary(module)


class _Fused:
    """Replaces a method of a module, `plain`, where that is called with one tensor."""

    plain: Callable[..., Any]
    is_fused = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args) if not kwargs and self.fits(*args) else self.plain(*args, **kwargs)

    def fits(self, *args: Any) -> bool:
        """Whether `compute` takes these arguments."""
        return len(args) == 1

    def compute(self, x: Tensor) -> Tensor:
        raise NotImplementedError


# Norms ----------------------------------------------------------------------------------------------------------------


class _NormForm(NamedTuple):
    """rule: of `rms_norm`; "" for a layer norm."""

    rule: str
    eps: float
    groups: int = 1


@dataclass(frozen=True, eq=False)
class _Norm(_Fused):
    module: nn.Module
    plain: Callable[..., Any]
    weight: str | None
    """Name of its parameter."""
    width: int | None
    """Channels of the weight."""
    forms: Mapping[int, _NormForm]
    """By how many tensors it is called with: x, or x and a gate."""

    def __str__(self) -> str:
        if 2 in self.forms:
            return "RMS norm with a gate"
        return "RMS norm" if self.forms[1].rule else "layer norm"

    def fits(self, *args: Any) -> bool:
        if len(args) not in self.forms or not all(isinstance(x, Tensor) and x.shape == args[0].shape for x in args):
            return False
        return self.width is None or args[0].shape[-1] == self.width  # other channels may share the weight

    def compute(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        rule, eps, groups = self.forms[1 if gate is None else 2]
        weight = None if self.weight is None else self.module._parameters[self.weight]
        if not rule:
            return functional.layer_norm(x, x.shape[-1:], weight, None, eps)
        return rms_norm(x, weight, rule, eps, gate, groups)


def _norm_of(module: nn.Module) -> _Fused | None:
    """The fused form of a norm with no parameter or one, [channels]; None for anything else."""
    parameters = list(module.named_parameters())
    if type(module).__module__.startswith("torch.") or len(parameters) > 1 or any(p.dim() != 1 for _, p in parameters):
        return None
    name, width = (parameters[0][0], parameters[0][1].numel()) if parameters else (None, None)
    forms = {count: form for count in (1, 2) if (form := _norm_form(module, name, width or WIDTH, count)) is not None}
    if width is None:
        others = {count: _norm_form(module, name, OTHER_WIDTH, count) for count in forms}
        forms = {count: form for count, form in forms.items() if form == others[count]}
    return _Norm(module, module.forward, name, width, forms) if forms else None


def _norm_form(module: nn.Module, name: str | None, width: int, count: int) -> _NormForm | None:
    """How a module norms `count` tensors, a gate being the second; None if it does something else."""
    draw = torch.Generator().manual_seed(0)
    weights = {} if name is None else {name: torch.randn(width, generator=draw)}
    inputs = [scale * torch.randn(*ROWS, width, generator=draw) + scale / 2 for scale in SCALES]
    for x in inputs:
        x[0, 0] = 0  # of which a norm without an epsilon makes no number
    gate = 3 * torch.randn(*ROWS, width, generator=draw)
    calls = [(x, gate if scale >= 1 else 10 * gate)[:count] for x, scale in zip(inputs, SCALES, strict=True)]
    low = [[x.bfloat16() for x in calls[2]], [inputs[2], gate.bfloat16()]][:count]
    with _quietly() as failed:
        outputs = [functional_call(module, weights, args) for args in calls]
        low_weights = {each: w.bfloat16() for each, w in weights.items()}
        keeps_dtype = all(functional_call(module, low_weights, tuple(args)).dtype == args[0].dtype for args in low)
    if failed or not _are_norms(outputs, inputs) or not keeps_dtype:
        return None
    weight, wide = weights[name].double() if name else None, [[each.double() for each in args] for args in calls]

    def gives(formula: Callable[..., Tensor]) -> bool:
        return all(_same(output, formula(*args)) for output, args in zip(outputs, wide, strict=True))

    rules = [key for key, rule in NORM_FORMULAS.items() if bool(rule.activation) == (count == 2)]
    rules = [rule for rule in rules if weight is not None or not NORM_FORMULAS[rule].offset]
    for eps in _epsilons(module):
        for form in (_NormForm(rule, eps, groups) for groups in _groups(module, width) for rule in rules):
            if gives(lambda x, gate=None, form=form: _exact_rms_norm(x, weight, gate, form)):
                return form
        if count == 1 and gives(lambda x, eps=eps: functional.layer_norm(x, x.shape[-1:], weight, None, eps)):
            return _NormForm("", eps)
    return None


def _exact_rms_norm(x: Tensor, weight: Tensor | None, gate: Tensor | None, form: _NormForm) -> Tensor:
    offset, activation, gates_input = NORM_FORMULAS[form.rule]
    value = 1.0 if gate is None else ACTIVATIONS[activation](gate)
    inside = in_groups(x * value if gates_input else x, form.groups)
    normed = (inside * torch.rsqrt(inside.square().mean(-1, keepdim=True) + form.eps)).flatten(-2)
    return normed * (1.0 if weight is None else weight + offset) * (1.0 if gates_input else value)


def _are_norms(outputs: Sequence[Any], inputs: Sequence[Tensor]) -> bool:
    """Whether the outputs could be those of a norm: they hardly grow with the inputs."""
    if not all(isinstance(y, Tensor) and y.shape == x.shape for y, x in zip(outputs, inputs, strict=True)):
        return False
    return bool(outputs[-1].abs().max() < 2 * outputs[-2].abs().max() + 1e-6)


def _epsilons(module: nn.Module) -> list[float]:
    """Small numbers that the module holds, and common ones."""
    held = [value for value in vars(module).values() if type(value) is float and 0 <= value < 0.1]
    return list(dict.fromkeys([*held, *EPSILONS]))


def _groups(module: nn.Module, width: int) -> list[int]:
    """Counts of equal groups of channels: one, and those that a number which the module holds may mean."""
    held = [value for value in vars(module).values() if type(value) is int and 1 < value < width and not width % value]
    return list(dict.fromkeys([1, *held, *(width // value for value in held)]))


# Gated MLPs -----------------------------------------------------------------------------------------------------------


_Gate = tuple[str, float, float]
"""A rule: (activation, limit, offset) of `gated`."""


@dataclass(frozen=True, eq=False)
class _GatedMlp(_Fused):
    plain: Callable[..., Any]
    first: nn.Module
    """The child that is called first: the gate, `up` if not `gate_first`, or both in one."""
    second: nn.Module | None
    last: nn.Module
    gate_first: bool
    rule: _Gate

    def __str__(self) -> str:
        return f"MLP {_described(self.rule)}"

    def compute(self, x: Tensor) -> Tensor:
        gate, up = self.first(x), None if self.second is None else self.second(x)
        if not self.gate_first:
            assert up is not None
            gate, up = up, gate
        made: Tensor = self.last(gated(gate, up, *self.rule))
        return made


@dataclass(frozen=True, eq=False)
class _GateOfExperts(_Fused):
    plain: Callable[..., Any]
    neighbours: bool
    """Whether gate and up lie side by side, channel by channel, rather than one after the other."""
    rule: _Gate

    def __str__(self) -> str:
        return f"experts {_described(self.rule)}"

    def compute(self, x: Tensor) -> Tensor:
        if self.neighbours:
            gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
            return gated(gate, up, *self.rule)
        return gated(x, None, *self.rule)


def _described(rule: _Gate) -> str:
    activation, limit, _ = rule
    return f"gated by {activation}{'' if limit == math.inf else ', clipped'}"


def _fused_gate(module: nn.Module) -> _GateOfExperts | None:
    """The fused form of the method that makes the product of [gate, up] in stacked experts; None for anything else."""
    if not hasattr(type(module), GATE):
        return None
    plain = getattr(module, GATE)
    draw = torch.Generator().manual_seed(1)
    inputs = [scale * torch.randn(*ROWS, 2 * WIDTH, generator=draw) for scale in SCALES[2:]]
    with _quietly() as failed:
        outputs = [plain(x) for x in inputs]
    if failed:
        return None
    for neighbours in (False, True):
        splits = [x.unflatten(-1, (-1, 2)).unbind(-1) if neighbours else x.chunk(2, -1) for x in inputs]
        first, *more = [
            set(_fitting_gates(gate.double(), up.double(), output, _limits(module)))
            for (gate, up), output in zip(splits, outputs, strict=True)
        ]
        if gates := first.intersection(*more):
            return _GateOfExperts(plain, neighbours, min(gates, key=_simplicity))
    return None


def _fitting_gates(gate: Tensor, up: Tensor, product: Any, limits: Sequence[float]) -> Iterator[_Gate]:
    """The rules with which `gated` gives the product."""
    for limit in limits:
        for offset, (activation, function) in itertools.product((0.0, 1.0), ACTIVATIONS.items()):
            if _same(product, function(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + offset)):
                yield activation, limit, offset


def _limits(module: nn.Module) -> list[float]:
    """Limits to try: none, and the numbers above 1 that the module holds."""
    return [math.inf, *{float(value) for value in vars(module).values() if type(value) in (int, float) and value > 1}]


def _simplicity(rule: _Gate) -> tuple[object, ...]:
    """The key by which the simplest of several rules that fit comes first: no limit, and the first activation."""
    activation, limit, offset = rule
    return -limit, list(ACTIVATIONS).index(activation), offset


@dataclass(frozen=True, eq=False)
class _ChildCall:
    child: nn.Module
    given: Tensor
    made: Tensor


def _mlp_of(module: nn.Module) -> _GatedMlp | None:
    """The fused form of an MLP whose last child gets activation(gate) * up; None for anything else."""
    widths = {parameter.shape[-1] for parameter in module.parameters() if parameter.dim() == 2}
    if not widths or any(parameter.dim() > 2 for parameter in module.parameters()) or len(widths) > MOST_CHILDREN:
        return None
    for width in sorted(widths):
        runs = [_calls_of(module, width, scale) for scale in SCALES[2:]]
        first, *more = [set[_Form]() if run is None else set(_gated_forms(run, _limits(module))) for run in runs]
        if forms := first.intersection(*more):  # activations of large numbers hardly differ
            return _GatedMlp(module.forward, *min(forms, key=lambda form: _simplicity(form[-1])))
    return None


def _calls_of(module: nn.Module, width: int, scale: float) -> tuple[Tensor, list[_ChildCall], Tensor] | None:
    """(input, calls of its children with one tensor each, output) of a run in training mode; None if it fails."""
    draw = torch.Generator().manual_seed(1)
    forms = {name: torch.empty_like(p, dtype=torch.float32, device="meta") for name, p in module.named_parameters()}
    weights = {name: random_like(form, draw) for name, form in forms.items()}
    x = scale * torch.randn(*ROWS, width, generator=draw)
    calls: list[_ChildCall] = []

    def note(child: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            calls.append(_ChildCall(child, args[0], output))

    hooks = [child.register_forward_hook(note) for child in module.children()]
    try:  # in training mode, so that dropout fits no formula
        with _quietly() as failed, in_mode(True, module), LimitNumel(MOST_RANDOM_NUMEL), ExpandedRowLinear():
            output = functional_call(module, weights, (x,))
    finally:
        for hook in hooks:
            hook.remove()
    return None if failed else (x, calls, output)


_Form = tuple[nn.Module, nn.Module | None, nn.Module, bool, _Gate]


def _gated_forms(run: tuple[Tensor, list[_ChildCall], Tensor], limits: Sequence[float]) -> Iterator[_Form]:
    """Each (first, second, last, whether the first is the gate, rule) that fits the run."""
    x, calls, output = run
    inner = [call for call in calls if call.given is x]
    last = [call for call in calls if call.made is output]
    if len(inner) not in (1, 2) or len(last) != 1 or last[0] in inner:
        return
    product, made = last[0].given, [call.made.double() for call in inner]
    second = inner[1].child if len(inner) == 2 else None
    orders = [(made[0], made[1], True), (made[1], made[0], False)] if second is not None else [(made[0], None, True)]
    for gate, up, gate_first in orders:
        if gate.shape[-1] != product.shape[-1] * (1 if up is not None else 2):
            continue
        for rule in _fitting_gates(*halves(gate, up), product, limits):
            yield inner[0].child, second, last[0].child, gate_first, rule


# Rotary embeddings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _FusedRotary:
    """Replaces a function of `count` tensors (1 or 2), cosines and sines. pairs: see `rotary`. half: whether it reads
    only the first half of each row of angles. partial: whether it can turn the first channels of a head and leave the
    others. heads: the dimensions that its argument `HEADS` may name. wide: whether angles may be float32 beside
    bfloat16, which the result is in, too."""

    plain: Callable[..., Any]
    count: int
    pairs: tuple[int, int, int]
    half: bool
    partial: bool = False
    heads: tuple[int, ...] = (1,)
    wide: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        heads = kwargs.get(HEADS, 1)
        if kwargs.keys() <= {HEADS} and len(args) == self.count + 2 and self._fits(heads, *args):
            *turned, cos, sin = args
            return rotary(turned[0], turned[1] if turned[1:] else None, *self._angles(cos, sin), heads, self.pairs)
        return self.plain(*args, **kwargs)

    def _fits(self, heads: int, *args: Tensor) -> bool:
        *turned, cos, sin = args
        fits = heads in self.heads and cos.shape == sin.shape and cos.dim() == 3 and not cos.requires_grad
        fits = fits and cos.dtype == sin.dtype
        for x in turned if fits else ():
            rest, token = x.shape[-1] - self.turns(cos.shape[-1]), 3 - heads
            fits = fits and x.dim() == 4 and cos.shape[1] == x.shape[token]
            fits = fits and (x.dtype == cos.dtype or (self.wide and (x.dtype, cos.dtype) == WIDE))
            fits = (
                fits
                and (not rest or (self.partial and rest > 0))
                and cos.shape[0] in (1, len(x))
                and x.shape[-1] == args[0].shape[-1]
            )
        return fits and len({len(x) for x in turned}) == 1

    def _angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        width = cos.shape[-1] // 2 if self.half else cos.shape[-1]
        return cos[..., :width], sin[..., :width]

    def turns(self, angles: int) -> int:
        """How many channels of a head are turned by rows of this many angles."""
        return 2 * angles if self.pairs[2] == ONCE and not self.half else angles

    def agrees(self, angles: int, heads: int = 1, dtype: torch.dtype = torch.float32) -> bool:
        """Whether the function turns heads of 8 channels as `rotary` does. heads: the dimension of heads. dtype: of the
        channels; angles are float32."""
        draw = torch.Generator().manual_seed(2)
        turned = [torch.randn(2, count, 5, 8, generator=draw).to(dtype) for count in (3, 1)][: self.count]
        turned = [x if heads == 1 else x.transpose(1, 2) for x in turned]
        cos, sin = (torch.randn(2, 5, angles, generator=draw) for _ in range(2))
        with _quietly() as failed:
            made = self.plain(*(x.clone() for x in turned), cos, sin, **({} if heads == 1 else {HEADS: heads}))
        if failed:
            return False
        made = made if isinstance(made, tuple) else (made,)
        expected = [rotated(x, *self._angles(cos, sin), heads, self.pairs, False) for x in turned]
        return len(made) == self.count and all(map(_same, made, expected)) and made[0].dtype == dtype


def _with_fused_rotary(module: nn.Module) -> Callable[..., Any] | None:
    """The module's own forward with fused rotary embeddings, if it calls any."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType):
        return None
    known = forward.__globals__
    replaced = {
        name: fused
        for name in forward.__code__.co_names
        if isinstance(known.get(name), FunctionType) and (fused := _rotary_of(known[name])) is not None
    }
    if not replaced:
        return None
    code, names = forward.__code__, {**known, **replaced}
    alike = FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)
    alike.__kwdefaults__ = forward.__kwdefaults__
    vars(alike)["is_fused"] = True
    return MethodType(alike, module)


def _rotary_of(function: FunctionType) -> _FusedRotary | None:
    """The fused form of a function that turns pairs of channels of each head; None for any other function."""
    most = function.__code__.co_argcount
    least = most - len(function.__defaults__ or ())
    for count, (pairs, half) in itertools.product((2, 1), PAIRS):
        fused = _FusedRotary(function, count, pairs, half)
        angles = 4 if fused.turns(4) == 8 else 8
        if least <= count + 2 <= most and fused.agrees(angles):
            heads = (1, 2) if fused.agrees(angles, heads=2) else (1,)
            wide = fused.agrees(angles, dtype=WIDE[0])
            return replace(fused, partial=fused.agrees(angles // 2), heads=heads, wide=wide)
    return None


# Comparing ------------------------------------------------------------------------------------------------------------


@contextmanager
def _quietly() -> Iterator[list[Exception]]:
    """In the block, foreign code may fail: the list then holds why."""
    failed: list[Exception] = []
    try:
        yield failed
    except Exception as error:
        failed.append(error)


def _same(made: Any, expected: Tensor) -> bool:
    if not isinstance(made, Tensor) or made.shape != expected.shape or not bool(expected.isfinite().all()):
        return False
    largest = expected.abs().max()
    return bool((made.double() - expected.double()).abs().max() <= TOLERANCE * largest) and bool(largest > 0)
