"""The stock trainers' losses: their formulas, the metrics TRL logs, and the weight of the router auxiliary loss.

The router auxiliary loss is of a micro-batch, so trainers differ in what it counts for in a step of several. In a
`Trainer`, and in TRL before 1.15, the model's forward adds it to the loss of each micro-batch, whole. From then on TRL
adds it itself, as the mean over the micro-batches. Where a loss is computed from logits it is not added at all.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.losses import LogitsLoss, LossFn, SmoothedCrossEntropy

FUSED_HEAD = "add_fused_lm_head"
"""What the modules of TRL's trainers have from 1.15 on. (A source tree tells the version of what is installed.)"""


class TokenLoss(LogitsLoss):
    """Cross-entropy, or dynamic fine-tuning (Wu et al., "On the Generalization of SFT", 2025), and what TRL logs."""

    def __init__(self, smoothing: float, dynamic: bool) -> None:
        self.smoothing, self.dynamic = smoothing, dynamic

    def __call__(self, logits: Tensor, labels: Tensor, **own: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum over the tokens, with the sums of the entropy and of right guesses."""
        log_probs = functional.log_softmax(logits, dim=-1)
        losses = functional.nll_loss(log_probs, labels, reduction="none")
        if self.dynamic:
            losses = losses * torch.exp(-losses).detach()
        elif self.smoothing:
            losses = (1 - self.smoothing) * losses - self.smoothing * log_probs.mean(dim=-1)
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum()
            right = (logits.argmax(dim=-1) == labels).sum()
        return losses.sum(), {"entropy": entropy, "mean_token_accuracy": right}


def stock_loss(trainer: Any) -> LossFn | None:
    """What a trainer's arguments ask for; `None` is cross-entropy over the step's target tokens."""
    smoothing = float(trainer.args.label_smoothing_factor or 0.0)
    if hasattr(trainer, "_metrics"):  # TRL's, which are logged
        return TokenLoss(smoothing, _is_dynamic(trainer))
    return SmoothedCrossEntropy(smoothing) if smoothing else None


def router_coefficient(trainer: Any) -> float | None:
    """What TRL multiplies the router auxiliary loss by; `None` where it adds none, or the model alone decides."""
    if not getattr(trainer, "aux_loss_enabled", False):
        return None
    return float(getattr(trainer, "router_aux_loss_coef", trainer.args.router_aux_loss_coef))


def router_weights(trainer: Any, count: int, ranks: int) -> list[float]:
    """What the router auxiliary loss of each of `count` micro-batches of a rank counts for in the loss of a step."""
    adds_it = any(hasattr(sys.modules.get(base.__module__), FUSED_HEAD) for base in type(trainer).__mro__)
    dynamic = _is_dynamic(trainer)
    if (dynamic and not adds_it) or (trainer.args.label_smoothing_factor and not dynamic):  # of logits
        return [0.0] * count
    return [1.0 / (count * ranks) if adds_it else 1.0] * count


def _is_dynamic(trainer: Any) -> bool:
    return getattr(trainer.args, "loss_type", "nll") == "dft"


__all__ = ["TokenLoss", "router_coefficient", "router_weights", "stock_loss"]
