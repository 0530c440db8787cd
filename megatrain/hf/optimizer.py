"""What a `Trainer` takes for its optimizer: parameter groups whose learning rate a scheduler moves, and no state.

The engine updates while it streams, so `step` does nothing; moments live in the engine and in its checkpoints. To write
them into `optimizer.pt` as well would cost two thirds more of disk and time for each checkpoint, and their size again
in memory, so a stock `Trainer` cannot go on from it, and is to say why: see `MOMENTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatrain.errors import ConfigError
from megatrain.optim import AdamW

MOMENTS = (
    b"this checkpoint is of a streamed trainer, and its optimizer's moments are in files of MegaTrain: resume with "
    b"megatrain.hf.streamed, or start from the weights of this folder as a model"
)
"""In the place of the first parameter's `step` in `optimizer.pt`. AdamW converts it to a float as it loads, which fails
with these words; they are bytes because it would take a text apart."""


class EngineOptimizer(torch.optim.Optimizer):
    """The groups of a `Trainer`: what decays, and what does not. `stepped` is called when a step is asked for."""

    def __init__(
        self, model: nn.Module, decaying: set[str], adamw: AdamW, stepped: Callable[[], None] = lambda: None
    ) -> None:
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for name, p in trained if name in decaying], "weight_decay": adamw.weight_decay},
            {"params": [p for name, p in trained if name not in decaying], "weight_decay": 0.0},
        ]
        super().__init__(groups, {"lr": adamw.lr})
        self._stepped = stepped

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Only tell: the engine has updated already."""
        self._stepped()

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
        """The groups, with the learning rate as it is, and in place of moments the words where they are."""
        found = super().state_dict()
        numbers = [number for group in found["param_groups"] for number in group["params"]]
        return {**found, "state": {number: {"step": MOMENTS} for number in numbers[:1]}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The groups."""
        super().load_state_dict({**state_dict, "state": {}})


__all__ = ["EngineOptimizer"]
