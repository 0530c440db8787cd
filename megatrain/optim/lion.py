"""Lion (Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023): 4 bytes of a parameter are kept
where AdamW keeps 8. The arithmetic is that of the authors' own loop in PyTorch.

    g = grad_scale * grad
    c = b1 * m + (1 - b1) * g
    m = b2 * m + (1 - b2) * g
    w = (1 - lr * weight_decay) * w - lr * sign(c)

Every weight moves by the learning rate, whatever its gradient. The authors advise a rate 3 to 10 times smaller than
AdamW's, and a weight decay as many times larger. Their loop fuses multiply-adds where a processor does; here every
operation rounds once, so that the host and a device compute the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from megatrain.optim import kernels
from megatrain.optim.optimizer import Betas, Optimizer, Rate, StepScalars, f32


@dataclass(frozen=True)
class LionScalars(StepScalars):
    """The factors of one step. Made by `Lion.scalars`."""

    kernel = staticmethod(kernels.lion)
    lr: np.float32
    b1: np.float32
    rest1: np.float32  # 1 - b1
    b2: np.float32
    rest2: np.float32  # 1 - b2

    def change(self, kept: tuple[Any, ...], gradient: Any) -> Any:
        """See `StepScalars`."""
        (m,) = kept
        blend = (m * float(self.b1)).add_(gradient * float(self.rest1))
        m.mul_(float(self.b2)).add_(gradient * float(self.rest2))
        return (blend > 0).float().sub_((blend < 0).float()).mul_(float(self.lr))


@dataclass(frozen=True)
class Lion(Optimizer):
    """The Lion hyperparameters of a run, with the defaults of the paper. Raises ConfigError for a value out of range.

    betas: decay rates of the momentum in what a step takes the sign of, and in what is kept. Others as in `AdamW`.
    """

    NAME: ClassVar[str] = "lion"
    STATE: ClassVar[tuple[str, ...]] = ("m",)
    lr: Rate = 1e-4
    betas: Betas = (0.9, 0.99)
    weight_decay: Rate = 0.0
    no_decay: tuple[str, ...] = ()
    learning_rates: tuple[tuple[str, Rate], ...] = ()

    def scalars(self, *, lr: float, step: int, grad_scale: float = 1.0) -> LionScalars:
        """See `Optimizer`."""
        lr, (b1, b2) = self.checked_rate(lr, step, grad_scale), self.betas
        return LionScalars(*map(f32, (1 - lr * self.weight_decay, grad_scale, lr, b1, 1 - b1, b2, 1 - b2)))
