"""AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019) as one fused pass, with the
arithmetic of `torch.optim.AdamW`.

    g = grad_scale * grad
    m = m + (1 - b1) * (g - m)                        for b1 > 0.5, else g - b1 * (g - m), as `torch.lerp` does
    v = b2 * v + ((1 - b2) * g) * g
    w = (1 - lr * weight_decay) * w - (lr / (1 - b1**t) * m) / (sqrt(v) / sqrt(1 - b2**t) + eps)

Operations and their order are those of torch on the CPU, where `foreach`, `fused` and the plain loop agree, so the same
gradients overflow and underflow: `v` becomes infinite, and the weight stops moving, at a scaled gradient of 5.8e20
(with b2 = 0.999), not at 1.8e19, where the gradient's square overflows. Finite results differ from torch's by rounding
only: torch fuses some multiply-adds, depending on the processor. On a GPU torch orders some operations differently;
ours stay the same.

The factors are computed in float64 and rounded to float32 once per step; everything else is float32, one rounding per
operation. On the split master (`split_master.py`) with bfloat16 gradients `update_on_host` reads 14 bytes per
parameter and writes 12. `reference_update` in `tests/references.py` defines the result bit for bit, for any number of
threads. The passes hold no state and may run concurrently on disjoint arrays.

Not supported: AMSGrad, `maximize`, sparse gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar

import numpy as np

from megatrain.errors import ConfigError, NonFinite
from megatrain.optim import kernels
from megatrain.optim.clip import sum_of_squares
from megatrain.optim.kernels import F32, U16, Segment, check_arrays, cut, run
from megatrain.optim.split_master import HostArrays, StateArrays, join, split
from megatrain.spec.validate_fields import Bounds, check_fields, checked

_DTYPES: dict[str, tuple[type, ...]] = {
    "hi": (np.uint16,),
    "lo": (np.uint16,),
    "weight": (np.float32,),
    "m": (np.float32,),
    "v": (np.float32,),
    "grad": (np.uint16, np.float32),
}


@dataclass(frozen=True)
class StepScalars:
    """The float32 factors of one step, each computed in float64 and rounded once. Made by `AdamW.scalars`.

    The kernels read them by position, so the order of the fields matters.
    """

    decay: np.float32  # 1 - lr * weight_decay, for the segments that decay
    step_size: np.float32  # lr / (1 - b1**t)
    root_scale: np.float32  # 1 / sqrt(1 - b2**t)
    eps: np.float32
    rest1: np.float32  # 1 - b1
    b2: np.float32
    rest2: np.float32  # 1 - b2
    grad_scale: np.float32

    def packed(self) -> F32:
        """float32[8], in the order of the fields."""
        return np.array(list(vars(self).values()), np.float32)


VECTORS = "vectors"
"""The word in `AdamW.no_decay` for parameters of at most one dimension. Patterns alone would take the path of a module
for a norm's (`roberta_prelayernorm.encoder...dense.weight`) and miss norms of other names (`ln_f`)."""


@dataclass(frozen=True)
class AdamW:
    """The AdamW hyperparameters of a run, with the defaults of `torch.optim.AdamW`. Raises ConfigError for a value
    out of range.

    lr: peak learning rate; a schedule from `lr_schedules.py` multiplies it.
    betas: decay rates of the running means of the gradient and of its square.
    eps: added to the root; must be positive, since a gradient that was always zero would otherwise give 0 / 0.
    weight_decay: decoupled, per unit of learning rate.
    no_decay: parameters without weight decay: `vectors` for all of at most one dimension (norms and biases, whatever
    they are called), and case-sensitive glob patterns of whole names.
    learning_rates: pairs (pattern, peak learning rate) for parameters that should not use `lr`. A schedule multiplies
    all peaks by the same factor. The parameters of one pattern form a *group*, and so do those without one.
    """

    STATE: ClassVar[tuple[str, ...]] = ("m", "v")
    """The parts of state that it keeps, one float32 for each trained element, in their order in memory."""
    lr: Annotated[float, Bounds(0)] = 1e-3
    betas: tuple[Annotated[float, Bounds(0, 1)], Annotated[float, Bounds(0, 1)]] = (0.9, 0.999)
    eps: Annotated[float, Bounds(0)] = 1e-8
    weight_decay: Annotated[float, Bounds(0)] = 0.01
    no_decay: tuple[str, ...] = ()
    learning_rates: tuple[tuple[str, Annotated[float, Bounds(0)]], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if not all(f32(beta) < 1 for beta in self.betas):
            raise ConfigError(f"decay rates {self.betas} are invalid", where="betas", fix="give two numbers in [0, 1)")
        if not 0 < f32(self.eps) < math.inf:
            raise ConfigError(f"{self.eps} is 0 or infinite in float32", where="eps", fix="give 1e-8 or so")
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

    def decays(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the parameter of this name and shape has weight decay."""
        is_vector = len(shape) < 2 and VECTORS in self.no_decay
        return not is_vector and not any(fnmatchcase(name, pattern) for pattern in self.no_decay)

    def group(self, name: str) -> int:
        """The group of the parameter of this name: its position in `learning_rates`, counted from 1, or 0 if it
        uses `lr`."""
        patterns = (pattern for pattern, _ in self.learning_rates)
        return next((group for group, pattern in enumerate(patterns, 1) if fnmatchcase(name, pattern)), 0)

    def refuse_patterns(self, trained: Sequence[str], frozen: Iterable[str] = ()) -> None:
        """Raise ConfigError if a pattern of `learning_rates` matches no parameter, or if two match the same one.

        trained, frozen: names of the parameters that train and of those that do not.
        """
        refuse_patterns([pattern for pattern, _ in self.learning_rates], "learning_rates", trained, frozen)

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

    def scalars(self, *, lr: float, step: int, grad_scale: float = 1.0) -> StepScalars:
        """The factors of update number `step`, counted from 1, at learning rate `lr`.

        Raises ConfigError for a step below 1 or an lr out of range, and NonFinite for a `grad_scale` that is
        not finite.
        """
        if step < 1:
            raise ConfigError(f"update number {step}", where="step", fix="count updates from 1")
        lr = checked(lr, Annotated[float, Bounds(0)], ConfigError, "lr")
        if lr * self.weight_decay >= 1 or f32(lr / (1 - self.betas[0] ** step)) == math.inf:
            raise ConfigError(f"a learning rate of {lr} is too high", where="lr", fix="stay below 1 / weight_decay")
        if not math.isfinite(grad_scale):
            raise NonFinite(f"the gradients' scale factor is {grad_scale}", where=f"update number {step}")
        b1, b2 = self.betas
        factors = (
            1 - lr * self.weight_decay,
            lr / (1 - b1**step),
            1 / math.sqrt(1 - b2**step),
            self.eps,
            1 - b1,
            b2,
            1 - b2,
            grad_scale,
        )
        return StepScalars(*map(f32, factors))


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


def f32(value: float) -> np.float32:
    """Round to float32; infinite if out of range."""
    with np.errstate(over="ignore"):
        return np.float32(value)


def update_on_host(
    state: HostArrays, grad: U16 | F32, scalars: StepScalars, segments: Sequence[Segment], threads: int = 1
) -> None:
    """Perform one AdamW step in place on masters and moments of n elements each.

    `grad`, float32[n] or bfloat16 bits (uint16[n]), is only read. Each of `segments` is (start, stop, decays) in
    elements; elements outside all segments stay unchanged. Raises MegaTrainError for arrays or segments that do
    not fit together.
    """
    names = ("weight",) if state.lo is None else ("hi", "lo")
    written = dict(zip((*names, *AdamW.STATE), (*state.masters, *state.moments), strict=True))
    check_arrays(written, {"grad": grad}, _DTYPES)
    blocks = cut(segments, grad.size)
    run(kernels.adamw, state.masters, state.moments, grad, scalars.packed(), blocks=blocks, threads=threads)


def warm_up() -> None:
    """Compile every kernel for every dtype, or load it from numba's cache, ahead of the first step."""
    scalars = AdamW().scalars(lr=0.0, step=1)
    hi, lo = split(np.zeros(1, np.float32))
    weight = join(hi, lo)
    for grad in _one_gradient_of_each_dtype():
        moments = tuple(np.zeros(1, np.float32) for _ in AdamW.STATE)
        update_on_host(StateArrays(hi, lo, moments), grad, scalars, [(0, 1, True)])
        update_on_host(StateArrays(weight, None, moments), grad, scalars, [(0, 1, True)])
        sum_of_squares(grad)


def _one_gradient_of_each_dtype() -> Iterator[U16 | F32]:
    yield np.zeros(1, np.uint16)
    yield np.zeros(1, np.float32)
