"""The stock trainers' losses: their formulas, the metrics TRL logs, and the weight of the router auxiliary loss.

The router auxiliary loss belongs to a micro-batch, and trainers weight it differently in a step of several. In a
`Trainer`, and in TRL before 1.15, the model's forward adds all of it to the loss of each micro-batch. From 1.15 on TRL
adds its mean over the micro-batches. A loss computed from logits does not include it at all.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.losses import LogitsLoss, LossFn, SmoothedCrossEntropy

FUSED_HEAD_NAME = "add_fused_lm_head"
"""A name that the modules of TRL's trainers have from 1.15 on. (In a source tree, `__version__` may be wrong.)"""


class TokenLoss(LogitsLoss):
    """Cross-entropy, or dynamic fine-tuning (Wu et al., "On the Generalization of SFT", 2025), with TRL's metrics.

    smoothing: label smoothing of the cross-entropy, 0 to 1. dynamic: dynamic fine-tuning instead.
    """

    def __init__(self, smoothing: float, dynamic: bool) -> None:
        self.smoothing, self.dynamic = smoothing, dynamic

    def __call__(self, logits: Tensor, labels: Tensor, **own: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the losses, and sums of the entropy and of correct predictions."""
        log_probs = functional.log_softmax(logits, dim=-1)
        losses = functional.nll_loss(log_probs, labels, reduction="none")
        if self.dynamic:
            losses = losses * torch.exp(-losses).detach()
        elif self.smoothing:
            losses = (1 - self.smoothing) * losses - self.smoothing * log_probs.mean(dim=-1)
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum()
            correct = (logits.argmax(dim=-1) == labels).sum()
        return losses.sum(), {"entropy": entropy, "mean_token_accuracy": correct}


def stock_loss(trainer: Any) -> LossFn | None:
    """The loss that a trainer's arguments describe; `None` is cross-entropy over the step's target tokens."""
    smoothing = float(trainer.args.label_smoothing_factor or 0.0)
    if hasattr(trainer, "_metrics"):  # TRL's trainers log metrics
        return TokenLoss(smoothing, _is_dynamic(trainer))
    return SmoothedCrossEntropy(smoothing) if smoothing else None


def router_coefficient(trainer: Any) -> float | None:
    """TRL's coefficient of the router auxiliary loss; `None` if TRL sets none."""
    if not getattr(trainer, "aux_loss_enabled", False):
        return None
    return float(getattr(trainer, "router_aux_loss_coef", trainer.args.router_aux_loss_coef))


def router_weights(trainer: Any, count: int, ranks: int) -> list[float]:
    """The weight of the router auxiliary loss in a step's loss, for each of a rank's `count` micro-batches."""
    adds_it = any(hasattr(sys.modules.get(base.__module__), FUSED_HEAD_NAME) for base in type(trainer).__mro__)
    dynamic = _is_dynamic(trainer)
    if (dynamic and not adds_it) or (trainer.args.label_smoothing_factor and not dynamic):  # computed from logits
        return [0.0] * count
    return [1.0 / (count * ranks) if adds_it else 1.0] * count


def _is_dynamic(trainer: Any) -> bool:
    return getattr(trainer.args, "loss_type", "nll") == "dft"


__all__ = ["TokenLoss", "router_coefficient", "router_weights", "stock_loss"]
