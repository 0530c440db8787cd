"""What a `Trainer` takes for its optimizer: parameter groups whose numbers the engine takes, and no state.

The engine updates while it streams, so `step` does nothing; moments live in the engine and in its checkpoints. To write
them into `optimizer.pt` as well would cost two thirds more of disk and time for each checkpoint, and their size again
in memory, so a stock `Trainer` cannot go on from it, and is to say why: see `MOMENTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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

WHERE = "StreamedTrainer"
NAMES = {"lr": "learning rates", "betas": "betas", "eps": "values of eps"}


class EngineOptimizer(torch.optim.Optimizer):
    """The groups of a `Trainer`: what decays, and what does not. `stepped` is called when a step is asked for."""

    def __init__(
        self, model: nn.Module, adamw: AdamW, lr: float | None = None, stepped: Callable[[], None] = lambda: None
    ) -> None:
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for name, p in trained if adamw.decays(name)], "weight_decay": adamw.weight_decay},
            {"params": [p for name, p in trained if not adamw.decays(name)], "weight_decay": 0.0},
        ]
        super().__init__(groups, {"lr": adamw.lr if lr is None else lr, "betas": adamw.betas, "eps": adamw.eps})
        self._made_of, self._members, self._stepped = adamw, self._in_groups(), stepped

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Only tell: the engine has updated already."""
        self._stepped()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: gradients are not kept here."""

    @property
    def lr(self) -> float:
        """The learning rate of the next step. Raises `ConfigError` where groups have several."""
        return float(self._of_all("lr"))

    @property
    def adamw(self) -> AdamW:
        """The rest of the hyperparameters of the next step, as the groups have them.

        Raises `ConfigError` for values out of range, and for what one AdamW for all parameters cannot do.
        """
        fix = "set it in the training arguments, or leave it as it was"
        if self._in_groups() != self._members:
            raise ConfigError("parameters have been put into other groups", where=WHERE, fix=fix)
        for name in ("amsgrad", "maximize"):
            if any(group.get(name) for group in self.param_groups):
                raise ConfigError(f"{name} of a group of parameters cannot be honoured", where=WHERE, fix=fix)
        decaying, other = self.param_groups
        if other["weight_decay"] and other["params"]:
            what = f"weight_decay={other['weight_decay']} of the parameters that do not decay cannot be honoured"
            raise ConfigError(what, where=WHERE, fix="set that of the first group alone")
        betas, eps = tuple(self._of_all("betas")), self._of_all("eps")
        return replace(self._made_of, betas=betas, eps=eps, weight_decay=decaying["weight_decay"])

    def _of_all(self, name: str) -> Any:
        """What all groups have. (Groups of an older checkpoint have fewer entries.)"""
        found = [group.get(name, self.defaults[name]) for group in self.param_groups]
        if any(each != found[0] for each in found):
            what = f"the groups of parameters have {NAMES[name]} {sorted(found)}"
            raise ConfigError(what, where=WHERE, fix="the engine takes one for all")
        return found[0]

    def _in_groups(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The groups, with the learning rate as it is, and in place of moments the words where they are."""
        found = super().state_dict()
        numbers = [number for group in found["param_groups"] for number in group["params"]]
        return {**found, "state": {number: {"step": MOMENTS} for number in numbers[:1]}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The groups."""
        super().load_state_dict({**state_dict, "state": {}})


__all__ = ["EngineOptimizer"]
