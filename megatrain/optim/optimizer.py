"""The base class of optimizers: which state a trained parameter has, the factors of a step, and the arithmetic.

A plug-in is two frozen dataclasses: its hyperparameters, an `Optimizer`, and the factors of one step, a `StepScalars`,
with a loop in `kernels.py` and the same arithmetic in operations of torch. Nothing else knows which optimizers there
are: memory, schedules, plans and checkpoints read what `Optimizer.described` has written into the model's
specification. `adamw.py` is the first, `lion.py` the shortest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar

import numpy as np

from megatrain.errors import ConfigError, NonFinite
from megatrain.optim.clip import sum_of_squares
from megatrain.optim.kernels import F32, U16, Kernel, Segment, check_arrays, cut, run
from megatrain.optim.split_master import HostArrays, StateArrays, join, split
from megatrain.spec import ModelSpec, ParamSpec
from megatrain.spec.model import AS_IN_TORCH, NewtonSchulz
from megatrain.spec.validate_fields import Bounds, check_fields, checked

Rate = Annotated[float, Bounds(0)]
Betas = tuple[Annotated[float, Bounds(0, 1)], Annotated[float, Bounds(0, 1)]]

VECTORS = "vectors"
"""The word in `Optimizer.no_decay` for parameters of at most one dimension. Patterns alone would take the path of a
module for a norm's (`roberta_prelayernorm.encoder...dense.weight`) and miss norms of other names (`ln_f`)."""

OLDEST = "adamw"
"""The optimizer of checkpoints that name none."""


@dataclass(frozen=True)
class StepScalars(ABC):
    """The float32 factors of one step of one group of parameters, each computed in float64 and rounded once, and the
    arithmetic with them, on the host and on a device: the same bits.

    A subclass is a frozen dataclass. Its kernel reads the factors by position: `decay` and `grad_scale`, then those of
    the subclass in the order of its fields.
    """

    kernel: ClassVar[Kernel]
    """The pass on the host: a static method, called as those in `kernels.py` are."""
    decay: np.float32
    """1 - lr * weight_decay, for the segments that decay."""
    grad_scale: np.float32
    """Of the gradient before anything else, to clip it."""

    def packed(self) -> F32:
        """The factors in the order of the fields, float32."""
        return np.array(list(vars(self).values()), np.float32)

    @abstractmethod
    def change(self, kept: tuple[Any, ...], gradient: Any) -> Any:
        """The amount to subtract from the decayed weights; updates the optimizer's state in place.

        kept: the state, in the order of `Optimizer.STATE`. gradient: scaled already. All are float32 tensors on one
        device. Only operations that round once, in the order of the kernel, so no `addcmul` and no `alpha=`.
        """


class Optimizer(ABC):
    """The hyperparameters of a run, a frozen dataclass. This base has what optimizers share: groups of parameters with
    learning rates of their own, and decoupled weight decay."""

    NAME: ClassVar[str]
    """Its name in configurations and checkpoints."""
    STATE: ClassVar[tuple[str, ...]]
    """Names of the arrays that it keeps, one float32 for each trained element, in their order in memory."""
    __dataclass_fields__: ClassVar[dict[str, Any]]
    lr: float
    weight_decay: float
    no_decay: tuple[str, ...]
    learning_rates: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        betas = getattr(self, "betas", ())
        if not all(f32(beta) < 1 for beta in betas):
            raise ConfigError(f"decay rates {betas} are invalid", where="betas", fix="give two numbers in [0, 1)")
        highest = max([self.lr, *(rate for _, rate in self.learning_rates)])
        if highest * self.weight_decay >= 1:
            raise ConfigError(
                f"weight decay {self.weight_decay} is too large for a learning rate of {highest}",
                where="weight_decay",
                fix="give less than 1 / lr",
            )
        if not all(self.no_decay):
            raise ConfigError("a pattern is empty", where="no_decay", fix='write ("vectors", "*embed_tokens*")')
        if not all(pattern for pattern, _ in self.learning_rates):
            raise ConfigError("a pattern is empty", where="learning_rates", fix='write (("*embed_tokens*", 1e-5),)')

    # Parameters -------------------------------------------------------------------------------------------------------

    def described(self, param: ParamSpec) -> ParamSpec:
        """The parameter with what is kept of it if it trains."""
        return replace(param, state=self.STATE, matrices=0)

    @property
    def orthogonalization(self) -> NewtonSchulz:
        """Precision and steps of Newton-Schulz. An optimizer that updates no matrix whole has the default."""
        return AS_IN_TORCH

    def decays(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the parameter of this name and shape has weight decay."""
        is_vector = len(shape) < 2 and VECTORS in self.no_decay
        return not is_vector and not any(fnmatchcase(name, pattern) for pattern in self.no_decay)

    def group(self, name: str) -> int:
        """The group of the parameter of this name: its position in `learning_rates`, counted from 1, or 0 if it
        uses `lr`."""
        patterns = (pattern for pattern, _ in self.learning_rates)
        return next((group for group, pattern in enumerate(patterns, 1) if fnmatchcase(name, pattern)), 0)

    def refuse_patterns(self, trained: Sequence[ParamSpec], frozen: Iterable[str] = ()) -> None:
        """Raise ConfigError if a pattern of `learning_rates` matches no parameter, or if two match the same one.

        trained: the parameters that train, as `described`. frozen: names of those that do not.
        """
        patterns, names = [pattern for pattern, _ in self.learning_rates], [param.name for param in trained]
        refuse_patterns(patterns, "learning_rates", names, frozen)

    # A step -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def scalars(self, *, lr: float, step: int, grad_scale: float = 1.0) -> StepScalars:
        """The factors of update number `step`, counted from 1, at learning rate `lr`.

        Raises ConfigError for a step below 1 or an lr out of range, and NonFinite for a `grad_scale` that is
        not finite.
        """

    def scalars_by_group(self, *, lr: float, step: int, grad_scale: float = 1.0) -> tuple[StepScalars, ...]:
        """The `scalars` of each group, indexed by `group`. The other groups' peaks are scaled by lr / self.lr.
        Raises as `scalars` does."""
        first = self.scalars(lr=lr, step=step, grad_scale=grad_scale)
        if self.learning_rates and lr != self.lr and not self.lr:
            fix = "give a peak above 0, or freeze the parameters that should not train"
            raise ConfigError(f"learning_rates cannot follow {lr}, with a peak of 0", where="lr", fix=fix)
        factor = 1.0 if lr == self.lr else lr / self.lr
        rates = (rate * factor for _, rate in self.learning_rates)
        return (first, *(self.scalars(lr=rate, step=step, grad_scale=grad_scale) for rate in rates))

    def checked_rate(self, lr: float, step: int, grad_scale: float) -> float:
        """The learning rate in float64. Raises as `scalars` does."""
        if step < 1:
            raise ConfigError(f"update number {step}", where="step", fix="count updates from 1")
        lr = checked(lr, Rate, ConfigError, "lr")
        if lr * self.weight_decay >= 1 or f32(lr) == math.inf:
            raise too_high(lr)
        if not math.isfinite(grad_scale):
            raise NonFinite(f"the gradients' scale factor is {grad_scale}", where=f"update number {step}")
        return lr

    def warm_up(self) -> None:
        """Compile every kernel for every dtype, or load it from numba's cache, ahead of the first step."""
        scalars = self.scalars(lr=0.0, step=1)
        for grad in (np.zeros(1, np.uint16), np.zeros(1, np.float32)):
            moments = tuple(np.zeros(1, np.float32) for _ in self.STATE)
            hi, lo = split(np.zeros(1, np.float32))
            update_on_host(StateArrays(hi, lo, moments), grad, scalars, [(0, 1, True)])
            update_on_host(StateArrays(join(hi, lo), None, moments), grad, scalars, [(0, 1, True)])
            sum_of_squares(grad)

    # For people and in JSON -------------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """Its name and settings as a phrase, without the learning rate, which follows a schedule."""
        return f"{type(self).__name__}, weight decay {self.weight_decay:g}"

    def as_json(self) -> dict[str, Any]:
        """Name and hyperparameters in the form for checkpoints; see `optimizer_from`."""
        return {"name": self.NAME, **{field.name: _plain(getattr(self, field.name)) for field in fields(self)}}


def described(model: ModelSpec, optimizer: Optimizer) -> ModelSpec:
    """The model with what the optimizer keeps of each trained parameter. All that is planned, allocated and saved
    follows from it."""
    units = []
    for unit in model.units:
        params = tuple(optimizer.described(param) if param.trainable else param for param in unit.params)
        units.append(unit if params == unit.params else replace(unit, params=params))
    return replace(model, units=tuple(units), newton_schulz=optimizer.orthogonalization)


def optimizer_from(facts: Mapping[str, Any]) -> Optimizer:
    """The optimizer of which `Optimizer.as_json` returned this. Raises ConfigError for one that is unknown here."""
    kind = kind_named(facts.get("name", OLDEST))
    return kind(**{key: _value(value) for key, value in facts.items() if key != "name"})


def kind_named(name: str, where: str = "optimizer") -> type[Optimizer]:
    """The optimizer of this name. Raises ConfigError, at `where`, if there is none."""
    kinds = {kind.NAME: kind for kind in Optimizer.__subclasses__()}
    if name not in kinds:
        raise ConfigError(f"{name!r} is no optimizer here", where=where, fix=f"use {' or '.join(sorted(kinds))}")
    return kinds[name]


def kind_described(model: ModelSpec) -> str | None:
    """The name of the optimizer for which a model was `described`; None for AdamW, the default."""
    kept = {param.state for unit in model.units for param in unit.params if param.trainable}
    return next((kind.NAME for kind in Optimizer.__subclasses__() if kind.STATE in kept and kind.NAME != OLDEST), None)


def _plain(value: Any) -> Any:
    if isinstance(value, Optimizer):
        return value.as_json()
    return [*map(_plain, value)] if isinstance(value, tuple) else value


def _value(plain: Any) -> Any:
    if isinstance(plain, Mapping):
        return optimizer_from(plain)
    return tuple(map(_value, plain)) if isinstance(plain, list | tuple) else plain


# Checks ---------------------------------------------------------------------------------------------------------------


def f32(value: float) -> np.float32:
    """Round to float32; infinite if out of range."""
    with np.errstate(over="ignore"):
        return np.float32(value)


def too_high(lr: float) -> ConfigError:
    """The error to raise for a learning rate with which an update would not be finite, or turn weights around."""
    return ConfigError(f"a learning rate of {lr} is too high", where="lr", fix="stay below 1 / weight_decay")


def refuse_patterns(patterns: Iterable[str], where: str, trained: Sequence[str], frozen: Iterable[str]) -> None:
    """Raise ConfigError, at `where`, if a pattern matches no trained name, or if two match the same one."""
    matched: dict[str, str] = {}
    for pattern in patterns:
        of_this = [name for name in trained if fnmatchcase(name, pattern)]
        if both := [name for name in of_this if name in matched]:
            what = f"{both[0]} matches both {matched[both[0]]!r} and {pattern!r}"
            raise ConfigError(what, where=where, fix="let each parameter match one pattern at most")
        if not of_this:
            near = get_close_matches(pattern.strip("*"), trained, n=2, cutoff=0.0)
            others = ", only frozen ones" if any(fnmatchcase(name, pattern) for name in frozen) else ""
            what = f"no trained parameter matches {pattern!r}{others}"
            fix = f"names look like {' and '.join(map(repr, near))}" if near else "leave it out"
            raise ConfigError(what, where=where, fix=fix)
        matched |= dict.fromkeys(of_this, pattern)


# On the host ----------------------------------------------------------------------------------------------------------


def update_on_host(
    state: HostArrays, grad: U16 | F32, scalars: StepScalars, segments: Sequence[Segment], threads: int = 1
) -> None:
    """Perform one step in place on masters and what the optimizer keeps, n elements each.

    `grad`, float32[n] or bfloat16 bits (uint16[n]), is only read. Each of `segments` is (start, stop, decays) in
    elements; elements outside all segments stay unchanged. Raises MegaTrainError for arrays or segments that do
    not fit together.
    """
    names = ("weight",) if state.lo is None else ("hi", "lo")
    moments = {f"moments[{place}]": moment for place, moment in enumerate(state.moments)}
    written = dict(zip(names, state.masters, strict=True)) | moments
    check_arrays(written, {"grad": grad})
    blocks = cut(segments, grad.size)
    run(scalars.kernel, state.masters, state.moments, grad, scalars.packed(), blocks=blocks, threads=threads)
