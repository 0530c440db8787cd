"""Replaces functions of a layer by fused ones (`model.fused`), found by what they compute.

No list of classes or names: a module, or a function that an attention module calls, is run on random data and weights
in float32, and replaced if a formula of a small table gives the same there. Found are RMS norms (with a weight, with 1
+ weight, without) and layer norms that a module spells out; MLPs of the form down(activation(gate(x)) * up(x)), also
with gate and up in one product; and rotary embeddings that turn the halves of a head. What fits no formula stays as it
is. Children of an MLP are called as before, so that adapters on them count, and parameters keep their names.

A replaced module has a `forward` of its own. A function that attention calls is replaced for that module alone, by a
copy of its `forward` that looks the name up elsewhere; the library's module is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from megatrain.model.chunked_layers import MOST_RANDOM_NUMEL, ExpandedRowLinear, random_like
from megatrain.model.fused import (
    ACTIVATIONS,
    gated,
    halves,
    rms_norm,
    rotary,
    rotated,
)
from megatrain.model.peak import LimitNumel
from megatrain.model.ports import PortedModel, roots_of

TOLERANCE = 2e-6
"""Largest difference that counts as rounding in float32, relative to the largest value."""
ROWS = (3, 5)
SCALES = (1e-4, 1e-3, 1.0, 30.0)
"""Of inputs: the smallest tell the epsilon of a norm, the largest a limit."""
WIDTH = 24
"""Channels of a norm that any number would do for."""
EPSILONS = (1e-6, 1e-5, 1e-8, 1e-12, torch.finfo(torch.float32).eps, 0.0)
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
            if getattr(vars(module).get("forward"), "is_fused", False):
                del module.forward
                ported.profiled = None


def fuse(layer: nn.Module) -> dict[str, str]:
    """Replace what can be fused in a layer; returns the name of each module that was changed and what it computes.

    The layer may be on the meta device. Raises nothing for foreign code that fails: it stays as it is.
    """
    changed: dict[str, str] = {}
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        for name, module in layer.named_modules():
            if "forward" in vars(module) or (forward := _fused_forward(module)) is None:
                continue
            module.forward = forward
            changed[name] = "rotary embedding" if isinstance(forward, MethodType) else str(forward)
    return changed


def _fused_forward(module: nn.Module) -> Callable[..., Any] | None:
    children = list(module.children())
    if not children:
        return _norm_of(module)
    if len(children) <= MOST_CHILDREN and (found := _mlp_of(module)) is not None:
        return found
    return _with_fused_rotary(module)


class _Fused:
    """Replaces the forward of a module, `plain`, where that is called with one tensor."""

    plain: Callable[..., Any]
    is_fused = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return self.plain(*args, **kwargs)
        return self.compute(args[0])

    def compute(self, x: Tensor) -> Tensor:
        raise NotImplementedError


# Norms ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Norm(_Fused):
    module: nn.Module
    plain: Callable[..., Any]
    weight: str | None
    """Name of its parameter."""
    eps: float
    offset: float | None = None
    """What an RMS norm adds to its weight; None for a layer norm."""

    def __str__(self) -> str:
        return "layer norm" if self.offset is None else "RMS norm"

    def compute(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.module._parameters[self.weight]
        if self.offset is None:
            return functional.layer_norm(x, x.shape[-1:], weight, None, self.eps)
        return rms_norm(x, weight, self.offset, self.eps)


def _norm_of(module: nn.Module) -> _Fused | None:
    """The fused form of a norm with no parameter or one, [channels]; None for anything else."""
    parameters = list(module.named_parameters())
    if type(module).__module__.startswith("torch.") or len(parameters) > 1 or any(p.dim() != 1 for _, p in parameters):
        return None
    name, width = (parameters[0][0], parameters[0][1].numel()) if parameters else (None, WIDTH)
    draw = torch.Generator().manual_seed(0)
    weights = {each: torch.randn(width, generator=draw) for each, _ in parameters}
    weight = weights.get(name or "")
    inputs = [scale * torch.randn(*ROWS, width, generator=draw) + scale / 2 for scale in SCALES]
    with _quietly() as failed:
        outputs = [functional_call(module, weights, (x,)) for x in inputs]
        half = functional_call(module, {each: w.bfloat16() for each, w in weights.items()}, (inputs[2].bfloat16(),))
    if failed or not _are_norms(outputs, inputs) or half.dtype != torch.bfloat16:
        return None
    plain, wide = module.forward, None if weight is None else weight.double()

    def gives(formula: Callable[[Tensor], Tensor]) -> bool:
        return all(_same(output, formula(x.double())) for output, x in zip(outputs, inputs, strict=True))

    for eps in _epsilons(module):
        for offset in (0.0, 1.0) if weight is not None else (0.0,):
            if gives(lambda x, offset=offset, eps=eps: _exact_rms_norm(x, wide, offset, eps)):  # type: ignore[misc]
                return _Norm(module, plain, name, eps, offset)
        if gives(lambda x, eps=eps: functional.layer_norm(x, x.shape[-1:], wide, None, eps)):  # type: ignore[misc]
            return _Norm(module, plain, name, eps)
    return None


def _exact_rms_norm(x: Tensor, weight: Tensor | None, offset: float, eps: float) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * (weight + offset)


def _are_norms(outputs: Sequence[Any], inputs: Sequence[Tensor]) -> bool:
    """Whether the outputs could be those of a norm: they hardly grow with the inputs."""
    if not all(isinstance(y, Tensor) and y.shape == x.shape for y, x in zip(outputs, inputs, strict=True)):
        return False
    return bool(outputs[-1].abs().max() < 2 * outputs[-2].abs().max() + 1e-6)


def _epsilons(module: nn.Module) -> list[float]:
    """Small numbers that the module holds, and common ones."""
    held = [value for value in vars(module).values() if type(value) is float and 0 <= value < 0.1]
    return list(dict.fromkeys([*held, *EPSILONS]))


# Gated MLPs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _GatedMlp(_Fused):
    plain: Callable[..., Any]
    first: nn.Module
    """The child that is called first: the gate, `up` if not `gate_first`, or both in one."""
    second: nn.Module | None
    last: nn.Module
    gate_first: bool
    activation: str

    def __str__(self) -> str:
        return f"MLP gated by {self.activation}"

    def compute(self, x: Tensor) -> Tensor:
        gate, up = self.first(x), None if self.second is None else self.second(x)
        if not self.gate_first:
            assert up is not None
            gate, up = up, gate
        made: Tensor = self.last(gated(gate, up, self.activation))
        return made


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
        first, *more = [set[_Form]() if run is None else set(_gated_forms(run)) for run in runs]
        if forms := first.intersection(*more):  # activations of large numbers hardly differ
            return _GatedMlp(module.forward, *min(forms, key=lambda form: list(ACTIVATIONS).index(form[-1])))
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
    modes = {part: part.training for part in module.modules()}
    module.train()  # so that dropout fits no formula
    try:
        with _quietly() as failed, LimitNumel(MOST_RANDOM_NUMEL), ExpandedRowLinear():
            output = functional_call(module, weights, (x,))
    finally:
        for hook in hooks:
            hook.remove()
        for part, mode in modes.items():
            part.training = mode
    return None if failed else (x, calls, output)


_Form = tuple[nn.Module, nn.Module | None, nn.Module, bool, str]


def _gated_forms(run: tuple[Tensor, list[_ChildCall], Tensor]) -> Iterator[_Form]:
    """Each (first, second, last, whether the first is the gate, activation) that fits the run."""
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
        for activation, function in ACTIVATIONS.items():
            first, other = halves(gate, up)
            if _same(product, function(first) * other):
                yield inner[0].child, second, last[0].child, gate_first, activation


# Rotary embeddings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _FusedRotary:
    """Replaces a function of queries, keys, cosines and sines. partial: whether it also turns the first channels of a
    head alone."""

    plain: Callable[..., Any]
    partial: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 4 or kwargs or not self._fits(*args):
            return self.plain(*args, **kwargs)
        return rotary(*args, heads=1)

    def _fits(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
        whole = cos.shape[-1] == q.shape[-1]
        same = cos.shape == sin.shape and q.dtype == k.dtype == cos.dtype == sin.dtype and len(q) == len(k)
        fits = same and q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.shape[1] == q.shape[2] == k.shape[2]
        fits = fits and q.shape[-1] == k.shape[-1]
        return fits and (whole or self.partial) and cos.shape[0] in (1, len(q)) and not cos.requires_grad


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
    """The fused form of a function that turns the halves of each head; None for any other function."""
    least = function.__code__.co_argcount - len(function.__defaults__ or ())
    if not least <= 4 <= function.__code__.co_argcount:
        return None
    draw = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, heads, 5, 8, generator=draw) for heads in (3, 1))

    def turns(channels: int) -> bool:
        cos, sin = (torch.randn(2, 5, channels, generator=draw) for _ in range(2))
        with _quietly() as failed:
            made = function(q.clone(), k.clone(), cos, sin)
        if failed or not isinstance(made, tuple) or len(made) != 2:
            return False
        return all(_same(turned, rotated(x, cos, sin, 1, False)) for turned, x in zip(made, (q, k), strict=True))

    return _FusedRotary(function, partial=turns(4)) if turns(8) else None


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


__all__ = ["fuse", "fuse_layers", "unfuse_layers"]
