"""What a `Trainer` takes for its optimizer: parameter groups whose learning rate a scheduler moves, and no state.

The engine updates while it streams, so `step` does nothing; moments live in the engine and in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatrain.errors import ConfigError
from megatrain.optim import AdamW


class EngineOptimizer(torch.optim.Optimizer):
    """The groups of a `Trainer`: what decays, and what does not."""

    def __init__(self, model: nn.Module, decaying: set[str], adamw: AdamW) -> None:
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for name, p in trained if name in decaying], "weight_decay": adamw.weight_decay},
            {"params": [p for name, p in trained if name not in decaying], "weight_decay": 0.0},
        ]
        super().__init__([group for group in groups if group["params"]], {"lr": adamw.lr})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing: the engine has updated already."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: gradients are not kept here."""

    @property
    def lr(self) -> float:
        """The learning rate of the next step. Raises `ConfigError` where groups have several."""
        rates = {float(group["lr"]) for group in self.param_groups}
        if len(rates) != 1:
            what = f"the groups of parameters have learning rates {sorted(rates)}"
            raise ConfigError(what, where="StreamedTrainer", fix="the engine takes one for all")
        return rates.pop()

    def state_dict(self) -> dict[str, Any]:
        """The groups, with the learning rate as it is; there are no moments here."""
        return {**super().state_dict(), "state": {}}


__all__ = ["EngineOptimizer"]
