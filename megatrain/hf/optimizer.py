"""The optimizer that a `Trainer` sees: parameter groups whose hyperparameters the engine reads, without state.

The engine updates while it streams, so `step` does nothing; moments live in the engine and in its checkpoints. To write
them into `optimizer.pt` as well would cost two thirds more of disk and time for each checkpoint, and their size again
in memory, so a stock `Trainer` cannot go on from it, and is to say why: see `MOMENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
NAMES = {"lr": "learning rates", "betas": "betas", "eps": "values of eps", "weight_decay": "weight decays"}


class EngineOptimizer(torch.optim.Optimizer):
    """The groups of a `Trainer`: what decays, and what does not; behind them two such for each of `learning_rates`.
    `stepped` is called when a step is asked for."""

    def __init__(
        self, model: nn.Module, adamw: AdamW, lr: float | None = None, stepped: Callable[[], None] = lambda: None
    ) -> None:
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        rates = [("", adamw.lr if lr is None else lr), *adamw.learning_rates]
        groups = [
            {
                "params": [p for name, p in trained if (adamw.group(name), adamw.decays(name)) == (group, decays)],
                "weight_decay": adamw.weight_decay if decays else 0.0,
                "lr": rate,
                "pattern": pattern,
            }
            for group, (pattern, rate) in enumerate(rates)
            for decays in (True, False)
        ]
        rest = {"betas": adamw.betas, "eps": adamw.eps, "weight_decay": adamw.weight_decay}
        super().__init__(groups, {"lr": groups[0]["lr"], **rest})
        self._made_of, self._members, self._stepped = adamw, self._in_groups(), stepped
        self._peak = rates[0][1]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Only tell: the engine has updated already."""
        self._stepped()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: gradients are not kept here."""

    @property
    def lr(self) -> float:
        """The learning rate of the next step, of parameters without one of their own."""
        return float(self._of_all("lr", self.param_groups[:2]))

    @property
    def adamw(self) -> AdamW:
        """The rest of the hyperparameters of the next step, as the groups have them; where there are several learning
        rates, all of these.

        Raises `ConfigError` for values out of range, and for what one AdamW for all parameters cannot do.
        """
        fix = "set it in the training arguments, or leave it as it was"
        if self._in_groups() != self._members:
            raise ConfigError("parameters have been put into other groups", where=WHERE, fix=fix)
        for name in ("amsgrad", "maximize"):
            if any(group.get(name) for group in self.param_groups):
                raise ConfigError(f"{name} of a group of parameters cannot be honoured", where=WHERE, fix=fix)
        for other in self.param_groups[1::2]:
            if other["weight_decay"] and other["params"]:
                what = f"weight_decay={other['weight_decay']} of the parameters that do not decay cannot be honoured"
                raise ConfigError(what, where=WHERE, fix="set that of the first group alone")
        given: dict[str, Any] = {"betas": tuple(self._of_all("betas")), "eps": self._of_all("eps")}
        given["weight_decay"] = self._of_all("weight_decay", self.param_groups[::2])
        if self._made_of.learning_rates:
            pairs = (self.param_groups[at : at + 2] for at in range(2, len(self.param_groups), 2))
            rates = (float(self._of_all("lr", pair)) for pair in pairs)
            patterns = (pattern for pattern, _ in self._made_of.learning_rates)
            given |= {"lr": self.lr, "learning_rates": tuple(zip(patterns, rates, strict=True))}
        return replace(self._made_of, **given)

    @property
    def adamw_of_peaks(self) -> AdamW:
        """The same with the learning rates that the scheduler started from, for a checkpoint."""
        return replace(self.adamw, lr=self._peak, learning_rates=self._made_of.learning_rates)

    def _of_all(self, name: str, groups: Sequence[dict[str, Any]] = ()) -> Any:
        """What these groups have, or all, but for empty ones. (Groups of an older checkpoint have fewer entries.)"""
        groups = groups or self.param_groups
        groups = [group for group in groups if group["params"]] or groups
        found = [group.get(name, self.defaults[name]) for group in groups]
        if any(each != found[0] for each in found):
            what = f"the groups of parameters have {NAMES[name]} {sorted(found)}"
            fix = "engine_options={'optimizer': AdamW(learning_rates=...)} has rates by names" if name == "lr" else ""
            raise ConfigError(what, where=WHERE, fix=fix or "the engine takes one for all")
        return found[0]

    def _in_groups(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The groups, with the learning rate as it is, and in place of moments the words where they are."""
        found = super().state_dict()
        numbers = [number for group in found["param_groups"] for number in group["params"]]
        return {**found, "state": {number: {"step": MOMENTS} for number in numbers[:1]}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The groups. Raises `ConfigError` where they are those of other patterns, whose rates these would take."""
        before, now = (
            [each.get("pattern", "") for each in of] for of in (state_dict["param_groups"], self.param_groups)
        )
        if before != now:
            what = f"was saved with learning_rates of {_listed(before)}, and now has them of {_listed(now)}"
            raise ConfigError(what, where="optimizer.pt", fix="give the same patterns in the same order, or begin anew")
        super().load_state_dict({**state_dict, "state": {}})


def _listed(patterns: Sequence[str]) -> str:
    return ", ".join(map(repr, dict.fromkeys(filter(None, patterns)))) or "no pattern"


__all__ = ["EngineOptimizer"]
