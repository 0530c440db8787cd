"""Muon's hyperparameters, and its passes on the host before and after matrices are orthogonalized.

Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024) has the arithmetic of
`torch.optim.Muon`:

    g = grad_scale * grad
    m = m + (1 - momentum) * (g - m)                  for momentum > 0.5, else as in `adamw.py`
    d = m + (momentum - 1) * (m - g)                  with Nesterov's look ahead, for momentum >= 0.5; else d = m
    o = newton_schulz(d)                              each matrix as a whole
    w = (1 - lr * weight_decay) * w - lr * adjustment * o

The first three lines and the last are passes over elements (`momentum_on_host`, `apply_on_host`); between them the
*direction* d of whole matrices is made orthogonal in place, by torch (`train.torch_muon`). A direction is float32, or
bfloat16 rounded to even. Momentum is a running mean: the docstring of `torch.optim.Muon` says a sum, its code does not.

Parameters that are no matrices are updated by AdamW. Matrices are those that the products of layers read
(`ParamSpec.products`): not embeddings, heads, routers, norms, biases and convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import product
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

import numpy as np

from megatrain.errors import ConfigError, MegaTrainError, NonFinite
from megatrain.optim import kernels
from megatrain.optim.adamw import AdamW, AdamWScalars
from megatrain.optim.kernels import F32, U16, Segment, check_arrays, cut, run
from megatrain.optim.optimizer import Optimizer, Rate, StepScalars, f32, refuse_patterns, too_high
from megatrain.spec import ParamSpec
from megatrain.spec.layout import Matrices
from megatrain.spec.model import NewtonSchulz
from megatrain.spec.validate_fields import Bounds, check_fields, checked

T = TypeVar("T")
A = TypeVar("A")


@dataclass(frozen=True)
class MatrixScalars:
    """The float32 factors of one step for matrices, each computed in float64 and rounded once. Made by
    `Muon.matrix_scalars`.

    The kernels read them by position, so the order of the fields matters.
    """

    momentum: np.float32
    rest: np.float32  # 1 - momentum
    grad_scale: np.float32
    keep: np.float32  # 1 - lr * weight_decay, with the rate before its adjustment

    def packed(self) -> F32:
        """float32[4], in the order of the fields."""
        return np.array(list(vars(self).values()), np.float32)


@dataclass(frozen=True)
class Muon(Optimizer):
    """The hyperparameters of Muon, and of AdamW for the parameters that are no matrices. Names and, except for
    `adjust_lr_fn`, defaults are those of `torch.optim.Muon`. Raises ConfigError for a value out of range.

    lr: peak learning rate of matrices; a schedule from `lr_schedules.py` multiplies it, and AdamW's by the same factor.
    weight_decay: decoupled, per unit of learning rate, before its adjustment.
    momentum, nesterov: decay rate of the running mean of the gradient, and whether the newest gradient counts twice.
    ns_coefficients, ns_steps: of the Newton-Schulz iteration.
    eps: a matrix of directions is divided by its norm, or by eps if that is larger.
    adjust_lr_fn: factor of the learning rate for a matrix of `rows` x `columns`, as stored. With "match_rms_adamw",
    0.2 * sqrt(max(rows, columns)), updates are as long as AdamW's, so that AdamW's rates and `adamw` without a rate of
    its own are right; with "original", sqrt(max(1, rows / columns)), rates are some 20 times larger. torch's default is
    "original". It is not the default here, since a rate tuned for AdamW would then train slowly without a word, while
    a rate tuned for "original" diverges at once under the other.
    newton_schulz: dtype of directions and of the iteration: "bf16" as in torch, or "fp32".
    adamw: the optimizer of the other parameters; None is `AdamW(lr=lr)`, which "original" refuses.
    matrices: pairs (pattern, is matrix) for parameters of 2 or 3 dimensions about which the choice should differ.
    cut: pairs (pattern, parts) for weights that hold several projections one behind the other as equal blocks of rows:
    each block is made orthogonal by itself. All others, fused ones too, are made orthogonal whole, as by
    `torch.optim.Muon`, since nothing tells how the rows of a fused weight belong together: as thirds, as queries and
    fewer keys and values, interleaved, or by heads.
    """

    NAME: ClassVar[str] = "muon"
    STATE: ClassVar[tuple[str, ...]] = ("momentum",)
    """What it keeps of a matrix."""
    lr: Rate = 1e-3
    weight_decay: Rate = 0.1
    momentum: Annotated[float, Bounds(0, 1)] = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: Rate = 1e-7
    ns_steps: Annotated[int, Bounds(0, 99)] = 5
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    newton_schulz: Literal["bf16", "fp32"] = "bf16"
    adamw: AdamW | None = None
    matrices: tuple[tuple[str, bool], ...] = ()
    cut: tuple[tuple[str, Annotated[int, Bounds(2, 1 << 20)]], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if not f32(self.momentum) < 1:
            raise ConfigError(f"momentum {self.momentum} is invalid", where="momentum", fix="give a number in [0, 1)")
        if not 0 < f32(self.eps) < math.inf:
            raise ConfigError(f"{self.eps} is 0 or infinite in float32", where="eps", fix="give 1e-7 or so")
        if self.lr * self.weight_decay >= 1:
            what = f"weight decay {self.weight_decay} is too large for a learning rate of {self.lr}"
            raise ConfigError(what, where="weight_decay", fix="give less than 1 / lr")
        if self.adamw is None and self.adjust_lr_fn == "original":
            what = 'rates of adjust_lr_fn "original" are too high for AdamW, which updates all that is no matrix'
            raise ConfigError(what, where="adamw", fix="give adamw a learning rate of its own, 3e-4 or so")
        for where, pairs in (("matrices", self.matrices), ("cut", self.cut)):
            if not all(pattern for pattern, _ in pairs):
                raise ConfigError("a pattern is empty", where=where, fix='write patterns such as "*.qkv_proj.weight"')
        _ = self.elementwise

    @cached_property
    def elementwise(self) -> AdamW:
        """The optimizer of the parameters that are no matrices."""
        return AdamW(lr=self.lr) if self.adamw is None else self.adamw

    # Parameters -------------------------------------------------------------------------------------------------------

    def described(self, param: ParamSpec) -> ParamSpec:
        """The parameter with what is kept of it, and with the number of matrices that are updated whole.

        Raises ConfigError for one that `matrices` or `cut` names and that is not, or not so, a stack of matrices, and
        if nobody looked which are.
        """
        is_matrix, parts = _value(self.matrices, param.name), _value(self.cut, param.name)
        if param.products < 0:
            what = f"where it was saved, nothing told which parameters are matrices ({param.name} is the first)"
            raise ConfigError(what, where="the model", fix="plan by the model's name or folder, not by a saved plan")
        if is_matrix and not 2 <= len(param.shape) <= 3:
            what = f"{param.name} has {len(param.shape)} dimensions"
            raise ConfigError(what, where="matrices", fix="name parameters of 2 or 3 dimensions")
        stacked = param.products or math.prod(param.shape[:-2])
        chosen = bool(param.products) if is_matrix is None else is_matrix
        count = stacked if chosen and param.numel else 0  # an MLP may have no width (`num_shared_experts: 0`)
        if parts is not None:
            self._refuse_to_cut(param, count, parts)
        if not count:
            return self.elementwise.described(param)
        return replace(param, matrices=count * (parts or 1), state=self.STATE)

    def _refuse_to_cut(self, param: ParamSpec, count: int, parts: int) -> None:
        """Raise ConfigError unless the rows of each of a parameter's matrices make so many equal parts."""
        fix = "leave it out, so that it is updated whole" if count else "leave it out, since AdamW updates it"
        if not count:
            why = "is no matrix"
        elif param.inputs_first:
            why = "is stored with its inputs first, so that its rows are no outputs"
        elif matrix_shape(param.shape, count)[0] % parts:
            why = f"has {matrix_shape(param.shape, count)[0]} rows, which make no {parts} equal parts"
        else:
            return
        raise ConfigError(f"{param.name} {why}", where="cut", fix=fix)

    def refuse_patterns(self, trained: Sequence[ParamSpec], frozen: Iterable[str] = ()) -> None:
        """Raise ConfigError if a pattern matches no parameter, or if two of one list match the same one.

        trained: what trains, as `described`. frozen: names of the parameters that do not.
        """
        names, frozen = [param.name for param in trained], list(frozen)
        refuse_patterns([pattern for pattern, _ in self.matrices], "matrices", names, frozen)
        refuse_patterns([pattern for pattern, _ in self.cut], "cut", names, frozen)
        whole = [param.name for param in trained if param.matrices]
        rates = [pattern for pattern, _ in self.elementwise.learning_rates]
        for where, patterns in (("learning_rates", rates), ("no_decay", self.elementwise.no_decay)):
            for pattern, name in product(patterns, whole):
                if fnmatchcase(name, pattern):
                    what = f"{pattern!r} matches {name}, a matrix, which Muon updates"
                    raise ConfigError(what, where=f"adamw.{where}", fix="match parameters that are no matrices")
        self.elementwise.refuse_patterns([param for param in trained if not param.matrices], frozen)

    @property
    def description(self) -> str:
        """See `Optimizer`; with what updates the other parameters, and its rate."""
        momentum = f"momentum {self.momentum:g}{' with Nesterov' if self.nesterov else ''}"
        others = f"{self.elementwise.description}, learning rate {self.elementwise.lr:g}"
        return f"{super().description}, {momentum}, rates by {self.adjust_lr_fn}; beside matrices {others}"

    @property
    def orthogonalization(self) -> NewtonSchulz:
        """See `Optimizer`."""
        return NewtonSchulz(self.newton_schulz, self.ns_steps)

    def decays(self, name: str, shape: Sequence[int]) -> bool:
        """Whether this parameter, which is no matrix, has weight decay."""
        return self.elementwise.decays(name, shape)

    def group(self, name: str) -> int:
        """The group of this parameter, which is no matrix."""
        return self.elementwise.group(name)

    # A step -----------------------------------------------------------------------------------------------------------

    def scalars(self, *, lr: float, step: int, grad_scale: float = 1.0) -> AdamWScalars:
        """AdamW's factors for the parameters that are no matrices, its peak scaled by lr / self.lr."""
        return self.elementwise.scalars(lr=self._elementwise_rate(lr), step=step, grad_scale=grad_scale)

    def scalars_by_group(self, *, lr: float, step: int, grad_scale: float = 1.0) -> tuple[StepScalars, ...]:
        """As `scalars`, for each group of AdamW's."""
        return self.elementwise.scalars_by_group(lr=self._elementwise_rate(lr), step=step, grad_scale=grad_scale)

    def _elementwise_rate(self, lr: float) -> float:
        if lr != self.lr and not self.lr:
            what = f"AdamW's rate cannot follow {lr}, with a peak of 0"
            raise ConfigError(what, where="lr", fix="give a peak above 0")
        factor = 1.0 if lr == self.lr else lr / self.lr
        return self.elementwise.lr * factor

    def matrix_scalars(self, *, lr: float, grad_scale: float = 1.0) -> MatrixScalars:
        """The factors of an update of matrices at learning rate `lr`.

        Raises ConfigError for an lr out of range, and NonFinite for a `grad_scale` that is not finite.
        """
        lr = checked(lr, Rate, ConfigError, "lr")
        if lr * self.weight_decay >= 1:
            raise too_high(lr)
        if not math.isfinite(grad_scale):
            raise NonFinite(f"the gradients' scale factor is {grad_scale}", where="an update of matrices")
        return MatrixScalars(*map(f32, (self.momentum, 1 - self.momentum, grad_scale, 1 - lr * self.weight_decay)))

    def warm_up(self) -> None:
        """See `Optimizer`."""
        self.elementwise.warm_up()
        _warm_up(self.matrix_scalars(lr=0.0))

    def rate(self, lr: float, rows: int, columns: int) -> np.float32:
        """The factor of a matrix's orthogonal direction at learning rate `lr`: the adjusted rate. Raises ConfigError if
        it is infinite in float32."""
        original = self.adjust_lr_fn == "original"
        factor = math.sqrt(max(1, rows / columns)) if original else 0.2 * math.sqrt(max(rows, columns))
        if f32(lr * factor) == math.inf:
            raise too_high(lr)
        return f32(lr * factor)


@dataclass(frozen=True, slots=True)
class MomentumArrays(Generic[A]):
    """Momentum, gradient and direction of n matrix elements: numpy on the host, tensors on the device."""

    momenta: A
    """float32."""
    gradient: A
    """float32 or bfloat16 (bits, on the host)."""
    direction: A
    """Written: float32 or bfloat16 (bits, on the host)."""


def momentum_on_host(
    arrays: MomentumArrays[np.ndarray],
    scalars: MatrixScalars,
    segments: Sequence[Segment],
    *,
    nesterov: bool,
    threads: int = 1,
) -> None:
    """Take a gradient into the running mean, and write the directions that are to be made orthogonal.

    Each of `segments` is (start, stop, moves) in elements. Where it does not move, the mean has this gradient already,
    as after an interrupted step, and only the direction is written, with the same bits. Elements outside all segments
    stay unchanged. Raises MegaTrainError for arrays or segments that do not fit together.
    """
    written = {"momentum": arrays.momenta, "direction": arrays.direction}
    check_arrays(written, {"grad": arrays.gradient})
    blocks = cut(segments, arrays.momenta.size)
    args = arrays.momenta, arrays.gradient, arrays.direction, scalars.packed(), nesterov
    run(kernels.muon_momentum, *args, blocks=blocks, threads=threads)


def apply_on_host(
    masters: tuple[np.ndarray, ...],
    direction: U16 | F32,
    keep: np.float32,
    rates: F32,
    segments: Sequence[Segment],
    *,
    threads: int = 1,
) -> None:
    """Move masters of n elements, (hi, lo) or (weight,), along their orthogonal directions: w * keep - rate * d.

    rates: float32; each of `segments` is (start, stop, index of its rate). Elements outside all segments stay
    unchanged. Raises MegaTrainError for arrays or segments that do not fit together.
    """
    names = ("weight",) if len(masters) == 1 else ("hi", "lo")
    check_arrays(dict(zip(names, masters, strict=True)), {"direction": direction})
    if any(not 0 <= index < len(rates) for _, _, index in segments):
        raise MegaTrainError("a segment has no rate", where=f"{len(segments)} segments with {len(rates)} rates")
    run(kernels.muon_apply, masters, direction, keep, rates, blocks=cut(segments, direction.size), threads=threads)


def _warm_up(scalars: MatrixScalars) -> None:
    """Compile the kernels for every dtype."""
    rates = np.zeros(1, np.float32)
    for of_direction, of_gradient in product((np.uint16, np.float32), repeat=2):
        arrays = MomentumArrays(np.zeros(1, np.float32), np.zeros(1, of_gradient), np.zeros(1, of_direction))
        momentum_on_host(arrays, scalars, [(0, 1, True)], nesterov=True)
        for masters in ((np.zeros(1, np.float32),), (np.zeros(1, np.uint16), np.zeros(1, np.uint16))):
            apply_on_host(masters, arrays.direction, scalars.keep, rates, [(0, 1, 0)])


def matrix_shape(shape: Sequence[int], matrices: int) -> tuple[int, int]:
    """(rows, columns) of each of the `matrices` of a parameter of this shape, one behind the other."""
    return math.prod(shape) // (matrices * shape[-1]), shape[-1]


def orthogonalize_flops(matrices: int, rows: int, columns: int, steps: int) -> int:
    """Floating-point operations of the products of `steps` steps of Newton-Schulz on so many matrices."""
    return 2 * matrices * steps * Matrices(0, 1, rows, columns).products


def _value(pairs: Sequence[tuple[str, T]], name: str) -> T | None:
    """What stands beside the pattern that matches, if one does."""
    return next((value for pattern, value in pairs if fnmatchcase(name, pattern)), None)
