"""AdamW in one fused pass over host memory, with the arithmetic of `torch.optim.AdamW`.

It is Loshchilov and Hutter's ("Decoupled weight decay regularization", ICLR 2019):

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
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from megatrain.errors import ConfigError
from megatrain.optim import kernels
from megatrain.optim.optimizer import Betas, Optimizer, Rate, StepScalars, f32, too_high


@dataclass(frozen=True)
class AdamWScalars(StepScalars):
    """The factors of one step. Made by `AdamW.scalars`."""

    kernel = staticmethod(kernels.adamw)
    step_size: np.float32  # lr / (1 - b1**t)
    root_scale: np.float32  # 1 / sqrt(1 - b2**t)
    eps: np.float32
    rest1: np.float32  # 1 - b1
    b2: np.float32
    rest2: np.float32  # 1 - b2

    def change(self, kept: tuple[Any, ...], gradient: Any) -> Any:
        """See `StepScalars`. Roots are computed in float64 and rounded, which gives the correctly rounded float32 root
        (Figueroa, 1995); float32 roots of math libraries often are not."""
        m, v = kept
        difference = gradient - m
        if self.rest1 < 0.5:
            m.add_(difference.mul_(float(self.rest1)))
        else:
            m.copy_(difference.mul_(float(self.rest1) - 1).add_(gradient))
        del difference
        v.mul_(float(self.b2)).add_((gradient * float(self.rest2)).mul_(gradient))
        root = v.double().sqrt_().float().mul_(float(self.root_scale)).add_(float(self.eps))
        return (m * float(self.step_size)).div_(root)


@dataclass(frozen=True)
class AdamW(Optimizer):
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

    NAME: ClassVar[str] = "adamw"
    STATE: ClassVar[tuple[str, ...]] = ("m", "v")
    lr: Rate = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: Rate = 0.01
    no_decay: tuple[str, ...] = ()
    learning_rates: tuple[tuple[str, Rate], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < f32(self.eps) < math.inf:
            raise ConfigError(f"{self.eps} is 0 or infinite in float32", where="eps", fix="give 1e-8 or so")

    def scalars(self, *, lr: float, step: int, grad_scale: float = 1.0) -> AdamWScalars:
        """See `Optimizer`."""
        lr, (b1, b2) = self.checked_rate(lr, step, grad_scale), self.betas
        if f32(lr / (1 - b1**step)) == math.inf:
            raise too_high(lr)
        factors = (
            1 - lr * self.weight_decay,
            grad_scale,
            lr / (1 - b1**step),
            1 / math.sqrt(1 - b2**step),
            self.eps,
            1 - b1,
            b2,
            1 - b2,
        )
        return AdamWScalars(*map(f32, factors))
